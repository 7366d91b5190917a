"""The task of masked text: name the characters that are hidden, from those on both sides.

The text is that of task text. Source of the task and of its shares: Devlin et al., BERT, 2019.
"""

import numpy as np
import torch

from realrun.train.gpt import GPT
from realrun.train.shapes import VOCABULARY, GPTShape
from realrun.train.task import LEFT_OUT, Batch, Task
from realrun.train.text import windows

MASK = VOCABULARY
"""The number of a hidden character."""

SHARE = 0.15
"""Of the characters, those that are asked for."""

_HIDDEN, _REPLACED = 0.8, 0.9
"""Of those, 8 in 10 are hidden, one is replaced by any, and one stays."""

_SEED = 15


def hide(numbers: np.ndarray, characters: np.ndarray) -> Batch:
    """Ask for some of the characters, int64 [samples, context]; `numbers` say which, by sample.

    As many in each sample: the mean over any number of ranks is then the mean over all.
    """
    inputs, targets = characters.copy(), np.full_like(characters, LEFT_OUT)
    context = characters.shape[1]
    asked = max(1, round(SHARE * context))
    for row, number in enumerate(numbers):
        drawn = np.random.default_rng((_SEED, int(number)))
        places = drawn.choice(context, size=asked, replace=False)
        how, others = drawn.random(asked), drawn.integers(VOCABULARY, size=asked)
        targets[row, places] = there = characters[row, places]
        seen = np.where(how < _REPLACED, others, there)
        inputs[row, places] = np.where(how < _HIDDEN, MASK, seen)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def masked_text(shape: GPTShape, device: torch.device) -> Task:
    """Name hidden characters in windows of `context`."""
    found = windows(shape.context)

    def on_device(numbers: np.ndarray, characters: np.ndarray) -> Batch:
        hidden = hide(numbers, characters)
        return Batch(hidden.inputs.to(device), hidden.targets.to(device))

    return Task(
        name="masked_text",
        loss="cross-entropy, nats per hidden token",
        unit="token",
        units=shape.context,
        choices=found.choices,
        draw=lambda numbers: on_device(numbers, found.drawn(numbers)),
        validation=tuple(on_device(*one) for one in found.validation()),
        model=lambda: GPT(shape, causal=False, vocabulary=VOCABULARY + 1),
        facts=found.facts,
    )
