"""Block quantization on CUDA: what `quantize` says, in one launch and one pass each.

Importing this needs Triton. What is given has been checked by `quantize`.
"""

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

_LANES = 1024
"""Elements that one program decodes."""


def quantize(x: Tensor, bits: int, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows [..., elements]; `seed` None rounds to nearest."""
    x = x.contiguous()
    elements, lead = x.shape[-1], x.shape[:-1]
    codes, scales = _empty(x, lead, elements, bits, block)
    with torch.cuda.device_of(x):
        quantize_kernel[(scales.numel(),)](
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
        sum_and_quantize_kernel[(made_scales.numel(),)](
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
        sum_kernel[(out.numel() // elements * chunks,)](
            flat, scales, out, ranks, elements, chunks, block, flat.stride(0), scales.shape[-1],
            HALVES=bits == HALF_BYTE, SIZE=_LANES, enable_fp_fusion=False,
        )  # fmt: skip


def _empty(
    like: Tensor, lead: tuple[int, ...], elements: int, bits: int, block: int
) -> tuple[Tensor, Tensor]:
    codes, dtype = (-(-elements // 2), torch.uint8) if bits == HALF_BYTE else (elements, torch.int8)
    scales = like.new_empty((*lead, -(-elements // block)), dtype=torch.float32)
    return like.new_empty((*lead, codes), dtype=dtype), scales


def _encoding(bits: int, block: int, elements: int, seed: int | None) -> dict[str, Any]:
    """Constants of a kernel that writes codes."""
    lanes = min(block, elements)
    return {
        "HALVES": bits == HALF_BYTE,
        "TOP": TOP[bits],
        "SHARE": SHARE[bits],
        "SMALLEST": SMALLEST,
        "STOCHASTIC": seed is not None,
        "SIZE": triton.next_power_of_2(-(-lanes // 2) if bits == HALF_BYTE else lanes),
        "enable_fp_fusion": False,
    }
