"""What is to be reached: a figure of a result, and how much of it is enough."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from co2sim.errors import OptionError, UnitError, nearest
from co2sim.result import Result
from co2sim.totals import DAY
from co2sim.units import duration, number, parse

End: TypeAlias = Literal["predicted", "low", "high"]
"""Of a figure: as predicted, or where tokens/s are at an end of their 90 % interval."""


@dataclass(frozen=True, slots=True)
class View:
    """A result, with what figures need beside it.

    `alone` is the result of the same case on one node. `tokens` is how many are to be trained, what
    steps of local updates are worth included. `goodput` is the useful share of the time, with the
    least and the most that it may be; None where nothing fails.
    """

    result: Result
    alone: Result | None = None
    tokens: float | None = None
    goodput: tuple[float, float, float] | None = None

    @property
    def useful(self) -> float:
        """The useful share of the time."""
        return self.goodput[0] if self.goodput else 1.0

    def at(self, end: End) -> "View":
        """The view where tokens/s are at that end; itself where there is no interval."""
        found = self.result
        value = {"low": found.tokens_per_s_low, "high": found.tokens_per_s_high}.get(end)
        if value is None:
            return self
        goodput = self.goodput
        if goodput:
            goodput = ({"low": goodput[1], "high": goodput[2]}[end], *goodput[1:])
        ratio = value / found.tokens_per_s
        billion, usd = found.cost_per_billion_tokens, found.usd_per_billion_tokens
        moved = replace(
            found,
            tokens_per_s=value,
            tokens_per_s_per_gpu=found.tokens_per_s_per_gpu * ratio,
            step_time_s=found.step_time_s / ratio,
            mfu=found.mfu * ratio,
            exposed_comm_s=found.round_time_s * max(0.0, 1 - (1 - found.exposed_share) * ratio),
            cost_per_billion_tokens=None if billion is None else billion / ratio,
            usd_per_billion_tokens=None if usd is None else usd / ratio,
        )
        return replace(self, result=moved, goodput=goodput)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure: its name in words, its unit, whether more is better, and how it is read off.

    `usual` are the values asked for by default. `needs` says what a view must have.
    """

    words: str
    unit: Literal["share", "s", "days", "money", ""]
    more: bool
    of: Callable[[View], float]
    usual: tuple[float, ...] = ()
    needs: Literal["", "alone", "tokens", "failures"] = ""

    def shown(self, value: float, currency: str | None = None) -> str:
        """A value for people."""
        if self.unit == "share":
            return f"{100 * value:.4g} %"
        if self.unit == "money":
            return f"{value:,.2f} {currency or 'USD'}"
        if self.unit == "days":
            return f"{value:.4g} days"
        return duration(value) if self.unit == "s" else number(value)


def _efficiency(view: View) -> float:
    assert view.alone is not None
    return view.result.tokens_per_s_per_gpu / view.alone.tokens_per_s_per_gpu


def _seconds(view: View) -> float:
    assert view.tokens is not None
    return view.tokens / view.result.tokens_per_s / view.useful


def _cost(view: View) -> float:
    return _seconds(view) * view.result.tokens_per_s / 1e9 * _billion(view)


def _billion(view: View) -> float:
    cost = view.result.cost_per_billion_tokens
    if cost is None:
        raise OptionError(
            "the cluster has no price; give one: --set price_per_gpu='2.5 USD/h', say"
        )
    return cost


_TABLE = (0.5, 0.8, 0.9, 0.95, 0.99)

METRICS: Mapping[str, Metric] = {
    "efficiency": Metric(
        words="throughput per GPU, relative to one node",
        unit="share",
        more=True,
        of=_efficiency,
        usual=_TABLE,
        needs="alone",
    ),
    "utilization": Metric(
        words="round time with free communication, relative to the round time",
        unit="share",
        more=True,
        of=lambda view: view.result.efficiency_vs_free_communication,
        usual=_TABLE,
    ),
    "exposed": Metric(
        words="share of a round that waits for communication",
        unit="share",
        more=False,
        of=lambda view: view.result.exposed_share,
        usual=(0.5, 0.2, 0.1, 0.05, 0.01),
    ),
    "mfu": Metric(
        words="model FLOP utilization", unit="share", more=True, of=lambda view: view.result.mfu
    ),
    "tokens_per_s": Metric(
        words="tokens/s of all GPUs", unit="", more=True, of=lambda v: v.result.tokens_per_s
    ),
    "tokens_per_s_per_gpu": Metric(
        words="tokens/s of a GPU", unit="", more=True, of=lambda v: v.result.tokens_per_s_per_gpu
    ),
    "step": Metric(
        words="time of a step", unit="s", more=False, of=lambda view: view.result.step_time_s
    ),
    "days": Metric(
        words="days to train all tokens",
        unit="days",
        more=False,
        of=lambda view: _seconds(view) / DAY,
        needs="tokens",
    ),
    "cost": Metric(
        words="cost of training all tokens", unit="money", more=False, of=_cost, needs="tokens"
    ),
    "cost_per_billion_tokens": Metric(
        words="cost of a billion tokens", unit="money", more=False, of=_billion
    ),
    "goodput": Metric(
        words="share of the time that is useful work, where parts fail",
        unit="share",
        more=True,
        of=lambda view: view.useful,
        usual=_TABLE,
        needs="failures",
    ),
    "memory": Metric(
        words="share of a GPU's memory that is used",
        unit="share",
        more=False,
        of=lambda view: view.result.memory_bytes_per_gpu["total"] / view.result.gpu_memory_bytes,
        usual=(1.0,),
    ),
}
"""What can be asked for. In tokens, or in what the model calls its units."""

ALIASES: Mapping[str, tuple[str, float | None]] = {
    "fits": ("memory", 1.0),
    "usd": ("cost", None),
    "usd_per_billion_tokens": ("cost_per_billion_tokens", None),
}
"""Other names, with the value that they mean."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure, and values of it that are enough: at least or at most, as `metric.more` says.

    `dollars` says that its values are in USD, whatever the prices of the cluster are in.
    """

    name: str
    values: tuple[float, ...]
    dollars: bool = False

    @property
    def metric(self) -> Metric:
        """The figure."""
        return METRICS[self.name]

    def met(self, found: float | None, value: float) -> bool:
        """Whether a figure is enough; None is not."""
        if found is None:
            return False
        return found >= value if self.metric.more else found <= value


def target_of(text: str) -> Target:
    """A target from a text such as "efficiency=90%", "days=30", "step=1.2 s", "fits".

    Several values are separated by commas. Without a value the usual ones are meant. Raises
    OptionError for what is unknown, has no value, or is out of range.
    """
    given, separator, rest = text.partition("=")
    name, fixed = ALIASES.get(given.strip(), (given.strip(), None))
    if name not in METRICS:
        known = nearest(given.strip(), [*METRICS, *ALIASES])
        raise OptionError(f"--for {text!r}: nothing to reach is called {given.strip()!r}; {known}")
    if fixed is not None and separator:
        raise OptionError(f"--for {text!r}: {given.strip()} takes no value")
    metric = METRICS[name]
    if separator:
        values = tuple(_value(metric, text, part.strip()) for part in rest.split(","))
        if len(set(values)) < len(values):
            raise OptionError(f"--for {text!r}: a value is given twice")
    else:
        values = metric.usual if fixed is None else (fixed,)
    if not values:
        raise OptionError(f"--for {text!r} needs a value, such as {name}={_example(metric)}")
    return Target(name, values, dollars=given.strip().startswith("usd"))


def _value(metric: Metric, text: str, part: str) -> float:
    what = f"--for {text!r}: {part!r}"
    if metric.unit == "s":
        try:
            found = parse(part, "s")
        except UnitError as error:
            raise OptionError(f"--for {text!r}: {error}") from None
    else:
        bare = part.removesuffix("%").removesuffix("days").strip() if part else part
        try:
            found = float(bare) / (100 if part.endswith("%") else 1)
        except ValueError:
            raise OptionError(f"{what} is no number such as {_example(metric)}") from None
    if not math.isfinite(found) or found <= 0:
        raise OptionError(f"{what} must be above 0")
    if part.endswith("%") and metric.unit != "share":
        raise OptionError(f"{what} is a share; it must be a number such as {_example(metric)}")
    if metric.unit == "share" and found > 1 and not part.endswith("%"):
        raise OptionError(f"{what} is above 1; write {part}% for a share in per cent")
    return found


def _example(metric: Metric) -> str:
    return {"share": "90%", "s": "'1.2 s'", "days": "30", "money": "50000", "": "1e6"}[metric.unit]
