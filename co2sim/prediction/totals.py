"""What a training of a number of tokens takes: time, GPU-hours, money, energy, carbon.

Pure functions over results. A step of local updates is worth less than one of DDP, so that these
methods train more tokens (`step_factors`). For the power see `power`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from co2sim.catalog import Fact
from co2sim.common.units import Watts
from co2sim.common.validation import between, fraction
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.contract import Bill
from co2sim.prediction import power, step_factors
from co2sim.prediction.counted import CountedFailures, counted_failures
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import (
    NO_GOAL,
    Goal,
    StepFactor,
    joined,
    scale_of,
    step_factor,
)

DAY = 86400.0
"""In seconds."""
_MAX_TOKENS = 1e18
_NOTHING = 1e-6
"""A goodput below which nothing gets done."""

NEEDED = ("price_per_gpu", *power.NEEDED, "grid_intensity")
"""The numbers of a cluster that totals need."""


def examples(cluster: Cluster) -> Mapping[str, str]:
    """An example of each, for a node as large as the cluster's."""
    others = {"price_per_gpu": "2.5 USD/h", "grid_intensity": "56 g/kWh"}
    return others | dict(power.examples(cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a training of a number of tokens, or of the model's units, takes.

    `tokens` are those that DDP would train, `trained` those that this strategy trains: times
    `factor`. `failures` are what is counted of them, None where none are. They leave `goodput`, a
    share of the time, for useful work; on average `useful_tokens_per_s` are trained. All amounts
    are `project` times those of one training, as a whole project takes more (`whole`). `cost` is in
    `currency`, and `bill` says what it is made of (`hardware.contract`); all three are None without
    a price. `power_w` is the average of all nodes at the meter: with what cooling and distribution
    take (PUE).

    `_low` and `_high` are the ends of an interval. That of days has the 90 % interval of the speed,
    with the range of the goodput at the same end, and the ranges of the step factor and of the
    project, joined in quadrature (`step_factors.joined`). The cost has the range of the price
    besides, and carbon that of the grid: these are offers and places, not errors, so that low goes
    with low. None where none is known; a factor that is a lower bound widens only the low end.
    `missing` are the numbers of the cluster without which a figure is None.
    """

    tokens: float
    trained: float
    factor: StepFactor
    failures: CountedFailures | None
    goodput: float
    project: float
    useful_tokens_per_s: float
    days: float
    days_low: float | None
    days_high: float | None
    gpu_hours: float
    cost: float | None
    cost_low: float | None
    cost_high: float | None
    currency: str | None
    bill: Bill | None
    power_w: Watts | None
    energy_kwh: float | None
    energy_kwh_low: float | None
    energy_kwh_high: float | None
    co2e_kg: float | None
    co2e_kg_low: float | None
    co2e_kg_high: float | None
    missing: tuple[str, ...] = ()


def totals(
    result: Result,
    cluster: Cluster,
    tokens: float,
    goal: Goal = NO_GOAL,
    failures: CountedFailures | None = None,
) -> Totals | None:
    """What it takes to train `tokens`; None where no step factor is known.

    `cluster` is that of the result, with its number of GPUs. All the time GPUs are paid for and
    draw the power of training, whatever part of it is useful: work that is lost is done again.
    Raises OptionError for tokens out of range, and where failures leave no time for work.
    """
    tokens = tokens_of(tokens)
    goodput = fraction("useful time", failures.useful) if failures else 1.0
    assert cluster.layout.world_size == result.gpus
    factor = step_factor(result.strategy, scale_of(result), goal)
    if factor is None:
        return None
    trained = tokens * factor.factor
    project = goal.project.factor
    days = trained / result.tokens_per_s / goodput / DAY * project
    shares = (failures.low, failures.high) if failures else (1.0, 1.0)
    least, most = (share / goodput for share in shares)
    shorter, longer = goal.project.ends
    ends = [
        joined(joined(_longer(result, speed, share), end), whole)
        for speed, share, end, whole in (
            (result.tokens_per_s_high, most, factor.ends[0], shorter),
            (result.tokens_per_s_low, least, factor.ends[1], longer),
        )
    ]
    billed = cluster.bill(days * DAY)
    cost = None if billed is None else billed.total
    watts, grid = power.power(result, cluster), cluster.grid_intensity
    energy = None if watts is None else watts / 1000 * days * 24
    carbon = None if energy is None or grid is None else energy * grid
    grids = cluster.grid_intensity_low, cluster.grid_intensity_high
    return Totals(
        tokens=tokens,
        trained=trained,
        factor=factor,
        failures=failures,
        goodput=goodput,
        project=project,
        useful_tokens_per_s=result.tokens_per_s * goodput,
        days=days,
        **_ends("days", days, ends),
        gpu_hours=days * 24 * result.gpus,
        cost=cost,
        **_costs(cluster, days, ends),
        currency=None if cost is None else cluster.currency,
        bill=billed,
        power_w=watts,
        energy_kwh=energy,
        **_ends("energy_kwh", energy, ends),
        co2e_kg=carbon,
        **_ends("co2e_kg", carbon, ends, grid, grids),
        missing=_missing(cluster),
    )


def days_without_failures(result: Result, tokens: float, goal: Goal = NO_GOAL) -> float:
    """The days of a training in which nothing fails; 0 where no step factor is known."""
    factor = step_factor(result.strategy, scale_of(result), goal)
    return 0.0 if factor is None else tokens * factor.factor / result.tokens_per_s / DAY


def totals_of(case: Question, result: Result, tokens: float, goal: Goal = NO_GOAL) -> Totals | None:
    """`totals` of a case and its result, with failures as `counted` says.

    Raises OptionError where they leave no time for work.
    """
    entries = case.load()
    cluster, model = entries[0].value, entries[1].value
    days = days_without_failures(result, tokens, goal)
    failures = counted_failures(result, cluster, model, days, optimizer=case.load_optimizer().value)
    return totals(result, cluster.resized(result.gpus), tokens, goal, failures)


def knee(options: Sequence[Totals]) -> int:
    """The place of the best trade of days against money: the least product of both.

    Any other option gains less of one, as a factor, than it loses of the other. Like the
    energy-delay product of circuits (Gonzalez and Horowitz, IEEE JSSC 31(9), 1996), it depends on
    no unit and on no other option. GPU-hours stand for money where nothing has a price.
    """
    return min(range(len(options)), key=lambda index: options[index].days * spent(options[index]))


def spent(option: Totals) -> float:
    """Money, or GPU-hours where there is no price."""
    return option.gpu_hours if option.cost is None else option.cost


def result_to_dict(
    case: Question, result: Result, goal: Goal, tokens: float | None
) -> dict[str, Any]:
    """A result as plain values for JSON, with `totals` (None: no step factor is known) for tokens.

    With `to_loss` where the goal has steps. `totals` has a `basis`: see `basis`.
    """
    values = step_factors.to_dict(result, goal)
    if tokens is None:
        return values
    needed = totals_of(case, result, tokens, goal)
    if needed is None:
        return values | {"totals": None}
    return values | {"totals": {**asdict(needed), "basis": [asdict(fact) for fact in basis(case)]}}


def basis(case: Question) -> tuple[Fact, ...]:
    """The numbers that totals rest on but for the speed: none of a cluster that is an object."""
    facts = case.load()[0].facts
    return tuple(f for f in facts if f.path in NEEDED or f.path.startswith("contract."))


def tokens_of(value: float) -> float:
    """The tokens to train, checked."""
    return between("tokens", value, 1, _MAX_TOKENS)


def _missing(cluster: Cluster) -> tuple[str, ...]:
    price = () if cluster.price_per_gpu is not None else ("price_per_gpu",)
    grid = () if cluster.grid_intensity is not None else ("grid_intensity",)
    return (*price, *power.missing(cluster), *grid)


def _longer(result: Result, speed: float | None, share: float) -> float | None:
    """How many times as long it takes at this speed, with this share of the goodput."""
    return None if speed is None else result.tokens_per_s / speed / max(share, _NOTHING)


def _costs(cluster: Cluster, days: float, times: list[float | None]) -> dict[str, float | None]:
    """The ends of the cost: what the ends of the time cost, at the ends of the price.

    Where only one of the two has a range, the other counts as exact.
    """
    ends: list[float | None] = []
    for time, price in zip(times, (cluster.price_low, cluster.price_high), strict=True):
        billed = cluster.bill(days * DAY * (1.0 if time is None else time), price)
        ends.append(None if billed is None or (time is None and price is None) else billed.total)
    return {"cost_low": ends[0], "cost_high": ends[1]}


def _ends(
    name: str,
    value: float | None,
    times: list[float | None],
    rate: float | None = None,
    rates: tuple[float | None, float | None] = (None, None),
) -> dict[str, float | None]:
    """The ends of a figure that grows with time and a rate, by name; `times` are relative to 1.

    Where only one of the two has a range, the other counts as exact.
    """
    ends: list[float | None] = []
    for time, end in zip(times, rates, strict=True):
        if value is None or (time is None and end is None):
            ends.append(None)
        else:
            scale = 1.0 if end is None or not rate else end / rate
            ends.append(value * (1.0 if time is None else time) * scale)
    return {f"{name}_low": ends[0], f"{name}_high": ends[1]}
