"""What is wanted of a training, and how an option answers it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from co2sim.case import Case
from co2sim.cluster import Cluster
from co2sim.errors import OptionError
from co2sim.result import Result
from co2sim.step_factors import NO_GOAL, Goal
from co2sim.totals import Totals, tokens_of

Want: TypeAlias = Literal["cheapest", "fastest", "least-energy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of a training of `tokens` (those that ddp would train), within limits.

    `budget` is in the currency of the clusters, `deadline` in days, `power` in W at the meter.
    """

    want: Want
    tokens: float
    budget: float | None = None
    deadline: float | None = None
    power: float | None = None
    goal: Goal = NO_GOAL

    def __post_init__(self) -> None:
        """Refuse limits that nothing can meet."""
        tokens_of(self.tokens)
        for name in ("budget", "deadline", "power"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"the {name} is {value:g}; it must be above 0")

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return (self.budget, self.deadline, self.power) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate that was simulated, on its sized cluster."""

    case: Case
    cluster: Cluster
    result: Result
    totals: Totals

    @property
    def spent(self) -> float:
        """Money; GPU-hours where nothing has a price."""
        return self.totals.gpu_hours if self.totals.cost is None else self.totals.cost

    def score(self, want: Want) -> float:
        """What is to be least: money (or GPU-hours), days, or kWh."""
        if want == "fastest":
            return self.totals.days
        if want == "cheapest":
            return self.spent
        if self.totals.energy_kwh is None:
            raise OptionError(f"the power of {self.cluster.name!r} is not known")
        return self.totals.energy_kwh

    def ends(self, want: Want) -> tuple[float, float] | None:
        """The 90 % interval of the score; None where there is none."""
        found = self.totals
        pairs = {
            "fastest": (found.days_low, found.days_high),
            "cheapest": (found.cost_low, found.cost_high),
            "least-energy": (found.energy_kwh_low, found.energy_kwh_high),
        }
        low, high = pairs[want]
        if low is not None and high is not None:
            return low, high
        if found.days_low is None or found.days_high is None:
            return None
        ratio = self.score(want) / found.days
        return found.days_low * ratio, found.days_high * ratio

    def within(self, wanted: Wanted) -> bool:
        """Whether it is within all limits; what is not known is not."""
        limits = (
            (wanted.deadline, self.totals.days),
            (wanted.budget, self.totals.cost),
            (wanted.power, self.totals.power_w),
        )
        return all(most is None or (value is not None and value <= most) for most, value in limits)
