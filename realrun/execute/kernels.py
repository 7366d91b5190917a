"""What the compute ops of a schedule do, and what its collectives carry: synthetic kernels.

Ops say when something happens, kernels what is computed. Synthetic kernels take the time that the
size of the op needs, and compute nothing of use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from co2sim.common.units import Flops, Seconds
from co2sim.schedule.schedule import Compute, Instance
from realrun.execute.matmul_speed import Products
from realrun.lab.time_dilation import now

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

        Called when the collective starts, while other streams continue. So it may only read what an
        op that the collective waits for has written, and what no op changes before the start.
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
    A sender of what the op computes waits until then; others need not wake up.
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
        # Random, as in a training: with equal numbers a GPU needs less power, and is faster.
        left = torch.randn((width, width), device=device).to(dtype)
        source = torch.ones(copied, device=device, dtype=torch.uint8)  # zeros may share one page
        return cls(left, left.clone(), torch.empty_like(left), source, torch.ones_like(source))


def burn(work: Compute, on: Operands) -> Products:
    """Do as many FLOP, or read and write as many bytes, as the work states, part by part.

    Gives the products of whole matrices: on a GPU their time is that of issuing them.
    """
    if work.parts:
        return sum((burn(part, on) for part in work.parts), Products())
    if work.flops > INTENSITY * work.memory_bytes:
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
