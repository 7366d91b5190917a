"""Options for the constants of a problem and of a run, by their names in the theory."""

from typing import Annotated, Any

import typer

from analysis.convergence.setting import Delay, Late, delay
from co2sim.cli import options
from co2sim.common.errors import OptionError


def number(flag: str, words: str) -> Any:
    """An option that is a number."""
    return typer.Option(flag, parser=options.number(flag), metavar="N", help=words)


def whole(flag: str, words: str) -> Any:
    """An option that is a whole number."""
    return typer.Option(flag, parser=options.whole(flag), metavar="N", help=words)


_SMOOTHNESS = number("--smoothness", "L: Lipschitz constant of every worker's gradient.")
_NOISE = number("--noise", "Sigma squared: variance of one worker's gradient.")
_GAP = number("--gap", "Delta: loss at the start minus its lowest value.")

Smoothness = Annotated[float, _SMOOTHNESS]
Noise = Annotated[float, _NOISE]
Gap = Annotated[float, _GAP]
AskedSmoothness = Annotated[float | None, _SMOOTHNESS]
"""These three are for a command that says itself which of them are missing."""
AskedNoise = Annotated[float | None, _NOISE]
AskedGap = Annotated[float | None, _GAP]
Heterogeneity = Annotated[
    float, number("--heterogeneity", "Zeta squared: mean of |grad f_i - grad f|^2.")
]
Workers = Annotated[int, whole("--workers", "G: workers whose models are averaged.")]
Rounds = Annotated[int, whole("--rounds", "T: rounds; each ends with an average.")]
Tau = Annotated[int, whole("--local-steps", "Tau: steps between averages.")]
InnerStep = Annotated[
    float | None,
    number(
        "--inner-step",
        "Gamma: learning rate of local steps; default: the one with the least bound.",
    ),
]
OuterStep = Annotated[float, number("--outer-step", "Alpha: learning rate of the outer step.")]
Momentum = Annotated[float, number("--momentum", "Beta: outer momentum, in [0, 1).")]
Penalty = Annotated[float, number("--penalty", "Lambda: constant divisor of averages, 1 or more.")]
MostPenalty = Annotated[
    float | None, number("--most-penalty", "Largest Lambda, if it varies from 1 on.")
]
AskedDelay = Annotated[
    Delay,
    typer.Option(
        "--delay",
        parser=delay,
        metavar="DELAY",
        help="When an average is used: 3 or '3 steps' after its launch, without a restart; '1"
        " round' later with a restart, as in CO2; 0 is SlowMo or local SGD.",
    ),
]
Keep = Annotated[
    float | None,
    number("--keep", "Share of the steps since its launch that a late average leaves; default: 1."),
]
Predict = Annotated[
    float | None,
    number("--predict", "Share that the mean displacement predicts instead; default: 0."),
]


def lateness(when: Delay, keep: float | None, predict: float | None) -> Late | None:
    """How averages are late by local steps; None where they are late by rounds."""
    if when.steps is not None:
        kept = 1.0 if keep is None else keep
        return Late(steps=when.steps, keep=kept, predict=predict or 0.0)
    if keep is not None or predict is not None:
        raise OptionError(
            f"--keep and --predict are for a delay in local steps, such as 3; --delay is {when}"
        )
    return None


def all_given(
    smoothness: float | None, noise: float | None, gap: float | None
) -> tuple[float, float, float]:
    """The three, or one error that names all that are missing."""
    if smoothness is not None and noise is not None and gap is not None:
        return smoothness, noise, gap
    constants = {"--smoothness": smoothness, "--noise": noise, "--gap": gap}
    missing = [flag for flag, value in constants.items() if value is None]
    raise OptionError(
        f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; the bound needs"
        " --smoothness, --noise and --gap"
    )
