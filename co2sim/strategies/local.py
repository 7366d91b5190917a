"""Shared parts of the local-update family: workers, their local steps, and their averages.

Local updates make replicas diverge, so only ranks that hold the same parameters can share
optimizer states. A worker is therefore one GPU, or one node: inside the node DDP or ZeRO works over
the fast links in every step, and each rank averages its share with its peers on other nodes; or
the first rank of each node averages everything, and broadcasts it inside.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from co2sim.errors import OptionError
from co2sim.memory import model_states
from co2sim.schedule import (
    LEADERS,
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.strategies.ddp import DDP
from co2sim.strategies.quantized import QUANTIZED
from co2sim.strategies.step import COMM, COMPUTE, Step, chain, title, whole_options
from co2sim.strategies.zero1 import Zero1
from co2sim.strategies.zero2 import Zero2
from co2sim.strategies.zero3 import Zero3
from co2sim.units import Bytes
from co2sim.workload import Workload

Worker: TypeAlias = Literal["gpu", "node"]
Inner: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3"]
Averaged: TypeAlias = Literal["shares", "leader"]
Unquantized: TypeAlias = Literal[DType.FP32, DType.FP16, DType.BF16]

_MOST_STEPS = 10_000
"""A schedule holds every local step of a round."""

OUTER = "outer"
"""The stream of the averages: their own communicator, so that local steps do not wait for them."""

_INNER: dict[str, DDP | Zero1 | Zero2 | Zero3] = {
    "ddp": DDP(),
    "zero1": Zero1(),
    "zero2": Zero2(),
    "zero3": Zero3(),
}


@runtime_checkable
class LocalSteps(Protocol):
    """A strategy whose workers take `tau` steps of their own between averages."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def tau(self) -> int: ...  # noqa: D102
    @property
    def worker(self) -> Worker: ...  # noqa: D102
    @property
    def inner(self) -> Inner | None: ...  # noqa: D102
    @property
    def dtype(self) -> DType: ...  # noqa: D102


def check(strategy: LocalSteps, *, quantized: bool = False) -> None:
    """Refuse options that are out of range, or contradict each other."""
    whole_options(strategy, "tau", most=_MOST_STEPS)
    if strategy.worker == "gpu" and strategy.inner is not None:
        raise OptionError(f"inner={strategy.inner} does not apply to worker=gpu; use worker=node")
    if strategy.dtype in QUANTIZED and not quantized:
        raise OptionError(
            f"{strategy.name} does not quantize: dtype={strategy.dtype}; use fp32, bf16 or fp16"
        )


@dataclass(frozen=True, slots=True)
class Replica:
    """The ranks that hold one copy of the model, and how they step."""

    worker: Worker
    inner: DDP | Zero1 | Zero2 | Zero3 | None

    @classmethod
    def of(cls, strategy: LocalSteps) -> "Replica":
        """The worker of a strategy; inside a node zero2 runs by default."""
        inside = strategy.worker == "node"
        return cls(strategy.worker, _INNER[strategy.inner or "zero2"] if inside else None)

    @property
    def peers(self) -> Group:
        """The ranks that average the same share."""
        return PEERS if self.worker == "node" else WORLD

    def workers(self, layout: Layout) -> int:
        """Number of workers."""
        return layout.nodes if self.worker == "node" else layout.world_size

    def ranks(self, layout: Layout) -> int:
        """Ranks that share one copy of the outer state."""
        return layout.gpus_per_node if self.worker == "node" else 1

    def share(self, job: Workload, layout: Layout) -> int:
        """Elements that each rank averages."""
        return -(-job.parameters // self.ranks(layout))

    def step(self, job: Workload, layout: Layout) -> Step:
        """One local step."""
        if self.inner is None:
            return DDP().step(job, Layout(1, 1), NODE)
        return self.inner.step(job, layout, NODE)

    def publish(self, job: Workload, layout: Layout, after: str, elements: int) -> list[Op]:
        """Gather updated shares inside the node, where the parameters are whole on every rank.

        It brings what the gathers of the local step before would have brought: `chain` drops them.
        """
        if self.ranks(layout) == 1 or isinstance(self.inner, Zero3):
            return []
        work = Collective(Kind.ALL_GATHER, "parameters", elements, job.precision, NODE)
        return [Op(after.replace("outer", "publish"), work, COMM, (After(after),))]

    def memory(self, job: Workload, layout: Layout, copies: float) -> dict[str, Bytes]:
        """What the local step keeps, and `copies` fp32 copies of this rank's share."""
        if self.inner is None:
            states = model_states(job)
        else:
            states = self.inner.memory(job, Layout(1, layout.gpus_per_node))
        return states | {"outer": copies * self.share(job, layout) * DType.FP32.bytes}


def outer_work(job: Workload, elements: int, tensors: int, kernel: str = "outer") -> Compute:
    """An elementwise kernel that reads or writes `tensors` fp32 values and one live parameter."""
    return Compute(
        kernel, 2.0 * tensors * elements, elements * (4.0 * tensors + job.precision.bytes)
    )


def averaged_rounds(
    strategy: LocalSteps,
    job: Workload,
    layout: Layout,
    *,
    buffer: str,
    tensors: int,
    staleness: int,
    averaged: Averaged = "shares",
) -> Schedule:
    """Local steps, and an average of `buffer` that is used `staleness` rounds after its launch.

    With staleness 0 the outer step waits for the average of its own round; else it waits for an
    older one, and launches the next. It reads or writes `tensors` fp32 values per parameter.
    """
    replica = Replica.of(strategy)
    share = replica.share(job, layout)
    size, dtype = share, strategy.dtype
    spread: list[Op] = []
    group = replica.peers
    if averaged == "leader" and replica.ranks(layout) > 1 and layout.nodes > 1:
        size, group = job.parameters, LEADERS
        spread = [Op("spread", Collective(Kind.BROADCAST, buffer, size, dtype, NODE), OUTER)]
    launch = (After("outer"),) if staleness else ()
    work = Collective(Kind.ALL_REDUCE, buffer, size, dtype, group)
    averages = [Op("average", work, OUTER, launch), *spread]
    waits = (After(averages[-1].name, staleness),)
    outer = Op("outer", outer_work(job, share, tensors), COMPUTE, waits)
    publish = replica.publish(job, layout, "outer", job.parameters)
    ops = [outer, *averages, *publish] if staleness else [*averages, outer, *publish]
    ends = (publish[-1].name,) if publish else ("outer",)
    extra = Step(ops, (ops[0].name,), ends, regathers=bool(publish))
    body = chain(replica.step(job, layout), strategy.tau, {strategy.tau - 1: extra})
    return Schedule(title(strategy), body, steps=strategy.tau)
