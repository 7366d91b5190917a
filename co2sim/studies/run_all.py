"""Many cases, in order, on one process or several: what fails is named, and the others continue."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from co2sim.catalog import Contents
from co2sim.common.convert import Count
from co2sim.common.errors import Co2simError, NoRoomError, ResourceError
from co2sim.common.progress import progress_bar
from co2sim.common.units import counted
from co2sim.prediction.driver import run
from co2sim.prediction.intervals import efficiency_ends
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.simulation.metrics import scalability_ratio
from co2sim.studies.pools import Engine, Pool, opened, run_flow


@dataclass(frozen=True, slots=True)
class Failure:
    """A case without a result, and why."""

    case: str
    error: Exception

    @property
    def reason(self) -> str:
        """One line."""
        kind = "" if isinstance(self.error, Co2simError) else f"{type(self.error).__name__}: "
        return " ".join(f"{kind}{self.error}".split())


Outcome: TypeAlias = Result | Failure


class Interrupted(KeyboardInterrupt):
    """Control-C before all cases were done: what those that were gave, by their places."""

    def __init__(self, outcomes: Mapping[int, Outcome], cases: int) -> None:
        super().__init__(f"{len(outcomes)} of {counted(cases, 'case')} were done")
        self.outcomes = dict(sorted(outcomes.items()))


def run_all(
    cases: Sequence[Question],
    jobs: Count = 1,
    *,
    engine: Engine | None = None,
    progress: bool | None = None,
    what: str = "simulating cases",
) -> list[Outcome]:
    """A result, or a failure, for every case, in order; `progress` as in `simulate`, with `what`.

    `jobs` is how many processes run them, -1 for one per core; never more than there are cases, or
    two per core. An `engine` instead says who does. A case whose process is killed runs again, at
    the end alone, as does one without room beside others. Raises the error of the first case when
    none gave a result, and `Interrupted` at control-C.
    """
    with opened(engine or Engine(jobs=jobs), len(cases)) as pool:
        outcomes = run_on(pool, cases, progress=progress, what=what)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures and len(failures) == len(outcomes):
        first = failures[0]
        if isinstance(first.error, Co2simError):
            raise type(first.error)(f"{first.case}: {first.reason}") from first.error
        raise first.error
    return outcomes


def run_on(
    pool: Pool | None,
    cases: Sequence[Question],
    *,
    progress: bool | None = None,
    what: str = "simulating cases",
    beside: bool = True,
) -> list[Outcome]:
    """As `run_all`, on workers that are there, without any in this process; all may fail.

    `beside` as in `driver.run`.
    """
    outcomes: dict[int, Outcome] = {}
    outcome_of_each = partial(outcome_of, beside=beside)
    try:
        with progress_bar(what, shown=progress) as done:
            for index, outcome in _outcomes(pool, cases, outcome_of_each):
                outcomes[index] = outcome
                if done:
                    done(len(outcomes), len(cases))
    except KeyboardInterrupt:
        raise Interrupted(outcomes, len(cases)) from None
    return [outcomes[index] for index in range(len(cases))]


def _outcomes(
    pool: Pool | None, cases: Sequence[Question], answer: Callable[[Question], Outcome]
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes with the places of their cases, as they come."""
    if pool is None:
        yield from ((index, answer(case)) for index, case in enumerate(cases))
        return
    files: dict[tuple[object, ...], Contents | None] = {}
    items = ((index, case.inlined(files)) for index, case in enumerate(cases))
    yield from run_on_pool(pool, items, answer, len(cases))


def run_on_pool(
    pool: Pool, items: Iterable[tuple[int, Question]], function: Any, total: int
) -> Iterator[tuple[int, Any]]:
    """What a function gives of cases with their places, or a failure, as it comes.

    The function runs on workers, which read no file: cases are `Question.inlined`.
    """
    for index, case, answer in run_flow(pool, items, function, total, _crowded):
        killed = isinstance(answer, ResourceError)
        yield index, Failure(case.title, answer) if killed else answer


def _crowded(answer: Any) -> bool:
    return isinstance(answer, Failure) and isinstance(answer.error, NoRoomError)


def outcome_of(case: Question, *, beside: bool = True) -> Outcome:
    """The result of a case, or why there is none; `beside` as in `driver.run`."""
    try:
        return run(case, beside=beside)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases have a right to continue
        return Failure(case.title, error)


class Efficiency(NamedTuple):
    """Throughput per GPU, relative to one node, and the ends of its 90 % interval, if it has one.

    The interval is that of what the two do not share (`prediction.intervals`).
    """

    value: float
    ends: tuple[float, float] | None

    def __str__(self) -> str:
        """`94.4 % (87.3 to 100)`."""
        shown = f"{100 * self.value:.3g} %"
        if self.ends is None:
            return shown
        low, high = (f"{100 * min(1.0, end):.3g}" for end in self.ends)
        return f"{shown} ({low} to {high})"


def efficiencies(cases: Sequence[Question], results: Sequence[Result]) -> list[Efficiency | None]:
    """That of each case; None where the case cannot run on one node of its cluster.

    One node is simulated where it is none of the cases.
    """
    known = {repr(case): result for case, result in zip(cases, results, strict=True)}
    alone: dict[str, Result | None] = {}
    ratios: list[Efficiency | None] = []
    for case, result in zip(cases, results, strict=True):
        node = replace(case, gpus=case.load()[0].value.gpus_per_node)
        key = repr(node)
        if key not in alone:
            alone[key] = known[key] if key in known else _alone(node)
        single = alone[key]
        ratios.append(None if single is None else _relative(result, single))
    return ratios


def _relative(result: Result, single: Result) -> Efficiency:
    value = scalability_ratio(result.tokens_per_s_per_gpu, single.tokens_per_s_per_gpu)
    ends = efficiency_ends(result, single) if result.gpus != single.gpus else None
    return Efficiency(value, ends)


def _alone(case: Question) -> Result | None:
    try:
        return run(case, beside=False)
    except Co2simError:  # a batch that does not divide, or a strategy between nodes
        return None
