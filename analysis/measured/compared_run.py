"""A run of a page: its errors by op, their causes, and the answer in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from analysis.measured.attribution import AGREES, Cause
from analysis.measured.comparison import RunComparison
from analysis.measured.op_errors import OpError, by_label, causes
from co2sim.units import duration, percent


@dataclass(frozen=True)
class ComparedRun:
    """A run under a name that no other run of the page has."""

    name: str
    run: RunComparison

    @cached_property
    def ops(self) -> list[OpError]:
        """Errors by op."""
        return by_label(self.run)

    @cached_property
    def causes(self) -> dict[Cause, float]:
        """Shares of causes, the largest first."""
        return causes(self.ops)

    @property
    def measured(self) -> float:
        """Seconds of a round."""
        return float(self.run.measured["round_time_s"])

    @property
    def sentence(self) -> str:
        """The whole answer about this run."""
        cause, share = next(iter(self.causes.items()))
        why = (
            f"the largest cause of the errors of its ops is {cause.words} ({share:.0%})"
            if share
            else f"no op is off by more than {AGREES:.0%}"
        )
        return (
            f"{self.name}: a round took {duration(self.measured)}, predicted"
            f" {duration(self.run.predicted.round_time_s)}"
            f" ({percent(self.run.round_time_error, 1)}); {why}.{self._drift}"
        )

    @property
    def _drift(self) -> str:
        """How far the processors were from what the cluster says, if that is more than a little."""
        speed, error = self.run.speed, self.run.at_speed_error
        if speed is None or error is None or abs(speed - 1) < AGREES:
            return ""
        return (
            f" Large matrix products were {abs(speed - 1):.0%}"
            f" {'faster' if speed > 1 else 'slower'} in the run than its cluster says; at that"
            f" speed the error is {percent(error, 1)}."
        )


def named(comparisons: Sequence[RunComparison]) -> list[ComparedRun]:
    """Each run under its name, with a number where another one has it already."""
    found: dict[str, ComparedRun] = {}
    for run in comparisons:
        names = (run.name if n == 1 else f"{run.name} ({n})" for n in count(1))
        name = next(name for name in names if name not in found)
        found[name] = ComparedRun(name, run)
    return list(found.values())
