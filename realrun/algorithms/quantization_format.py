"""What quantized blocks are, here and on the way: codes, scales and their bytes.

The kernels and the reference share it. Importing it needs no Triton.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from co2sim.schedule.schedule import SCALE_BYTES

Bits: TypeAlias = Literal[4, 8]
Rounding: TypeAlias = Literal["nearest", "stochastic"]

TOP = {4: 7, 8: 127}
"""Largest code."""
SHARE = {4: float.fromhex("0x1.249248p-3"), 8: float.fromhex("0x1.020408p-7")}
"""1 / TOP in fp32, rounded down so far that no code times its scale overflows fp32."""
SMALLEST = 2.0**-126
"""Smallest scale, the smallest normal fp32: a block below it in all elements becomes zeros."""

HALF_BYTE = 4
"""Bits of a code of which two share a byte."""


class Quantized(NamedTuple):
    """Codes (int8, or uint8 with two int4 to a byte, the first in the low half), and scales."""

    codes: Tensor
    scales: Tensor


def wire_bytes(elements: int, bits: Bits, block: int) -> int:
    """Bytes of one quantized row with its scales: what a schedule states, rounded up."""
    return -(-elements * bits // 8) + -(-elements // block) * int(SCALE_BYTES)


def to_wire(quantized: Quantized) -> Tensor:
    """One message per row, [..., wire_bytes] uint8: the scales, then the codes."""
    codes, scales = quantized
    return torch.cat((scales.contiguous().view(torch.uint8), codes.view(torch.uint8)), dim=-1)


def from_wire(wire: Tensor, bits: Bits, block: int, elements: int) -> Quantized:
    """Codes and scales of `to_wire` messages of rows of `elements`."""
    count = -(-elements // block) * int(SCALE_BYTES)
    # A clone starts on an address that fp32 can be read from; a slice may not.
    scales = wire[..., :count].clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes = wire[..., count:]
    return Quantized(codes if bits == HALF_BYTE else codes.view(torch.int8), scales)
