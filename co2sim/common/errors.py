"""The exceptions of co2sim: one tree, and one line of text each."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


class Co2simError(Exception):
    """Anything that a user can cause; the message says what, what was given, what is allowed."""


class UnitError(Co2simError):
    """A quantity that cannot be read, or that has the wrong unit."""


class ScheduleError(Co2simError):
    """A schedule that could not run."""


class CatalogError(Co2simError):
    """A name, file or number of a cluster, GPU or model that is unknown or wrong."""


class OptionError(Co2simError):
    """A strategy or run option that is unknown, out of range or does not apply."""


class ResourceError(Co2simError):
    """A simulation that does not fit on this machine, or whose process was killed."""


class NoRoomError(ResourceError):
    """A simulation that was refused before it began: it needs more memory than it may take."""


class EngineError(ResourceError):
    """Workers that cannot be reached, have all gone, or have another co2sim."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Words to end an error with: the nearest allowed name, or all of them."""
    names = sorted(set(allowed))
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}"


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves the cursor, sets colours or turns the direction of writing, and halves of characters.

Not the end of a line and the tabulator.
"""
_LONGEST_LINE = 400
_LONGEST_VALUE = 60
_LEFT_OUT = " ... "


def visible(text: str) -> str:
    r"""The text with its control characters as escapes, such as \x1b."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def has_control(text: str) -> bool:
    """Whether a text has characters that `visible` escapes."""
    return _CONTROL.search(text) is not None


def cut(text: str, most: int) -> str:
    """At most a number of characters of a text: both ends of a longer one."""
    if len(text) <= most:
        return text
    kept = most - len(_LEFT_OUT)
    return text[: kept - kept // 2] + _LEFT_OUT + text[-(kept // 2) :]


def given(value: object) -> str:
    """A value from a user, for a message: as Python writes it, and not too long."""
    text = value if isinstance(value, str) else repr(value)
    short = cut(text, _LONGEST_VALUE)
    return repr(short) if isinstance(value, str) else short


def error_line(message: str) -> str:
    """The line that a command line prints of an error: at most 400 characters."""
    return cut(visible(f"error: {' '.join(message.split())}"), _LONGEST_LINE)
