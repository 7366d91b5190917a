"""What control-C and SIGTERM do to a launcher."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A signal told this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextmanager
def stoppable(first: Callable[[int], None] | None = None) -> Generator[None]:
    """Raise Stopped at the first SIGINT, SIGTERM or SIGHUP; more of them change nothing.

    With `first` the first signal calls that instead, and the second raises.
    """
    signals = 0

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if first and signals == 1:
            first(number)
        elif signals == 1 + (first is not None):
            raise Stopped(number)

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) not in {signal.SIG_IGN, None}
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
