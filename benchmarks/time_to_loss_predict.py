"""What co2sim says of a step in the lab, before it is run there."""

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from co2sim import Case, run
from co2sim.catalog import load_cluster
from co2sim.cluster import GPU
from co2sim.schedule import Collective, DType, Layout, Op, Schedule
from co2sim.strategies import Strategy
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import round_steps
from co2sim.strategies.local_sgd import LocalSGD
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
    stated rate that the network attains. `host`: seconds of a step that averages take beside their
    messages, where every tensor is averaged by itself.
    """

    local_step: Seconds
    interference: float = 0.0
    efficiency: float = 1.0
    host: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorByTensor(LocalSGD):
    """LocalSGD that averages every tensor of the model by itself, as torchft's does."""

    tensors: tuple[int, ...]
    """Elements of each."""

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """The schedule of LocalSGD with its average cut up."""
        whole = LocalSGD.schedule(self, job, layout)
        body = [piece for op in whole.body for piece in self._pieces(op)]
        return Schedule(whole.name, tuple(body), whole.steps)

    def _pieces(self, op: Op) -> list[Op]:
        if not isinstance(op.work, Collective):
            return [op]
        works = [replace(op.work, elements=count) for count in self.tensors]
        names = [*(f"{op.name}{number}" for number in range(1, len(works))), op.name]
        pieces = [Op(name, work, op.stream) for name, work in zip(names, works, strict=True)]
        return [replace(pieces[0], after=op.after), *pieces[1:]]


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
    """Seconds of a step, communication included."""
    return run(case(place, strategy, found)).step_time_s + found.host


def beside_messages(place: Place, local_step: Seconds, averaging: Seconds, tau: int) -> Seconds:
    """Seconds of a step that averages of one element for each tensor take, beside their messages.

    `averaging` is a step with them. At least 0.
    """
    small = TensorByTensor(tau=tau, tensors=(1,) * len(tensors(place.size)))
    return max(0.0, averaging - predicted_step(place, small, Calibrated(local_step)))


@cache
def tensors(size: str) -> tuple[int, ...]:
    """Elements of each parameter of the model."""
    import torch  # noqa: PLC0415 - only where somebody averages tensor by tensor

    from realrun.train.gpt import GPT  # noqa: PLC0415

    with torch.device("meta"):
        return tuple(p.numel() for p in GPT(GPTS[size]).parameters())


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
