"""The first screens of `co2sim run`, `scale` and `report`, and of their pages."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from co2sim.common.units import counted
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, local_updates
from co2sim.prediction.verdict import Verdict, tells
from co2sim.report.text import answer, totals
from co2sim.report.text.answer import Simulated
from co2sim.report.text.screen import Screen
from co2sim.studies.grid import display_name, short_names, strategy_title

if TYPE_CHECKING:
    from co2sim.prediction.published import SpeedComparison


def of_strategies(
    cases: Sequence[Question],
    results: Sequence[Result],
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
    judged: Sequence[Verdict | None] = (),
    trainer: str = "",
) -> Screen:
    """The answer of one strategy, or of several on the same GPUs, the fastest first.

    `judged` are verdicts on the cases. `trainer` is the one whose file asks; see `launch`.
    """
    trained = totals.totals_for(cases, results, tokens, goal)
    asked = [strategy_title(case.strategy) for case in cases]
    short = answer.labels(asked)
    entries = []
    for title, case, result, total in zip(asked, cases, results, trained, strict=True):
        name = short[title] if len(cases) > 1 else totals.where(result)
        about = {"name": name, "label": name, "method": short[title]}
        entries.append(Simulated(**about, case=case, result=result, totals=total))
    verdict = {entry.name: str(one) for entry, one in zip(entries, judged, strict=False) if one}
    if len(entries) == 1:
        said = verdict.get(entries[0].name, "")
        return answer.of_one(entries[0], goal, tokens, said, trainer)
    entries.sort(key=answer.pace, reverse=True)
    first = entries[0].result
    job = f"{answer.job(first, tokens)} on {counted(first.gpus, 'GPU')}"
    return answer.of_several(
        entries,
        (["strategy"], [[answer.marked(entry.name, entry.result)] for entry in entries]),
        f"{job}: {answer.setup([answer.place(first)], results)}",
        goal,
        tokens,
        said=[
            ("learning", f"{name}: {text}") for name, text in verdict.items() if len(verdict) == 1
        ],
        key=answer.legend(
            {entry.name: entry.result.strategy for entry in entries}, results=results
        ),
    )


def offers_of(cases: Sequence[Question], panels: Sequence[str] = ()) -> list[str]:
    """What each case's cluster is called, with what was varied as its panel has it."""
    names = short_names([case.cluster for case in cases])
    keys = [display_name(case.cluster) for case in cases]
    return [
        f"{names[key]}{panel.removeprefix(key)}"
        for key, panel in zip(keys, panels or keys, strict=True)
    ]


def over_gpus(
    cases: Sequence[Question],
    results: Sequence[Result],
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
    *,
    comparisons: Sequence["SpeedComparison"] = (),
    panels: Sequence[str] = (),
    whole: bool = False,
) -> Screen:
    """The answer of strategies over numbers of GPUs, on one cluster or several.

    `panels` names the cluster of each case, with what was varied. A `whole` table may be wider
    than the terminal.
    """
    trained = totals.totals_for(cases, results, tokens, goal)
    titles = [strategy_title(case.strategy) for case in cases]
    short, offers = answer.labels(titles), offers_of(cases, panels)
    several = len(set(offers)) > 1
    entries, groups, lines = [], dict[str, list[Simulated]](), dict[tuple[str, str], list[Result]]()
    for case, title, offer, result, total in zip(
        cases, titles, offers, results, trained, strict=True
    ):
        of = f" of {offer}" * several
        name = f"{short[title]} on {counted(result.gpus, 'GPU')}{of}"
        about = {"name": name, "label": short[title] + of, "method": short[title]}
        entries.append(Simulated(**about, case=case, result=result, totals=total))
        groups.setdefault(offer, []).append(entries[-1])
        lines.setdefault((offer, short[title]), []).append(result)
    rows = [
        [*[offer] * several, answer.marked(short[title], *lines[offer, short[title]])]
        for offer, title in zip(offers, titles, strict=True)
    ]
    named = (["cluster"] * several + ["strategy"], rows)
    where = answer.setup([answer.job(results[0], tokens)], results) if several else ""
    alone = (
        f"{answer.job(results[0], tokens)} on {answer.setup([answer.place(results[-1])], results)}"
    )
    return answer.of_several(
        entries,
        named,
        "" if several else alone,
        goal,
        tokens,
        said=[
            *_between(groups),
            *(("like it", text) for text in _beside_published(comparisons)),
        ],
        key=answer.legend(
            {short[title]: title for title in titles},
            where,
            f"{_what(results, tokens)} by GPUs, then of the most GPUs",
            results=results,
        ),
        table=answer.of_counts(entries, named, tokens, whole=whole),
    )


def _what(results: Sequence[Result], tokens: float | None) -> str:
    """What the table has below each number of GPUs."""
    if tokens is None:
        return f"{results[0].unit}s/s of a GPU"
    local = local_updates(result.strategy for result in results)
    return f"days{' to the loss of ddp' if local else ''}"


_MAX = 2
"""Clusters that the fastest one is compared with."""


def _between(groups: Mapping[str, Sequence[Simulated]]) -> Iterator[tuple[str, str]]:
    """How much faster the best of one cluster is than that of another, on as many GPUs.

    And so how much more it may cost, where no price says it. Nothing where a step of one is not
    worth a step of the other, and that is not counted.
    """
    largest = {
        offer: [e for e in group if e.result.gpus == max(one.result.gpus for one in group)]
        for offer, group in groups.items()
    }
    best = {
        offer: max(fitting, key=answer.pace)
        for offer, group in largest.items()
        if (fitting := [entry for entry in group if entry.result.fits_in_memory])
    }
    counts = {entry.result.gpus for entry in best.values()}
    untold = local_updates(e.result.strategy for e in best.values() if e.totals is None)
    if len(counts) > 1 or untold:
        return
    gpus = counted(max(counts, default=0), "GPU")
    top, *others = sorted(best, key=lambda offer: answer.pace(best[offer]), reverse=True) or [""]
    for other in others[:_MAX]:
        ratio, reach = _faster(best[top], best[other])
        text = f"{top} is {ratio:.3g} times as fast as {other} on {gpus}"
        if reach is None:
            yield "between", text
            continue
        low, high = ratio * math.exp(-reach), ratio * math.exp(reach)
        text += f" (90 %: {low:.2g} to {high:.2g})"
        if low <= 1:
            yield "between", f"{text}: which is faster is not known"
        elif tells(low, high) and any(e.result.currency is None for e in best.values()):
            yield "between", f"{text}: worth {low:.2g} times the price of a GPU, surely"
        else:
            yield "between", text


def _faster(top: Simulated, other: Simulated) -> tuple[float, float | None]:
    """How many times as fast one is, and how far the 90 % interval of the logarithm reaches.

    As if their errors had nothing in common. None without an interval.
    """
    reach = [_reach(entry) for entry in (top, other)]
    ratio = answer.pace(top)[2] / answer.pace(other)[2]
    if top.totals and other.totals:
        ratio = other.totals.days / top.totals.days
    return ratio, None if None in reach else math.hypot(*filter(None, reach))


def _reach(entry: Simulated) -> float | None:
    """Half of the 90 % interval of the logarithm of its speed, or days."""
    low, high = entry.result.tokens_per_s_low, entry.result.tokens_per_s_high
    if entry.totals:
        low, high = entry.totals.days_low, entry.totals.days_high
    return None if low is None or high is None else math.log(high / low) / 2


def _beside_published(comparisons: Sequence["SpeedComparison"]) -> list[str]:
    """One line on published cells beside their predictions."""
    if not comparisons:
        return []
    errors = [abs(comparison.error) for comparison in comparisons]
    mean, most = sum(errors) / len(errors), max(errors)
    count = counted(len(errors), "published cell")
    fitted = sum(comparison.cell.use == "fit" for comparison in comparisons)
    return [f"{count}: {mean:.0%} off in the mean, {most:.0%} at most; {fitted} were fitted"]
