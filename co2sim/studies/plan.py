"""What to buy, or how to run what there is: the best of all candidates, and what comes near it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

from co2sim.common.convert import Money
from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.progress import Done
from co2sim.prediction import power
from co2sim.prediction.bounds import Least
from co2sim.prediction.choose import fits
from co2sim.prediction.intervals import unshared
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import joined, scale_of_case, step_factor
from co2sim.prediction.totals import DAY, totals_of
from co2sim.studies.candidates import Candidate, Objective, Setup, Space, Want, candidates
from co2sim.studies.grid import display_name, strategy_title
from co2sim.studies.pools import Engine, Pool, opened
from co2sim.studies.run_all import Failure, Outcome, run_on
from co2sim.training.framework import Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer.

    `choice` is the best option that is within the limits at the bad end of its intervals, too, and
    `gamble` a better one that is not; where none is, the choice is that of the `front` which keeps
    them most probably. `runner_up` the best one on another cluster or
    with another strategy (where there is but one of each: with another number of GPUs), `rival` the
    best on another cluster than the choice's. `best` has the best of each cluster and strategy, of
    those that were searched to the end, as the first ones and those of each cluster are:
    `unsearched` others cannot win. `front` has the options that none beats in both days and cost,
    from the fastest on, of doubled numbers of nodes and of others that were looked at. `undecided`
    says that the intervals of the first two overlap. Where nothing is within the limits, `choice`
    is None, and `best` and `front` show what there is without them.

    `simulated` of `candidates` cases were simulated. `large` do not fit in memory, among those that
    might have won. Others cannot win: their steps take too long by a bound (`prediction.bounds`).
    `doubled`: only doubled numbers of nodes were tried, as all are too many.
    `failed` and `impossible` say what else was left out, and `unknown` names strategies whose steps
    were not measured.
    """

    wanted: Objective
    choice: Candidate | None
    gamble: Candidate | None
    runner_up: Candidate | None
    rival: Candidate | None
    undecided: bool
    best: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    candidates: int
    simulated: int
    large: int
    unsearched: int
    doubled: bool
    failed: tuple[str, ...]
    impossible: dict[str, str]
    unknown: tuple[str, ...]
    interrupted: bool


def plan(
    space: Space,
    wanted: Objective,
    *,
    jobs: int = 1,
    engine: Engine | None = None,
    done: Done | None = None,
) -> Recommendation:
    """The best candidates of a space, simulated by `jobs` processes, or by an `engine` instead.

    Gives what simulating all of them would give, but leaves out those whose steps are too slow, or
    too dear, by a bound. At control-C it answers with what it has.
    Raises OptionError for a space that lacks prices or power that are wanted, and Co2simError where
    no candidate can be simulated.
    """
    engine = engine or Engine(jobs=jobs)
    _check_prices(space, wanted)
    tried = candidates(space)
    named = {strategy_title(setup.case.strategy): setup.case for setup in tried.setups}
    unknown = tuple(
        name
        for name, case in named.items()
        if "auto" not in name and step_factor(name, scale_of_case(case), wanted.goal) is None
    )
    kept = [setup for setup in tried.setups if strategy_title(setup.case.strategy) not in unknown]
    if unknown and not kept:
        raise OptionError(
            f"it is not known what a step of {unknown[0]} is worth; give"
            f" --steps-factor {unknown[0].partition('(')[0]}=1.3, say"
        )
    search = Search(kept, wanted, space.headroom)
    complete, gamble, choice, best, ahead = _looked(search, wanted, engine, done)
    if search.impossible and not (search.options or search.large or search.failed):
        name, reason = next(iter(search.impossible.items()))
        raise OptionError(f"{name}: {reason}")
    runner_up = best[1] if choice and len(best) > 1 else None
    return Recommendation(
        wanted=wanted,
        choice=choice,
        gamble=None if gamble == choice else gamble,
        runner_up=runner_up,
        rival=next((option for option in best if choice and _elsewhere(choice, option)), None),
        undecided=bool(choice and runner_up and overlap(choice, runner_up, wanted.want)),
        best=tuple(best),
        front=tuple(ahead),
        candidates=len(search),
        simulated=search.simulated,
        large=search.large,
        unsearched=search.groups - len(best),
        doubled=tried.doubled,
        failed=tuple(dict.fromkeys(search.failed)),
        impossible=tried.impossible | search.impossible,
        unknown=unknown,
        interrupted=not complete,
    )


class _Seen(NamedTuple):
    """What a search gave: whether it was not stopped, and what `plan` says.

    `best` has the best of all groups, the choice first, `front` those that none beats.
    """

    complete: bool
    gamble: Candidate | None
    choice: Candidate | None
    best: list[Candidate]
    front: list[Candidate]


def _looked(search: "Search", wanted: Objective, engine: Engine, done: Done | None) -> _Seen:
    """Look at all; then at what keeps the limits for sure, or without limits where none keeps them.

    Of what is shown all is simulated in the end.
    """
    complete = search.run(engine, done)
    inside, gamble, safest = bool(search.options), None, None
    if not inside and complete and wanted.limited:
        search.lift_limits()
        complete = search.run(engine, done)
    if inside and complete and wanted.limited:
        gamble = search.best()[0]
        search.look_for(surely=True)
        complete = search.run(engine, done)
        if not search.options:
            search.look_for(surely=False)
            safest = max(
                front(option for _, option in search.options),
                key=lambda option: chance_to_keep(option, wanted),
            )
    best, ahead = search.best(), list(front(option for _, option in search.options))
    if safest:
        best = [safest, *(option for option in best if _apart(safest, option))]
    if complete and not search.needs_power:
        in_full = _in_full([*best, *ahead, *([gamble] if gamble else [])], wanted, engine)
        try:
            best, ahead = [list(islice(in_full, len(some))) for some in (best, ahead)]
            gamble = next(in_full, None)
        except KeyboardInterrupt:
            complete = False
    return _Seen(complete, gamble, best[0] if best and inside else None, best, ahead)


def _in_full(
    options: Sequence[Candidate], wanted: Objective, engine: Engine
) -> Iterator[Candidate]:
    """Candidates of which the time was simulated, with all that is said of them, in order."""
    cases = {id(option): option.case for option in options}
    with opened(engine, len(cases)) as pool:
        outcomes = run_on(pool, list(cases.values()), progress=False)
    result_of = dict(zip(cases, outcomes, strict=True))
    for option in options:
        result = result_of[id(option)]
        assert isinstance(result, Result)
        totals = totals_of(option.case, result, wanted.tokens, wanted.goal)
        assert totals
        yield replace(option, result=result, totals=totals)


def _apart(choice: Candidate, other: Candidate) -> bool:
    """Whether it is on another cluster, or by another strategy, whatever its options."""
    names = (one.result.strategy.partition("(")[0] for one in (choice, other))
    return _elsewhere(choice, other) or len(set(names)) > 1


def chance_to_keep(option: Candidate, wanted: Objective) -> float:
    """How probable it is that the limits are kept; of one without an interval that is not known."""
    chances = (chance for _, _, _, chance in limits_of(option, wanted))
    return math.prod(1 - (_EVEN if chance is None else chance) for chance in chances)


_EVEN = 0.5
"""The chance of what is not known."""


def limits_of(
    option: Candidate, wanted: Objective
) -> Iterator[tuple[str, float, float | None, float | None]]:
    """Limits: what, how much at most, how much at the bad end, and the chance to miss it.

    The last two are None where there is no interval.
    """
    total = option.totals
    for name, most, value, least, worst in (
        ("deadline", wanted.deadline, total.days, total.days_low, total.days_high),
        ("budget", wanted.budget, total.cost, total.cost_low, total.cost_high),
    ):
        if most is None or value is None:
            continue
        chance = None
        if least is not None and worst is not None:
            chance = chance_to_miss(value, (least, worst), most)
        yield name, most, worst, chance


def chance_to_miss(value: float, ends: tuple[float, float], most: float) -> float:
    """How probable it is to be above: of a lognormal with this middle, each half with its end.

    `ends` are those of a 90 % interval.
    """
    end = ends[1] if most > value else ends[0]
    sigma = abs(math.log(end / value)) / NormalDist().inv_cdf(0.95)
    if not sigma:
        return float(most < value)
    return 1 - NormalDist(math.log(value), sigma).cdf(math.log(most))


def _elsewhere(choice: Candidate, other: Candidate) -> bool:
    """Whether it is on another cluster."""
    return display_name(choice.case.cluster) != display_name(other.case.cluster)


def front(options: Iterable[Candidate]) -> Iterator[Candidate]:
    """Those that none beats in days and in money, from the fastest on."""
    least = float("inf")
    for option in sorted(options, key=lambda option: (option.totals.days, option.spent)):
        if option.spent < least:
            least = option.spent
            yield option


def overlap(choice: Candidate, other: Candidate, want: Want) -> bool:
    """Whether their intervals do; without intervals that is not known.

    Nor by their own errors, where both train every step together: see `prediction.intervals`.
    """
    ends, others = choice.ends(want), other.ends(want)
    if ends is None or others is None:
        return True
    if max(option.result.steps_per_round for option in (choice, other)) == 1:
        ratio = abs(math.log(choice.score(want) / other.score(want)))
        return ends[1] >= others[0] and ratio <= unshared(choice.result, other.result)
    return ends[1] >= others[0]


def _check_prices(space: Space, wanted: Objective) -> None:
    """Refuse a wish that prices or power would have to answer, where they are not known."""
    loaded = [replace(space.job, cluster=c).load()[0].value for c in space.clusters]
    unpriced = [cluster.name for cluster in loaded if cluster.price_per_gpu is None]
    currencies = {cluster.currency for cluster in loaded if cluster.price_per_gpu is not None}
    if len(currencies) > 1:
        raise OptionError(
            f"prices are in {' and '.join(sorted(currencies))}; give them in one currency"
        )
    said = wanted.budget.currency if isinstance(wanted.budget, Money) else ""
    if said and currencies and said not in currencies:
        raise OptionError(f"the budget is in {said}, and prices are in {currencies.pop()}")
    if currencies and unpriced:
        raise OptionError(
            f"{unpriced[0]!r} has no price, and others have; give all the same by --set"
            " price_per_gpu='2.5 USD/h', or this one its own in a copy of its file, as"
            ' price_per_gpu = "2.5 USD/h"'
        )
    for cluster in loaded:
        lacking = power.missing(cluster)
        if lacking and (wanted.power is not None or wanted.want == "least-energy"):
            sets = power.sets(cluster, lacking)
            raise OptionError(
                f"energy needs the power of {cluster.name!r}; {' and '.join(lacking)}"
                f" {'is' if len(lacking) == 1 else 'are'} not known; give {sets}, say"
            )
    if unpriced and wanted.want == "cheapest":
        raise OptionError(
            f"the cheapest needs prices, and {unpriced[0]!r} has none; give one:"
            " --set price_per_gpu='2.5 USD/h', say, or --want fastest"
        )
    if unpriced and wanted.budget is not None:
        raise OptionError(
            f"a budget needs prices, and {unpriced[0]!r} has none; give one:"
            " --set price_per_gpu='2.5 USD/h', say"
        )


_WAVE = 4
"""Cases for each process at a time; between waves, those that cannot win any more are dropped."""

_BELOW = 1 - 1e-9
"""Of a bound: what its sums, in another order than the engine's, may be above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    """A candidate, what it is compared with, and the least that it can take (`prediction.bounds`).

    A `close` one has room in memory, and counts what its strategy adds to computing.
    """

    setup: Setup
    place: int
    micro_batch: int
    recompute: Recompute
    score: float
    days: float
    spent: float
    close: bool = False

    @property
    def order(self) -> tuple[float, float, int, int]:
        """The most promising first; of equal ones the smaller."""
        assert self.setup.case.gpus is not None
        return self.score, self.days, self.setup.case.gpus, self.place


_Found: TypeAlias = tuple[_Promise, Outcome | str | None]
"""A candidate with what became of it: None for one without room, a text for one that cannot be."""


class Search:
    """All candidates, the most promising first, for one wish.

    A candidate waits with a bound that costs little. When its turn comes its memory is computed,
    and a closer bound, with which it waits again; when its turn comes again it is simulated.
    `needs_power`: of each case all is simulated that its power needs, else no more than its time.
    `options` are those within the limits, with their group: the best is wanted, the best of another
    group, and all that none beats in both days and money. `simulated` counts cases, `large` those
    that were looked at and have no room; `failed` and `impossible` say why others have no figures.
    """

    def __init__(self, setups: Sequence[Setup], wanted: Objective, headroom: float) -> None:
        """Nothing is simulated yet."""
        self._wanted, self._headroom, self._surely = wanted, headroom, False
        self.needs_power = wanted.want == "least-energy" or wanted.power is not None
        group_of = _grouping([setup.case for setup in setups])
        self._groups = {id(setup): group_of(setup.case) for setup in setups}
        self._names = {id(setup): display_name(setup.case.cluster) for setup in setups}
        self._steps = {id(setup): _steps(setup, wanted) for setup in setups}
        self._bad_end = {id(setup): _bad_end(setup, wanted) for setup in setups}
        self.impossible: dict[str, str] = {}
        self._promises = list(self._first_promises(setups))
        self._queue = [(promise.order, promise) for promise in self._promises]
        heapify(self._queue)
        self._done: set[int] = set()
        self._front: list[tuple[float, float]] = []
        self._outside: list[tuple[object, Candidate]] = []
        self.options: list[tuple[object, Candidate]] = []
        self._least_of: dict[object, float] = {}
        self._on_cluster: dict[str, float] = {}
        self.failed: list[str] = []
        self.large = 0
        self.simulated = 0

    def __len__(self) -> int:
        """How many candidates there are, whether they have room or not."""
        return len(self._promises)

    def _first_promises(self, setups: Sequence[Setup]) -> Iterator[_Promise]:
        """All candidates; of what cannot be, only why."""
        order = 0
        for setup in setups:
            for recompute in setup.recomputes:
                for micro in setup.micro_batches:
                    steps = setup.samples // micro
                    try:
                        least = setup.bound.quick(micro, steps, recompute)
                    except Co2simError as error:
                        self._leave_out(setup, error)
                        continue
                    score, days, spent = self._least(setup, least)
                    yield _Promise(
                        setup=setup,
                        place=order,
                        micro_batch=micro,
                        recompute=recompute,
                        score=score,
                        days=days,
                        spent=spent,
                    )
                    order += 1

    def _leave_out(self, setup: Setup, reason: object) -> None:
        case = setup.case
        name = f"{strategy_title(case.strategy)} on {case.gpus:,} GPUs"
        self.impossible.setdefault(name, str(reason))

    def run(self, engine: Engine, done: Done | None) -> bool:
        """Look at all cases; False if it was stopped.

        What cannot win once those before it in its wave are known does not count, as if one process
        had looked at one case after the other: the answer is the same, however many there are.
        """
        total = len(self)
        try:
            with opened(engine, total) as pool:
                size = 1 if pool is None else _WAVE * pool.slots
                while wave := self._wave(size):
                    for promise, outcome in _with_outcomes(wave, pool, beside=self.needs_power):
                        if not self._hopeless(promise):
                            self._note(promise, outcome)
                    if done:
                        done(total - len(self._queue), total)
        except KeyboardInterrupt:
            return False
        return True

    def _wave(self, size: int) -> list[_Found]:
        """What comes next, until this number is to be simulated: "" stands for their outcome."""
        wave: list[_Found] = []
        while size and self._queue:
            promise = heappop(self._queue)[1]
            if self._hopeless(promise):
                continue
            if promise.close:
                wave.append((promise, ""))
                size -= 1
            else:
                try:
                    closer = self._closer(promise)
                except Co2simError as error:
                    wave.append((promise, str(error)))
                    continue
                if closer is None:
                    wave.append((promise, None))
                else:
                    self._promises[promise.place] = closer
                    heappush(self._queue, (closer.order, closer))
        return wave

    def _closer(self, promise: _Promise) -> _Promise | None:
        """With the closer bound; None without room. Raises Co2simError for what cannot be."""
        setup = promise.setup
        if not setup.fits(promise.micro_batch, promise.recompute, self._headroom):
            return None
        if setup.open:
            return replace(promise, close=True)
        steps = setup.samples // promise.micro_batch
        least = setup.bound.close(promise.micro_batch, steps, promise.recompute)
        score, days, spent = self._least(setup, least)
        return replace(
            promise,
            score=max(score, promise.score),
            days=max(days, promise.days),
            spent=max(spent, promise.spent),
            close=True,
        )

    def lift_limits(self) -> None:
        """Forget the limits; what was left out because of them is looked at again."""
        self._wanted = replace(self._wanted, budget=None, deadline=None, power=None)
        self.look_for(surely=False)

    def look_for(self, *, surely: bool) -> None:
        """Take only what keeps the limits `surely`, or all; what lost to others may win again."""
        self._surely = surely
        options, self.options, self._outside = [*self.options, *self._outside], [], []
        self._front, self._least_of, self._on_cluster = [], {}, {}
        for group, option in options:
            self._take(group, option)
        left = [promise for promise in self._promises if promise.place not in self._done]
        self._queue = [(promise.order, promise) for promise in left]
        heapify(self._queue)

    @property
    def groups(self) -> int:
        """Those with an option within the limits that was simulated."""
        return len({group for group, _ in self.options})

    def best(self) -> list[Candidate]:
        """The best option of every group that none left out can beat, the best of all first.

        If the search was stopped, those of all groups.
        """
        best_of: dict[object, Candidate] = {}

        def rank(pair: tuple[object, Candidate]) -> tuple[float, float, int]:
            option = pair[1]
            return option.score(self._wanted.want), option.totals.days, option.result.gpus

        for group, option in sorted(self.options, key=rank):
            best_of.setdefault(group, option)
        least: dict[object, float] = {}
        for promise in self._promises if not self._queue else ():
            if promise.place not in self._done and not self._outside_limits(promise):
                group = self._groups[id(promise.setup)]
                least[group] = min(promise.score, least.get(group, math.inf))
        return [
            option
            for group, option in best_of.items()
            if option.score(self._wanted.want) <= least.get(group, math.inf)
        ]

    def _hopeless(self, promise: _Promise) -> bool:
        """Whether even at its best a case is out of the limits, or beaten in all that counts.

        What counts is to be the best, or the best of another group (the runner-up), or of a
        cluster, or on the front, which doubled numbers of GPUs make.
        """
        if self._outside_limits(promise):
            return True
        setup = id(promise.setup)
        on_cluster = self._on_cluster.get(self._names[setup], math.inf)
        beaten = max(self._to_beat(self._groups[setup]), on_cluster)
        return promise.score >= beaten and (
            promise.setup.between
            or any(days <= promise.days and spent <= promise.spent for days, spent in self._front)
        )

    def _outside_limits(self, promise: _Promise) -> bool:
        """Whether even at its best a case takes too long, or costs too much.

        At the bad end of its interval the ranges of the step factor and of the price count at
        least.
        """
        wanted = self._wanted
        bad = self._bad_end[id(promise.setup)] if self._surely else 1.0
        if wanted.deadline is not None and bad * promise.days > wanted.deadline:
            return True
        if wanted.budget is None or not self._surely:
            return wanted.budget is not None and promise.spent > wanted.budget
        cluster = promise.setup.sized.cluster
        billed = cluster.bill(bad * promise.days * DAY, cluster.price_high)
        return billed is not None and billed.total > wanted.budget

    def _to_beat(self, group: object) -> float:
        """The score of the best option, for its own group; of the runner-up for all others."""
        first, second = sorted([*self._least_of.values(), math.inf, math.inf])[:2]
        return first if self._least_of.get(group) == first else second

    def _least(self, setup: Setup, least: Least) -> tuple[float, float, float]:
        """Score, days, and money or GPU-hours, of a training whose steps take the least."""
        steps, cluster = self._steps[id(setup)], setup.sized.cluster
        days = steps * least.seconds / DAY * _BELOW  # failures only lengthen it
        billed = cluster.bill(days * DAY)
        spent = days * 24 * cluster.layout.world_size if billed is None else billed.total
        if self._wanted.want == "fastest":
            return days, days, spent
        if self._wanted.want == "cheapest":
            return spent, days, spent
        joules = power.least_energy(cluster, least.seconds, least.computing)
        return (0.0 if joules is None else joules / 3.6e6 * steps * _BELOW), days, spent

    def _keep(self, group: object, option: Candidate) -> None:
        """Note an option within the limits."""
        self.options.append((group, option))
        score = option.score(self._wanted.want)
        self._least_of[group] = min(score, self._least_of.get(group, math.inf))
        name = display_name(option.case.cluster)
        self._on_cluster[name] = min(score, self._on_cluster.get(name, math.inf))
        days, spent = option.totals.days, option.spent
        if not any(d <= days and s <= spent for d, s in self._front):
            self._front = [(d, s) for d, s in self._front if d < days or s < spent]
            self._front.append((days, spent))

    def _note(self, promise: _Promise, outcome: Outcome | str | None) -> None:
        self._done.add(promise.place)
        if outcome is None:
            self.large += 1
        elif isinstance(outcome, str):
            self._leave_out(promise.setup, outcome)
        else:
            self._note_outcome(promise, outcome)

    def _note_outcome(self, promise: _Promise, outcome: Outcome) -> None:
        self.simulated += 1
        if isinstance(outcome, Failure):
            self.failed.append(f"{outcome.case}: {outcome.reason}")
            return
        used, room = outcome.memory_bytes_per_gpu["total"], outcome.gpu_memory_bytes
        if not fits(used, room, self._headroom):
            self.large += 1
            return
        case = promise.setup.of(promise.micro_batch, promise.recompute)
        try:
            totals = totals_of(case, outcome, self._wanted.tokens, self._wanted.goal)
        except OptionError as error:  # failures leave no time
            self.failed.append(f"{case.title}: {error}")
            return
        if totals is None:
            self.failed.append(f"it is not known what a step of {outcome.strategy} is worth")
            return
        cluster = promise.setup.sized.cluster
        option = Candidate(case=case, cluster=cluster, result=outcome, totals=totals)
        self._take(self._groups[id(promise.setup)], option)

    def _take(self, group: object, option: Candidate) -> None:
        if option.within(self._wanted, surely=self._surely):
            self._keep(group, option)
        else:
            self._outside.append((group, option))


def _steps(setup: Setup, wanted: Objective) -> float:
    """The steps of a training, or a project; micro-batches and recomputation change none."""
    case = setup.case
    factor = step_factor(strategy_title(case.strategy), scale_of_case(case), wanted.goal)
    trained = wanted.tokens * (1.0 if factor is None else factor.factor)
    trained *= wanted.goal.project.factor
    return trained / (setup.global_batch * setup.sized.model.tokens)


def _bad_end(setup: Setup, wanted: Objective) -> float:
    """How many times as long it takes at least at the bad end: by step factor and project."""
    case = setup.case
    factor = step_factor(strategy_title(case.strategy), scale_of_case(case), wanted.goal)
    return joined(wanted.goal.project.ends[1], factor.ends[1] if factor else 1.0) or 1.0


def _grouping(cases: Sequence[Question]) -> Callable[[Question], object]:
    """By cluster and strategy, whatever its options; else by these; else by GPUs."""

    def strategy(case: Question) -> object:
        return display_name(case.cluster), strategy_title(case.strategy).partition("(")[0]

    def options(case: Question) -> object:
        return display_name(case.cluster), strategy_title(case.strategy)

    for group_of in (strategy, options):
        if len({group_of(case) for case in cases}) > 1:
            return group_of
    return lambda case: case.gpus


def _with_outcomes(wave: Sequence[_Found], pool: Pool | None, *, beside: bool) -> Iterator[_Found]:
    """Those of a wave; what is to be simulated has a result, or a failure."""
    waiting = [promise for promise, outcome in wave if outcome == ""]
    cases = [each.setup.of(each.micro_batch, each.recompute) for each in waiting]
    outcomes = iter(run_on(pool, cases, progress=False, beside=beside) if cases else ())
    for promise, outcome in wave:
        yield promise, next(outcomes) if outcome == "" else outcome
