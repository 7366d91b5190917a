"""Control-C and SIGTERM both interrupt a command, and neither is lost.

What a signal's handler raises can vanish: Python and libraries swallow the errors of some
callbacks, above all while modules are imported. So it is noted, and asked for before long work.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Of a shell, for a process ended by these."""
WORDS = {130: "interrupted", 143: "terminated"}

_told: list[int] = []


@contextmanager
def noted() -> Iterator[None]:
    """Within, the first SIGTERM and every control-C raise KeyboardInterrupt, and are noted.

    A signal that is ignored, or handled by others, is left alone.
    """

    def interrupt(number: int, _: object) -> None:
        _told.append(number)
        if number == signal.SIGINT or len(_told) == 1:
            raise KeyboardInterrupt

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    found = {number: one for number, one in usual.items() if signal.getsignal(number) == one}
    try:
        for number in found:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
        _told.clear()


def check() -> None:
    """Raise KeyboardInterrupt if a signal has come before."""
    if _told:
        raise KeyboardInterrupt


def exit_code() -> int:
    """That of the first signal that has come; without one that of control-C."""
    return EXIT_CODES[_told[0] if _told else signal.SIGINT]
