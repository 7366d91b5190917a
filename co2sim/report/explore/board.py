"""What a page may ask: the positions of a question's controls, and what was simulated of them."""

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds
from co2sim.hardware.failures import Failures
from co2sim.prediction.case import Case
from co2sim.prediction.result import Result
from co2sim.report.explore.controls import Control
from co2sim.report.explore.grid import Positions
from co2sim.report.explore.question import Figures, Question, figures
from co2sim.studies.batch import Failure, Interrupted, Outcome, run_on
from co2sim.studies.workers.flow import Pool

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
        return self.question.loaded(place, self._settings(positions))

    def title(self, place: int, positions: Sequence[int]) -> str:
        """The strategy there, with its options."""
        return self.question.title(place, self._settings(positions))

    def _settings(self, positions: Sequence[int]) -> dict[str, str]:
        stops = (
            (control.path, control.stops[at].setting)
            for control, at in zip(self.controls, positions, strict=True)
        )
        return {path: setting for path, setting in stops if setting is not None}

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


ENDED = "not simulated: control-C came before"


class Known:
    """What was simulated: results with their cases, or why there are none.

    After control-C nothing more is simulated, and `ended` is True. `rate` is how long a case took.
    """

    def __init__(self, board: Board, pool: Pool | None) -> None:
        """On these workers, or without any in this process."""
        self.board, self.pool = board, pool
        self.found: dict[tuple[int, Positions], tuple[Case, Result] | str] = {}
        self.ended = False
        self.rate: Seconds = 0.0

    def simulate(self, wanted: Iterable[tuple[int, Positions]], what: str) -> None:
        """Those that are not known yet."""
        cases: dict[tuple[int, Positions], Case] = {}
        for key in wanted:
            if key not in self.found and key not in cases:
                try:
                    cases[key] = self.board.case(*key)
                except Co2simError as error:
                    self.found[key] = str(error)
        began, outcomes = time.monotonic(), self._outcomes(list(cases.values()), what)
        self.rate = (time.monotonic() - began) / len(cases) if cases else self.rate
        for place, (key, case) in enumerate(cases.items()):
            outcome = outcomes.get(place)
            if isinstance(outcome, Result):
                self.found[key] = case, outcome
            else:
                self.found[key] = outcome.reason if outcome else ENDED

    def _outcomes(self, cases: list[Case], what: str) -> Mapping[int, Outcome]:
        """By the places of the cases; those that control-C left are missing."""
        if self.ended or not cases:
            return {}
        try:
            return dict(enumerate(run_on(self.pool, cases, what=what)))
        except Interrupted as interrupt:
            self.ended = True
            return interrupt.outcomes
        except Co2simError:  # none of them can be simulated, each for its own reason
            return {place: _alone(case) for place, case in enumerate(cases)}

    def figures(self, place: int, positions: Positions) -> Figures | str:
        """What is shown of it."""
        found = self.found[place, positions]
        return found if isinstance(found, str) else figures(*found, self.board.question.goal)


def _alone(case: Case) -> Outcome:
    try:
        return run_on(None, [case], progress=False)[0]
    except Co2simError as error:
        cause = error.__cause__
        return Failure(case.title, cause if isinstance(cause, Exception) else error)
