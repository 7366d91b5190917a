"""Block quantization on CUDA: what `quantize` says, in one launch and one pass each.

Importing this needs Triton. What is given has been checked by `quantize`.

One program handles BLOCKS neighbouring blocks of a row: a tile [BLOCKS, SIZE], where SIZE is a
power of two, BLOCK or above. Codes are read and written by the byte. PER elements share one, so
int4 has two tiles of half the width, for the low and the high halves of bytes; its BLOCK must be
even. A row has `units` x ALIGN bytes of codes, and with ODD half a byte less: said like this,
Triton sees how much it may move at once. Received codes are read VECTOR bytes at a time, which
their addresses must be multiples of.

Rounding to nearest gives the reference's bits: the same operations in the same order, without
contraction to multiply-adds. Stochastic rounding follows the same law with Triton's own random
numbers. A block with an inf or a NaN gets a scale of NaN, where the reference may have inf.
"""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from realrun.algorithms.quantization_format import HALF_BYTE, SHARE, SMALLEST, TOP

_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Added to a float, it leaves the nearest whole number, half to even, in the low bits."""
_HALVES = tl.constexpr(0x4B000088)
"""A byte of int4, exclusive-or this: the bits of 2**23 + 16 * (high half + 8) + (low half + 8)."""

_TOP_OF_INT4, _TOP_OF_INT8 = tl.constexpr(TOP[4]), tl.constexpr(TOP[8])
_SHARE_OF_INT4, _SHARE_OF_INT8 = tl.constexpr(SHARE[4]), tl.constexpr(SHARE[8])
_SMALLEST = tl.constexpr(SMALLEST)


@triton.jit
def _wide(value: tl.tensor) -> tl.tensor:
    return tl.full((), value, tl.int64)


@triton.jit
def _tile(
    first: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where in a row of `length` the lanes of blocks from `first` on are, and which there are."""
    lane = tl.arange(0, SIZE)[None, :]
    lane_offset = tl.arange(0, BLOCKS)[:, None] * BLOCK + lane
    start = _wide(first) * BLOCK
    return start + lane_offset, (lane < BLOCK) & (lane_offset < length - start)


@triton.jit
def _magnitude(x: tl.tensor) -> tl.tensor:
    """Whole numbers in the order of absolute values; inf and NaN are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(
    steps: tl.tensor, draw: tl.tensor, TOP: tl.constexpr, STOCHASTIC: tl.constexpr
) -> tl.tensor:
    """Codes in the low bits of int32."""
    if STOCHASTIC:
        below = tl.floor(steps)
        steps = below + (draw < steps - below).to(tl.float32)
        steps = tl.minimum(tl.maximum(steps, -TOP), TOP)
    # Steps are above TOP by a few roundings at most, so that the nearest code never is.
    return (steps + _ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def _encode(
    low: tl.tensor,
    high: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    seed: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    row_bytes: tl.tensor,
    blocks: tl.tensor,
    PER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Write codes and scales of the blocks from `first` on; lanes outside hold zeros."""
    magnitude = _magnitude(low)
    if PER > 1:
        magnitude = tl.maximum(magnitude, _magnitude(high))
    top: tl.constexpr = _TOP_OF_INT4 if PER > 1 else _TOP_OF_INT8
    share: tl.constexpr = _SHARE_OF_INT4 if PER > 1 else _SHARE_OF_INT8
    largest = tl.max(magnitude, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    scale = tl.where(largest < float("inf"), tl.maximum(largest * share, _SMALLEST), float("nan"))
    inverse = tl.div_rn(tl.full((BLOCKS, 1), 1.0, tl.float32), scale)
    offset, inside = _tile(first, row_bytes, BLOCK // PER, BLOCKS, SIZE // PER)
    offset += row * row_bytes
    draw, other = low, high
    if STOCHASTIC:
        draw, other, _, _ = tl.rand4x(seed, offset)
    code = _rounded(low * inverse, draw, top, STOCHASTIC)
    if PER > 1:
        code = (code & 15) | (_rounded(high * inverse, other, top, STOCHASTIC) << 4)
    tl.store(codes + offset, code.to(codes.dtype.element_ty), mask=inside)
    index = tl.arange(0, BLOCKS)[:, None]
    tl.store(scales + (row * blocks + first) + index, scale, mask=index < blocks - first)


@triton.jit
def _sum(
    codes: tl.tensor,
    scales: tl.tensor,
    offset: tl.tensor,
    inside: tl.tensor,
    index: tl.tensor,
    in_first: tl.tensor,
    row_bytes: tl.tensor,
    row_scales: tl.tensor,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    RANKS: tl.constexpr,
    PER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The fp32 sums over RANKS rows, in their order: low and high halves of bytes, or all twice.

    Lanes have the scale of block `index`, unless ALIGNED is false: then only those `in_first` do,
    and all others that of the block after it.
    """
    # -0.0, to which compilers know that adding changes nothing; Triton 3.6 reads that as 0.0.
    low = tl.full(inside.shape, -1.0, tl.float32) * 0.0
    high = low
    # Codes that are read one by one leave no registers to work on several ranks at once.
    for rank in tl.range(0, RANKS, loop_unroll_factor=min(RANKS, 4, VECTOR * PER)):
        address = tl.max_contiguous(codes + _wide(rank) * row_bytes + offset, [1, VECTOR])
        code = tl.load(tl.multiple_of(address, [1, VECTOR]), mask=inside, other=0)
        scale_address = scales + (_wide(rank) * row_scales + index)
        scale = tl.load(scale_address, mask=index < row_scales, other=0.0)
        if not ALIGNED:
            after = tl.load(scale_address + 1, mask=index + 1 < row_scales, other=0.0)
            scale = tl.where(in_first, scale, after)
        if PER > 1:
            both = code.to(tl.int32) ^ _HALVES
            upper = (both & -16).to(tl.float32, bitcast=True)
            low += (both.to(tl.float32, bitcast=True) - upper - 8.0) * scale
            high += tl.fma(upper, 2.0**-4, -(2.0**19 + 8)) * scale  # without a rounding
        else:
            low += code.to(tl.float32) * scale
    return low, high


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    seed: tl.tensor,
    units: tl.tensor,
    blocks: tl.tensor,
    groups: tl.tensor,
    ALIGN: tl.constexpr,
    ODD: tl.constexpr,
    PER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Codes and scales of rows of floats."""
    program = tl.program_id(0)
    row, first = _wide(program // groups), program % groups * BLOCKS
    row_bytes = _wide(units) * ALIGN
    elements = row_bytes * PER - ODD
    offset, inside = _tile(first, elements, BLOCK, BLOCKS, SIZE)
    low = tl.load(x + row * elements + offset, mask=inside, other=0.0).to(tl.float32)
    high = low
    if PER > 1:
        low, high = tl.split(tl.reshape(low, (BLOCKS, SIZE // 2, 2)))
    _encode(
        low, high, codes, scales, seed, row, first, row_bytes, blocks,
        PER, STOCHASTIC, BLOCK, BLOCKS, SIZE,
    )  # fmt: skip


@triton.jit
def sum_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    units: tl.tensor,
    groups: tl.tensor,
    row_bytes: tl.tensor,
    row_scales: tl.tensor,
    ALIGN: tl.constexpr,
    ODD: tl.constexpr,
    VECTOR: tl.constexpr,
    RANKS: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The fp32 sums of groups of RANKS quantized rows."""
    program = tl.program_id(0)
    row, first = _wide(program // groups), program % groups * BLOCKS
    offset, inside = _tile(first, _wide(units) * ALIGN, BLOCK // PER, BLOCKS, SIZE // PER)
    index = first + tl.arange(0, BLOCKS)[:, None]
    total, high = _sum(
        codes + row * RANKS * row_bytes, scales + row * RANKS * row_scales,
        offset, inside, index, inside, row_bytes, row_scales,
        ALIGNED=True, VECTOR=VECTOR, RANKS=RANKS, PER=PER,
    )  # fmt: skip
    if PER > 1:
        total = tl.reshape(tl.join(total, high), (BLOCKS, SIZE))
    elements = _wide(units) * (ALIGN * PER) - ODD
    offset, inside = _tile(first, elements, BLOCK, BLOCKS, SIZE)
    tl.store(out + row * elements + offset, total, mask=inside)


@triton.jit
def sum_and_quantize_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    new_codes: tl.tensor,
    new_scales: tl.tensor,
    seed: tl.tensor,
    units: tl.tensor,
    blocks: tl.tensor,
    groups: tl.tensor,
    row_bytes: tl.tensor,
    row_scales: tl.tensor,
    ALIGNED: tl.constexpr,
    ALIGN: tl.constexpr,
    ODD: tl.constexpr,
    VECTOR: tl.constexpr,
    RANKS: tl.constexpr,
    PER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Codes and scales of parts of a sum of rows; ALIGNED parts start where blocks do."""
    program = tl.program_id(0)
    row, first = _wide(program // groups), program % groups * BLOCKS
    part_bytes = _wide(units) * ALIGN
    offset, inside = _tile(first, part_bytes, BLOCK // PER, BLOCKS, SIZE // PER)
    begin = row * (part_bytes * PER - ODD)
    index = begin // BLOCK + first + tl.arange(0, BLOCKS)[:, None]
    in_first = tl.arange(0, SIZE // PER)[None, :] < (BLOCK - begin % BLOCK) // PER
    low, high = _sum(
        codes + row * part_bytes, scales, offset, inside, index, in_first, row_bytes, row_scales,
        ALIGNED, VECTOR, RANKS, PER,
    )  # fmt: skip
    if not ALIGNED:  # a scale of the next part may be NaN
        low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
    if ODD:
        high = tl.where(offset < part_bytes - 1, high, 0.0)
    _encode(
        low, high, new_codes, new_scales, seed, row, first, part_bytes, blocks,
        PER, STOCHASTIC, BLOCK, BLOCKS, SIZE,
    )  # fmt: skip


_THREADS, _LANES = 128, 16
"""Threads of a program, unless one block needs more, and what each has: floats or bytes."""
_MOST_WARPS = 32


def quantize(x: Tensor, bits: int, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows [..., elements]; `seed` None rounds to nearest."""
    x = x.contiguous()
    elements, lead = x.shape[-1], x.shape[:-1]
    codes, scales = _empty(x, lead, elements, bits, block)
    blocks = scales.shape[-1]
    groups, units, constants = _tiles(bits, block, elements, _LANES * 8 // bits)
    with torch.cuda.device_of(x):
        quantize_kernel[(scales.numel() // blocks * groups,)](
            x, codes, scales, seed or 0, units, blocks, groups,
            STOCHASTIC=seed is not None, **constants,
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
    if bits == HALF_BYTE and part % 2 and parts > 1:  # parts start in the middle of a byte
        total = sum_rows(codes, scales, bits, block, elements)
        return quantize(total.view(parts, part), bits, block, seed)
    scales = scales.contiguous()
    made, made_scales = _empty(codes, (parts,), part, bits, block)
    blocks = made_scales.shape[-1]
    groups, units, constants = _tiles(bits, block, part, _LANES * 8 // bits)
    with torch.cuda.device_of(codes):
        sum_and_quantize_kernel[(parts * groups,)](
            codes, scales, made, made_scales, seed or 0, units, blocks, groups, codes.stride(0),
            scales.shape[-1], ALIGNED=parts == 1 or part % block == 0,
            VECTOR=_vector(codes, bits, block, part, 16), RANKS=len(codes),
            STOCHASTIC=seed is not None, **constants,
        )  # fmt: skip
    return made, made_scales


def _decode_rows(
    codes: Tensor, scales: Tensor, out: Tensor, ranks: int, bits: int, block: int
) -> None:
    elements = out.shape[-1]
    flat, scales = codes.reshape(-1, codes.shape[-1]), scales.contiguous()
    groups, units, constants = _tiles(bits, block, elements, _LANES)
    # Codes of 4 elements, since a thread stores 4 floats at a time.
    vector = _vector(flat, bits, block, elements, bits // 2)
    with torch.cuda.device_of(codes):
        sum_kernel[(len(flat) // ranks * groups,)](
            flat, scales, out, units, groups, flat.stride(0), scales.shape[-1],
            VECTOR=vector, RANKS=ranks, **constants,
        )  # fmt: skip


def _empty(
    like: Tensor, lead: tuple[int, ...], elements: int, bits: int, block: int
) -> tuple[Tensor, Tensor]:
    dtype = torch.uint8 if bits == HALF_BYTE else torch.int8
    scales = like.new_empty((*lead, -(-elements // block)), dtype=torch.float32)
    return like.new_empty((*lead, _row_bytes(bits, elements)), dtype=dtype), scales


def _row_bytes(bits: int, elements: int) -> int:
    return -(-elements * bits // 8)


def _vector(codes: Tensor, bits: int, block: int, elements: int, most: int) -> int:
    """Bytes to read at a time of blocks in rows that may lie anywhere in a message."""
    row = _row_bytes(bits, elements)
    return gcd(most, codes.data_ptr(), codes.stride(0), row, block * bits // 8)


def _tiles(bits: int, block: int, elements: int, lanes: int) -> tuple[int, int, dict[str, Any]]:
    """Programs of a row, its units, and constants; a thread has `lanes` elements."""
    blocks, row = -(-elements // block), _row_bytes(bits, elements)
    size = max(triton.next_power_of_2(min(block, elements)), 8 // bits)
    many = min(max(_THREADS * lanes // size, 1), triton.next_power_of_2(blocks))
    align = gcd(16, row)
    return (
        -(-blocks // many),
        row // align,
        {
            "ALIGN": align,
            "ODD": row * 8 // bits - elements,
            "PER": 8 // bits,
            "BLOCK": block,
            "BLOCKS": many,
            "SIZE": size,
            "num_warps": min(max(many * size // (lanes * 32), 1), _MOST_WARPS),
            "enable_fp_fusion": False,
        },
    )
