"""The page of `co2sim solve`: which value of a number reaches a target, and how sure that is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from co2sim.common.units import counted
from co2sim.prediction.case import Case
from co2sim.prediction.figures import shared_batch
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal, remark
from co2sim.report import decision_charts, sections
from co2sim.report.html import Figure, Page, PageSection
from co2sim.report.tables import Answered, Table
from co2sim.report.text import solve, totals
from co2sim.studies.grid import display_name, offer_name, strategy_title
from co2sim.studies.sensitivity import Sensitivity
from co2sim.studies.solve import Solved


@dataclass(frozen=True, kw_only=True)
class AllSolved:
    """What was solved, for every case and target; those of one case follow each other.

    `results` are those of the cases as they are, by strategy, as far as they can be simulated;
    `levers` what a tenth more of each number does to them. `command` repeats it all.
    """

    cases: Sequence[Case]
    found: Sequence[Solved]
    results: Mapping[str, Result]
    levers: Mapping[str, Sequence[Sensitivity]]
    tokens: float | None
    goal: Goal
    command: str

    @cached_property
    def names(self) -> list[str]:
        """The strategies."""
        return [strategy_title(case.strategy) for case in self.cases]

    @cached_property
    def by_target(self) -> list[list[Solved]]:
        """What was solved, by target."""
        wanted = list(dict.fromkeys(solved.target for solved in self.found))
        return [[one for one in self.found if one.target == target] for target in wanted]

    @cached_property
    def as_they_are(self) -> list[Answered]:
        """The cases that can be simulated as they are."""
        return [
            Answered(offer_name(case.cluster), name, case, self.results[name], None)
            for name, case in zip(self.names, self.cases, strict=True)
            if name in self.results
        ]


def page(answers: AllSolved) -> Page:
    """Nothing is simulated for it."""
    axis = answers.found[0].axis
    shown = answers.as_they_are
    return Page(
        answer=[_heading(answers), *(f"{solve.words(solved)}." for solved in answers.found)],
        facts=_facts(answers),
        doubts=sections.predicted_with(shown),
        sections=[
            *(_reached(group, place, answers) for place, group in enumerate(answers.by_target)),
            sections.gains({f"{name}, as it is": each for name, each in answers.levers.items()}),
            sections.trust(shown, shown) if shown else PageSection("trust", "How sure this is"),
            sections.inputs_of(
                [(display_name(case.cluster), case) for case in answers.cases[:1]],
                {axis.path: f"{axis.shown(axis.low)} to {axis.shown(axis.high)}"},
            ),
        ],
        commands=_commands(answers),
        files=_files(answers),
    )


def _heading(answers: AllSolved) -> str:
    """Model, GPUs and cluster, and what is asked."""
    case, axis = answers.cases[0], answers.found[0].axis
    targets = " and ".join(dict.fromkeys(solved.target.name for solved in answers.found))
    model = case.load()[1].value.name
    sizes = f"{counted(case.gpus, 'GPU')} of " if case.gpus else ""
    tokens = "" if answers.tokens is None else f", {totals.short(answers.tokens)} tokens"
    batch = f", {shared_batch(list(answers.results.values()))}" if answers.results else ""
    return f"{model}{tokens}{batch}, {sizes}{offer_name(case.cluster)}: {axis.path} for {targets}"


def _facts(answers: AllSolved) -> dict[str, list[str]]:
    """The first screen."""
    facts = {"The answer": [f"{solve.words(solved)}." for solved in answers.found[:_MOST]]}
    if answers.as_they_are:
        first = answers.as_they_are[0]
        facts["How sure"] = sections.surest(first)
        held = next(iter(answers.levers.values()), ())
        facts[f"What more would give ({first.strategy}, as it is)"] = sections.binding(
            held, first.result.unit
        )
        facts["Evidence"] = sections.evidence(first)
    return {name: lines for name, lines in facts.items() if lines}


_MOST = 4
"""Answers on the first screen."""


def _reached(group: Sequence[Solved], place: int, answers: AllSolved) -> PageSection:
    """The figure over the number, and the answers."""
    said = remark(solve.trainings([one.case for one in group], answers.results), answers.goal)
    target, axis = group[0].target, group[0].axis
    metric = target.metric
    limits = [metric.shown(answer.value, group[0].currency) for answer in group[0].answers]
    side = "at least" if metric.more else "at most"
    chart = Figure(
        title="",
        note=f"Diamonds: from where the figure is {side} what the dashed lines say, with the 90 %"
        " interval of that value. Bands are 90 % intervals of the figure.",
        label=f"{metric.words} by {axis.path}, a line for each strategy",
        chart=decision_charts.solved(group, [strategy_title(one.case.strategy) for one in group]),
        table=_points(group),
    )
    rows = [
        [
            strategy_title(solved.case.strategy),
            *(solve.told(answer, axis) for answer in solved.answers),
            solve.best(solved),
        ]
        for solved in group
    ]
    columns = ("strategy", *limits, "best")
    reached = Figure(f"{axis.path} for {target.name}", table=Table(columns, rows, len(columns)))
    return PageSection(
        key=f"target-{place}",
        title=f"{metric.words[0].upper()}{metric.words[1:]}, by {axis.path}",
        figures=[chart, reached],
        notes=[*solve.remarks(group), *([said] if said else [])],
    )


def _points(group: Sequence[Solved]) -> Table:
    """Every value that was looked at."""
    metric, axis = group[0].target.metric, group[0].axis
    rows = []
    for solved in group:
        name = strategy_title(solved.case.strategy)
        for (value, figure), band in zip(solved.points, solved.bands, strict=True):
            said = "does not fit" if figure is None else metric.shown(figure, solved.currency)
            ends = [metric.shown(end, solved.currency) for end in band or ()]
            rows.append([name, axis.shown(value), said, " to ".join(ends) or "-"])
    return Table(("strategy", axis.path, group[0].target.name, "90 % interval"), rows)


def _commands(answers: AllSolved) -> list[str]:
    """Which repeats it, and what shows the figures at the answers."""
    said = [f"# to see all of it\n{answers.command}"]
    lines = solve.checks(answers.found, answers.tokens, answers.goal)
    return [*said, *("# {}\n{}".format(*line.split(": ", 1)) for line in lines)]


def _files(answers: AllSolved) -> dict[str, tuple[str, str]]:
    plain = [solve.plain(solved, answers.levers, answers.results) for solved in answers.found]
    rows = [
        {
            "strategy": one["strategy"],
            "number": one["number"],
            "unit": one["unit"],
            "target": one["target"],
            "value": point["value"],
            "figure": point["figure"],
            "figure_low": (point["interval"] or (None, None))[0],
            "figure_high": (point["interval"] or (None, None))[1],
        }
        for one in plain
        for point in one["points"]
    ]
    return {
        "solve.csv": ("text/csv", pd.DataFrame(rows).to_csv(index=False)),
        "solve.json": ("application/json", json.dumps(plain, indent=1)),
    }
