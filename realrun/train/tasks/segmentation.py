"""The segmentation task: digits on a larger canvas; the class of every pixel."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from realrun.train.tasks.digits import Images, split_images
from realrun.train.tasks.presets import CONVNETS
from realrun.train.tasks.task import VALIDATION_BATCH, Batch, Task, fingerprint

SIDE = 20
"""Pixels of a canvas, in both directions."""

CLASSES = 11
"""The background is 0, digit d is d + 1."""

_CELLS, _CELL, _PIXELS = 2, 10, 8
"""A canvas has 2 x 2 cells of 10 x 10 pixels; a digit of 8 x 8 lies anywhere in its own."""

_FEWEST, _MAX = 2, 4
"""Digits on a canvas."""

_INK = 0.25
"""From this shade on a pixel belongs to the digit."""

_NOISE = 0.2
"""The largest shade of the noise, which is added."""

_CHOICES = 10**6
_VALIDATED = 2 * VALIDATION_BATCH
_GROUPS = 4
_SEEDS = (8, 9)
"""Of canvases to train on, and to validate."""


def canvas(images: np.ndarray, labels: np.ndarray, seed: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Shades, fp32 [20, 20], and classes, int64 [20, 20], of a canvas with some of the digits."""
    drawn = np.random.default_rng(seed)
    shades, classes = np.zeros((SIDE, SIDE), np.float32), np.zeros((SIDE, SIDE), np.int64)
    for cell in drawn.permutation(_CELLS**2)[: drawn.integers(_FEWEST, _MAX + 1)]:
        one, (down, right) = (
            drawn.integers(len(images)),
            drawn.integers(_CELL - _PIXELS + 1, size=2),
        )
        top, left = cell // _CELLS * _CELL + down, cell % _CELLS * _CELL + right
        there = slice(top, top + _PIXELS), slice(left, left + _PIXELS)
        shades[there] = images[one]
        classes[there] = np.where(images[one] >= _INK, labels[one] + 1, 0)
    return shades + drawn.uniform(0, _NOISE, shades.shape).astype(np.float32), classes


class Segmenter(nn.Module):
    """Canvases [batch, 1, 20, 20] to logits [batch, 20, 20, 11]: a small U-Net.

    Source of the shape: Ronneberger, Fischer and Brox, U-Net, 2015. Norms are those of groups: see
    `digits.ConvNet`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        one, two, four = channels, 2 * channels, 4 * channels
        sizes = ((1, one), (one, two), (two, four), (four + two, two), (two + one, one))
        self.layers = nn.ModuleList(_block(inputs, outputs) for inputs, outputs in sizes)
        self.head = nn.Conv2d(one, CLASSES, 1)

    def forward(self, canvases: Tensor) -> Tensor:
        """Two times down and up; what was seen before goes to the layer of the same size."""
        first, second, deep, up, last = self.layers
        fine = first(canvases)
        middle = second(functional.max_pool2d(fine, 2))
        coarse = deep(functional.max_pool2d(middle, 2))
        back = up(torch.cat([_doubled(coarse), middle], 1))
        out: Tensor = self.head(last(torch.cat([_doubled(back), fine], 1)))
        return out.permute(0, 2, 3, 1)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(_GROUPS, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(_GROUPS, outputs),
        nn.ReLU(),
    )


def _doubled(values: Tensor) -> Tensor:
    return values.repeat_interleave(2, 2).repeat_interleave(2, 3)


def segmentation(size: str, device: torch.device) -> Task:
    """Name the class of every pixel; validation has digits that are not in training."""
    found = split_images()
    last = range(0, _VALIDATED, VALIDATION_BATCH)
    return Task(
        name="segmentation",
        loss="cross-entropy, nats per pixel",
        unit="image",
        units=1,
        choices=_CHOICES,
        draw=lambda numbers: _batch(found, numbers, device),
        validation=tuple(
            _batch(found, np.arange(at, at + VALIDATION_BATCH), device, held=True) for at in last
        ),
        model=lambda: Segmenter(CONVNETS[size]),
        facts={
            **found.facts,
            "data": f"{found.facts['data']} on canvases of {SIDE} x {SIDE} pixels",
            "train": f"{_CHOICES} canvases of {len(found.train)} digits",
            "validation": f"{_VALIDATED} canvases of {len(found.held)} digits",
            "sha256": fingerprint(found.facts["sha256"].encode(), _DESCRIBED.encode()),
        },
    )


_DESCRIBED = repr((SIDE, _CELLS, _CELL, _FEWEST, _MAX, _INK, _NOISE, _CHOICES, _SEEDS))


def _batch(
    found: Images, numbers: np.ndarray, device: torch.device, *, held: bool = False
) -> Batch:
    images, labels = (found.held, found.held_labels) if held else (found.train, found.train_labels)
    made = [canvas(images, labels, (_SEEDS[held], int(number))) for number in numbers]
    shades, classes = (torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
    return Batch(shades[:, None].to(device), classes.to(device))
