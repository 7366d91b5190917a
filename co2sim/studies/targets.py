"""What is to be reached: a figure of a result, and how much of it is enough."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from co2sim.common.errors import Co2simError, OptionError, UnitError, nearest
from co2sim.common.units import Unit, duration, number, parse, parse_price, scaled
from co2sim.common.validation import Quantity
from co2sim.hardware.cluster import Cluster
from co2sim.prediction.intervals import efficiency_ends, error_model
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import joined
from co2sim.prediction.totals import DAY
from co2sim.strategies import parse as parse_strategy
from co2sim.strategies import strategy_options
from co2sim.studies.grid import with_change

T = TypeVar("T")

End: TypeAlias = Literal["predicted", "low", "high"]
"""Of a figure: as predicted, or where tokens/s are at an end of their 90 % interval."""


@dataclass(frozen=True, slots=True)
class View:
    """A result, with what figures need beside it.

    `alone` is the result of the same case on one node. `tokens` is how many are to be trained, what
    steps of local updates are worth included. `goodput` is the useful share of the time, with the
    least and the most that it may be; None where nothing fails. `factor_ends` are the ends of what
    steps are worth, relative to it. `cluster` is that of the result, which says what time costs.
    """

    result: Result
    alone: Result | None = None
    tokens: float | None = None
    goodput: tuple[float, float, float] | None = None
    factor_ends: tuple[float, float] = (1.0, 1.0)
    cluster: Cluster | None = None

    @property
    def useful(self) -> float:
        """The useful share of the time."""
        return self.goodput[0] if self.goodput else 1.0

    def at(self, end: End) -> "View":
        """The view where tokens/s are at that end; itself where there is no interval."""
        result = self.result
        value = {"low": result.tokens_per_s_low, "high": result.tokens_per_s_high}.get(end)
        if value is None:
            return self
        goodput = self.goodput
        if goodput:
            goodput = ({"low": goodput[1], "high": goodput[2]}[end], *goodput[1:])
        ratio = value / result.tokens_per_s
        tokens, wider = self.tokens, self.factor_ends[1 if end == "low" else 0]
        if tokens:  # as many more, or less, as join the ends of both
            time = self.useful / ratio / (goodput[0] if goodput else 1.0)
            tokens *= (joined(time, wider) or time) / time
        billion, usd = result.cost_per_billion_tokens, result.usd_per_billion_tokens
        moved = replace(
            result,
            tokens_per_s=value,
            tokens_per_s_per_gpu=result.tokens_per_s_per_gpu * ratio,
            step_time_s=result.step_time_s / ratio,
            mfu=result.mfu * ratio,
            exposed_comm_s=result.round_time_s * max(0.0, 1 - (1 - result.exposed_share) * ratio),
            cost_per_billion_tokens=None if billion is None else billion / ratio,
            usd_per_billion_tokens=None if usd is None else usd / ratio,
        )
        return replace(self, result=moved, goodput=goodput, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure: its name as a text, its unit, whether more is better, and how it is read off.

    `usual` are the values asked for by default. `needs` says what a view must have. A ratio has
    `ends`: where what its two sides do not share is worst, and where it is best.
    """

    words: str
    unit: Literal["share", "s", "days", "money", ""]
    more: bool
    of: Callable[[View], float]
    usual: tuple[float, ...] = ()
    needs: Literal["", "alone", "tokens", "failures"] = ""
    ends: Callable[[View], tuple[float, float] | None] | None = None

    def at(self, view: View, end: End) -> float:
        """The figure at an end: of its interval for a ratio, else of that of tokens/s."""
        if self.ends is None or end == "predicted":
            return self.of(view.at(end))
        ends = self.ends(view)
        return self.of(view) if ends is None else ends[0 if end == "low" else 1]

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


def _efficiency_ends(view: View) -> tuple[float, float] | None:
    assert view.alone is not None
    return efficiency_ends(view.result, view.alone)


def _exposed_ends(view: View) -> tuple[float, float] | None:
    """The larger share first."""
    scaling, result = error_model().scaling, view.result
    if scaling is None or result.tokens_per_s_low is None:
        return None
    low, high = scaling.waiting(result.exposed_share, result.nodes)
    return high, low


def _utilization_ends(view: View) -> tuple[float, float] | None:
    ends = _exposed_ends(view)
    return ends and (1 - ends[0], 1 - ends[1])


def _seconds(view: View) -> float:
    assert view.tokens is not None
    return view.tokens / view.result.tokens_per_s / view.useful


def _cost(view: View) -> float:
    assert view.cluster is not None
    billed = view.cluster.bill(_seconds(view))
    if billed is None:
        raise OptionError(_NO_PRICE)
    return billed.total


_NO_PRICE = "the cluster has no price; give one: --set price_per_gpu='2.5 USD/h', say"


def _billion(view: View) -> float:
    cost = view.result.cost_per_billion_tokens
    if cost is None:
        raise OptionError(_NO_PRICE)
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
        ends=_efficiency_ends,
    ),
    "utilization": Metric(
        words="round time with free communication, relative to the round time",
        unit="share",
        more=True,
        of=lambda view: view.result.efficiency_vs_free_communication,
        usual=_TABLE,
        ends=_utilization_ends,
    ),
    "exposed": Metric(
        words="share of a round that waits for communication",
        unit="share",
        more=False,
        of=lambda view: view.result.exposed_share,
        usual=(0.5, 0.2, 0.1, 0.05, 0.01),
        ends=_exposed_ends,
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

    def met(self, figure: float | None, value: float) -> bool:
        """Whether a figure is enough; None is not."""
        if figure is None:
            return False
        return figure >= value if self.metric.more else figure <= value


def target_of(text: str) -> Target:
    """A target from a text such as "efficiency=90%", "days=30", "step=1.2 s", "fits".

    Several values are separated by commas. Without a value the usual ones are meant. Raises
    OptionError for what is unknown, has no value, or is out of range.
    """
    given, separator, rest = text.partition("=")
    name, fixed = ALIASES.get(given.strip(), (given.strip(), None))
    if name not in METRICS:
        near = nearest(given.strip(), [*METRICS, *ALIASES])
        raise OptionError(f"--for {text!r}: nothing to reach is called {given.strip()!r}; {near}")
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
            amount = parse(part, "s")
        except UnitError as error:
            raise OptionError(f"--for {text!r}: {error}") from None
    else:
        bare = part.removesuffix("%").removesuffix("days").strip() if part else part
        try:
            amount = float(bare) / (100 if part.endswith("%") else 1)
        except ValueError:
            raise OptionError(f"{what} is no number such as {_example(metric)}") from None
    if not math.isfinite(amount) or amount <= 0:
        raise OptionError(f"{what} must be above 0")
    if part.endswith("%") and metric.unit != "share":
        raise OptionError(f"{what} is a share; it must be a number such as {_example(metric)}")
    if metric.unit == "share" and amount > 1 and not part.endswith("%"):
        raise OptionError(f"{what} is above 1; write {part}% for a share in per cent")
    return amount


def _example(metric: Metric) -> str:
    return {"share": "90%", "s": "'1.2 s'", "days": "30", "money": "50000", "": "1e6"}[metric.unit]


EXAMPLES = "inter.bandwidth, inter.latency, strategy.tau, strategy.delay, gpus, micro_batch"

_COUNTS: Mapping[str, int] = {
    "gpus": 65_536,
    "micro_batch": 4096,
    "accumulation": 4096,
    "global_batch": 1_048_576,
}
"""Numbers of a case, and how far they are searched by default."""

_SEARCHED: Mapping[Unit, tuple[float, float]] = {
    "B/s": (1e6 / 8, 1e14 / 8),
    "s": (1e-8, 10.0),
    "B": (1e6, 1e13),
    "FLOP/s": (1e11, 1e17),
    "USD/s": (1e-3 / 3600, 1e3 / 3600),
}
"""By default: 1 Mbit/s to 100 Tbit/s, 10 ns to 10 s, 1 MB to 10 TB, and so on."""

_MAX_WHOLE = 1000
"""Of other whole numbers, by default: a round of that many steps is still simulated in seconds."""

_MIN_SHARE = 1e-3
_MINUTE, _DAY = 60.0, 86400.0
_PER_DECADE = 4
_MAX_POINTS = 129
_DIGITS = 3
"""Of a value for people."""
_ROUNDING = 1e-9
"""Of a digit, or of a value: what a calculation may add to it."""
_ALL = 8
"""Whole numbers up to here are all looked at."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A number of a case: its path, as `grid.vary` takes it, and the range that is searched.

    Values are `low`, `low + step`, `low + 2 step` and so on up to `high`; with a step of 0 all
    between. Both ends are above 0. A price is in `currency` per second.
    """

    path: str
    unit: Unit
    low: float
    high: float
    step: int = 0
    currency: str = "USD"

    @property
    def links(self) -> bool:
        """Whether it is a number of the hardware, of which more is better, or worse, throughout."""
        return not self.step and self.path.startswith(("inter.", "wan.", "intra.", "gpu."))

    def points(self) -> list[float]:
        """Values all over the range, evenly on a log scale."""
        count = math.ceil(_PER_DECADE * math.log10(self.high / self.low)) + 1
        count = min(max(count, 5), _MAX_POINTS)
        spread = np.geomspace(self.low, self.high, count)
        if not self.step:
            return [self.low, *map(float, spread[1:-1]), self.high]
        last = self.place(self.high)
        places = {*range(min(_ALL, last + 1)), *map(self.place, spread), last}
        return [self.low + step * self.step for step in sorted(places)]

    def place(self, value: float) -> int:
        """How many steps a value is behind the lowest, rounded down."""
        return int((value - self.low + 1e-9) // self.step) if self.step else 0

    def as_written(self, case: Question, value: float) -> Question:
        """The case with this value, as people write it in a command."""
        if isinstance(case.cluster, Cluster):
            return self.at(case, value)
        return with_change(case, self.path, self.written(value))

    def at(self, case: Question, value: float) -> Question:
        """The case with this value."""
        in_case = self.path in _COUNTS or self.path.startswith(("strategy.", "model."))
        if isinstance(case.cluster, Cluster) and not in_case:
            cluster = case.cluster
            if self.path == "price_per_gpu":  # another price has not the range of the one given
                cluster = replace(cluster, price_low=None, price_high=None)
            return replace(case, cluster=replaced(cluster, self.path, value))
        return with_change(case, self.path, self.text(value))

    def rounded(self, value: float, *, up: bool) -> float:
        """The value with the three digits that are shown, no smaller, or no greater."""
        if self.step:
            return value
        unit = self._shown_unit
        last = 10.0 ** (math.floor(math.log10(value / unit)) - _DIGITS + 1)
        count = value / unit / last
        whole = math.ceil(count - _ROUNDING) if up else math.floor(count + _ROUNDING)
        return whole * last * unit

    @property
    def _shown_unit(self) -> float:
        """In SI units, but for decimal prefixes."""
        if self.unit == "B/s" and self.path.startswith(("inter.", "wan.")):
            return 1 / 8
        return 1 / 3600 if self.unit == "USD/s" else 1.0

    def written(self, value: float) -> str:
        """The value as people write it in a command: as it is shown, where that is exact."""
        shown = self.shown(value)
        if self.step or self.unit in {"USD/s", ""}:
            return self.text(value)
        try:
            exact = math.isclose(parse(shown, self.unit), value, rel_tol=_ROUNDING)
        except UnitError:
            exact = False
        return shown if exact else self.text(value)

    def text(self, value: float) -> str:
        """The value as `--set` takes it, with all its digits."""
        if self.step:
            return str(round(value))
        if self.unit == "USD/s":
            return f"{value * 3600!r} {self.currency}/h"
        return f"{value!r} {self.unit}".strip()

    def shown(self, value: float) -> str:
        """The value for people: three significant digits."""
        if self.step:
            return f"{round(value):,}"
        if self.unit == "USD/s":
            return f"{number(value * 3600)} {self.currency}/h"
        if self.unit == "B/s" and self.path.startswith(("inter.", "wan.")):
            return scaled(8 * value, "bit/s")
        if self.unit == "s":
            return duration(value) if value < _MINUTE else f"{number(value / _DAY)} days"
        return scaled(value, self.unit) if self.unit else number(value)


def replaced(thing: T, path: str, value: float) -> T:
    """A copy of a frozen dataclass with the value at a dotted path replaced.

    An efficiency that is a table becomes the same at every size.
    """
    first, _, rest = path.partition(".")
    if not is_dataclass(thing) or first not in {field.name for field in fields(thing)}:
        raise OptionError(f"{type(thing).__name__} has no {first!r}")
    old = getattr(thing, first)
    new: Any = replaced(old, rest, value) if rest else value
    if isinstance(old, tuple):
        new = tuple((size, value) for size, _ in old)
    return replace(thing, **{first: new})  # type: ignore[type-var]


def value_at(cluster: Cluster, path: str) -> float | None:
    """The number at a dotted path, of a table the first; None where the cluster has none."""
    value: Any = cluster
    for part in path.split("."):
        value = getattr(value, part, None)
    if isinstance(value, tuple):
        value = value[0][1] if value else None
    return None if value is None else float(value)


def axis_of(case: Question, path: str, low: str | None = None, high: str | None = None) -> Axis:
    """The axis of a path. `low` and `high` are texts with units; by default a wide range.

    Raises OptionError for what is no number, and for a range that has no values.
    """
    axis = _declared(case, path)
    ends = {}
    for name, text in (("low", low), ("high", high)):
        if text is not None:
            ends[name] = _read(axis, f"the {'lowest' if name == 'low' else 'highest'}", text)
    axis = replace(axis, **ends)  # type: ignore[arg-type]
    if axis.low >= axis.high:
        raise OptionError(
            f"{path} is searched from {axis.shown(axis.low)} to {axis.shown(axis.high)}; the"
            " first must be below the second"
        )
    return axis


def _read(axis: Axis, which: str, text: str) -> float:
    what = f"{which} {axis.path}"
    if axis.unit == "USD/s":
        value, currency = parse_price(text)
        if currency != axis.currency:
            raise OptionError(f"{what} is {text!r}; the cluster's prices are in {axis.currency}")
    else:
        value = parse(text, axis.unit)
    if value <= 0:
        raise OptionError(f"{what} is {text!r}; it must be above 0")
    if axis.step and (value < axis.low or (value - axis.low) % axis.step):
        several = "a whole number" if axis.step == 1 else f"{axis.step}, or a multiple of it"
        raise OptionError(f"{what} is {text!r}; it must be {several}, at least {axis.low:g}")
    return value


def _declared(case: Question, path: str) -> Axis:
    """The axis with its default range."""
    cluster = case.load()[0].value
    if path == "gpus":
        together = case.in_stage * case.pp, case.pp * case.expert_gpus
        full = math.lcm(cluster.gpus_per_node * cluster.sites, *together)
        return Axis(path, "", full, max(_COUNTS[path] // full, 2) * full, full)
    if path in _COUNTS:
        return Axis(path, "", 1, _COUNTS[path], 1)
    if path.startswith("strategy."):
        return _option(case, path)
    if path.startswith("model."):
        if _takes_any_text(case, path):
            raise _no_number(path)
        return Axis(path, "", 1, 1_000_000, 1)
    base, quantity = _quantity(path)
    if base is int:
        return Axis(path, "", 1, quantity.most or _MAX_WHOLE, 1)
    low, high = _SEARCHED.get(quantity.unit, (_MIN_SHARE, 1 / _MIN_SHARE))
    if path.startswith(("failures.", "contract.")) and quantity.unit == "s":
        low, high = _MINUTE, 1000 * 365.25 * _DAY
    high = min(high, quantity.most or high)
    low = max(low, quantity.least or low)
    return Axis(path, quantity.unit, low, high, currency=cluster.currency)


def _takes_any_text(case: Question, path: str) -> bool:
    try:
        with_change(case, path, "any text").load()
    except Co2simError:
        return False
    return True


def _no_number(path: str) -> OptionError:
    return OptionError(f"{path} is no number; known: {EXAMPLES}, or any other number")


def _option(case: Question, path: str) -> Axis:
    """The axis of an option of the strategy."""
    strategy = case.strategy
    if isinstance(strategy, str):
        strategy = parse_strategy(strategy)
    hints = get_type_hints(type(strategy))
    options = [option for option, _, _ in strategy_options(type(strategy))]
    name = path.removeprefix("strategy.")
    if name not in options:
        near = nearest(name, options)
        raise OptionError(f"{strategy.name} has no option {name!r}; {near}")
    kinds = {hints[name], *get_args(hints[name])}
    if int in kinds:
        return Axis(path, "", 1, _MAX_WHOLE, 1)
    if float in kinds:
        usual = getattr(strategy, name)
        if isinstance(usual, float | int) and usual > 1:
            return Axis(path, "", usual * _MIN_SHARE, usual / _MIN_SHARE)
        return Axis(path, "", _MIN_SHARE, 1.0)
    raise _no_number(path)


def _quantity(path: str) -> tuple[Any, Quantity]:
    """What the classes of clusters declare of the number at a path."""
    kind: Any = Cluster
    hint: Any = None
    for part in path.split("."):
        if get_origin(kind) is not None:  # a mapping, such as the peaks by precision
            hint = get_args(kind)[-1]
        else:
            hints = get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {}
            if part not in hints:
                raise OptionError(
                    f"nothing to solve for is called {path!r}; known: {EXAMPLES}, or any other"
                    " number of a cluster, a model or a strategy"
                )
            hint = hints[part]
        kind = _table(hint)
    for option in (hint, *get_args(hint)):
        if get_origin(option) is Annotated:
            base, quantity, *_ = get_args(option)
            if isinstance(quantity, Quantity):
                return base, quantity
    raise _no_number(path)


def _table(hint: Any) -> Any:
    """The dataclass, or the mapping, that a field holds."""
    for option in (hint, *get_args(hint)):
        if is_dataclass(option) or get_origin(option) in {Mapping, dict}:
            return option
    return None
