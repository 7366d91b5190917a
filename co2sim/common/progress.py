"""Progress on stderr, if that is a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from co2sim.common.units import Seconds

Done: TypeAlias = Callable[[int, int], None]
"""To be called with how much is done, and of how much."""


class Bar(Protocol):
    """A bar on the terminal: a `Done` that may also show a text on where the work stands."""

    def __call__(self, done: int, total: int, words: str = "") -> None: ...  # noqa: D102


@contextmanager
def progress_bar(
    what: str, *, shown: bool | None = None, after: Seconds = 0.0
) -> Iterator[Bar | None]:
    """A bar that appears `after` some seconds: if `shown`, or if None where stderr is a terminal.

    It is gone when the work is done. Where none may appear there is nothing to call: None; a line
    in a pipe or a file would come or not come with the speed of the machine.
    """
    if shown is False or (shown is None and not sys.stderr.isatty()):
        yield None
        return
    from rich import progress  # noqa: PLC0415 - 0.1 s that only a terminal needs
    from rich.console import Console  # noqa: PLC0415

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[words]}", markup=False),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=None, words="")
    began = time.monotonic()

    def update(done: int, total: int, words: str = "") -> None:
        if not bar.live.is_started and time.monotonic() - began >= after:
            bar.start()
        bar.update(task, completed=done, total=total, words=words)

    try:
        yield update
    finally:
        bar.stop()
