"""What is learned: samples to draw, a fixed share held out for validation, and a model for it."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VALIDATION_BATCH = 64
"""Samples that are evaluated at once."""


LEFT_OUT = -100
"""Instead of a class: nothing is asked at this place."""


class Batch(NamedTuple):
    """Samples: what the model reads, and what it should give.

    That is a class at every place (whole numbers, or LEFT_OUT), or points (real numbers).
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Task:
    """Data and a model. A sample counts `units` tokens, images or clouds.

    `loss` says what the loss is, and its unit.
    `draw` gives the samples of these numbers, each from 0 to `choices` - 1; `validation` is always
    the same. `facts` say, for the record, what the data is.
    """

    name: str
    loss: str
    unit: str
    units: int
    choices: int
    draw: Callable[[np.ndarray], Batch]
    validation: tuple[Batch, ...]
    model: Callable[[], nn.Module]
    facts: Mapping[str, str]

    def batch(self, seed: int, step: int, samples: int, part: int = 0, parts: int = 1) -> Batch:
        """One of `parts` equal shares of the `samples` that all ranks see in this step.

        Depends on nothing else: any number of ranks sees the same samples, and so does a run that
        was resumed.
        """
        numbers = np.random.default_rng((seed, step)).integers(self.choices, size=samples)
        share = samples // parts
        return self.draw(numbers[part * share : (part + 1) * share])


def batches(count: int, draw: Callable[[np.ndarray], Batch]) -> tuple[Batch, ...]:
    """The samples of numbers 0 to `count` - 1, to be evaluated batch by batch."""
    starts = range(0, count, VALIDATION_BATCH)
    return tuple(draw(np.arange(first, min(first + VALIDATION_BATCH, count))) for first in starts)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, in nats for each place; of points their Chamfer distance."""
    outputs = model(batch.inputs)
    if batch.targets.is_floating_point():
        return chamfer(outputs, batch.targets).mean()
    return functional.cross_entropy(outputs.flatten(0, -2), batch.targets.flatten())


def scores(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the loss, places named rightly (NaN for points), and places: three float64."""
    outputs = model(batch.inputs)
    if batch.targets.is_floating_point():
        apart = chamfer(outputs, batch.targets).double()
        return torch.stack([apart.sum(), apart.new_tensor(torch.nan), apart.new_tensor(len(apart))])
    logits, targets = outputs.flatten(0, -2), batch.targets.flatten()
    loss = functional.cross_entropy(logits, targets, reduction="none").double().sum()
    right = (logits.argmax(1) == targets).sum().double()
    return torch.stack([loss, right, (targets != LEFT_OUT).sum().double()])


def means(total: Tensor) -> tuple[float, float | None]:
    """The mean loss and the accuracy of a sum of `scores`; points have no accuracy."""
    loss, right, count = total.tolist()
    return loss / count, None if math.isnan(right) else right / count


def chamfer(cloud: Tensor, other: Tensor) -> Tensor:
    """How far clouds [batch, points, 3] are from each other: [batch].

    The squared distance to the nearest point of the other, mean over the points, both ways.
    Source: Fan, Su and Guibas, A Point Set Generation Network, 2017, equation 1, with means.
    """
    apart = (cloud[:, :, None] - other[:, None]).square().sum(3)
    return apart.amin(2).mean(1) + apart.amin(1).mean(1)


def fingerprint(*parts: bytes) -> str:
    """SHA-256 of data, to compare runs by."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
