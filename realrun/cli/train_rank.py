"""What a rank of `realrun train` does: it trains, shows how far it is, and tells how it went."""

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from co2sim.common.errors import OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.units import counted, duration, scaled
from realrun.train.folder import (
    FIGURE,
    LOG,
    Resume,
    alone,
    check_checkpoint,
    check_free,
    check_new,
    check_steps,
    checkpoints,
)
from realrun.train.log import History, read
from realrun.train.settings import UNITS, TrainSettings, check

if TYPE_CHECKING:
    from realrun.cli.ranks import Rank
    from realrun.train.loop import OnStep, Standing


def resumed(from_step: int | None, *, given: bool) -> Resume | None:
    """What to continue from, if anything. Raises OptionError for --from-step without --resume."""
    if from_step is not None and not given:
        raise OptionError("--from-step says how to continue from a checkpoint: it needs --resume")
    return Resume(from_step) if given else None


def check_out(settings: TrainSettings, out: Path, ranks: int, resume: Resume | None) -> None:
    """Refuse a folder that is of another training or in use, or what cannot be gone on from."""
    check_free(out)
    if not resume:
        check_new(out)
    elif last := resume.checkpoint(out):
        check_checkpoint(last, settings.identity(), ranks)
        check_steps(last, settings.steps)
        if (out / LOG).exists():
            read(out)


def run(
    rank: "Rank",
    settings: TrainSettings,
    out: Path,
    *,
    resume: Resume | None,
    estimate: bool,
    as_json: bool,
) -> None:
    """Train as one rank among others; rank 0 tells how it went."""
    from realrun.train.loop import train as train_  # noqa: PLC0415 - torch

    check(settings, rank.world.layout)
    first = rank.world.rank == 0
    with alone(out) if first else nullcontext():
        if first:
            _say(settings, out, resume)
        with asked_to_stop(rank.world.rank) as asked, _shown(rank, settings) as shown:
            history = train_(
                settings,
                rank.world,
                out,
                resume=resume or False,
                estimate=estimate,
                progress=shown,
                stop=lambda: bool(asked),
            )
    if first:
        show(history, out, as_json=as_json)


def _say(settings: TrainSettings, out: Path, resume: Resume | None) -> None:
    """Refuse a folder of another training; say what may surprise."""
    if not resume:
        check_new(out)
    elif not checkpoints(out):
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
        print(json.dumps({**history.figures, **_estimates(history)}, indent=2))
        return
    _print(history, out)
    if history.estimates:
        from realrun.cli.estimate_report import print_estimates  # noqa: PLC0415 - rich

        print_estimates(history, out)


def _estimates(history: History) -> dict[str, Any]:
    if history.estimates is None:
        return {}
    delay = history.rows[-1].delay
    return {"estimates": history.estimates.to_dict(history.chosen, delay)}


@contextmanager
def asked_to_stop(rank: int) -> Iterator[list[int]]:
    """The signals that asked this process to stop: it shall do so in good order."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)

    def ask(number: int, _: object) -> None:
        if not asked and not rank:
            print("asked to stop: ends some steps later, with a checkpoint", file=sys.stderr)
        asked.append(number)

    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _shown(rank: "Rank", settings: TrainSettings) -> "Iterator[OnStep | None]":
    """A bar on a terminal, else a line every few seconds; nothing on ranks other than 0."""
    if rank.progress is None:
        yield None
        return
    if not sys.stderr.isatty():
        line = rank.progress
        yield lambda at: line(_line(settings, at))
        return
    with progress_bar(settings.name, shown=True) as bar:
        assert bar is not None
        bar(0, settings.last)
        yield lambda at: bar(at.step, settings.last, _words(settings, at))


def _line(settings: TrainSettings, at: "Standing") -> str:
    return f"{settings.name}: step {at.step} of {at.steps}, {_words(settings, at)}"


def _words(settings: TrainSettings, at: "Standing") -> str:
    unit = f"{UNITS[settings.task]}s"
    seen = "" if at.validation_loss is None else f", validation {at.validation_loss:.4f}"
    return f"loss {at.loss:.4f}{seen}, {scaled(at.tokens_per_s, unit)}/s"


def _waiting(found: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    """How late averages were used, and what waiting for them took."""
    share = f"{found['waiting_share']:.1%} of the time waiting ({duration(found['waited'])})"
    if not (found["delay"] or outer["staleness"]):
        return f"averages are waited for as soon as they start, {share}"
    steps, rounds = found["delay"], outer["staleness"]
    tau = f"tau {outer['tau']}" if outer["tau"] else "tau not chosen yet"
    delay = counted(rounds, "round") if steps is None else counted(steps, "step")
    averages = counted(found["averages"], "average")
    return f"{tau}, delay {delay}, {found['late']} of {averages} came late, {share}"


def _print(history: History, out: Path) -> None:
    """How it went, and where things are."""
    found, facts = history.figures, history.facts
    if not history.rows:
        print(f"nothing left to train, and no row in {out / LOG}")
        return
    unit = f"{UNITS[history.settings.task]}s"
    ranks = facts["nodes"] * facts["ranks_per_node"]
    print(
        f"{history.settings.name} on {counted(ranks, 'rank')}: {facts['parameters']:,} parameters,"
        f" {found['step']:,} steps, {found['tokens']:,} {unit},"
        f" {duration(found['seconds'])}, {scaled(found['tokens_per_s'], unit)}/s"
    )
    if found["validation_loss"] is not None:
        accuracy = "" if found["accuracy"] is None else f", accuracy {found['accuracy']:.1%}"
        print(
            f"validation loss {found['validation_loss']:.4f} (best"
            f" {found['best_validation_loss']:.4f}){accuracy}"
        )
    if found["rounds"] is not None:
        print(
            f"outer steps {found['rounds']}, sent {scaled(found['bytes_sent'], 'B')} per rank;"
            f" last penalty {found['penalty']:.3f}, {found['clipped']:.3%} of elements clipped"
        )
        print(_waiting(found, facts["outer_step"]))
    print(f"log     {out / LOG}\nfigure  {out / FIGURE}")
    if history.stopped:
        print(f"stopped after step {found['step']}; continue with --resume")
