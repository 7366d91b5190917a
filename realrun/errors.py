"""Errors of real runs. All are `Co2simError`s with a message of one line."""

from typing import Any

from co2sim.errors import CatalogError, Co2simError, OptionError, ScheduleError, UnitError

BAD_INPUT = (OptionError, CatalogError, ScheduleError, UnitError)
"""Errors whose exit code is 2, as of every command of ours, also where ranks have begun."""


class LabError(Co2simError):
    """The lab cannot be built here."""


class LaunchError(Co2simError):
    """Ranks could not be started, or one of them failed."""


class MismatchError(Co2simError):
    """Ranks do different things: another schedule, or another collective at the same place."""


class NonFiniteError(Co2simError):
    """An inf or a NaN that would spread to other ranks. `round` is that of the average, if any."""

    def __init__(self, message: str, *, round: int | None = None) -> None:  # noqa: A002 - as below
        """Keep where."""
        super().__init__(message)
        self.round = round


class RankFailure(Co2simError):  # noqa: N818 - what it is called in the field
    """A rank died, hung or raised an error, so that others could not go on.

    `ranks` are those at fault, empty if unknown. `op` and `round` say what this rank was doing.
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
    ) -> None:
        """Keep who failed, and where this rank was."""
        super().__init__(message)
        self.ranks, self.op, self.round, self.said = ranks, op, round, said
        self.trace: Any = None


class TrainingError(Co2simError):
    """A training cannot go on: its loss is not finite."""


class CheckpointError(Co2simError):
    """A checkpoint cannot be written or read, or is of another training.

    `everywhere`: all ranks raise it alike, so that none needs to be told of it.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        """Keep who knows."""
        super().__init__(message)
        self.everywhere = everywhere


class DamagedError(CheckpointError):
    """A file of a checkpoint is not what was written."""
