"""The exceptions of co2sim: one tree, one line each, in words."""

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


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Words to end an error with: the nearest allowed name, or all of them."""
    names = sorted(set(allowed))
    close = get_close_matches(given, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}"
