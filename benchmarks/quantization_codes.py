"""Ways to send a tensor in blocks that share a scale: the ones of `realrun`, and others beside.

Each gives what the receiver has. All scales are fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from co2sim.schedule import SCALE_BYTES
from realrun.algorithms.quantize import dequantize, quantize
from realrun.algorithms.quantize_format import SHARE, SMALLEST, TOP, Bits, Rounding

_FP8 = torch.float8_e4m3fn
_CLIPS = tuple(1 - 0.05 * number for number in range(15))
"""Shares of a block's largest element, from 1 to 0.3, to choose its largest code from."""


@dataclass(frozen=True, slots=True)
class Code:
    """What rows [rows, elements] of fp32 become on the way, in blocks of so many elements."""

    name: str
    bits: int
    received: Callable[[Tensor, int, Generator], Tensor]

    def bits_per_element(self, block: int) -> float:
        """With the scale of its block."""
        return self.bits + 8 * float(SCALE_BYTES) / block


def _rounded(bits: Bits, rounding: Rounding) -> Callable[[Tensor, int, Generator], Tensor]:
    def received(rows: Tensor, block: int, generator: Generator) -> Tensor:
        source = generator if rounding == "stochastic" else None
        made = quantize(rows, bits, block, rounding, source)
        return dequantize(*made, bits, block, rows.shape[-1])

    return received


def _adaptive(rows: Tensor, block: int, _: Generator) -> Tensor:
    """int4, to nearest; the scale of each block leaves the least squared error of some.

    The idea: Banner, Nahshan and Soudry, Post-training 4-bit quantization (ACIQ), 2019; they
    compute the clipping from a distribution, and here it is searched for.
    """
    blocks = _blocks(rows, block)
    largest = blocks.abs().amax(-1, keepdim=True)
    best, least = torch.zeros_like(blocks), torch.full_like(largest, torch.inf)
    for clip in _CLIPS:
        scales = (clip * largest * SHARE[4]).clamp_min(SMALLEST)
        tried = (blocks / scales).round().clamp(-TOP[4], TOP[4]) * scales
        error = (tried - blocks).square().sum(-1, keepdim=True)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best.flatten(-2)[..., : rows.shape[-1]]


def _fp8(rows: Tensor, block: int, _: Generator) -> Tensor:
    """The type E4M3 of Micikevicius et al., FP8 Formats for Deep Learning, 2022 (448 at most)."""
    blocks = _blocks(rows, block)
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = (largest / torch.finfo(_FP8).max).clamp_min(SMALLEST)
    return ((blocks / scales).to(_FP8).float() * scales).flatten(-2)[..., : rows.shape[-1]]


def _blocks(rows: Tensor, block: int) -> Tensor:
    """Rows [rows, elements] as [rows, blocks, block], filled up with zeros."""
    return pad(rows, (0, -rows.shape[-1] % block)).unflatten(-1, (-1, block))


CODES = {
    code.name: code
    for code in (
        Code("int4", 4, _rounded(4, "nearest")),
        Code("int4, stochastic", 4, _rounded(4, "stochastic")),
        Code("int4, adaptive", 4, _adaptive),
        Code("int8", 8, _rounded(8, "nearest")),
        Code("fp8 (E4M3)", 8, _fp8),
    )
}
