"""One training at a time in a folder. Needs no torch."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds

_PATIENCE: Seconds = 5.0
"""For one that was killed a moment ago, and whose ranks are just ending."""

_PAUSE: Seconds = 0.05


@contextmanager
def alone(folder: Path) -> Iterator[Callable[[], None]]:
    """Within, no other training can begin in the folder, which is made.

    Gives what lets other processes of this training hold it, too (`among`). The lock is of the
    folder itself: no file is left, and the system takes it away when the process ends, however it
    does. Where a file system has no such locks there is none. Raises OptionError when another
    training has it.
    """
    with _locked(folder, fcntl.LOCK_EX) as number:
        yield partial(_take, number, folder, fcntl.LOCK_SH)


@contextmanager
def among(folder: Path) -> Iterator[None]:
    """The same beside other processes of one training: it ends when the last of them does."""
    with _locked(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[int]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OptionError(f"cannot write into {folder}: {reason}") from error
    try:
        _take(number, folder, how)
        yield number
    finally:
        os.close(number)


def check_free(folder: Path) -> None:
    """Raise OptionError if a training is under way in the folder, if there is such a folder."""
    if folder.is_dir():
        with alone(folder):
            pass


def _take(number: int, folder: Path, how: int) -> None:
    limit = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(number, how | fcntl.LOCK_NB)
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
