"""Block quantization on CUDA: what `quantize` says, in one launch and one pass each.

Importing this needs Triton. What is given has been checked by `quantize`.
"""

from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor

from realrun.algorithms.quantization_kernels import (
    HALF_BYTE,
    SHARE,
    SMALLEST,
    TOP,
    quantize_kernel,
    sum_and_quantize_kernel,
    sum_kernel,
)

_THREADS, _LANES = 128, 16
"""Threads of a program, unless one block needs more, and what each has: floats or bytes."""
_MOST_WARPS = 32


def quantize(x: Tensor, bits: int, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows [..., elements]; `seed` None rounds to nearest."""
    x = x.contiguous()
    elements, lead = x.shape[-1], x.shape[:-1]
    codes, scales = _empty(x, lead, elements, bits, block)
    blocks = scales.shape[-1]
    groups, units, constants = _tile(bits, block, elements, _LANES * 8 // bits)
    with torch.cuda.device_of(x):
        quantize_kernel[(scales.numel() // blocks * groups,)](
            x, codes, scales, seed or 0, units, blocks, groups,
            **constants, **_encoding(bits, seed),
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
    groups, units, constants = _tile(bits, block, part, _LANES * 8 // bits)
    with torch.cuda.device_of(codes):
        sum_and_quantize_kernel[(parts * groups,)](
            codes, scales, made, made_scales, seed or 0, units, blocks, groups, codes.stride(0),
            scales.shape[-1], ALIGNED=parts == 1 or part % block == 0,
            VECTOR=_vector(codes, bits, block, part, 16), RANKS=len(codes),
            **constants, **_encoding(bits, seed),
        )  # fmt: skip
    return made, made_scales


def _decode_rows(
    codes: Tensor, scales: Tensor, out: Tensor, ranks: int, bits: int, block: int
) -> None:
    elements = out.shape[-1]
    flat, scales = codes.reshape(-1, codes.shape[-1]), scales.contiguous()
    groups, units, constants = _tile(bits, block, elements, _LANES)
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


def _tile(bits: int, block: int, elements: int, lanes: int) -> tuple[int, int, dict[str, Any]]:
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


def _encoding(bits: int, seed: int | None) -> dict[str, Any]:
    """Constants of a kernel that writes codes."""
    return {
        "TOP": TOP[bits],
        "SHARE": SHARE[bits],
        "SMALLEST": SMALLEST,
        "STOCHASTIC": seed is not None,
    }
