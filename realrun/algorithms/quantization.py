"""Block quantization in the format of `quantization_format`: the reference, for any device.

CUDA tensors go through the kernels of `quantization_triton` where Triton is installed: the same
bits for `nearest`, other random numbers for `stochastic`.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from realrun.algorithms.quantization_format import (
    HALF_BYTE,
    SHARE,
    SMALLEST,
    TOP,
    Bits,
    Quantized,
    Rounding,
)

_LARGEST_FUSED = 1 << 14


def quantize(
    x: Tensor,
    bits: Bits,
    block: int,
    rounding: Rounding = "nearest",
    generator: Generator | None = None,
) -> Quantized:
    """Quantize rows [..., elements] of fp32, bf16 or fp16 to codes and scales.

    `nearest` (half to even) is off by at most half a scale, `stochastic` by less than one and by
    nothing on average, both up to the rounding of fp32. `stochastic` draws from `generator`, on
    any device, or from torch's own.

    Codes are [..., elements] int8 or [..., ceil(elements / 2)] uint8, scales [..., ceil(elements /
    block)] fp32. The whole block of an inf or a NaN comes back as inf and NaN.
    """
    fused = _fused(x, bits, block)
    if fused is None or not x.numel():
        return _quantize(x, bits, block, rounding, generator)
    return Quantized(*fused.quantize(x, bits, block, _seed(rounding, generator)))


def dequantize(codes: Tensor, scales: Tensor, bits: Bits, block: int, elements: int) -> Tensor:
    """The fp32 rows [..., elements] that codes and scales of as many stand for."""
    fused = _fused(codes, bits, block)
    if fused is None or not codes.numel():
        return _dequantize(codes, scales, bits, block, elements)
    rows: Tensor = fused.dequantize(codes, scales, bits, block, elements)
    return rows


def sum_rows(rows: Quantized, bits: Bits, block: int, elements: int) -> Tensor:
    """The fp32 sum [elements] of quantized rows [ranks, ...], in the order of the ranks."""
    fused = _fused(rows.codes, bits, block)
    if fused is not None:
        summed: Tensor = fused.sum_rows(rows.codes, rows.scales, bits, block, elements)
        return summed
    total = dequantize(rows.codes[0], rows.scales[0], bits, block, elements)
    for codes, scales in zip(rows.codes[1:], rows.scales[1:], strict=True):
        total += dequantize(codes, scales, bits, block, elements)
    return total


def sum_and_quantize(
    rows: Quantized,
    bits: Bits,
    block: int,
    elements: int,
    parts: int,
    rounding: Rounding = "nearest",
    generator: Generator | None = None,
) -> Quantized:
    """Sum quantized rows [ranks, ...] of `elements`, and quantize the sum as `parts` equal rows."""
    fused = _fused(rows.codes, bits, block)
    if fused is not None:
        seed = _seed(rounding, generator)
        return Quantized(*fused.sum_and_quantize(*rows, bits, block, elements, parts, seed))
    total = sum_rows(rows, bits, block, elements).view(parts, -1)
    return quantize(total, bits, block, rounding, generator)


@cache
def _kernels() -> ModuleType | None:
    try:
        from realrun.algorithms import quantization_triton  # noqa: PLC0415 - needs Triton
    except ImportError:
        return None
    return quantization_triton


def _fused(x: Tensor, bits: Bits, block: int) -> ModuleType | None:
    """The module of fused kernels, where it can be used."""
    # Where blocks of int4 start in the middle of a byte, no kernel can own a block.
    odd = bits == HALF_BYTE and block % 2
    return _kernels() if x.is_cuda and block <= _LARGEST_FUSED and not odd else None


def _seed(rounding: Rounding, generator: Generator | None) -> int | None:
    """A seed for a kernel's own random numbers; None for rounding to nearest."""
    if rounding == "nearest":
        return None
    device = generator.device if generator is not None else None
    return int(torch.randint(2**31, (), generator=generator, device=device))


def _blocks(x: Tensor, block: int) -> Tensor:
    """Rows [..., elements] as [..., blocks, block], filled up with zeros."""
    missing = -x.shape[-1] % block
    return (pad(x, (0, missing)) if missing else x).reshape(*x.shape[:-1], -1, block)


def _quantize(
    x: Tensor, bits: Bits, block: int, rounding: Rounding, generator: Generator | None
) -> Quantized:
    elements = x.shape[-1]
    if x.numel() == 0:
        codes = x.new_empty(x.shape, dtype=torch.int8)
        return Quantized(_pack(codes) if bits == HALF_BYTE else codes, x.float())
    blocks = _blocks(x.float(), min(block, elements))
    scales = (blocks.abs().amax(-1) * SHARE[bits]).clamp_min(SMALLEST)
    steps = blocks * scales.reciprocal().unsqueeze(-1)
    if rounding == "nearest":
        steps = steps.round()
    else:
        device = generator.device if generator is not None else x.device
        draws = torch.rand(steps.shape, generator=generator, device=device).to(x.device)
        below = steps.floor()
        # Not floor(steps + draw): that sum rounds up to the next integer more often than it should.
        steps = below + (draws < steps - below)
    # The scale is rounded down, so that the largest element may be a hair above the largest code.
    codes = steps.clamp(-TOP[bits], TOP[bits]).to(torch.int8).flatten(-2)[..., :elements]
    return Quantized(_pack(codes) if bits == HALF_BYTE else codes.contiguous(), scales)


def _pack(codes: Tensor) -> Tensor:
    """Two int4 to a byte, in two's complement."""
    halves = (pad(codes, (0, 1)) if codes.shape[-1] % 2 else codes).view(torch.uint8)
    return (halves[..., 0::2] & 15) | (halves[..., 1::2] << 4)


def _dequantize(codes: Tensor, scales: Tensor, bits: Bits, block: int, elements: int) -> Tensor:
    if elements == 0:
        return codes.new_empty(codes.shape, dtype=torch.float32)
    if bits == HALF_BYTE:
        halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., :elements]
        codes = (halves ^ 8).to(torch.int8) - 8  # the sign is the highest of the four bits
    blocks = _blocks(codes, min(block, elements)).float() * scales.unsqueeze(-1)
    return blocks.flatten(-2)[..., :elements].contiguous()
