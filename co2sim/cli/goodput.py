"""`co2sim goodput`: what part of the time is useful where things fail: sentences and a table."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from co2sim.catalog import load_failures
from co2sim.cli import options
from co2sim.common import convert
from co2sim.common.cli import print_json
from co2sim.common.errors import OptionError
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import Seconds, counted, scaled, timespan
from co2sim.prediction import driver
from co2sim.prediction.counted import DEFAULT, counted_of, failures_of
from co2sim.prediction.figures import asked
from co2sim.prediction.goodput import Goodput, Preemption, Spot, goodput_where, spot_of, trained_of
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.totals import Totals, days_without_failures, totals
from co2sim.prediction.whole import whole_words
from co2sim.report.text import totals as totals_text
from co2sim.report.text.result import print_assumed, question
from co2sim.report.text.screen import Screen, print_screen
from co2sim.studies.candidates import command_of, with_tokens
from co2sim.studies.grid import strategy_title

_SHARES = ("useful", "checkpoint", "lost", "restart", "waiting")
_LOSSES = {
    "checkpoint": "stops for checkpoints",
    "lost": "work that is done again",
    "restart": "restarts",
    "waiting": "waiting",
}


@dataclass(frozen=True, slots=True)
class _Answer:
    """One strategy: its result, its goodput, and what spot nodes are worth where it has them.

    `totals` are those of the tokens to train; None without them. `assumed`: the failures are those
    of published jobs, as the cluster names none. `command` repeats it.
    """

    case: Question
    result: Result
    found: Goodput
    spot: Spot | None
    totals: Totals | None
    assumed: bool
    command: str

    @property
    def title(self) -> str:
        """The strategy."""
        return strategy_title(self.case.strategy)


_Every = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help='Work between two checkpoints, such as "30 min"; default: what leaves most useful'
        " time.",
    ),
]


@options.open_cases
@options.factor_options
def goodput(
    cases: list[Question],
    goal: Goal,
    tokens: totals_text.Tokens = None,
    every: _Every = None,
    full: options.Full = False,  # noqa: FBT002
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Say what part of the time is useful where parts fail; --set failures= names rates."""
    interval = None if every is None else convert.seconds("--every", every)
    answers = [_answer(case, interval, tokens, goal) for case in cases]
    if json_:
        print_json([_plain(answer) for answer in answers])
    elif full:
        _print(console(), answers)
    else:
        print_screen(_screen(answers))


def _answer(
    open_case: Question, every: Seconds | None, tokens: float | None, goal: Goal
) -> _Answer:
    case = driver.resolve_auto(open_case)
    cluster, model = case.load()
    hardware = cluster.value
    failures = failures_of(hardware, math.inf)
    if failures is None:
        raise OptionError(
            "failures=none: nothing fails, and all of the time is useful; leave it out, or name"
            " others, --set failures=meta-rsc-1 (`co2sim list failures`), or give a mean time"
            " between failures, --set failures.node='150 days'"
        )
    result = driver.run(case, progress=None)
    facts = cluster.assumed if hardware.failures else load_failures(DEFAULT).assumed
    assumed = [
        replace(fact, path=f"cluster.failures.{fact.path.removeprefix('failures.')}")
        for fact in facts
        if (fact.path.startswith("failures.") or not hardware.failures)
        # what only background copies need, where all is written before work continues
        and not (failures.checkpoint == "blocking" and fact.path.endswith(".pause"))
    ]
    result = replace(result, assumed=(*result.assumed, *assumed))
    trained = trained_of(result, hardware, model.value, optimizer=case.load_optimizer().value)
    found = goodput_where(failures, trained, every)
    needed = None
    if tokens is not None:
        count = failures_of(hardware, days_without_failures(result, tokens, goal)) is not None
        counts = counted_of(found, hardware) if count else None
        needed = totals(result, hardware.resized(result.gpus), tokens, goal, counts)
    spot = spot_of(failures, trained, every)
    command = with_tokens(command_of(case, "goodput"), tokens, goal)
    return _Answer(case, result, found, spot, needed, hardware.failures is None, command)


def words(result: Result, goodput: Goodput) -> str:
    """The answer in a sentence."""
    return (
        f"{result.strategy}: {_useful(result, goodput)}. {_stops(result, goodput)};"
        f" {_largest(goodput)}"
    )


def _useful(result: Result, goodput: Goodput) -> str:
    """The useful share of the time with its range, and the speed that it leaves."""
    share = f"{_percent(goodput.useful)} of the time is useful work"
    if goodput.low < goodput.high:
        share += f" ({_percent(goodput.low)} to {_percent(goodput.high)})"
    return f"{share}, {result.tokens_per_s * goodput.useful:,.0f} {result.unit}s/s on average"


def _largest(goodput: Goodput) -> str:
    """What takes most of the time that is not useful, and why."""
    losses = {name: getattr(goodput.shares, name) for name in _LOSSES}
    largest = max(losses, key=lambda name: losses[name])
    binds = f"the largest loss is {_LOSSES[largest]}, {_percent(losses[largest])}"
    preempted = goodput.workers.preempted if goodput.workers else goodput.whole.preempted
    if largest == "restart":
        after = goodput.workers.after if goodput.workers else goodput.whole.after
        steps = {} if preempted.rate else {"detection": after.detection}
        steps |= {"restart": after.restart, "reading": after.reload}
        if goodput.workers:
            steps["all others standing still"] = goodput.workers.stall
        binds += f" ({', '.join(f'{name} {timespan(time)}' for name, time in steps.items())})"
    return binds


def _stops(result: Result, goodput: Goodput) -> str:
    """What stops what, and when it is saved."""
    text = "; ".join([*_fails(result, goodput), _saves(goodput)])
    return f"{text[0].upper()}{text[1:]}"


def _fails(result: Result, goodput: Goodput) -> list[str]:
    """What stops what, and how often."""
    workers, whole = goodput.workers, goodput.whole
    gpus, said = counted(result.gpus, "GPU"), []
    if workers and workers.rate:
        alone = _time(workers.rate * workers.count, goodput)
        said.append(f"a worker fails every {alone}, and stops alone, of {workers.count:,}")
    if workers and workers.preempted.rate:
        alone = timespan(1 / (workers.preempted.rate * workers.count))
        said.append(f"a worker is preempted every {alone}, and stops alone, of {workers.count:,}")
    if whole.rate:
        every = timespan(1 / whole.rate) if workers else _time(whole.rate, goodput)
        said.append(f"a failure every {every} stops all {gpus}")
    if whole.preempted.rate:
        said.append(_preempts(whole.preempted, gpus))
    return said


def _saves(goodput: Goodput) -> str:
    """When a checkpoint is taken."""
    if not math.isinf(goodput.whole.every):
        return f"a checkpoint is taken after every {timespan(goodput.whole.every)} of work"
    if goodput.whole.preempted.rate:
        return "a checkpoint is taken on notice, and never else"
    return "nothing that is given stops all of them, and checkpoints gain nothing"


def _time(rate: float, goodput: Goodput) -> str:
    """The mean time between failures, its range, and where it stands among counts by size."""
    ends = [timespan(1 / rate / goodput.failures.rate_high)]
    ends.append(timespan(1 / rate / goodput.failures.rate_low))
    said = [goodput.basis] if goodput.basis else []
    said += [" to ".join(ends)] if ends[0] != ends[1] else []
    return timespan(1 / rate) + (f" ({', '.join(said)})" if said else "")


def _preempts(preempted: Preemption, gpus: str) -> str:
    """What a preemption of nodes does that all need."""
    said = f"a preemption every {timespan(1 / preempted.rate)} stops all {gpus}"
    if preempted.saving is None:
        return f"{said}, with a notice that is too short for a checkpoint"
    return f"{said}, with a checkpoint on notice in {timespan(preempted.saving)}"


def spot_words(spot: Spot, result: Result) -> str:
    """What spot nodes are worth, in a sentence."""
    if spot.cost is None or spot.pays_from is None:
        return (
            f"nodes that stay have {_percent(spot.on_demand)} of useful work; what spot saves is"
            " not known: give its price relative to theirs, --set failures.spot_price=0.5"
        )
    said = (
        f"a useful token costs {_percent(spot.cost)} of what it costs on nodes that stay, of whose"
        f" time {_percent(spot.on_demand)} is useful work"
    )
    billion = result.cost_per_billion_tokens
    if billion is not None:
        stays = billion / spot.on_demand
        said += f" ({stays * spot.cost:,.2f} beside {stays:,.2f} {result.currency} for a billion)"
    if math.isinf(spot.pays_from):
        return f"{said}; spot never pays"
    if not spot.pays_from:
        return f"{said}; spot always pays"
    return (
        f"{said}; spot pays if a node is kept for more than {timespan(spot.pays_from)} on average"
    )


def algorithm(goodput: Goodput) -> str:
    """What training does after a failure, and after a preemption."""
    if goodput.workers is None:
        said = "all stop, get another node, read the last checkpoint, and do the work since again"
        saved = goodput.whole.preempted.rate and goodput.whole.preempted.saving is not None
        return f"{said}; after a checkpoint on notice there is none" if saved else said
    return (
        "the others continue; the next average is taken over those that are left, and waits until"
        " the failure is noticed; the worker comes back at a later round with the parameters and"
        " the outer state of a peer, and new moments. While it is away a round has fewer samples:"
        " this counts work, not what is learned"
    )


def _screen(answers: Sequence[_Answer]) -> Screen:
    """The first screen: useful time, days and money of each, and what is behind those of one."""
    best = max(answers, key=_worth)
    rows = [("counted", _counted(best))]
    if best.totals and best.totals.failures is None:
        rows.append(("not", "failures in days and cost: as in `co2sim run`, only above a week"))
    rows.append(("saves", f"{_saves(best.found)}; {_largest(best.found)}"))
    if best.spot:
        rows.append(("spot", spot_words(best.spot, best.result)))
    if whole := whole_words(best.case, best.totals):
        rows.append(("whole", whole))
    words = [f"{each.title}: {each.result.memory_word}" for each in answers]
    memory = answers[0].result.memory_answer if len(answers) == 1 else "; ".join(words)
    rows.insert(0, ("memory", memory))
    known = []
    if best.totals:
        known = ["days", "GPU-hours" if best.totals.cost is None else f"{best.totals.currency}"]
    trained = [_spent(each.totals) for each in answers]
    said = [f"{best.result.strategy}: {_useful(best.result, best.found)}."]
    if best.totals:
        said.append(f"{totals_text.in_short(best.totals, best.result.unit)}.")
    return Screen(
        answer=said,
        columns=["strategy", "useful", "low", "high", f"{best.result.unit}s/s", *known],
        table=[[*_brief_row(each), *cells] for each, cells in zip(answers, trained, strict=True)]
        if len(answers) > 1
        else [],
        rows=rows,
    )


def _spent(needed: Totals | None) -> list[str]:
    """Days and money, or GPU-hours where there is no price."""
    if needed is None:
        return []
    money = f"{needed.gpu_hours:,.0f}"
    if needed.cost is not None:
        money = totals_text.ranged(needed, "cost")
    return [totals_text.ranged(needed, "days"), money]


def _brief_row(answer: _Answer) -> list[str]:
    found = answer.found
    shares = [_percent(share) for share in (found.useful, found.low, found.high)]
    return [answer.title, *shares, f"{answer.result.tokens_per_s * found.useful:,.0f}"]


def _worth(answer: _Answer) -> float:
    """More is better: useful tokens per second, or how soon all is trained."""
    if answer.totals:
        return 1 / answer.totals.days
    return answer.result.tokens_per_s * answer.found.useful


def _counted(answer: _Answer) -> str:
    """Whose failures these are, and how often one is met."""
    found, every = answer.found, 1 / answer.found.failures_per_second
    ends = [timespan(every / rate) for rate in (found.failures.rate_high, found.failures.rate_low)]
    span = f" ({' to '.join(ends)})" if ends[0] != ends[1] else ""
    name = found.failures.name or "as given"
    alone = f"; {found.workers.count:,} workers stop alone" if found.workers else ""
    named = "; --set failures= names others" if answer.assumed else ""
    gpus = counted(answer.result.gpus, "GPU")
    return f"failures {name}: one in {timespan(every)}{span} on {gpus}{alone}{named}"


def _print(out: Console, answers: Sequence[_Answer]) -> None:
    lines = question([each.result for each in answers])
    said = [f"{words(each.result, each.found)}." for each in answers]
    said += [
        f"{totals_text.in_words(each.totals, each.result.unit)}." for each in answers if each.totals
    ]
    if worth := totals_text.worth(each.result for each in answers):
        said.append(worth)
    print_lines(out, *said, *lines, "")
    spots = [(each, each.spot) for each in answers if each.spot]
    lines = [f"spot, {each.title}: {spot_words(spot, each.result)}" for each, spot in spots]
    if any(each.found.failures.preemption and each.found.failures.node is None for each in answers):
        lines.append(
            "failures of the hardware itself are not counted; --set failures.node='150 days' adds"
            " them"
        )
    if lines:
        print_lines(out, *lines, "")
    for each in answers:
        if not each.result.fits_in_memory:
            print_lines(
                out, f"warning: {each.title}: {each.result.misfit} in memory; see `co2sim run`", ""
            )
    columns = ["strategy", *_SHARES, "low", "high"]
    rows = [_row(each) for each in answers]
    print_table(out, "shares of the time", columns, rows, left=1)
    details = [_details(each.found, each.title) for each in answers]
    names = ["strategy", "fails every", "stops all every", "saved every", "state", "stops work for"]
    print_table(out, "failures and checkpoints", [*names, "is written in"], details, left=1)
    after = {algorithm(each.found): "" for each in answers}
    for text in after:
        which = [each.title for each in answers if algorithm(each.found) == text]
        print_lines(out, f"after a failure, {', '.join(which)}: {text}", "")
    print_assumed(out, (each.result for each in answers))


def _row(answer: _Answer) -> list[str]:
    goodput = answer.found
    shares = [_percent(getattr(goodput.shares, name)) for name in _SHARES]
    return [answer.title, *shares, _percent(goodput.low), _percent(goodput.high)]


def _details(goodput: Goodput, title: str) -> list[str]:
    whole = goodput.whole
    never, stops = math.isinf(whole.every), whole.rate + whole.preempted.rate
    return [
        title,
        timespan(1 / goodput.failures_per_second),
        timespan(1 / stops) if stops else "never",
        "never" if never else timespan(whole.every),
        scaled(goodput.checkpoint_bytes, "B"),
        "-" if never else timespan(whole.saving.blocking),
        "-" if never else timespan(whole.saving.writing or whole.saving.blocking),
    ]


def _percent(share: float) -> str:
    """Two decimals, or two significant digits of what is less than that."""
    return f"{100 * share:.2f} %" if share >= 1e-4 or share == 0 else f"{100 * share:.1e} %"  # noqa: PLR2004


def _plain(answer: _Answer) -> dict[str, Any]:
    """As plain values for JSON; what is infinite is None."""
    goodput, result = answer.found, answer.result
    return {
        "strategy": result.strategy,
        **asked(result),
        "answer": words(result, goodput),
        "useful": goodput.useful,
        "low": goodput.low,
        "high": goodput.high,
        "shares": asdict(goodput.shares),
        "tokens_per_s": result.tokens_per_s,
        "useful_tokens_per_s": result.tokens_per_s * goodput.useful,
        "gpus": result.gpus,
        "mean_time_to_failure_s": 1 / goodput.failures_per_second,
        "checkpoint_bytes": goodput.checkpoint_bytes,
        "basis": goodput.basis,
        "rate_low": goodput.failures.rate_low,
        "rate_high": goodput.failures.rate_high,
        "spot": answer.spot and asdict(answer.spot),
        "totals": answer.totals and asdict(answer.totals),
        "whole": asdict(goodput.whole),
        "workers": goodput.workers and asdict(goodput.workers),
        "after_a_failure": algorithm(goodput),
        "fits_in_memory": result.fits_in_memory,
        "assumed": [asdict(fact) for fact in result.assumed],
        "command": answer.command,
    }
