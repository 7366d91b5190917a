"""Errors of real runs. All are `Co2simError`s with a message of one line."""

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from co2sim.common.errors import (
    CatalogError,
    Co2simError,
    OptionError,
    ScheduleError,
    UnitError,
    nearest,
)
from co2sim.common.validation import above, at_least
from co2sim.schedule.schedule import DType

BAD_INPUT = (OptionError, CatalogError, ScheduleError, UnitError)
"""Errors whose exit code is 2, as of every command here, also where ranks have begun."""


class LabError(Co2simError):
    """The lab cannot be built here."""


class LaunchError(Co2simError):
    """Ranks could not be started, or one of them failed."""


class MismatchError(Co2simError):
    """Ranks do different things: another schedule, or another collective at the same place."""


class NonFiniteError(Co2simError):
    """An inf or a NaN that would spread to other ranks. `round` is that of the average, if any."""

    def __init__(self, message: str, *, round: int | None = None) -> None:  # noqa: A002 - as below
        super().__init__(message)
        self.round = round


class RankFailure(Co2simError):  # noqa: N818 - what it is called in the field
    """A rank died, hung or raised an error, so that others could not continue.

    `ranks` are those at fault, empty if unknown; `cause` is a clause on what became of them. `op`
    and `round` say what this rank was doing.
    `trace` holds the spans that this rank had finished. `said`: those at fault tell it themselves,
    and it is bad input.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        op: str | None = None,
        round: int | None = None,  # noqa: A002 - what it is called everywhere here
        said: bool = False,
        cause: str = "",
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.ranks, self.op, self.round, self.said = ranks, op, round, said
        self.trace: Any = None


def named_ranks(ranks: Sequence[int]) -> str:
    """As in "ranks 1, 2"."""
    more = ", ..." if len(ranks) > 8 else ""  # noqa: PLR2004 - as many as a line holds
    listed = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


def refuse_different(what: str, texts: Sequence[str], ranks: Sequence[int]) -> None:
    """Raise MismatchError, which names the first line that differs, unless texts are the same."""
    for rank, text in zip(ranks, texts, strict=True):
        if text != texts[0]:
            line, other = first_difference(texts[0], text)
            raise MismatchError(
                f"rank {rank} has another {what} than rank {ranks[0]}: {other!r} instead of"
                f" {line!r}"
            )


def first_difference(text: str, two: str) -> tuple[str, str]:
    """The first lines by one name in which two texts differ, which they do.

    A line is "name: ..." or "name = ..."; "nothing" where one text has none by a name.
    """
    lines, others = text.splitlines(), two.splitlines()
    only = [line for line in lines if line not in others]
    only_others = [line for line in others if line not in lines]
    first = [
        (each.index(odd[0]), odd[0]) for each, odd in ((lines, only), (others, only_others)) if odd
    ]
    if not first:  # in another order
        return next(pair for pair in zip(lines, others, strict=False) if pair[0] != pair[1])
    name = _name(min(first)[1])
    mine, theirs = (
        next((line for line in odd if _name(line) == name), "nothing")
        for odd in (only, only_others)
    )
    return mine, theirs


def _name(line: str) -> str:
    return re.split(r": | = ", line.removeprefix("not averaged: "))[0]


def warn_user(text: str) -> None:
    """Warn, with the line of the first caller that is neither torch's nor of this package."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001 - as `warnings` does
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_OF_USERS:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


_NOT_OF_USERS = ("torch", "realrun", "contextlib")


class TrainingError(Co2simError):
    """A training cannot continue: its loss is not finite."""


class CheckpointError(Co2simError):
    """A checkpoint cannot be written or read, or is of another training.

    `everywhere`: all ranks raise it alike, so that none needs a message.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class DamagedError(CheckpointError):
    """A file of a checkpoint is not what was written."""


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


def limit(name: str, value: float) -> None:
    """Above 0, and not so large that fp32 could not hold a product with it."""
    above(name, value, 0)
    if value > _LARGEST:
        raise OptionError(f"{name} is {value}; it must be above 0 and at most {_LARGEST:g}")


def penalty(name: str, value: float, gap: Gap) -> None:
    """At least 1; the gap-aware one is computed, so that it cannot be given."""
    at_least(name, value, 1)
    if gap != "constant" and value != 1:
        raise OptionError(f"{name} is {value}, but gap={gap!r} computes it; use gap='constant'")


def flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}; it must be True or False")


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """One of a few names."""
    if value not in allowed:
        raise OptionError(f"{name} is {value!r}; {nearest(str(value), allowed)}")


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
