"""The study of block sizes: its codes, and that it codes where the algorithms code."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from quantization_codes import CODES  # noqa: E402 - needs torch
from quantization_training import PLACES, averaged, reduced, train  # noqa: E402 - needs torch
from ranks import on_ranks  # noqa: E402 - needs torch
from torch import Generator, Tensor  # noqa: E402 - needs torch

from realrun.algorithms.quantize_format import wire_bytes  # noqa: E402 - needs torch
from realrun.train.settings import TrainSettings  # noqa: E402 - needs torch
from realrun.train.tasks import make_task  # noqa: E402 - needs torch

ELEMENTS = 1000


def received(code: str, x: Tensor, block: int) -> Tensor:
    """What arrives of a vector."""
    return CODES[code].received(x[None], block, Generator().manual_seed(0))[0]


@given(st.integers(0, 1000), st.sampled_from((32, 256, 4096)))
@settings(max_examples=30, deadline=None)
def test_an_adaptive_scale_is_never_worse_in_a_block(seed: int, block: int) -> None:
    """It may choose the usual one; of a normal distribution it chooses a smaller one."""
    x = torch.randn(ELEMENTS, generator=Generator().manual_seed(seed))
    usual, adaptive = ((received(c, x, block) - x).square() for c in ("int4", "int4, adaptive"))
    for one, other in zip(usual.split(block), adaptive.split(block), strict=True):
        assert other.sum() <= one.sum() * (1 + 1e-5)
    assert adaptive.sum() < usual.sum()


@pytest.mark.parametrize(("code", "bits"), [("int4", 4), ("int4, stochastic", 4), ("int8", 8)])
def test_errors_are_those_of_uniform_rounding(code: str, bits: int) -> None:
    """Elements spread evenly: scale^2 / 12 to nearest, and 1 / 6 of it stochastic."""
    x = 2 * torch.rand(400_000, generator=Generator().manual_seed(1)) - 1
    scale = 1 / (2 ** (bits - 1) - 1)
    expected = scale**2 / (6 if "stochastic" in code else 12)
    assert float((received(code, x, 4096) - x).square().mean()) == pytest.approx(expected, rel=0.01)


def test_fp8_is_exact_for_its_own_numbers_and_as_fine_for_small_ones() -> None:
    """A block's largest element becomes 448; three bits of mantissa, whatever the size."""
    numbers = torch.tensor([448.0, 1.0, 1.125, 0.0625, -0.0703125, 0.0])
    assert torch.equal(received("fp8 (E4M3)", numbers, 32), numbers)
    small = received("fp8 (E4M3)", torch.tensor([448.0, 0.09]), 32)[1]
    assert abs(float(small) - 0.09) <= 0.09 / 16


@pytest.mark.parametrize(("code", "bits"), [("int4", 4), ("int8", 8)])
def test_bits_are_those_of_the_wire(code: str, bits: int) -> None:
    """Those of the codes, and 32 for the scale of a block."""
    found = 8 * wire_bytes(1 << 16, 4 if bits == 4 else 8, 256) / (1 << 16)
    assert CODES[code].bits_per_element(256) == found


def test_without_a_code_workers_train_as_one() -> None:
    """What is sent as it is makes the mean gradient; weights arrive as they are."""
    of = TrainSettings(size="tiny", steps=3, warmup=1, batch=8, lr=1e-2)
    task = make_task(of, torch.device("cpu"))
    one = train(task, of, "weights (qwZ)", None).loss
    assert train(task, of, "gradients (qgZ)", None).loss == pytest.approx(one, abs=1e-4)
    for place in PLACES:
        for code in CODES.values():  # also where rows are no whole number of blocks
            assert train(task, of, place, code, 4096).loss != one


@pytest.mark.dist
def test_it_codes_as_the_algorithms_do() -> None:
    """Four ranks: the sum of ZeRO++'s gradients, and the mean of an average, bit for bit."""
    calls = {"gradient": {"block": 32}, "outer": {"wire": "int4"}}
    found = {
        name: on_ranks(name, 4, module="quantization_workers", **arguments)
        for name, arguments in calls.items()
    }
    given_ = [torch.tensor(one["given"]) for one in found["gradient"]]

    def send(block: int):  # type: ignore[no-untyped-def] # noqa: ANN202 - as it stands in the study
        return lambda rows: CODES["int4"].received(rows, block, Generator())

    parts = torch.cat([torch.tensor(one["got"]) for one in found["gradient"]])
    assert torch.equal(reduced(given_, send(32)), parts)
    given_ = [torch.tensor(one["given"]) for one in found["outer"]]
    expected = averaged(given_, send(2048))
    for one in found["outer"]:
        assert torch.equal(torch.tensor(one["got"]), expected)
