"""Collectives in a lab of leaves and a spine, and two jobs that share it, predicted and measured.

    sudo python benchmarks/leaves.py            # about 6 minutes
    sudo python benchmarks/leaves.py --quick    # one lab, few rounds

Four nodes of 1 Gbit/s stand on one leaf or on two, whose links are oversubscribed. Predictions are
from these rates, and from latencies that are measured just before on one switch. Of two jobs each
has a node on each leaf, and repeats an all-reduce of its size without a pause. Writes leaves.csv
and leaves.md.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch
import torch.distributed as dist
from fidelity import as_ranks
from reports import folder, machine, made_by, parser, table

from co2sim.catalog import load_cluster
from co2sim.common.units import Seconds
from co2sim.hardware.fabric import Fabric, Tier
from co2sim.schedule.schedule import WORLD, After, Collective, Compute, DType, Kind, Op, Schedule
from co2sim.simulation.beside import Meeting, Sharer
from co2sim.simulation.costs import work_time
from co2sim.simulation.run import execute
from realrun.execute.kernels import Sleep
from realrun.execute.world import World, communicating, end, gather_objects, join
from realrun.lab.lab import Lab
from realrun.lab.time_dilation import SLEEPING, chosen
from realrun.launch.launcher import cores
from realrun.probe import probe

Row: TypeAlias = dict[str, Any]

DEADLINE: Seconds = 120.0
KINDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL)
SIZES = (2**20, 2**23)
PAUSE = Compute("pause", 1e9)
"""Before a collective, so that links have their bursts again."""

ROUNDS, QUICK_ROUNDS = 12, 4
LAB = Lab(4, 1, "1 Gbit/s", leaf=4)
LABS = [
    LAB,
    *(
        replace(LAB, leaf=2, oversubscription=ratio, placement=placement)
        for placement in ("packed", "cyclic")
        for ratio in (1.0, 2.0, 4.0)
    ),
]
JOBS = [
    replace(LAB, leaf=2, oversubscription=ratio, placement="cyclic")  # each job on both leaves
    for ratio in (1.0, 2.0, 4.0)
]
SHARES = (2**23, 2**22)
"""Bytes of the all-reduces of the two jobs."""


def sweep() -> Schedule:
    """All collectives, each after a pause."""
    ops: list[Op] = []
    for size in SIZES:
        for kind in KINDS:
            name = f"{kind} of {size // 2**20} MiB"
            waits = (After(ops[-1].name),) if ops else ()
            work = Collective(kind, "x", size // 4, DType.FP32, WORLD)
            ops += [
                Op(f"pause before {name}", PAUSE, "compute", waits),
                Op(name, work, "comm", (After(f"pause before {name}"),)),
            ]
    return Schedule("sweep", tuple(ops))


def reduction(size: int) -> Schedule:
    """What a job repeats."""
    work = Collective(Kind.ALL_REDUCE, "x", size // 4, DType.FP32, WORLD)
    return Schedule(f"{size}", (Op("reduce", work, "comm"),))


# --- ranks ----------------------------------------------------------------------------------------


def be_rank(options: argparse.Namespace) -> None:
    """Measure, and write what was seen."""
    world = join("gloo", DEADLINE)
    work = two_jobs if options.jobs else collectives
    seen = work(world, options)
    if world.rank == 0:
        options.rank_out.write_text(json.dumps(seen))
    world.leave()
    end()


def collectives(world: World, options: argparse.Namespace) -> dict[str, Seconds]:
    """The mean time of each, by name, but for the first round."""
    schedule, cluster = sweep(), load_cluster(str(options.cluster)).value
    kernels = Sleep({PAUSE: work_time(PAUSE, cluster, "fp32")})
    task = probe.ProbeTask("", schedule, kernels, options.rounds)
    times = probe.time(world, task)
    return {op.name: statistics.fmean(times[op.name]) for op in schedule.body}


def two_jobs(world: World, options: argparse.Namespace) -> list[list[Seconds]]:
    """Of each job, alone and beside the other, the mean time of an all-reduce; on rank 0."""
    job = world.rank // 2
    with communicating():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    buffer = torch.zeros(SHARES[job] // 4)
    lasts: list[list[Seconds]] = [[], []]
    for busy in ((0,), (1,), (0, 1)):
        dist.barrier()
        ends = []
        count = options.rounds * max(SHARES) // SHARES[job]
        for _ in range(count if job in busy else 0):
            dist.all_reduce(buffer, group=groups[job])
            ends.append(world.clock.now())
        everyone = gather_objects(world, ends)
        for each, time_ in zip(busy, _means(busy, everyone) if everyone else (), strict=False):
            lasts[each].append(time_)
    return lasts


def _means(busy: Sequence[int], ends: Sequence[Sequence[Seconds]]) -> Iterator[Seconds]:
    """Of jobs whose all-reduces end at these moments, by rank, while all of them run."""
    until = min(ends[2 * job][-1] for job in busy)
    for job in busy:
        inside = [moment for moment in ends[2 * job][1:] if moment <= until]
        yield (inside[-1] - inside[0]) / (len(inside) - 1)


# --- the bench ------------------------------------------------------------------------------------


def in_ranks(lab: Lab, *words: str) -> Any:
    """What ranks of this script write in a lab."""
    with tempfile.TemporaryDirectory() as place:
        seen = Path(place) / "seen.json"
        as_ranks(lab, sys.executable, __file__, "--rank-out", str(seen), *words)
        return json.loads(seen.read_text())


def measured(lab: Lab, probed: Path, rounds: int) -> Iterator[Row]:
    """Collectives of one lab, beside their prediction."""
    changes = lab.beyond(0.0)
    cluster = load_cluster(str(probed), changes).value
    schedule = sweep()
    trace = execute(schedule, cluster, precision="fp32", rounds=4)
    predicted = probe.durations([trace], schedule)
    seen = in_ranks(lab, "--cluster", str(probed), "--rounds", str(rounds))
    for op in schedule.body:
        if op.work != PAUSE:
            yield _row(lab, op.name, seen[op.name], statistics.fmean(predicted[op.name]))


def beside(lab: Lab, probed: Path, rounds: int) -> Iterator[Row]:
    """Two jobs on one lab, beside their prediction."""
    of_all = load_cluster(str(probed)).value
    both = replace(of_all, nodes=2, host=None, fabric=_of_one(lab))
    met = Meeting([Sharer(reduction(size), both, "fp32") for size in SHARES]).run()
    seen = in_ranks(lab, "--jobs", "--rounds", str(rounds))
    for number, (size, shared, times) in enumerate(zip(SHARES, met, seen, strict=True)):
        name = f"job {number + 1} of two: all_reduce of {size // 2**20} MiB"
        yield _row(lab, f"{name}, alone", times[0], shared.alone)
        yield _row(lab, f"{name}, beside", times[1], statistics.fmean(shared.rounds))


def _of_one(lab: Lab) -> Fabric:
    """The leaves as a job sees them that has one node of each."""
    assert lab.leaf
    return Fabric(Tier(lab.leaf, lab.oversubscription), share=1 / lab.leaf)


def _row(lab: Lab, what: str, seen: Seconds, predicted: Seconds) -> Row:
    row = {
        "nodes_on_leaf": lab.leaf,
        "oversubscription": lab.oversubscription,
        "placement": lab.placement,
        "what": what,
        "measured_s": seen,
        "predicted_s": predicted,
        "error": predicted / seen - 1,
    }
    print(row, flush=True)
    return row


def report(rows: Sequence[Row]) -> str:
    """The table, in Markdown."""
    errors = pd.DataFrame(rows)["error"].abs()
    cells = [
        {
            "nodes on a leaf": str(row["nodes_on_leaf"]),
            "oversubscription": f"{row['oversubscription']:g}",
            "placement": row["placement"],
            "what": row["what"],
            "measured ms": f"{row['measured_s'] * 1e3:.1f}",
            "predicted ms": f"{row['predicted_s'] * 1e3:.1f}",
            "error": f"{row['error']:+.1%}",
        }
        for row in rows
    ]
    return f"""\
# Leaves and a spine in the lab

4 nodes of {LAB.rate}, {time.strftime("%Y-%m-%d")}. {machine()}

Predicted from stated rates, and from latencies measured just before on one switch. Absolute errors:
median {errors.median():.1%}, largest {errors.max():.1%}.

{table(cells)}

{made_by()}
"""


def main() -> None:
    """Probe once, then measure all labs."""
    command = parser(__doc__, "one lab, few rounds")
    command.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    command.add_argument("--cluster", type=Path, help=argparse.SUPPRESS)
    command.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    command.add_argument("--jobs", action="store_true", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.rank_out:
        be_rank(options)
    times = int(chosen("auto", SLEEPING, LAB.world_size, cores()))
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    rows: list[Row] = []
    with folder(options) as out, tempfile.TemporaryDirectory() as place:
        probed = Path(place) / "probed.toml"
        asked = ["--stated", "--gpu", "virtual", *["--quick"] * options.quick]
        near = replace(LAB.one_switch, dilation=times)
        as_ranks(near, "realrun", "probe", *asked, "--out", str(probed))
        for bench, labs in ((measured, LABS), (beside, JOBS)):
            for lab in labs[-1:] if options.quick else labs:
                rows += bench(replace(lab, dilation=times), probed, rounds)
                pd.DataFrame(rows).to_csv(out / "leaves.csv", index=False)
                (out / "leaves.md").write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    main()
