"""One configuration in which kernels of a probe and a run take turns, and what predicts it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from co2sim.case import Case
from co2sim.compute import compute_time
from co2sim.noise import Noise
from co2sim.prepared import Prepared
from co2sim.result import Result
from co2sim.schedule import Compute
from co2sim.simulator import execute
from co2sim.trace import Trace
from co2sim.units import Seconds
from realrun.probe.processor import fit_gpu
from realrun.probe.samples import ComputeSample, Measured
from realrun.probe.tasks import in_turn

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
LEAST_TURNS = 3
ENOUGH_TURNS = 48
"""With 17 turns of long rounds the median had a standard error of 3 to 5 %."""
DRAWS = 12
"""Of jitter."""


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration as its ranks run it."""

    case: Case
    prepared: Prepared
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
        return max(ENOUGH_TURNS if seconds else LEAST_TURNS, round(seconds / once))

    @classmethod
    def of(cls, case: Case) -> "Job":
        """As many rounds as `SECONDS` need, by the GPU of its cluster."""
        prepared = case.prepare()
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
        return self.prepared.measure(trace, self.rounds, False, trace)  # noqa: FBT003

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
        gpu = replace(gpu, streams=cluster.gpu.streams)
        case = replace(self.case, cluster=replace(cluster, gpu=gpu))
        return replace(self, case=case, prepared=case.prepare(), jitter=jitter(kernels))


def jitter(kernels: Sequence[Sequence[Times]]) -> float:
    """Sigma of the logarithms of one kernel's times about the mean of its side, 1 at most."""
    logs = [[math.log(time) for time in side[ABOUT_A_LAYER]] for sides in kernels for side in sides]
    return min(1.0, math.sqrt(statistics.fmean(map(statistics.variance, logs))))
