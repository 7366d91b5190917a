"""What the compute ops of a schedule do, and what its collectives carry: synthetic kernels.

Ops say when something happens, kernels what is computed. Synthetic kernels take the time that the
size of the op needs, and compute nothing of use.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from co2sim.common.units import Flops, FlopsPerSecond, Seconds
from co2sim.hardware.cluster import GPU
from co2sim.prediction.case import Case
from co2sim.schedule.schedule import Collective, Compute, Instance, Schedule
from co2sim.simulation.compute_cost import compute_time
from co2sim.simulation.trace import Span, Trace
from realrun.lab.time_dilation import now


@dataclass(frozen=True, slots=True)
class Products:
    """Products of large matrices within an op, one after the other: how many, and their time."""

    count: int = 0
    seconds: Seconds = 0.0

    def __add__(self, other: "Products") -> "Products":
        return Products(self.count + other.count, self.seconds + other.seconds)


Timed: TypeAlias = Mapping[tuple[str, int], Products]
"""Those of every op, by its name and round."""


def each_round(trace: Trace, schedule: Schedule, timed: Timed, rounds: int) -> list[Seconds]:
    """Mean time of a product of a rank, in each of the last rounds in which it made any.

    Ops beside which the rank communicated are left out, unless there were no others in that round.
    """
    works = {op.name: op.work for op in schedule.body}
    busy = _joined([span for span in trace.spans if isinstance(works[span.op], Collective)])
    every: dict[int, Products] = {}
    alone: dict[int, Products] = {}
    for span in trace.spans:
        made = timed.get((span.op, span.round))
        if made is None or span.round < trace.rounds - rounds:
            continue
        every[span.round] = every.get(span.round, Products()) + made
        if not _beside(span, busy):
            alone[span.round] = alone.get(span.round, Products()) + made
    counted = (alone.get(turn, made) for turn, made in sorted(every.items()))
    return [made.seconds / made.count for made in counted]


def _joined(spans: Sequence[Span]) -> list[tuple[Seconds, Seconds]]:
    """The times during which there was one at least, in order."""
    found: list[tuple[Seconds, Seconds]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.start, span.end))
    return found


def _beside(span: Span, busy: Sequence[tuple[Seconds, Seconds]]) -> bool:
    last = bisect_left(busy, span.end, key=lambda one: one[0]) - 1
    return last >= 0 and busy[last][1] > span.start


def slowest(flops: Flops, ranks: Sequence[Sequence[Seconds]], lag: int) -> FlopsPerSecond | None:
    """From the time of a product of `flops` in each round of each rank; None if one made none.

    A rank begins a round when all have ended the one `lag` rounds before the last, as schedules do
    whose averages arrive so late: without lag each round is as slow as its slowest rank, and with
    it a rank that was slow may catch up.
    """
    rounds = min(map(len, ranks))
    if not rounds:
        return None
    ends = [[0.0] * len(ranks)] * (1 + lag)
    for times in zip(*(one[-rounds:] for one in ranks), strict=True):
        met = max(ends[-1 - lag])
        ends.append([max(end, met) + time for end, time in zip(ends[-1], times, strict=True)])
    return flops * rounds / max(ends[-1])


def beside(speed: FlopsPerSecond, gpu: GPU, precision: str) -> float:
    """A speed of large products, as a fraction of what a GPU's file says."""
    alone = replace(gpu, launch_overhead=0.0)
    return speed * compute_time(Compute("product", _LARGE), alone, precision) / _LARGE


_LARGE: Flops = 1e12
"""Of a kernel that is as fast as any."""


def at_speed(case: Case, speed: FlopsPerSecond) -> Case:
    """A record's case on GPUs that multiply large matrices so fast, all else in proportion."""
    cluster = case.load()[0].value
    gpu = cluster.gpu
    ratio = beside(speed, gpu, case.precision or gpu.preferred_precision)
    peak = {name: value * ratio for name, value in gpu.peak.items()}
    changed = replace(gpu, peak=peak, memory_bandwidth=gpu.memory_bandwidth * ratio)
    return replace(case, cluster=replace(cluster, gpu=changed))


INTENSITY = 4.0
"""FLOP per byte above which a flops kernel multiplies matrices; below, it moves memory.

Passes over a layer have hundreds, elementwise work on tensors less than two.
"""

_WIDTH = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the square matrices that are multiplied.

On a CPU a product of 268 MFLOP, whose operands fit in a cache; on a GPU one of 137 GFLOP, which
fills it.
"""

_COPIED = {"cpu": 2**26, "cuda": 2**29}
"""Bytes that a flops kernel copies at once, from and to memory that no cache holds whole."""


class KernelSet(Protocol):
    """What the ops of a run do. The executor calls it from the thread of the op's stream.

    Ops of one stream never run at once; ops of several streams may.
    """

    def compute(self, instance: Instance, ready: Seconds) -> Seconds | None:
        """Do the work of a compute op whose inputs were there at `ready` (seconds of `now`).

        Gives when it ends, if that is not now: a virtual device keeps its own time.
        """

    def fill(self, instance: Instance, given: Tensor) -> None:
        """Write into the buffer what a collective shall send: a snapshot.

        Called when the collective starts, while other streams go on. So it may only read what an op
        that the collective waits for has written, and what no op changes before the start.
        """

    def drain(self, instance: Instance, taken: Tensor) -> None:
        """Read what a collective brought."""


class Synthetic:
    """Collectives carry buffers of the right size; their content has no meaning."""

    def fill(self, instance: Instance, given: Tensor) -> None:
        """Leave the buffer as it is."""

    def drain(self, instance: Instance, taken: Tensor) -> None:
        """Leave the result unread."""


@dataclass(frozen=True)
class Sleep(Synthetic):
    """Hold the stream for a stated time without using a core: many ranks share few cores.

    `seconds` holds the time of every work. The virtual device starts an op when its inputs are
    there and ends it exactly that much later: delays of a host that wakes up late do not add up.
    Whoever sends what the op computes waits until then; others need not wake up.
    """

    seconds: Mapping[Compute, Seconds]

    def compute(self, instance: Instance, ready: Seconds) -> Seconds:
        """When the op ends."""
        work = instance.op.work
        assert isinstance(work, Compute)
        return ready + self.seconds[work]


@dataclass(frozen=True)
class Burn(Synthetic):
    """Real work of the op's size: matrix products, or memory traffic where arithmetic is little.

    `timed` gets the large products of each op; on a GPU, which is not asked when it has done them,
    none.
    """

    device: torch.device
    dtype: torch.dtype
    timed: dict[tuple[str, int], Products] = field(default_factory=dict, init=False)
    _operands: dict[str, "Operands"] = field(default_factory=dict, init=False)

    def compute(self, instance: Instance, ready: Seconds) -> None:
        """Multiply or copy."""
        del ready
        work = instance.op.work
        assert isinstance(work, Compute)
        stream = instance.op.stream  # each has its own, and keeps them: to make them takes a while
        if stream not in self._operands:
            self._operands[stream] = Operands.of(self.device, self.dtype)
        made = burn(work, self._operands[stream])
        if made.count and self.device.type == "cpu":
            self.timed[instance.op.name, instance.round] = made

    @property
    def product(self) -> Flops:
        """Of one of the products that are timed."""
        return 2.0 * _WIDTH[self.device.type] ** 3


@dataclass(frozen=True, slots=True)
class Operands:
    """Tensors that a flops kernel works on."""

    left: Tensor
    right: Tensor
    product: Tensor
    source: Tensor
    target: Tensor

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "Operands":
        """Fresh ones."""
        width, copied = _WIDTH[device.type], _COPIED[device.type]
        left = torch.full((width, width), 0.5, device=device, dtype=dtype)
        source = torch.ones(copied, device=device, dtype=torch.uint8)  # zeros may share one page
        return cls(left, left.clone(), torch.empty_like(left), source, torch.ones_like(source))


def multiplies(work: Compute) -> bool:
    """Whether a flops kernel does this work by matrix products."""
    return work.flops > INTENSITY * work.memory_bytes


def burn(work: Compute, on: Operands) -> Products:
    """Do as many FLOP, or read and write as many bytes, as the work states, part by part.

    Gives the products of whole matrices: on a GPU their time is that of issuing them.
    """
    if work.parts:
        return sum((burn(part, on) for part in work.parts), Products())
    if multiplies(work):
        width = len(on.right)
        rows = max(1, round(work.flops / (2 * width * width)))
        start = now()
        for _ in range(rows // width):
            torch.mm(on.left, on.right, out=on.product)
        made = Products(rows // width, now() - start)
        if rest := rows % width:
            torch.mm(on.left[:rest], on.right, out=on.product[:rest])
        return made
    half = round(work.memory_bytes / 2)
    for _ in range(half // len(on.source)):
        on.target.copy_(on.source)
    if rest := half % len(on.source):
        on.target[:rest].copy_(on.source[:rest])
    return Products()
