"""What a page may ask: the positions of a question's controls, and what was simulated of them."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from co2sim.common.errors import Co2simError, OptionError
from co2sim.hardware.failures import Failures
from co2sim.prediction.case import Case
from co2sim.prediction.result import Result
from co2sim.report.explore.controls import Control
from co2sim.report.explore.grid import Positions
from co2sim.report.explore.question import Figures, Question, figures
from co2sim.studies.batch import Failure, Outcome, run_all
from co2sim.studies.workers.loky_pool import processes

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

    question: Question
    controls: tuple[Control, ...]

    @property
    def places(self) -> range:
        """Of the strategies."""
        return range(len(self.question.strategies))

    @property
    def failures(self) -> int | None:
        """The place of the control of failures."""
        paths = [control.path for control in self.controls]
        return next((at for at, path in enumerate(paths) if path.startswith(_FAILING)), None)

    def axes(self, place: int) -> tuple[int, ...]:
        """Controls that change the simulation of a strategy."""
        return tuple(
            at
            for at, control in enumerate(self.controls)
            if place in control.strategies and control.path != _ARITHMETIC and at != self.failures
        )

    def loose(self, place: int) -> list[int]:
        """Those of the axes that are continuous."""
        return [at for at in self.axes(place) if self.controls[at].continuous]

    def begin(self) -> list[int]:
        """Where all controls begin."""
        return [control.at for control in self.controls]

    def coarsest(self, place: int) -> Knots:
        """All stops; of continuous controls both ends and the one that they begin at."""
        return [
            {0, control.at, len(control.stops) - 1}
            if at in self.loose(place)
            else set(range(len(control.stops)))
            for at, control in enumerate(self.controls)
        ]

    def drawn(self, place: int, draw: random.Random) -> list[int]:
        """Random positions of what a strategy has."""
        found = self.begin()
        for at in self.axes(place):
            found[at] = draw.randrange(len(self.controls[at].stops))
        return found

    def case(self, place: int, positions: Sequence[int]) -> Case:
        """The case there."""
        stops = (
            (control.path, control.stops[at].setting)
            for control, at in zip(self.controls, positions, strict=True)
        )
        settings = {path: setting for path, setting in stops if setting is not None}
        return self.question.loaded(place, settings)

    def failing(self, positions: Positions, stop: int) -> Failures | None:
        """The failures there, where their control is at this stop."""
        moved = list(positions)
        moved[self.failures or 0] = stop
        settings = {
            control.path: control.stops[at].setting or ""
            for control, at in zip(self.controls, moved, strict=True)
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
            math.prod(len(chosen[at]) for at in self.axes(place))
            for place, chosen in enumerate(knots)
        ]

    def refuse_many(self, knots: Sequence[Knots]) -> None:
        """Raise OptionError where the grids would be too many cases."""
        counts = self.counts(knots)
        if sum(counts) <= MAX_CASES:
            return
        place = counts.index(max(counts))
        sizes = [(self.controls[at].path, len(knots[place][at])) for at in self.axes(place)]
        most = max(sizes, key=lambda pair: pair[1])[0]
        raise OptionError(
            f"there are {sum(counts):,} positions to simulate, {max(counts):,} of"
            f" {self.question.titles[place]} ("
            + " x ".join(f"{path} {count}" for path, count in sizes)
            + f"); at most {MAX_CASES:,} are; give fewer strategies, fewer values with"
            f" --vary {most}=..., or a wider --tolerance"
        )


class Known:
    """What was simulated: results with their cases, or why there are none."""

    def __init__(self, board: Board, jobs: int) -> None:
        processes(jobs, 2)  # refuse a number that says nothing
        self.board, self.jobs = board, jobs
        self.found: dict[tuple[int, Positions], tuple[Case, Result] | str] = {}

    def simulate(self, wanted: Iterable[tuple[int, Positions]], what: str) -> None:
        """Those that are not known yet."""
        cases: dict[tuple[int, Positions], Case] = {}
        for key in wanted:
            if key not in self.found and key not in cases:
                try:
                    cases[key] = self.board.case(*key)
                except Co2simError as error:
                    self.found[key] = str(error)
        if not cases:
            return
        try:
            outcomes = run_all(list(cases.values()), self.jobs, what=what)
        except Co2simError:  # none of them can be simulated, each for its own reason
            outcomes = [_alone(case) for case in cases.values()]
        for (key, case), outcome in zip(cases.items(), outcomes, strict=True):
            self.found[key] = (case, outcome) if isinstance(outcome, Result) else outcome.reason

    def figures(self, place: int, positions: Positions) -> Figures | str:
        """What is shown of it."""
        found = self.found[place, positions]
        return found if isinstance(found, str) else figures(*found, self.board.question.goal)


def _alone(case: Case) -> Outcome:
    try:
        return run_all([case], progress=False)[0]
    except Co2simError as error:
        cause = error.__cause__
        return Failure(case.title, cause if isinstance(cause, Exception) else error)
