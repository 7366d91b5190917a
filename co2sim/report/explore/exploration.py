"""What is asked: strategies with one model on one cluster, and the sliders of its numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from co2sim.catalog import Contents
from co2sim.common.cli import refuse_twice
from co2sim.common.errors import Co2simError, OptionError, UnitError
from co2sim.common.units import parse, parse_price
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.failures import PARTS, Failures
from co2sim.prediction import power
from co2sim.prediction.counted import counted_failures
from co2sim.prediction.question import AUTO, Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, scale_of, step_factor
from co2sim.prediction.totals import tokens_of
from co2sim.report.charts import parts
from co2sim.strategies import Strategy
from co2sim.strategies import parse as parse_strategy
from co2sim.strategies.step import title
from co2sim.studies.grid import gpu_counts, settings, strategy_title, with_changes
from co2sim.studies.targets import Axis, axis_of
from co2sim.training.memory import GIB

MAX_STRATEGIES = 12
"""What a chart can tell apart."""

Settings = Mapping[str, str]
"""Texts by paths, as `grid.vary` takes them."""


@dataclass(frozen=True)
class Exploration:
    """A job, whose strategy is still open, the strategies to compare, and the tokens to train.

    Raises OptionError for none or more than `MAX_STRATEGIES` strategies, for one that is given
    twice, and for one that cannot be read.
    """

    job: Question
    strategies: tuple[str, ...]
    tokens: float | None = None
    goal: Goal = NO_GOAL

    def __post_init__(self) -> None:
        """Refuse what no page can show."""
        if not 0 < len(self.strategies) <= MAX_STRATEGIES:
            raise OptionError(
                f"{len(self.strategies)} strategies are given; it must be 1 to {MAX_STRATEGIES}"
            )
        refuse_twice("strategy", map(strategy_title, self.strategies))
        if self.tokens is not None:
            tokens_of(self.tokens)

    @cached_property
    def parsed(self) -> tuple[Strategy, ...]:
        """The strategies, as objects."""
        return tuple(map(parse_strategy, self.strategies))

    @property
    def titles(self) -> tuple[str, ...]:
        """The strategies, as results name them."""
        return tuple(map(title, self.parsed))

    def takes(self, index: int, path: str) -> bool:
        """Whether a path means something for the strategy at this place."""
        if not path.startswith("strategy."):
            return True
        return hasattr(self.parsed[index], path.removeprefix("strategy."))

    def title(self, index: int, settings: Settings) -> str:
        """The strategy at this place with the options that are set; as it was given if none is."""
        try:
            strategy = self.case(index, settings).strategy
            return strategy_title(strategy)
        except OptionError:
            return self.titles[index]

    def case(self, index: int, settings: Settings) -> Question:
        """The case of the strategy at this place, with all settings that it takes."""
        changes = {path: text for path, text in settings.items() if self.takes(index, path)}
        return with_changes(replace(self.job, strategy=self.strategies[index]), changes)

    def loaded(self, index: int, settings: Settings) -> Question:
        """As `case`, with what stands in its files: they are read once."""
        return self.case(index, settings).inlined(self._files)

    @cached_property
    def _files(self) -> dict[tuple[object, ...], Contents | None]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one case. Shares are of a round; `memory` is in GiB on a GPU, which has `capacity`.

    `memory_low` and `memory_high` are the ends of its 90 % interval (None: not known), and
    `memory_fit` says whether it fits.

    `slowest` and `fastest` are the ends of the 90 % interval, as shares of `tokens_per_s`. `factor`
    is how many times the tokens of DDP it trains; None if not known. `factor_low` and `factor_high`
    are the ends of its range, relative to it. `watts` is the power of all
    nodes at the meter, None if not known. `strategy` is named with the options that it has there.
    A step has `samples` of `batch` tokens in all; a GPU takes them in `micro_steps` of
    `micro_batch`, and repeats what `recompute` says.
    """

    strategy: str
    samples: int | None
    batch: float
    micro_batch: int
    micro_steps: int
    recompute: str
    precision: str
    stack: str
    tokens_per_s: float
    slowest: float | None
    fastest: float | None
    exposed: float
    behind: float
    slower: float
    memory: float
    memory_low: float | None
    memory_high: float | None
    memory_fit: str
    capacity: float
    fits: bool
    factor: float | None
    factor_low: float | None
    factor_high: float | None
    watts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The share of the time that failures take, and the ends of its range; 1: nothing gets done."""

    lost: float
    lost_least: float
    lost_most: float


def figures(case: Question, result: Result, goal: Goal) -> Figures:
    """The figures of a case that was simulated. Nothing more is simulated."""
    cluster = case.load()[0].value
    _, behind, exposed, slower = parts(result).values()
    factor = step_factor(result.strategy, scale_of(result), goal)
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    least, most = result.memory_bytes_low, result.memory_bytes_high
    ends = (None, None) if factor is None else factor.ends
    return Figures(
        strategy=result.strategy,
        samples=result.global_batch,
        batch=result.tokens_per_gpu_per_step * result.gpus,
        micro_batch=result.micro_batch,
        micro_steps=result.accumulation,
        recompute=result.recompute,
        precision=result.precision,
        stack=result.stack,
        tokens_per_s=result.tokens_per_s,
        slowest=None if low is None else low / result.tokens_per_s,
        fastest=None if high is None else high / result.tokens_per_s,
        exposed=exposed,
        behind=behind,
        slower=slower,
        memory=result.memory_bytes_per_gpu["total"] / GIB,
        memory_low=None if least is None else least / GIB,
        memory_high=None if most is None else most / GIB,
        memory_fit=result.memory_word,
        capacity=cluster.gpu.memory / GIB,
        fits=result.fits_in_memory,
        factor=None if factor is None else factor.factor,
        factor_low=ends[0],
        factor_high=ends[1],
        watts=power.power(result, cluster.resized(result.gpus)),
    )


def lost(case: Question, result: Result, failures: Failures | None = None) -> Lost | None:
    """What failures take of it, these or those that a long training counts; None: none count.

    It takes a sixth of a millisecond.
    """
    hardware, model = case.load()
    cluster = replace(hardware.value, failures=failures) if failures else hardware.value
    optimizer = case.load_optimizer().value
    try:
        kept = counted_failures(result, cluster, model.value, math.inf, optimizer=optimizer)
    except OptionError:  # failures leave no time for work
        return Lost(lost=1.0, lost_least=1.0, lost_most=1.0)
    if kept is None:
        return None
    return Lost(lost=1 - kept.useful, lost_least=1 - kept.high, lost_most=1 - kept.low)


_PREFERRED = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)
"""The preferred numbers R10 of ISO 3: ten to a decade, evenly on a log scale."""

_COARSE = (1.0, 2.0, 5.0)
_TENFOLD = (1.0,)
_TAUS = (4, 12, 48)
_DELAYS = (1, 4)
_BATCHES = (1, 2, 4, 8)
_MAX_SIZES = 4
_FASTER, _SLOWER = 4.0, 30.0
"""How many times more, or less, bandwidth a slider reaches."""
_MAX_STOPS = 64
_DAY = 86400.0
_GIVEN = ("cluster", "model", "strategy")

AS_GIVEN = "as given"
_FASTEST = "the fastest that fits"


@dataclass(frozen=True, slots=True)
class Stop:
    """A position of a slider: what it sets, as `grid.vary` takes it, and how people read it.

    `setting` is None where everything stays as it was given; `value` is None where that is no
    number.
    """

    text: str
    setting: str | None
    value: float | None


@dataclass(frozen=True, slots=True)
class Control:
    """A number and the positions of its slider, of which `at` is where it begins.

    A `continuous` one may be interpolated between positions. `strategies` are the places of those
    that have this number. It begins with what was given, but where `given` is False.
    """

    path: str
    title: str
    stops: tuple[Stop, ...]
    at: int
    continuous: bool
    strategies: tuple[int, ...]
    given: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


def controls(question: Exploration) -> list[Control]:
    """The controls of a question: of the hardware, the batch, the strategies, price and failures.

    Numbers that the cluster does not have, such as a price, have none.
    """
    case = question.case(0, {})
    cluster = case.load()[0].value
    made = [_gpus(question), _micro_batch(question.job)]
    links = [("inter", "between nodes")] if cluster.nodes_per_site > 1 else []
    links += [("wan", "between sites")] if cluster.wan and cluster.sites > 1 else []
    for link, where in links:
        bandwidth = f"{link}.bandwidth"
        made.append(_spread(case, bandwidth, f"bandwidth {where}", _SLOWER, _FASTER))
        if getattr(cluster, link).latency:
            made.append(_spread(case, f"{link}.latency", f"latency {where}", 10.0, 100.0, _TENFOLD))
    made += _options(question)
    if cluster.price_per_gpu:
        made.append(_spread(case, "price_per_gpu", "price of a GPU", 4.0, 4.0))
    made += _failing(case, cluster if case.gpus is None else cluster.resized(case.gpus))
    everyone = tuple(range(len(question.strategies)))
    return [
        control if control.strategies else replace(control, strategies=everyone) for control in made
    ]


def varying(question: Exploration, path: str, values: str) -> Control:
    """A control with these positions, as a user gives them: "1, 4, 12".

    Raises OptionError for values that the path cannot have.
    """
    if path in _GIVEN:
        raise OptionError(f"--vary {path}: a page is about those that --{path} gives")
    texts = [str(setting[path]) for setting in settings({path: values})]
    if path == "gpus":
        gpu_counts(question.job, values)
    if len(texts) > _MAX_STOPS:
        raise OptionError(f"--vary {path} has {len(texts)} values; at most {_MAX_STOPS} are shown")
    places = tuple(i for i in range(len(question.strategies)) if question.takes(i, path))
    if not places:
        raise OptionError(f"--vary {path}: no strategy that is given has it")
    numbers = [_number(question.case(places[0], {path: text}), path, text) for text in texts]
    if path == "price_per_gpu":
        loaded = [question.case(places[0], {path: text}).load()[0].value for text in texts]
        currencies = sorted({cluster.currency for cluster in loaded})
        if len(currencies) > 1:
            raise OptionError(f"--vary {path}: prices are in {' and '.join(currencies)}; give one")
    stops = [Stop(text, text, value) for text, value in zip(texts, numbers, strict=True)]
    if None not in numbers:
        stops.sort(key=lambda stop: stop.value or 0.0)
    usual = next((made for made in controls(question) if made.path == path), None)
    title = usual.title if usual else path
    now = usual.stops[usual.at].value if usual else None
    same = [turn for turn, stop in enumerate(stops) if now is not None and stop.value == now]
    begin = same[0] if same else len(stops) - 1 if path == "gpus" else 0  # several nodes, not one
    return Control(
        path, title, tuple(stops), begin, continuous=False, strategies=places, given=bool(same)
    )


def _number(case: Question, path: str, text: str) -> float | None:
    """The value behind a text, where it is a number. Raises Co2simError for what cannot be."""
    cluster = case.load()[0].value
    if path == "price_per_gpu":
        return cluster.price_per_gpu
    try:
        unit = axis_of(case, path).unit
        return parse(text, unit) if unit else float(text)
    except (Co2simError, ValueError):
        return None


def _gpus(question: Exploration) -> Control:
    """Those that are given, or one node doubled up to the whole cluster."""
    sizes = gpu_counts(question.job)[-_MAX_SIZES:]
    now = question.job.gpus or sizes[-1]
    return _whole("gpus", "GPUs", [*sizes, now], now)


def _micro_batch(job: Question) -> Control:
    path, title, now = "micro_batch", "micro-batch", job.micro_batch
    if isinstance(now, int):
        return _whole(path, title, [*_BATCHES, now], now)
    made = _whole(path, title, _BATCHES, _BATCHES[0])
    return replace(made, stops=(Stop(_FASTEST, AUTO, None), *made.stops))


def _whole(path: str, title: str, values: Sequence[int], now: int) -> Control:
    ordered = sorted(set(values))
    stops = tuple(Stop(f"{value:,}", str(value), float(value)) for value in ordered)
    return Control(path, title, stops, ordered.index(now), continuous=False, strategies=())


def _options(question: Exploration) -> Iterator[Control]:
    """Of the strategies that have them; at first each has what was given."""
    for name, words, usual in (
        ("tau", "local steps of a round (tau)", _TAUS),
        ("delay", "how late an average is used (delay)", _DELAYS),
    ):
        path = f"strategy.{name}"
        places = tuple(i for i in range(len(question.strategies)) if question.takes(i, path))
        if not places:
            continue
        values = {getattr(question.parsed[index], name) for index in places}
        alike = values.pop() if len(values) == 1 else None
        if isinstance(alike, int):
            made = _whole(path, words, [*usual, alike], alike)
        else:
            made = _whole(path, words, usual, usual[0])
            made = replace(made, stops=(Stop(AS_GIVEN, None, None), *made.stops), at=0)
        yield replace(made, strategies=places)


def _failing(case: Question, cluster: Cluster) -> Iterator[Control]:
    """The mean time between failures of the first part that has one, at the size of the job."""
    if cluster.failures is None:
        return
    failures = cluster.failures.of_job(cluster.layout.world_size, cluster.nodes)
    part = next(name for name in PARTS if getattr(failures, name))
    of = "preemptions of a node" if part == "preemption" else f"failures of a {part}"
    title = f"mean time between {of}"
    now = getattr(failures, part)
    yield _spread(case, f"failures.{part}", title, 30.0, 10.0, _COARSE, now)


def _spread(
    case: Question,
    path: str,
    title: str,
    less: float,
    more: float,
    series: Sequence[float] = _PREFERRED,
    now: Any = None,
) -> Control:
    """Preferred numbers around what there is (`now`), which is its own position."""
    axis = axis_of(case, path)
    if now is None:
        now = case.load()[0].value
        for part in path.split("."):
            now = getattr(now, part)
    unit = _counted_in(axis)
    low, high = max(now / less, axis.low) / unit, min(now * more, axis.high) / unit
    values = [value * unit for value in _preferred(low, high, series)]
    values = sorted([*(value for value in values if not _same(value, now)), now])
    stops = tuple(_stop(axis, value) for value in values)
    return Control(path, title, stops, values.index(now), continuous=True, strategies=())


def _stop(axis: Axis, value: float) -> Stop:
    """Its setting is what people read, where that says all."""
    shown = axis.shown(value)
    try:
        read = parse_price(shown)[0] if axis.unit == "USD/s" else parse(shown, axis.unit)
    except UnitError:  # "1,000 days": people read thousands with a comma
        read = math.nan
    return Stop(shown, shown if _same(read, value) else axis.text(value), value)


def _same(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=1e-9)


def _counted_in(axis: Axis) -> float:
    """What people count in: bits where we count in bytes, hours and days where in seconds."""
    if axis.path.startswith("failures."):
        return _DAY
    return {"B/s": 1 / 8, "USD/s": 1 / 3600}.get(axis.unit, 1.0)


def _preferred(low: float, high: float, series: Sequence[float]) -> Iterator[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for decade in range(first, last + 1):
        for step in series:
            value = float(f"{step}e{decade}")
            if low * (1 - 1e-9) <= value <= high * (1 + 1e-9):
                yield value
