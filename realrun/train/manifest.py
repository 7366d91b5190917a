"""The manifest of a checkpoint: which files it has, and their checksums. Needs no torch.

It is written last. What is read is compared with it first, and used only if every byte is as it was
written. The checksum is SHA-256: of those in the standard library only CRC-32 is faster, and two
files with the same CRC-32 are easily made.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os.path import lexists
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

from realrun.errors import CheckpointError, DamagedError
from realrun.train.folder import IDENTITY, check_identity, checkpoints, shown, step_of

MANIFEST = "manifest.json"

OLD = ".metadata"
"""In a checkpoint of the old format, which torch.distributed.checkpoint wrote: it is a pickle."""

_FORMAT = 1

_CHUNK = 1 << 24
"""Bytes that are read while those before are added to a checksum."""

_MOST_MANIFEST = 4_000_000
"""Bytes of a manifest, which has some 250 a rank: 16,000 ranks. To parse it takes 25 times that."""

_MOST_IDENTITY = 1_000_000
"""Bytes of the settings of a training: several hundred times what they have."""

MOST_REST = 16_000_000
"""Bytes of what a rank holds besides tensors: some 80 for each tensor, numbers, and losses."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """The size of a file, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a checkpoint by name: what each rank holds, and what training it is of."""

    step: int
    ranks: int
    files: Mapping[str, FileSum]

    def text(self) -> str:
        """As it is written. It holds its own checksum."""
        files = {name: asdict(one) for name, one in sorted(self.files.items())}
        body = {"format": _FORMAT, "step": self.step, "ranks": self.ranks, "files": files}
        own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps({**body, "sha256": own}, indent=1) + "\n"

    @staticmethod
    def of(checkpoint: Path) -> "Manifest":
        """The manifest of a checkpoint. Raises DamagedError if it is not as it was written."""
        _check_folder(checkpoint)
        if is_old(checkpoint):
            raise CheckpointError(
                "it is of the old format, and reading that can run code that is in it: add --trust"
                " if you know who wrote it"
            )
        text = read_file(checkpoint / MANIFEST, _MOST_MANIFEST)
        try:
            found = _parsed(json.loads(text))
        except (
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ):
            found = None
        if found is None or found.text().encode() != text:
            raise DamagedError(f"{MANIFEST}: it is not what was written")
        if found.step != step_of(checkpoint):
            raise DamagedError(f"{MANIFEST}: it is of step {found.step}")
        return found

    def read(self, checkpoint: Path, name: str) -> bytes:
        """The bytes of a JSON file. Raises DamagedError if they are not those that were written."""
        wanted = self._wanted(name)
        _check_size(name, wanted.bytes, _MOST_IDENTITY if name == IDENTITY else MOST_REST)
        with _opened(checkpoint / name, wanted.bytes) as file:
            data = file.read(wanted.bytes + 1)
        _compare(name, FileSum(len(data), hashlib.sha256(data).hexdigest()), wanted)
        return data

    @contextmanager
    def reading(self, checkpoint: Path, name: str) -> Iterator["Reading"]:
        """A large file, to be read part by part.

        Raises DamagedError at the end if these were not the bytes that were written: use nothing of
        it before.
        """
        wanted = self._wanted(name)
        with _opened(checkpoint / name, wanted.bytes) as file, ThreadPoolExecutor(1) as beside:
            found = Reading(file, beside, wanted.bytes)
            yield found
            _compare(name, found.sum(), wanted)

    def check(self, checkpoint: Path) -> None:
        """Compare all files; no more than a part of one is in memory at a time."""
        for name, wanted in self.files.items():
            with _opened(checkpoint / name, wanted.bytes) as file:
                digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
                _compare(name, FileSum(file.tell(), digest.hexdigest()), wanted)

    def _wanted(self, name: str) -> FileSum:
        if name not in self.files:
            raise CheckpointError(f"it is of {self.ranks} ranks, and has no {name}")
        return self.files[name]


class Reading:
    """A file of `size` bytes; what is read of it is added to its checksum by another thread."""

    def __init__(self, file: IO[bytes], beside: ThreadPoolExecutor, size: int) -> None:
        """At its start."""
        self.size = size
        self._file, self._beside, self._digest = file, beside, hashlib.sha256()

    def take(self, count: int) -> bytes:
        """The next bytes; fewer at the end."""
        data = self._file.read(count)
        self._beside.submit(self._digest.update, data)
        return data

    def fill(self, place: memoryview) -> None:
        """The next bytes, into memory that is there. Raises ValueError if there are too few."""
        for start in range(0, len(place), _CHUNK):
            part = place[start : start + _CHUNK]
            if self._file.readinto(part) != len(part):  # type: ignore[attr-defined]
                raise ValueError("it ends too early")
            self._beside.submit(self._digest.update, part)

    def sum(self) -> FileSum:
        """Of all that was read."""
        self._beside.shutdown()
        return FileSum(self._file.tell(), self._digest.hexdigest())


def rank_files(rank: int) -> tuple[str, str]:
    """The names of a rank's files: tensors, and all else."""
    return f"rank{rank}.safetensors", f"rank{rank}.json"


def check_checkpoint(
    checkpoint: Path, identity: Mapping[str, Any], ranks: int, *, trust: bool
) -> None:
    """Compare all files of a checkpoint with its manifest, and its training with this one.

    Raises CheckpointError, which names the file, and says which checkpoint before it is whole.
    """
    try:
        check_identity(identity_of(checkpoint, trust=trust), identity, ranks)
        if not (trust and is_old(checkpoint)):
            Manifest.of(checkpoint).check(checkpoint)
    except CheckpointError as error:
        instead = f"; {offer(checkpoint)}" if isinstance(error, DamagedError) else ""
        raise type(error)(f"{unread(checkpoint)}: {error}{instead}") from error


def identity_of(checkpoint: Path, *, trust: bool) -> bytes:
    """What a checkpoint says of its training."""
    if trust and is_old(checkpoint):
        _check_folder(checkpoint)
        return read_file(checkpoint / IDENTITY, _MOST_IDENTITY)
    return Manifest.of(checkpoint).read(checkpoint, IDENTITY)


def is_old(checkpoint: Path) -> bool:
    """Whether it is of the old format."""
    return lexists(checkpoint / OLD) and not lexists(checkpoint / MANIFEST)


def unread(checkpoint: Path) -> str:
    """How an error begins."""
    return f"cannot read the checkpoint {shown(checkpoint)}"


def offer(checkpoint: Path) -> str:
    """What to do instead: the last checkpoint before this one that is whole."""
    folder, step = checkpoint.parent.parent, step_of(checkpoint)
    for one in reversed([path for path in checkpoints(folder) if step_of(path) < step]):
        try:
            Manifest.of(one).check(one)
        except (CheckpointError, OSError):
            continue
        return f"{one.name} is whole: go on from it with --resume --from-step {step_of(one)}"
    return "no checkpoint before it is whole: start again with another --out"


def read_file(path: Path, most: int = MOST_REST) -> bytes:
    """A small file. Raises DamagedError if it cannot be read, is no regular one, or too large."""
    with _opened(path) as file:
        data = file.read(most + 1)
    _check_size(path.name, len(data), most)
    return data


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise DamagedError(f"{name}: it is larger than {most // 10**6} MB")


def _check_folder(checkpoint: Path) -> None:
    """A link may lead to what another one changes meanwhile."""
    if checkpoint.is_symlink():
        raise DamagedError("it is a link, not a folder")


def _opened(path: Path, size: int | None = None) -> IO[bytes]:
    """A regular file of this size, and no link to one."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        file = os.fdopen(number, "rb")
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise DamagedError(f"{path.name}: {reason}") from error
    found = os.fstat(number)
    if S_ISREG(found.st_mode) and size in {None, found.st_size}:
        return file
    file.close()
    if S_ISREG(found.st_mode):
        raise DamagedError(f"{path.name}: it has {found.st_size:,} bytes instead of {size:,}")
    raise DamagedError(f"{path.name}: it is not a regular file")


def _compare(name: str, found: FileSum, wanted: FileSum) -> None:
    if found != wanted:
        raise DamagedError(f"{name}: its checksum is not that of {MANIFEST}")


def _parsed(found: Mapping[str, Any]) -> Manifest | None:
    """A manifest; None if it cannot be one of a checkpoint."""
    files = {
        name: FileSum(int(one["bytes"]), str(one["sha256"])) for name, one in found["files"].items()
    }
    made = Manifest(int(found["step"]), int(found["ranks"]), files)
    if len(files) != 1 + 2 * made.ranks:
        return None
    names = {IDENTITY, *(name for rank in range(made.ranks) for name in rank_files(rank))}
    return made if files.keys() == names else None
