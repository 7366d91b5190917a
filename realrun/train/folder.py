"""Names of the files in a training's folder, and which training it is of. Needs no torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path
from typing import Any

from co2sim.errors import OptionError
from co2sim.files import is_folder, is_regular
from realrun.errors import CheckpointError, DamagedError

LOG = "log.csv"
RECORD = "train.json"
FIGURE = "loss.png"
MODEL = "model.pt"
ESTIMATE = "estimate.json"
CHECKPOINTS = "checkpoints"

IDENTITY = "identity.json"
"""In a checkpoint: what the training is that it is of."""

_NAME = re.compile(r"step-([0-9]+)")

_SHOWN = 8
"""Steps of checkpoints in an error, at most."""


def check_new(folder: Path) -> None:
    """Refuse to write a second training over a first one, or over what is left of it."""
    check_place(folder)
    if checkpoints(folder) or any((folder / name).exists() for name in (LOG, RECORD, MODEL)):
        raise OptionError(
            f"{folder} holds a training run already: go on with --resume, or choose another --out"
        )


def check_place(folder: Path) -> None:
    """Refuse a folder in which no checkpoint can be written, or none of the other files."""
    for name in (LOG, RECORD, FIGURE, MODEL, ESTIMATE):
        file = folder / name
        if file.exists() and not is_regular(file):
            raise OptionError(f"{file} is not a regular file: remove it, or choose another --out")
    place = folder / CHECKPOINTS
    if lexists(place) and not is_folder(place):
        raise OptionError(f"{place} is not a folder: remove it, or choose another --out")


def checkpoint_name(step: int) -> str:
    """The name of a complete checkpoint."""
    return f"step-{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints of a training, the last one last."""
    found = (folder / CHECKPOINTS).glob("step-*")
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


@dataclass(frozen=True, slots=True)
class Resume:
    """What to go on from: the checkpoint after `step`, or the last one (None).

    With `trust` it may be of the old format, whose reading can run code that is in it.
    """

    step: int | None = None
    trust: bool = False

    def checkpoint(self, folder: Path) -> Path | None:
        """The checkpoint, if there is any.

        Raises OptionError when there is none of that step, or none of a training that has ended.
        """
        check_place(folder)
        found = checkpoints(folder)
        if self.step is None and found:
            return found[-1]
        if self.step is None:
            ended = next((one for one in (RECORD, MODEL) if (folder / one).exists()), None)
            if ended:
                raise OptionError(
                    f"{folder} holds a training that has ended ({ended}), and no checkpoint to go"
                    " on from: choose another --out"
                )
            return None
        for path in found:
            if step_of(path) == self.step:
                return path
        steps = ", ".join(str(step_of(path)) for path in found[-_SHOWN:])
        there = f"those in {folder} are of steps {steps}" if found else f"{folder} holds none"
        raise OptionError(f"--from-step is {self.step}, and there is no such checkpoint: {there}")


def identity_text(identity: Mapping[str, Any], ranks: int) -> str:
    """What a checkpoint says of the training that it is of."""
    return json.dumps({**identity, "ranks": ranks}, indent=2) + "\n"


def check_identity(text: bytes, identity: Mapping[str, Any], ranks: int) -> None:
    """Raise CheckpointError unless all that is given here is so in the text of a checkpoint."""
    try:
        seen = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{IDENTITY}: it is no JSON") from error
    if not isinstance(seen, dict):
        raise DamagedError(f"{IDENTITY}: it is no JSON object")
    for name, mine in json.loads(identity_text(identity, ranks)).items():
        if seen.get(name) != mine:
            raise CheckpointError(
                f"it is of another training: its {name} is {shown(repr(seen.get(name)), 60)}, not"
                f" {shown(repr(mine), 60)}"
            )


def shown(what: object, most: int = 80) -> str:
    """A text for an error: on one line, nothing that a terminal would obey, its end if long."""
    text = "".join(
        one if one.isprintable() else ascii(one)[1:-1] for one in " ".join(str(what).split())
    )
    return text if len(text) <= most else f"...{text[3 - most :]}"
