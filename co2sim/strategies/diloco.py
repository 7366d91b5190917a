"""DiLoCo: AdamW inside, Nesterov momentum on averaged pseudo-gradients outside."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import DType, Layout, Schedule
from co2sim.strategies.local import (
    Averages,
    Inner,
    Replica,
    Worker,
    averaged_rounds,
    check,
    launches,
)
from co2sim.strategies.step import QUANTIZED, SCALE_BLOCK, whole_options
from co2sim.training.memory import Items
from co2sim.training.workload import Workload

_MAX_FRAGMENTS = 1_000
"""Far beyond the layers of a model, which Streaming DiLoCo averages a few at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo:
    """`tau` local steps; the averaged pseudo-gradient (anchor - x) feeds an outer Nesterov step.

    With `fragments` > 1 parts of the model are averaged at evenly spread steps of the round, and
    `delay` local steps run before an average is used ("streaming"). dtype int8 and int4 are
    block-quantized (one fp32 scale for `scale_block` elements) and averaged by all-to-all, sum in
    fp32, and all-gather; a flat all-to-all sends most of it between sites, so let nodes or sites be
    the workers there. Sources: Douillard et al. 2023, arXiv 2311.08105; Douillard et al. 2025,
    Streaming DiLoCo, arXiv 2501.18512.
    """

    name: ClassVar[str] = "diloco"
    shares: ClassVar[str] = "steps"
    divides_experts: ClassVar[bool] = True

    tau: int = 500
    fragments: int = 1
    delay: int = 0
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: DType = DType.FP32
    scale_block: int = SCALE_BLOCK

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self, quantized=QUANTIZED)
        whole_options(self, "fragments", most=_MAX_FRAGMENTS)
        whole_options(self, "delay", least=0)
        whole_options(self, "scale_block")
        if self.fragments > self.tau:
            raise OptionError(f"fragments is {self.fragments}; it must be 1 to tau={self.tau}")
        if self.delay >= self.tau:
            raise OptionError(
                f"delay is {self.delay}; it must be 0 to tau-1={self.tau - 1} local steps"
            )
        if self.scale_block != SCALE_BLOCK and self.dtype not in QUANTIZED:
            raise OptionError(f"scale_block={self.scale_block} needs dtype=int8 or int4")

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Every fragment: pseudo-gradient, average, and `delay` steps later the outer step."""
        plan = Averages(
            buffer="delta",
            fill=3,  # reads anchor and x; writes their difference
            outer=6,  # reads average, anchor and momentum; writes momentum, anchor and x
            delay=self.delay,
            fragments=self.fragments,
            scale_block=self.scale_block,
        )
        return averaged_rounds(self, job, layout, plan)

    def memory(self, job: Workload, layout: Layout) -> Items:
        """The inner strategy, and anchor, momentum and the pseudo-gradients under way."""
        starts = launches(self.tau, self.fragments)
        under_way = max(
            sum((start - other) % self.tau <= self.delay for other in starts) for start in starts
        )
        quantized = self.dtype in QUANTIZED  # from an fp32 pseudo-gradient
        buffer = 1.0 if quantized else self.dtype.bytes / DType.FP32.bytes
        copies = 2 + buffer * under_way / self.fragments
        return Replica.of(self).memory(job, layout, copies)
