"""What co2sim says of a step in the lab, before it is run there."""

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from co2sim import Case, run
from co2sim.catalog import load_cluster
from co2sim.cluster import GPU
from co2sim.schedule import DType
from co2sim.strategies import Strategy
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import round_steps
from co2sim.study import settle
from co2sim.units import Seconds, parse
from co2sim.workload import Workload
from realrun.launch.lab import stated_cluster
from realrun.launch.lab_plan import Lab
from realrun.train.shapes import GPTS

_ENOUGH = 1e15
"""A speed, in bytes per second, that adds nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """A lab of nodes of one rank, the model trained there, and the samples of a rank in a step."""

    nodes: int
    rate: str
    size: str
    samples: int


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a lab is found to be, just before a run: seconds of a local step alone.

    `interference`: the share by which sending slows it down. `efficiency`: the fraction of its
    stated rate that the network attains. `messages`: seconds of a step with averages of hardly any
    bytes, where every tensor is averaged by itself: so long do the cores need for the messages.
    """

    local_step: Seconds
    interference: float = 0.0
    efficiency: float = 1.0
    messages: Seconds = 0.0


def case(place: Place, strategy: str | Strategy, found: Calibrated) -> Case:
    """The case on a GPU, and on a network, as they were found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stated.toml"
        path.write_text(stated_cluster(Lab(place.nodes, 1, place.rate)))
        cluster = load_cluster(str(path)).value
    model = GPTS[place.size].model()
    job = Workload(model, place.samples, precision=DType.FP32, recompute="none")
    speed = job.hardware_flops_per_sample * place.samples / found.local_step
    gpu = GPU("calibrated", 1e12, _ENOUGH, {"fp32": speed}, ((1.0, 1.0),))
    inter = replace(cluster.inter, efficiency=cluster.inter.efficiency * found.efficiency)
    cluster = replace(cluster, gpu=gpu, inter=inter, communicators="stream")
    return Case(
        cluster=replace(cluster, interference=found.interference),
        model=model,
        strategy=strategy,
        micro_batch=place.samples,
        precision="fp32",
        recompute="none",
    )


@cache
def predicted_step(place: Place, strategy: str | Strategy, found: Calibrated) -> Seconds:
    """Seconds of a step, communication included.

    The cores prepare a message while the network carries the one before: the slower one counts.
    """
    return max(run(case(place, strategy, found)).step_time_s, found.messages)


def network_efficiency(place: Place, local_step: Seconds, averaging: Seconds) -> float:
    """What the network attains of its stated rate, where a step with an average takes `averaging`.

    At most 1. The model's average, one after each step, takes what is beyond the local step.
    """
    stated = predicted_step(place, "local_sgd:tau=1", Calibrated(local_step)) - local_step
    return min(1.0, stated / max(stated, averaging - local_step))


def shortest_round(place: Place, strategy: str, local_step: Seconds) -> int:
    """For tau=auto: the steps of the shortest round that hides its average."""
    return round_steps(with_delay(place, strategy, local_step))


@cache
def with_delay(place: Place, strategy: str, local_step: Seconds) -> CO2:
    """The strategy with co2sim's numbers for tau=auto and delay=auto."""
    chosen = settle(case(place, strategy, Calibrated(local_step))).strategy
    assert isinstance(chosen, CO2)
    return chosen


def elements_of_a_step(place: Place, local_step: Seconds) -> int:
    """The fp32 elements whose all-reduce takes four fifths of a local step, at least one."""
    bandwidth = parse(place.rate, "B/s")
    ring = 2 * (place.nodes - 1) / place.nodes * DType.FP32.bytes
    return int(0.8 * local_step * bandwidth / ring) + 1
