"""Which tau: the time of a round on a cluster, joined with the bound of the error."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from rich.console import Console

from analysis.convergence import bound, bound_report, clipping
from analysis.convergence.bound import Bound
from analysis.convergence.setting import Delay, Late, Setting
from co2sim.common.errors import OptionError
from co2sim.common.tables import print_table
from co2sim.common.units import Seconds, duration, percent
from co2sim.prediction import driver
from co2sim.prediction.choose import choose_batch
from co2sim.prediction.job import Stage
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.strategies import LocalSteps, Strategy
from co2sim.strategies.co2 import CO2, PublishedCO2
from co2sim.strategies.local import Replica, round_steps
from co2sim.strategies.local_sgd import LocalSGD, SlowMo
from co2sim.studies.grid import with_change
from realrun import record

_MAX_ROUNDS = 2**40
"""Where the search for a target ends."""
USUAL = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Taus to simulate if none are asked for."""
LONGEST = 4096
"""Where the search for the best tau ends."""
Averaging = CO2 | PublishedCO2 | SlowMo | LocalSGD
"""The strategies that the bound is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a round takes with some tau; `exposed` is its part that only communicates.

    `exposed` is None where it was not measured.
    `workers` is G: the number of replicas that are averaged. `delay` is in rounds; with `late`
    averages are some local steps late instead, without a restart.
    `fits_in_memory` is None for a round that was measured; a simulation continues as if it fitted.
    """

    tau: int
    round_time: Seconds
    exposed: Seconds | None
    workers: int
    delay: int
    source: str
    late: Late | None = None
    fits_in_memory: bool | None = None

    @property
    def lateness(self) -> Delay:
        """When an average is used."""
        return Delay(self.late.steps if self.late else None, self.delay)

    @property
    def share(self) -> str:
        """The exposed share of the round, as text."""
        return "unknown" if self.exposed is None else f"{self.exposed / self.round_time:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a tau would give after some time of training, at the best inner step."""

    timing: Timing
    rounds: int
    setting: Setting
    bound: Bound

    @property
    def inner_step(self) -> float:
        """The best gamma."""
        return self.setting.inner_step

    def least_phi(self, largest: float | None) -> float | None:
        """The clip whose bias alone adds 1 %, for M = `largest` or else sqrt(2 L Delta)."""
        start = clipping.start_gradient(self.setting)
        return bound_report.recommended(self.setting, start if largest is None else largest)


def simulated(case: Question, taus: Sequence[int]) -> list[Timing]:
    """Rounds of a strategy with every tau, by co2sim, of a case that is `settled`.

    Raises OptionError for a tau whose round does not hold the delay and the fragments.
    """
    if min(taus) < (least := _shortest(case)):
        raise OptionError(
            f"--taus has {min(taus)}; {case.strategy} needs rounds of {least} steps or more"
        )
    ordered = sorted(set(taus), reverse=True)
    timings = Parallel(n_jobs=-1)(delayed(_simulated)(case, tau) for tau in ordered)
    return sorted(timings, key=lambda timing: timing.tau)


def _shortest(case: Question) -> int:
    """Steps of the shortest round that holds the delay and the fragments of a strategy."""
    strategy = case.parsed
    if not isinstance(strategy, CO2):
        return 1
    return (strategy.fragments or 1) if strategy.delay == "auto" else strategy.late.shortest_round


def searched(
    problem: Setting, case: Question, lengths: Sequence[Seconds], hides: int | None = None
) -> list[Timing]:
    """Rounds with the usual taus; tau is doubled further while the largest is best at some time.

    The search begins at the shortest round that holds the delay and the fragments, and includes the
    tau that `hides` averages. It ends at LONGEST, and where a round is longer than all lengths. The
    case is `settled`.
    """
    least = _shortest(case)
    usual = {least, *(tau for tau in USUAL if tau > least), hides or least}
    timings = simulated(case, sorted(usual))
    while timings[-1].tau < LONGEST and any(
        choices and best(choices).timing is timings[-1]
        for choices in (after(problem, timings, length) for length in lengths)
    ):
        timings.append(_simulated(case, 2 * timings[-1].tau))
    return timings


def settled(case: Question) -> Question:
    """The case with numbers for what it leaves open of its batch: those of `co2sim run`.

    Raises OptionError for a strategy that the bound is not about.
    """
    averaging(case.parsed)
    return choose_batch(case)[0]


def hiding(case: Question) -> int | None:
    """The tau that `co2sim run` takes: the shortest round that hides its averages.

    None where none does, or the strategy has no tau=auto.
    """
    strategy = case.parsed
    if not isinstance(strategy, CO2):
        return None
    try:
        resolved = driver.resolve_auto(replace(case, strategy=replace(strategy, tau="auto")))
    except OptionError:  # the link is too slow
        return None
    return round_steps(averaging(resolved.strategy))  # type: ignore[arg-type]


def _simulated(case: Question, tau: int) -> Timing:
    """A round; with delay=auto its averages are used as soon as that hides them."""
    mine, result = _run(case, tau)
    stage = mine.stage()
    source = (
        f"simulated with micro-batch {result.micro_batch} x {result.accumulation} of"
        f" {stage.workload.model.tokens:,} {result.unit}s, recompute {result.recompute}"
    )
    timing = _timing(stage, result.round_time_s, result.exposed_comm_s, source)
    return replace(timing, fits_in_memory=result.fits_in_memory)


def _run(case: Question, tau: int) -> tuple[Question, Result]:
    mine = driver.resolve_auto(with_change(case, "strategy.tau", str(tau)))
    return mine, driver.run(mine)


def chosen(case: Question, advice: "Advice") -> tuple[Question, Result] | None:
    """The case with the tau of the least bound after the longest time, and its result.

    None where not even one round fits in.
    """
    _, choices = max(advice.choices, key=lambda pair: pair[0])
    return _run(case, best(choices).timing.tau) if choices else None


def measured(folders: Sequence[Path]) -> list[Timing]:
    """Rounds of real runs, from their folders."""
    timings = []
    for folder in folders:
        kept = record.read(folder)
        exposed = kept.figures.get("exposed_comm_s")
        timings.append(
            _timing(
                kept.case.stage(),
                float(kept.figures["round_time_s"]),
                None if exposed is None else float(exposed),
                f"measured in {folder.name}",
            )
        )
    return sorted(timings, key=lambda timing: timing.tau)


def averaging(strategy: Strategy) -> Averaging:
    """The strategy, if it is one that the bound is about. Raises OptionError if it is not."""
    if isinstance(strategy, Averaging):
        return strategy
    local = "" if isinstance(strategy, LocalSteps) else ", which has no local steps"
    raise OptionError(
        f"the strategy is {strategy.name}{local}; the bound is about co2, co2.published, slowmo and"
        " local_sgd"
    )


def _timing(stage: Stage, round_time: Seconds, exposed: Seconds | None, source: str) -> Timing:
    strategy = averaging(stage.strategy)
    layout = stage.layout
    return Timing(
        tau=round_steps(strategy),
        round_time=round_time,
        exposed=exposed,
        workers=Replica.of(strategy).workers(layout),
        delay=getattr(strategy, "staleness", 0),
        source=source,
        late=late_of(strategy),
    )


def late_of(strategy: object) -> Late | None:
    """How averages are late by local steps, of a strategy that has such a delay.

    Raises OptionError for a delay that is not a number yet, or one that the bound does not cover.
    """
    steps = getattr(strategy, "delay", None)
    if steps is None:
        return None
    if not isinstance(steps, int):
        raise OptionError(f"delay is {steps}; the bound needs a number of steps, such as delay=1")
    if not isinstance(strategy, CO2):
        return Late(steps=steps)
    keep, predict = strategy.kept()
    return Late(steps=steps, keep=keep, predict=predict, fragments=strategy.parts())


def after(problem: Setting, timings: Sequence[Timing], seconds: Seconds) -> list[Choice]:
    """The bound after a time of training, for each tau of which at least one round fits in."""
    return [
        _choice(problem, timing, int(seconds / timing.round_time))
        for timing in timings
        if timing.round_time <= seconds
    ]


def _choice(problem: Setting, timing: Timing, rounds: int) -> Choice:
    setting = bound.tuned(
        replace(
            problem,
            workers=timing.workers,
            rounds=rounds,
            local_steps=timing.tau,
            delay=timing.delay,
            late=timing.late,
        )
    )
    reached = bound.evaluate(setting)
    assert isinstance(reached, Bound)
    return Choice(timing=timing, rounds=rounds, setting=setting, bound=reached)


def best(choices: Sequence[Choice]) -> Choice:
    """The choice with the smallest bound."""
    return min(choices, key=lambda choice: choice.bound.total)


def until(problem: Setting, timing: Timing, target: float) -> Seconds | None:
    """The time until the bound is at most `target`, or None if that takes too long to tell.

    The bound at the best step falls with T, so that bisection finds the least T.
    """
    high = 1
    while _choice(problem, timing, high).bound.total > target:
        high *= 2
        if high > _MAX_ROUNDS:
            return None
    low = high // 2
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        if _choice(problem, timing, middle).bound.total > target:
            low = middle
        else:
            high = middle
    return high * timing.round_time


def explain(choices: Sequence[Choice], most: int) -> Iterator[str]:
    """Explain the choice of tau in sentences. `most` is the largest tau that was asked for."""
    if not choices:
        return
    chosen = best(choices)
    timing, least = chosen.timing, chosen.bound
    fastest = max(map(_steps, choices))
    yield (
        f"tau = {timing.tau} takes {_steps(chosen) / fastest:.0%} of the steps of the fastest tau;"
        f" {timing.share} of its rounds is exposed communication."
    )
    rare = least.staleness + least.drift
    yield (
        f"Of its bound {least.optimization / least.total:.0%} is optimization,"
        f" {least.noise / least.total:.0%} noise, and {rare / least.total:.0%} the price of"
        " averaging rarely and late (staleness and drift)."
    )
    shorter = [c for c in choices if c.timing.tau < timing.tau]
    longer = [c for c in choices if c.timing.tau > timing.tau]
    if shorter:
        yield f"{_compared(max(shorter, key=_tau), chosen, fastest)}."
    if longer:
        other = min(longer, key=_tau)
        yield (
            f"{_compared(other, chosen, fastest)}: its rounds are"
            f" {chosen.rounds / other.rounds:.1f} times longer, and its best gamma is"
            f" {other.inner_step / chosen.inner_step:.2f} times this one."
        )
    if timing.tau == most and len(choices) > 1:
        yield "It is the largest asked for; try longer."


def _tau(choice: Choice) -> int:
    return choice.timing.tau


def _steps(choice: Choice) -> int:
    return choice.rounds * choice.timing.tau


def _compared(other: Choice, chosen: Choice, fastest: int) -> str:
    return (
        f"A tau of {other.timing.tau} takes {_steps(other) / fastest:.0%} of these steps"
        f" ({other.timing.share} exposed); its bound is"
        f" {percent(other.bound.total / chosen.bound.total - 1, 1)}"
    )


def assumptions(
    problem: Setting, timings: Sequence[Timing] = (), *, preview: bool = False
) -> list[str]:
    """The assumptions behind an answer; `preview`: rounds have one."""
    same = ["zeta^2 = 0: all workers see the same data."] if problem.heterogeneity == 0 else []
    keeps = {timing.late.keep for timing in timings if timing.late and timing.late.keep < 1}
    same += [f"Steps before a late average arrives count {keep:g} in the error." for keep in keeps]
    same += ["The bound is not about a preview: it is that without."] if preview else []
    return [*ASSUMPTIONS, *same, f"Taus up to {LONGEST} are tried unless taus are given."]


ASSUMPTIONS = (
    (
        "The error is the bound of the mean of E|grad f|^2 over all steps: what is guaranteed, not"
        " what is measured; it ranks settings, and runs do better."
    ),
    (
        "L, sigma^2, zeta^2 and Delta are your estimates; sigma^2 is that of one worker's gradient"
        " over its whole batch, and does not depend on tau."
    ),
    (
        "Local steps are those of plain SGD; the outer step and momentum are as given, and gamma is"
        " tuned for every tau and time."
    ),
    (
        "No clipping, or by no less than is recommended; a round takes as long throughout as in the"
        " steady state."
    ),
)


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer of `co2analysis tau`.

    `choices` holds times of training, and what every tau gives after each. `reached` are the times
    to `target` by tau, None where that takes too long to tell; both are empty without a target.
    `hides` is the tau that hides its averages, where that is known.
    """

    timings: Sequence[Timing]
    choices: Sequence[tuple[Seconds, Sequence[Choice]]]
    target: float | None
    reached: Sequence[Seconds | None]
    assumed: Sequence[str]
    hides: int | None

    @property
    def longest(self) -> int:
        """The largest tau."""
        return max(timing.tau for timing in self.timings)


def advise(
    problem: Setting,
    timings: Sequence[Timing],
    lengths: Sequence[Seconds],
    target: float | None = None,
    hides: int | None = None,
    *,
    preview: bool = False,
) -> Advice:
    """What every tau gives after each time of training, and when it reaches the target."""
    reached = [] if target is None else [until(problem, timing, target) for timing in timings]
    choices = [(length, after(problem, timings, length)) for length in lengths]
    assumed = assumptions(problem, timings, preview=preview)
    return Advice(timings, choices, target, reached, assumed, hides)


def print_tau(out: Console, advice: Advice, largest: float | None = None) -> None:
    """Rounds and predicted errors by tau, the best of each time, why, and what is assumed.

    `largest` is the largest partial derivative, for the clip that is recommended.
    """
    timings, by_time, target = advice.timings, advice.choices, advice.target
    title, columns, heads = _heads(timings)
    rows = []
    for row, timing in enumerate(timings):
        cells = [_cell(timing, choices) for _, choices in by_time]
        if target is not None:
            reached = advice.reached[row]
            cells.append("-" if reached is None else _time(reached))
        rows.append((*heads[row], duration(timing.round_time), timing.share, *cells))
    columns += ["round", "exposed", *(f"bound after {_time(time)}" for time, _ in by_time)]
    if target is not None:
        columns.append(f"time to {target:g}")
    print_table(out, title, columns, rows)
    least = ", ".join(
        f"{best(choices).timing.tau} after {_time(time)}" for time, choices in by_time if choices
    )
    if least and advice.hides is not None:
        hiding_ = f"tau that hides its averages, as `co2sim run` takes it: {advice.hides}"
        out.print(f"{hiding_}; tau with the least bound: {least}\n", highlight=False, markup=False)
    large = [str(timing.tau) for timing in timings if timing.fits_in_memory is False]
    if large:
        which = "" if len(large) == len(timings) else f"tau {', '.join(large)}: "
        note = f"{which}does not fit in the memory of a GPU: shown as if it did\n"
        out.print(note, highlight=False, markup=False)
    for time, choices in by_time:
        why = " ".join([*explain(choices, advice.longest), *_clip(choices, largest)])
        words = why or "not even one round fits in"
        out.print(f"after {_time(time)}: {words}\n", highlight=False, markup=False)
    out.print("assumed:", highlight=False)
    for sentence in advice.assumed:
        out.print(f"- {sentence}", highlight=False, markup=False)


def _clip(choices: Sequence[Choice], largest: float | None) -> Iterator[str]:
    """Which clip costs next to nothing at the best tau."""
    if choices and (chosen := best(choices)).least_phi(largest) is not None:
        yield bound_report.recommendation(chosen.setting, largest)


def _heads(timings: Sequence[Timing]) -> tuple[str, list[str], list[tuple[str, ...]]]:
    """The title, and the first columns: what rounds have in common is in the title."""
    parts = all(t.late and t.late.fragments > 1 for t in timings if t.tau > 1)
    first, titles = timings[0], [_title(timing, in_fragments=parts) for timing in timings]
    taus = [f"{timing.tau}" for timing in timings]
    if len({(timing.workers, timing.source) for timing in timings}) > 1:
        return "* least bound", ["rounds", "tau"], list(zip(titles, taus, strict=True))
    if len(set(titles)) == 1:
        return f"{titles[0]}; * least bound", ["tau"], [(tau,) for tau in taus]
    delays = [f"{timing.lateness}" for timing in timings]
    title = f"{first.workers} workers; rounds {first.source}; * least bound"
    return title, ["tau", "delay"], list(zip(taus, delays, strict=True))


def _title(timing: Timing, *, in_fragments: bool) -> str:
    parts = " in fragments" if in_fragments else ""
    late = f"averages{parts} {timing.lateness} late"
    return f"{timing.workers} workers, {late}; rounds {timing.source}"


def tau_to_dict(advice: Advice, largest: float | None = None) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "tau_that_hides": advice.hides,
        "timings": [asdict(timing) for timing in advice.timings],
        "after": [
            {
                "seconds": time,
                "best_tau": best(choices).timing.tau if choices else None,
                "choices": [
                    {
                        "tau": choice.timing.tau,
                        "rounds": choice.rounds,
                        "inner_step": choice.inner_step,
                        "least_phi": choice.least_phi(largest),
                        "bound": bound.plain(choice.bound),
                    }
                    for choice in choices
                ],
                "why": list(explain(choices, advice.longest)),
            }
            for time, choices in advice.choices
        ],
        "seconds_to_target": list(advice.reached),
        "assumptions": list(advice.assumed),
    }


def _cell(timing: Timing, choices: Sequence[Choice]) -> str:
    """The bound of a row, which is identified by what it is, not by its tau."""
    for choice in choices:
        if choice.timing is timing:
            return f"{choice.bound.total:.4g}{' *' if choice is best(choices) else '  '}"
    return "-"


def _time(seconds: Seconds) -> str:
    """Hours and days, which `duration` does not have."""
    hours = seconds / 3600
    if hours < 1:
        return duration(seconds)
    return f"{hours:.3g} h" if hours < 240 else f"{hours / 24:.3g} days"  # noqa: PLR2004 - ten days
