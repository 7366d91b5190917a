"""Files of users: those read are regular and not too large, of those written there are all or none.

`read_bytes` and `text_of` are the only ways to open a file that a user names or gives,
`write_atomically` is the only one to write it, and `new_folder` the only one to fill a folder.
"""

import errno
import io
import json
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from stat import S_ISREG
from tempfile import TemporaryFile
from typing import Any, NoReturn

from co2sim.common.errors import CatalogError, OptionError, has_control, visible

MAX_BYTES = 16_000_000
"""Of a file to read: thousands of times what any cluster, model or table of a paper takes."""

MAX_RECORD_BYTES = 256_000_000
"""Of a file of a run with a line for each of its ops or steps: two million ops."""

_AT_ONCE = 1 << 20
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | os.O_CLOEXEC
"""Opening a pipe must not wait for its writer."""
_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""A new file, never one that exists."""


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """What a file holds.

    Raises OSError for what is no regular file, such as a pipe that would never end, and for files
    above `most` bytes. What is checked is what was opened, whatever the name means a moment later.
    """
    try:
        opened = os.open(path, _READ)
    except ValueError as error:  # a character that no name of a file can have
        raise OSError(errno.EINVAL, "it is not the name of a file", str(path)) from error
    with open(opened, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
        if not S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        parts: list[bytes] = []
        left = most + 1
        while left and (part := file.read(min(left, _AT_ONCE))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"it is larger than {most / 10**6:g} MB", str(path))
    return b"".join(parts)


def text_of(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a file, without the byte order mark that some editors put before it.

    Raises OSError like `read_bytes`; UnicodeDecodeError for what is no text in UTF-8.
    """
    with io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8-sig") as text:
        return text.read()


def is_regular(path: Path) -> bool:
    """Whether there is such a file; False for what no file can be called, too."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for names that are too long


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; False for what no folder can be called, too."""
    return os.path.isdir(path)  # noqa: PTH112 - as above


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path is in a folder or deeper, wherever links lead; False if that is not known."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a ring, a NUL in a name
        return False


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

    A path that is a link means the file behind it. Temporary names are random, and what stands
    there already is never opened. All is on the disk before anything is renamed.

    Raises OptionError, with nothing changed, when a place cannot be written.
    """
    drafts: dict[Path, Path] = {}
    path = Path()
    try:
        for path in contents:
            if path.exists() and not path.is_file():
                raise OptionError(f"cannot write {path}: it is not a regular file")
        contents = {path.resolve(): content for path, content in contents.items()}  # behind links
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_draft(path, content, drafts)
        for path, draft in drafts.items():
            draft.replace(path)
        for folder in {path.parent for path in drafts}:
            _sync(folder)
    except (OSError, RuntimeError, ValueError) as error:  # of links in a ring, of a NUL in a name
        reason = error.strerror if isinstance(error, OSError) else None
        raise OptionError(f"cannot write {path}: {(reason or str(error)).lower()}") from error
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Within, a function that writes files by name; then they are a new folder, all or none.

    It is made under a temporary name beside `path`, and renamed at the end, when all of it is on
    the disk. Raises OptionError where there is something already, other than an empty folder, or
    where a place cannot be written.
    """
    draft: Path | None = None
    try:
        path = path.resolve()
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise OptionError(f"{path} exists; give the name of a new or an empty folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = _draft_of(path)
        draft.mkdir()
        yield partial(_write_new, draft)
        os.sync()  # once for all: of thousands of files, each would wait for the disk
        draft.replace(path)
        draft = None
        _sync(path.parent)
    except (OSError, RuntimeError, ValueError) as error:  # as above
        reason = error.strerror if isinstance(error, OSError) else None
        raise OptionError(f"cannot write {path}: {(reason or str(error)).lower()}") from error
    finally:
        if draft:
            shutil.rmtree(draft, ignore_errors=True)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".draft-{secrets.token_hex(8)}")


def _write_new(folder: Path, name: str, content: bytes) -> None:
    with (folder / name).open("xb") as file:
        file.write(content)


def _write_draft(path: Path, content: bytes, drafts: dict[Path, Path]) -> None:
    """Write a draft beside `path`; it is put into `drafts` as soon as it is there."""
    draft = _draft_of(path)
    opened = os.open(draft, _DRAFT, 0o666)
    drafts[path] = draft
    with open(opened, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(content)
        file.flush()
        os.fsync(opened)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


MAX_TOML_BYTES = 1_000_000
"""A hundred times the largest of the catalog."""
_DEEPEST = 32
"""Tables in tables: several times what any cluster, model or record has."""
_MAX_DIGITS = 300
"""Of a whole number: more than a float can hold is no number of any of our files."""

_LEXEMES = re.compile(
    r'"""(?:[^\\"]++|\\.|"(?!""))*+(?:"{3,5})?+|'
    r"'''(?:[^']++|'(?!''))*+(?:'{3,5})?+|"
    r'"(?:[^\\"\n]++|\\.)*+"?+|'
    r"'[^'\n]*+'?+|"
    r"\#[^\n]*+|(?P<open>[\[{])|(?P<close>[\]}])|(?P<dot>\.)|(?P<end>[\n=,])",
    re.DOTALL,
)
"""The parts of TOML that say how deep it is; texts and comments may hold any brackets and dots.

A text that is not closed is one all the same, as far as it could go: nothing is read twice.
"""


def toml(text: str) -> dict[str, Any]:
    """A document in TOML."""
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it is larger than {MAX_TOML_BYTES / 10**6:g} MB")
    _check_depth_of_toml(text)
    try:
        tree = tomllib.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    return _cleaned(tree)  # type: ignore[no-any-return]


def toml_file(path: Path) -> dict[str, Any]:
    """The document in a file. Raises CatalogError, with one line that names the file."""
    try:
        return toml(text_of(path))
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, or no text
        raise CatalogError(f"{path}: {error}") from error


def json_tree(text: str) -> Any:
    """A document in JSON; a name that an object has twice is refused, as in TOML."""
    try:
        tree = json.loads(text, object_pairs_hook=_once, parse_int=_whole)
    except RecursionError as error:
        raise _too_deep() from error
    _check_depth(tree)
    return _cleaned(tree)


def json_line(text: str) -> Any:
    """A line of a file of JSON Lines, of which there may be millions: as `json_tree`."""
    if text.count("[") + text.count("{") > 2 or "\\" in text or has_control(text):  # noqa: PLR2004
        return json_tree(text)
    return json.loads(text, parse_int=_whole)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"{name!r} is given twice")
        tree[name] = value
    return tree


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; at most {_MAX_DIGITS} are read")
    return int(digits)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _check_depth(tree: Any) -> None:
    """Level by level, so that no depth is too much for this check."""
    level = [tree]
    for _ in range(_DEEPEST):
        level = [
            inner
            for node in level
            if isinstance(node, dict | list)
            for inner in (node.values() if isinstance(node, dict) else node)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _check_depth_of_toml(text: str) -> None:
    """Brackets in brackets, and names with many dots, before they are read at great cost."""
    depth = dots = 0
    for lexeme in _LEXEMES.finditer(text):
        match lexeme.lastgroup:
            case "open":
                depth += 1
            case "close":
                depth -= 1
            case "dot":
                dots += 1
            case "end":
                dots = 0
        if depth > _DEEPEST or dots > _DEEPEST:
            raise _too_deep()


def _cleaned(node: Any) -> Any:
    """The same with visible texts and names, and whole numbers that a float can hold."""
    if isinstance(node, str):
        return visible(node)
    if isinstance(node, dict):
        return {visible(name): _cleaned(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_cleaned(item) for item in node]
    if isinstance(node, int) and not isinstance(node, bool) and abs(node) >= 10**_MAX_DIGITS:
        _refuse_number()
    return node


def _refuse_number() -> NoReturn:
    raise ValueError(f"a number has more than {_MAX_DIGITS} digits")
