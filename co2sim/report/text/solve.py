"""What `co2sim solve` says: sentences, commands and plain values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from co2sim.prediction.figures import asked
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, Scale, scale_of_case
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
        case = solved.case if edge is None else solved.axis.at(solved.case, edge)
        yield f"to check it: {_check_of(case, solved, tokens, goal)}"


def told(answer: Answer, axis: Axis) -> str:
    """Where a target is met, with the interval of its edge if there is one edge."""
    text = _spans(answer.met, axis)
    if answer.sure is None or answer.hoped is None or len(answer.met) != 1:
        return text
    edges = [crossing(spans) for spans in (answer.hoped, answer.met, answer.sure)]
    if edges[1] is None:
        return text
    good, bad = edges[0], edges[2]
    if good is None or bad is None:
        best = "any is enough" if good is None else axis.shown(good)
        worst = "none is enough" if bad is None else axis.shown(bad)
        return f"{text} (90 % interval: {best} at its good end, {worst} at its bad end)"
    low, high = sorted((good, bad))
    return f"{text} (90 % interval: {axis.shown(low)} to {axis.shown(high)})"


def crossing(spans: Sequence[ValueRange]) -> float | None:
    """The one crossing of a range that is open to the other side."""
    if len(spans) != 1 or spans[0].open_low == spans[0].open_high:
        return None
    return spans[0].low if spans[0].open_high else spans[0].high


def _spans(spans: Sequence[ValueRange], axis: Axis) -> str:
    def one(span: ValueRange) -> str:
        if span.open_low and span.open_high:
            return f"any from {axis.shown(span.low)} to {axis.shown(span.high)}"
        if span.open_high:
            return f"at least {axis.shown(span.low)}"
        if span.open_low:
            return f"at most {axis.shown(span.high)}"
        return f"{axis.shown(span.low)} to {axis.shown(span.high)}"

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
