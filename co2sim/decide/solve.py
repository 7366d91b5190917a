"""The inverse question: which value of a number reaches a target, found by simulation."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from scipy.optimize import brentq

from co2sim import study
from co2sim.case import Case
from co2sim.decide.axis import Axis
from co2sim.decide.targets import End, Target, View
from co2sim.errors import Co2simError, OptionError
from co2sim.progress import Done
from co2sim.result import Result

Figure: TypeAlias = Callable[[float], float | None]
"""A figure at a value of the axis; None where there is none."""

_EXACT = 1e-7
"""How near to a crossing the search comes, relative to it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Values that meet a target, both ends included.

    `open_low` and `open_high` say that an end is that of the searched range, and not a crossing.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where a target is met: as predicted, and at both ends of the 90 % interval of tokens/s.

    `sure` and `hoped` are None where there is no interval.
    """

    value: float
    met: tuple[Span, ...]
    sure: tuple[Span, ...] | None
    hoped: tuple[Span, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The answers of one case.

    `best` is the value of the axis where the figure is best, and that figure. `monotone` says that
    the figure only grows, or only falls, over the `points` that were looked at. `failed` says why
    some points have no figure.
    """

    case: Case
    axis: Axis
    target: Target
    answers: tuple[Answer, ...]
    points: tuple[tuple[float, float | None], ...]
    best: tuple[float, float]
    monotone: bool
    failed: str | None


def solve(
    case: Case, axis: Axis, target: Target, *, tokens: float | None = None, done: Done | None = None
) -> Solved:
    """Which values of the axis reach each value of the target.

    The figure is looked at over the whole range; between two neighbours of which one meets the
    target and the other does not, the crossing is found to 1e-7 (whole numbers: exactly). Of
    crossings that lie nearer to each other than the points, both are missed. Raises the error of
    the first point where there is none without.
    """
    if target.metric.needs == "tokens" and tokens is None:
        raise OptionError(f"{target.name} needs the tokens to train: --tokens 1e12, say")
    curve = _Curve(case, axis, target, tokens)
    points = axis.points()
    values = []
    for place, point in enumerate(points, 1):
        values.append(curve.figure(point))
        if done:
            done(place, len(points))
    known = [(x, value) for x, value in zip(points, values, strict=True) if value is not None]
    if not known:
        assert curve.error is not None
        raise curve.error
    answers = []
    for value in target.values:

        def reached(end: End, value: float = value) -> tuple[Span, ...]:
            figure = curve.of(end)
            return tuple(spans(figure, points, axis, target, value))

        uncertain = curve.has_interval
        answers.append(
            Answer(
                value=value,
                met=reached("predicted"),
                sure=reached("low") if uncertain else None,
                hoped=reached("high") if uncertain else None,
            )
        )
    figures = [value for _, value in known]
    best = (max if target.metric.more else min)(known, key=lambda pair: pair[1])
    return Solved(
        case=case,
        axis=axis,
        target=target,
        answers=tuple(answers),
        points=tuple(zip(points, values, strict=True)),
        best=best,
        monotone=_monotone(figures),
        failed=str(curve.error) if curve.error else None,
    )


def spans(
    figure: Figure, points: Sequence[float], axis: Axis, target: Target, value: float
) -> Iterable[Span]:
    """The ranges of the axis in which the figure meets the value, from the lowest on."""
    met = [target.met(figure(x), value) for x in points]
    low: tuple[float, bool] | None = (points[0], True) if met[0] else None
    for (x, before), (y, after) in pairwise(zip(points, met, strict=True)):
        if before == after:
            continue
        edge = _edge(figure, axis, target, value, x, y)
        if after:
            low = (edge, False)
        else:
            assert low is not None
            yield Span(low[0], edge, low[1], open_high=False)
            low = None
    if low:
        yield Span(low[0], points[-1], low[1], open_high=True)


def _edge(
    figure: Figure, axis: Axis, target: Target, value: float, low: float, high: float
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
    root = _root(figure, value, inside, outside)
    if root is not None:
        for place in (root, root * (1 + _EXACT), root * (1 - _EXACT)):
            near = min(max(place, low), high)
            if meets(near):
                inside = near
            else:
                outside = near
    while abs(math.log(inside / outside)) > 2 * _EXACT:  # a jump, or a figure that is missing
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if meets(middle) else (inside, middle)
    return inside


def _root(figure: Figure, value: float, inside: float, outside: float) -> float | None:
    """Where the figure is the value; None where it is not known between the two."""

    def beyond(place: float) -> float:
        found = figure(math.exp(place))
        if found is None:
            raise _UnknownError
        return found - value

    try:
        return math.exp(brentq(beyond, math.log(inside), math.log(outside), xtol=_EXACT / 4))
    except (_UnknownError, ValueError):  # no figure, or one that rounds to the value at an end
        return None


class _UnknownError(Exception):
    """There is no figure at a point."""


def _monotone(figures: Sequence[float]) -> bool:
    """Whether they never turn, but for rounding."""
    small = 1e-9 * max(map(abs, figures))
    steps = [b - a for a, b in pairwise(figures)]
    return all(step >= -small for step in steps) or all(step <= small for step in steps)


class _Curve:
    """The figure over the axis; every value is simulated once."""

    def __init__(self, case: Case, axis: Axis, target: Target, tokens: float | None) -> None:
        self._case, self._axis, self._target, self._tokens = case, axis, target, tokens
        self._views: dict[float, View | None] = {}
        self._alone: dict[str, Result] = {}
        self.error: Co2simError | None = None
        self.has_interval = False

    def figure(self, value: float) -> float | None:
        """As predicted."""
        return self.of("predicted")(value)

    def of(self, end: End) -> Figure:
        """At an end of the interval."""

        def figure(value: float) -> float | None:
            view = self._view(value)
            return None if view is None else self._target.metric.of(view.at(end))

        return figure

    def _view(self, value: float) -> View | None:
        if value not in self._views:
            try:
                self._views[value] = self._simulated(value)
            except Co2simError as error:
                self.error = self.error or error
                self._views[value] = None
        return self._views[value]

    def _simulated(self, value: float) -> View:
        case = self._axis.at(self._case, value)
        result = study.run(case)
        self.has_interval = self.has_interval or result.tokens_per_s_low is not None
        alone = self._one_node(case) if self._target.metric.needs == "alone" else None
        return View(result, alone, self._tokens)

    def _one_node(self, case: Case) -> Result:
        """The result on one node: what is between nodes is not asked for again."""
        single = replace(case, gpus=case.load()[0].value.gpus_per_node)
        beyond = ("inter.", "wan.")
        same = {k: v for k, v in single.overrides.items() if not k.startswith(beyond)}
        key = f"{single.strategy} {single.micro_batch} {single.accumulation} {same}"
        if isinstance(single.cluster, str) and key in self._alone:
            return self._alone[key]
        self._alone[key] = study.run(single)
        return self._alone[key]
