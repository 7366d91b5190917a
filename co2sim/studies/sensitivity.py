"""Where an answer changes: the price, bandwidth or step factor at which the runner-up wins."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from co2sim.common.errors import Co2simError
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.failures import PARTS
from co2sim.prediction import driver
from co2sim.prediction.choose import choose_batch
from co2sim.prediction.measure import rates
from co2sim.prediction.predict import at_speed, step_time
from co2sim.prediction.question import Question
from co2sim.prediction.totals import totals_of
from co2sim.strategies import parse
from co2sim.strategies.co2 import has_auto_options
from co2sim.strategies.local import LocalSteps
from co2sim.studies.candidates import Candidate, Objective
from co2sim.studies.grid import display_name, offer_name, strategy_title
from co2sim.studies.targets import Axis, axis_of, replaced

_REACH = 10.0
"""How far bandwidths are searched: from a tenth to ten times what is there."""
_OFTEN = 100.0
"""The same of how often parts fail."""
_NEAR = 5e-2
"""How exactly they are found."""


RUNNER_UP = "the runner-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """A number `what`, which is `now`, and the value `at` which the `winner` becomes the better.

    Texts `shown_now` and `shown_at` have units. `above` says that it does so from there up.
    """

    what: str
    now: float
    at: float
    shown_now: str
    shown_at: str
    above: bool
    winner: str = RUNNER_UP


def _turn(what: str, now: float, at: float, shown: Callable[[float], str]) -> BreakEven:
    return BreakEven(
        what=what, now=now, at=at, shown_now=shown(now), shown_at=shown(at), above=at > now
    )


def break_even(choice: Candidate, other: Candidate, wanted: Objective) -> list[BreakEven]:
    """All numbers that can turn the answer, each alone.

    Prices and step factors by division; bandwidths between nodes and sites, of the chosen cluster,
    by simulation of both options from a tenth to ten times what is there; how often its parts fail,
    from a hundredth to a hundred times as often.
    """
    ratio = other.score(wanted.want) / choice.score(wanted.want)
    return [
        *_prices(choice, other, wanted, ratio),
        *_factors(choice, other, ratio),
        *_bandwidths(choice, other, wanted, ratio),
        *_failures(choice, other, wanted, ratio),
    ]


def between_offers(choice: Candidate, rival: Candidate, wanted: Objective) -> list[BreakEven]:
    """Prices, and bandwidths of the chosen cluster, with which the best of another one wins."""
    ratio = rival.score(wanted.want) / choice.score(wanted.want)
    turns = [*_prices(choice, rival, wanted, ratio), *_bandwidths(choice, rival, wanted, ratio)]
    return [replace(turn, winner=offer_name(rival.case.cluster)) for turn in turns]


def _prices(
    choice: Candidate, other: Candidate, wanted: Objective, ratio: float
) -> Iterator[BreakEven]:
    """Of two clusters; those of one change together."""
    same = display_name(choice.case.cluster) == display_name(other.case.cluster)
    if wanted.want != "cheapest" or same:
        return
    for option, factor in ((choice, ratio), (other, 1 / ratio)):
        bill = option.totals.bill
        beside = bill.storage + bill.egress if bill else 0.0
        if bill and bill.compute and option.spent * factor > beside:
            what = f"the price of a GPU of {offer_name(option.case.cluster)}"
            shown = f"{{:,.2f}} {option.cluster.currency}/h".format
            now = bill.price_per_hour
            yield _turn(what, now, now * (option.spent * factor - beside) / bill.compute, shown)


def _factors(choice: Candidate, other: Candidate, ratio: float) -> Iterator[BreakEven]:
    """Of local updates: more steps to the same loss than was measured, or fewer."""
    for option, factor in ((choice, ratio), (other, 1 / ratio)):
        strategy = option.result.strategy
        if isinstance(parse(strategy), LocalSteps):
            now = option.totals.factor.factor
            yield _turn(f"the step factor of {strategy}", now, now * factor, "{:.3g}".format)


def _bandwidths(
    choice: Candidate, other: Candidate, wanted: Objective, ratio: float
) -> Iterator[BreakEven]:
    """Of the links between nodes, and between sites, of the cluster that was chosen."""
    cluster = choice.cluster
    paths = [
        *(["inter.bandwidth"] if cluster.nodes > 1 else []),
        *(["wan.bandwidth"] if cluster.wan and cluster.sites > 1 else []),
    ]
    both = display_name(choice.case.cluster) == display_name(other.case.cluster)
    for path in paths:
        axis = axis_of(choice.case, path)
        link = cluster.inter if path.startswith("inter") else cluster.wan
        assert link is not None
        now = link.bandwidth

        def behind(value: float, axis: Axis = axis) -> float:
            """How far the choice is behind: above 0 where the other one is the better."""
            mine = _score(choice, axis.at(choice.case, value), wanted)
            its = _score(other, axis.at(other.case, value), wanted) if both else None
            return math.log(mine / (other.score(wanted.want) if its is None else its))

        for end in _turns(behind, now, -math.log(ratio), _REACH):
            yield _turn(f"{path} of {offer_name(choice.case.cluster)}", now, end, axis.shown)


def _failures(
    choice: Candidate, other: Candidate, wanted: Objective, ratio: float
) -> Iterator[BreakEven]:
    """How many times as often parts of the chosen cluster would have to fail, or as seldom."""
    if choice.cluster.failures is None:
        return
    both = display_name(choice.case.cluster) == display_name(other.case.cluster)

    def behind(times: float) -> float:
        mine = _failing(choice, times, wanted)
        its = _failing(other, times, wanted) if both else other.score(wanted.want)
        return math.log(mine / its)

    for times_there in _turns(behind, 1.0, -math.log(ratio), _OFTEN):
        what = f"the rate of failures on {offer_name(choice.case.cluster)}"
        turn = _turn(what, 1.0, times_there, "{:.3g} times the stated one".format)
        yield replace(turn, shown_now="as stated")


def _failing(option: Candidate, times: float, wanted: Objective) -> float:
    """The score where parts fail more often by a factor."""
    assert option.cluster.failures is not None
    failures = option.cluster.failures.of_job(option.result.gpus, option.result.nodes)
    means = {name: getattr(failures, name) for name in PARTS}
    shorter = {name: mean / times for name, mean in means.items() if mean is not None}
    cluster = replace(option.cluster, failures=replace(failures, **shorter))
    model = option.case.load()[1].value
    case = replace(option.case, cluster=cluster, model=model, overrides={}, gpus=None)
    totals = totals_of(case, option.result, wanted.tokens, wanted.goal)
    assert totals is not None
    return replace(option, totals=totals).score(wanted.want)


def _turns(
    behind: Callable[[float], float], now: float, here: float, reach: float
) -> Iterator[float]:
    """The nearest values below and above at which it stops being below 0; it is `here` now."""
    from scipy.optimize import brentq  # noqa: PLC0415 - 0.2 s that no help needs

    @cache  # each takes two simulations, and the search begins with points that were seen
    def at(distance: float) -> float:
        return behind(now * math.exp(distance)) if distance else here

    for far in (-math.log(reach), math.log(reach)):
        try:
            if at(far) > 0:
                yield now * math.exp(brentq(at, 0, far, xtol=_NEAR))
        except (Co2simError, ValueError):  # one of them cannot be had there
            continue


def _score(option: Candidate, case: Question, wanted: Objective) -> float:
    """The score of an option where a number of its case is another."""
    if wanted.want == "least-energy" or has_auto_options(case.parsed):  # more than times change
        result = driver.run(case)
    else:
        result = at_speed(option.result, choose_batch(case)[0].job())
    totals = totals_of(case, result, wanted.tokens, wanted.goal)
    assert totals is not None, strategy_title(case.strategy)
    return replace(option, result=result, totals=totals).score(wanted.want)


MORE = 1.1
"""How many times better each number is made: more bandwidth, or less latency."""

_ROUNDING = 1e-9
"""A gain that is nothing."""

_LINKS = ("intra", "inter", "wan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What one number does.

    `change` says what is changed, `gain` is the growth of tokens/s, `gpus` how many more GPUs of
    the same kind would give the same, and `worth_per_hour` what those cost, in `currency`. The last
    three are None where no more GPUs give more, or nothing has a price.
    """

    change: str
    gain: float
    gpus: float | None
    worth_per_hour: float | None
    currency: str | None


def moved(case: Question) -> tuple[Question, list[tuple[str, Cluster]]]:
    """The case with its numbers as objects, and its cluster with each number a tenth better."""
    case = driver.resolve_auto(case)
    cluster, model = case.load()
    sized = cluster.value.resized(case.gpus) if case.gpus is not None else cluster.value
    return replace(case, cluster=sized, model=model.value, overrides={}, gpus=None), list(
        _moves(sized)
    )


def levers(case: Question) -> list[Sensitivity]:
    """All levers of a case, the strongest first; each takes a simulation."""
    plain, moves = moved(case)
    sized = plain.cluster
    assert isinstance(sized, Cluster)
    before = _speed(plain)
    marginal = _marginal(plain, sized, before)
    ranked = []
    for change, better in moves:
        gain = _speed(replace(plain, cluster=better)) / before - 1
        gain = gain if abs(gain) > _ROUNDING else 0.0
        gpus = gain * before / marginal if marginal else None
        price = sized.price_per_gpu
        worth = None if gpus is None or price is None else gpus * price * 3600
        ranked.append(
            Sensitivity(
                change=change,
                gain=gain,
                gpus=gpus,
                worth_per_hour=worth,
                currency=None if price is None else sized.currency,
            )
        )
    return sorted(ranked, key=lambda lever: -lever.gain)


def _moves(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Clusters of which one number is better."""
    gpu = cluster.gpu
    peaks = {kind: speed * MORE for kind, speed in gpu.peak.items()}
    faster = replace(gpu, peak=peaks)
    yield "gpu.peak", replace(cluster, gpu=faster)
    wide = replace(gpu, memory_bandwidth=gpu.memory_bandwidth * MORE)
    yield "gpu.memory_bandwidth", replace(cluster, gpu=wide)
    for name in _LINKS:
        link: Any = getattr(cluster, name)
        used = {"intra": cluster.gpus_per_node > 1, "inter": cluster.nodes_per_site > 1}
        if link is None or not used.get(name, cluster.sites > 1):
            continue
        path = f"{name}.bandwidth"
        yield path, replaced(cluster, path, link.bandwidth * MORE)
        if link.latency:
            path = f"{name}.latency"
            yield path, replaced(cluster, path, link.latency / MORE)


def _marginal(case: Question, cluster: Cluster, before: float) -> float | None:
    """Tokens/s that a further GPU gives, by adding a node to each site; None for no more."""
    gpus = cluster.layout.world_size
    more = cluster.gpus_per_node * cluster.sites
    try:
        gain = (_speed(replace(case, gpus=gpus + more)) - before) / more
    except Co2simError:  # a global batch that does not divide, say
        return before / gpus
    return gain if gain > 0 else None


def _speed(case: Question) -> float:
    """Tokens/s of a case with numbers."""
    job = case.job()
    return float(rates(job, step_time(job))["tokens_per_s"])
