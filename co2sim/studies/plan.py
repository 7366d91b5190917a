"""What to buy, or how to run what there is: the best of all candidates, and what comes near it."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from co2sim.common.errors import Co2simError, EngineError, OptionError
from co2sim.common.progress import Done
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver, power
from co2sim.prediction.batch import fits
from co2sim.prediction.case import Case
from co2sim.prediction.order import unshared
from co2sim.prediction.step_factors import StepFactor, scale_of_case, step_factor
from co2sim.prediction.totals import DAY, totals_of
from co2sim.studies.batch import Failure, Interrupted, Outcome, run_on
from co2sim.studies.candidates import Candidate, Fitting, Objective, Space, Want, candidates
from co2sim.studies.grid import display_name, strategy_title
from co2sim.studies.workers.flow import Pool
from co2sim.studies.workers.loky_pool import Engine, opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer.

    `choice` is the best option within the limits, `runner_up` the best one on another cluster or
    with another strategy (where there is but one of each: with another number of GPUs), `rival` the
    best on another cluster than the choice's. `best` has the best of each cluster and strategy, of
    those that were searched to the end, as the first ones and those of each cluster are:
    `unsearched` others cannot win. `front` has the options that none beats in both days and cost,
    from the fastest on. `undecided` says that the intervals of the first two
    overlap. Where nothing is within the limits, `choice` is None, and `best` and `front` show what
    there is without them.

    `simulated` of `candidates` cases were simulated; others cannot win, as computing alone takes
    them too long. `large` do not fit in memory, `failed` and `impossible` say what else was left
    out, and `unknown` names strategies whose steps were not measured.
    """

    wanted: Objective
    choice: Candidate | None
    runner_up: Candidate | None
    rival: Candidate | None
    undecided: bool
    best: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    candidates: int
    simulated: int
    large: int
    unsearched: int
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

    Gives what simulating all of them would give, but leaves out those whose computation alone, or
    whose communication alone, is too slow or too dear. At control-C it answers with what it has.
    Raises OptionError for a space that lacks prices or power that are wanted, and Co2simError where
    no candidate can be simulated.
    """
    engine = engine or Engine(jobs=jobs)
    _check_prices(space, wanted)
    tried = candidates(space)
    named = {strategy_title(one.case.strategy): one.case for one in tried.fitting}
    unknown = tuple(
        name
        for name, case in named.items()
        if "auto" not in name and step_factor(name, scale_of_case(case), wanted.goal) is None
    )
    kept = [one for one in tried.fitting if strategy_title(one.case.strategy) not in unknown]
    if unknown and not kept:
        raise OptionError(
            f"it is not known what a step of {unknown[0]} is worth; give"
            f" --steps-factor {unknown[0].partition('(')[0]}=1.3, say"
        )
    search = Search(kept, wanted, space.headroom)
    complete = search.run(engine, done)
    inside = bool(search.options)
    if not inside and complete and wanted.limited:
        search.lift_limits()
        complete = search.run(engine, done)
    best = search.best()
    choice = best[0] if best and inside else None
    runner_up = best[1] if choice and len(best) > 1 else None
    return Recommendation(
        wanted=wanted,
        choice=choice,
        runner_up=runner_up,
        rival=next((one for one in best if choice and _elsewhere(choice, one)), None),
        undecided=bool(choice and runner_up and overlap(choice, runner_up, wanted.want)),
        best=tuple(best),
        front=tuple(front(option for _, option in search.options)),
        candidates=len(kept),
        simulated=search.simulated,
        large=tried.large + search.large,
        unsearched=search.groups - len(best),
        failed=tuple(dict.fromkeys(search.failed)),
        impossible=tried.impossible,
        unknown=unknown,
        interrupted=not complete,
    )


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

    Nor by errors of their own, where both train every step together: see `prediction.order`.
    """
    ends, others = choice.ends(want), other.ends(want)
    if ends is None or others is None:
        return True
    if max(one.result.steps_per_round for one in (choice, other)) == 1:
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
    if currencies and unpriced:
        raise OptionError(
            f"{unpriced[0]!r} has no price_per_gpu, and others have; give all or none"
        )
    for cluster in loaded:
        lacking = power.missing(cluster)
        if lacking and (wanted.power is not None or wanted.want == "least-energy"):
            sets = " ".join(f"--set {name}={power.NEEDED[name]!r}" for name in lacking)
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


class ComputeBound:
    """The highest throughput by case; every kind of micro-step is simulated once.

    On one GPU, or on those that share every layer, sequence or expert; what these exchange is free.

    A strategy adds communication, an optimizer's step and waiting to it, and takes nothing off.
    A pipeline does the same work, and adds a bubble.
    """

    def __init__(self) -> None:
        self._speeds: dict[object, float] = {}

    def tokens_per_s(self, case: Case) -> float:
        """Of all GPUs of a case, if they did nothing but their micro-steps."""
        assert case.gpus is not None
        cluster = case.cluster if isinstance(case.cluster, str) else id(case.cluster)
        key = (cluster, case.micro_batch, case.recompute, case.tp, case.cp, case.ep)
        if key not in self._speeds:
            self._speeds[key] = _each_gpu(case)
        return case.gpus * self._speeds[key]


def _each_gpu(case: Case) -> float:
    """Tokens/s of a GPU by what a second micro-step adds to a step of as few as are needed."""
    gpus = math.lcm(case.tp * case.cp, case.ep)
    alone = replace(case, strategy="ddp", gpus=gpus, global_batch=None, pp=1, interleave=1)
    one, two = (driver.run(replace(alone, accumulation=steps)) for steps in (1, 2))
    if case.cp * case.ep == 1:
        return one.tokens_per_gpu_per_step / (two.step_time_s - one.step_time_s)
    computing = [result.step_time_s - result.exposed_comm_s for result in (one, two)]
    return one.tokens_per_gpu_per_step / (computing[1] - computing[0])


_Leaders: TypeAlias = tuple[tuple[object, float] | None, tuple[object, float] | None]
"""The best group and the next one, each with the score of its best option."""

_WAVE = 16
"""Cases for each process at a time; between waves, those that cannot win any more are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    """A candidate, what it is compared with, and the least that it can take.

    That is what its computation alone takes, or its busiest link alone.
    """

    case: Case
    cluster: Cluster
    group: object
    score: float
    days: float
    spent: float


class Search:
    """All candidates, one wave after the other, for one wish.

    `options` are those within the limits, with their group: the best is wanted, the best of another
    group, and all that none beats in both days and money. `simulated` counts cases, `large` those
    of them that did not fit after all; `failed` says why others have no figures.
    """

    def __init__(self, fitting: Sequence[Fitting], wanted: Objective, headroom: float) -> None:
        """Nothing is simulated yet, but for micro-steps of one GPU."""
        self._wanted, self._headroom = wanted, headroom
        self._promises = list(_promises(fitting, wanted))
        self._promises.sort(key=lambda one: (one.score, one.days, one.cluster.layout.world_size))
        self._left = deque(self._promises)
        self._seen: set[int] = set()
        self._front: list[tuple[float, float]] = []
        self._outside: list[tuple[object, Candidate]] = []
        self.options: list[tuple[object, Candidate]] = []
        self._leaders: _Leaders = (None, None)
        self._on_cluster: dict[str, float] = {}
        self.failed: list[str] = []
        self.large = 0
        self.simulated = 0

    def run(self, engine: Engine, done: Done | None) -> bool:
        """Look at all cases; False if it was stopped.

        What cannot win once those before it in its wave are known does not count, as if one process
        had looked at one case after the other: the answer is the same, however many there are.
        """
        total = len(self._promises)
        try:
            with opened(engine, total) as pool:
                size = 1 if pool is None else _WAVE * pool.slots
                while now := list(islice(self._hopeful(), size)):
                    for promise, outcome in zip(now, _outcomes(now, pool), strict=True):
                        if not self._hopeless(promise):
                            self._note(promise, outcome)
                    if done:
                        done(total - len(self._left), total)
        except KeyboardInterrupt:
            return False
        return True

    def _hopeful(self) -> Iterator[_Promise]:
        """Those that are left, the most promising first, but for the hopeless."""
        while self._left:
            one = self._left.popleft()
            if not self._hopeless(one):
                yield one

    def lift_limits(self) -> None:
        """Forget the limits; what was left out because of them is looked at again."""
        self._wanted = replace(self._wanted, budget=None, deadline=None, power=None)
        for group, option in self._outside:
            self._keep(group, option)
        self._outside = []
        self._left = deque(one for one in self._promises if id(one) not in self._seen)

    @property
    def groups(self) -> int:
        """Those with an option within the limits that was simulated."""
        return len({group for group, _ in self.options})

    def best(self) -> list[Candidate]:
        """The best option of every group that none left out can beat, the best of all first.

        If the search was stopped, those of all groups.
        """
        found: dict[object, Candidate] = {}

        def rank(pair: tuple[object, Candidate]) -> tuple[float, float, int]:
            option = pair[1]
            return option.score(self._wanted.want), option.totals.days, option.result.gpus

        for group, option in sorted(self.options, key=rank):
            found.setdefault(group, option)
        least: dict[object, float] = {}
        for one in self._promises if not self._left else ():
            if id(one) not in self._seen and not self._outside_limits(one):
                least[one.group] = min(one.score, least.get(one.group, math.inf))
        return [
            option
            for group, option in found.items()
            if option.score(self._wanted.want) <= least.get(group, math.inf)
        ]

    def _hopeless(self, one: _Promise) -> bool:
        """Whether even at its best a case is out of the limits, or beaten in all that counts.

        What counts is to be the best, or the best of another group (the runner-up), or of a
        cluster, or on the front.
        """
        if self._outside_limits(one):
            return True
        beaten = max(self._to_beat(one.group), self._best_on_its_cluster(one.case))
        return one.score >= beaten and any(
            days <= one.days and spent <= one.spent for days, spent in self._front
        )

    def _outside_limits(self, one: _Promise) -> bool:
        """Whether even at its best a case takes too long, or costs too much."""
        wanted = self._wanted
        if wanted.deadline is not None and one.days > wanted.deadline:
            return True
        return wanted.budget is not None and one.spent > wanted.budget

    def _to_beat(self, group: object) -> float:
        """The score of the best option, for its own group; of the runner-up for all others."""
        first, second = self._leaders
        if first is None:
            return math.inf
        if group == first[0]:
            return first[1]
        return math.inf if second is None else second[1]

    def _best_on_its_cluster(self, case: Case) -> float:
        """The score of the best option on the cluster of a case, of any size."""
        return self._on_cluster.get(display_name(case.cluster), math.inf)

    def _keep(self, group: object, option: Candidate) -> None:
        """Note an option within the limits."""
        self.options.append((group, option))
        score = option.score(self._wanted.want)
        self._lead(group, score)
        name = display_name(option.case.cluster)
        self._on_cluster[name] = min(score, self._on_cluster.get(name, math.inf))
        days, spent = option.totals.days, option.spent
        if not any(d <= days and s <= spent for d, s in self._front):
            self._front = [(d, s) for d, s in self._front if d < days or s < spent]
            self._front.append((days, spent))

    def _lead(self, group: object, score: float) -> None:
        """Keep the best two groups, with the scores of their best options."""
        known = dict(pair for pair in self._leaders if pair)
        known[group] = min(score, known.get(group, math.inf))
        ranked = sorted(known.items(), key=lambda pair: pair[1])
        self._leaders = ranked[0], ranked[1] if len(ranked) > 1 else None

    def _note(self, one: _Promise, outcome: Outcome) -> None:
        self.simulated += 1
        self._seen.add(id(one))
        if isinstance(outcome, Failure):
            self.failed.append(outcome.reason)
            return
        used, room = outcome.memory_bytes_per_gpu["total"], outcome.gpu_memory_bytes
        if not fits(used, room, self._headroom):
            self.large += 1
            return
        try:
            found = totals_of(one.case, outcome, self._wanted.tokens, self._wanted.goal)
        except OptionError as error:  # failures leave no time
            self.failed.append(f"{one.case.title}: {error}")
            return
        if found is None:
            self.failed.append(f"it is not known what a step of {outcome.strategy} is worth")
            return
        option = Candidate(case=one.case, cluster=one.cluster, result=outcome, totals=found)
        if option.within(self._wanted):
            self._keep(one.group, option)
        else:
            self._outside.append((one.group, option))


def _promises(fitting: Sequence[Fitting], wanted: Objective) -> Iterator[_Promise]:
    """Every case with the least that it can take."""
    floor, group_of = ComputeBound(), _grouping([one.case for one in fitting])
    loaded: dict[object, tuple[Cluster, int]] = {}
    factors: dict[object, StepFactor | None] = {}  # micro-batches and recomputation change none
    for one in fitting:
        case = one.case
        key = (display_name(case.cluster), case.gpus)
        if key not in loaded:
            assert case.gpus is not None
            assert isinstance(case.global_batch, int)
            entries = case.load()
            tokens = case.global_batch * entries[1].value.tokens
            loaded[key] = entries[0].value.resized(case.gpus), tokens
        cluster, tokens = loaded[key]
        name = strategy_title(case.strategy)
        alike = key, display_name(case.model), name, case.tp, case.pp
        if alike not in factors:
            factors[alike] = step_factor(name, scale_of_case(case), wanted.goal)
        factor = factors[alike]
        trained = wanted.tokens * (1.0 if factor is None else factor.factor)
        computing = trained / floor.tokens_per_s(case) / DAY
        days = max(computing, trained / tokens * one.link_time / DAY)
        price, gpus = cluster.price_per_gpu, cluster.layout.world_size
        spent = days * gpus * (24 if price is None else DAY * price)
        watts = power.all_computing(cluster)  # the least energy: no rank waits
        energy = 0.0 if watts is None else watts / 1000 * computing * 24
        score = {"fastest": days, "cheapest": spent, "least-energy": energy}[wanted.want]
        yield _Promise(
            case=case,
            cluster=cluster,
            group=group_of(case),
            score=score,
            days=days,
            spent=spent,
        )


def _grouping(cases: Sequence[Case]) -> Callable[[Case], object]:
    """By cluster and strategy; by GPUs where there is but one of each."""

    def pair(case: Case) -> object:
        return display_name(case.cluster), strategy_title(case.strategy)

    if len({pair(case) for case in cases}) > 1:
        return pair
    return lambda case: case.gpus


def _outcomes(promises: Sequence[_Promise], pool: Pool | None) -> Sequence[Outcome]:
    """A result or a failure for each."""
    cases = [one.case for one in promises]
    try:
        return run_on(pool, cases, progress=False)
    except Interrupted:
        raise KeyboardInterrupt from None
    except EngineError:
        raise
    except Co2simError as error:  # all of them
        return [Failure(case.title, error) for case in cases]
