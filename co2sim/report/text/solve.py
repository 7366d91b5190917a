"""What `co2sim solve` says: sentences, commands and plain values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from co2sim.common.units import counted
from co2sim.prediction.figures import asked
from co2sim.prediction.intervals import error_model
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, Scale, scale_of_case
from co2sim.report.text.answer import (
    Simulated,
    batch_row,
    labels,
    legend,
    place,
    setup,
    shared_rows,
)
from co2sim.report.text.screen import Screen
from co2sim.studies.candidates import command_of, with_tokens
from co2sim.studies.grid import strategy_title
from co2sim.studies.sensitivity import Sensitivity
from co2sim.studies.solve import Answer, Solved, ValueRange
from co2sim.studies.targets import Axis

_USUAL = 0.9
"""Of several values, that which the words are about."""


def trainings(
    cases: Iterable[Question], results: Mapping[str, Result]
) -> Iterator[tuple[str, Scale]]:
    """For `remark`: strategies with the options that were chosen for the cases as they are."""
    for case in cases:
        title = strategy_title(case.strategy)
        yield results[title].strategy if title in results else title, scale_of_case(case)


def words(solved: Solved) -> str:
    """The answer in a sentence."""
    answer = _headline(solved)
    metric, axis = solved.target.metric, solved.axis
    strategy = strategy_title(solved.case.strategy)
    limit = metric.shown(answer.value, solved.currency)
    goal = f"{solved.target.name} of {'at least' if metric.more else 'at most'} {limit}"
    if answer.met:
        return f"{strategy}: {goal} takes {axis.path}: {told(answer, axis)}"
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


def _check_of(case: Question, solved: Solved, tokens: float | None, goal: Goal) -> str:
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


def checks(group: Sequence[Solved], tokens: float | None, goal: Goal) -> Iterator[str]:
    """The commands that show the figures at the answers."""
    for solved in group:
        answer = _headline(solved)
        edge = crossing(answer.met)
        case = solved.case
        if edge is not None:
            axis = solved.axis
            case = axis.as_written(case, axis.rounded(edge, up=answer.met[0].open_high))
        yield f"to check it: {_check_of(case, solved, tokens, goal)}"


def told(answer: Answer, axis: Axis) -> str:
    """Where a target is met, with the interval of its edge if there is one edge."""
    text, ends = _spans(answer.met, axis), interval(answer, axis)
    return f"{text} (90 % range: {ends})" if ends else text


def interval(answer: Answer, axis: Axis) -> str:
    """The ends of the 90 % interval of the one edge of an answer; empty where there is none."""
    if answer.sure is None or answer.hoped is None or crossing(answer.met) is None:
        return ""
    good, bad = crossing(answer.hoped), crossing(answer.sure)
    if good is None and bad is None:
        return "perhaps any, perhaps none"
    if bad is None:
        return f"{axis.shown(good)} at best, perhaps none" if good is not None else ""
    if good is None:
        return f"{axis.shown(bad)} at worst, perhaps any"
    low, high = sorted((good, bad))
    return f"{axis.shown(low)} to {axis.shown(high)}"


def crossing(spans: Sequence[ValueRange]) -> float | None:
    """The one crossing of a range that is open to the other side."""
    if len(spans) != 1 or spans[0].open_low == spans[0].open_high:
        return None
    return spans[0].low if spans[0].open_high else spans[0].high


def _spans(spans: Sequence[ValueRange], axis: Axis) -> str:
    def one(span: ValueRange) -> str:
        low = axis.shown(axis.rounded(span.low, up=True))
        high = axis.shown(axis.rounded(span.high, up=False))
        if span.open_low and span.open_high:
            return f"any from {low} to {high}"
        if span.open_high:
            return f"at least {low}"
        if span.open_low:
            return f"at most {high}"
        return f"{low} to {high}"

    return " and ".join(map(one, spans)) or "-"


def remarks(group: Sequence[Solved]) -> Iterator[str]:
    """What is to be known of the answers for one target."""
    target, axis = group[0].target, group[0].axis
    for solved in group:
        name = strategy_title(solved.case.strategy)
        if not solved.monotone:
            yield f"{name}: {target.name} rises and falls over the range"
        if solved.failed:
            yield f"{name}: not all values can be simulated: {solved.failed}"
        if solved.large:
            yield f"{name}: {solved.large} of {len(solved.points)} values do not fit in memory"
    if target.metric.needs == "alone" and not axis.path.startswith(("inter.", "wan.", "gpus")):
        yield f"{axis.path} changes the one node that is compared with, too"
    if axis.path == "gpus":
        size = group[0].case.load()[0].value.layout.world_size
        yield f"the cluster has {size:,} GPUs; more are a what-if"
    looked = len(group[0].points)
    yield (
        f"looked at {looked} values from {axis.shown(axis.low)} to"
        f" {axis.shown(axis.high)}, and between those where the answer changes"
    )


def best(solved: Solved) -> str:
    """The best figure, and where it is."""
    if solved.best is None:
        return "does not fit"
    figure = solved.target.metric.shown(solved.best[1], solved.currency)
    return f"{figure} at {solved.axis.shown(solved.best[0])}"


def plain(
    solved: Solved,
    moved: Mapping[str, Sequence[Sensitivity]],
    results: Mapping[str, Result],
) -> dict[str, Any]:
    """As plain values for JSON; `as_it_is` is None where the case as it is cannot be simulated."""
    strategy = strategy_title(solved.case.strategy)
    return {
        "strategy": strategy,
        "number": solved.axis.path,
        "unit": solved.axis.unit,
        "target": solved.target.name,
        "meaning": solved.target.metric.words,
        "answer": words(solved),
        "as_it_is": asked(results[strategy]) if strategy in results else None,
        "answers": [asdict(answer) for answer in solved.answers],
        "best": solved.best and {"value": solved.best[0], "figure": solved.best[1]},
        "binds": solved.binds and {"number": solved.binds[0], "figure": solved.binds[1]},
        "do_not_fit": solved.large,
        "currency": solved.currency,
        "monotone": solved.monotone,
        "failed": solved.failed,
        "points": [
            {"value": x, "figure": figure, "interval": band}
            for (x, figure), band in zip(solved.points, solved.bands, strict=True)
        ],
        "levers": [asdict(lever) for lever in moved[strategy]],
        "command": command_of(solved.case),
    }


# --- the first screen -----------------------------------------------------------------------------


def screen(group: Sequence[Solved], results: Mapping[str, Result]) -> Screen:
    """The answer: of one case a sentence, of several the least demanding first, and a table.

    `results` are those of the cases as they are, by strategy.
    """
    leading = _leading(group)
    counts = sum(len(solved.answers) for solved in group)
    short = labels(strategy_title(solved.case.strategy) for solved in group)
    columns, rows = _compared(group, short) if counts > 1 else ((), ())
    shown = list(results.values())
    return Screen(
        answer=[f"{words(leading)}.", *_asked(group[0], shown)],
        columns=columns,
        table=rows,
        left=len(columns),
        legend=legend({label: title for title, label in short.items()}) if columns else (),
        rows=[row for row in _rows(group, leading, results, short) if row[1]],
        least=_LEAST,
    )


_LEAST = 3
"""Named lines beside several cases: memory, batch, and what is counted."""


def _leading(group: Sequence[Solved]) -> Solved:
    """The case that is met with the least of a number of which more is better, or the first."""
    met = [solved for solved in group if _headline(solved).met]
    if not met or met[0].target != met[-1].target:
        return (met or group)[0]
    spans = {id(solved): _headline(solved).met[0] for solved in met}
    if all(span.open_high for span in spans.values()):
        return min(met, key=lambda solved: spans[id(solved)].low)
    return met[0]


def _asked(solved: Solved, results: Sequence[Result]) -> Iterator[str]:
    """What is trained on what."""
    if results:
        first, axis = results[0], solved.axis
        where = place(first)
        said = where if axis.path == "gpus" else f"{counted(first.gpus, 'GPU')} of {where}"
        line = setup([f"{first.model} on {said}"], results)
        yield f"{line}; bandwidth of a node" if axis.path == "inter.bandwidth" else line


def _compared(
    group: Sequence[Solved], short: Mapping[str, str]
) -> tuple[Sequence[str], list[list[str]]]:
    """A row for each strategy and value of a target."""
    axis = group[0].axis
    here = next((solved.now for solved in group if solved.now is not None), None)
    pairs = [(solved, answer) for solved in group for answer in solved.answers]
    several = len({(solved.target.name, answer.value) for solved, answer in pairs}) > 1
    least = all(a.met and len(a.met) == 1 and a.met[0].open_high for _, a in pairs)
    columns = ["strategy", *(["target"] if several else [])]
    columns += ["at least" if least else axis.path, "90 % range", "best"]
    columns += [] if here is None else [f"at {axis.shown(here)}"]
    rows = []
    for solved, answer in pairs:
        metric = solved.target.metric
        limit = f"{solved.target.name} {metric.shown(answer.value, solved.currency)}"
        reached = _spans(answer.met, axis) if answer.met else "none"
        row = [
            short[strategy_title(solved.case.strategy)],
            *([limit] if several else []),
            reached.removeprefix("at least ") if least else reached,
            interval(answer, axis) or "-",
            "-" if solved.best is None else _figure(solved, solved.best[1], None),
        ]
        rows.append(row if here is None else [*row, _now(solved)])
    return columns, rows


def _now(solved: Solved) -> str:
    """The figure with what the cluster has, and its interval."""
    if solved.now is None:
        return "-"
    figure, band = solved.at(solved.now)
    return "does not fit" if figure is None else _figure(solved, figure, band)


def _figure(solved: Solved, figure: float, band: tuple[float, float] | None) -> str:
    """A figure with its ends; of a share with three digits, and no more than all of it."""
    metric = solved.target.metric
    if metric.unit != "share":
        shown = metric.shown(figure, solved.currency)
        ends = [metric.shown(end, solved.currency) for end in band or ()]
    else:
        shown = f"{100 * figure:.3g} %"
        ends = [f"{100 * min(1.0, end):.3g}" for end in band or ()]
    return f"{shown} ({' to '.join(ends)})" if ends else shown


def _rows(
    group: Sequence[Solved],
    leading: Solved,
    results: Mapping[str, Result],
    short: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """What a decision needs beside the answer."""
    axis, shown = leading.axis, list(results.values())
    if leading.now is not None and len(group) == 1:
        here = f"{axis.path} {axis.shown(leading.now)}"
        yield "as it is", f"{here}: {leading.target.name} {_now(leading)}"
    if shown:
        yield from _of_cases(leading, results, short)
    yield "counted", _counted(leading, shown)
    size = leading.case.load()[0].value.layout.world_size
    edge = crossing(_headline(leading).met)
    if axis.path == "gpus" and edge is not None and edge > size:
        yield "what-if", f"the cluster has {counted(size, 'GPU')}; more are a what-if"
    yield "range", _range(leading)
    entries = [
        Simulated(name=title, label=title, method=title, case=solved.case, result=results[title])
        for solved in group
        if (title := strategy_title(solved.case.strategy)) in results
    ]
    best = [entry for entry in entries if entry.case == leading.case]
    if best:
        yield from shared_rows(best[0], entries)


def _of_cases(
    leading: Solved, results: Mapping[str, Result], short: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Of the cases as they are: what they cost, whether they fit, and their batch."""
    shown = list(results.values())
    price, first = leading.case.load()[0].value.price_per_gpu, shown[0]
    if price:
        edge = crossing(_headline(leading).met) if leading.axis.path == "gpus" else None
        gpus = first.gpus if edge is None else round(edge)
        hourly = f"{price * 3600 * gpus:,.2f} {first.currency} an hour"
        yield "cost", f"{hourly} for {counted(gpus, 'GPU')}"
    fullest = max(results, key=lambda title: results[title].memory_bytes_per_gpu["total"])
    which = f"; {short[fullest]}" if len(results) > 1 else ""
    yield "memory", f"{results[fullest].memory_answer}, as it is{which}"
    yield "batch", batch_row(shown)


def _counted(solved: Solved, shown: Sequence[Result]) -> str:
    """What the figures count, and what not."""
    cluster, needs = solved.case.load()[0].value, solved.target.metric.needs
    counts, leaves = ["communication, uneven nodes"], ["data"]
    if needs in {"tokens", "failures"} and cluster.failures is not None:
        counts.append("failures")
    elif needs == "tokens" and cluster.count_failures:
        counts.append("failures of what takes more than a week")
    else:
        leaves.insert(0, "failures")
    if needs != "tokens" and any((result.workers or 1) > 1 for result in shown):
        leaves.append("that a step of local updates is worth less")
    return f"{', '.join(counts)}; not: {', '.join(leaves)}"


def _range(solved: Solved) -> str:
    """Where the interval comes from."""
    scaling, answer = error_model().scaling, _headline(solved)
    if answer.sure is None:
        return ""
    if solved.target.metric.ends is None or scaling is None:
        return "by the error of tokens/s"
    return (
        "of what both sides do not share: errors of"
        f" {scaling.runs:,} published ratios of a job on two numbers of GPUs (docs/stacks.md)"
    )
