"""The text task: the sources of Python's standard library, character by character.

They are always there, so nothing is downloaded. They depend on the version of Python: losses of
two versions do not compare, and the record of a run holds the version and a hash of the data.

The model is a small transformer: pre-norm blocks, a head tied to the embedding. A causal one learns
its positions. One that looks both ways turns queries and keys by their places: with learned
positions it finds no neighbours for hundreds of steps.
"""

import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from co2sim.common.errors import OptionError
from realrun.train.tasks.presets import VOCABULARY, GPTShape
from realrun.train.tasks.task import LEFT_OUT, Batch, Task, batches, fingerprint

_SPREAD = 0.02
"""Standard deviation of initial weights, as in GPT-2."""

_BASE = 100.0
"""Of the angles; 10,000 in the source, whose contexts are longer than these of 64 to 256."""


def turned(x: Tensor) -> Tensor:
    """Pairs of features of x [..., time, features], an even number, turned by angles of places.

    The product of two then depends on how far they are apart. Source: Su et al., RoFormer: Enhanced
    Transformer with Rotary Position Embedding, 2021, eq. 34.
    """
    time, features = x.shape[-2:]
    speeds = _BASE ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(time, device=x.device)[:, None] * speeds
    cosines, sines = angles.cos(), angles.sin()
    first, second = x[..., 0::2], x[..., 1::2]
    pair = (first * cosines - second * sines, first * sines + second * cosines)
    return torch.stack(pair, dim=-1).flatten(-2)


class Attention(nn.Module):
    """Self-attention: [batch, time, hidden] to the same."""

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.taken = nn.Linear(hidden, 3 * hidden, bias=False)
        self.given = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Every place looks at itself and at those before it; if not causal, at all."""
        batch, time, hidden = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.taken(x).split(hidden, dim=2)
        )
        if not self.causal:
            query, key = turned(query), turned(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.given(mixed.transpose(1, 2).reshape(batch, time, hidden))
        return out


class Layer(nn.Module):
    """Attention and an MLP of four times the width, each with a norm before it and a residual."""

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, causal=causal)
        self.wide = nn.Linear(hidden, 4 * hidden, bias=False)
        self.narrow = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, hidden] to the same."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Characters [batch, time] to logits [batch, time, vocabulary]; time is at most `context`.

    Not `causal`, it looks both ways, as BERT does.
    Weights come from torch's global generator. Source of the shape and the initial weights:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2): N(0, 0.02),
    and the matrices that write to the shortcut scaled by 1 / sqrt(2 layers).
    """

    def __init__(
        self, shape: GPTShape, *, causal: bool = True, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.context, shape.hidden) if causal else None
        self.layers = nn.ModuleList(
            Layer(shape.hidden, shape.heads, causal=causal) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.hidden)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                written = name.endswith(("given.weight", "narrow.weight"))
                shrink = (2 * shape.layers) ** -0.5 if written else 1.0
                nn.init.normal_(weight, std=_SPREAD * shrink)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the character that follows each; if not causal, of the one that is there."""
        x = self.embedding(characters)
        if self.positions:
            x = x + self.positions(torch.arange(characters.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embedding.weight)


CHARACTERS = "".join(map(chr, range(32, 127))) + "\n\t"
"""Printable ASCII, newline and tab; their place is their number."""

UNKNOWN = len(CHARACTERS)
"""The number of all other characters."""

_HELD_OUT = 10
"""Every tenth file is for validation."""

_VALIDATED = 32_768
"""Characters that a validation predicts, at most."""

_ASCII = 128


@dataclass(frozen=True, slots=True)
class Corpus:
    """Characters by their numbers (uint8), the files that they are from, and a hash of it all."""

    train: np.ndarray
    validation: np.ndarray
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    sha256: str


def corpus(folder: Path | None = None) -> Corpus:
    """The modules at the top of the standard library, by name; whole files are held out.

    Leaves out `_sysconfigdata*.py`, which is about the machine. Raises OptionError when there are
    no sources.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.glob("*.py") if not p.name.startswith("_sysconfigdata"))
    if len(files) < _HELD_OUT:
        raise OptionError(
            f"task text needs the sources of the standard library, and {folder} has {len(files)}"
            " Python files"
        )
    held_out = files[_HELD_OUT - 1 :: _HELD_OUT]
    kept = [path for path in files if path not in held_out]
    train, validation = (
        np.concatenate([_read(path) for path in paths]) for paths in (kept, held_out)
    )
    return Corpus(
        train,
        validation,
        tuple(path.name for path in kept),
        tuple(path.name for path in held_out),
        fingerprint(train.tobytes(), validation.tobytes()),
    )


_standard_library = cache(corpus)
"""Read once, however often this process trains."""


def _read(path: Path) -> np.ndarray:
    return encode(path.read_text(encoding="utf-8", errors="replace"))


def encode(text: str) -> np.ndarray:
    """The number of every character, as uint8."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    table = np.full(_ASCII + 1, UNKNOWN, dtype=np.uint8)
    for code, character in enumerate(CHARACTERS):
        table[ord(character)] = code
    codes: np.ndarray = table[np.minimum(points, _ASCII)]
    return codes


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of `length` characters: any of those to train on, and fixed ones to validate.

    Of each `context` characters are predicted.
    """

    context: int
    length: int
    train: np.ndarray
    held: np.ndarray
    starts: np.ndarray
    facts: dict[str, str]

    def drawn(self, numbers: np.ndarray) -> np.ndarray:
        """Those that begin at these places: int64 [samples, length]."""
        return _cut(self.train, numbers, self.length)

    def held_out(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places and the windows of some of the fixed ones."""
        places = self.starts[numbers]
        return places, _cut(self.held, places, self.length)


def windows(context: int, more: int = 0) -> Windows:
    """Windows of `context` characters that are predicted, and of `more` beside them.

    Raises OptionError when there are too few characters.
    """
    data = _standard_library()
    train, held, length = data.train, data.validation, context + more
    count = min(_VALIDATED, len(held) - more) // context
    if count < 1 or len(train) < length:
        raise OptionError(f"context is {context}; there are {len(held)} characters to predict")
    facts = {
        "data": "sources of the standard library",
        "python": platform.python_version(),
        "train": f"{len(train)} characters of {len(data.train_files)} files",
        "validation": f"{count * context} of {len(held)} characters of"
        f" {len(data.validation_files)} files",
        "sha256": data.sha256,
    }
    starts = np.linspace(0, len(held) - length, count).astype(np.int64)
    return Windows(context, length, train, held, starts, facts)


def _cut(characters: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    cut: np.ndarray = characters[starts[:, None] + np.arange(length)].astype(np.int64)
    return cut


def text(shape: GPTShape, device: torch.device) -> Task:
    """Predict the next character from up to `context` before it."""
    assert len(CHARACTERS) + 1 == VOCABULARY
    data = windows(shape.context, more=1)

    def shifted(characters: np.ndarray) -> Batch:
        on_device = torch.from_numpy(characters).to(device)
        return Batch(on_device[:, :-1], on_device[:, 1:])

    return _task(
        "text",
        "cross-entropy, nats per token",
        data,
        lambda numbers: shifted(data.drawn(numbers)),
        lambda numbers: shifted(data.held_out(numbers)[1]),
        lambda: GPT(shape),
    )


def _task(
    name: str,
    loss: str,
    data: Windows,
    draw: Callable[[np.ndarray], Batch],
    held_out: Callable[[np.ndarray], Batch],
    model: Callable[[], nn.Module],
) -> Task:
    return Task(
        name=name,
        loss=loss,
        unit="token",
        units=data.context,
        choices=len(data.train) - data.length + 1,
        draw=draw,
        validation=batches(len(data.starts), held_out),
        model=model,
        facts=data.facts,
    )


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
    count = max(1, round(SHARE * context))
    for row, index in enumerate(numbers):
        drawn = np.random.default_rng((_SEED, int(index)))
        places = drawn.choice(context, size=count, replace=False)
        how, others = drawn.random(count), drawn.integers(VOCABULARY, size=count)
        targets[row, places] = there = characters[row, places]
        seen = np.where(how < _REPLACED, others, there)
        inputs[row, places] = np.where(how < _HIDDEN, MASK, seen)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def masked_text(shape: GPTShape, device: torch.device) -> Task:
    """Name hidden characters in windows of `context`."""
    data = windows(shape.context)

    def on_device(numbers: np.ndarray, characters: np.ndarray) -> Batch:
        hidden = hide(numbers, characters)
        return Batch(hidden.inputs.to(device), hidden.targets.to(device))

    return _task(
        "masked_text",
        "cross-entropy, nats per hidden token",
        data,
        lambda numbers: on_device(numbers, data.drawn(numbers)),
        lambda numbers: on_device(*data.held_out(numbers)),
        lambda: GPT(shape, causal=False, vocabulary=VOCABULARY + 1),
    )
