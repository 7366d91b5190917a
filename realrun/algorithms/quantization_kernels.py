"""The Triton kernels of block quantization, and what their programs share.

One program handles one block of one row. int4 is worked on in two halves, the elements at even
and those at odd places, since two of them share a byte; blocks of int4 must therefore be even.
Rounding to nearest gives the reference's bits: the same operations in the same order, without
contraction to multiply-adds. Stochastic rounding follows the same law with Triton's own random
numbers. A block with an inf or a NaN gets a scale of NaN, where the reference may have inf.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from co2sim.common.errors import OptionError
from co2sim.common.validation import whole
from co2sim.schedule.schedule import SCALE_BYTES

_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away again, it rounds fp32 to whole numbers, half to even."""
_LARGEST = tl.constexpr((2 - 2.0**-23) * 2.0**127)


@triton.jit
def _rounded(
    steps: tl.tensor, seed: tl.tensor, at: tl.tensor, TOP: tl.constexpr, STOCHASTIC: tl.constexpr
) -> tl.tensor:
    if STOCHASTIC:
        below = tl.floor(steps)
        steps = below + (tl.rand(seed, at) < steps - below).to(tl.float32)
    else:
        steps = (steps + _ROUNDER) - _ROUNDER
    return tl.minimum(tl.maximum(steps, -TOP), TOP).to(tl.int32)


@triton.jit
def _encode(
    low: tl.tensor,
    high: tl.tensor,
    low_at: tl.tensor,
    inside: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    program: tl.tensor,
    seed: tl.tensor,
    elements: tl.tensor,
    row_bytes: tl.tensor,
    HALVES: tl.constexpr,
    TOP: tl.constexpr,
    SHARE: tl.constexpr,
    SMALLEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    """Write the codes and the scale of one block; lanes outside hold zeros."""
    bad = tl.sum(tl.where(tl.abs(low) <= _LARGEST, 0, 1), axis=0)
    if HALVES:
        bad += tl.sum(tl.where(tl.abs(high) <= _LARGEST, 0, 1), axis=0)
    good = bad == 0
    low = tl.where(good, low, 0.0)
    largest = tl.max(tl.abs(low), axis=0)
    if HALVES:
        high = tl.where(good, high, 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(high), axis=0))
    scale = tl.maximum(largest * SHARE, SMALLEST)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    place = row * elements + low_at
    first = _rounded(low * inverse, seed, place, TOP, STOCHASTIC)
    if HALVES:
        second = _rounded(high * inverse, seed, place + 1, TOP, STOCHASTIC)
        byte = ((first & 15) | ((second & 15) << 4)).to(tl.uint8)
        tl.store(codes + row * row_bytes + low_at // 2, byte, mask=inside)
    else:
        tl.store(codes + row * row_bytes + low_at, first.to(tl.int8), mask=inside)
    tl.store(scales + program, tl.where(good, scale, float("nan")))


@triton.jit
def _decode(
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    block: tl.tensor,
    row_bytes: tl.tensor,
    row_scales: tl.tensor,
    HALVES: tl.constexpr,
) -> tl.tensor:
    """Elements `at` of a row, in fp32."""
    scale = tl.load(scales + row * row_scales + at // block, mask=inside, other=0.0)
    if HALVES:
        byte = tl.load(codes + row * row_bytes + at // 2, mask=inside, other=0).to(tl.int32)
        code = (((byte >> ((at % 2) * 4).to(tl.int32)) & 15) ^ 8) - 8
    else:
        code = tl.load(codes + row * row_bytes + at, mask=inside, other=0)
    return code.to(tl.float32) * scale


@triton.jit
def _sum(
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    ranks: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    block: tl.tensor,
    row_bytes: tl.tensor,
    row_scales: tl.tensor,
    HALVES: tl.constexpr,
) -> tl.tensor:
    """The sum of `ranks` rows from `row` on, in their order."""
    total = _decode(codes, scales, row, at, inside, block, row_bytes, row_scales, HALVES)
    for rank in range(1, ranks):
        total += _decode(
            codes, scales, row + rank, at, inside, block, row_bytes, row_scales, HALVES
        )
    return total


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    seed: tl.tensor,
    elements: tl.tensor,
    blocks: tl.tensor,
    block: tl.tensor,
    row_bytes: tl.tensor,
    HALVES: tl.constexpr,
    TOP: tl.constexpr,
    SHARE: tl.constexpr,
    SMALLEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Codes and scales of rows of floats: a program for each block."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    lane = tl.arange(0, SIZE)
    if HALVES:
        lane = 2 * lane
    at = (program % blocks) * block + lane
    inside = (lane < block) & (at < elements)
    source = x + row * elements + at
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = low
    if HALVES:
        high = tl.load(source + 1, mask=inside & (at + 1 < elements), other=0.0).to(tl.float32)
    _encode(
        low, high, at, inside, codes, scales, row, program, seed, elements, row_bytes,
        HALVES, TOP, SHARE, SMALLEST, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def sum_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    ranks: tl.tensor,
    elements: tl.tensor,
    chunks: tl.tensor,
    block: tl.tensor,
    row_bytes: tl.tensor,
    row_scales: tl.tensor,
    HALVES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The fp32 sums of groups of `ranks` quantized rows: a program for each SIZE elements."""
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    at = (program % chunks) * SIZE + tl.arange(0, SIZE)
    inside = at < elements
    total = _sum(
        codes, scales, row * ranks, ranks, at, inside, block, row_bytes, row_scales, HALVES
    )
    tl.store(out + row * elements + at, total, mask=inside)


@triton.jit
def sum_and_quantize_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    new_codes: tl.tensor,
    new_scales: tl.tensor,
    seed: tl.tensor,
    ranks: tl.tensor,
    part: tl.tensor,
    blocks: tl.tensor,
    block: tl.tensor,
    row_bytes: tl.tensor,
    row_scales: tl.tensor,
    part_bytes: tl.tensor,
    HALVES: tl.constexpr,
    TOP: tl.constexpr,
    SHARE: tl.constexpr,
    SMALLEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Codes and scales of parts of a sum of rows: a program for each block."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    lane = tl.arange(0, SIZE)
    if HALVES:
        lane = 2 * lane
    at = (program % blocks) * block + lane
    inside = (lane < block) & (at < part)
    place = row * part + at
    low = _sum(codes, scales, 0, ranks, place, inside, block, row_bytes, row_scales, HALVES)
    high = low
    if HALVES:
        high_inside = inside & (at + 1 < part)
        high = _sum(
            codes, scales, 0, ranks, place + 1, high_inside, block, row_bytes, row_scales, HALVES
        )
    _encode(
        low, high, at, inside, new_codes, new_scales, row, program, seed, part, part_bytes,
        HALVES, TOP, SHARE, SMALLEST, STOCHASTIC,
    )  # fmt: skip


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
    check(bits, block)
    size = wire_bytes(elements, bits, block)
    if wire.dtype != torch.uint8 or wire.shape[-1] != size:
        raise OptionError(
            f"a message of {wire.shape[-1]} x {wire.dtype} is not {elements} elements of int{bits}"
            f" in blocks of {block}: that is {size} x torch.uint8"
        )
    count = -(-elements // block) * int(SCALE_BYTES)
    # A clone starts on an address that fp32 can be read from; a slice may not.
    scales = wire[..., :count].clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes = wire[..., count:]
    return Quantized(codes if bits == HALF_BYTE else codes.view(torch.int8), scales)


def check(bits: int, block: int) -> None:
    """Raise OptionError for bits and blocks that there are not."""
    if bits not in TOP:
        raise OptionError(f"bits is {bits}; it must be 4 or 8")
    whole("block", block, 1)
