"""Simulate the grid behind a page without a server.

Every position of a control that is no continuous one is simulated. Of a continuous one some are,
its knots: enough that figures between them are as exact as asked for, first in the midst of knots
along some lines, then at random positions, until none of those drawn last is too far off. After
control-C the last grid that is whole is kept.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, pairwise, product
from statistics import median

from co2sim.common.progress import progress_bar
from co2sim.common.units import duration
from co2sim.report.explore.board import ENDED, MAX_CASES, Board, Knots, Known
from co2sim.report.explore.controls import Control
from co2sim.report.explore.grid import Exactness, ExploreGrid, Positions, StrategyGrid, between
from co2sim.report.explore.question import Figures, Lost, Question, lost
from co2sim.studies.workers.loky_pool import Engine, opened

_LINES = 3
"""Of each continuous control and strategy, along which knots are looked for."""
_LOOKS = 6
"""Positions that are simulated along a line, about."""
_TIMED = 12
"""Positions by which it says how long the others take."""
_FIRST = "simulating the first positions"
_CHECKS = 40
"""Random positions where figures are compared with the simulator's, of all strategies together."""


def build(
    question: Question,
    controls: Sequence[Control],
    tolerance: float,
    jobs: int,
    say: Callable[[str], None] = lambda _: None,
) -> ExploreGrid:
    """Simulate. Raises OptionError for more than `board.MAX_CASES` cases.

    Knots are added where random positions are too far off, until new ones are all within
    `tolerance`, or no more cases may be simulated. `say` gets how long it takes, once the first
    positions are known. Raises KeyboardInterrupt at a control-C before these.
    """
    board = Board(question, tuple(controls))
    knots = [board.coarsest(place) for place in board.places]
    board.refuse_many(knots)
    with opened(Engine(jobs=jobs), sum(board.counts(knots))) as pool:
        known = Known(board, pool)
        words = _open(board, known, knots)
        grids, errors = _refined(board, known, knots, tolerance, lambda: say(words))
    off = [error.throughput for error in errors]
    exactness = Exactness(
        tolerance=tolerance,
        checked=len(errors),
        median=median(off) if off else 0.0,
        largest=max(off, default=0.0),
        largest_exposed=max((error.exposed for error in errors), default=0.0),
    )
    whole = tuple(_with_failures(board, known, grids))
    simulated = sum(one != ENDED for one in known.found.values())
    return ExploreGrid(board.controls, board.failures, whole, exactness, simulated, known.ended)


@dataclass(frozen=True, slots=True)
class _Error:
    """How far throughput (relative) and the exposed share are off at positions between knots."""

    place: int
    positions: Positions
    throughput: float
    exposed: float


def _refined(
    board: Board, known: Known, knots: list[Knots], tolerance: float, begin: Callable[[], None]
) -> tuple[tuple[StrategyGrid, ...], list[_Error]]:
    """The grids with as many knots as it takes, and how far off they are between them.

    After control-C those that were simulated whole, at least the coarsest with what is known of it.
    """
    whole = [[set(stops) for stops in one] for one in knots]
    try:
        begin()
        _simulated(board, known, knots)
        _look_along_lines(board, known, knots, tolerance)
        for seed in count():
            grids = _simulated(board, known, knots)
            if known.ended:
                break
            whole = [[set(stops) for stops in one] for one in knots]
            errors = _errors(board, known, grids, _drawn(board, grids, seed))
            if known.ended or not _refine(board, knots, errors, tolerance):
                break
    except KeyboardInterrupt:  # between simulations
        known.ended = True
    if known.ended:
        grids = _simulated(board, known, whole)
        errors = _errors(board, known, grids, known.found)
    return grids, errors


def _open(board: Board, known: Known, knots: Sequence[Knots]) -> str:
    """Simulate the first positions; how long all will take, as a text.

    Raises KeyboardInterrupt at a control-C: what came before it makes no page.
    """
    points = [
        (place, _placed(board, place, point))
        for place in board.places
        for point in product(*(sorted(knots[place][at]) for at in board.axes(place)))
    ]
    first = random.Random(0).sample(points, min(_TIMED, len(points)))  # noqa: S311 - no secret
    begin = tuple(board.begin())
    known.simulate(((place, begin) for place in board.places), _FIRST)  # workers start, and read
    known.simulate(first, _FIRST)
    if known.ended:
        raise KeyboardInterrupt
    loose = sum(len(board.loose(place)) for place in board.places)
    more = sum(key not in known.found for key in points)
    more += loose * _LINES * _LOOKS + bool(loose) * _CHECKS
    return (
        f"about {duration(known.rate * more)} more, for about {more:,} positions; control-C ends it"
        " earlier, and keeps what is done"
    )


def _look_along_lines(board: Board, known: Known, knots: Sequence[Knots], tolerance: float) -> None:
    """Add knots to continuous controls: the others are where they begin, and at random places.

    The middle of two knots becomes one where it is off by more than tolerated, and so on.
    """
    draw = random.Random(0)  # noqa: S311 - no secret
    open_ = [
        (_Line(board, known, place, at, tuple(other)), *ends)
        for place in board.places
        for at in board.loose(place)
        for other in [board.begin(), *(board.drawn(place, draw) for _ in range(_LINES - 1))]
        for ends in pairwise(sorted(knots[place][at]))
    ]
    while open_ and not known.ended:
        middles = [(line, low, (low + high) // 2, high) for line, low, high in open_]
        middles = [one for one in middles if one[1] < one[2]]
        wanted = ((line.place, line.point(stop)) for line, *stops in middles for stop in stops)
        known.simulate(wanted, "looking where figures bend")
        open_ = []
        for line, low, middle, high in middles:
            if line.off(low, middle, high) > tolerance:
                knots[line.place][line.at].add(middle)
                open_ += [(line, low, middle), (line, middle, high)]


@dataclass(frozen=True)
class _Line:
    """Positions of a strategy that differ in one control, that at `at`."""

    board: Board
    known: Known
    place: int
    at: int
    other: Positions

    def point(self, stop: int) -> Positions:
        """Where the control is at this stop."""
        return (*self.other[: self.at], stop, *self.other[self.at + 1 :])

    def off(self, low: int, middle: int, high: int) -> float:
        """How far throughput between two stops is from that in the middle; 0 if one failed."""
        stops = self.board.controls[self.at].stops
        found = [self.known.found[self.place, self.point(at)] for at in (low, middle, high)]
        speeds = [math.log(one[1].tokens_per_s) for one in found if not isinstance(one, str)]
        if len(speeds) < len(found):
            return 0.0
        first, here, last = (math.log(stops[at].value or 1.0) for at in (low, middle, high))
        share = (here - first) / (last - first)
        return abs(math.expm1((1 - share) * speeds[0] + share * speeds[2] - speeds[1]))


def _simulated(board: Board, known: Known, knots: Sequence[Knots]) -> tuple[StrategyGrid, ...]:
    board.refuse_many(knots)
    shown = [[tuple(sorted(knots[p][at])) for at in board.axes(p)] for p in board.places]
    points = [
        [_placed(board, place, point) for point in product(*shown[place])] for place in board.places
    ]
    wanted = ((place, point) for place in board.places for point in points[place])
    known.simulate(wanted, "simulating positions")
    return tuple(
        _grid_of(board, known, place, tuple(shown[place]), points[place]) for place in board.places
    )


def _placed(board: Board, place: int, point: Sequence[int]) -> Positions:
    """Positions of all controls: those that the strategy does not have are where they begin."""
    found = board.begin()
    for at, stop in zip(board.axes(place), point, strict=True):
        found[at] = stop
    return tuple(found)


def _grid_of(
    board: Board,
    known: Known,
    place: int,
    knots: tuple[tuple[int, ...], ...],
    points: Sequence[Positions],
) -> StrategyGrid:
    """Without what failures take: see `_with_failures`."""
    found = [known.figures(place, point) for point in points]
    values = {
        field.name: [None if isinstance(one, str) else getattr(one, field.name) for one in found]
        for field in fields(Figures)
    }
    values["strategy"] = [
        board.title(place, point) if isinstance(one, str) else one.strategy
        for point, one in zip(points, found, strict=True)
    ]
    failed = {at: one for at, one in enumerate(found) if isinstance(one, str)}
    return StrategyGrid(
        board.question.titles[place], board.axes(place), knots, points, values, failed, {}
    )


def _with_failures(board: Board, known: Known, grids: Sequence[StrategyGrid]) -> list[StrategyGrid]:
    """The grids with what failures take, at all stops of their control; as they are without one."""
    if board.failures is None:
        return list(grids)
    stops = range(len(board.controls[board.failures].stops))
    total = len(stops) * sum(len(grid.points) for grid in grids)
    before = 0
    made: list[StrategyGrid] = []
    with progress_bar("failures") as done:
        for place, grid in enumerate(grids):
            found: list[Lost | None] = []
            for stop in stops:
                found += [_lost(board, known, place, one, stop) for one in grid.points]
                if done:
                    done(before + len(found), total)
            before += len(found)
            taken = {
                field.name: [None if one is None else getattr(one, field.name) for one in found]
                for field in fields(Lost)
            }
            made.append(replace(grid, lost=taken))
    return made


def _lost(board: Board, known: Known, place: int, point: Positions, stop: int) -> Lost | None:
    """What failures take at a point, where their control is at this stop."""
    found = known.found[place, point]
    if isinstance(found, str):
        return None
    case, result = found
    cluster = case.load()[0].value
    return lost(
        replace(case, cluster=replace(cluster, failures=board.failing(point, stop))), result
    )


def _drawn(
    board: Board, grids: Sequence[StrategyGrid], seed: int
) -> Iterable[tuple[int, Positions]]:
    """Random positions of the strategies that are interpolated."""
    draw = random.Random(1 + seed)  # noqa: S311 - no secret
    between_knots = [
        place
        for place, grid in enumerate(grids)
        if any(
            len(knots) < len(board.controls[at].stops)
            for at, knots in zip(grid.controls, grid.knots, strict=True)
        )
    ]
    for place in between_knots:
        for _ in range(_CHECKS // len(between_knots)):
            yield place, tuple(board.drawn(place, draw))


def _errors(
    board: Board,
    known: Known,
    grids: Sequence[StrategyGrid],
    positions: Iterable[tuple[int, Positions]],
) -> list[_Error]:
    """At those of the positions that are no knots."""
    points = [set(grid.points) for grid in grids]
    wanted = [(place, one) for place, one in dict.fromkeys(positions) if one not in points[place]]
    known.simulate(wanted, "checking between positions")
    errors = []
    for place, one in wanted:
        exact, shown = known.figures(place, one), between(grids[place], board.controls, one)
        if isinstance(exact, Figures) and shown is not None:
            off = abs(shown["tokens_per_s"] / exact.tokens_per_s - 1)
            errors.append(_Error(place, one, off, abs(shown["exposed"] - exact.exposed)))
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
        for at in board.loose(error.place):
            more[at].add(error.positions[at])
        wanted = [*knots[: error.place], more, *knots[error.place + 1 :]]
        if more != knots[error.place] and sum(board.counts(wanted)) <= MAX_CASES:
            knots[error.place] = more
            added = True
    return added
