"""`co2sim solve`: which value of a number reaches a target, in words and as tables."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from co2sim import study
from co2sim.case import Case
from co2sim.console.result_tables import print_assumed, print_warnings
from co2sim.console.tables import console, print_lines, print_table
from co2sim.decide.axis import Axis, axis_of
from co2sim.decide.command import command_of, with_tokens
from co2sim.decide.crossings import Stretch
from co2sim.decide.levers import MORE, Lever, levers
from co2sim.decide.solve import Answer, Solved, check, solve
from co2sim.decide.targets import target_of
from co2sim.errors import Co2simError, OptionError
from co2sim.grid import strategy_title
from co2sim.progress import progress_bar
from co2sim.result import Result
from co2sim.step_factors import NO_GOAL, Goal, remark
from co2sim.totals import tokens_of
from co2sim.units import number, percent

_USUAL = 0.9
"""Of several values, that which the words are about."""


def solving(
    cases: Sequence[Case],
    path: str,
    targets: Sequence[str],
    low: str | None,
    high: str | None,
    tokens: float | None,
    goal: Goal,
    *,
    as_json: bool,
) -> None:
    """Solve for every case and target, and print."""
    wanted = [target_of(text) for text in targets]
    if tokens is not None:
        tokens_of(tokens)
    _check(cases[0], path)
    for case in cases:
        for target in wanted:
            check(case, target, tokens)
    found: list[Solved] = []
    for case in cases:
        axis = axis_of(case, path, low, high)
        for target in wanted:
            with progress_bar(f"solving for {path}: {strategy_title(case.strategy)}") as done:
                found.append(solve(case, axis, target, tokens=tokens, goal=goal, done=done))
    titles = [strategy_title(case.strategy) for case in cases]
    moved: dict[str, list[Lever]] = {}
    results: dict[str, Result] = {}
    for title, case in zip(titles, cases, strict=True):
        moved[title] = []
        with suppress(Co2simError):  # the case as it is need not work, only the answer
            results[title], moved[title] = study.run(case), levers(case)
    if as_json:
        print(json.dumps([_plain(solved, moved) for solved in found], indent=2))
        return
    out = console()
    print_lines(out, *(f"{words(solved)}." for solved in found), "")
    print_warnings(out, results.items())
    for target in wanted:
        _print_target(out, [solved for solved in found if solved.target == target])
    _print_levers(out, moved)
    if line := remark(titles, goal):
        print_lines(out, line, "")
    print_assumed(out, results.values())
    _print_checks(out, found, tokens, goal)


def _check(case: Case, path: str) -> None:
    """Refuse what is given, and solved for, too."""
    if path in case.overrides:
        raise OptionError(f"--set {path} is given, and solved for, too; leave it out")
    given = getattr(case, path, None) if path in {"gpus", "global_batch"} else None
    if given is not None:
        flag = f"--{path.replace('_', '-')}"
        raise OptionError(f"{flag} is given, and solved for, too; leave it out")


def words(solved: Solved) -> str:
    """The answer in a sentence."""
    answer = _headline(solved)
    metric, axis = solved.target.metric, solved.axis
    strategy = strategy_title(solved.case.strategy)
    limit = metric.shown(answer.value, solved.currency)
    goal = f"{solved.target.name} of {'at least' if metric.more else 'at most'} {limit}"
    if answer.met:
        return f"{strategy}: {goal} takes {axis.path}: {_told(answer, axis)}"
    ends = f"{axis.shown(axis.low)} to {axis.shown(axis.high)}"
    if solved.best is None:
        return f"{strategy}: nothing fits in memory with {axis.path} from {ends}; see `co2sim run`"
    best, figure = solved.best
    text = (
        f"{strategy}: no {axis.path} from {ends} gives {goal}; the best is"
        f" {metric.shown(figure, solved.currency)}, at {axis.shown(best)}"
    )
    if solved.binds is None:
        return text
    change, better = solved.binds
    then = metric.shown(better, solved.currency)
    return f"{text}, where {change} binds: a tenth better gives {then}"


def _headline(solved: Solved) -> Answer:
    """The answer that the words are about."""
    return next((a for a in solved.answers if a.value == _USUAL), solved.answers[-1])


def _check_of(case: Case, solved: Solved, tokens: float | None, goal: Goal) -> str:
    """The command that shows the figure; a throughput relative to one node by `scale`."""
    if solved.target.metric.needs == "failures":
        return command_of(case, "goodput")
    if solved.target.metric.needs == "alone":
        cluster = case.load()[0].value
        most = case.gpus or cluster.layout.world_size
        both = dict.fromkeys((cluster.gpus_per_node, most))
        shown = ",".join(map(str, both))
        return f"{command_of(replace(case, gpus=None), 'scale')} --gpus {shown}"
    wanted = tokens if solved.target.metric.needs == "tokens" else None
    return with_tokens(command_of(case), wanted, goal if wanted else NO_GOAL)


def _print_checks(out: Console, found: Sequence[Solved], tokens: float | None, goal: Goal) -> None:
    """Commands, each in one piece whatever the width: they are to be copied."""
    for line in _checks(found, tokens, goal):
        out.print(Text(line), soft_wrap=True)


def _checks(found: Sequence[Solved], tokens: float | None, goal: Goal) -> Iterator[str]:
    """The commands that show the figures at the answers."""
    for solved in found:
        answer = _headline(solved)
        edge = _edge(answer.met)
        case = solved.case if edge is None else solved.axis.at(solved.case, edge)
        yield f"to check it: {_check_of(case, solved, tokens, goal)}"


def _told(answer: Answer, axis: Axis) -> str:
    """Where a target is met, with the interval of its edge if there is one edge."""
    text = _spans(answer.met, axis)
    if answer.sure is None or answer.hoped is None or len(answer.met) != 1:
        return text
    edges = [_edge(spans) for spans in (answer.hoped, answer.met, answer.sure)]
    if edges[1] is None:
        return text
    ends = [axis.shown(e) for e in sorted(e for e in (edges[0], edges[2]) if e is not None)]
    if len(ends) < 2:  # noqa: PLR2004 - both ends
        return f"{text} (90 % interval: from {' '.join(ends)}; at its bad end none is enough)"
    return f"{text} (90 % interval: {ends[0]} to {ends[1]})"


def _edge(spans: Sequence[Stretch]) -> float | None:
    """The one crossing of a range that is open to the other side."""
    if len(spans) != 1 or spans[0].open_low == spans[0].open_high:
        return None
    return spans[0].low if spans[0].open_high else spans[0].high


def _spans(spans: Sequence[Stretch], axis: Axis) -> str:
    def one(span: Stretch) -> str:
        if span.open_low and span.open_high:
            return f"any from {axis.shown(span.low)} to {axis.shown(span.high)}"
        if span.open_high:
            return f"at least {axis.shown(span.low)}"
        if span.open_low:
            return f"at most {axis.shown(span.high)}"
        return f"{axis.shown(span.low)} to {axis.shown(span.high)}"

    return " and ".join(map(one, spans)) or "-"


def _print_target(out: Console, found: Sequence[Solved]) -> None:
    """A row for each strategy, a column for each value."""
    target, axis = found[0].target, found[0].axis
    metric = target.metric
    title = f"{axis.path} for {target.name}: {metric.words}"
    limits = [metric.shown(value, found[0].currency) for value in target.values]
    rows = [
        [
            strategy_title(solved.case.strategy),
            *(_told(answer, axis) for answer in solved.answers),
            _best(solved),
        ]
        for solved in found
    ]
    print_table(out, title, ["strategy", *limits, "best"], rows, left=1 + len(limits))
    for solved in found:
        name = strategy_title(solved.case.strategy)
        if not solved.monotone:
            print_lines(out, f"{name}: {target.name} rises and falls over the range")
        if solved.failed:
            print_lines(out, f"{name}: not all values can be simulated: {solved.failed}")
        if solved.large:
            print_lines(
                out, f"{name}: {solved.large} of {len(solved.points)} values do not fit in memory"
            )
    if target.metric.needs == "alone" and not axis.path.startswith(("inter.", "wan.", "gpus")):
        print_lines(out, f"{axis.path} changes the one node that is compared with, too")
    if axis.path == "gpus":
        size = found[0].case.load()[0].value.layout.world_size
        print_lines(out, f"the cluster has {size:,} GPUs; more are a what-if")
    looked = len(found[0].points)
    print_lines(
        out,
        f"looked at {looked} values from {axis.shown(axis.low)} to"
        f" {axis.shown(axis.high)}, and between those where the answer changes",
        "",
    )


def _print_levers(out: Console, found: dict[str, list[Lever]]) -> None:
    """What a tenth more of each number buys."""
    if not any(found.values()):
        return
    title = (
        f"as it is, {MORE - 1:.0%} more bandwidth or speed, or {MORE - 1:.0%} less latency, buys"
    )
    rows = [
        [
            strategy,
            lever.change,
            percent(lever.gain, 2),
            "-" if lever.gpus is None else number(lever.gpus),
            "-"
            if lever.worth_per_hour is None
            else f"{lever.worth_per_hour:,.2f} {lever.currency}",
        ]
        for strategy, each in found.items()
        for lever in each
    ]
    columns = ["strategy", "number", "tokens/s", "as so many GPUs", "worth per hour"]
    print_table(out, title, columns, rows, left=2)


def _best(solved: Solved) -> str:
    if solved.best is None:
        return "does not fit"
    figure = solved.target.metric.shown(solved.best[1], solved.currency)
    return f"{figure} at {solved.axis.shown(solved.best[0])}"


def _plain(solved: Solved, moved: dict[str, list[Lever]]) -> dict[str, Any]:
    """As plain values for JSON."""
    strategy = strategy_title(solved.case.strategy)
    return {
        "strategy": strategy,
        "number": solved.axis.path,
        "unit": solved.axis.unit,
        "target": solved.target.name,
        "meaning": solved.target.metric.words,
        "answer": words(solved),
        "answers": [asdict(answer) for answer in solved.answers],
        "best": solved.best and {"value": solved.best[0], "figure": solved.best[1]},
        "binds": solved.binds and {"number": solved.binds[0], "figure": solved.binds[1]},
        "do_not_fit": solved.large,
        "currency": solved.currency,
        "monotone": solved.monotone,
        "failed": solved.failed,
        "points": [{"value": x, "figure": figure} for x, figure in solved.points],
        "levers": [asdict(lever) for lever in moved[strategy]],
        "command": command_of(solved.case),
    }
