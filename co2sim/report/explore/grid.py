"""The grid behind a page without a server: what is simulated, and the figures between.

Every position of a control that is no continuous one is simulated. Of a continuous one some are,
its knots: random positions become knots where figures between them are too far off, until none of
those drawn last is. After control-C the last grid that is whole is kept.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import count, pairwise, product
from statistics import median
from typing import Any, TypeAlias

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.units import Seconds, duration
from co2sim.hardware.failures import Failures
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.report.explore.exploration import Control, Exploration, Figures, Lost, figures, lost
from co2sim.studies.pools import Engine, Pool, opened
from co2sim.studies.run_all import Interrupted, Outcome, run_on

LOGARITHMIC = ("tokens_per_s", "lost", "lost_least", "lost_most")
"""Figures that are interpolated by their logarithms."""
CHOSEN = (
    *("strategy", "samples", "micro_batch", "micro_steps", "recompute", "precision", "stack"),
    *("memory", "memory_low", "memory_high", "memory_fit", "fits"),
)
"""What is chosen, and what follows from it alone: it is that of the nearest knot."""
_DIGITS = 6

Positions: TypeAlias = tuple[int, ...]
"""Of every control of a page, the place of the stop that is set."""


@dataclass(frozen=True, slots=True)
class StrategyGrid:
    """The figures of a strategy at all combinations of the knots of the controls that it has.

    `controls` are their places, `knots` the stops that were simulated, by control, and `points`
    their combinations, the last control fastest. `values` has a list for each figure, None where
    nothing is known; `failed` says why places of these lists have nothing. `lost` has such lists
    one behind the other for each stop of the control of failures, or one list without a control.
    """

    strategy: str
    controls: tuple[int, ...]
    knots: tuple[tuple[int, ...], ...]
    points: Sequence[Positions]
    values: Mapping[str, Sequence[Any]]
    failed: Mapping[int, str]
    lost: Mapping[str, Sequence[Any]]

    def to_dict(self) -> dict[str, Any]:
        """For the page: figures with six digits, and one value where all are the same."""
        return {
            "strategy": self.strategy,
            "controls": self.controls,
            "knots": self.knots,
            "values": {name: _short(figures) for name, figures in self.values.items()},
            "failed": self.failed,
            "lost": {name: _short(figures) for name, figures in self.lost.items()},
        }


@dataclass(frozen=True, slots=True)
class Exactness:
    """How far figures of a page are from the simulator's at positions between those simulated.

    `checked` positions, taken at random; errors of throughput are relative, as is the `tolerance`
    that was asked for, those of the exposed share absolute. With `checked` 0 there are no positions
    between.
    """

    tolerance: float
    checked: int
    median: float
    largest: float
    largest_exposed: float

    @property
    def met(self) -> bool:
        """Whether throughput is as exact as asked for; else no more could be simulated."""
        return self.largest <= self.tolerance


@dataclass(frozen=True, slots=True)
class ExploreGrid:
    """All that a page without a server knows; `failures` is the place of their control, if any.

    `ended` says that control-C came before all was as exact as asked for.
    """

    controls: tuple[Control, ...]
    failures: int | None
    strategies: tuple[StrategyGrid, ...]
    exactness: Exactness
    simulated: int
    ended: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For the page."""
        return {
            "controls": [control.to_dict() for control in self.controls],
            "failures": self.failures,
            "strategies": [grid.to_dict() for grid in self.strategies],
            "exactness": asdict(self.exactness),
            "simulated": self.simulated,
            "logarithmic": LOGARITHMIC,
            "chosen": CHOSEN,
        }


def between(
    grid: StrategyGrid, controls: Sequence[Control], positions: Positions
) -> dict[str, Any] | None:
    """The figures of the simulator at any positions; None where a knot beside them has none.

    Linear in the logarithm of what is set; throughput by its logarithm, too. A figure that is
    unknown at a knot is None. What is `CHOSEN` is that of the nearest knot.
    """
    corners = list(_corners(grid, controls, positions))
    if any(corner in grid.failed for corner, _ in corners):
        return None
    return {name: _mixed(name, values, corners) for name, values in grid.values.items()}


def _corners(
    grid: StrategyGrid, controls: Sequence[Control], positions: Positions
) -> Iterator[tuple[int, float]]:
    """Places in the lists of values, with their weights."""
    sides = [
        _sides(controls[axis], knots, positions[axis])
        for axis, knots in zip(grid.controls, grid.knots, strict=True)
    ]
    for corner in product(*sides):
        index = 0
        for (knot, _), knots in zip(corner, grid.knots, strict=True):
            index = index * len(knots) + knot
        yield index, math.prod(weight for _, weight in corner)


def _sides(control: Control, knots: Sequence[int], stop: int) -> list[tuple[int, float]]:
    """The knot that a stop is, or those at both sides of it, with their weights."""
    low = max(turn for turn, knot in enumerate(knots) if knot <= stop)
    if knots[low] == stop:
        return [(low, 1.0)]
    ends = (knots[low], stop, knots[low + 1])
    first, here, last = (math.log(control.stops[end].value or 1.0) for end in ends)
    share = (here - first) / (last - first)
    return [(low, 1.0 - share), (low + 1, share)]


def _mixed(name: str, values: Sequence[Any], corners: Sequence[tuple[int, float]]) -> Any:
    near = [values[corner] for corner, _ in corners]
    if name in CHOSEN:
        return near[max(range(len(corners)), key=lambda turn: corners[turn][1])]
    if any(value is None for value in near):
        return None
    weighed = [(weight, value) for (_, weight), value in zip(corners, near, strict=True)]
    if name in LOGARITHMIC and min(near) > 0:
        return math.exp(sum(weight * math.log(value) for weight, value in weighed))
    return sum(weight * value for weight, value in weighed)


def _short(values: Sequence[Any]) -> Any:
    """Six digits; one value instead of a list where all are the same."""
    rounded = [
        float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value for value in values
    ]
    same = all(before == after for before, after in pairwise(rounded))
    return rounded[0] if same and rounded else rounded


MAX_CASES = 20_000
"""That are simulated for one page: minutes, and a page of a few MB."""

_FAILING = "failures"
_ARITHMETIC = "price_per_gpu"
"""Needs no simulation."""

Knots = list[set[int]]
"""Of a strategy, by control."""


@dataclass(frozen=True)
class Board:
    """A question and its controls."""

    question: Exploration
    controls: tuple[Control, ...]

    @property
    def places(self) -> range:
        """Of the strategies."""
        return range(len(self.question.strategies))

    @property
    def failures(self) -> int | None:
        """The place of the control of failures."""
        paths = [control.path for control in self.controls]
        return next((axis for axis, path in enumerate(paths) if path.startswith(_FAILING)), None)

    def axes(self, index: int) -> tuple[int, ...]:
        """Controls that change the simulation of a strategy."""
        return tuple(
            axis
            for axis, control in enumerate(self.controls)
            if index in control.strategies and control.path != _ARITHMETIC and axis != self.failures
        )

    def loose(self, index: int) -> list[int]:
        """Those of the axes that are continuous."""
        return [axis for axis in self.axes(index) if self.controls[axis].continuous]

    def begin(self) -> list[int]:
        """Where all controls begin."""
        return [control.at for control in self.controls]

    def coarsest(self, index: int) -> Knots:
        """All stops; of continuous controls both ends and the one that they begin at."""
        return [
            {0, control.at, len(control.stops) - 1}
            if axis in self.loose(index)
            else set(range(len(control.stops)))
            for axis, control in enumerate(self.controls)
        ]

    def drawn(self, index: int, draw: random.Random) -> list[int]:
        """Random positions of what a strategy has."""
        positions = self.begin()
        for axis in self.axes(index):
            positions[axis] = draw.randrange(len(self.controls[axis].stops))
        return positions

    def case(self, index: int, positions: Sequence[int]) -> Question:
        """The case there."""
        return self.question.loaded(index, self._settings(positions))

    def title(self, index: int, positions: Sequence[int]) -> str:
        """The strategy there, with its options."""
        return self.question.title(index, self._settings(positions))

    def _settings(self, positions: Sequence[int]) -> dict[str, str]:
        stops = (
            (control.path, control.stops[stop].setting)
            for control, stop in zip(self.controls, positions, strict=True)
        )
        return {path: setting for path, setting in stops if setting is not None}

    def failing(self, positions: Positions, stop: int) -> Failures | None:
        """The failures there, where their control is at this stop."""
        moved = list(positions)
        moved[self.failures or 0] = stop
        settings = {
            control.path: control.stops[position].setting or ""
            for control, position in zip(self.controls, moved, strict=True)
            if control.path.startswith(_FAILING)
        }
        key = tuple(settings.items())
        if key not in self._failing:
            cluster = self.question.case(0, settings).load()[0].value
            self._failing[key] = cluster.failures
        return self._failing[key]

    @cached_property
    def _failing(self) -> dict[tuple[tuple[str, str], ...], Failures | None]:
        return {}

    def counts(self, knots: Sequence[Knots]) -> list[int]:
        """How many cases the grid of each strategy is."""
        return [
            math.prod(len(chosen[axis]) for axis in self.axes(index))
            for index, chosen in enumerate(knots)
        ]

    def refuse_many(self, knots: Sequence[Knots]) -> None:
        """Raise OptionError where the grids would be too many cases."""
        counts = self.counts(knots)
        if sum(counts) <= MAX_CASES:
            return
        index = counts.index(max(counts))
        sizes = [(self.controls[axis].path, len(knots[index][axis])) for axis in self.axes(index)]
        most = max(sizes, key=lambda pair: pair[1])[0]
        raise OptionError(
            f"there are {sum(counts):,} positions to simulate, {max(counts):,} of"
            f" {self.question.titles[index]} ("
            + " x ".join(f"{path} {count}" for path, count in sizes)
            + f"); at most {MAX_CASES:,} are; give fewer strategies, fewer values with"
            f" --vary {most}=..., or a wider --tolerance"
        )


ENDED = "not simulated: control-C came before"


class Known:
    """What was simulated: results with their cases, or why there are none.

    After control-C nothing more is simulated, and `ended` is True. `rate` is how long a case took.
    """

    def __init__(self, board: Board, pool: Pool | None) -> None:
        """On these workers, or without any in this process."""
        self.board, self.pool = board, pool
        self.results: dict[tuple[int, Positions], tuple[Question, Result] | str] = {}
        self.ended = False
        self.rate: Seconds = 0.0

    def simulate(self, wanted: Iterable[tuple[int, Positions]], what: str) -> None:
        """Those that are not known yet."""
        cases: dict[tuple[int, Positions], Question] = {}
        for key in wanted:
            if key not in self.results and key not in cases:
                try:
                    cases[key] = self.board.case(*key)
                except Co2simError as error:
                    self.results[key] = str(error)
        began, outcomes = time.monotonic(), self._outcomes(list(cases.values()), what)
        self.rate = (time.monotonic() - began) / len(cases) if cases else self.rate
        for turn, (key, case) in enumerate(cases.items()):
            outcome = outcomes.get(turn)
            if isinstance(outcome, Result):
                self.results[key] = case, outcome
            else:
                self.results[key] = outcome.reason if outcome else ENDED

    def _outcomes(self, cases: list[Question], what: str) -> Mapping[int, Outcome]:
        """By the places of the cases; those that control-C left are missing."""
        if self.ended or not cases:
            return {}
        try:
            return dict(enumerate(run_on(self.pool, cases, what=what)))
        except Interrupted as interrupt:
            self.ended = True
            return interrupt.outcomes

    def figures(self, index: int, positions: Positions) -> Figures | str:
        """What is shown of it."""
        pair = self.results[index, positions]
        return pair if isinstance(pair, str) else figures(*pair, self.board.question.goal)


_LOOKS = 20
"""Positions that each continuous control of a strategy takes besides, about."""
_TIMED = 12
"""Positions by which it says how long the others take."""
_FIRST = "simulating the first positions"
_CHECKS = 40
"""Random positions where figures are compared with the simulator's, of all strategies together."""


def build(
    question: Exploration,
    controls: Sequence[Control],
    tolerance: float,
    jobs: int,
    say: Callable[[str], None] = lambda _: None,
) -> ExploreGrid:
    """Simulate. Raises OptionError for more than `MAX_CASES` cases.

    Knots are added where random positions are too far off, until new ones are all within
    `tolerance`, or no more cases may be simulated. `say` gets how long it takes, once the first
    positions are known. Raises KeyboardInterrupt at a control-C before these.
    """
    board = Board(question, tuple(controls))
    knots = [board.coarsest(index) for index in board.places]
    board.refuse_many(knots)
    with opened(Engine(jobs=jobs), sum(board.counts(knots))) as pool:
        cases = Known(board, pool)
        words = _open(board, cases, knots)
        grids, errors = _refined(board, cases, knots, tolerance, lambda: say(words))
    off = [error.throughput for error in errors]
    exactness = Exactness(
        tolerance=tolerance,
        checked=len(errors),
        median=median(off) if off else 0.0,
        largest=max(off, default=0.0),
        largest_exposed=max((error.exposed for error in errors), default=0.0),
    )
    whole = tuple(_with_failures(board, cases, grids))
    simulated = sum(outcome != ENDED for outcome in cases.results.values())
    return ExploreGrid(board.controls, board.failures, whole, exactness, simulated, cases.ended)


@dataclass(frozen=True, slots=True)
class _Error:
    """How far throughput (relative) and the exposed share are off at positions between knots."""

    place: int
    positions: Positions
    throughput: float
    exposed: float


def _refined(
    board: Board, cases: Known, knots: list[Knots], tolerance: float, begin: Callable[[], None]
) -> tuple[tuple[StrategyGrid, ...], list[_Error]]:
    """The grids with as many knots as it takes, and how far off they are between them.

    After control-C those that were simulated whole, at least the coarsest with what is known of it.
    """
    whole = [[set(stops) for stops in chosen] for chosen in knots]
    try:
        begin()
        for seed in count():
            grids = _simulated(board, cases, knots)
            if cases.ended:
                break
            whole = [[set(stops) for stops in chosen] for chosen in knots]
            errors = _errors(board, cases, grids, _drawn(board, grids, seed))
            if cases.ended or not _refine(board, knots, errors, tolerance):
                break
    except KeyboardInterrupt:  # between simulations
        cases.ended = True
    if cases.ended:
        grids = _simulated(board, cases, whole)
        errors = _errors(board, cases, grids, cases.results)
    return grids, errors


def _open(board: Board, cases: Known, knots: Sequence[Knots]) -> str:
    """Simulate the first positions; how long all will take, as a text.

    Raises KeyboardInterrupt at a control-C: what came before it makes no page.
    """
    points = [
        (index, _placed(board, index, point))
        for index in board.places
        for point in product(*(sorted(knots[index][axis]) for axis in board.axes(index)))
    ]
    first = random.Random(0).sample(points, min(_TIMED, len(points)))  # noqa: S311 - no secret
    begin = tuple(board.begin())
    cases.simulate(((index, begin) for index in board.places), _FIRST)  # workers start, and read
    cases.simulate(first, _FIRST)
    if cases.ended:
        raise KeyboardInterrupt
    loose = sum(len(board.loose(index)) for index in board.places)
    more = sum(key not in cases.results for key in points)
    more += loose * _LOOKS + bool(loose) * _CHECKS
    return (
        f"about {duration(cases.rate * more)} more, for about {more:,} positions; control-C ends it"
        " earlier, and keeps what is done"
    )


def _simulated(board: Board, cases: Known, knots: Sequence[Knots]) -> tuple[StrategyGrid, ...]:
    board.refuse_many(knots)
    shown = [[tuple(sorted(knots[p][axis])) for axis in board.axes(p)] for p in board.places]
    points = [
        [_placed(board, index, point) for point in product(*stops)]
        for index, stops in enumerate(shown)
    ]
    wanted = ((index, point) for index in board.places for point in points[index])
    cases.simulate(wanted, "simulating positions")
    return tuple(
        _grid_of(board, cases, index, tuple(shown[index]), points[index]) for index in board.places
    )


def _placed(board: Board, index: int, point: Sequence[int]) -> Positions:
    """Positions of all controls: those that the strategy does not have are where they begin."""
    positions = board.begin()
    for axis, stop in zip(board.axes(index), point, strict=True):
        positions[axis] = stop
    return tuple(positions)


def _grid_of(
    board: Board,
    cases: Known,
    index: int,
    knots: tuple[tuple[int, ...], ...],
    points: Sequence[Positions],
) -> StrategyGrid:
    """Without what failures take: see `_with_failures`."""
    shown = [cases.figures(index, point) for point in points]
    values = {  # a text, which says why there is none, has no figures
        field.name: [getattr(figure, field.name, None) for figure in shown]
        for field in fields(Figures)
    }
    values["strategy"] = [
        board.title(index, point) if isinstance(figure, str) else figure.strategy
        for point, figure in zip(points, shown, strict=True)
    ]
    failed = {position: figure for position, figure in enumerate(shown) if isinstance(figure, str)}
    return StrategyGrid(
        board.question.titles[index], board.axes(index), knots, points, values, failed, {}
    )


def _with_failures(board: Board, cases: Known, grids: Sequence[StrategyGrid]) -> list[StrategyGrid]:
    """The grids with what failures take, at all stops of their control, if there is one."""
    axis = board.failures
    stops = [None] if axis is None else range(len(board.controls[axis].stops))
    total = len(stops) * sum(len(grid.points) for grid in grids)
    before = 0
    made: list[StrategyGrid] = []
    with progress_bar("failures") as done:
        for index, grid in enumerate(grids):
            lost_at: list[Lost | None] = []
            for stop in stops:
                lost_at += [_lost(board, cases, index, point, stop) for point in grid.points]
                if done:
                    done(before + len(lost_at), total)
            before += len(lost_at)
            values = {
                field.name: [getattr(taken, field.name, None) for taken in lost_at]
                for field in fields(Lost)
            }
            made.append(replace(grid, lost=values))
    return made


def _lost(
    board: Board, cases: Known, index: int, point: Positions, stop: int | None
) -> Lost | None:
    """What failures take at a point, where their control is at this stop; None: there is none."""
    outcome = cases.results[index, point]
    if isinstance(outcome, str):
        return None
    return lost(*outcome, None if stop is None else board.failing(point, stop))


def _drawn(
    board: Board, grids: Sequence[StrategyGrid], seed: int
) -> Iterable[tuple[int, Positions]]:
    """Random positions of the strategies that are interpolated."""
    draw = random.Random(1 + seed)  # noqa: S311 - no secret
    between_knots = [
        index
        for index, grid in enumerate(grids)
        if any(
            len(knots) < len(board.controls[axis].stops)
            for axis, knots in zip(grid.controls, grid.knots, strict=True)
        )
    ]
    for index in between_knots:
        for _ in range(_CHECKS // len(between_knots)):
            yield index, tuple(board.drawn(index, draw))


def _errors(
    board: Board,
    cases: Known,
    grids: Sequence[StrategyGrid],
    positions: Iterable[tuple[int, Positions]],
) -> list[_Error]:
    """At those of the positions that are no knots."""
    points = [set(grid.points) for grid in grids]
    wanted = [
        (index, point) for index, point in dict.fromkeys(positions) if point not in points[index]
    ]
    cases.simulate(wanted, "checking between positions")
    errors = []
    for index, point in wanted:
        exact, shown = cases.figures(index, point), between(grids[index], board.controls, point)
        if isinstance(exact, Figures) and shown is not None:
            off = abs(shown["tokens_per_s"] / exact.tokens_per_s - 1)
            errors.append(_Error(index, point, off, abs(shown["exposed"] - exact.exposed)))
    return errors


def _refine(board: Board, knots: list[Knots], errors: Sequence[_Error], tolerance: float) -> bool:
    """Make knots of the positions that are too far off, the worst first; whether there were any.

    Where they would be too many cases, none are made.
    """
    added = False
    for error in sorted(errors, key=lambda error: -error.throughput):
        if error.throughput <= tolerance:
            break
        more = [{*stops} for stops in knots[error.place]]
        for axis in board.loose(error.place):
            more[axis].add(error.positions[axis])
        wanted = [*knots[: error.place], more, *knots[error.place + 1 :]]
        if more != knots[error.place] and sum(board.counts(wanted)) <= MAX_CASES:
            knots[error.place] = more
            added = True
    return added
