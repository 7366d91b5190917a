"""Output files: all of them, or none."""

import os
from collections.abc import Mapping
from pathlib import Path

from co2sim.errors import OptionError


def write_atomically(contents: Mapping[Path, bytes]) -> None:
    """Write every file beside its place first, then move all into place.

    Raises OptionError, with nothing changed, when a place cannot be written.
    """
    drafts: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            drafts[path] = path.with_name(f".{path.name}.{os.getpid()}")
            if path.is_dir():
                raise IsADirectoryError(21, "is a folder")
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
