"""A function to train whose curvature, noise and heterogeneity are known."""

import numpy as np
import torch
from torch import Tensor, nn

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
