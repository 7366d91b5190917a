"""Progress on stderr, where somebody looks at it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from co2sim.units import Seconds

Done: TypeAlias = Callable[[int, int], None]
"""To be called with how much is done, and of how much."""


@contextmanager
def progress_bar(
    what: str, *, shown: bool | None = None, after: Seconds = 0.0
) -> Iterator[Done | None]:
    """A bar that appears `after` some seconds: if `shown`, or if None where stderr is a terminal.

    It is gone when the work is done. Without a bar there is nothing to call: None.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield None
        return
    from rich import progress  # noqa: PLC0415 - 0.1 s that only a terminal needs
    from rich.console import Console  # noqa: PLC0415

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=None)
    began = time.monotonic()

    def update(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - began >= after:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()
