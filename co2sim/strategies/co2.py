"""CO2: local updates whose average is hidden behind the next round's steps."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.errors import OptionError
from co2sim.schedule import DType, Layout, Schedule
from co2sim.strategies.local import (
    Averaged,
    Inner,
    Replica,
    Unquantized,
    Worker,
    averaged_rounds,
    check,
)
from co2sim.strategies.step import whole_options
from co2sim.units import Bytes
from co2sim.workload import Workload

_MOST_STALENESS = 100
"""A rank keeps a buffer for every average in flight; so many rounds pass before a steady one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CO2:
    """`tau` local steps; the average launched after them is used `staleness` rounds later.

    Where a node is the worker, `average` says who averages: "shares", every rank its share with
    its peers; "leader", the first rank of each node everything, which it broadcasts inside, as in
    the authors' code (github.com/weigao266/fairscale-CO2, gossip/co2.py). The outer step itself
    stays sharded over the ranks of a node.

    Source: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
    Overlap, ICLR 2024, arXiv 2401.16265.
    """

    name: ClassVar[str] = "co2"

    tau: int = 12
    staleness: int = 1
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: Unquantized = DType.FP32
    average: Averaged = "shares"

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self)
        if self.staleness == 0:
            raise OptionError("co2: staleness is 0; it must be at least 1 (slowmo is staleness 0)")
        whole_options(self, "staleness", most=_MOST_STALENESS)
        if self.average == "leader" and (self.worker != "node" or self.inner == "zero3"):
            raise OptionError(
                "average=leader needs worker=node, and an inner strategy that keeps parameters"
                " whole: ddp, zero1 or zero2"
            )

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update momentum and anchor, launch the new average, go on."""
        # reads x, average, anchor and momentum; writes momentum, anchor, x and the displacement
        return averaged_rounds(
            self,
            job,
            layout,
            buffer="displacement",
            tensors=8,
            staleness=self.staleness,
            averaged=self.average,
        )

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and anchor, momentum and one buffer per average in flight."""
        replica = Replica.of(self)
        whole = replica.ranks(layout) if self.average == "leader" else 1
        copies = 2 + self.staleness * whole * self.dtype.bytes / DType.FP32.bytes
        return replica.memory(job, layout, copies)
