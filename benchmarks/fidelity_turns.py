"""Real matrix products on a machine whose speed changes: a probe and a run take turns.

    sudo python benchmarks/fidelity_turns.py            # 16 configurations, half an hour
    sudo python benchmarks/fidelity_turns.py --quick    # one lab, one strategy, three turns

`fidelity.py flops` probes once and then runs, as users do. Where neighbours and clocks change a
machine within seconds, its error is mostly theirs. Here a turn measures kernels of a probe, then a
round (more if it is short), then the kernels again. The GPU that is fitted to the kernels on both
sides, and to nothing else, predicts what is between: afterwards, so this is no forecast. How much
one kernel differs from moment to moment is its jitter, since ranks wait for each other at every
layer. Links are those of a whole probe before. The error of a configuration is the median over its
turns; its standard error comes from resampling them. Writes fidelity-turns.csv and
fidelity-turns.md.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from fidelity import SHORT_PROBE, LabJob, as_ranks, quick_jobs, turns_jobs
from reports import folder, machine, made_by, parser, table

from co2sim.common.units import Seconds
from co2sim.prediction.case import Case
from co2sim.prediction.job import Stage
from co2sim.prediction.measure import measured
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Compute
from co2sim.simulation.costs import compute_time
from co2sim.simulation.noise import Noise
from co2sim.simulation.run import execute
from co2sim.simulation.trace import Trace
from realrun.cli import ranks
from realrun.cli.options import RankSettings
from realrun.execute.executor import execute as carry_out
from realrun.execute.kernels import Burn
from realrun.execute.world import gather_objects
from realrun.measure import make_kernels, merge
from realrun.probe.fit import ComputeSample, Measured, fit_gpu
from realrun.probe.probe import in_turn
from realrun.record import resolve

Times: TypeAlias = dict[Compute, list[Seconds]]
"""Of each kernel, pass by pass."""

WORKS = tuple(Compute("probe", 2.0**power) for power in (31, 29, 27, 25, 23, 21))
COPY = Compute("probe", 0.0, 2.0**28)
EVERY = (*WORKS, COPY)
KERNELS, COPIES = in_turn("kernel ", WORKS), in_turn("copy ", [COPY])
"""As a probe has them, but up to 30 ms. A copy leaves nothing in caches: it has its own turn."""
ABOUT_A_LAYER = WORKS[1]
"""Takes 8 ms, as a pass over a layer does."""
PASSES = 6
"""Rounds of them on each side; the first is not counted."""
SECONDS: Seconds = 0.4
"""Of rounds that are measured in a turn, at least."""
MIN_TURNS = 3
ENOUGH_TURNS = 48
"""With 17 turns of long rounds the median had a standard error of 3 to 5 %."""
DRAWS = 12
"""Of jitter."""


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration as its ranks run it."""

    case: Case
    prepared: Stage
    warm_up: int
    rounds: int
    jitter: float = 0.0

    @property
    def total(self) -> int:
        """All rounds of a turn."""
        return self.warm_up + self.rounds

    def turns(self, seconds: Seconds) -> int:
        """How many fit into so much time, by the prediction: as many on all ranks, and enough.

        Without any time they are as few as can be.
        """
        gpu = self.prepared.cluster.gpu
        kernels = PASSES * sum(compute_time(work, gpu, "fp32") for work in EVERY)
        once = self.total * self.predicted()[0].round_time_s + kernels
        return max(ENOUGH_TURNS if seconds else MIN_TURNS, round(seconds / once))

    @classmethod
    def of(cls, case: Case) -> "Job":
        """As many rounds as `SECONDS` need, by the GPU of its cluster."""
        prepared = case.stage()
        once = cls(case, prepared, max(prepared.schedule.lag, 1), 1)
        return replace(once, rounds=math.ceil(SECONDS / once.predicted()[0].round_time_s))

    def predicted(self) -> list[Result]:
        """The rounds of a turn, simulated: once, or for each draw of the jitter."""
        schedule, cluster = self.prepared.schedule, self.prepared.cluster
        found = []
        for seed in range(DRAWS if self.jitter else 1):
            noise = Noise(jitter=self.jitter, seed=seed)
            trace = execute(
                schedule, cluster, precision="fp32", rounds=self.total, fold=False, noise=noise
            )
            found.append(self.figures(trace))
        return found

    def figures(self, trace: Trace) -> Result:
        """Of the rounds that count; what is exposed is not asked."""
        return measured(self.prepared, trace, self.rounds, free=trace)

    def on(self, kernels: Sequence[Sequence[Times]]) -> "Job":
        """With the GPU that is fitted to the kernels of all sides of all ranks, and their jitter.

        The slowest rank sets the pace.
        """
        cluster = self.prepared.cluster
        means = [
            {
                work: statistics.fmean(time for side in sides for time in side[work])
                for work in EVERY
            }
            for sides in kernels
        ]
        slowest = max(means, key=lambda times: sum(times.values()))
        samples = [ComputeSample(work, slowest[work]) for work in EVERY]
        measured = Measured(
            layout=cluster.layout,
            backend=cluster.backend,
            machine=cluster.gpu.name,
            memory=cluster.gpu.memory,
            collectives=(),
            compute={"fp32": tuple(samples[:-1])},
            copies=(samples[-1],),
            launch=cluster.gpu.launch_overhead,
            handover=0.0,
            slowdowns=(),
        )
        gpu = fit_gpu(measured)
        assert gpu is not None
        case = replace(self.case, cluster=replace(cluster, gpu=gpu))
        return replace(self, case=case, prepared=case.stage(), jitter=jitter(kernels))


def jitter(kernels: Sequence[Sequence[Times]]) -> float:
    """Sigma of the logarithms of one kernel's times about the mean of its side, 1 at most."""
    logs = [[math.log(time) for time in side[ABOUT_A_LAYER]] for sides in kernels for side in sides]
    return min(1.0, math.sqrt(statistics.fmean(map(statistics.variance, logs))))


Row: TypeAlias = dict[str, Any]
LENGTHS = (256, 1024)  # a turn is over before the machine has changed much
EACH: Seconds = 60.0
"""About what a configuration takes."""
RESAMPLED = 2000
"""Draws of turns."""
KEY = ["rate", "length", "strategy"]  # of a configuration


def as_rank(cluster: str, job: LabJob, lengths: Sequence[int], seconds: Seconds, out: Path) -> None:
    """Take turns as one rank of a lab; rank 0 writes a row for each turn of each strategy."""

    def work(rank: ranks.Rank) -> None:
        rows: list[Row] = []
        for length, text in itertools.product(lengths, job.strategies):
            rows += take_turns(rank, cluster, job.model, length, text, seconds)
        if rank.world.rank == 0:
            out.write_text(json.dumps(rows))

    ranks.as_rank(RankSettings(), None, work)


def take_turns(
    rank: ranks.Rank, cluster: str, model: str, length: int, text: str, seconds: Seconds
) -> list[Row]:
    """Kernels, rounds, kernels, rounds, ..., kernels. Rows on rank 0."""
    world = rank.world
    changed = {"model.seq_len": str(length)}
    case = Case(cluster=cluster, model=model, strategy=text, precision="fp32", overrides=changed)
    job = Job.of(resolve(case, world.layout, world.backend)[0])
    world.place(job.prepared.cluster.layout)
    burn = make_kernels("flops", job.prepared, world)
    assert isinstance(burn, Burn)

    def kernels() -> Times:
        found: Times = {}
        for body in (COPIES, KERNELS):
            spans = [one for one in carry_out(body, burn, PASSES, world).spans if one.round]
            for op in body.body:
                times = [span.end - span.start for span in spans if span.op == op.name]
                found[op.work] = times  # type: ignore[index]
        return found

    own, before, turns = [], kernels(), job.turns(seconds)
    for turn in range(turns):
        trace = carry_out(job.prepared.schedule, burn, job.total, world)
        after = kernels()
        own.append((trace, (before, after)))
        before = after
        if rank.progress:
            rank.progress(f"{text}, {length} tokens: turn {turn + 1} of {turns}")
    gathered = gather_objects(world, own) or []
    return [row(job, turn, seen) for turn, seen in enumerate(zip(*gathered, strict=True))]  # type: ignore[call-overload]


def row(job: Job, turn: int, seen: Sequence[tuple[Trace, tuple[Times, Times]]]) -> Row:
    """What all ranks saw in a turn, and what was to be expected."""
    traces, kernels = zip(*seen, strict=True)
    found, on = job.figures(merge(traces)), job.on(kernels)
    there = on.predicted()
    return {
        "strategy": found.strategy,
        "length": job.prepared.workload.model.tokens,
        "turn": turn,
        "rounds": job.rounds,
        "kernel_s": compute_time(WORKS[0], on.prepared.cluster.gpu, "fp32"),
        "jitter": on.jitter,
        "measured_s": found.round_time_s,
        "measured_busy_s": found.comm_busy_s,
        "predicted_s": statistics.fmean(one.round_time_s for one in there),
        "predicted_busy_s": statistics.fmean(one.comm_busy_s for one in there),
    }


def in_one_lab(job: LabJob, number: int, *, quick: bool) -> list[Row]:
    """Probe a lab, then take turns there."""
    with tempfile.TemporaryDirectory() as place:
        probed, out = Path(place) / "probed.toml", Path(place) / "turns.json"
        budget = SHORT_PROBE if quick else ()
        as_ranks(job.lab, "realrun", "probe", *budget, "--out", str(probed))
        chosen = ["--job", str(number), *["--quick"] * quick]
        rank = [*chosen, "--rank", str(out), "--cluster", str(probed)]
        as_ranks(job.lab, sys.executable, str(Path(__file__).resolve()), *rank)
        rows: list[Row] = json.loads(out.read_text())
    where = {"nodes": job.lab.nodes, "gpus_per_node": job.lab.gpus_per_node, "rate": job.lab.rate}
    return [where | {"model": job.model} | row for row in rows]


def standard_error(values: Sequence[float]) -> float:
    """Of the median, from resampled values."""
    draws = np.random.default_rng(0).choice(values, (RESAMPLED, len(values)))
    return float(np.median(draws, axis=1).std())


def configurations(rows: Sequence[Row]) -> pd.DataFrame:
    """One row for each configuration: medians over its turns."""
    frame = pd.DataFrame(rows)
    frame["error"] = frame["predicted_s"] / frame["measured_s"] - 1
    frame["busy_error"] = frame["predicted_busy_s"] / frame["measured_busy_s"] - 1
    found = []
    for key, some in frame.groupby(KEY, sort=False):
        least, most = (some["kernel_s"].quantile(share) for share in (0.1, 0.9))
        found.append(
            {
                **dict(zip(KEY, key, strict=True)),
                "turns": len(some),
                "jitter": some["jitter"].median(),
                "round": some["measured_s"].median(),
                "busy": some["busy_error"].median(),
                "error": some["error"].median(),
                "standard_error": standard_error(some["error"].tolist()),
                "least": some["error"].quantile(0.1),
                "most": some["error"].quantile(0.9),
                "slower": most / least - 1,
            }
        )
    return pd.DataFrame(found)


def report(rows: Sequence[Row]) -> str:
    """Errors of all configurations, in Markdown."""
    frame = configurations(rows)
    off, busy = frame["error"].abs(), frame["busy"].abs()
    lines = [
        {
            "rate": str(one.rate),
            "tokens": str(one.length),
            "strategy": f"`{one.strategy}`",
            "turns": str(one.turns),
            "round ms": f"{one.round * 1e3:.1f}",
            "busy": f"{one.busy:+.1%}",
            "round": f"{one.error:+.1%}",
            "standard error": f"{one.standard_error:.1%}",
            "single turns, 10 to 90 %": f"{one.least:+.0%} to {one.most:+.0%}",
            "jitter": f"{one.jitter:.0%}",
            "kernels, slow to fast": f"{one.slower:+.0%}",
        }
        for one in frame.itertuples()
    ]
    return f"""\
# Real matrix products, a probe and a run in turns

{len(frame)} configurations on 2 nodes of 1 rank, {rows[0]["model"]} with these tokens a sequence,
predicted from kernels that were measured just before and after, and from the links of a probe.
{machine()}

Median and largest absolute error, of the median over the turns: round time {off.median():.1%} and
{off.max():.1%}; communication busy time {busy.median():.1%} and {busy.max():.1%}. *Jitter*: sigma
of a kernel of 8 ms, from moment to moment. *Kernels*: by how much the time of a kernel of 2.1 GFLOP
was longer in the turn at 90 % than in that at 10 %.

{table(lines)}

{made_by()}
"""


def main() -> None:
    """Take turns in every lab, and keep what was seen after each."""
    command = parser(__doc__, "a short probe, one lab, one strategy, three turns")
    for name in ("--job", "--rank", "--cluster"):  # of a rank
        command.add_argument(name, help=argparse.SUPPRESS)
    options = command.parse_args()
    jobs, lengths, seconds = list(turns_jobs()), LENGTHS, EACH
    if options.quick:
        jobs = [replace(job, strategies=job.strategies[:1]) for job in quick_jobs()]
        lengths, seconds = LENGTHS[:1], 0.0
    if options.rank:
        job = jobs[int(options.job)]
        as_rank(options.cluster, job, lengths, seconds, Path(options.rank))
        return
    rows: list[Row] = []
    with folder(options) as out:
        for number, job in enumerate(jobs):
            rows += in_one_lab(job, number, quick=options.quick)
            pd.DataFrame(rows).to_csv(out / "fidelity-turns.csv", index=False)
            (out / "fidelity-turns.md").write_text(report(rows))
    if options.quick:
        print(report(rows))


if __name__ == "__main__":
    main()
