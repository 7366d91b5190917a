"""What counts as a failure of a command that was given a fuzzed input."""

import contextlib
import io
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from co2sim.errors import Co2simError

LONGEST_S = 10.0
"""Of a processor's time."""
_BUSY = 6
"""Times as long may pass meanwhile, on a machine that does other things, too."""
MOST_BYTES = 2**30
_LONGEST_LINE = 400
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_WRONG_INPUT = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended: its exit code, seconds, and what was wrong, if anything."""

    code: int
    seconds: float
    problem: str = ""
    words: tuple[str, ...] = ()


class _TookTooLongError(BaseException):
    """Raised in the middle of a trial that hangs."""


def judged(run: Callable[[], object]) -> Verdict:
    """Run and judge: one line for bad input, no traceback, no hang, not too much memory."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n") for _ in range(2))
    began, code, problem = time.monotonic(), 0, ""
    before = _memory()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(_TookTooLongError),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        try:
            with _limited(LONGEST_S):
                run()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Co2simError as error:
            code = _WRONG_INPUT
            print(f"error: {str(error)[:300]}", file=sys.stderr)
        except _TookTooLongError as hang:
            code, problem = -1, f"hang: {_place(hang)}"
        except BaseException as error:  # noqa: BLE001 - it is what this looks for
            code, problem = -1, f"{type(error).__name__}: {str(error)[:200]} ({_place(error)})"
    seconds = time.monotonic() - began
    texts = [_text(stream) for stream in (out, err)]
    if not problem:
        problem = _printed(*texts, code)
    if not problem and _memory() - before > MOST_BYTES:
        problem = f"memory grew by {(_memory() - before) / 2**30:.1f} GiB"
    return Verdict(code, seconds, problem)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", "backslashreplace")


def _printed(out: str, err: str, code: int) -> str:
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    if code not in {0, _WRONG_INPUT}:
        return f"exit code {code}"
    if len(lines) != (1 if code else 0):
        return f"exit code {code} with {len(lines)} lines of errors"
    if any(len(line) > _LONGEST_LINE for line in lines):
        return f"an error line of {max(map(len, lines))} characters"
    if "Traceback" in err or "Warning" in err:
        return f"stderr: {err[-300:]}"
    found = _CONTROL.search(out + err.replace("\r", ""))
    return f"a control character {found[0]!r} is printed" if found else ""


def _place(error: BaseException) -> str:
    """Where it was raised: the last place of ours."""
    steps = traceback.extract_tb(error.__traceback__)
    ours = [step for step in steps if "site-packages" not in step.filename] or list(steps)
    parts = [f"{Path(step.filename).name}:{step.lineno}" for step in ours[-3:]]
    return " > ".join(parts)


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TookTooLongError

    before = [signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _BUSY * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])
