"""`co2sim goodput`: what part of the time is useful where things fail, as sentences and a table."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from co2sim.catalog import Fact
from co2sim.common.errors import OptionError
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import Seconds, counted, scaled, timespan
from co2sim.prediction import driver
from co2sim.prediction.case import Case
from co2sim.prediction.goodput import FailingWorkers, Goodput, goodput_of
from co2sim.prediction.result import Result
from co2sim.report.text.result import print_assumed, stacks_of
from co2sim.studies.candidates import command_of
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
    """One strategy: its result, and its goodput."""

    case: Case
    result: Result
    found: Goodput

    @property
    def title(self) -> str:
        """The strategy."""
        return strategy_title(self.case.strategy)


def answer(cases: Sequence[Case], every: Seconds | None, *, as_json: bool) -> None:
    """Find the goodput of every case, and print."""
    answers = []
    for given in cases:
        case = driver.resolve_auto(given)
        cluster, model = case.load()
        if cluster.value.failures is None:
            raise OptionError(
                f"{cluster.value.name} has no failures; name them, --set failures=meta-rsc-1"
                " (`co2sim list failures`), or give a mean time between failures,"
                " --set failures.node='150 days'"
            )
        result = driver.run(case, progress=None)
        own = tuple(
            replace(fact, path=f"cluster.{fact.path}")
            for fact in cluster.assumed
            if fact.path.startswith("failures.")
        )
        result = replace(result, assumed=(*result.assumed, *_used(own, case)))
        optimizer = case.optimizer
        found = goodput_of(result, cluster.value, model.value, optimizer=optimizer, every=every)
        assert found is not None
        answers.append(_Answer(case, result, found))
    if as_json:
        print(json.dumps([_plain(one) for one in answers], indent=2))
        return
    _print(console(), answers)


def _used(facts: Sequence[Fact], case: Case) -> list[Fact]:
    """Without what only background copies need, where all is written before work goes on."""
    failures = case.load()[0].value.failures
    blocking = failures is not None and failures.checkpoint == "blocking"
    return [fact for fact in facts if not (blocking and fact.path.endswith(".pause"))]


def words(result: Result, found: Goodput) -> str:
    """The answer in a sentence."""
    share = f"{_percent(found.useful)} of the time is useful work"
    if found.low < found.high:
        share += f" ({_percent(found.low)} to {_percent(found.high)})"
    speed = f"{result.tokens_per_s * found.useful:,.0f} {result.unit}s/s on average"
    losses = {name: getattr(found.shares, name) for name in _LOSSES}
    largest = max(losses, key=lambda name: losses[name])
    binds = f"the largest loss is {_LOSSES[largest]}, {_percent(losses[largest])}"
    if largest == "restart":
        after = found.workers.after if found.workers else found.whole.after
        steps = {"detection": after.detection, "restart": after.restart, "reading": after.reload}
        if found.workers:
            steps["all others standing still"] = found.workers.stall
        binds += f" ({', '.join(f'{name} {timespan(time)}' for name, time in steps.items())})"
    return f"{result.strategy}: {share}, {speed}. {_stops(result, found)}; {binds}"


def _stops(result: Result, found: Goodput) -> str:
    """What stops what, and when it is saved."""
    workers, rate = found.workers, found.whole.rate
    gpus = counted(result.gpus, "GPU")
    if workers is None:
        fails = f"A failure every {timespan(1 / rate)} stops all {gpus}"
    elif workers.rate:
        alone = timespan(1 / (workers.rate * workers.count))
        fails = f"A worker fails every {alone}, and stops alone, of {workers.count:,}"
        if rate:
            fails += f"; a failure every {timespan(1 / rate)} stops all"
    else:
        fails = f"A failure every {timespan(1 / rate)} stops all {gpus}"
    if math.isinf(found.whole.every):
        return f"{fails}; nothing that is given stops all of them, and checkpoints gain nothing"
    return f"{fails}; a checkpoint is taken after every {timespan(found.whole.every)} of work"


def algorithm(workers: FailingWorkers | None) -> str:
    """What training does after a failure."""
    if workers is None:
        return "all stop, get another node, read the last checkpoint, and do the work since again"
    return (
        "the others go on; the next average is taken over those who are left, and waits until the"
        " failure is noticed; the worker comes back at a later round with the parameters and the"
        " outer state of a peer, and new moments. While it is away a round has fewer samples: this"
        " counts work, not what is learned"
    )


def _print(out: Console, answers: Sequence[_Answer]) -> None:
    used = stacks_of(one.result for one in answers)
    print_lines(out, *(f"{words(one.result, one.found)}." for one in answers), used, "")
    for one in answers:
        if not one.result.fits_in_memory:
            print_lines(out, f"warning: {one.title} does not fit in memory; see `co2sim run`", "")
    columns = ["strategy", *_SHARES, "low", "high"]
    rows = [_row(one) for one in answers]
    print_table(out, "shares of the time", columns, rows, left=1)
    details = [_details(one.found, one.title) for one in answers]
    names = ["strategy", "fails every", "stops all every", "saved every", "state", "stops work for"]
    print_table(out, "failures and checkpoints", [*names, "is written in"], details, left=1)
    after = {algorithm(one.found.workers): "" for one in answers}
    for text in after:
        which = [one.title for one in answers if algorithm(one.found.workers) == text]
        print_lines(out, f"after a failure, {', '.join(which)}: {text}", "")
    print_assumed(out, (one.result for one in answers))


def _row(one: _Answer) -> list[str]:
    found = one.found
    shares = [_percent(getattr(found.shares, name)) for name in _SHARES]
    return [one.title, *shares, _percent(found.low), _percent(found.high)]


def _details(found: Goodput, title: str) -> list[str]:
    whole = found.whole
    never = math.isinf(whole.every)
    return [
        title,
        timespan(1 / found.failures_per_second),
        timespan(1 / whole.rate) if whole.rate else "never",
        "never" if never else timespan(whole.every),
        scaled(found.checkpoint_bytes, "B"),
        "-" if never else timespan(whole.saving.blocking),
        "-" if never else timespan(whole.saving.writing or whole.saving.blocking),
    ]


def _percent(share: float) -> str:
    """Two decimals, or two significant digits of what is less than that."""
    return f"{100 * share:.2f} %" if share >= 1e-4 or share == 0 else f"{100 * share:.1e} %"  # noqa: PLR2004


def _plain(one: _Answer) -> dict[str, Any]:
    """As plain values for JSON; what is infinite is None."""
    found, result = one.found, one.result
    whole = asdict(found.whole)
    if math.isinf(found.whole.every):
        whole["every"] = None
    return {
        "strategy": result.strategy,
        "answer": words(result, found),
        "useful": found.useful,
        "low": found.low,
        "high": found.high,
        "shares": asdict(found.shares),
        "tokens_per_s": result.tokens_per_s,
        "useful_tokens_per_s": result.tokens_per_s * found.useful,
        "gpus": result.gpus,
        "mean_time_to_failure_s": 1 / found.failures_per_second,
        "checkpoint_bytes": found.checkpoint_bytes,
        "whole": whole,
        "workers": found.workers and asdict(found.workers),
        "after_a_failure": algorithm(found.workers),
        "fits_in_memory": result.fits_in_memory,
        "assumed": [asdict(fact) for fact in result.assumed],
        "command": command_of(one.case, "goodput"),
    }
