"""GPUs: how fast they compute, what they hold and what they draw, in SI units."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from co2sim.errors import OptionError
from co2sim.quantities import (
    Bandwidth,
    Fraction,
    Power,
    Quantity,
    Size,
    Speed,
    Time,
    check,
    in_order,
)
from co2sim.ranges import whole
from co2sim.units import Flops

_SPEED = Quantity(unit="FLOP/s", least=1)
_WORK = Quantity(unit="FLOP", least=1)
_ATTAINED = Quantity(most=1)
"""Of the numbers that stand in tables."""

Streams = Literal["apart", "shared"]
"""apart: streams compute beside each other at full speed. shared: they share one processor, as the
threads of a rank share a core; see `processor`."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """How fast the kernels of a training step run, as fitted to published runs.

    Matrix products attain `gemm_efficiency` of peak where arithmetic bounds them, and move their
    operands at `operand_efficiency` of the memory bandwidth where that does; those over a
    vocabulary attain `vocabulary_efficiency` of peak. Flash attention attains
    `attention_efficiency` of it, counting the FLOP that it executes: one fraction, or fractions by
    length of the sequences, between which it is interpolated over log length (None: not known, and
    taken to be that of other products). Its backward pass attains `attention_backward` of that:
    between 0.58 and 0.66 in Triton of 2023 (triton-lang/triton pull request 1917). `call_overhead`
    is what the host needs to issue an operation, `kernel_gap` what the GPU loses between two.
    """

    gemm_efficiency: Fraction
    operand_efficiency: Fraction = 1.0
    vocabulary_efficiency: Fraction | None = None
    attention_efficiency: float | tuple[tuple[int, float], ...] | None = None
    attention_backward: Fraction = 1.0
    call_overhead: Time = 0.0
    kernel_gap: Time = 0.0

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        check(self, "kernels")
        name, given = "kernels: attention_efficiency", self.attention_efficiency
        if given is None:
            return
        points = given if isinstance(given, tuple) else ((1, given),)
        for length, attained in points:
            whole(f"{name}: length", length, 1)
            _ATTAINED.checked(f"{name} at {length}", attained)
        if not points or sorted(dict(points)) != [length for length, _ in points]:
            raise OptionError(f"{name} must be listed by rising length, at least one")

    def attention(self, length: int) -> float:
        """Fraction of peak that flash attention over sequences of `length` attains."""
        given = self.attention_efficiency
        if not isinstance(given, tuple):
            return self.gemm_efficiency if given is None else given
        lengths = [math.log(one) for one, _ in given]
        return float(np.interp(math.log(length), lengths, [attained for _, attained in given]))


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator.

    `peak` is the dense speed by precision. `efficiency` lists (FLOP of an op, attained fraction of
    peak) by rising FLOP; between entries it is interpolated over log FLOP, outside it is constant.
    Where `kernels` is known, passes over blocks are costed by it and not by `efficiency`. `tdp` is
    its thermal design power, `idle_power` what it draws while its processes wait (`power`).
    `streams` says whether computes of several streams slow each other down.
    """

    name: str
    memory: Size
    memory_bandwidth: Bandwidth
    peak: Mapping[str, Speed]
    efficiency: tuple[tuple[Flops, float], ...]
    memory_efficiency: Fraction = 1.0
    launch_overhead: Time = 0.0
    kernels: KernelTimes | None = None
    tdp: Power | None = None
    idle_power: Power | None = None
    streams: Streams = "apart"

    def __post_init__(self) -> None:
        """Refuse what no GPU can be."""
        if not self.peak or not self.efficiency:
            raise OptionError(f"{self.name} needs a peak and an efficiency")
        check(self, self.name)
        for precision, speed in self.peak.items():
            _SPEED.checked(f"{self.name}: peak {precision}", speed)
        for size, attained in self.efficiency:
            _WORK.checked(f"{self.name}: size of an efficiency", size)
            _ATTAINED.checked(f"{self.name}: efficiency at {size}", attained)
        if sorted(self.efficiency) != list(self.efficiency):
            raise OptionError(f"{self.name}: efficiencies must be listed by rising FLOP")
        in_order(self, self.name, "idle_power", "tdp")
