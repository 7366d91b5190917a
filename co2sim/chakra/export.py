"""A schedule as a folder of Chakra traces, one file for each rank."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from co2sim.chakra.process_groups import FILE, to_json
from co2sim.chakra.rank_files import RankFiles
from co2sim.cluster import Cluster
from co2sim.compute import compute_time
from co2sim.errors import OptionError
from co2sim.files import MOST_RECORD_BYTES, new_folder
from co2sim.progress import Done
from co2sim.ranges import whole
from co2sim.schedule import Schedule
from co2sim.units import Bytes, counted, scaled
from co2sim.work import Compute

NAME = "trace"
"""Files are called trace.0.et, trace.1.et and so on: what ASTRA-sim puts behind its argument."""
MOST_RANKS = 65_536
"""Files of one folder."""
MOST_NODES = 1_000_000
"""Of one file: ops of a round times rounds."""
MOST_TRACE_BYTES: Bytes = 100e9
"""Of all files together."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: `ranks` files, `size` bytes in all, of `nodes` nodes each."""

    ranks: int
    size: int
    nodes: int
    rounds: int
    unsupported: tuple[str, ...]
    """Kinds of collectives in it that ASTRA-sim 2 does not simulate."""


def write(
    schedule: Schedule,
    cluster: Cluster,
    folder: Path,
    *,
    precision: str,
    rounds: int | None = None,
    done: Done | None = None,
) -> Written:
    """Write `rounds` rounds of a schedule as Chakra traces into a new folder: all files or none.

    Every rank has its file, whether or not a simulation would fold it. `precision` is that of
    computing, for the durations. By default there are as many rounds as show every wait: one more
    than the farthest goes back; fewer are refused. Raises OptionError for what cannot be written.
    """
    least = schedule.lag + 1
    rounds = whole("rounds", least if rounds is None else rounds, 1)
    if rounds < least:
        raise OptionError(
            f"rounds is {rounds}; {schedule.name} has ops that wait for"
            f" {counted(schedule.lag, 'round')} ago, which at least {least} rounds show"
        )
    ranks, nodes = cluster.layout.world_size, rounds * len(schedule.body)
    for what, number, most in (
        ("ranks", ranks, MOST_RANKS),
        ("nodes of a rank", nodes, MOST_NODES),
    ):
        if number > most:
            raise OptionError(f"{number:,} {what} are more than the {most:,} that are written")
    made = RankFiles(schedule, cluster.layout, rounds, durations(schedule, cluster, precision))
    size = 0
    with new_folder(folder) as put:
        _check_room(folder.resolve().parent, ranks, len(made.of_rank(0)))
        for rank in range(ranks):
            content = made.of_rank(rank)
            put(f"{NAME}.{rank}.et", content)
            size += len(content)
            if done:
                done(rank + 1, ranks)
        put(FILE, to_json(made.numbers).encode())
    unknown = {str(kind) for kind in _kinds(schedule) & {"broadcast", "reduce"}}
    return Written(ranks, size, nodes, rounds, tuple(sorted(unknown)))


def durations(schedule: Schedule, cluster: Cluster, precision: str) -> tuple[int, ...]:
    """Whole microseconds of every compute op, at least 1; of collectives 0."""
    known = [
        max(1, round(1e6 * compute_time(work, cluster.gpu, precision)))
        if isinstance(work, Compute)
        else 0
        for work in schedule.works
    ]
    return tuple(known[number] for number in schedule.work_numbers)


def _kinds(schedule: Schedule) -> set[str]:
    return {work.kind for work in schedule.works if not isinstance(work, Compute)}


def _check_room(parent: Path, ranks: int, size: int) -> None:
    """Refuse what is larger than files may be, or than the disk has room for."""
    if size > MOST_RECORD_BYTES:
        raise OptionError(
            f"a file would be {scaled(size, 'B')}; at most {scaled(MOST_RECORD_BYTES, 'B')}"
            " are written; take fewer rounds"
        )
    free = shutil.disk_usage(parent).free
    if ranks * size > min(MOST_TRACE_BYTES, free):
        raise OptionError(
            f"{ranks:,} files of {scaled(size, 'B')} are about {scaled(ranks * size, 'B')}; at most"
            f" {scaled(MOST_TRACE_BYTES, 'B')} are written, and {parent} has"
            f" {scaled(free, 'B')} free"
        )
