"""CO2: local updates whose average is hidden behind the next round's steps."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from co2sim.common.delayed_averaging import MAX_FRAGMENTS, check_predict, even_fragments, kept
from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes
from co2sim.common.validation import between
from co2sim.models.workload import Workload
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
    round_steps,
    settled,
)
from co2sim.strategies.step import QUANTIZED, whole_options

_MAX_STALENESS = 100
"""A rank keeps a buffer for every average in flight: as many rounds pass before a steady one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CO2:
    """`tau` local steps; the average launched after them is used `staleness` rounds later.

    With `delay` it is used that many local steps later, and workers continue from where they are: x
    becomes anchor + `keep` (x - x at the launch) + `predict` (delay / tau) (mean progress). The
    model is cut into `fragments`, which are averaged at evenly spread steps of a round; their
    defaults are those of `delayed_averaging`. With a `preview` workers take the outer step at once,
    by their own displacements, and hold these until the mean has replaced them.

    "auto" is chosen by simulation: the least delay that hides the averages, the shortest such
    round.

    Where a node is the worker, `average` says who averages: "shares", every rank its share with
    its peers; "leader", the first rank of each node everything, which it broadcasts inside, as in
    the authors' code (github.com/weigao266/fairscale-CO2, gossip/co2.py). The outer step itself
    stays sharded over the ranks of a node.

    Sources: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
    Overlap, ICLR 2024, arXiv 2401.16265; a delay in steps: Zhou et al. 2020, DaSGD, arXiv
    2006.00441, with delay = tau Shen et al. 2019, CoCoD-SGD, arXiv 1906.12043.
    """

    name: ClassVar[str] = "co2"

    tau: int | Auto = 12
    staleness: int = 1
    delay: int | Auto | None = None
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
        if self.staleness == 0:
            raise OptionError("co2: staleness is 0; it must be at least 1 (slowmo is staleness 0)")
        whole_options(self, "staleness", most=_MAX_STALENESS)
        self._check_delay()
        if self.delay is not None and self.tau != "auto":
            check_predict(self.tau, self.delay, *self.kept())
        if self.average == "leader":
            if self.worker != "node" or self.inner in {"zero3", "zeropp", "fsdp"}:
                raise OptionError(
                    "average=leader needs worker=node, and an inner strategy that keeps parameters"
                    " whole: ddp, zero1 or zero2"
                )
            if self.dtype in QUANTIZED:
                raise OptionError(f"average=leader does not quantize: dtype={self.dtype}")

    def kept(self) -> tuple[float, float]:
        """How much of its progress a worker keeps, and how much of the mean it adds."""
        return kept(round_steps(self), self.keep, self.predict)

    def parts(self) -> int:
        """The number of fragments; by default one, with delay=auto one for each step of a round."""
        if self.fragments is not None:
            return self.fragments
        return even_fragments(round_steps(self)) if self.delay == "auto" else 1

    def _check_delay(self) -> None:
        if self.fragments is not None:
            most = MAX_FRAGMENTS if self.tau == "auto" else min(self.tau, MAX_FRAGMENTS)
            whole_options(self, "fragments", most=most)
        for option in ("keep", "predict"):
            given = getattr(self, option)
            if given is not None:
                object.__setattr__(self, option, between(f"co2: {option}", given, 0, 1))
        if self.delay is None:
            if (self.keep, self.predict, self.preview) != (None, None, False):
                raise OptionError(
                    "co2: keep, predict and preview say how a late average is used: give delay"
                )
            if self.fragments not in {None, 1}:
                raise OptionError("co2: fragments are averaged within a round: give delay")
            if self.tau == "auto":
                raise OptionError("co2: tau=auto needs a delay: a number, or auto")
        elif self.staleness != 1:
            raise OptionError(f"co2: staleness={self.staleness} does not apply with delay")
        elif self.delay != "auto":
            whole_options(self, "delay", most=None if self.tau == "auto" else self.tau)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Wait for the old average, update momentum and anchor, launch the new average."""
        if self.delay is None:
            # the outer step reads x, average, anchor and momentum; writes momentum, anchor, x and
            # the displacement
            fill, outer, delay = 0, 8, self.staleness * round_steps(self)
        else:
            # filling reads anchor and x; writes the displacement and a copy of x. The outer step
            # reads average, momentum, anchor, x and the copy; writes momentum, anchor and x.
            # Stepping alone reads the momentum and writes x; that step is read and written, too
            fill, outer = (8, 10) if self.preview else (4, 8)
            delay = settled(self.name, "delay", self.delay)
        plan = Averages(
            buffer="displacement",
            fill=fill,
            outer=outer,
            delay=delay,
            fragments=self.parts(),
            by=self.average,
        )
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, anchor, momentum and averages in flight; x where one is delayed.

        And with a preview the step that a worker took alone.
        """
        replica = Replica.of(self)
        whole = replica.ranks(layout) if self.average == "leader" else 1
        size = 1.0 if self.dtype in QUANTIZED else self.dtype.bytes / DType.FP32.bytes
        own = (self.delay is not None) + self.preview
        copies = 2 + self.staleness * whole * size + own
        return replica.memory(job, layout, copies)
