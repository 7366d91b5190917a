"""The Triton kernels of block quantization, and what their programs share.

One program handles one block of one row. int4 is worked on in two halves, the elements at even
and those at odd places, since two of them share a byte; blocks of int4 must therefore be even.
Rounding to nearest gives the reference's bits: the same operations in the same order, without
contraction to multiply-adds. Stochastic rounding follows the same law with Triton's own random
numbers. A block with an inf or a NaN gets a scale of NaN, where the reference may have inf.
"""

import triton
import triton.language as tl

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
