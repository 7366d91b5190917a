"""CO2: local updates whose average is hidden behind further steps."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from co2sim.common.delayed_averaging import LateAverage, kept
from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import DType, Layout, Schedule
from co2sim.strategies.local import (
    Auto,
    Averaged,
    Averages,
    Inner,
    Replica,
    Unquantized,
    Worker,
    averaged_rounds,
    check,
    require_chosen,
    round_steps,
)
from co2sim.strategies.step import QUANTIZED, whole_options
from co2sim.training.memory import Items
from co2sim.training.workload import Workload

_MAX_STALENESS = 100
"""A rank keeps a buffer for every average in flight: as many rounds pass before a steady one."""

_BUFFER = "displacement"


@dataclass(frozen=True, slots=True, kw_only=True)
class CO2:
    """`tau` local steps; the average launched after them is used `delay` steps later.

    Workers continue from where they are: x becomes anchor + `keep` (x - x at the launch) +
    `predict` (delay / tau) (mean progress). The model is cut into `fragments`, which are averaged
    at evenly spread steps of a round. With a `preview` workers take the outer step at once, by
    their own displacements, and hold these until the mean has replaced them. Defaults are those
    of `LateAverage`.

    "auto" is chosen by simulation: the least delay that hides the averages, the shortest such
    round. The method as published, with a restart, is `co2.published`.

    Sources: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
    Overlap, ICLR 2024, arXiv 2401.16265; a delay in steps: Zhou et al. 2020, DaSGD, arXiv
    2006.00441, with delay = tau Shen et al. 2019, CoCoD-SGD, arXiv 1906.12043.
    """

    name: ClassVar[str] = "co2"
    shares: ClassVar[str] = "steps"
    divides_experts: ClassVar[bool] = True

    tau: int | Auto = "auto"
    delay: int | Auto = "auto"
    keep: float | None = None
    predict: float | None = None
    fragments: int | None = None
    preview: bool = False
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: Unquantized | Literal[DType.INT8] = DType.FP32
    average: Averaged = "shares"

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self, quantized=frozenset({DType.INT8}))
        _check_average(self)
        if self.delay != "auto":
            whole_options(self, "delay", most=None if self.tau == "auto" else self.tau)
        if self.fragments is not None:
            whole_options(self, "fragments", most=None if self.tau == "auto" else self.tau)
        late = self.late
        if self.tau != "auto":
            late.of(self.tau)

    @property
    def late(self) -> LateAverage:
        """How an average is used. Raises OptionError for options out of range."""
        try:
            return LateAverage(
                delay=self.delay,
                keep=self.keep,
                predict=self.predict,
                fragments=self.fragments,
                preview=self.preview,
            )
        except OptionError as error:
            raise OptionError(f"{self.name}: {error}") from None

    def kept(self) -> tuple[float, float]:
        """How much of its progress a worker keeps, and how much of the mean it adds."""
        return kept(round_steps(self), self.keep, self.predict)

    def parts(self) -> int:
        """The number of fragments."""
        return self.late.parts(round_steps(self))

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Fill and launch the average of a fragment; update momentum and anchor with the last."""
        # filling reads anchor and x; writes the displacement and a copy of x. The outer step reads
        # average, momentum, anchor, x and the copy; writes momentum, anchor and x. Stepping alone
        # reads the momentum and writes x; that step is read and written, too
        fill, outer = (8, 10) if self.preview else (4, 8)
        plan = Averages(
            buffer=_BUFFER,
            fill=fill,
            outer=outer,
            delay=require_chosen(self.name, "delay", self.delay),
            fragments=self.parts(),
            by=self.average,
        )
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> Items:
        """The inner strategy, anchor, momentum, an average in flight and x at its launch.

        And with a preview the step that a worker took alone.
        """
        return _memory(self, job, layout, flights=1, points=1 + self.preview)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCO2:
    """CO2 as published: the average launched after `tau` steps is used `staleness` rounds later.

    All workers then restart from one point.

    Where a node is the worker, `average` says who averages: "shares", every rank its share with
    its peers; "leader", the first rank of each node everything, which it broadcasts inside, as in
    the authors' code (github.com/weigao266/fairscale-CO2, gossip/co2.py). The outer step itself
    stays sharded over the ranks of a node.

    Source: Sun et al., CO2, ICLR 2024, arXiv 2401.16265.
    """

    name: ClassVar[str] = "co2.published"
    shares: ClassVar[str] = "steps"
    divides_experts: ClassVar[bool] = True

    tau: int = 12
    staleness: int = 1
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: Unquantized | Literal[DType.INT8] = DType.FP32
    average: Averaged = "shares"

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self, quantized=frozenset({DType.INT8}))
        _check_average(self)
        if self.staleness == 0:
            raise OptionError(
                f"{self.name}: staleness is 0; it must be at least 1 (slowmo is staleness 0)"
            )
        whole_options(self, "staleness", most=_MAX_STALENESS)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update momentum and anchor, launch the new average."""
        # the outer step reads x, average, anchor and momentum; writes momentum, anchor, x and the
        # displacement
        plan = Averages(buffer=_BUFFER, outer=8, delay=self.staleness * self.tau, by=self.average)
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> Items:
        """The inner strategy, anchor, momentum and averages in flight."""
        return _memory(self, job, layout, flights=self.staleness, points=0)


def _check_average(strategy: CO2 | PublishedCO2) -> None:
    """Refuse a leader without ranks to lead, or would have to quantize."""
    if strategy.average != "leader":
        return
    if strategy.worker != "node" or strategy.inner in {"zero3", "zeropp", "fsdp"}:
        raise OptionError(
            "average=leader needs worker=node, and an inner strategy that keeps parameters"
            " whole: ddp, zero1 or zero2"
        )
    if strategy.dtype in QUANTIZED:
        raise OptionError(f"average=leader does not quantize: dtype={strategy.dtype}")


def _memory(
    strategy: CO2 | PublishedCO2, job: Workload, layout: Layout, *, flights: int, points: int
) -> Items:
    """The inner strategy, anchor, momentum, averages in flight and a worker's own points."""
    replica = Replica.of(strategy)
    whole = replica.ranks(layout) if strategy.average == "leader" else 1
    quantized = strategy.dtype in QUANTIZED
    size = 1.0 if quantized else strategy.dtype.bytes / DType.FP32.bytes
    return replica.memory(job, layout, 2 + flights * whole * size + points)


def has_auto_options(strategy: Any) -> bool:
    """Whether a number is still to be chosen."""
    return isinstance(strategy, CO2) and "auto" in {strategy.tau, strategy.delay}
