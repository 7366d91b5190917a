"""One small training for the loops of all libraries, and the same in a loop of our own."""

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from local_problem import co2_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from realrun.execute.world import World

ROWS, BATCH, EPOCHS = 48, 4, 3
"""On two ranks six steps an epoch, in no case a multiple of tau=4."""


class Network(nn.Module):
    """Of five numbers three; it keeps what batches it has been trained on."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, given: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Loss and output, as models of Transformers give them."""
        if self.training:
            self.seen.append((given, wanted))
        output = self.layers(given)
        return {"loss": (output - wanted).square().mean(), "output": output}


def rows() -> TensorDataset:
    """The data of all ranks."""
    generator = torch.Generator().manual_seed(5)
    given = torch.randn(ROWS, 5, generator=generator)
    return TensorDataset(given, torch.sin(2 * given[:, :3]))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """What all train with."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)


def numbers(model: nn.Module) -> list[float]:
    """Parameters and buffers, exactly."""
    whole = [one.detach().double().reshape(-1) for one in model.state_dict().values()]
    found: list[float] = torch.cat(whole).tolist()
    return found


def own_loop(
    batches: Iterable[tuple[Tensor, Tensor]],
    options: dict[str, Any],
    rates: Iterable[float] = repeat(0.02),
) -> list[float]:
    """Where the same batches lead in plain PyTorch, with the learning rates of the steps."""
    model = Network()
    optim = adam(model)
    co2 = co2_of(model, optim, **options)
    for (given, wanted), rate in zip(batches, rates, strict=False):
        optim.param_groups[0]["lr"] = rate
        optim.zero_grad()
        model(given, wanted)["loss"].backward()
        optim.step()
    co2.finish(buffers=True)
    return numbers(model)


def check_bad_batch(world: World, heard: str) -> None:
    """What ranks hear of the exception of rank 1, the first one by its name."""
    if world.rank:
        assert heard == "ValueError: a bad batch"
    else:
        assert heard.startswith("RankFailure: ")
        assert "rank 1 raised ValueError" in heard
