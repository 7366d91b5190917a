"""What a rank of a command does, and how local ranks are started."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import NoReturn

from co2sim.common.errors import Co2simError, OptionError, error_line
from co2sim.common.files import write_atomically
from co2sim.common.units import Seconds, counted, duration
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from realrun import record
from realrun.cli.options import RankSettings
from realrun.errors import BAD_INPUT, CheckpointError, RankFailure
from realrun.execute.world import World, end, join, need_gpus
from realrun.lab.time_dilation import lasting
from realrun.launch.launcher import run_local
from realrun.launch.monitor import Place
from realrun.measure import KernelName, Say, computing_time, measure, partial_trace
from realrun.record import Record

_MIN_PATIENCE: Seconds = 2.0
"""A launcher may be stopped for this long: half of a deadline, so that no rank blames another."""

_NEWS: Seconds = 5.0
"""Between two lines that tell how far a run is."""

_MINUTES: Seconds = 120.0
"""From here on times are said in minutes."""


def start(settings: RankSettings, arguments: Sequence[str], *, training: bool = False) -> int:
    """Run this same command as `nproc` local ranks; gives the exit code.

    A training is asked to stop before it is killed, and draws its progress itself.
    """
    assert settings.nproc is not None
    if settings.backend == "nccl":
        need_gpus(settings.nproc)
    return run_local(
        [sys.executable, "-m", "realrun", *without_nproc(arguments)],
        settings.nproc,
        patience=max(settings.deadline / 2, _MIN_PATIENCE),
        ask_first=training,
        own_terminal=training,
    )


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """The arguments of a rank: those given, but for those of the launcher."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--nproc":
            next(rest, None)
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept


@dataclass(slots=True)
class Rank:
    """This process as a rank. `folder` is where the partial trace of a failure goes, if any."""

    world: World
    folder: Path | None
    progress: Say | None


def as_rank(settings: RankSettings, folder: Path | None, work: Callable[[Rank], None]) -> None:
    """Join the others and do `work`. A failure ends the process with one line and exit code 1.

    Bad input does so with exit code 2, on all ranks; if it is bad on one only, this one says why.
    """
    rank: Rank | None = None
    try:
        world = join(settings.backend, settings.deadline)
        rank = Rank(world, folder, None if world.rank else news())
        work(rank)
        rank.world.leave()
        end()
    except Co2simError as error:
        if rank is None and isinstance(error, OptionError):  # not started as a rank at all
            raise
        _stop(error, rank)


def run(
    cases: Sequence[Question],
    settings: RankSettings,
    kernels: KernelName,
    rounds: int,
    out: Path,
    *,
    check: bool,
    as_json: bool,
) -> None:
    """Measure all cases as one rank among others; rank 0 writes and prints."""
    folders = [out / record.folder_name(str(case.strategy)) for case in cases]

    def work(rank: Rank) -> None:
        records = []
        for case, folder in zip(cases, folders, strict=True):
            rank.folder = folder
            if rank.progress:
                _foretell(case, rank.world, rounds)
            measured = measure(
                case, rank.world, kernels, rounds=rounds, check=check, progress=rank.progress
            )
            if measured:
                record.write(rank.folder, measured)
                records.append(measured)
        if records:
            _print(records, folders, as_json=as_json)

    as_rank(settings, out, work)


def _stop(error: Co2simError, rank: Rank | None) -> NoReturn:
    """Say why on one line, keep what was seen, and end, whatever other threads still wait for."""
    message = str(error)
    seen = partial_trace(error)
    if rank is not None and rank.folder is not None and seen is not None:
        path = rank.folder / "partial" / f"rank{rank.world.rank}.jsonl"
        try:
            lines = "".join(f"{line}\n" for line in seen.to_json_lines())
            write_atomically({path: lines.encode()})
            message += f"; its spans so far are in {path}"
        except Co2simError as failed:
            message += f"; {failed}"
    everywhere = isinstance(error, CheckpointError) and error.everywhere
    reported = rank.world.watch.reported() if rank and isinstance(error, RankFailure) else None
    said = bool(reported and reported.said)  # by the rank at fault
    if not said and not (everywhere and rank and rank.world.rank):  # else another rank says it
        print(error_line(message), file=sys.stderr, flush=True)
    bad = isinstance(error, BAD_INPUT)
    if bad and rank and not rank.world.watch.failure:
        rank.world.watch.raised(Place(-1, 0, "start"), error, said=True)
    end(2 if bad or said else 1)


def _foretell(case: Question, world: World, rounds: int) -> None:
    """Say how long a run will take, if that is long."""
    expected = lasting(computing_time(case, world, rounds))
    if expected > _NEWS:
        time_ = duration(expected) if expected < _MINUTES else f"{expected / 60:,.0f} min"
        print(
            f"{case.strategy}: computing alone takes about {time_}, by the GPU of the cluster:"
            f" {counted(rounds, 'round')} and the warm-up",
            file=sys.stderr,
            flush=True,
        )


def news() -> Say:
    """A line every few seconds that tells how far a run is; none for what takes no longer.

    The first comes when it is due, however long the work under way still takes.
    """
    last, latest = time.monotonic(), ""

    def show(text: str) -> None:
        nonlocal last, latest
        latest = text
        if time.monotonic() - last > _NEWS:
            last = time.monotonic()
            timer.cancel()
            print(text, file=sys.stderr, flush=True)

    timer = Timer(_NEWS, lambda: show(latest) if latest else None)
    timer.daemon = True
    timer.start()
    return show


def _print(records: Sequence[Record], folders: Sequence[Path], *, as_json: bool) -> None:
    figures = [dict(each.figures) for each in records]
    if as_json:
        print(json.dumps(figures[0] if len(figures) == 1 else figures, indent=2))
        return
    from co2sim.report.text.result import print_result  # noqa: PLC0415 - rich

    for values, folder in zip(figures, folders, strict=True):
        print_result(Result.from_dict(values), measured=True)
        print(f"timeline  {folder / 'trace.json'} (https://ui.perfetto.dev)\n")
