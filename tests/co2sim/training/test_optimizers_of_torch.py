"""Optimizers beside PyTorch's own: the states that these keep, and the FLOP that they execute."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.flop_counter import FlopCounterMode

from co2sim.catalog import load_optimizer
from co2sim.schedule.schedule import DType
from co2sim.training.optimizer import Matrix, Tensors

TORCH: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], torch.dtype]] = {
    "adamw": (torch.optim.AdamW, {}, torch.float32),
    "adamw_bf16": (torch.optim.AdamW, {}, torch.bfloat16),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, torch.float32),
    "adafactor": (torch.optim.Adafactor, {}, torch.float32),
    "muon": (torch.optim.Muon, {}, torch.float32),
}


def stepped(name: str, *shape: int) -> torch.optim.Optimizer:
    """PyTorch's optimizer behind its first step over a tensor."""
    kind, options, dtype = TORCH[name]
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    made = kind([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    made.step()
    return made


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64,)])
def test_pytorch_keeps_as_much(name: str, shape: tuple[int, ...]) -> None:
    """Bytes of its state, but for the number of steps; its Muon takes no vectors."""
    if name == "muon" and len(shape) == 1:
        pytest.skip("Muon refuses vectors")
    state = stepped(name, *shape).state_dict()["state"][0]
    held = sum(t.numel() * t.element_size() for key, t in state.items() if key != "step")
    tensors = Tensors(others=shape[0])
    if len(shape) > 1:
        tensors = Tensors((Matrix(shape[0], shape[1]),))
    assert load_optimizer(name).value.states(tensors) == held


@pytest.mark.parametrize("shape", [(48, 80), (96, 32), (64, 64)])
def test_muon_computes_what_pytorch_executes(shape: tuple[int, int]) -> None:
    """FLOP of the products that its step dispatches."""
    with FlopCounterMode(display=False) as counter:
        stepped("muon", *shape)
    products = load_optimizer("muon").value.products(Matrix(*shape), DType.BF16)
    assert sum(product.flops for product in products) == counter.get_total_flops()
