"""Range checks: every number that a user may give is refused here when it is out of range.

All functions give back the value, as a plain `float` or `int`, and raise `OptionError` (or the
`error` that they are given) with one line: what, what was given, what is allowed. NaN and infinity
are out of every range, and `True` is no number. NumPy's numbers are taken like Python's.
"""

import math
from numbers import Integral, Real

from co2sim.errors import Co2simError, OptionError
from co2sim.visible import given

_MOST_DIGITS = 20
"""Of a whole number in a message: enough for all that 64 bits hold."""


def at_least(
    name: str, value: float, least: float, *, error: type[Co2simError] = OptionError
) -> float:
    """A finite number of `least` or more."""
    allowed = f"at least {_short(least)}"
    return _checked(name, value, least, math.inf, allowed, error)


def above(
    name: str, value: float, bound: float, *, error: type[Co2simError] = OptionError
) -> float:
    """A finite number greater than `bound`."""
    allowed = f"above {_short(bound)}"
    return _checked(name, value, math.nextafter(bound, math.inf), math.inf, allowed, error)


def between(
    name: str, value: float, least: float, most: float, *, error: type[Co2simError] = OptionError
) -> float:
    """A number from `least` to `most`, both allowed."""
    allowed = f"{_short(least)} to {_short(most)}"
    return _checked(name, value, least, most, allowed, error)


def fraction(name: str, value: float, *, error: type[Co2simError] = OptionError) -> float:
    """A number above 0 and at most 1."""
    return _checked(name, value, math.nextafter(0, 1), 1.0, "above 0 and at most 1", error)


def whole(
    name: str,
    value: float,
    least: int = 0,
    most: int | None = None,
    *,
    error: type[Co2simError] = OptionError,
) -> int:
    """A whole number from `least` to `most`, or without an upper bound; 48.0 is 48."""
    allowed = f"at least {least}" if most is None else f"{least} to {_bound(most)}"
    if not _is_number(value) or (_is_finite(value) and value != int(value)):
        raise error(f"{name} is {_given(value)}; it must be a whole number, {allowed}")
    if not (_is_finite(value) and least <= value and (most is None or value <= most)):
        raise error(f"{name} is {_given(value)}; it must be {allowed}")
    return int(value)


def parse_number(name: str, text: str) -> float:
    """A text as a finite number, 0 or more."""
    number = _read(text)
    if not 0 <= number < math.inf:
        raise OptionError(f"{name} is {text!r}; it must be a number, 0 or more")
    return number


def _read(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _checked(
    name: str, value: float, least: float, most: float, allowed: str, error: type[Co2simError]
) -> float:
    if not _is_number(value):
        raise error(f"{name} is {_given(value)}; it must be a number, {allowed}")
    finite = _is_finite(value)
    if not (finite and least <= value <= most):
        raise error(
            f"{name} is {_given(value)}; it must be {'' if finite else 'finite and '}{allowed}"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _given(value: object) -> str:
    """A value as a user would write it."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        few = abs(int(value)) < 10**_MOST_DIGITS
        return str(int(value)) if few else f"a number of more than {_MOST_DIGITS} digits"
    return repr(float(value)) if isinstance(value, Real) and _is_number(value) else given(value)


def _bound(most: int) -> str:
    """A whole number with all its digits, unless they are too many to read."""
    return str(most) if abs(most) < 10**_MOST_DIGITS else _short(most)


def _short(bound: float) -> str:
    """A bound without needless digits: 0, 1e+12, 0.5."""
    return str(int(bound)) if bound == int(bound) and abs(bound) < 1e9 else f"{bound:g}"  # noqa: PLR2004 - beyond it zeros are miscounted
