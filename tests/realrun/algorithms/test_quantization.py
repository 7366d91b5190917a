"""Block quantization: error bounds, exact zeros, what is refused, bytes on the wire."""

from pathlib import Path

import pytest
from commands import python
from hypothesis import given
from hypothesis import strategies as st

from co2sim.schedule.schedule import WORLD, Collective, DType, Kind

pytest.importorskip("torch")

import torch
from torch import Tensor

from realrun.algorithms.quantization import dequantize, quantize
from realrun.algorithms.quantization_format import (
    SMALLEST,
    TOP,
    Bits,
    from_wire,
    to_wire,
    wire_bytes,
)

ROUNDING = 130 * 2.0**-23
"""What fp32 itself rounds away, in steps, of a code of up to 127."""

bits_given = st.sampled_from((4, 8))
sizes = st.integers(1, 70)
blocks_given = st.sampled_from((1, 2, 3, 7, 16, 64, 2048))
dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


@st.composite
def inputs(draw: st.DrawFn) -> Tensor:
    """Rows of any size: ordinary, tiny, huge, zero, of one size or of many; in any type."""
    shape = draw(st.sampled_from(((), (1,), (3,), (2, 2))))
    elements = draw(sizes)
    dtype = draw(dtypes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn((*shape, elements), generator=generator)
    match draw(st.sampled_from(("normal", "sparse", "denormal", "huge", "spread", "given"))):
        case "sparse":
            x[torch.rand(x.shape, generator=generator) < 0.8] = 0.0
        case "denormal":
            x *= 1e-39
        case "huge":
            x = x.clamp(-1, 1) * float(torch.finfo(dtype).max)
        case "spread":
            x *= 10.0 ** torch.randint(-44, 38, x.shape, generator=generator)
        case "given":
            finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
            x[..., 0] = draw(finite)
    top = float(torch.finfo(dtype).max)
    return x.clamp(-top, top).to(dtype)


def spread(scales: Tensor, block: int, elements: int) -> Tensor:
    """The scale of every element, in double precision."""
    return scales.double().repeat_interleave(block, -1)[..., :elements]


@given(inputs(), bits_given, blocks_given)
def test_nearest_is_off_by_at_most_half_a_step(x: Tensor, bits: Bits, block: int) -> None:
    """Of the block's own scale, which is the largest element over the largest code."""
    made = quantize(x, bits, block)
    back = dequantize(*made, bits, block, x.shape[-1])
    steps = spread(made.scales, block, x.shape[-1])
    assert back.dtype == torch.float32
    assert back.shape == x.shape
    assert bool(((back.double() - x.double()).abs() <= steps * (0.5 + ROUNDING)).all())
    for number, part in enumerate(x.double().split(block, -1)):
        fair = (part.abs().amax(-1) / TOP[bits]).clamp_min(SMALLEST)
        assert torch.allclose(made.scales[..., number].double(), fair, rtol=2e-7, atol=0.0)


@given(inputs(), bits_given, blocks_given, st.integers(0, 1000))
def test_stochastic_is_off_by_less_than_a_step(
    x: Tensor, bits: Bits, block: int, seed: int
) -> None:
    """And gives the same for the same seed."""
    made, again = (
        quantize(x, bits, block, "stochastic", torch.Generator().manual_seed(seed))
        for _ in range(2)
    )
    back = dequantize(*made, bits, block, x.shape[-1])
    steps = spread(made.scales, block, x.shape[-1])
    assert bool(((back.double() - x.double()).abs() <= steps * (1 + ROUNDING)).all())
    assert torch.equal(made.codes, again.codes)


def test_stochastic_is_unbiased_and_nearest_is_not() -> None:
    """The mean of 40,000 draws is within four standard errors for every element."""
    for bits in [4, 8]:
        x = torch.tensor([1.0, 0.3003, -0.011, 0.5 / TOP[bits] * 0.6, -1.0, 0.777, 0.0])
        draws = 40_000
        generator = torch.Generator().manual_seed(3)
        made = quantize(x.repeat(draws, 1), bits, len(x), "stochastic", generator)
        back = dequantize(*made, bits, len(x), len(x)).double()
        step = 1.0 / TOP[bits]
        assert bool(((back.mean(0) - x).abs() <= 4 * (step / 2) / draws**0.5 + 1e-6).all())
        nearest = dequantize(*quantize(x, bits, len(x)), bits, len(x), len(x))
        assert float((nearest[3] - x[3]).abs()) > 0.25 * step


@given(inputs(), bits_given, blocks_given)
def test_zeros_are_exact_and_signs_mirror(x: Tensor, bits: Bits, block: int) -> None:
    """Both roundings keep zero; the codes of -x are those of x with the other sign."""
    zero = x == 0
    for rounding in ("nearest", "stochastic"):
        made = quantize(x, bits, block, rounding)
        assert not bool(dequantize(*made, bits, block, x.shape[-1])[zero].any())
    back, mirrored = (
        dequantize(*quantize(one, bits, block), bits, block, x.shape[-1]) for one in (x, -x)
    )
    assert torch.equal(back, -mirrored)


@given(inputs(), bits_given, blocks_given)
def test_wire_gives_back_what_went_in_with_the_bytes_of_the_schedule(
    x: Tensor, bits: Bits, block: int
) -> None:
    """One message per row; int4 takes half a byte, scales travel along."""
    elements = x.shape[-1]
    made = quantize(x, bits, block)
    wire = to_wire(made)
    stated = Collective(
        Kind.ALL_GATHER, "x", elements, DType.INT4 if bits == 4 else DType.INT8, WORLD, block
    )
    assert wire.dtype == torch.uint8
    assert wire.shape == (*x.shape[:-1], wire_bytes(elements, bits, block))
    assert stated.bytes <= wire.shape[-1] < stated.bytes + 1
    for sent in (wire, torch.cat((wire, wire), -1)[..., wire.shape[-1] :]):
        back = from_wire(sent, bits, block, elements)
        assert torch.equal(back.codes, made.codes)
        assert torch.equal(back.scales, made.scales)
    rows = quantize(x.reshape(-1, elements)[0], bits, block)
    assert torch.equal(rows.codes, made.codes.reshape(-1, made.codes.shape[-1])[0])


def test_int4_layout() -> None:
    """Two to a byte in two's complement, the first in the low half; an odd one leaves zeros."""
    made = quantize(torch.tensor([7.0, -7.0, 1.0, -1.0, -3.0]), 4, 8)
    assert made.codes.tolist() == [0x97, 0xF1, 0x0D]
    assert made.scales.tolist() == pytest.approx([1.0])


def test_infinity_and_nan_spoil_their_block_and_no_other() -> None:
    """Of all types, in both formats."""
    for value in [float("inf"), float("-inf"), float("nan")]:
        for bits in [4, 8]:
            for dtype in [torch.float32, torch.bfloat16, torch.float16]:
                x = torch.ones(10, dtype=dtype)
                x[5] = value
                back = dequantize(*quantize(x, bits, 4), bits, 4, 10)
                assert back.isfinite().tolist() == [True] * 4 + [False] * 4 + [True] * 2


def test_nothing_at_all_is_fine() -> None:
    """An empty row has no codes and no scales."""
    for bits in (4, 8):
        made = quantize(torch.empty(2, 0), bits, 4)
        assert (made.codes.numel(), made.scales.numel(), wire_bytes(0, bits, 4)) == (0, 0, 0)
        assert dequantize(*made, bits, 4, 0).shape == (2, 0)


@pytest.mark.nightly
def test_all_but_what_runs_on_gpus_imports_without_triton(tmp_path: Path) -> None:
    """A torch for CPUs comes without it."""
    script = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import realrun
needs = {"realrun.algorithms.quantization_triton", "realrun.execute.cuda_streams"}
for one in pkgutil.walk_packages(realrun.__path__, "realrun."):
    if one.name not in needs and not one.name.startswith(("realrun.adapters.", "realrun.__main__")):
        importlib.import_module(one.name)
"""
    done = python(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
