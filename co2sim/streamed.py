"""A sweep that goes to a folder as it runs: any number of cases, in the memory of a few thousand.

What the folder has already is not computed again. Parts are written when they are complete, and
those that are not every half minute, so that a kill costs no more than that.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from co2sim.batch import Failure, outcome_of, spread
from co2sim.case import Case
from co2sim.columns import columns, fitted
from co2sim.engines.pool import Pool
from co2sim.errors import Co2simError, EngineError
from co2sim.grid import Setting, label
from co2sim.inputs import Inputs
from co2sim.parts import ROWS, Parts
from co2sim.points import Points, Shard
from co2sim.progress import Done, progress_bar
from co2sim.result import Result
from co2sim.rows import VARIED, row_of
from co2sim.step_factors import NO_GOAL, Goal
from co2sim.units import Seconds, counted

_SAVE: Seconds = 30.0
"""Between two times that incomplete parts are written."""
_NAMED = 1000
"""Failures that are kept to be named."""


@dataclass(kw_only=True)
class Kept:
    """What became of the cases of a sweep, or of its shard, that is kept in a folder.

    `computed` of them were simulated by now, `reused` stood in the folder already; `failed` of
    those computed have an error in place of figures, and the first of them are in `failures`, with
    what they vary.
    """

    folder: Path
    cases: int
    computed: int = 0
    reused: int = 0
    failed: int = 0
    failures: list[tuple[Setting, Failure]] = field(default_factory=list, repr=False)

    @property
    def done(self) -> int:
        """Cases that the folder has."""
        return self.computed + self.reused

    def so_far(self) -> str:
        """What the folder has of a sweep that did not end."""
        cases = counted(self.cases, "case")
        return f"{self.done:,} of {cases} are in {self.folder}; the same command goes on from there"

    def summary(self) -> dict[str, Any]:
        """As plain values for JSON."""
        counts = {name: getattr(self, name) for name in ("cases", "computed", "reused", "failed")}
        return {"out": str(self.folder), **counts}


class SweepStopped(KeyboardInterrupt):
    """Control-C before all cases were done: what the folder has by now."""

    def __init__(self, kept: Kept) -> None:
        super().__init__(kept.so_far())
        self.kept = kept


@dataclass(frozen=True)
class SweepTable:
    """What is asked for: the cases, the loss and the tokens of further columns, and the place."""

    points: Points
    folder: Path
    shard: Shard = field(default_factory=Shard)
    goal: Goal = NO_GOAL
    tokens: float | None = None


def stream(
    table: SweepTable,
    pool: Pool | None,
    progress: bool | None = None,  # noqa: FBT001
) -> Kept:
    """Simulate what the folder does not have yet.

    Raises `SweepStopped` at control-C, EngineError where no worker is left, and OptionError for a
    folder that cannot be written; whatever was done by then is in the folder.
    """
    with progress_bar("simulating cases", shown=progress) as done:
        run = _Filling(table, done)
        try:
            run.through(pool)
        except KeyboardInterrupt:
            run.save()
            raise SweepStopped(run.kept) from None
        except EngineError as error:
            run.save()
            raise EngineError(f"{error}; {run.kept.so_far()}") from error
        except BaseException:
            with suppress(Co2simError):  # such as a full disk, which is what is raised
                run.save()
            raise
    run.parts.finish()
    return run.kept


@dataclass(slots=True)
class _Part:
    """Rows of a part by their places; complete when there are `size` of them.

    `unsaved` says whether some were computed after it was written.
    """

    number: int
    size: int
    keys: dict[int, str]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    unsaved: bool = False


class _Filling:
    """The parts that are not complete yet, and what became of the others."""

    def __init__(self, table: SweepTable, done: Done | None) -> None:
        self._table, self._done = table, done
        self._columns = columns(table.points.axes, table.goal, table.tokens)
        self.parts = Parts(table.folder, self._columns, table.shard.prefix)
        self._places = table.shard.places(len(table.points))
        self.kept = Kept(folder=table.folder, cases=len(self._places))
        self._inputs = Inputs([list(self._columns), table.goal, table.tokens])
        self._open: dict[int, _Part] = {}
        self._part_of: dict[int, _Part] = {}
        self._saved = time.monotonic()

    def through(self, pool: Pool | None) -> None:
        """Simulate all cases that are not there."""
        function = partial(figures, goal=self._table.goal, tokens=self._table.tokens)
        answers: Iterator[tuple[int, Any]]
        if pool is None:
            answers = ((place, function(case)) for place, case in self._missing())
        else:
            answers = spread(pool, self._missing(), function, len(self._places))
        for place, answer in answers:
            self._take(place, answer)

    def save(self) -> None:
        """Write what is there of parts that are not complete."""
        for part in self._open.values():
            if part.unsaved:
                self._write(part)
        self._saved = time.monotonic()

    def _missing(self) -> Iterator[tuple[int, Case]]:
        """Cases to simulate; their parts are open from now on."""
        places = iter(self._places)
        number = 0
        while chunk := list(islice(places, ROWS)):
            yield from self._begin(number, chunk)
            number += 1

    def _begin(self, number: int, places: Sequence[int]) -> Iterator[tuple[int, Case]]:
        """Open a part, and take what is known of it; gives the other cases."""
        cases, keys = {}, {}
        wrong: dict[int, Failure] = {}
        for place in places:
            try:
                case = self._inputs.inlined(self._table.points.at(place))
                cases[place], keys[place] = case, self._inputs.key(case)
            except Co2simError as error:
                wrong[place] = Failure("", error)
        self._open[number] = part = _Part(number, len(places), keys)
        self._part_of |= dict.fromkeys(places, part)
        found = self.parts.find(list(keys.values()))
        for place, failure in wrong.items():
            self._take(place, failure)
        for place, case in cases.items():
            row = found.get(keys[place])
            if row is None:
                yield place, case
            else:
                self.kept.reused += 1
                self._note(place, row)

    def _take(self, place: int, answer: dict[str, Any] | Failure) -> None:
        """An answer of a worker, or the reason why there is no case."""
        self.kept.computed += 1
        self._part_of[place].unsaved = True
        if isinstance(answer, Failure):
            self.kept.failed += 1
            if len(self.kept.failures) < _NAMED:
                setting = self._table.points.setting(place)
                self.kept.failures.append((setting, answer))
            answer = row_of(self._known(place), answer)
        self._note(place, answer)
        if time.monotonic() - self._saved >= _SAVE:
            self.save()

    def _known(self, place: int) -> Case:
        """The case there; where none can be, what all have in common."""
        try:
            return self._table.points.at(place)
        except Co2simError:
            return self._table.points.case

    def _note(self, place: int, row: dict[str, Any]) -> None:
        part = self._part_of.pop(place)
        varied = {f"{VARIED}{p}": label(v) for p, v in self._table.points.setting(place).items()}
        whole = {**row, **varied, "case": place, "key": part.keys.get(place, "")}
        part.rows[place] = fitted(whole, self._columns)
        if len(part.rows) == part.size:
            self._write(part)
            del self._open[part.number]
        if self._done:
            self._done(self.kept.done, self.kept.cases)

    def _write(self, part: _Part) -> None:
        self.parts.write(part.number, [part.rows[place] for place in sorted(part.rows)])
        part.unsaved = False


def figures(case: Case, goal: Goal, tokens: float | None) -> dict[str, Any] | Failure:
    """In a worker: the row of a case, or why it has none."""
    outcome = outcome_of(case)
    if not isinstance(outcome, Result):
        return outcome
    try:
        return row_of(case, outcome, goal, tokens)
    except Co2simError as error:
        return Failure(case.title, error)
