"""The command `co2analysis bound`."""

from typing import Annotated

import typer

from analysis.cli.constants import (
    AskedDelay,
    Gap,
    Heterogeneity,
    InnerStep,
    Keep,
    Momentum,
    MostPenalty,
    Noise,
    OuterStep,
    Penalty,
    Predict,
    Rounds,
    Smoothness,
    Tau,
    Workers,
    lateness,
    number,
)
from analysis.cli.json_output import print_json
from analysis.convergence.setting import ONE_ROUND
from co2sim.cli import options
from co2sim.common import validation
from co2sim.common.tables import console


def bound(  # noqa: PLR0913, PLR0917 - one argument per constant
    smoothness: Smoothness,
    noise: Noise,
    gap: Gap,
    workers: Workers,
    rounds: Rounds,
    local_steps: Tau,
    heterogeneity: Heterogeneity = 0.0,
    inner_step: InnerStep = None,
    outer_step: OuterStep = 1.0,
    momentum: Momentum = 0.0,
    penalty: Penalty = 1.0,
    most_penalty: MostPenalty = None,
    delay: AskedDelay = ONE_ROUND,
    keep: Keep = None,
    predict: Predict = None,
    convex: Annotated[  # noqa: FBT002
        bool, typer.Option("--convex", help="Every worker's function is convex.")
    ] = False,
    allowed_delay: Annotated[
        float | None,
        number(
            "--allowed-delay",
            "Also the longest delay that raises the bound by at most this share, such as 0.2.",
        ),
    ] = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """The bound of the mean squared gradient for one setting, by term; or "infeasible".

    A delay in local steps is that of averages that are used without a restart.
    """
    from analysis.convergence.bound_report import (  # noqa: PLC0415 - scipy, only for this command
        answer,
        bound_to_dict,
        print_bound,
    )
    from analysis.convergence.setting import Setting  # noqa: PLC0415

    if allowed_delay is not None:
        validation.at_least("--allowed-delay", allowed_delay, 0)

    setting = Setting(
        smoothness=smoothness,
        noise=noise,
        heterogeneity=heterogeneity,
        gap=gap,
        workers=workers,
        rounds=rounds,
        local_steps=local_steps,
        inner_step=1.0 if inner_step is None else inner_step,
        outer_step=outer_step,
        momentum=momentum,
        penalty=penalty,
        most_penalty=most_penalty,
        delay=delay.rounds,
        late=lateness(delay, keep, predict),
        convex=convex,
    )
    answered = answer(setting, tune=inner_step is None, price=allowed_delay)
    if json_:
        print_json(bound_to_dict(answered))
    else:
        print_bound(console(), answered)
