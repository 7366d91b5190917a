"""`realrun train`: train a small model on real data with any strategy."""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from co2sim.cli import options
from co2sim.common import convert
from co2sim.common.errors import OptionError
from co2sim.common.files import check_writable
from co2sim.common.progress import progress_bar
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted, duration, scaled
from co2sim.schedule.schedule import Layout
from co2sim.strategies import parse, with_options
from co2sim.strategies.step import title
from realrun.cli.options import RankSettings, rank_options
from realrun.lab.time_dilation import DILATION, dilation
from realrun.train import folder
from realrun.train.constants import Estimates, Point, commands, limits
from realrun.train.log import History, read
from realrun.train.settings import UNITS, TrainSettings, check, check_estimate

if TYPE_CHECKING:
    from realrun.cli.ranks import Rank
    from realrun.train.loop import OnStep, Standing

_WARMUP = 20
"""Steps, if there are twice as many."""


_Tau = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto",
        help="Steps between averages: sets tau of the strategy. auto: of co2, the shortest round"
        " that hides its averages, measured.",
    ),
]
_FromStep = Annotated[
    int | None,
    typer.Option(
        parser=partial(convert.whole, "--from-step"),
        metavar="N",
        help="With --resume: continue from the checkpoint after this step, not from the last.",
    ),
]


def _settings(steps: int, **values: Any) -> TrainSettings:
    return TrainSettings(**{"steps": steps, "warmup": min(_WARMUP, steps // 2)} | values)


# What is None shows no default: it depends on others, or says that there is none.
@options.record_options(
    TrainSettings, "settings", _settings, context=None, stop=None, warmup=None, checkpoint_every=100
)
@rank_options
def train(  # noqa: PLR0917 - one argument per option
    settings: TrainSettings,
    how: RankSettings,
    tau: _Tau = None,
    resume: Annotated[  # noqa: FBT002
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --out, if any.")
    ] = False,
    from_step: _FromStep = None,
    estimate: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--estimate",
            help="Also measure L, sigma^2, zeta^2 and the gap, which `co2analysis bound` and `tau`"
            " take, at three points of the training.",
        ),
    ] = False,
    describe: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--describe",
            help="Print the model of task text as a file for co2sim, and do not train.",
        ),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder: log, figure, parameters, checkpoints. All ranks see it."
        ),
    ] = Path("out"),
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Train a small model on real data, with checkpoints, a log and a figure of the loss."""
    settings = replace(settings, strategy=_with_tau(settings.strategy, tau))
    if describe:
        if settings.task != "text":
            raise OptionError("--describe needs --task text, the task whose model is a transformer")
        print(settings.shape.toml(), end="")
        return
    going_on = resumed(from_step, resume=resume)
    _check(settings, how, out, going_on, estimate=estimate)
    from realrun.cli import ranks  # noqa: PLC0415 - torch

    if how.nproc is not None:
        raise typer.Exit(ranks.start(how, sys.argv[1:], training=True))

    def work(rank: ranks.Rank) -> None:
        run(rank, settings, out, resume=going_on, estimate=estimate, as_json=json_)

    ranks.as_rank(how, None, work)


def _check(
    settings: TrainSettings,
    how: RankSettings,
    out: Path,
    resume: folder.Resume | None,
    *,
    estimate: bool,
) -> None:
    """Refuse before any rank starts what cannot be trained."""
    _check_clock()
    if how.nproc is not None:
        check(settings, Layout(1, how.nproc))
        if estimate:
            check_estimate(settings, Layout(1, how.nproc), resume=resume is not None)
        check_out(settings, out, how.nproc, resume)
    check_writable(out)


def _check_clock() -> None:
    """Raise OptionError where the lab is slower than its clock says."""
    if dilation() > 1:
        raise OptionError(
            f"{DILATION} is {dilation()}, and training goes by the clock of the machine; build the"
            " lab with --dilation 1"
        )


def _with_tau(strategy: str, tau: str | None) -> str:
    """The strategy with another tau. Raises OptionError when it has none, or its own one."""
    if tau is None:
        return strategy
    if tau != "auto":
        convert.whole("--tau", tau)
    if "tau" in strategy:
        raise OptionError(f"--tau {tau}, and --strategy {strategy} gives another one")
    return title(with_options(parse(strategy), {"tau": tau}))


def resumed(from_step: int | None, *, resume: bool) -> folder.Resume | None:
    """What to continue from, if anything. Raises OptionError for --from-step without --resume."""
    if from_step is not None and not resume:
        raise OptionError("--from-step says how to continue from a checkpoint: it needs --resume")
    return folder.Resume(from_step) if resume else None


def check_out(settings: TrainSettings, out: Path, ranks: int, resume: folder.Resume | None) -> None:
    """Refuse a folder that is of another training or in use, or what cannot be gone on from."""
    folder.check_free(out)
    if not resume:
        folder.check_new(out)
    elif last := resume.checkpoint(out):
        folder.check_checkpoint(last, settings.identity(), ranks)
        folder.check_steps(last, settings.steps)
        if (out / folder.LOG).exists():
            read(out)


def run(
    rank: "Rank",
    settings: TrainSettings,
    out: Path,
    *,
    resume: folder.Resume | None,
    estimate: bool,
    as_json: bool,
) -> None:
    """Train as one rank among others; rank 0 tells how it went."""
    from realrun.train.loop import train as train_  # noqa: PLC0415 - torch

    check(settings, rank.world.layout)
    first = rank.world.rank == 0
    with folder.alone(out) if first else nullcontext():
        if first:
            _say(settings, out, resume)
        with asked_to_stop(rank.world.rank) as signals, _shown(rank, settings) as shown:
            history = train_(
                settings,
                rank.world,
                out,
                resume=resume or False,
                estimate=estimate,
                progress=shown,
                stop=lambda: bool(signals),
            )
    if first:
        show(history, out, as_json=as_json)


def _say(settings: TrainSettings, out: Path, resume: folder.Resume | None) -> None:
    """Refuse a folder of another training; say what may surprise."""
    if not resume:
        folder.check_new(out)
    elif not folder.checkpoints(out):
        print(f"no checkpoint in {out}: starting at step 0", file=sys.stderr)
    chooses = getattr(settings.parsed, "tau", None) == "auto"
    if not chooses and (left := settings.last % settings.round):
        print(
            f"{settings.last} steps are no multiple of tau, {settings.round}: what workers"
            f" learn in the last {left} enters only the final mean",
            file=sys.stderr,
        )


def show(history: History, out: Path, *, as_json: bool) -> None:
    """Tell how a training went."""
    if as_json:
        figures = dict(history.figures)
        if history.estimates:
            delay = history.rows[-1].delay
            figures["estimates"] = history.estimates.to_dict(history.chosen, delay)
        print(json.dumps(figures, indent=2))
        return
    _print(history, out)
    if history.estimates:
        _print_estimates(history, history.estimates, out)


@contextmanager
def asked_to_stop(rank: int) -> Iterator[list[int]]:
    """The signals that asked this process to stop: it shall do so in good order."""
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)

    def ask(signum: int, _: object) -> None:
        if not signals and not rank:
            print("asked to stop: ends some steps later, with a checkpoint", file=sys.stderr)
        signals.append(signum)

    before = [signal.signal(signum, ask) for signum in numbers]
    try:
        yield signals
    finally:
        for signum, handler in zip(numbers, before, strict=True):
            signal.signal(signum, handler)


@contextmanager
def _shown(rank: "Rank", settings: TrainSettings) -> "Iterator[OnStep | None]":
    """A bar on a terminal, else a line every few seconds; nothing on ranks other than 0."""
    if rank.progress is None:
        yield None
        return
    if not sys.stderr.isatty():
        line = rank.progress
        yield lambda standing: line(
            f"{settings.name}: step {standing.step} of {standing.steps},"
            f" {_words(settings, standing)}"
        )
        return
    with progress_bar(settings.name, shown=True) as bar:
        assert bar is not None
        bar(0, settings.last)
        yield lambda standing: bar(standing.step, settings.last, _words(settings, standing))


def _words(settings: TrainSettings, standing: "Standing") -> str:
    unit = f"{UNITS[settings.task]}s"
    seen = (
        "" if standing.validation_loss is None else f", validation {standing.validation_loss:.4f}"
    )
    return f"loss {standing.loss:.4f}{seen}, {scaled(standing.tokens_per_s, unit)}/s"


def _waiting(figures: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    """How late averages were used, and what waiting for them took."""
    share = f"{figures['waiting_share']:.1%} of the time waiting ({duration(figures['waited'])})"
    if not (figures["delay"] or outer["staleness"]):
        return f"averages are waited for as soon as they start, {share}"
    steps, rounds = figures["delay"], outer["staleness"]
    tau = f"tau {outer['tau']}" if outer["tau"] else "tau not chosen yet"
    delay = counted(rounds, "round") if steps is None else counted(steps, "step")
    averages = counted(figures["averages"], "average")
    return f"{tau}, delay {delay}, {figures['late']} of {averages} came late, {share}"


def _print(history: History, out: Path) -> None:
    """How it went, and where things are."""
    figures, facts = history.figures, history.facts
    if not history.rows:
        print(f"nothing left to train, and no row in {out / folder.LOG}")
        return
    unit = f"{UNITS[history.settings.task]}s"
    ranks = facts["nodes"] * facts["ranks_per_node"]
    print(
        f"{history.settings.name} on {counted(ranks, 'rank')}: {facts['parameters']:,} parameters,"
        f" {figures['step']:,} steps, {figures['tokens']:,} {unit},"
        f" {duration(figures['seconds'])}, {scaled(figures['tokens_per_s'], unit)}/s"
    )
    if figures["validation_loss"] is not None:
        accuracy = "" if figures["accuracy"] is None else f", accuracy {figures['accuracy']:.1%}"
        print(
            f"validation loss {figures['validation_loss']:.4f} (best"
            f" {figures['best_validation_loss']:.4f}){accuracy}"
        )
    if figures["rounds"] is not None:
        print(
            f"outer steps {figures['rounds']}, sent {scaled(figures['bytes_sent'], 'B')} per rank;"
            f" last penalty {figures['penalty']:.3f}, {figures['clipped']:.3%} of elements clipped"
        )
        print(_waiting(figures, facts["outer_step"]))
    print(f"log     {out / folder.LOG}\nfigure  {out / folder.FIGURE}")
    if history.stopped:
        print(f"stopped after step {figures['step']}; continue with --resume")


def _print_estimates(history: History, estimates: Estimates, out: Path) -> None:
    """The constants at every point, those for the bound, and the commands that take them."""
    shown, points = console(), estimates.points
    print_lines(shown, "")
    print_table(
        shown,
        f"constants of the bound: {counted(estimates.workers, 'worker')} with"
        f" {counted(estimates.samples, 'sample')} in a batch, {len(points[0].losses)} batches at"
        " each point; ± standard error",
        ("", *(f"after step {point.step}" for point in points), "for the bound"),
        _rows(estimates),
    )
    print_lines(shown, *limits(history.settings))
    lines = commands(estimates, history.chosen, history.rows[-1].delay)
    print("\nWith the CLUSTER and the MODEL that you ask about:\n")  # whole lines, to copy
    print("\n".join(f"$ {line}" for line in lines.values()))
    print(f"\nestimates  {out / folder.ESTIMATE}")


def _rows(estimates: Estimates) -> list[tuple[str, ...]]:
    columns: list[tuple[str, Callable[[Point], str], str]] = [
        ("loss; gap", lambda p: f"{p.loss}", f"{estimates.gap}"),
        ("|grad f|^2", lambda p: f"{p.gradient.floored}", ""),
        ("noise sigma^2", lambda p: f"{p.noise}", f"{estimates.noise}"),
        (
            "heterogeneity zeta^2",
            lambda p: f"{p.heterogeneity.floored}",
            f"{estimates.heterogeneity}",
        ),
        ("L: largest |eigenvalue|", lambda p: f"{p.curvature:.4g}", f"{estimates.smoothness:.4g}"),
        ("L: iterations, last change", lambda p: f"{p.iterations}, {p.change:.1%}", ""),
        ("L: on other samples", lambda p: f"{p.elsewhere}", ""),
        (
            "L: along the next step",
            lambda p: "-" if p.along_step is None else f"{p.along_step:.4g}",
            "",
        ),
    ]
    return [(name, *map(cell, estimates.points), chosen) for name, cell, chosen in columns]
