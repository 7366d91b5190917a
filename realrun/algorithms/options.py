"""Checks of options: each raises OptionError that says what was given and what is allowed."""

import math
from collections.abc import Sequence

from co2sim.errors import OptionError, nearest


def at_least(name: str, given: float, low: float) -> None:
    """A finite number, not below `low`; a whole one if `low` is."""
    kind = int if isinstance(low, int) else (int, float)
    if not isinstance(given, kind) or isinstance(given, bool) or not low <= given < math.inf:
        word = "a whole number" if kind is int else "a number"
        raise OptionError(f"{name} is {given!r}; it must be {word}, at least {low:g}")


def between(name: str, given: float) -> None:
    """A number from 0 to below 1."""
    if not _is_number(given) or not 0 <= given < 1:
        raise OptionError(f"{name} is {given!r}; it must be at least 0 and less than 1")


def positive(name: str, given: float, below: float = math.inf) -> None:
    """A finite number above 0, and below `below`."""
    if not _is_number(given) or not 0 < given < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise OptionError(f"{name} is {given!r}; it must be a finite number above 0{limit}")


def one_of(name: str, given: str, allowed: Sequence[str]) -> None:
    """One of a few names."""
    if given not in allowed:
        raise OptionError(f"{name} is {given!r}; {nearest(str(given), allowed)}")


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
