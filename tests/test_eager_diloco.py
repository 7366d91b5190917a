"""The peer of the convergence study: Eager DiLoCo, which mixes fresh and late outer gradients."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from realrun.algorithms import DiLoCo

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from eager_diloco import EagerDiLoCo  # type: ignore[import-not-found]

WORKERS = 3
ROUNDS = 6
SIZE = 4


@dataclass
class Network:
    """All-reduces whose sum is there once the last worker has sent its part."""

    sent: list[Tensor] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor, **_: object) -> SimpleNamespace:
        """Take part in the sum of the round."""
        self.sent.append(tensor)
        if len(self.sent) == WORKERS:
            total = torch.stack(self.sent).sum(0)
            for one in self.sent:
                one.copy_(total)
            self.sent.clear()
        return SimpleNamespace(wait=lambda: None)


def starts(
    monkeypatch: pytest.MonkeyPatch, moves: Tensor, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """Where all began, and where workers begin each next round: [rounds, workers, elements].

    `moves` are what the local steps of a round change, in the same shape.
    """
    network = Network()
    monkeypatch.setattr("torch.distributed.all_reduce", network.all_reduce)
    models = [nn.Linear(SIZE, 1, bias=False).double() for _ in range(WORKERS)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    first = models[0].weight.detach()[0].clone()
    group = SimpleNamespace(size=lambda: WORKERS)
    workers = [EagerDiLoCo(model, group, 1, lr, momentum) for model in models]
    found = torch.empty_like(moves)
    for number, row in enumerate(moves):
        for model, move in zip(models, row, strict=True):
            with torch.no_grad():
                model.weight.add_(move)
        for place, (worker, model) in enumerate(zip(workers, models, strict=True)):
            worker.after_step()
            found[number, place] = model.weight.detach()[0]
    return first, found


def test_own_progress_is_used_at_once_and_that_of_others_a_round_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gain 1: all have made every mean step but the last, a worker its own part of that."""
    moves = torch.randn(ROUNDS, WORKERS, SIZE, dtype=torch.float64)
    first, found = starts(monkeypatch, moves, 1.0, 0.0)
    for number in range(ROUNDS):
        old = first + moves[:number].mean(1).sum(0)
        torch.testing.assert_close(found[number], old + moves[number] / WORKERS)


def test_every_worker_has_an_outer_optimizer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nesterov momentum is torch's, fed with the worker's own mixture."""
    moves = torch.randn(ROUNDS, WORKERS, SIZE, dtype=torch.float64)
    first, found = starts(monkeypatch, moves, 0.7, 0.9)
    for place in range(WORKERS):
        theta = nn.Parameter(first.clone())
        outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
        for number in range(ROUNDS):
            others = [one for one in range(WORKERS) if one != place]
            late = moves[number - 1, others].sum(0) if number else torch.zeros(SIZE)
            theta.grad = -(moves[number, place] + late) / WORKERS
            outer.step()
            torch.testing.assert_close(found[number, place], theta.detach())


def test_alone_it_is_diloco() -> None:
    """There are no others to be late."""
    ends = []
    for eager in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(SIZE, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if eager:
            alone = EagerDiLoCo(model, None, 3, 0.7, 0.9)
            optimizer.register_step_post_hook(alone.after_step)
        else:
            DiLoCo(model, optimizer, tau=3, outer_lr=0.7, outer_momentum=0.9)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, SIZE)).square().sum().backward()
            optimizer.step()
        ends.append(model.weight.detach().clone())
    torch.testing.assert_close(ends[0], ends[1])
