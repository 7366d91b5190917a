"""Imported when Python starts with this folder on its path: folders in reverse, local numbers.

`test_determinism` runs commands with it, to see that nothing hangs on the order in which a system
lists a folder, or on the decimal comma of a locale.
"""

import locale
import os
from collections.abc import Iterator
from typing import Any, Self

locale.setlocale(locale.LC_ALL, "")
_listdir, _scandir = os.listdir, os.scandir


def _reversed_names(*arguments: Any) -> list[Any]:
    return sorted(_listdir(*arguments), reverse=True)


class _Reversed:
    """What `os.scandir` gives: an iterator, and a context."""

    def __init__(self, *arguments: Any) -> None:
        with _scandir(*arguments) as entries:
            self._entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Nothing is open."""


os.listdir, os.scandir = _reversed_names, _Reversed
