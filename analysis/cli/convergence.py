"""The commands of `co2analysis` about convergence: bound, verify, tau, trends.

The options of a setting are those that the fields of `Setting` declare.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.convergence.setting import Clip, Lateness, Setting
from co2sim.cli import options
from co2sim.common import convert, validation
from co2sim.common.cli import print_json
from co2sim.common.errors import OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.tables import console, print_lines
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.report.text.launch import aside, launch_row, launch_text, print_launch
from co2sim.strategies import parse


def number(flag: str, words: str) -> Any:
    """An option that is a number."""
    return typer.Option(flag, parser=partial(convert.number, flag), metavar="N", help=words)


def whole(flag: str, words: str) -> Any:
    """An option that is a whole number."""
    return typer.Option(flag, parser=partial(convert.whole, flag), metavar="N", help=words)


GradientBound = Annotated[
    float | None,
    number(
        "--gradient-bound",
        "M: the largest partial derivative of any worker's loss; default: sqrt(2 L Delta).",
    ),
]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="A training: its setting, its constants (--estimate), and its clipping residual.",
    ),
]
OfStrategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        help="What says tau and how late averages are, such as co2:tau=12,delay=1,fragments=12.",
    ),
]
Command = Callable[..., None]


def _of_setting(command: Command) -> Command:
    """Give a command the options of a setting: `values` of its fields, and `late`."""
    command = options.record_options(Lateness, "late")(command)
    return options.record_options(Setting, "values", dict)(command)


_BATCH = ("gpus", "micro_batch", "accumulation", "global_batch", "recompute", "overrides")


def _of_problem(command: Command) -> Command:
    """The same but for what differs between taus; `batch` receives what is given of a case."""
    others = [field.name for field in fields(Question) if field.name not in _BATCH]
    command = options.record_options(Question, "batch", dict, but=others, **OPEN_BATCH)(command)
    of_runs = [field.name for field in fields(Setting) if _group(field) == "run"]
    return options.record_options(Setting, "values", dict, but=of_runs)(command)


def _group(field: Field[Any]) -> str:
    """That of an option; empty for a field that is none."""
    return field.metadata["option"].group if "option" in field.metadata else ""


def _refuse_missing(values: Mapping[str, object], names: Sequence[str], remedy: str) -> None:
    """Raise OptionError that names all required numbers without a value."""
    missing = [f"--{name.replace('_', '-')}" for name in names if values.get(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise OptionError(f"{', '.join(missing)} {are} missing; {remedy}")


@_of_problem
def tau(  # noqa: PLR0913 - one argument per option
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Folders of real runs whose rounds were measured."),
    ] = None,
    *,
    values: dict[str, Any],
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
    batch: dict[str, Any],
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
    gradient_bound: GradientBound = None,
    launch: options.Launch = False,
    json_: options.Json = False,
) -> None:
    """Find the best tau: round times, simulated or measured, joined with the bound of the error.

    --smoothness, --noise and --gap are required, and either folders of runs or --cluster. The best
    tau has the least bound after a time of training. The shortest one that hides its averages,
    which `co2sim run` takes for tau=auto, is named beside it. The batch is that of `co2sim run`.
    Of a simulation `launch` is what trains so, with the best tau after the longest time.
    """
    from analysis.convergence import tau as advice  # noqa: PLC0415 - scipy, only for this command

    _refuse_tau(strategy)
    advice.averaging(parse(strategy))
    of_simulation = {
        "--cluster": cluster,
        "--gpus": batch.get("gpus"),
        "--taus": taus,
        "--set": batch.get("overrides"),
        "--launch": launch,
    }
    _check_source(runs, of_simulation)
    if target is not None:
        validation.above("--target", target, 0)
    if gradient_bound is not None:
        validation.at_least("--gradient-bound", gradient_bound, 0)
    required = ("smoothness", "noise", "gap")
    _refuse_missing(values, required, "the bound needs --smoothness, --noise and --gap")
    problem = Setting(workers=1, rounds=1, local_steps=1, inner_step=1.0, **values)
    lengths = [convert.seconds("--times", text) for text in times.split(",")]
    hides = case = None
    if cluster is None:
        timings = advice.measured(runs or [])
    else:
        batch["overrides"] = options.pairs(batch.get("overrides"), "--set")
        case = Question(cluster=cluster, model=model, strategy=strategy, **batch)
        case = advice.settled(case)
        hides = advice.hiding(case)
        timings = (
            advice.searched(problem, case, lengths, hides)
            if taus is None
            else advice.simulated(case, [convert.whole("--taus", text) for text in taus.split(",")])
        )
    preview = getattr(parse(strategy), "preview", False)
    answer = advice.advise(problem, timings, lengths, target, hides, preview=preview)
    chosen = advice.chosen(case, answer) if case else None
    if json_:
        lines = {"launch": launch_text(*chosen)} if launch and chosen else {}
        print_json(advice.tau_to_dict(answer, gradient_bound) | lines)
        return
    with aside(launch=launch):
        advice.print_tau(console(), answer, gradient_bound)
        for name, text in launch_row(*chosen) if chosen else ():
            print_lines(console(), f"\n{name}: {text}")
    if launch and chosen:
        print_launch([chosen])


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
    wanted = [convert.whole("--taus", text) for text in taus.split(",")]
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


@_of_setting
def verify(
    *,
    values: dict[str, Any],
    late: Lateness,
    strategy: OfStrategy = None,
    run: Run = None,
    phi: Annotated[
        float | None,
        number("--phi", "Clip the momentum at this, in units of a sum of gradients."),
    ] = None,
    seeds: Annotated[int, whole("--seeds", "Runs of each problem; 2 or more.")] = 16,
    json_: options.Json = False,
) -> None:
    """Check the bound of one setting against simulated runs; exit code 1 if they violate it.

    The setting is that of `co2analysis bound`. It runs on a quadratic and, without --convex, on a
    function that is not convex, which have its smoothness, gap, noise and heterogeneity.
    """
    from analysis.convergence import bound as bounds  # noqa: PLC0415 - scipy, only for this command
    from analysis.convergence import verify as runs  # noqa: PLC0415

    if phi is not None:
        validation.above("--phi", phi, 0)
    setting, tune, _ = _setting(run, values, late, strategy)
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


@options.record_options(Clip, "clip")
@_of_setting
def bound(
    *,
    values: dict[str, Any],
    late: Lateness,
    clip: Clip,
    strategy: OfStrategy = None,
    run: Run = None,
    allowed_delay: Annotated[
        float | None,
        number(
            "--allowed-delay",
            "Also the longest delay that raises the bound by at most this share, such as 0.2.",
        ),
    ] = None,
    json_: options.Json = False,
) -> None:
    """The bound of the mean squared gradient for one setting, by term; or "infeasible".

    --smoothness, --noise, --gap, --workers, --rounds and --local-steps are required where no --run
    says them. A delay in local steps is that of averages that are used without a restart. Clipping
    and quantization are covered by the size of the error that a run recorded (--clip-residual, or
    --run), a clip alone also before a run (--phi).
    """
    from analysis.convergence import bound_report, clipping, run_record  # noqa: PLC0415 - scipy

    if allowed_delay is not None:
        validation.at_least("--allowed-delay", allowed_delay, 0)
    refused = {name: getattr(clip, name) for name in ("clip_residual", "residual_decay")}
    setting, tune, recorded = _setting(run, values, late, strategy, **refused)
    if recorded is not None and recorded.residual:
        if clipping.covers_residuals(setting):
            residual, decay = recorded.best_residual(setting)
            clip = replace(clip, clip_residual=residual, residual_decay=decay)
        else:
            recorded = recorded.without_residual(setting)
    if clip.clip_residual is not None and tune:
        raise OptionError(
            "--clip-residual was recorded with one inner step: give it by --inner-step"
        )
    setting, answer = bound_report.answer(setting, tune=tune, price=allowed_delay, clip=clip)
    if json_:
        print_json(answer | ({} if recorded is None else {"run": recorded.to_dict()}))
        return
    bound_report.print_bound(console(), setting, answer, clip)
    if recorded is not None:
        run_record.print_run(console(), recorded)


def _setting(
    run: Path | None,
    values: dict[str, Any],
    late: Lateness,
    strategy: str | None,
    **refused: object,
) -> tuple[Setting, bool, Any]:
    """The Setting of the options; whether its inner step is left open, then 1; the RunRecord.

    Of a run the method comes from its folder: its options have to be at their defaults, and those
    that are `refused` None or 0. A `strategy` says rounds and averages. Raises OptionError for
    these, and for what is missing.
    """
    recorded = None
    if run is not None:
        from analysis.convergence.run_record import read_run  # noqa: PLC0415 - not for help

        recorded = read_run(run)
        method = {
            field.name: field.default for field in fields(Setting) if _group(field) == "method"
        }
        said = {name: values.pop(name, None) for name in method}
        said |= _of_late(late) | refused | {"strategy": strategy}
        _refuse_said(said, method, "--run, which takes it from the training")
        values = recorded.given(values)
    elif strategy is not None:
        said = _of_late(late) | {"local_steps": values.pop("local_steps", None)}
        _refuse_said(said, {}, "--strategy, which says it")
        values |= _of_strategy(strategy)
    else:
        values["delay"] = late.delay.rounds
        values["late"] = late.average(values.get("local_steps", 1))
    required = ("smoothness", "noise", "gap", "workers", "rounds", "local_steps")
    _refuse_missing(values, required, "give numbers, or --run FOLDER of a training with --estimate")
    tune = values.get("inner_step") is None
    values |= {"inner_step": 1.0} if tune else {}
    return Setting(**values), tune, recorded


def _of_late(late: Lateness) -> dict[str, object]:
    """What was said of late averages; None for what was not."""
    named = {field.name: getattr(late, field.name) for field in fields(late)}
    usual = {field.name: field.default for field in fields(late)}
    return {name: None if value == usual[name] else value for name, value in named.items()}


def _refuse_said(said: Mapping[str, object], usual: Mapping[str, object], of: str) -> None:
    """Raise OptionError for an option that is said twice."""
    for name, value in said.items():
        if value not in {None, usual.get(name, 0.0)}:
            raise OptionError(f"--{name.replace('_', '-')} does not go with {of}")


def _of_strategy(text: str) -> dict[str, Any]:
    """Arguments of Setting that a strategy says. Raises OptionError where it leaves one open."""
    from analysis.convergence import tau as advice  # noqa: PLC0415 - not for help

    strategy = advice.averaging(parse(text))
    if getattr(strategy, "preview", False):
        raise OptionError(
            f"--strategy is {text!r}; the bound is not about a preview: leave it out, for the bound"
            " without"
        )
    if strategy.tau == "auto":
        raise OptionError(f"--strategy is {text!r}; the bound needs its tau, such as {text}:tau=12")
    return {
        "local_steps": strategy.tau,
        "delay": getattr(strategy, "staleness", 0),
        "late": advice.late_of(strategy),
    }
