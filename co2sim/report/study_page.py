"""The page of a study: strategies over numbers of GPUs, on one cluster or several."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest

from co2sim.common.errors import Co2simError
from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.totals import result_to_dict
from co2sim.prediction.verdict import Verdict
from co2sim.report import charts, sections, tables
from co2sim.report.chart_style import picking
from co2sim.report.html import MAX_ROUNDS, Figure, Page, PageSection, Timelines
from co2sim.report.rounds import last_round
from co2sim.report.tables import Answered
from co2sim.report.text import totals
from co2sim.report.text.cases import offers_of
from co2sim.report.text.result import verdict_lines
from co2sim.report.text.screen import Screen
from co2sim.studies.beside import Beside
from co2sim.studies.grid import display_name, strategy_title
from co2sim.studies.run_all import efficiencies
from co2sim.studies.sensitivity import Sensitivity, levers
from co2sim.studies.table import to_frame


@dataclass(frozen=True, kw_only=True)
class Study:
    """Cases with their results, in order; those of one cluster follow each other.

    `screen` is what the command says first. `panels` names the cluster of each case, with what was
    varied; without, it is as it was given. `verdicts` are those on the cases, None on what is no
    local-update method. `tokens` are those to train, None if not asked for. `command` is what a
    user types to repeat it all. `beside` is what each case and the jobs of `files` lose on one
    fabric.
    """

    cases: Sequence[Question]
    results: Sequence[Result]
    goal: Goal
    tokens: float | None
    comparisons: Sequence[SpeedComparison]
    screen: Screen
    command: str
    panels: Sequence[str] = ()
    verdicts: Sequence[Verdict | None] = ()
    beside: Sequence[Sequence[Beside]] = ()
    files: Sequence[str] = ()

    @cached_property
    def all(self) -> tuple[Answered, ...]:
        """Every case with its figures."""
        trained = totals.totals_for(self.cases, self.results, self.tokens, self.goal)
        titles = [strategy_title(case.strategy) for case in self.cases]
        scaled = efficiencies(self.cases, self.results)
        offers = offers_of(self.cases, self.panels)
        rows = zip(offers, titles, self.cases, self.results, trained, strict=True)
        return tuple(
            Answered(*row, efficiency=efficiency)
            for row, efficiency in zip(rows, scaled, strict=True)
        )

    @cached_property
    def keys(self) -> Sequence[str]:
        """The cluster of each case as it was given, with what was varied."""
        return self.panels or [display_name(case.cluster) for case in self.cases]

    @cached_property
    def clusters(self) -> dict[str, list[Answered]]:
        """The cases by cluster."""
        return sections.by_cluster(self.all)

    @cached_property
    def largest(self) -> dict[str, list[Answered]]:
        """By cluster, the cases with the most GPUs."""
        groups = {}
        for name, group in self.clusters.items():
            most = max(entry.result.gpus for entry in group)
            groups[name] = [entry for entry in group if entry.result.gpus == most]
        return groups

    @cached_property
    def best(self) -> Answered:
        """The case that the answer names first."""
        return sections.best(self.all, self._trainings() if self.tokens is not None else ())

    def _trainings(self) -> totals.Trainings:
        return [(entry.title, entry.result, entry.totals) for entry in self.all]


_STEPS = 4
"""Cases whose memory over a step is shown."""


def page(study: Study) -> Page:
    """It takes a few simulations: a round of each strategy, and what more would buy."""
    names = [entry.strategy for entry in study.all]
    held = _levers(study)
    at_most = [entry for group in study.largest.values() for entry in group]
    return Page(
        screen=study.screen,
        sections=[
            sections.money(study.all, names),
            _speed(study, names),
            _time(study),
            sections.beside(study.beside, study.files),
            sections.memory(study.largest, study.largest[study.best.cluster][:_STEPS]),
            sections.gains({study.best.title: held}),
            sections.trust(study.all, at_most, study.comparisons),
            sections.inputs(study.all),
        ],
        commands=[study.command, *_trained_so(study)],
        files=_files(study),
    )


def _trained_so(study: Study) -> list[str]:
    """The Python of the local-update methods that can be trained."""
    judged = [verdict for verdict in study.verdicts if verdict]
    return [f"# {verdict.strategy}\n{verdict_lines(verdict, named=True)[1]}" for verdict in judged]


def _files(study: Study) -> dict[str, tuple[str, str]]:
    frame = to_frame(study.cases, study.results, goal=study.goal, tokens=study.tokens)
    results = [
        {
            "cluster_key": key,
            **result_to_dict(entry.case, entry.result, study.goal, study.tokens),
            **({"verdict": asdict(verdict)} if verdict else {}),
        }
        for key, entry, verdict in zip_longest(study.keys, study.all, study.verdicts)
    ]
    return {
        "study.csv": ("text/csv", frame.to_csv(index=False)),
        "study.json": ("application/json", json.dumps(results)),
    }


def _speed(study: Study, names: Sequence[str]) -> PageSection:
    figures = []
    stars = " Stars are published." if study.comparisons else ""
    for cluster, group in study.clusters.items():
        unit, drawn = group[0].result.unit, sections.fitting(group)
        figures.append(
            Figure(
                title=f"{unit}s per second on {cluster}",
                note=f"Bands are 90 % intervals.{sections.misfits(group)}{stars}{picking(names)}",
                label=f"{unit}s per second by number of GPUs, a line for each strategy",
                chart=charts.over_gpus(
                    drawn, names, charts.speed(unit), sections.fitting(study.all), study.comparisons
                ),
                table=tables.speeds(group),
            )
        )
        relative = charts.efficiency(drawn, names)
        if relative:
            figures.append(
                Figure(
                    title=f"Efficiency on {cluster}",
                    note="Throughput per GPU, relative to the same on one node. The table has the"
                    " share of exposed communication beside it.",
                    label="throughput per GPU by number of GPUs, a line for each strategy",
                    chart=relative,
                    table=tables.efficiencies(group),
                )
            )
    return PageSection("speed", "Speed", figures=figures)


def _time(study: Study) -> PageSection:
    timed = [entry for entry in study.largest[study.best.cluster] if entry.case.pp == 1]
    if not timed:  # pipelines have no round that all ranks follow
        return sections.time(study.largest)
    rounds = {entry.strategy: last_round(entry.case) for entry in timed[:MAX_ROUNDS]}
    note = f"One rank, on {timed[0].result.gpus} GPUs of {timed[0].cluster}."
    lines = Timelines(note, rounds, charts.timeline(rounds.values()))
    return sections.time(study.largest, lines)


def _levers(study: Study) -> list[Sensitivity]:
    """Of the answer's case; none where it cannot be simulated again."""
    try:
        return levers(study.best.case)
    except Co2simError:
        return []
