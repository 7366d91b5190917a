"""The tasks of images: scikit-learn's 1,797 digits, and digits on a canvas, pixel by pixel."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from realrun.train.tasks.presets import CONVNETS
from realrun.train.tasks.task import VALIDATION_BATCH, Batch, Task, batches, fingerprint

_HELD_OUT = 5
"""Every fifth image is for validation."""

_CLASSES = 10
_GROUPS = 4


class ConvNet(nn.Module):
    """Images [batch, 1, 8, 8] to logits [batch, 1, 10].

    GroupNorm, not BatchNorm: the statistics that BatchNorm gathers are no parameters. Averages of
    local updates would leave them out, and it would depend on the number of ranks what a batch is.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = (1, channels, 2 * channels, 4 * channels)
        self.layers = nn.Sequential(
            *(
                _convolution(inputs, outputs, stride)
                for inputs, outputs, stride in zip(widths, widths[1:], (1, 2, 2), strict=False)
            )
        )
        self.head = nn.Linear(widths[-1], _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 1, 10]: with an axis of length 1, as the loss of texts expects."""
        out: Tensor = self.head(self.layers(images).mean((2, 3)))[:, None]
        return out


class Images(NamedTuple):
    """Images [count, 8, 8] from 0 to 1 and their labels [count], as they are split."""

    train: np.ndarray
    train_labels: np.ndarray
    held: np.ndarray
    held_labels: np.ndarray
    facts: Mapping[str, str]


def split_images() -> Images:
    """Every fifth image is held out."""
    import sklearn  # noqa: PLC0415
    from sklearn.datasets import load_digits  # noqa: PLC0415

    loaded = load_digits()
    images, labels = loaded.images.astype(np.float32) / 16.0, loaded.target  # 0 to 16 shades
    held = np.arange(len(images)) % _HELD_OUT == _HELD_OUT - 1
    facts = {
        "data": "scikit-learn's digits",
        "scikit-learn": sklearn.__version__,
        "sha256": fingerprint(loaded.images.tobytes(), loaded.target.tobytes()),
    }
    return Images(images[~held], labels[~held], images[held], labels[held], facts)


def digits(size: str, device: torch.device) -> Task:
    """Classify digits. `settings.check` has checked that scikit-learn, an extra, is installed."""
    data = split_images()

    def on_device(images: np.ndarray, labels: np.ndarray) -> Batch:
        inputs, targets = torch.from_numpy(images)[:, None], torch.from_numpy(labels).long()
        return Batch(inputs.to(device), targets[:, None].to(device))

    def drawn(samples: Batch, numbers: np.ndarray) -> Batch:
        places = torch.from_numpy(numbers).to(device)
        return Batch(samples.inputs[places], samples.targets[places])

    train = on_device(data.train, data.train_labels)
    seen = on_device(data.held, data.held_labels)
    return Task(
        name="digits",
        loss="cross-entropy, nats per image",
        unit="image",
        units=1,
        choices=len(train.inputs),
        draw=partial(drawn, train),
        validation=batches(len(seen.inputs), partial(drawn, seen)),
        model=lambda: ConvNet(CONVNETS[size]),
        facts={
            **data.facts,
            "train": f"{len(train.inputs)} images",
            "validation": f"{len(seen.inputs)} images",
        },
    )


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
_SEEDS = (8, 9)
"""Of canvases to train on, and to validate."""


def canvas(images: np.ndarray, labels: np.ndarray, seed: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Shades, fp32 [20, 20], and classes, int64 [20, 20], of a canvas with some of the digits."""
    drawn = np.random.default_rng(seed)
    shades, classes = np.zeros((SIDE, SIDE), np.float32), np.zeros((SIDE, SIDE), np.int64)
    for cell in drawn.permutation(_CELLS**2)[: drawn.integers(_FEWEST, _MAX + 1)]:
        image, (down, right) = (
            drawn.integers(len(images)),
            drawn.integers(_CELL - _PIXELS + 1, size=2),
        )
        top, left = cell // _CELLS * _CELL + down, cell % _CELLS * _CELL + right
        there = slice(top, top + _PIXELS), slice(left, left + _PIXELS)
        shades[there] = images[image]
        classes[there] = np.where(images[image] >= _INK, labels[image] + 1, 0)
    return shades + drawn.uniform(0, _NOISE, shades.shape).astype(np.float32), classes


class Segmenter(nn.Module):
    """Canvases [batch, 1, 20, 20] to logits [batch, 20, 20, 11]: a small U-Net.

    Source of the shape: Ronneberger, Fischer and Brox, U-Net, 2015. Norms are those of groups: see
    `digits.ConvNet`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        small, two, four = channels, 2 * channels, 4 * channels
        sizes = ((1, small), (small, two), (two, four), (four + two, two), (two + small, small))
        self.layers = nn.ModuleList(
            nn.Sequential(*_convolution(inputs, outputs), *_convolution(outputs, outputs))
            for inputs, outputs in sizes
        )
        self.head = nn.Conv2d(small, CLASSES, 1)

    def forward(self, canvases: Tensor) -> Tensor:
        """Two times down and up; what was seen before goes to the layer of the same size."""
        first, second, deep, up, last = self.layers
        fine = first(canvases)
        middle = second(functional.max_pool2d(fine, 2))
        coarse = deep(functional.max_pool2d(middle, 2))
        back = up(torch.cat([_doubled(coarse), middle], 1))
        out: Tensor = self.head(last(torch.cat([_doubled(back), fine], 1)))
        return out.permute(0, 2, 3, 1)


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(_GROUPS, outputs),
        nn.ReLU(),
    )


def _doubled(values: Tensor) -> Tensor:
    return values.repeat_interleave(2, 2).repeat_interleave(2, 3)


def segmentation(size: str, device: torch.device) -> Task:
    """Name the class of every pixel; validation has digits that are not in training."""
    data = split_images()
    return Task(
        name="segmentation",
        loss="cross-entropy, nats per pixel",
        unit="image",
        units=1,
        choices=_CHOICES,
        draw=lambda numbers: _batch(data, numbers, device),
        validation=batches(_VALIDATED, lambda numbers: _batch(data, numbers, device, held=True)),
        model=lambda: Segmenter(CONVNETS[size]),
        facts={
            **data.facts,
            "data": f"{data.facts['data']} on canvases of {SIDE} x {SIDE} pixels",
            "train": f"{_CHOICES} canvases of {len(data.train)} digits",
            "validation": f"{_VALIDATED} canvases of {len(data.held)} digits",
            "sha256": fingerprint(data.facts["sha256"].encode(), _DESCRIBED.encode()),
        },
    )


_DESCRIBED = repr((SIDE, _CELLS, _CELL, _FEWEST, _MAX, _INK, _NOISE, _CHOICES, _SEEDS))


def _batch(data: Images, numbers: np.ndarray, device: torch.device, *, held: bool = False) -> Batch:
    images, labels = (data.held, data.held_labels) if held else (data.train, data.train_labels)
    made = [canvas(images, labels, (_SEEDS[held], int(index))) for index in numbers]
    shades, classes = (torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
    return Batch(shades[:, None].to(device), classes.to(device))
