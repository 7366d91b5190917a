"""Files of users: small ones are read, and of those written there are all or none."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from tempfile import TemporaryFile

from co2sim.errors import OptionError

_MOST_BYTES = 16_000_000
"""Of a file to read: thousands of times what any cluster, model or table of a paper takes."""


def text_of(path: Path) -> str:
    """The text of a file, without the byte order mark that some editors put before it.

    Raises OSError for what is no regular file, such as a pipe that would never end, and for files
    above 16 MB; UnicodeDecodeError for what is no text in UTF-8.
    """
    found = path.stat()
    if not S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {_MOST_BYTES // 10**6} MB", str(path))
    return path.read_text(encoding="utf-8-sig")


def check_writable(folder: Path) -> None:
    """Raise OptionError unless files can be made in `folder`, or in what exists of its path."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    try:
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OptionError(f"cannot write into {folder}: {reason} ({existing})") from error


def write_atomically(contents: Mapping[Path, bytes]) -> None:
    """Write every file under a temporary name in its folder first, then rename all.

    Raises OptionError, with nothing changed, when a place cannot be written.
    """
    for path in contents:
        if path.exists() and not path.is_file():
            raise OptionError(f"cannot write {path}: it is not a regular file")
    drafts: dict[Path, Path] = {}
    contents = {path.resolve(): content for path, content in contents.items()}  # behind links
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            drafts[path] = path.with_name(f".{path.name}.{os.getpid()}")
            drafts[path].write_bytes(content)
        for path, draft in drafts.items():
            draft.replace(path)
    except OSError as error:
        raise OptionError(
            f"cannot write {path}: {(error.strerror or str(error)).lower()}"
        ) from error
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
