"""The page of a study: strategies over numbers of GPUs, on one cluster or several."""

import json
from collections.abc import Sequence

from co2sim.decide.levers import levers
from co2sim.errors import Co2simError
from co2sim.frames import to_frame
from co2sim.report import bar_charts, line_charts, sections, tables
from co2sim.report.chart_style import picking
from co2sim.report.page import MOST_ROUNDS, Figure, Page, PageSection, Timelines
from co2sim.report.rounds import last_round
from co2sim.report.study import Study
from co2sim.totals import to_dict


def page(study: Study) -> Page:
    """It takes a few simulations: a round of each strategy, and what more would buy."""
    names = [one.strategy for one in study.all]
    at_most = [one for group in study.largest.values() for one in group]
    return Page(
        answer=study.answer(),
        doubts=study.doubts(),
        sections=[
            sections.money(study.all, names),
            _speed(study, names),
            _time(study),
            sections.memory(study.largest),
            _gains(study),
            sections.trust(study.all, at_most, study.comparisons),
            sections.inputs(study.all),
        ],
        commands=[study.command],
        files=_files(study),
    )


def _files(study: Study) -> dict[str, tuple[str, str]]:
    frame = to_frame(study.cases, study.results, goal=study.goal, tokens=study.tokens)
    results = [
        {"cluster_key": one.cluster, **to_dict(one.case, one.result, study.goal, study.tokens)}
        for one in study.all
    ]
    return {
        "study.csv": ("text/csv", frame.to_csv(index=False)),
        "study.json": ("application/json", json.dumps(results)),
    }


def _speed(study: Study, names: Sequence[str]) -> PageSection:
    found = []
    for cluster, group in study.clusters.items():
        unit = group[0].result.unit
        found.append(
            Figure(
                title=f"{unit}s per second on {cluster}",
                note="Bands are 90 % intervals. Hollow points do not fit in memory."
                f" Stars are published.{picking(names)}",
                label=f"{unit}s per second by number of GPUs, a line for each strategy",
                chart=line_charts.scaling(group, names, study.comparisons, study.all),
                table=tables.speeds(group),
            )
        )
        relative = line_charts.per_gpu(group, names)
        if relative:
            found.append(
                Figure(
                    title=f"What a GPU gives on {cluster}",
                    note="Throughput per GPU, relative to the fewest GPUs. 100 % is perfect"
                    " scaling.",
                    label="throughput per GPU by number of GPUs, a line for each strategy",
                    chart=relative,
                )
            )
    return PageSection("speed", "Speed", figures=found)


def _time(study: Study) -> PageSection:
    timed = [one for one in study.largest[study.best.cluster] if one.case.pp == 1]
    if not timed:  # pipelines have no round that all ranks follow
        return sections.time(study.largest)
    rounds = {one.strategy: last_round(one.case) for one in timed[:MOST_ROUNDS]}
    note = f"One rank, on {timed[0].result.gpus} GPUs of {timed[0].cluster}."
    lines = Timelines(note, rounds, bar_charts.timeline(rounds.values()))
    return sections.time(study.largest, lines)


def _gains(study: Study) -> PageSection:
    """Of the answer's case; none where it cannot be simulated again."""
    best = study.best
    try:
        found = levers(best.case)
    except Co2simError:
        found = []
    about = f"{best.strategy} on {best.result.gpus} GPUs of {best.cluster}"
    return sections.gains({about: found})
