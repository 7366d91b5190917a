"""What co2sim says of a step in the lab, before it is run there."""

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from co2sim import Case, run
from co2sim.catalog import load_cluster
from co2sim.cluster import GPU
from co2sim.schedule import DType
from co2sim.units import Seconds
from co2sim.workload import Workload
from realrun.launch.lab import Lab, stated_cluster
from realrun.train.shapes import GPTS

_ENOUGH = 1e15
"""A speed, in bytes per second, that adds nothing."""

_LEFT = 0.01
"""Of a step: what may stay exposed of an average that counts as hidden."""


@dataclass(frozen=True, slots=True)
class Place:
    """A lab of nodes of one rank, the model trained there, and the samples of a rank in a step."""

    nodes: int
    rate: str
    size: str
    samples: int


def case(place: Place, strategy: str, local_step: Seconds) -> Case:
    """The case on a GPU that takes `local_step` for the arithmetic of a step alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stated.toml"
        path.write_text(stated_cluster(Lab(place.nodes, 1, place.rate)))
        cluster = load_cluster(str(path)).value
    model = GPTS[place.size].model()
    job = Workload(model, place.samples, precision=DType.FP32, recompute="none")
    speed = job.hardware_flops_per_sample * place.samples / local_step
    gpu = GPU("calibrated", 1e12, _ENOUGH, {"fp32": speed}, ((1.0, 1.0),))
    return Case(
        cluster=replace(cluster, gpu=gpu, communicators="stream"),
        model=model,
        strategy=strategy,
        micro_batch=place.samples,
        precision="fp32",
        recompute="none",
    )


@cache
def predicted_step(place: Place, strategy: str, local_step: Seconds) -> Seconds:
    """Seconds of a step, communication included."""
    return run(case(place, strategy, local_step)).step_time_s


@cache
def hidden_delay(place: Place, local_step: Seconds, tau: int) -> int:
    """The least delay of CO2, in local steps, that hides its average, or as much as tau does."""

    def step(delay: int) -> Seconds:
        return predicted_step(place, f"co2:tau={tau},delay={delay}", local_step)

    shortest = step(tau)
    return next(delay for delay in range(1, tau + 1) if step(delay) * (1 - _LEFT) <= shortest)
