"""A training's folder: names of its files, and whether a checkpoint is whole. Needs no torch."""

import fcntl
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from os.path import lexists
from pathlib import Path
from typing import Any

from co2sim.common.errors import OptionError
from co2sim.common.files import is_folder, is_regular, read_bytes
from co2sim.common.units import Seconds
from realrun.errors import CheckpointError, DamagedError

LOG = "log.csv"
RECORD = "train.json"
FIGURE = "loss.png"
MODEL = "model.pt"
ESTIMATE = "estimate.json"
CHECKPOINTS = "checkpoints"

STATE = "state.json"
"""In a checkpoint: which training it is of, checksums of all files, and what is no tensor."""

_HEAD = b'{"sha256": "'
"""How state.json begins; the checksum of all that comes after it follows."""

_MAX_STATE = 32_000_000
"""Bytes of state.json; a rank takes some 50 for each tensor. To parse it takes 25 times that."""

_NAME = re.compile(r"step-([0-9]+)")

_SHOWN = 8
"""Steps of checkpoints in an error, at most."""


def check_new(folder: Path) -> None:
    """Refuse to write a second training over a first one, or over what is left of it."""
    check_place(folder)
    if checkpoints(folder) or any((folder / name).exists() for name in (LOG, RECORD, MODEL)):
        raise OptionError(
            f"{folder} holds a training run already: continue with --resume, or give another --out"
        )


def check_place(folder: Path) -> None:
    """Refuse a folder in which no checkpoint can be written, or none of the other files."""
    for name in (LOG, RECORD, FIGURE, MODEL, ESTIMATE):
        file = folder / name
        if file.exists() and not is_regular(file):
            raise OptionError(f"{file} is not a regular file: remove it, or choose another --out")
    path = folder / CHECKPOINTS
    if lexists(path) and not is_folder(path):
        raise OptionError(f"{path} is not a folder: remove it, or choose another --out")


def checkpoint_name(step: int) -> str:
    """The name of a complete checkpoint."""
    return f"step-{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints of a training, the last one last."""
    paths = (folder / CHECKPOINTS).glob("step-*")
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


@dataclass(frozen=True, slots=True)
class Resume:
    """What to continue from: the checkpoint after `step`, or the last one (None)."""

    step: int | None = None

    def checkpoint(self, folder: Path) -> Path | None:
        """The checkpoint, if there is any.

        Raises OptionError when there is none of that step, or none of a training that has ended.
        """
        check_place(folder)
        saved = checkpoints(folder)
        if self.step is None and saved:
            return saved[-1]
        if self.step is None:
            ended = next((name for name in (RECORD, MODEL) if (folder / name).exists()), None)
            if ended:
                raise OptionError(
                    f"{folder} holds a training that has ended ({ended}), and no checkpoint to"
                    " continue from: choose another --out"
                )
            return None
        for path in saved:
            if step_of(path) == self.step:
                return path
        steps = ", ".join(str(step_of(path)) for path in saved[-_SHOWN:])
        there = f"those in {folder} are of steps {steps}" if saved else f"{folder} holds none"
        raise OptionError(f"--from-step is {self.step}, and there is no such checkpoint: {there}")


@dataclass(frozen=True, slots=True)
class Saved:
    """What state.json holds: which training it is of, checksums, and the state of each rank."""

    identity: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    states: list[Any]

    @staticmethod
    def of(checkpoint: Path) -> "Saved":
        """Read it. Raises DamagedError if it is not as it was written."""
        text = _read(checkpoint / STATE, _MAX_STATE)
        start, rest = text[: len(_HEAD) + 64], text[len(_HEAD) + 64 :]
        if start != _start(rest):
            raise DamagedError(f"{STATE}: it is not what was written")
        try:
            content = json.loads(text)
            made = Saved(content["identity"], content["files"], content["states"])
        except (ValueError, LookupError, RecursionError) as error:
            raise DamagedError(f"{STATE}: it is not that of a checkpoint") from error
        if [type(part) for part in (made.identity, made.files, made.states)] != [dict, dict, list]:
            raise DamagedError(f"{STATE}: it is not that of a checkpoint")
        return made

    def tensors(self, checkpoint: Path, rank: int) -> bytes:
        """The file of a rank's tensors. Raises DamagedError if it is not as it was written."""
        name = tensors_of(rank)
        try:
            size, digest = int(self.files[name]["bytes"]), self.files[name]["sha256"]
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise DamagedError(f"{STATE}: it knows no {name}") from error
        data = _read(checkpoint / name, size)
        if (len(data), sha256(data).hexdigest()) != (size, digest):
            raise DamagedError(f"{name}: its checksum is not that of {STATE}")
        return data

    def check(self, checkpoint: Path) -> None:
        """Compare the files of all ranks with their checksums."""
        for rank in range(len(self.states)):
            self.tensors(checkpoint, rank)


def tensors_of(rank: int) -> str:
    """The name of the file with a rank's tensors."""
    return f"rank{rank}.safetensors"


def state_text(content: Mapping[str, Any]) -> bytes:
    """The bytes of state.json. Raises CheckpointError for more than would be read."""
    rest = b'", ' + json.dumps(content, separators=(",", ":")).encode()[1:]
    text = _start(rest) + rest
    if len(text) > _MAX_STATE:
        raise CheckpointError(f"{STATE}: it would be larger than {_MAX_STATE // 10**6} MB")
    return text


def check_checkpoint(checkpoint: Path, identity: Mapping[str, Any], ranks: int) -> None:
    """Compare all files of a checkpoint with their checksums, and its training with this one.

    Raises CheckpointError, which names the file, and says which checkpoint before it is whole.
    """
    try:
        saved = Saved.of(checkpoint)
        check_identity(saved.identity, identity, ranks)
        saved.check(checkpoint)
    except CheckpointError as error:
        instead = f"; {offer(checkpoint)}" if isinstance(error, DamagedError) else ""
        raise type(error)(f"{unread(checkpoint)}: {error}{instead}") from error


def check_identity(seen: Mapping[str, Any], identity: Mapping[str, Any], ranks: int) -> None:
    """Raise CheckpointError unless all that is given here is so in a checkpoint."""
    for name, mine in json.loads(json.dumps({**identity, "ranks": ranks})).items():
        if seen.get(name) != mine:
            raise CheckpointError(
                f"it is of another training: its {name} is {shown(repr(seen.get(name)), 60)}, not"
                f" {shown(repr(mine), 60)}; {_remedy(name, seen.get(name))}"
            )


def _remedy(name: str, before: Any) -> str:
    """What to do where a setting is not that of the checkpoint, in which it is `before`."""
    fresh = "another --out starts again"
    match name:
        case "steps":
            return (
                f"the learning rate of each step depends on it: continue with --steps {before}, or"
                " start again with another --out; --stop ends a training before its last step, and"
                " with --final-lr 1 the rate does not depend on the number of steps"
            )
        case "ranks":
            return f"continue on as many ranks, or {fresh}"
        case "data":
            return f"the files that the task reads have changed, and {fresh}"
    if isinstance(before, Mapping):
        before = ",".join(f"{key}={value}" for key, value in before.items())
    text = shown(str(before), 60)
    flag = f"--{name.replace('_', '-')} {shlex.quote(text)}"
    return f"continue with {flag}, or {fresh}" if before is not None else fresh


def check_steps(checkpoint: Path, steps: int) -> None:
    """Raise OptionError for a checkpoint that is beyond the last step."""
    if step_of(checkpoint) > steps:
        raise OptionError(
            f"steps is {steps}, and the checkpoint is of step {step_of(checkpoint)}: give as many"
            " steps or more, or an earlier checkpoint by --from-step"
        )


def unread(checkpoint: Path) -> str:
    """How an error begins."""
    return f"cannot read the checkpoint {shown(checkpoint)}"


def offer(checkpoint: Path) -> str:
    """What to do instead: the last checkpoint before this one that is whole."""
    folder, step = checkpoint.parent.parent, step_of(checkpoint)
    for before in reversed([path for path in checkpoints(folder) if step_of(path) < step]):
        try:
            Saved.of(before).check(before)
        except CheckpointError:
            continue
        return (
            f"{before.name} is whole: continue from it with --resume --from-step {step_of(before)}"
        )
    return "no checkpoint before it is whole: start again with another --out"


def _start(rest: bytes) -> bytes:
    return _HEAD + sha256(rest).hexdigest().encode()


def _read(path: Path, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error


def shown(what: object, most: int = 80) -> str:
    """A text for an error: on one line, nothing that a terminal would obey, its end if long."""
    text = "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in " ".join(str(what).split())
    )
    return text if len(text) <= most else f"...{text[3 - most :]}"


_PATIENCE: Seconds = 5.0
"""For one that was killed a moment ago, and whose ranks are just ending."""

_PAUSE: Seconds = 0.05


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within, no other training can begin in the folder, which is made.

    The lock is of the folder itself: no file is left, and the system takes it away when the process
    ends, however it does. Where a file system has no such locks there is none. Raises OptionError
    when another training has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OptionError(f"cannot write into {folder}: {reason}") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def check_free(folder: Path) -> None:
    """Raise OptionError if a training is under way in the folder, if there is such a folder."""
    if folder.is_dir():
        with alone(folder):
            pass


def _lock(descriptor: int, folder: Path) -> None:
    limit = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                raise OptionError(
                    f"another training is under way in {folder}: wait until it ends, or choose"
                    " another --out"
                ) from None
            time.sleep(_PAUSE)
        except OSError:  # a file system without locks
            return
        else:
            return
