"""The commands of `co2analysis` about convergence: tau, trends, verify."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from analysis.convergence.setting import ONE_ROUND, Delay, Late, delay, late_average
from co2sim.cli import options
from co2sim.common import validation
from co2sim.common.cli import print_json
from co2sim.common.errors import OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.tables import console
from co2sim.prediction.case import OPEN_BATCH, Case
from co2sim.strategies import parse


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
Workers = Annotated[int | None, whole("--workers", "G: workers whose models are averaged.")]
Rounds = Annotated[int | None, whole("--rounds", "T: rounds; each ends with an average.")]
Tau = Annotated[int | None, whole("--local-steps", "Tau: steps between averages.")]
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
    number(
        "--keep",
        "Share of the steps since its launch that a late average leaves; default: that of CO2, 1 in"
        " rounds of less than 8 steps, else 1/2.",
    ),
]
Predict = Annotated[
    float | None,
    number("--predict", "Share that the mean displacement predicts instead; default: 1 - keep."),
]
GradientBound = Annotated[
    float | None,
    number(
        "--gradient-bound",
        "M: the largest partial derivative of any worker's loss; default: sqrt(2 L Delta).",
    ),
]
Convex = Annotated[bool, typer.Option("--convex", help="Every worker's function is convex.")]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="A training: its setting, its constants (--estimate), and its clipping residual.",
    ),
]


def lateness(
    when: Delay, local_steps: int, keep: float | None, predict: float | None
) -> Late | None:
    """How averages are late by local steps; None where they are late by rounds."""
    if when.steps is not None:
        return late_average(when.steps, local_steps, keep, predict)
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


def tau(  # noqa: PLR0913 - one argument per option
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Folders of real runs whose rounds were measured."),
    ] = None,
    *,
    smoothness: AskedSmoothness = None,
    noise: AskedNoise = None,
    gap: AskedGap = None,
    heterogeneity: Heterogeneity = 0.0,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Simulate rounds on this cluster.")
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="As in `co2sim run`.")] = "gpt2-xl",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            "-s",
            help="co2, co2.published, slowmo or local_sgd with options, but no tau. delay=auto: of"
            " each tau, the least delay that hides its averages.",
        ),
    ] = "co2",
    gpus: Annotated[int | None, options.flag("gpus")] = None,
    micro_batch: Annotated[Any, options.flag("micro_batch")] = OPEN_BATCH["micro_batch"],
    accumulation: Annotated[int | None, options.flag("accumulation")] = None,
    global_batch: Annotated[Any, options.flag("global_batch")] = OPEN_BATCH["global_batch"],
    recompute: Annotated[Any, options.flag("recompute")] = OPEN_BATCH["recompute"],
    overrides: Annotated[list[str] | None, options.flag("overrides")] = None,
    taus: Annotated[
        str | None,
        typer.Option(help="Taus to simulate; default: 1 to 256, and longer while that is better."),
    ] = None,
    times: Annotated[
        str, typer.Option("--times", help="Times of training to compare at.")
    ] = "1 h, 10 h, 100 h",
    target: Annotated[
        float | None, number("--target", "Also the time until the bound is this small.")
    ] = None,
    outer_step: OuterStep = 1.0,
    momentum: Momentum = 0.0,
    penalty: Penalty = 1.0,
    most_penalty: MostPenalty = None,
    gradient_bound: GradientBound = None,
    json_: options.Json = False,
) -> None:
    """Find the best tau: round times, simulated or measured, joined with the bound of the error.

    --smoothness, --noise and --gap are required, and either folders of runs or --cluster. The best
    tau has the least bound after a time of training. The shortest one that hides its averages,
    which `co2sim run` takes for tau=auto, is named beside it. The batch is that of `co2sim run`.
    """
    from analysis.convergence import tau as advice  # noqa: PLC0415 - scipy, only for this command
    from analysis.convergence.setting import Setting  # noqa: PLC0415
    from analysis.convergence.tau import print_tau, tau_to_dict  # noqa: PLC0415

    _refuse_tau(strategy)
    advice.averaging(parse(strategy))
    of_simulation = {"--cluster": cluster, "--gpus": gpus, "--taus": taus, "--set": overrides}
    _check_source(runs, of_simulation)
    if target is not None:
        validation.above("--target", target, 0)
    if gradient_bound is not None:
        validation.at_least("--gradient-bound", gradient_bound, 0)
    smoothness, noise, gap = all_given(smoothness, noise, gap)
    problem = Setting(
        smoothness=smoothness,
        noise=noise,
        heterogeneity=heterogeneity,
        gap=gap,
        workers=1,
        rounds=1,
        local_steps=1,
        inner_step=1.0,
        outer_step=outer_step,
        momentum=momentum,
        penalty=penalty,
        most_penalty=most_penalty,
    )
    lengths = [options.seconds("--times", text) for text in times.split(",")]
    hides = None
    if cluster is None:
        timings = advice.measured(runs or [])
    else:
        case = advice.settled(
            Case(
                cluster=cluster,
                model=model,
                strategy=strategy,
                gpus=gpus,
                micro_batch=micro_batch,
                accumulation=accumulation,
                global_batch=global_batch,
                recompute=recompute,
                overrides=options.pairs(overrides, "--set"),
            )
        )
        hides = advice.hiding(case)
        timings = (
            advice.searched(problem, case, lengths)
            if taus is None
            else advice.simulated(case, [options.whole("--taus")(t) for t in taus.split(",")])
        )
    advices = [(length, advice.after(problem, timings, length)) for length in lengths]
    reached = [] if target is None else [advice.until(problem, t, target) for t in timings]
    assumed = advice.assumptions(problem, timings)
    if json_:
        print_json(tau_to_dict(timings, advices, reached, assumed, gradient_bound, hides=hides))
        return
    print_tau(console(), timings, advices, target, reached, assumed, gradient_bound, hides=hides)


def _refuse_tau(strategy: str) -> None:
    """Raise OptionError for a strategy with a tau: it would be dropped."""
    if re.search(r"[:(,]\s*tau\s*=", strategy):
        raise OptionError(
            f"--strategy is {strategy!r}, but tau is what this command chooses; leave it out, or"
            " name the taus to compare with --taus"
        )


def _check_source(runs: list[Path] | None, simulation_only: Mapping[str, object]) -> None:
    """Rounds come from runs or from a simulation, with the options of that alone."""
    if not runs and simulation_only["--cluster"] is None:
        raise OptionError(
            "the times of rounds are missing: give folders of real runs, or simulate a cluster with"
            " --cluster"
        )
    refused = [flag for flag, value in simulation_only.items() if value]
    if runs and refused:
        raise OptionError(
            "the times of rounds come from real runs or from a simulation:"
            f" {', '.join(refused)} does not apply to {runs[0]}"
        )


def trends(
    workers: Annotated[int, whole("--workers", "G: number of workers.")] = 4,
    steps: Annotated[int, whole("--steps", "Local steps of every run.")] = 512,
    taus: Annotated[str, typer.Option(help="Taus to try.")] = "1,4,16",
    seeds: Annotated[int, whole("--seeds", "Runs of every cell.")] = 3,
    target: Annotated[float, number("--target", "Training loss to reach.")] = 0.2,
    *,
    by_label: Annotated[
        bool, typer.Option("--by-label", help="Give every worker other digits, by label.")
    ] = False,
    json_: options.Json = False,
) -> None:
    """Train a small network with CO2, SlowMo and local SGD; compare its trends with the bound."""
    from analysis.convergence import trends as networks  # noqa: PLC0415 - scipy, only for this command

    validation.whole("--workers", workers, 1, networks.MAX_WORKERS)
    validation.whole("--steps", steps, 1)
    validation.whole("--seeds", seeds, 1)
    if steps * seeds > networks.MAX_KEPT:
        raise OptionError(
            f"--steps times --seeds is {steps * seeds:,}; it must be at most"
            f" {networks.MAX_KEPT:,}: every step is kept in memory"
        )
    wanted = [options.whole("--taus")(text) for text in taus.split(",")]
    if not all(1 <= each <= steps for each in wanted):
        raise OptionError(f"--taus is {taus!r}; each must be from 1 to --steps, {steps}")
    lines = list(
        networks.trends(
            workers=workers,
            steps=steps,
            taus=wanted,
            seeds=seeds,
            target=target,
            by_label=by_label,
        )
    )
    if json_:
        print_json(networks.to_dict(lines))
        return
    networks.print_all(console(), lines, target)


def verify(  # noqa: PLR0913, PLR0917 - one argument per constant
    smoothness: AskedSmoothness = None,
    noise: AskedNoise = None,
    gap: AskedGap = None,
    workers: Workers = None,
    rounds: Rounds = None,
    local_steps: Tau = None,
    heterogeneity: Heterogeneity = 0.0,
    inner_step: InnerStep = None,
    outer_step: OuterStep = 1.0,
    momentum: Momentum = 0.0,
    penalty: Penalty = 1.0,
    most_penalty: MostPenalty = None,
    delay: AskedDelay = ONE_ROUND,
    keep: Keep = None,
    predict: Predict = None,
    convex: Convex = False,  # noqa: FBT002
    phi: Annotated[
        float | None,
        number("--phi", "Clip the momentum at this, in units of a sum of gradients."),
    ] = None,
    run: Run = None,
    seeds: Annotated[int, whole("--seeds", "Runs of each problem; 2 or more.")] = 16,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Check the bound of one setting against simulated runs; exit code 1 if they violate it.

    The setting is that of `co2analysis bound`. It runs on a quadratic and, without --convex, on a
    function that is not convex, which have its smoothness, gap, noise and heterogeneity.
    """
    from analysis.convergence import bound as bounds  # noqa: PLC0415 - scipy, only for this command
    from analysis.convergence import verify as runs  # noqa: PLC0415

    if phi is not None:
        validation.above("--phi", phi, 0)
    setting, tune, _ = _setting(
        run,
        smoothness=smoothness,
        noise=noise,
        gap=gap,
        workers=workers,
        rounds=rounds,
        local_steps=local_steps,
        inner_step=inner_step,
        heterogeneity=heterogeneity,
        convex=convex,
        method=_Method(outer_step, momentum, penalty, most_penalty, delay, keep, predict),
    )
    runs.check_size(setting, seeds)
    setting = bounds.tuned(setting) if tune else setting
    with progress_bar("simulating") as progress:
        compared = runs.compare(setting, seeds=seeds, phi=phi, progress=progress)
    if json_:
        print_json(runs.to_dict(setting, compared))
    else:
        runs.print_comparison(console(), setting, compared)
    if words := runs.violation(compared):
        typer.echo(words, err=True)
        raise typer.Exit(1)


def bound(  # noqa: PLR0913, PLR0917 - one argument per constant
    smoothness: AskedSmoothness = None,
    noise: AskedNoise = None,
    gap: AskedGap = None,
    workers: Workers = None,
    rounds: Rounds = None,
    local_steps: Tau = None,
    heterogeneity: Heterogeneity = 0.0,
    inner_step: InnerStep = None,
    outer_step: OuterStep = 1.0,
    momentum: Momentum = 0.0,
    penalty: Penalty = 1.0,
    most_penalty: MostPenalty = None,
    delay: AskedDelay = ONE_ROUND,
    keep: Keep = None,
    predict: Predict = None,
    convex: Convex = False,  # noqa: FBT002
    allowed_delay: Annotated[
        float | None,
        number(
            "--allowed-delay",
            "Also the longest delay that raises the bound by at most this share, such as 0.2.",
        ),
    ] = None,
    clip_residual: Annotated[
        float | None,
        number(
            "--clip-residual",
            "Also the bound of a run whose momentum had an error of this size, by clipping or by"
            " quantized averages: root mean square over rounds, in units of one gradient.",
        ),
    ] = None,
    residual_decay: Annotated[
        float,
        number(
            "--residual-decay",
            "The residual is that of a running mean, r <- decay r + (1 - decay) s; 0: of s.",
        ),
    ] = 0.0,
    phi: Annotated[
        float | None,
        number(
            "--phi",
            "Also the bound with this clip of the momentum, in units of a sum of gradients.",
        ),
    ] = None,
    gradient_bound: GradientBound = None,
    run: Run = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """The bound of the mean squared gradient for one setting, by term; or "infeasible".

    --smoothness, --noise, --gap, --workers, --rounds and --local-steps are required where no --run
    says them. A delay in local steps is that of averages that are used without a restart. Clipping
    and quantization are covered by the size of the error that a run recorded (--clip-residual, or
    --run), a clip alone also before a run (--phi).
    """
    from analysis.convergence.bound_report import (  # noqa: PLC0415 - scipy, only for this command
        answer,
        bound_to_dict,
        print_bound,
    )
    from analysis.convergence.run_record import print_run  # noqa: PLC0415

    if allowed_delay is not None:
        validation.at_least("--allowed-delay", allowed_delay, 0)
    setting, tune, recorded = _setting(
        run,
        smoothness=smoothness,
        noise=noise,
        gap=gap,
        workers=workers,
        rounds=rounds,
        local_steps=local_steps,
        inner_step=inner_step,
        heterogeneity=heterogeneity,
        convex=convex,
        method=_Method(outer_step, momentum, penalty, most_penalty, delay, keep, predict),
        refused={
            "clip_residual": (clip_residual, None),
            "residual_decay": (residual_decay, 0.0),
        },
    )
    residual, decay = clip_residual, residual_decay
    if recorded is not None and recorded.residual:
        residual, decay = recorded.best_residual(setting)
    clip = _clip(residual, decay, phi, gradient_bound, tune=tune)
    answered = answer(setting, tune=tune, price=allowed_delay, clip=clip)
    if json_:
        of_run = {} if recorded is None else {"run": recorded.to_dict()}
        print_json(bound_to_dict(answered) | of_run)
        return
    print_bound(console(), answered)
    if recorded is not None:
        print_run(console(), recorded)


class _Method(NamedTuple):
    """The options of the outer step and of the delay."""

    outer_step: float = 1.0
    momentum: float = 0.0
    penalty: float = 1.0
    most_penalty: float | None = None
    delay: Delay = ONE_ROUND
    keep: float | None = None
    predict: float | None = None


def _setting(
    run: Path | None,
    *,
    method: _Method,
    heterogeneity: float,
    convex: bool,
    refused: Mapping[str, tuple[object, object]] | None = None,
    **values: Any,
) -> tuple[Any, bool, Any]:
    """The Setting of the options; whether its inner step is left open, then 1; the RunRecord.

    Of a run the method comes from its folder: its options, and those that are `refused`, have to be
    at their defaults, which stand behind the values. Raises OptionError for these, and for what is
    missing.
    """
    from analysis.convergence.run_record import read_run  # noqa: PLC0415 - scipy, not for help
    from analysis.convergence.setting import Setting  # noqa: PLC0415

    recorded = None if run is None else read_run(run)
    if recorded is None:
        *numbers, when, keep, predict = method
        values |= dict(zip(_Method._fields, numbers, strict=False))
        values["delay"] = when.rounds
        values["late"] = lateness(when, values["local_steps"] or 1, keep, predict)
    else:
        pairs = zip(_Method._fields, zip(method, _Method(), strict=True), strict=True)
        _refuse_with_run({**dict(pairs), **(refused or {})})
        values = recorded.given(values)
    _refuse_missing(values)
    tune = values.get("inner_step") is None
    values |= {"inner_step": 1.0} if tune else {}
    return Setting(heterogeneity=heterogeneity, convex=convex, **values), tune, recorded


def _refuse_with_run(options_: Mapping[str, tuple[object, object]]) -> None:
    """Raise OptionError for an option that is not at its default: the training says it."""
    for name, (value, default) in options_.items():
        if value != default:
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} does not go with --run, which takes it from the training")


def _refuse_missing(values: Mapping[str, object]) -> None:
    """Raise OptionError for required numbers that neither an option nor a run says."""
    names = ("smoothness", "noise", "gap", "workers", "rounds", "local_steps")
    missing = [f"--{name.replace('_', '-')}" for name in names if values.get(name) is None]
    if missing:
        raise OptionError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; give numbers, or"
            " --run FOLDER of a training with --estimate"
        )


def _clip(
    residual: float | None,
    decay: float,
    phi: float | None,
    largest: float | None,
    *,
    tune: bool,
) -> Any:
    """What is asked about clipping, as a Clip; None if nothing is."""
    from analysis.convergence.bound_report import Clip  # noqa: PLC0415 - scipy, only for this command

    if decay and residual is None:
        raise OptionError("--residual-decay is that of --clip-residual, which is missing")
    if residual is not None and tune:
        raise OptionError(
            "--clip-residual was recorded with one inner step: give it by --inner-step"
        )
    for flag, value in (("--clip-residual", residual), ("--gradient-bound", largest)):
        if value is not None:
            validation.at_least(flag, value, 0)
    if phi is not None:
        validation.above("--phi", phi, 0)
    if not 0 <= decay < 1:
        raise OptionError(f"--residual-decay is {decay:g}; it must be at least 0 and below 1")
    if residual is phi is largest is None:
        return None
    return Clip(residual=residual, decay=decay, phi=phi, largest=largest)
