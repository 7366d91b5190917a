"""DiLoCo: AdamW inside, Nesterov momentum on averaged pseudo-gradients outside."""

from dataclasses import dataclass, replace
from typing import ClassVar

from co2sim.errors import OptionError
from co2sim.schedule import (
    After,
    Collective,
    Compute,
    DType,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.strategies.local import OUTER, Inner, Replica, Worker, check, outer_work
from co2sim.strategies.quantized import QUANTIZED, recode, sum_received
from co2sim.strategies.step import COMPUTE, Step, chain, cut, title, whole_options
from co2sim.units import Bytes
from co2sim.workload import Workload

_SCALE_BLOCK = 2048
_MOST_FRAGMENTS = 1_000
"""Far beyond the layers of a model, which Streaming DiLoCo averages a few at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo:
    """`tau` local steps; the averaged pseudo-gradient (anchor - x) feeds an outer Nesterov step.

    With `fragments` > 1 parts of the model are averaged at evenly spread steps of the round, and
    `delay` local steps run before an average is used ("streaming"). dtype int8 and int4 are
    block-quantized (one fp32 scale for `scale_block` elements) and averaged by all-to-all, sum in
    fp32, and all-gather; a flat all-to-all sends most of it between sites, so let nodes be the
    workers there. Sources: Douillard et al. 2023, arXiv 2311.08105; Douillard et al. 2025,
    Streaming DiLoCo, arXiv 2501.18512.
    """

    name: ClassVar[str] = "diloco"

    tau: int = 500
    fragments: int = 1
    delay: int = 0
    worker: Worker = "gpu"
    inner: Inner | None = None
    dtype: DType = DType.FP32
    scale_block: int = _SCALE_BLOCK

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        check(self, quantized=True)
        whole_options(self, "fragments", most=_MOST_FRAGMENTS)
        whole_options(self, "delay", least=0)
        whole_options(self, "scale_block")
        if self.fragments > self.tau:
            raise OptionError(f"fragments is {self.fragments}; it must be 1 to tau={self.tau}")
        if self.delay >= self.tau:
            raise OptionError(
                f"delay is {self.delay}; it must be 0 to tau-1={self.tau - 1} local steps"
            )
        if self.scale_block != _SCALE_BLOCK and self.dtype not in QUANTIZED:
            raise OptionError(f"scale_block={self.scale_block} needs dtype=int8 or int4")

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Every fragment: pseudo-gradient, average, and `delay` steps later the outer step."""
        replica = Replica.of(self)
        launched: dict[int, list[Op]] = {}
        used: dict[int, list[Op]] = {}
        if self.fragments > job.parameters:
            raise OptionError(f"fragments={self.fragments} of {job.parameters} parameters")
        sizes = cut(job.parameters, self.fragments)
        for number, (at, elements) in enumerate(zip(self._launches(), sizes, strict=True)):
            suffix = str(number) if self.fragments > 1 else ""
            late = (at + self.delay) // self.tau
            share = -(-elements // replica.ranks(layout))
            # reads anchor and x; writes their difference
            delta = Op(f"delta{suffix}", outer_work(job, share, tensors=3, kernel="delta"), COMPUTE)
            average = self._average(replica, share, suffix, layout)
            # reads average, anchor and momentum; writes momentum, anchor and x
            outer = Op(
                f"outer{suffix}",
                outer_work(job, share, tensors=6),
                COMPUTE,
                (After(average[-1].name, rounds_ago=late),),
            )
            launched.setdefault(at, []).extend([delta, *average])
            used.setdefault((at + self.delay) % self.tau, []).extend(
                [outer, *replica.publish(job, layout, outer.name, elements)]
            )
        extras = {}
        for k in sorted(launched.keys() | used.keys()):
            later = used.get(k, [])
            ends = tuple(op.name for op in later[-1:])
            outers = tuple(op.name for op in later if op.stream == COMPUTE)
            whole = self.fragments == 1 and len(later) > len(outers)
            extras[k] = Step([*launched.get(k, []), *later], outers, ends, regathers=whole)
        body = chain(replica.step(job, layout), self.tau, extras)
        return Schedule(title(self), body, steps=self.tau)

    def _average(self, replica: Replica, elements: int, suffix: str, layout: Layout) -> list[Op]:
        """One all-reduce, or its quantized form: quantize, exchange, sum, gather, dequantize."""
        buffer, dtype, blocks = f"delta{suffix}", self.dtype, self.scale_block
        if dtype not in QUANTIZED:
            works: dict[str, Compute | Collective] = {
                "average": Collective(Kind.ALL_REDUCE, buffer, elements, dtype, replica.peers)
            }
        else:
            workers, group = replica.workers(layout), replica.peers
            works = {
                "quantize": recode("quantize", elements, DType.FP32, dtype, blocks),
                "exchange": Collective(Kind.ALL_TO_ALL, buffer, elements, dtype, group, blocks),
                "sum": sum_received(elements, workers, dtype, dtype, blocks),
                "average": Collective(Kind.ALL_GATHER, buffer, elements, dtype, group, blocks),
                "dequantize": recode("dequantize", elements, dtype, DType.FP32, blocks),
            }
        ops = [Op(f"{name}{suffix}", work, OUTER) for name, work in works.items()]
        return [replace(ops[0], after=(After(f"delta{suffix}"),)), *ops[1:]]

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """The inner strategy, and anchor, momentum and the pseudo-gradients under way."""
        under_way = max(
            sum((at - other) % self.tau <= self.delay for other in self._launches())
            for at in self._launches()
        )
        quantized = self.dtype in QUANTIZED  # from an fp32 pseudo-gradient
        buffer = 1.0 if quantized else self.dtype.bytes / DType.FP32.bytes
        copies = 2 + buffer * under_way / self.fragments
        return Replica.of(self).memory(job, layout, copies)

    def _launches(self) -> list[int]:
        """The local step after which each fragment's average starts."""
        return [self.tau * (number + 1) // self.fragments - 1 for number in range(self.fragments)]
