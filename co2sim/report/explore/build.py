"""Simulate the grid behind a page without a server.

Every position of a control that is no continuous one is simulated. Of a continuous one some are,
its knots: enough that figures between them are as exact as asked for, first along lines that are
simulated whole, then at random positions, until none of those drawn last is too far off.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, product

import numpy as np
from numpy.typing import NDArray

from co2sim.common.progress import progress_bar
from co2sim.report.explore.board import MAX_CASES, Board, Knots, Known
from co2sim.report.explore.controls import Control
from co2sim.report.explore.grid import Exactness, ExploreGrid, Positions, StrategyGrid, between
from co2sim.report.explore.question import Figures, Lost, Question, lost

_LINES = 4
"""Of each continuous control and strategy, simulated at all positions."""
_CHECKS = 120
"""Random positions where figures are compared with the simulator's, of all strategies together."""


def build(
    question: Question, controls: Sequence[Control], tolerance: float, jobs: int
) -> ExploreGrid:
    """Simulate. Raises OptionError for more than `board.MAX_CASES` cases.

    Knots are added where random positions are too far off, until new ones are all within
    `tolerance`, or no more cases may be simulated.
    """
    board = Board(question, tuple(controls))
    known = Known(board, jobs)
    knots = [board.coarsest(place) for place in board.places]
    board.refuse_many(knots)
    _look_along_lines(board, known, knots, tolerance)
    for seed in count():
        grids = _simulated(board, known, knots)
        errors = _errors(board, known, grids, seed)
        if not _refine(board, knots, errors, tolerance):
            break
    off = [error.throughput for error in errors]
    exactness = Exactness(
        tolerance=tolerance,
        checked=len(errors),
        median=float(np.median(off)) if off else 0.0,
        largest=max(off, default=0.0),
        largest_exposed=max((error.exposed for error in errors), default=0.0),
    )
    whole = tuple(_with_failures(board, known, grids))
    return ExploreGrid(board.controls, board.failures, whole, exactness, len(known.found))


@dataclass(frozen=True, slots=True)
class _Error:
    """How far throughput (relative) and the exposed share are off at positions between knots."""

    place: int
    positions: Positions
    throughput: float
    exposed: float


def _look_along_lines(board: Board, known: Known, knots: Sequence[Knots], tolerance: float) -> None:
    """Add knots to continuous controls: the others are where they begin, and at random places."""
    draw = random.Random(0)  # noqa: S311 - no secret
    lines = [
        (place, at, [(*other[:at], stop, *other[at + 1 :]) for stop in range(stops)])
        for place in board.places
        for at in board.loose(place)
        for stops in [len(board.controls[at].stops)]
        for other in [board.begin(), *(board.drawn(place, draw) for _ in range(_LINES - 1))]
    ]
    wanted = [(place, one) for place, _, line in lines for one in line]
    known.simulate(wanted, "looking where figures bend")
    for place, at, line in lines:
        found = [known.found[place, one] for one in line]
        speeds = [one[1].tokens_per_s for one in found if not isinstance(one, str)]
        if len(speeds) == len(line):
            values = [stop.value or 1.0 for stop in board.controls[at].stops]
            _bend(knots[place][at], np.log(values), np.log(speeds), tolerance)


def _bend(
    knots: set[int], x: NDArray[np.float64], y: NDArray[np.float64], tolerance: float
) -> None:
    """Add the place that is furthest off until none is off by more than tolerated."""
    while True:
        shown = sorted(knots)
        errors = np.abs(np.interp(x, x[shown], y[shown]) - y)
        worst = int(np.argmax(errors))
        if errors[worst] <= tolerance:
            return
        knots.add(worst)


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


def _errors(board: Board, known: Known, grids: Sequence[StrategyGrid], seed: int) -> list[_Error]:
    """At random positions that are no knots."""
    draw = random.Random(1 + seed)  # noqa: S311 - no secret
    wanted: dict[tuple[int, Positions], None] = {}
    for place, grid in enumerate(grids):
        if any(
            len(knots) < len(board.controls[at].stops)
            for at, knots in zip(grid.controls, grid.knots, strict=True)
        ):
            drawn = (tuple(board.drawn(place, draw)) for _ in range(_CHECKS // len(grids)))
            points = set(grid.points)
            wanted |= {(place, one): None for one in drawn if one not in points}
    known.simulate(wanted, "checking between positions")
    errors = []
    for place, positions in wanted:
        exact, shown = (
            known.figures(place, positions),
            between(grids[place], board.controls, positions),
        )
        if isinstance(exact, Figures) and shown is not None:
            off = abs(shown["tokens_per_s"] / exact.tokens_per_s - 1)
            errors.append(_Error(place, positions, off, abs(shown["exposed"] - exact.exposed)))
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
