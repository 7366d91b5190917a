"""Many cases, in order, on one process or several: what fails is named, and the others continue."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import sha256
from typing import Any, TypeAlias

from co2sim.catalog import Contents
from co2sim.common.convert import Count, shown
from co2sim.common.errors import Co2simError, NoRoomError, OptionError, ResourceError
from co2sim.common.progress import progress_bar
from co2sim.common.units import counted
from co2sim.common.version import own_identity
from co2sim.prediction.case import Case
from co2sim.prediction.driver import run
from co2sim.prediction.result import Result
from co2sim.simulation.metrics import scalability_ratio
from co2sim.strategies import parse
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
    cases: Sequence[Case],
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
        return run_on(pool, cases, progress=progress, what=what)


def run_on(
    pool: Pool | None,
    cases: Sequence[Case],
    *,
    progress: bool | None = None,
    what: str = "simulating cases",
) -> list[Outcome]:
    """As `run_all`, on workers that are there already; without any in this process."""
    found: dict[int, Outcome] = {}
    try:
        with progress_bar(what, shown=progress) as done:
            for place, outcome in _outcomes(pool, cases):
                found[place] = outcome
                if done:
                    done(len(found), len(cases))
    except KeyboardInterrupt:
        raise Interrupted(found, len(cases)) from None
    ordered = [found[place] for place in range(len(cases))]
    failures = [outcome for outcome in ordered if isinstance(outcome, Failure)]
    if failures and len(failures) == len(ordered):
        first = failures[0]
        if isinstance(first.error, Co2simError):
            raise type(first.error)(f"{first.case}: {first.reason}") from first.error
        raise first.error
    return ordered


def _outcomes(pool: Pool | None, cases: Sequence[Case]) -> Iterator[tuple[int, Outcome]]:
    """Outcomes with the places of their cases, as they come."""
    if pool is None:
        yield from ((place, outcome_of(case)) for place, case in enumerate(cases))
        return
    inputs = Inputs()
    items = ((place, inputs.inlined(case)) for place, case in enumerate(cases))
    yield from run_on_pool(pool, items, outcome_of, len(cases))


def run_on_pool(
    pool: Pool, items: Iterable[tuple[int, Case]], function: Any, total: int
) -> Iterator[tuple[int, Any]]:
    """What a function gives of cases with their places, or a failure, as it comes.

    The function runs on workers, which read no file: cases are `Inputs.inlined`.
    """
    for place, case, answer in run_flow(pool, items, function, total, _crowded):
        killed = isinstance(answer, ResourceError)
        yield place, Failure(case.title, answer) if killed else answer


def _crowded(answer: Any) -> bool:
    return isinstance(answer, Failure) and isinstance(answer.error, NoRoomError)


def outcome_of(case: Case) -> Outcome:
    """The result of a case, or why there is none."""
    try:
        return run(case)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases have a right to continue
        return Failure(case.title, error)


_CHARACTERS = 32
"""Of a key: 128 bits, so that no two of any number of cases share one."""


class Inputs:
    """Reads the files of cases, each once: a study is of one state of them.

    `further` is what results depend on besides their case.
    """

    def __init__(self, further: Any = None) -> None:
        """Nothing is read yet."""
        self._files: dict[tuple[object, ...], Contents | None] = {}
        self._strategies: dict[str, Any] = {}
        self._trees: dict[int, tuple[object, str]] = {}  # which keeps the object, and so its id
        self._start = sha256(_text([str(own_identity()), own_identity().source, _plain(further)]))

    def inlined(self, case: Case) -> Case:
        """See `Case.inlined`."""
        return case.inlined(self._files)

    def key(self, case: Case) -> str:
        """A hash of an inlined case, of what results depend on besides, and of co2sim itself.

        Two cases that differ in how they are written only, such as co2:tau=2 and co2(tau=2), have
        one key. Raises OptionError for an object that does not say what it computes.
        """
        given = {field.name: getattr(case, field.name) for field in fields(case)}
        given["cluster"] = self._loaded(case.cluster)
        given["model"] = self._loaded(case.model)
        given["stack"] = self._loaded(case.stack)
        if isinstance(case.strategy, str):
            given["strategy"] = self._strategy(case.strategy)
        else:
            given["strategy"] = _plain(case.strategy)
        given["overrides"] = list(case.overrides.items())  # in order: it names the cluster
        given["noise"] = _plain(case.noise)
        found = self._start.copy()
        found.update(_text(given))
        return found.hexdigest()[:_CHARACTERS]

    def _loaded(self, given: Any) -> Any:
        """A name of the catalog as it is; the hash of all else."""
        if isinstance(given, str):
            return given
        if id(given) not in self._trees:
            read = isinstance(given, Contents)
            plain = [given.name, given.tree, str(given.chosen)] if read else _plain(given)
            self._trees[id(given)] = given, sha256(_text(plain)).hexdigest()
        return [self._trees[id(given)][1]]

    def _strategy(self, text: str) -> Any:
        if text not in self._strategies:
            try:
                self._strategies[text] = _plain(parse(text))
            except Co2simError:  # which the case will say
                self._strategies[text] = text
        return self._strategies[text]


def _text(plain: Any) -> bytes:
    return json.dumps(plain, default=str).encode()


def _plain(value: Any) -> Any:
    """A value for JSON: dataclasses with their names, and those of users with their source."""
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        inside = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return [f"{kind.__module__}.{kind.__qualname__}", _source(kind), inside]
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, AbstractSet):
        return sorted(map(str, value))
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not getattr(value, "ndim", 1):
        return value.item()
    raise _unknown(value)


def _source(kind: type[Any]) -> str | None:
    """Of a class that is not ours, whose changes the hash of our source does not show."""
    if kind.__module__.partition(".")[0] == "co2sim":
        return None
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        raise _unknown(kind) from None


def _unknown(value: object) -> OptionError:
    return OptionError(
        f"{shown(value)}: nothing says when its results change; a strategy that is kept with its"
        " results must be a dataclass of plain values in a file of Python"
    )


def efficiencies(cases: Sequence[Case], results: Sequence[Result]) -> list[float | None]:
    """Throughput per GPU of each case, relative to the same on one node of its cluster.

    One node is simulated where it is none of the cases. None where the case cannot run on one.
    """
    known = {
        repr(case): result.tokens_per_s_per_gpu for case, result in zip(cases, results, strict=True)
    }
    alone: dict[str, float | None] = {}
    found = []
    for case, result in zip(cases, results, strict=True):
        node = replace(case, gpus=case.load()[0].value.gpus_per_node)
        key = repr(node)
        if key not in alone:
            alone[key] = known[key] if key in known else _per_gpu(node)
        one = alone[key]
        found.append(one and scalability_ratio(result.tokens_per_s_per_gpu, one))
    return found


def _per_gpu(case: Case) -> float | None:
    try:
        return run(case).tokens_per_s_per_gpu
    except Co2simError:  # a batch that does not divide, or a strategy between nodes
        return None
