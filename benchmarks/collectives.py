"""How true single collectives are: by kind, size and group, in labs, beside their prediction.

    sudo python benchmarks/collectives.py           # two rates, three layouts, about ten minutes
    sudo python benchmarks/collectives.py --quick   # one lab, two sizes

Four ways: alone after a pause, or a short one, four of the same in a row, and two in flight on two
streams. Each is predicted by simulating the same schedule on the cluster that the lab states, with
latencies of small collectives measured just before (`realrun probe --stated`). A time is from the
last member's start to the last end, the median of the rounds. Writes collectives.csv and
collectives.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from fidelity import as_ranks
from reports import folder, machine, made_by, parser, table

from co2sim.catalog import load_cluster
from co2sim.hardware.cluster import Cluster
from co2sim.schedule import schedule
from co2sim.schedule.schedule import WORLD, Collective, Compute, DType, Group, Kind, Op, Schedule
from co2sim.simulation.costs import compute_time
from co2sim.simulation.run import execute
from co2sim.simulation.trace import Trace
from realrun.cli import ranks
from realrun.cli.options import RankSettings
from realrun.execute.executor import execute as carry_out
from realrun.execute.kernels import Sleep
from realrun.execute.world import gather_objects
from realrun.lab.lab import Lab
from realrun.lab.time_dilation import for_cores
from realrun.launch.launcher import cores
from realrun.measure import merge
from realrun.probe.probe import groups

Row: TypeAlias = dict[str, Any]

LABS = tuple(
    Lab(nodes, per_node, rate)
    for nodes, per_node in ((2, 1), (4, 1), (2, 2))
    for rate in ("700 Mbit/s", "2 Gbit/s")
)
KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL)
SIZES = {
    "alone": tuple(2**power for power in (10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23)),
    "after 1 ms": tuple(2**power for power in (12, 15, 17, 19, 21)),
    "in a row": tuple(2**power for power in (12, 15, 17, 19, 21)),
    "two in flight": tuple(2**power for power in (12, 15, 17, 19, 21)),
}
COUNTS = {"alone": 1, "after 1 ms": 1, "in a row": 4, "two in flight": 2}
PAUSE, SHORT = Compute("pause", 8e9), Compute("short pause", 1e9)
"""8 and 1 ms on the virtual GPU. Links are idle when a measurement starts, and hosts, too."""
ROUNDS = 8
QUICK_MOST = 2**14


def cells(kinds: Sequence[Kind], every: Sequence[Group], most: int) -> Iterator[tuple[str, ...]]:
    """Names of what is measured: way, kind, size in bytes, group."""
    for way, sizes in SIZES.items():
        for size in sizes:
            for kind in kinds:
                for group in every:
                    if size <= most:
                        yield way, str(kind), str(size), str(group)


def body_of(every: Sequence[Group], most: int) -> Schedule:
    """All cells, before each of which all ranks meet and pause."""
    named = {str(group): group for group in every}
    meet = Collective(Kind.ALL_REDUCE, "meeting", 1, DType.FP32, WORLD)
    ops = []
    for cell in cells(KINDS, every, most):
        way, kind, size, group = cell
        work = Collective(Kind(kind), "swept", int(size) // 4, DType.FP32, named[group])
        name = "|".join(cell)
        pause = SHORT if way == "after 1 ms" else PAUSE
        ops += [Op(f"meet {name}", meet, "comm"), Op(f"pause {name}", pause, "comm")]
        ops += [
            Op(
                f"{name}|{number}",
                work,
                "other" if way == "two in flight" and number else "comm",
                (schedule.After(f"pause {name}"),),
            )
            for number in range(COUNTS[way])
        ]
        if way == "two in flight":  # both end before the next cell starts
            ops.append(
                Op(f"end {name}", Compute("nothing", 0.0), "comm", (schedule.After(f"{name}|1"),))
            )
    return Schedule("collectives", tuple(ops))


def times(trace: Trace, body: Schedule) -> dict[str, float]:
    """Seconds of every cell: median of the rounds but the first, mean of the groups."""
    works = {op.name: op.work for op in body.body}
    spans: dict[tuple[str, int, object], list[tuple[str, float, float]]] = {}
    for span in trace.spans:
        work = works[span.op]
        if span.round and isinstance(work, Collective) and work.buffer == "swept":
            cell, _, number = span.op.rpartition("|")
            members = work.group.members(span.rank, trace.layout)
            key = cell, span.round, members
            spans.setdefault(key, []).append((number, span.start, span.end))
    found: dict[str, list[float]] = {}
    for (cell, _, _), seen in spans.items():
        start = max(start for number, start, _ in seen if number == "0")
        found.setdefault(cell, []).append(max(end for *_, end in seen) - start)
    return {cell: statistics.median(seconds) for cell, seconds in found.items()}


def as_rank(out: Path, most: int, rounds: int) -> None:
    """Measure as one rank of a lab; rank 0 writes the seconds of every cell."""
    gpu = load_cluster(os.environ["REALRUN_CLUSTER"]).value.gpu

    def work(rank: ranks.Rank) -> None:
        body = body_of(groups(rank.world.layout), most)
        works = {op.work for op in body.body if isinstance(op.work, Compute)}
        sleep = Sleep({each: compute_time(each, gpu, "fp32") for each in works})
        traces = gather_objects(rank.world, carry_out(body, sleep, rounds + 1, rank.world))
        if traces is not None:
            out.write_text(json.dumps(times(merge(traces), body)))  # type: ignore[arg-type]

    ranks.as_rank(RankSettings(), None, work)


def predicted(cluster: Cluster, most: int) -> dict[str, float]:
    """Seconds of every cell by simulation."""
    body = body_of(groups(cluster.layout), most)
    return times(execute(body, cluster, precision="fp32", rounds=2, fold=False), body)


def in_lab(lab: Lab, most: int, *, quick: bool) -> list[Row]:
    """Measure what hosts add, predict, and measure all cells, in one lab each time."""
    lab = replace(lab, dilation=for_cores(lab.world_size, cores()))
    with tempfile.TemporaryDirectory() as place:
        out, file = Path(place) / "seen.json", Path(place) / "stated.toml"
        probe = ["realrun", "probe", "--stated", "--gpu", "virtual", "--out", str(file)]
        probe += ["--quick"] if quick else []
        as_ranks(lab, *probe)
        before = predicted(load_cluster(str(file)).value, most)
        rank = ["--rank", str(out), *["--quick"] * quick]
        as_ranks(lab, sys.executable, str(Path(__file__).resolve()), *rank)
        seen = json.loads(out.read_text())
    return [
        {
            "nodes": lab.nodes,
            "gpus_per_node": lab.gpus_per_node,
            "rate": lab.rate,
            **dict(zip(("way", "kind", "bytes", "group"), cell.split("|"), strict=True)),
            "measured_s": seconds,
            "predicted_s": before[cell],
            "error": before[cell] / seconds - 1,
        }
        for cell, seconds in seen.items()
    ]


def report(rows: Sequence[Row]) -> str:
    """Errors by lab, way and size, in Markdown."""
    frame = pd.DataFrame(rows)
    frame["bytes"] = frame["bytes"].astype(int)
    frame["off"] = frame["error"].abs()
    lines = []
    for (nodes, per_node, rate, way, size), some in frame.groupby(
        ["nodes", "gpus_per_node", "rate", "way", "bytes"], sort=False
    ):
        worst = some.sort_values("off").iloc[-1]
        lines.append(
            {
                "nodes x ranks": f"{nodes} x {per_node}",
                "rate": str(rate),
                "way": str(way),
                "KiB": f"{int(str(size)) / 1024:g}",
                "measured ms, median": f"{some['measured_s'].median() * 1e3:.2f}",
                "error, median": f"{some['error'].median():+.1%}",
                "error, worst": f"{worst['error']:+.1%}",
                "of": f"{worst['kind']} {worst['group']}",
            }
        )
    return f"""\
# Single collectives in the lab, predicted and measured

{len(frame)} cells, each predicted before it ran, from stated rates and measured latencies.
{machine()}

Median absolute error {frame["off"].median():.1%}; of 128 KiB and more \
{frame.loc[frame["bytes"] >= 2**17, "off"].median():.1%}, \
at most {frame.loc[frame["bytes"] >= 2**17, "off"].max():.1%}.

{table(lines)}

{made_by()}
"""


def main() -> None:
    """Measure in every lab, and keep what was seen after each."""
    command = parser(__doc__, "one lab, sizes up to 16 KiB")
    command.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = command.parse_args()
    usual = (LABS, max(SIZES["alone"]), ROUNDS)
    labs, most, rounds = (LABS[:1], QUICK_MOST, 2) if options.quick else usual
    if options.rank:
        as_rank(options.rank, most, rounds)
        return
    rows: list[Row] = []
    with folder(options) as out:
        for lab in labs:
            rows += in_lab(lab, most, quick=options.quick)
            pd.DataFrame(rows).to_csv(out / "collectives.csv", index=False)
            (out / "collectives.md").write_text(report(rows))
    if options.quick:
        print(report(rows))


if __name__ == "__main__":
    main()
