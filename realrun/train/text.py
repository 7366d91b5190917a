"""The text task: the sources of Python's standard library, character by character.

They are always there, so nothing is downloaded. They depend on the version of Python: losses of
two versions do not compare, and the record of a run holds the version and a hash of the data.
"""

import platform
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from co2sim.errors import OptionError
from realrun.train.gpt import GPT
from realrun.train.shapes import VOCABULARY, GPTShape
from realrun.train.task import VALIDATION_BATCH, Batch, Task, fingerprint

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
    for number, character in enumerate(CHARACTERS):
        table[ord(character)] = number
    found: np.ndarray = table[np.minimum(points, _ASCII)]
    return found


def decode(numbers: np.ndarray) -> str:
    """The text of these numbers, with U+FFFD for what is unknown."""
    return "".join((CHARACTERS + "\N{REPLACEMENT CHARACTER}")[number] for number in numbers)


def text(shape: GPTShape, device: torch.device) -> Task:
    """Predict the next character from up to `context` before it."""
    assert len(CHARACTERS) + 1 == VOCABULARY
    data = _standard_library()
    train, held = (torch.from_numpy(part) for part in (data.train, data.validation))
    window = torch.arange(shape.context + 1)

    def cut(characters: torch.Tensor, starts: np.ndarray) -> Batch:
        places = torch.from_numpy(starts)[:, None] + window
        windows = characters[places].long().to(device)
        return Batch(windows[:, :-1], windows[:, 1:])

    count = min(_VALIDATED, len(held) - 1) // shape.context
    if count < 1 or len(train) <= shape.context:
        raise OptionError(
            f"context is {shape.context}; there are {len(held)} characters to predict"
        )
    starts = np.linspace(0, len(held) - shape.context - 1, count).astype(np.int64)
    return Task(
        name="text",
        unit="token",
        units=shape.context,
        choices=len(train) - shape.context,
        draw=lambda numbers: cut(train, numbers),
        validation=tuple(
            cut(held, starts[at : at + VALIDATION_BATCH])
            for at in range(0, count, VALIDATION_BATCH)
        ),
        model=lambda: GPT(shape),
        facts={
            "data": "sources of the standard library",
            "python": platform.python_version(),
            "train": f"{len(train)} characters of {len(data.train_files)} files",
            "validation": f"{count * shape.context} of {len(held)} characters of"
            f" {len(data.validation_files)} files",
            "sha256": data.sha256,
        },
    )
