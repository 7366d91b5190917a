"""What to buy, or how to run what there is: the best of all candidates, and what comes near it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from co2sim.common.errors import OptionError
from co2sim.common.progress import Done
from co2sim.prediction import power
from co2sim.prediction.step_factors import step_factor
from co2sim.studies.candidates import Candidate, Space, Want, Wanted, candidates
from co2sim.studies.grid import strategy_title
from co2sim.studies.search import Search
from co2sim.studies.workers.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer.

    `choice` is the best option within the limits, `runner_up` the best one on another cluster or
    with another strategy (where there is but one of each: with another number of GPUs), `best` the
    best of each cluster and strategy that was simulated, `front` the options that none beats in
    both days and cost, from the fastest on. `undecided` says that the intervals of the first two
    overlap. Where nothing is within the limits, `choice` is None, and `best` and `front` show what
    there is without them.

    `simulated` of `candidates` cases were simulated; others cannot win, as computing alone takes
    them too long. `large` do not fit in memory, `failed` and `impossible` say what else was left
    out, and `unknown` names strategies whose steps nobody has measured.
    """

    wanted: Wanted
    choice: Candidate | None
    runner_up: Candidate | None
    undecided: bool
    best: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    candidates: int
    simulated: int
    large: int
    failed: tuple[str, ...]
    impossible: dict[str, str]
    unknown: tuple[str, ...]
    interrupted: bool


def plan(
    space: Space,
    wanted: Wanted,
    *,
    jobs: int = 1,
    engine: Engine | None = None,
    done: Done | None = None,
) -> Recommendation:
    """The best candidates of a space, simulated by so many `jobs`, or by an `engine` instead.

    Gives what simulating all of them would give, but leaves out those whose computation alone, or
    whose communication alone, is too slow or too dear. At control-C it answers with what it has.
    Raises OptionError for a space that lacks prices or power that are wanted, and Co2simError where
    no candidate can be simulated.
    """
    engine = engine or Engine(jobs=jobs)
    _check_prices(space, wanted)
    tried = candidates(space)
    names = dict.fromkeys(strategy_title(one.case.strategy) for one in tried.fitting)
    unknown = tuple(
        name for name in names if "auto" not in name and step_factor(name, wanted.goal) is None
    )
    kept = [one for one in tried.fitting if strategy_title(one.case.strategy) not in unknown]
    if unknown and not kept:
        raise OptionError(
            f"nobody knows what a step of {unknown[0]} is worth; give"
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
        undecided=bool(choice and runner_up and overlap(choice, runner_up, wanted.want)),
        best=tuple(best),
        front=tuple(front(option for _, option in search.options)),
        candidates=len(kept),
        simulated=search.simulated,
        large=tried.large + search.large,
        failed=tuple(dict.fromkeys(search.failed)),
        impossible=tried.impossible,
        unknown=unknown,
        interrupted=not complete,
    )


def front(options: Iterable[Candidate]) -> Iterator[Candidate]:
    """Those that none beats in days and in money, from the fastest on."""
    least = float("inf")
    for option in sorted(options, key=lambda option: (option.totals.days, option.spent)):
        if option.spent < least:
            least = option.spent
            yield option


def overlap(choice: Candidate, other: Candidate, want: Want) -> bool:
    """Whether their intervals do; without intervals nobody can tell."""
    ends, others = choice.ends(want), other.ends(want)
    return ends is None or others is None or ends[1] >= others[0]


def _check_prices(space: Space, wanted: Wanted) -> None:
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
