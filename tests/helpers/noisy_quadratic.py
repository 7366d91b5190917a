"""A function to train whose curvature, noise and heterogeneity are known, and its estimates."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import everywhere
from torch import Tensor, nn

from realrun.execute.world import World
from realrun.train import TrainSettings
from realrun.train.tasks.task import Batch, Task

SIZE = 200
"""Parameters of the quadratic."""

EIGENVALUES = np.linspace(-2.0, 1.0, SIZE)
SAMPLES = np.random.default_rng(0).standard_normal((4096, SIZE))
"""A sample adds its row to the gradient; so its noise is known exactly."""


def shift(rank: int) -> np.ndarray:
    """What a rank's own function adds to its gradient."""
    return np.random.default_rng((1, rank)).standard_normal(SIZE)


class Quadratic(nn.Module):
    """x' H x / 2 + (mean of the samples + the rank's shift)' x: gives that loss."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(SIZE))
        self.eigenvalues = torch.from_numpy(EIGENVALUES).float()
        self.shift = torch.from_numpy(shift(rank)).float()

    def forward(self, samples: Tensor) -> Tensor:
        """A scalar."""
        linear = (samples.mean(0) + self.shift) @ self.x
        return (self.eigenvalues * self.x) @ self.x / 2 + linear


def quadratic(rank: int) -> Task:
    """A task of this rank: its noise, curvature and heterogeneity are known."""
    table = torch.from_numpy(SAMPLES).float()

    def draw(numbers: np.ndarray) -> Batch:
        return Batch(table[torch.from_numpy(numbers)], torch.zeros(len(numbers)))

    facts = {"sha256": "none"}
    return Task(
        "quadratic", "loss", "sample", 1, len(SAMPLES), draw, (), lambda: Quadratic(rank), facts
    )


def check_estimates(world: World, strategy: str) -> None:
    """Train with plain SGD: at all points constants are within 4 standard errors of the truth.

    Every rank is a worker. Curvature and steps are checked, too; all ranks find the same.
    """
    from realrun.train import estimate, loop  # noqa: PLC0415 - what the tests themselves need not

    def of(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch.inputs)
        return loss

    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    settings = TrainSettings(strategy=strategy, steps=8, batch=16, lr=0.01, warmup=0, **plain)
    unseen = SimpleNamespace(last=None, take=lambda: (0.0, 0.0), take_pending=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_task", lambda *_: quadratic(world.rank))
        patch.setattr(loop, "Validation", lambda *_: unseen)
        for module in (loop, estimate):
            patch.setattr(module, "loss_of", of)
        estimates = loop.train(settings, world, estimate=True).estimates
    said: dict[str, Any] = estimates.to_dict(settings, None)
    workers = world.layout.world_size
    noise = float(SAMPLES.var(axis=0).sum()) / (16 // workers)
    slopes = np.array([shift(rank) for rank in range(workers)])
    spread = float(((slopes - slopes.mean(0)) ** 2).sum()) / workers
    assert (said["workers"], said["samples"]) == (workers, 16 // workers)
    assert [point.step for point in estimates.points] == [0, 4, 7]
    for point in estimates.points:
        for estimated, expected in ((point.noise, noise), (point.heterogeneity, spread)):
            assert abs(estimated.value - expected) < 4 * estimated.error
            assert estimated.error < 0.2 * expected
        assert point.curvature == pytest.approx(2.0, rel=0.02)  # neighbours: 1.985, 1.97, ...
        assert 0 < point.along_step <= 2.0 + 1e-3
    assert said["gap"]["value"] > 0
    points = [asdict(point) for point in estimates.points]
    assert everywhere((said, points)) == [(said, points)] * workers


def check_undisturbed(world: World, strategy: str) -> None:
    """A training with estimates learns the same, to the last bit."""
    from realrun.train.loop import train  # noqa: PLC0415 - as above

    small: dict[str, Any] = {"size": "tiny", "context": 16, "batch": 8, "log_every": 1}
    settings = TrainSettings(strategy=strategy, steps=9, warmup=2, eval_every=3, **small)
    plain, measured = (train(settings, world, estimate=on) for on in (False, True))
    rows = [
        [(row.step, row.train_loss, row.validation_loss) for row in history.rows]
        for history in (plain, measured)
    ]
    assert rows[0] == rows[1]
    assert plain.estimates is None
