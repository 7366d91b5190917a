"""How a checkpoint is written: beside its place, to the disk, and then renamed. Needs no torch.

A draft has a random name. Who writes it holds a lock of it, which the system takes away when the
process ends, however it does: a draft without one is what an earlier attempt left.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from realrun.train.folder import CHECKPOINTS, checkpoints, step_of
from realrun.train.manifest import MANIFEST, FileSum, Manifest

_DRAFT = re.compile(r"\.step-\d+(\.[0-9a-f]{16})?")
"""Names of drafts; those without a random part are of the old format."""

_KEPT = 2
"""Checkpoints that stay; older ones are removed."""


def begin(place: Path) -> Path:
    """Make the folder of a draft. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    clean(place.parent.parent)
    draft = _beside(place)
    draft.mkdir()
    return draft


@contextmanager
def held(draft: Path) -> Iterator[None]:
    """Within, nobody takes the draft for one that was left."""
    number = _folder(draft)
    try:
        with suppress(OSError):  # a file system without locks: `clean` leaves its drafts alone
            fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> FileSum:
    """Write a new file, to the disk; its size and checksum, which are of what was to be written.

    Raises OSError, also when there is such a file or link already.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with (
            ThreadPoolExecutor(1) as beside,  # both let go of the interpreter: 1.4 times as fast
            os.fdopen(os.open(path, flags, 0o666), "wb") as file,
        ):
            digest = beside.submit(_digest, parts)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            return FileSum(file.tell(), digest.result())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def finish(draft: Path, place: Path, manifest: Manifest) -> None:
    """Write the manifest, and put the draft in its place; older checkpoints go. Raises OSError."""
    write_file(draft / MANIFEST, [manifest.text().encode()])
    sync(draft)
    before = _beside(place)
    with suppress(FileNotFoundError):
        place.rename(before)
    try:
        draft.rename(place)
    except OSError:
        with suppress(FileNotFoundError):
            before.rename(place)
        raise
    sync(place.parent)
    remove(before)
    whole = [one for one in checkpoints(place.parent.parent) if step_of(one) <= manifest.step]
    for old in whole[:-_KEPT]:
        with suppress(OSError):
            remove(old.rename(_beside(old)))  # what has its name is whole, also if this is killed


def remove(path: Path) -> None:
    """Remove a folder, or a link in its place, as far as that is possible."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove drafts that earlier attempts left in the folder of a training, if they are ours."""
    with suppress(OSError):
        for path in sorted((folder / CHECKPOINTS).iterdir()):
            if _DRAFT.fullmatch(path.name):
                with suppress(OSError):
                    _clean(path)


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    number = _folder(folder)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _clean(draft: Path) -> None:
    number = _folder(draft)
    try:
        if os.fstat(number).st_uid == os.geteuid():
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError if it is being written
            shutil.rmtree(draft, ignore_errors=True)
    finally:
        os.close(number)


def _folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _beside(place: Path) -> Path:
    return place.with_name(f".{place.name}.{secrets.token_hex(8)}")


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()
