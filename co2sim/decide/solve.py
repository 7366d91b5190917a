"""The inverse question: which value of a number reaches a target, found by simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

from co2sim.case import Case
from co2sim.decide.axis import Axis
from co2sim.decide.crossings import Stretch, monotone, spans
from co2sim.decide.curve import Curve
from co2sim.decide.targets import End, Target
from co2sim.errors import OptionError
from co2sim.progress import Done
from co2sim.step_factors import NO_GOAL, Goal
from co2sim.strategies import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where a target is met: as predicted, and at both ends of the 90 % interval of tokens/s.

    `sure` and `hoped` are None where there is no interval.
    """

    value: float
    met: tuple[Stretch, ...]
    sure: tuple[Stretch, ...] | None
    hoped: tuple[Stretch, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The answers of one case.

    `best` is the value of the axis where the figure is best, and that figure; None where nothing
    fits in memory. `binds` is the number of the hardware that holds the best one back, and the
    figure with a tenth more of it; None where an answer was found, or nothing helps. `monotone`
    says that the figure only grows, or only falls, over the `points` that were looked at. `failed`
    says why some of them cannot be simulated, `large` how many do not fit in memory: these meet no
    target but memory. Prices are in `currency`. `bands` are the least and the most of the figure at
    each point, where its interval is known.
    """

    case: Case
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


def solve(
    case: Case,
    axis: Axis,
    target: Target,
    *,
    tokens: float | None = None,
    goal: Goal = NO_GOAL,
    done: Done | None = None,
) -> Solved:
    """Which values of the axis reach each value of the target.

    The figure is looked at over the whole range; between two neighbours of which one meets the
    target and the other does not, the crossing is found to 1e-7 (whole numbers: exactly). Of
    crossings that lie nearer to each other than the points, both are missed. `tokens` are those
    that DDP would train; local updates need more, as `goal` or the measured step factors say.
    Raises the error of the first point where none can be simulated.
    """
    check(case, target, tokens)
    curve = Curve(case, axis, target, tokens, goal)
    points = axis.points()
    for place, point in enumerate(points, 1):
        curve.figure(point)
        if done:
            done(place, len(points))
    points = [point for point in points if curve.known(point)]
    if not points:
        assert curve.error is not None
        raise curve.error
    values = [curve.figure(point) for point in points]
    answers = tuple(_answer(curve, points, axis, target, value) for value in target.values)
    found = [(x, value) for x, value in zip(points, values, strict=True) if value is not None]
    best = None
    if found:
        best = (max if target.metric.more else min)(found, key=lambda pair: pair[1])
    unmet = best is not None and not all(answer.met for answer in answers)
    return Solved(
        case=case,
        axis=axis,
        target=target,
        answers=answers,
        points=tuple(zip(points, values, strict=True)),
        best=best,
        binds=curve.binding(best[0]) if unmet and best else None,
        monotone=monotone([value for _, value in found]),
        failed=str(curve.error) if curve.error else None,
        large=len(points) - len(found),
        currency=curve.currency,
        bands=tuple(_band(curve, point, target) for point in points),
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


def check(case: Case, target: Target, tokens: float | None) -> None:
    """Refuse a target that lacks something, and a strategy whose rounds are still to be chosen."""
    if target.metric.needs == "tokens" and tokens is None:
        raise OptionError(f"{target.name} needs the tokens to train: --tokens 1e12, say")
    if target.metric.needs == "failures" and case.load()[0].value.failures is None:
        raise OptionError(f"{target.name} needs failures: --set failures=meta-rsc-1, say")
    strategy = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    if getattr(strategy, "tau", None) == "auto":
        raise OptionError(
            f"{strategy.name}: tau=auto is chosen anew for every value, which takes too long; give"
            " a number, or solve for strategy.tau"
        )
    currency = case.load()[0].value.currency
    if target.dollars and currency != "USD":
        raise OptionError(f"prices of the cluster are in {currency}, not in USD; ask for cost")


def _answer(
    curve: Curve, points: Sequence[float], axis: Axis, target: Target, value: float
) -> Answer:
    def reached(end: End) -> tuple[Stretch, ...]:
        return tuple(spans(curve.of(end), points, axis, target, value))

    uncertain = _uncertain(curve, target)
    return Answer(
        value=value,
        met=reached("predicted"),
        sure=reached("low") if uncertain else None,
        hoped=reached("high") if uncertain else None,
    )
