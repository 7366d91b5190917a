"""What is learned: samples to draw, a fixed share held out for validation, and a model for it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VALIDATION_BATCH = 64
"""Samples that are evaluated at once."""


class Batch(NamedTuple):
    """Samples: what the model reads, and the class that it should name at every place."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Task:
    """Data and a model. A sample counts `units` tokens or images.

    `draw` gives the samples of these numbers, each from 0 to `choices` - 1; `validation` is always
    the same. `facts` say, for the record, what the data is.
    """

    name: str
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


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy: nats for each place."""
    return functional.cross_entropy(model(batch.inputs).flatten(0, -2), batch.targets.flatten())


def scores(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the cross-entropy, places named rightly, and places: three float64."""
    logits, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
    loss = functional.cross_entropy(logits, targets, reduction="none").double().sum()
    right = (logits.argmax(1) == targets).sum().double()
    return torch.stack([loss, right, right.new_tensor(len(targets))])


def fingerprint(*parts: bytes) -> str:
    """SHA-256 of data, to compare runs by."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()
