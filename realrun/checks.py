"""Ranges of the options of an outer step, once: for `realrun.algorithms` and for `realrun train`.

Needs no torch, so that a command line refuses its input before it loads any. All functions raise
OptionError with one line that says what, what was given and what is allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from co2sim.errors import OptionError, nearest
from co2sim.ranges import above, at_least
from co2sim.schedule import DType

Gap: TypeAlias = Literal["constant", "gap_aware"]

GAPS: tuple[Gap, ...] = get_args(Gap)

DEFAULT_GAP: Gap = "gap_aware"
"""Of CO2."""

PRECISIONS = (DType.FP32, DType.FP16, DType.BF16)
"""In which kernels can be timed; what the virtual GPU has, too."""

_LARGEST = 1e30
"""Of factors and bounds of parameters, which are fp32."""


def momentum(name: str, value: float) -> None:
    """At least 0 and below 1: from 1 on a momentum would never end."""
    at_least(name, value, 0)
    _below_one(name, value, "at least 0 and below 1")


def pull(name: str, value: float) -> None:
    """Above 0 and below 1: at 1 models would never leave the anchor."""
    above(name, value, 0)
    _below_one(name, value, "above 0 and below 1")


def step_size(name: str, value: float) -> None:
    """Above 0, and not so large that fp32 could not hold a product with it."""
    limit(name, value)


def limit(name: str, value: float) -> None:
    """Above 0, and a number of fp32."""
    above(name, value, 0)
    if value > _LARGEST:
        raise OptionError(f"{name} is {value}; it must be above 0 and at most {_LARGEST:g}")


def penalty(name: str, value: float, gap: Gap) -> None:
    """At least 1; the gap-aware one is computed, so that it cannot be given."""
    at_least(name, value, 1)
    if gap != "constant" and value != 1:
        raise OptionError(f"{name} is {value}, but gap={gap!r} computes it; use gap='constant'")


def flag(name: str, given: object) -> None:
    """True or False."""
    if not isinstance(given, bool):
        raise OptionError(f"{name} is {given!r}; it must be True or False")


def one_of(name: str, given: str, allowed: Sequence[str]) -> None:
    """One of a few names."""
    if given not in allowed:
        raise OptionError(f"{name} is {given!r}; {nearest(str(given), allowed)}")


def _below_one(name: str, value: float, allowed: str) -> None:
    if value >= 1:
        raise OptionError(f"{name} is {value}; it must be {allowed}")


REALTIME = "REALRUN_REALTIME"
"""Environment variable of the ranks: 1 if threads that communicate come first, as in labs."""

SITES = "REALRUN_SITES"
"""Environment variable of the ranks with the number of sites, which they fill in order."""


def sites_of(environment: Mapping[str, str]) -> int:
    """The number of sites that REALRUN_SITES says: 1 if it says nothing. Raises OptionError."""
    text = environment.get(SITES, "1")
    if not text.isdecimal() or not int(text):
        raise OptionError(f"{SITES} is {text!r}; it must be the number of sites, 1 or more")
    return int(text)
