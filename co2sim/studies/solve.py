"""The inverse question: which value of a number reaches a target, found by simulation."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.progress import Done
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver
from co2sim.prediction.counted import counted_failures
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, scale_of, step_factor
from co2sim.prediction.totals import DAY
from co2sim.strategies import parse
from co2sim.studies.sensitivity import moved
from co2sim.studies.targets import Axis, End, Target, View, value_at

Figure: TypeAlias = Callable[[float], float | None]
"""A figure at a value of the axis; None where there is none."""

_EXACT = 5e-4
"""How near to a crossing the search comes, relative to it: three digits are shown."""

_ROUGH = 5e-3
"""The same of an end of an interval."""

_FAR = 10.0
"""How many times as large the far end of a range is, at most, where a crossing is interpolated."""

_BISECTED = 3
"""Every third value halves the range, as lines do not help at a jump."""

_MOST_TURNS = 200


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Values that meet a target, both ends included.

    `open_low` and `open_high` say that an end is that of the searched range, and not a crossing.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool


def spans(
    figure: Figure,
    points: Sequence[float],
    axis: Axis,
    target: Target,
    value: float,
    exact: float = _EXACT,
) -> Iterable[ValueRange]:
    """The ranges of the axis in which the figure meets the value, from the lowest on."""
    met = [target.met(figure(x), value) for x in points]
    low: tuple[float, bool] | None = (points[0], True) if met[0] else None
    for (x, before), (y, after) in pairwise(zip(points, met, strict=True)):
        if before == after:
            continue
        edge = _edge(figure, axis, target, value, x, y, exact)
        if after:
            low = (edge, False)
        else:
            assert low is not None
            yield ValueRange(low[0], edge, low[1], open_high=False)
            low = None
    if low:
        yield ValueRange(low[0], points[-1], low[1], open_high=True)


def _edge(
    figure: Figure,
    axis: Axis,
    target: Target,
    value: float,
    low: float,
    high: float,
    exact: float,
) -> float:
    """The last value that meets the target, between two of which one does."""

    def meets(x: float) -> bool:
        return target.met(figure(x), value)

    inside, outside = (low, high) if meets(low) else (high, low)
    if axis.step:
        while abs(inside - outside) > axis.step:
            middle = axis.low + axis.step * axis.place((inside + outside) / 2)
            inside, outside = (middle, outside) if meets(middle) else (inside, middle)
        return inside
    power = -1.0 if inside > outside else 1.0  # a time grows with this power of the number

    def behind(x: float) -> float | None:
        """By how much the target is missed, above 0; a straight line in `x ** power`, or near."""
        there = figure(x)
        if there is None or (target.metric.more and there <= 0):
            return None
        return value / there - 1 if target.metric.more else there / value - 1

    beside = 1 + exact
    for turn in range(_MOST_TURNS):
        wide = abs(math.log(inside / outside))
        if wide <= 2 * exact:
            break
        near, far = behind(inside), behind(outside)
        trial = math.sqrt(inside * outside)
        if wide < math.log(_FAR) and turn % _BISECTED and near is not None and far is not None:
            u, v = inside**power, outside**power
            root = ((u * far - v * near) / (far - near)) ** (1 / power)
            low_end, high_end = sorted((inside, outside))
            trial = min(max(root, low_end * beside), high_end / beside)
        inside, outside = (trial, outside) if meets(trial) else (inside, trial)
    return inside


def monotone(figures: Sequence[float]) -> bool:
    """Whether they never turn, but for rounding."""
    if not figures:
        return True
    small, steps = 1e-9 * max(map(abs, figures)), np.diff(figures)
    return bool((steps >= -small).all() or (steps <= small).all())


_MIN = 1e-6
"""Of the time: where less is useful, nothing gets done."""

_LITTLE = 1e-3
"""A gain that is not worth a word."""


class Curve:
    """The figure over the axis; every value is simulated once."""

    def __init__(
        self, case: Question, axis: Axis, target: Target, tokens: float | None, goal: Goal
    ) -> None:
        self._case, self._axis, self._target = case, axis, target
        self._tokens, self._goal = tokens, goal
        self._views: dict[float, View | None] = {}
        self._alone: dict[str, Result] = {}
        self.error: Co2simError | None = None
        self.has_interval = False
        self.currency: str | None = None

    def figure(self, value: float) -> float | None:
        """As predicted; None where it does not fit in memory, or cannot be simulated."""
        return self.of("predicted")(value)

    def known(self, value: float) -> bool:
        """Whether the value can be simulated."""
        return self._view(value) is not None

    def looked(self) -> list[float]:
        """All values that were looked at and can be simulated, in order."""
        return sorted(value for value, view in self._views.items() if view is not None)

    def of(self, end: End) -> Figure:
        """At an end of the interval."""

        def figure(value: float) -> float | None:
            view = self._view(value)
            if view is None:
                return None
            if not view.result.fits_in_memory and self._target.name != "memory":
                return None
            return self._target.metric.at(view, end)

        return figure

    def binding(self, value: float) -> tuple[str, float] | None:
        """The number of which a tenth more does most for the figure there, and what it gives."""
        metric = self._target.metric
        before = self.figure(value)
        assert before is not None
        plain, moves = moved(self._axis.at(self._case, value))
        sign = 1 if metric.more else -1
        best: tuple[str, float] | None = None
        for change, cluster in moves:
            if change == self._axis.path:
                continue
            figure = metric.of(self._seen(replace(plain, cluster=cluster)))
            if sign * (figure - (best[1] if best else before)) > _LITTLE * abs(before):
                best = change, figure
        return best

    def _view(self, value: float) -> View | None:
        if value not in self._views:
            try:
                self._views[value] = self._seen(self._axis.at(self._case, value))
            except Co2simError as error:
                self.error = self.error or error
                self._views[value] = None
        return self._views[value]

    def _seen(self, case: Question) -> View:
        result = driver.run(case, beside=False)
        self.has_interval = self.has_interval or result.tokens_per_s_low is not None
        self.currency = self.currency or result.currency
        alone = self._one_node(case) if self._target.metric.needs == "alone" else None
        tokens = self._tokens
        ends = (1.0, 1.0)
        if self._target.metric.needs == "tokens":
            factor = step_factor(result.strategy, scale_of(result), self._goal)
            if factor is None or tokens is None:
                raise OptionError(
                    f"it is not known what a step of {result.strategy} is worth; give"
                    f" --steps-factor {result.strategy.partition('(')[0]}=1.3, say"
                )
            tokens, ends = tokens * factor.factor, factor.ends
        cluster = case.load()[0].value.resized(result.gpus)
        goodput = self._goodput(case, result, tokens)
        if tokens is not None:
            tokens *= self._goal.project.factor
        return View(result, alone, tokens, goodput, ends, cluster)

    def _goodput(
        self, case: Question, result: Result, tokens: float | None
    ) -> tuple[float, float, float] | None:
        """The useful share of the time, and its ends, where the target asks for it."""
        if self._target.metric.needs not in {"tokens", "failures"}:
            return None
        cluster, model = case.load()
        days = 0.0 if tokens is None else tokens / result.tokens_per_s / DAY
        counted = counted_failures(
            result, cluster.value, model.value, days, optimizer=case.load_optimizer().value
        )
        if counted is None:
            return None
        return (counted.useful, max(counted.low, _MIN), counted.high)

    def _one_node(self, case: Question) -> Result:
        """The result on one node: what is between nodes is not asked for again."""
        single = replace(case, gpus=case.load()[0].value.gpus_per_node)
        beyond = ("inter.", "wan.")
        same = {k: v for k, v in single.overrides.items() if not k.startswith(beyond)}
        batch = single.micro_batch, single.accumulation, single.global_batch, single.recompute
        key = f"{single.strategy} {batch} {same}"
        if isinstance(single.cluster, Cluster):
            return driver.run(single, beside=False)
        if key not in self._alone:
            self._alone[key] = driver.run(single, beside=False)
        return self._alone[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where a target is met: as predicted, and at both ends of the 90 % interval of tokens/s.

    `sure` and `hoped` are None where there is no interval.
    """

    value: float
    met: tuple[ValueRange, ...]
    sure: tuple[ValueRange, ...] | None
    hoped: tuple[ValueRange, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The answers of one case.

    `best` is the value of the axis where the figure is best, and that figure; None where nothing
    fits in memory. `binds` is the number of the hardware that holds the best one back, and the
    figure with a tenth more of it; None where an answer was found, or nothing helps. `monotone`
    says that the figure only grows, or only falls, over the `points` that were looked at. `failed`
    says why some of them cannot be simulated, `large` how many do not fit in memory: these meet no
    target but memory. Prices are in `currency`. `bands` are the least and the most of the figure at
    each point, where its interval is known. `now` is what the cluster has of the number, where it
    was looked at.
    """

    case: Question
    axis: Axis
    target: Target
    answers: tuple[Answer, ...]
    points: tuple[tuple[float, float | None], ...]
    best: tuple[float, float] | None
    binds: tuple[str, float] | None
    monotone: bool
    failed: str | None
    large: int
    currency: str | None
    bands: tuple[tuple[float, float] | None, ...]
    now: float | None = None

    def at(self, value: float) -> tuple[float | None, tuple[float, float] | None]:
        """The figure at a value that was looked at, and its interval; None where there is none."""
        looked = zip(self.points, self.bands, strict=True)
        return next(((y, band) for (x, y), band in looked if x == value), (None, None))


def solve(
    case: Question,
    axis: Axis,
    target: Target,
    *,
    tokens: float | None = None,
    goal: Goal = NO_GOAL,
    done: Done | None = None,
    fine: bool = False,
) -> Solved:
    """Which values of the axis reach each value of the target.

    Looked at are `fine` points over the whole range, or, of a number of the hardware, of which more
    is better or worse throughout, both ends and what is there. Between two neighbours of which one
    meets the target and the other does not, the crossing is found to 5e-4 (whole numbers: exactly).
    Of crossings that lie nearer to each other than the points, both are missed. `tokens` are those
    that DDP would train; local updates need more, as `goal` or the measured step factors say.
    Raises the error of the first point where none can be simulated.
    """
    check(case, axis.path, target, tokens)
    now = value_at(case.load()[0].value, axis.path)
    curve = Curve(case, axis, target, tokens, goal)
    points = axis.points() if fine or not axis.links else [axis.low, axis.high]
    if now is not None and axis.links and axis.low < now < axis.high:
        points = sorted({*points, now})
    for turn, point in enumerate(points, 1):
        curve.figure(point)
        if done:
            done(turn, len(points))
    if not curve.looked():
        assert curve.error is not None
        raise curve.error
    answers = tuple(_answer(curve, axis, target, value) for value in target.values)
    points = curve.looked()
    values = [curve.figure(point) for point in points]
    pairs = [(x, value) for x, value in zip(points, values, strict=True) if value is not None]
    best = None
    if pairs:
        best = (max if target.metric.more else min)(pairs, key=lambda pair: pair[1])
    unmet = best is not None and not all(answer.met for answer in answers)
    return Solved(
        case=case,
        axis=axis,
        target=target,
        answers=answers,
        points=tuple(zip(points, values, strict=True)),
        best=best,
        binds=curve.binding(best[0]) if unmet and best else None,
        monotone=monotone([value for _, value in pairs]),
        failed=str(curve.error) if curve.error else None,
        large=len(points) - len(pairs),
        currency=curve.currency,
        bands=tuple(_band(curve, point, target) for point in points),
        now=next((point for point in points if point == now), None),
    )


def _band(curve: Curve, point: float, target: Target) -> tuple[float, float] | None:
    """The figure where tokens/s are at the ends of their interval, the lesser one first."""
    if not _uncertain(curve, target):
        return None
    low, high = curve.of("low")(point), curve.of("high")(point)
    return None if low is None or high is None else (min(low, high), max(low, high))


def _uncertain(curve: Curve, target: Target) -> bool:
    """Whether there is an interval; memory has none."""
    return curve.has_interval and target.name != "memory"


def check(case: Question, path: str, target: Target, tokens: float | None) -> None:
    """Refuse a target that lacks something, and rounds that every value of `path` would change."""
    together, node = case.together, case.load()[0].value.gpus_per_node
    if target.metric.needs == "alone" and together > node:
        raise OptionError(
            f"{target.name} is relative to one node, and tp x cp x pp = {together} GPUs are more"
            f" than the {node} of one; use --for utilization=90% (of free communication), or days"
        )
    if target.metric.needs == "tokens" and tokens is None:
        raise OptionError(f"{target.name} needs the tokens to train: --tokens 1e12, say")
    if target.metric.needs == "failures" and case.load()[0].value.failures is None:
        raise OptionError(f"{target.name} needs failures: --set failures=meta-rsc-1, say")
    strategy = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    if getattr(strategy, "tau", None) == "auto" and path != "strategy.tau":
        raise OptionError(
            f"{strategy.name}: tau=auto is chosen again for every value, which takes too long; give"
            " a number, or solve for strategy.tau"
        )
    currency = case.load()[0].value.currency
    if target.dollars and currency != "USD":
        raise OptionError(f"prices of the cluster are in {currency}, not in USD; ask for cost")


def _answer(curve: Curve, axis: Axis, target: Target, value: float) -> Answer:
    def reached(end: End) -> tuple[ValueRange, ...]:
        exact = _EXACT if end == "predicted" else _ROUGH
        return tuple(spans(curve.of(end), curve.looked(), axis, target, value, exact))

    met = reached("predicted")
    uncertain = _uncertain(curve, target)
    return Answer(
        value=value,
        met=met,
        sure=reached("low") if uncertain else None,
        hoped=reached("high") if uncertain else None,
    )
