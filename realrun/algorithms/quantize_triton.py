"""Block quantization on CUDA: what `quantize` says, in one launch and one pass each.

One program handles one block of one row. int4 is worked on in two halves, the elements at even
and those at odd places, since two of them share a byte; blocks of int4 must therefore be even.
Rounding to nearest gives the reference's bits: the same operations in the same order, without
contraction to multiply-adds. Stochastic rounding follows the same law with Triton's own random
numbers. A block with an inf or a NaN gets a scale of NaN, where the reference may have inf.

Importing this needs Triton. What is given has been checked by `quantize`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from realrun.algorithms.quantize import SHARE, SMALLEST, TOP

_HALF_BYTE = 4
_LANES = 1024
"""Elements that one program decodes."""
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
def _quantize_kernel(
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
def _sum_kernel(
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
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    at = (program % chunks) * SIZE + tl.arange(0, SIZE)
    inside = at < elements
    total = _sum(
        codes, scales, row * ranks, ranks, at, inside, block, row_bytes, row_scales, HALVES
    )
    tl.store(out + row * elements + at, total, mask=inside)


@triton.jit
def _sum_and_quantize_kernel(
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


def quantize(x: Tensor, bits: int, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows [..., elements]; `seed` None rounds to nearest."""
    x = x.contiguous()
    elements, lead = x.shape[-1], x.shape[:-1]
    codes, scales = _empty(x, lead, elements, bits, block)
    with torch.cuda.device_of(x):
        _quantize_kernel[(scales.numel(),)](
            x, codes, scales, seed or 0, elements, scales.shape[-1], block, codes.shape[-1],
            **_encoding(bits, block, elements, seed),
        )  # fmt: skip
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, bits: int, block: int, elements: int) -> Tensor:
    """The fp32 rows [..., elements] of codes and scales."""
    out = codes.new_empty((*codes.shape[:-1], elements), dtype=torch.float32)
    _decode_rows(codes, scales, out, 1, bits, block)
    return out


def sum_rows(codes: Tensor, scales: Tensor, bits: int, block: int, elements: int) -> Tensor:
    """The fp32 sum [elements] of rows [ranks, ...]."""
    out = codes.new_empty(elements, dtype=torch.float32)
    _decode_rows(codes, scales, out, len(codes), bits, block)
    return out


def sum_and_quantize(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    block: int,
    elements: int,
    parts: int,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of `parts` rows, of the sum of rows [ranks, ...] of `elements`."""
    part = elements // parts
    scales = scales.contiguous()
    made, made_scales = _empty(codes, (parts,), part, bits, block)
    with torch.cuda.device_of(codes):
        _sum_and_quantize_kernel[(made_scales.numel(),)](
            codes, scales, made, made_scales, seed or 0, len(codes), part, made_scales.shape[-1],
            block, codes.stride(0), scales.shape[-1], made.shape[-1],
            **_encoding(bits, block, part, seed),
        )  # fmt: skip
    return made, made_scales


def _decode_rows(
    codes: Tensor, scales: Tensor, out: Tensor, ranks: int, bits: int, block: int
) -> None:
    elements = out.shape[-1]
    flat, scales = codes.reshape(-1, codes.shape[-1]), scales.contiguous()
    chunks = -(-elements // _LANES)
    with torch.cuda.device_of(codes):
        _sum_kernel[(out.numel() // elements * chunks,)](
            flat, scales, out, ranks, elements, chunks, block, flat.stride(0), scales.shape[-1],
            HALVES=bits == _HALF_BYTE, SIZE=_LANES, enable_fp_fusion=False,
        )  # fmt: skip


def _empty(
    like: Tensor, lead: tuple[int, ...], elements: int, bits: int, block: int
) -> tuple[Tensor, Tensor]:
    codes, dtype = (
        (-(-elements // 2), torch.uint8) if bits == _HALF_BYTE else (elements, torch.int8)
    )
    scales = like.new_empty((*lead, -(-elements // block)), dtype=torch.float32)
    return like.new_empty((*lead, codes), dtype=dtype), scales


def _encoding(bits: int, block: int, elements: int, seed: int | None) -> dict[str, Any]:
    """Constants of a kernel that writes codes."""
    lanes = min(block, elements)
    return {
        "HALVES": bits == _HALF_BYTE,
        "TOP": TOP[bits],
        "SHARE": SHARE[bits],
        "SMALLEST": SMALLEST,
        "STOCHASTIC": seed is not None,
        "SIZE": triton.next_power_of_2(-(-lanes // 2) if bits == _HALF_BYTE else lanes),
        "enable_fp_fusion": False,
    }
