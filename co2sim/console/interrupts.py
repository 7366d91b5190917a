"""Control-C and SIGTERM both interrupt a command, and neither is lost.

What a signal's handler raises can vanish: Python and libraries swallow the errors of some
callbacks, above all while modules are imported. So it is noted, and asked for before long work. Who
presses control-C several times means one interrupt: another one would cut off its last line.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Of a shell, for a process ended by these."""
WORDS = {130: "interrupted", 143: "terminated"}

_SAME = 1.0
"""In seconds. A control-C so soon after another is the same: that one is on its way still."""

_told: list[int] = []


class Signalled(KeyboardInterrupt):
    """A signal has come. Not KeyboardInterrupt itself.

    Where that leaves an exec(), as of a dataclass, CPython (3.11, `run_eval_code_obj`) ends the
    process by SIGINT at its exit, caught or not.
    """


@contextmanager
def noted() -> Iterator[None]:
    """Within, the first signal and every later control-C raise Signalled, and are noted.

    A signal that is ignored, or handled by others, is left alone. After one that came all are
    ignored: the process is ending. Where Python swallows Signalled, as in `__del__` or the callback
    of a weak reference, it prints no traceback.
    """
    raised = -_SAME
    report = sys.unraisablehook

    def unraisable(swallowed: "sys.UnraisableHookArgs") -> None:
        if not isinstance(swallowed.exc_value, Signalled):
            report(swallowed)

    def interrupt(number: int, _: object) -> None:
        nonlocal raised
        _told.append(number)
        now = time.monotonic()
        if len(_told) == 1 or (number == signal.SIGINT and now - raised > _SAME):
            raised = now
            raise Signalled

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    found = {number: one for number, one in usual.items() if signal.getsignal(number) == one}
    try:
        for number in found:
            signal.signal(number, interrupt)
        sys.unraisablehook = unraisable
        yield
    finally:
        sys.unraisablehook = report
        if _told:
            settle()
        else:
            for number, handler in found.items():
                signal.signal(number, handler)
        _told.clear()


def settle() -> None:
    """Ignore further signals, if one has come: what it interrupts has ended, and is being told."""
    for number in EXIT_CODES if _told else ():
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raise Signalled if a signal has come before."""
    if _told:
        raise Signalled


def end() -> NoReturn:
    """End a command that was interrupted before it ran, with one line."""
    settle()
    code = exit_code()
    print(f"{WORDS[code]}; nothing was written", file=sys.stderr)
    sys.exit(code)


def exit_code() -> int:
    """That of the first signal that has come; without one that of control-C."""
    return EXIT_CODES[_told[0] if _told else signal.SIGINT]
