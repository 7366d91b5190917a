"""Triton kernels against the reference: on a GPU, or interpreted on a CPU.

Triton decides when it is imported whether it interprets (TRITON_INTERPRET=1), and then it compiles
nothing. So without a GPU one test starts pytest again, on this file, with that variable set.
"""

import os
import re

import pytest

pytest.importorskip("torch")

pytest.importorskip("triton", reason="there is no Triton")

import torch
import triton
from commands import python
from places import ROOT
from torch import Tensor

from realrun.algorithms import quantization as reference
from realrun.algorithms import quantization_triton as fused
from realrun.algorithms.quantization_format import Bits, Quantized, from_wire, to_wire

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
WITHOUT_GPU = "no CUDA device: test_the_kernels_interpreted_on_a_cpu runs it"
device = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason=WITHOUT_GPU)
CASES = [(1, 5, 4), (3, 1, 2), (2, 6426, 256), (3, 213, 96), (2, 96, 2048)]
"""Rows, elements, block: short and odd rows, several programs for a row, of which the last has
fewer blocks, blocks that are no power of two, larger than a row."""


def rows(count: int, elements: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Ordinary, sparse, tiny, huge, and ties between two codes."""
    generator = torch.Generator().manual_seed(count * elements)
    x = torch.randn(count, elements, generator=generator)
    match kind:
        case "sparse":
            x[torch.rand(x.shape, generator=generator) < 0.9] = 0.0
        case "tiny":
            x *= 1e-36
            if INTERPRETED and dtype == torch.bfloat16:  # whose interpreter misreads denormals
                x[x.abs() < torch.finfo(dtype).tiny] = 0.0
        case "huge":
            x = x.clamp(-1, 1) * float(torch.finfo(dtype).max)
        case "ties":
            x = torch.randint(-14, 15, x.shape, generator=generator) / 2
            x[:, 0] = 7.0
    return x.to(dtype).to(DEVICE)


def plain(x: Tensor, bits: Bits, block: int) -> Quantized:
    """By the reference, on the device."""
    return reference._quantize(x, bits, block, "nearest", None)


@device
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_nearest_gives_the_bits_of_the_reference() -> None:
    """Codes, scales, what they decode to, sums of rows and requantized sums."""
    for bits in [4, 8]:
        for kind in ["normal", "sparse", "tiny", "huge", "ties"]:
            for dtype in [torch.float32, torch.bfloat16, torch.float16]:
                for count, elements, block in CASES:
                    x = rows(count, elements, kind, dtype)
                    made = plain(x, bits, block)
                    codes, scales = fused.quantize(x, bits, block, None)
                    assert torch.equal(codes, made.codes)
                    assert torch.equal(scales, made.scales)
                    received = from_wire(
                        to_wire(made), bits, block, elements
                    )  # strided, as from a message
                    decoded = reference._dequantize(*made, bits, block, elements)
                    assert torch.equal(fused.dequantize(*received, bits, block, elements), decoded)
                    total = decoded[0].clone()
                    for row in decoded[1:]:
                        total += row
                    assert torch.equal(fused.sum_rows(*received, bits, block, elements), total)
                    if not bool(total.isfinite().all()):
                        continue  # huge rows add up to inf, which is another test's
                    for parts in (1, 2, 3):
                        if elements % parts == 0:
                            expected = plain(total.view(parts, -1), bits, block)
                            found = fused.sum_and_quantize(
                                *received, bits, block, elements, parts, None
                            )
                            assert torch.equal(found[0], expected.codes)
                            assert torch.equal(found[1], expected.scales)


@device
def test_stochastic_follows_the_same_law() -> None:
    """Off by less than a step, by nothing on average, the same for the same seed."""
    for bits in [4, 8]:
        given = torch.tensor([1.0, 0.3003, -0.011, -1.0, 0.777, 0.0])
        x = given.repeat(4, 1500).to(DEVICE)
        made = fused.quantize(x, bits, 1024, 3)
        back = fused.dequantize(*made, bits, 1024, 9000)
        step = float(made[1][0, 0])
        assert float((back - x).abs().max()) <= step * (1 + 2e-5)
        means = back.double().view(-1, 6).mean(0).cpu()
        assert bool(((means - given).abs() <= 4 * step / 2 / 6000**0.5 + 1e-6).all())
        assert not bool(back[:, 5::6].any())
        again, other = fused.quantize(x, bits, 1024, 3), fused.quantize(x, bits, 1024, 4)
        assert torch.equal(again[0], made[0])
        assert not torch.equal(other[0], made[0])


@device
def test_infinity_and_nan_spoil_their_block_only() -> None:
    """Also those that appear in a sum."""
    for value in [float("inf"), float("-inf"), float("nan")]:
        for bits in [4, 8]:
            x = torch.ones(2, 10, device=DEVICE)
            x[0, 5] = value
            made = fused.quantize(x, bits, 4, None)
            good = [True] * 4 + [False] * 4 + [True] * 2
            back = fused.dequantize(*made, bits, 4, 10)
            assert back.isfinite().tolist() == [good, [True] * 10]
            summed = fused.sum_and_quantize(*made, bits, 4, 10, 1, None)
            assert fused.dequantize(*summed, bits, 4, 10).isfinite().tolist() == [good]
            # Parts that start within blocks: the spoiled one begins where the second part ends.
            y = torch.ones(2, 18, device=DEVICE)
            y[1, 13] = value
            made = fused.quantize(y, bits, 4, None)
            summed = fused.sum_and_quantize(*made, bits, 4, 18, 3, None)
            back = fused.dequantize(*summed, bits, 4, 6)
            assert back.isfinite().tolist() == [[True] * 6, [True] * 6, [False] * 4 + [True] * 2]


@device
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_may_lie_further_apart_than_32_bits_count(bits: Bits) -> None:
    """Of the memory between them, little is touched."""
    x = torch.randn(3, 64).to(DEVICE)
    codes, scales = plain(x, bits, 16)
    far = codes.new_empty(2**31 + 2**12).as_strided(codes.shape, (2**30 + 16, 1))
    far.copy_(codes)
    total = fused.sum_rows(far, scales, bits, 16, 64)
    assert torch.equal(total, fused.sum_rows(codes, scales, bits, 16, 64))
    found = fused.sum_and_quantize(far, scales, bits, 16, 64, 1, None)
    assert torch.equal(found[0], plain(total.view(1, 64), bits, 16).codes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device to dispatch to")
@pytest.mark.parametrize("bits", [4, 8])
def test_cuda_tensors_take_the_kernels(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    """And give what CPU tensors give; what kernels cannot do goes to the reference."""
    used = []
    original = fused.quantize
    monkeypatch.setattr(fused, "quantize", lambda *given: used.append(1) or original(*given))
    x = torch.randn(3, 1000)
    for block, count in ((256, 1), (1 << 15, 1), (7, 1 if bits == 4 else 2)):
        codes, scales = reference.quantize(x.cuda(), bits, block)
        expected = reference.quantize(x, bits, block)
        assert torch.equal(codes.cpu(), expected.codes)
        assert torch.equal(scales.cpu(), expected.scales)
        assert len(used) == count


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 compiles nothing")
@pytest.mark.skipif(triton.__version__ < "3.6", reason="Triton 3.5 flushes denormals in a division")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "capability"), [(4, 90), pytest.param(8, 80, marks=pytest.mark.nightly)]
)
def test_kernels_compile_without_contraction_and_flushing(bits: Bits, capability: int) -> None:
    """For GPUs of any kind, also without one: exact division, denormals kept, wide accesses.

    The only multiply-adds have a factor of 1/16, and are exact.
    """
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - needs Triton
    from triton.compiler import ASTSource, compile  # noqa: A004, PLC0415

    received = {"ALIGNED": True, "RANKS": 4, "VECTOR": 16, "STOCHASTIC": False}
    constants = fused._tiles(bits, 2048, 10_240, 128 // bits)[-1] | received
    options = {name: constants.pop(name) for name in ("enable_fp_fusion", "num_warps")}
    tensors = {"x": "*bf16", "out": "*fp32", "scales": "*fp32", "new_scales": "*fp32"}
    codes = "*u8" if bits == 4 else "*i8"
    for kernel in (fused.quantize_kernel, fused.sum_kernel, fused.sum_and_quantize_kernel):
        names = kernel.arg_names
        signature = {
            name: "constexpr"
            if name in constants
            else tensors.get(name, codes if name.endswith("codes") else "i32")
            for name in names
        }
        constants["VECTOR"] = bits // 2 if kernel is fused.sum_kernel else 16
        known = {(names.index(name),): value for name, value in constants.items() if name in names}
        whole = [["tt.divisibility", 16]]
        aligned = {(i,): whole for i, n in enumerate(names) if signature[n].startswith("*")}
        made = compile(
            ASTSource(kernel, signature, known, aligned), GPUTarget("cuda", capability, 32), options
        )
        text = made.asm["ptx"]
        assert all("0f3D800000" in line for line in re.findall(r"fma\.rn\.f32.*", text))
        assert ".ftz" not in text
        assert ".local" not in text
        assert "st.global.v4.b32" in text
        if kernel is not fused.sum_kernel:
            assert "ld.global.v4.b32" in text
        if kernel is not fused.sum_kernel:
            assert "div.rn.f32" in text
            assert "div.full" not in text
            assert text.count("0f4B400000") >= 2  # the rounding is not optimized away


@pytest.mark.nightly
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreted run")
def test_the_kernels_interpreted_on_a_cpu() -> None:
    """All tests that need a device pass under Triton's interpreter; none of them is skipped."""
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs")
    done = python(ROOT, *options, __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d passed", done.stdout, re.MULTILINE), done.stdout
    assert WITHOUT_GPU not in done.stdout
