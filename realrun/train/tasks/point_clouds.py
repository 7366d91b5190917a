"""The task of point clouds: reconstruct points on parametric surfaces from noisy ones."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from realrun.train.tasks.presets import POINT_WIDTHS
from realrun.train.tasks.task import VALIDATION_BATCH, Batch, Task, batches, fingerprint

POINTS = 128
"""Of a cloud."""

NOISE = 0.03
"""Standard deviation of what is added to each coordinate that the model reads."""

_CHOICES = 10**6
_VALIDATED = 2 * VALIDATION_BATCH
_SEEDS = (3, 4)
"""Of clouds to train on, and to validate."""

_Surface = Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, ...]]


def _ellipsoid(u: np.ndarray, v: np.ndarray, form: float) -> tuple[np.ndarray, ...]:
    around, height = 2 * np.pi * u, 2 * v - 1
    wide = np.sqrt(1 - height**2)
    return wide * np.cos(around), wide * np.sin(around), form * height


def _torus(u: np.ndarray, v: np.ndarray, form: float) -> tuple[np.ndarray, ...]:
    around, tube = 2 * np.pi * u, 2 * np.pi * v
    wide = 1 + form / 2 * np.cos(tube)
    return wide * np.cos(around), wide * np.sin(around), form / 2 * np.sin(tube)


def _cylinder(u: np.ndarray, v: np.ndarray, form: float) -> tuple[np.ndarray, ...]:
    around = 2 * np.pi * u
    return form * np.cos(around), form * np.sin(around), 2 * v - 1


def _cone(u: np.ndarray, v: np.ndarray, form: float) -> tuple[np.ndarray, ...]:
    around, along = 2 * np.pi * u, np.sqrt(v)
    return form * along * np.cos(around), form * along * np.sin(around), 1.5 * along - 1


def _saddle(u: np.ndarray, v: np.ndarray, form: float) -> tuple[np.ndarray, ...]:
    x, y = 2 * u - 1, 2 * v - 1
    return x, y, form * (x**2 - y**2)


def _helicoid(u: np.ndarray, v: np.ndarray, form: float) -> tuple[np.ndarray, ...]:
    along, turn = 2 * u - 1, 2 * np.pi * v
    return along * np.cos(turn), along * np.sin(turn), form * (2 * v - 1)


SURFACES: Mapping[str, _Surface] = {
    "ellipsoid": _ellipsoid,
    "torus": _torus,
    "cylinder": _cylinder,
    "cone": _cone,
    "saddle": _saddle,
    "helicoid": _helicoid,
}
"""Points at parameters u and v from 0 to 1, of a surface whose form is 0.4 to 1."""


def cloud(seed: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Noisy and exact points, fp32 [points, 3], of a surface turned anyhow, in the unit ball."""
    drawn = np.random.default_rng(seed)
    surface = tuple(SURFACES.values())[drawn.integers(len(SURFACES))]
    form, (u, v) = drawn.uniform(0.4, 1.0), drawn.random((2, POINTS))
    exact = np.stack(surface(u, v, form), axis=1)
    exact -= exact.mean(0)
    exact /= np.linalg.norm(exact, axis=1).max()
    turned, signs = np.linalg.qr(drawn.normal(size=(3, 3)))
    exact = exact @ (turned * np.sign(np.diag(signs)))
    noisy = exact + drawn.normal(scale=NOISE, size=exact.shape)
    return noisy.astype(np.float32), exact.astype(np.float32)


class PointAutoencoder(nn.Module):
    """Clouds [batch, points, 3] to clouds of as many, by way of a vector.

    Each point by itself, the largest of each feature, then all points at once. Source of the
    encoder: Qi et al., PointNet, 2017, without its transforms.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        small, two, four = width, 2 * width, 4 * width
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(3, small), nn.ReLU(), nn.Linear(small, two), nn.ReLU()),
                nn.Linear(two, four),
                nn.Sequential(nn.LayerNorm(four), nn.Linear(four, two), nn.ReLU()),
                nn.Sequential(nn.Linear(two, four), nn.ReLU()),
            ]
        )
        self.head = nn.Linear(four, 3 * POINTS)

    def forward(self, clouds: Tensor) -> Tensor:
        """The reconstructed points, in any order."""
        points, features, narrow, wide = self.layers
        whole = features(points(clouds)).amax(1)
        out: Tensor = self.head(wide(narrow(whole)))
        return out.view(-1, POINTS, 3)


def points(size: str, device: torch.device) -> Task:
    """Reconstruct clouds; validation has other ones."""

    def batch(numbers: np.ndarray, seed: int = _SEEDS[0]) -> Batch:
        made = [cloud((seed, int(index))) for index in numbers]
        noisy, exact = (torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
        return Batch(noisy.to(device), exact.to(device))

    described = repr((POINTS, NOISE, _CHOICES, _SEEDS, tuple(SURFACES)))
    return Task(
        name="points",
        loss="Chamfer distance, squares of the largest radius",
        unit="cloud",
        units=1,
        choices=_CHOICES,
        draw=batch,
        validation=batches(_VALIDATED, partial(batch, seed=_SEEDS[1])),
        model=lambda: PointAutoencoder(POINT_WIDTHS[size]),
        facts={
            "data": f"{POINTS} points on each of {len(SURFACES)} kinds of surfaces",
            "train": f"{_CHOICES} clouds",
            "validation": f"{_VALIDATED} clouds",
            "sha256": fingerprint(described.encode()),
        },
    )
