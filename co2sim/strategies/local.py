"""What the local-update family shares: who a worker is, its local steps, and its averages.

Local updates make replicas diverge, so only ranks that hold the same parameters can share
optimizer states. A worker is therefore one GPU, or one node: inside the node DDP or ZeRO works over
the fast links in every step, and each rank averages its share with its peers on other nodes.
"""

from typing import Literal, TypeAlias

from co2sim.errors import OptionError
from co2sim.memory import model_states
from co2sim.schedule import (
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
)
from co2sim.strategies.ddp import DDP
from co2sim.strategies.step import COMM, Step
from co2sim.strategies.zero1 import Zero1
from co2sim.strategies.zero2 import Zero2
from co2sim.strategies.zero3 import Zero3
from co2sim.units import Bytes
from co2sim.workload import Workload

Worker: TypeAlias = Literal["gpu", "node"]
Inner: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3"]

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


def check_tau(tau: int) -> None:
    """Refuse a round without local steps."""
    if not 1 <= tau <= _MOST_STEPS:
        raise OptionError(
            f"tau is {tau}; a round has at least 1 and at most {_MOST_STEPS} local steps"
        )


class Replica:
    """The worker of a local-update strategy: which ranks hold one copy, and how they step."""

    __slots__ = ("inner", "worker")

    def __init__(self, worker: Worker, inner: Inner | None, dtype: DType = DType.FP32) -> None:
        """Raises OptionError for an inner strategy without a node to run it in."""
        if worker == "gpu" and inner is not None:
            raise OptionError(f"inner={inner} does not apply to worker=gpu; use worker=node")
        if dtype in {DType.INT8, DType.INT4}:
            raise OptionError(f"dtype={dtype} needs a quantized average; use fp32, bf16 or fp16")
        self.worker = worker
        self.inner = _INNER[inner or "zero2"] if worker == "node" else None

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

    def all_reduce(self, buffer: str, elements: int, dtype: DType) -> Collective:
        """The average of a share among peers."""
        return Collective(Kind.ALL_REDUCE, buffer, elements, dtype, self.peers)

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
