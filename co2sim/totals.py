"""What it takes to train so many tokens: time, GPU-hours, money, energy, carbon.

Pure functions over results. A step of local updates is worth less than one of DDP, so that these
methods train more tokens (`step_factors`).
"""

from dataclasses import dataclass

from co2sim.cluster import Cluster
from co2sim.ranges import between, fraction
from co2sim.result import Result
from co2sim.step_factors import NO_GOAL, Goal, StepFactor, step_factor

DAY = 86400.0
"""In seconds."""
_MOST_TOKENS = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What it takes to train so many tokens, or what the model calls its units.

    `tokens` are those that DDP would train, `trained` those that this strategy trains: times
    `factor`. `goodput` is the share of the time that is useful work; 1 where failures are not
    counted. The ends `_low` and `_high` are those of a 90 % interval of the speed, with the range
    of a price where one is known; None where no interval is known. `cost` is in `currency`; both
    are None without a price. `power_w` is the average of all nodes at the meter: with what cooling
    and distribution take (PUE). What rests on a number that is not known is None.
    """

    tokens: float
    trained: float
    factor: StepFactor
    goodput: float
    days: float
    days_low: float | None
    days_high: float | None
    gpu_hours: float
    cost: float | None
    cost_low: float | None
    cost_high: float | None
    currency: str | None
    power_w: float | None
    energy_kwh: float | None
    energy_kwh_low: float | None
    energy_kwh_high: float | None
    co2e_kg: float | None
    co2e_kg_low: float | None
    co2e_kg_high: float | None


def totals(
    result: Result,
    cluster: Cluster,
    tokens: float,
    goal: Goal = NO_GOAL,
    goodput: float = 1.0,
) -> Totals | None:
    """What it takes to train `tokens`; None where no step factor is known.

    `cluster` is the one of the result, resized to its GPUs. Raises OptionError for tokens or a
    goodput out of range.
    """
    tokens_of(tokens)
    fraction("goodput", goodput)
    assert cluster.layout.world_size == result.gpus
    factor = step_factor(result.strategy, goal)
    if factor is None:
        return None
    trained = tokens * factor.factor

    def days_at(speed: float | None) -> float | None:
        return None if speed is None else trained / speed / goodput / DAY

    days = trained / result.tokens_per_s / goodput / DAY
    low, high = days_at(result.tokens_per_s_high), days_at(result.tokens_per_s_low)
    billion = result.cost_per_billion_tokens
    cost = None if billion is None else billion * trained / 1e9 / goodput

    def cost_at(end: float | None) -> float | None:
        return None if cost is None or end is None else cost * end / days

    return Totals(
        tokens=tokens,
        trained=trained,
        factor=factor,
        goodput=goodput,
        days=days,
        days_low=low,
        days_high=high,
        gpu_hours=days * 24 * result.gpus,
        cost=cost,
        cost_low=cost_at(low),
        cost_high=cost_at(high),
        currency=None if cost is None else result.currency,
        power_w=None,
        energy_kwh=None,
        energy_kwh_low=None,
        energy_kwh_high=None,
        co2e_kg=None,
        co2e_kg_low=None,
        co2e_kg_high=None,
    )


def tokens_of(value: float) -> float:
    """The tokens to train, checked."""
    return between("tokens", value, 1, _MOST_TOKENS)
