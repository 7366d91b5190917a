"""The page of `co2sim sweep`: figures over what varies, as lines or as bars."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from co2sim.prediction.case import Case
from co2sim.report import sections, sweep_charts, tables
from co2sim.report.html import Figure, Page, PageSection
from co2sim.report.sweep import Swept
from co2sim.report.tables import Answered
from co2sim.report.text import totals
from co2sim.studies.grid import display_name
from co2sim.studies.table import to_frame

_MAX_ROWS = 200
"""Of one table."""
_MAX_TEXTS = 20
_MAX_INPUTS = 20
_MAX_ON_FRONT = 12
"""Points of days against money: each has its own colour."""
_MAX_CHARACTERS = 250_000
"""Of a file inside of the page."""


def page(swept: Swept) -> Page:
    """Nothing is simulated for it. Of very many cases the first ones are shown, and it says so."""
    every = swept.all
    files, cut = _files(swept)
    bars = sorted(every[: sweep_charts.MAX_BARS], key=_cluster)
    groups = {name: list(group) for name, group in groupby(bars, key=_cluster)}
    more = sweep_charts.left_out("cases", len(every), sweep_charts.MAX_BARS).strip()
    plain = [replace(one, strategy=one.result.strategy) for one in every]
    trust = sections.trust(plain, plain)
    return Page(
        answer=[_heading(swept), *swept.answer()],
        facts={
            "The answer": swept.answer(),
            "How sure": sections.surest(swept.best, *swept.doubts()),
            "Evidence": sections.evidence(swept.best),
        },
        doubts=[*swept.doubts(), *sections.predicted_with(every)],
        sections=[
            _speed(swept),
            PageSection("failed", "Cases that failed", notes=_few(swept.failed)),
            _money(swept),
            replace(sections.time(groups), intro=more),
            replace(sections.memory(groups), intro=more),
            replace(trust, warnings=_few(trust.warnings), notes=_few(trust.notes)),
            sections.inputs_of(_inputs(swept), swept.varied),
            PageSection("kept", "The data in this page", notes=cut),
        ],
        commands=[swept.command],
        files=files,
    )


def _heading(swept: Swept) -> str:
    """Model, tokens, batch and cluster, as far as they are the same; and the best case."""
    clusters = list(dict.fromkeys(one.cluster for one in swept.all))
    where = f" on {clusters[0]}" if len(clusters) == 1 else ""
    return f"{sections.about(swept.all, swept.tokens)}{where}: {swept.best.strategy}"


def _cluster(one: Answered) -> str:
    return one.cluster


def _inputs(swept: Swept) -> list[tuple[str, Case]]:
    """A case for each cluster and model."""
    found = {(display_name(case.cluster), display_name(case.model)): case for case in swept.cases}
    return [(cluster, case) for (cluster, _), case in list(found.items())[:_MAX_INPUTS]]


def _few(lines: Sequence[str]) -> list[str]:
    """The first of many."""
    left = len(lines) - _MAX_TEXTS
    return [*lines[:_MAX_TEXTS], *([f"and {left:,} more"] if left > 0 else [])]


def _figure(swept: Swept, measure: sweep_charts.Measure) -> Figure:
    chart, words = sweep_charts.chart(swept, measure)
    shape = "; hollow points do" if swept.across else "; pale bars do"
    misfits = any(not one.result.fits_in_memory for one in swept.all)
    return Figure(
        title=measure.title,
        note=f"Intervals are of 90 %{f'{shape} not fit in memory' * misfits}.{words}",
        label=f"{measure.title} by {' and '.join(swept.paths)}",
        chart=chart,
    )


def _speed(swept: Swept) -> PageSection:
    """Throughput, and a table of every case."""
    table = tables.speeds(swept.all[:_MAX_ROWS])
    named = replace(table, columns=("case", *table.columns[1:]))
    first, *_ = sweep_charts.measures(swept)
    chart = replace(_figure(swept, first), table=named)
    return PageSection("speed", "Speed", figures=[chart], notes=_cut_rows(swept))


def _money(swept: Swept) -> PageSection:
    """Days and money by what varies; against each other where the cases are few."""
    every = swept.all
    _, *others = sweep_charts.measures(swept)
    if not others:
        return PageSection("money", "Days and money")
    few = len(every) <= _MAX_ON_FRONT
    table = tables.trainings(every[:_MAX_ROWS])
    if table:
        table = replace(table, columns=("cluster", "case", *table.columns[2:]))
    figures = [_figure(swept, measure) for measure in others]
    figures[0] = replace(figures[0], table=table)
    if few:
        lined = [
            replace(one, strategy=line) if swept.across else one
            for one, (_, _, line) in zip(every, swept.placed, strict=True)
        ]
        front = sections.money(lined, [one.strategy for one in lined])
        if len({(one.cluster, one.result.gpus) for one in every}) > 1:  # else they are one figure
            figures += [replace(one, title="Money by days", table=None) for one in front.figures]
    basis = totals.basis_lines(swept.cases[:_MAX_ROWS], [one.totals for one in every])
    return PageSection("money", "Days and money", figures=figures, notes=basis)


def _cut_rows(swept: Swept) -> list[str]:
    count = len(swept.all)
    if count <= _MAX_ROWS:
        return []
    return [f"Tables of this page have the first {_MAX_ROWS} of {count:,} cases."]


def _files(swept: Swept) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """All figures, of as many cases as a page can hold; and what it cannot."""
    cases = len(swept.cases)
    texts = [json.dumps(row) for row in swept.rows]
    fitting = _fitting([len(text) + 2 for text in texts])
    frame = to_frame(swept.cases, swept.outcomes, swept.settings, swept.goal, swept.tokens)
    head, *lines = frame.to_csv(index=False).splitlines(keepends=True)
    kept = _fitting([len(line) for line in lines])
    inside = ",\n".join(texts[:fitting])
    cut = []
    if kept < len(lines) or fitting < cases:
        cut.append(
            f"Of {cases:,} cases the first {min(kept, cases):,} are in sweep.csv, the first"
            f" {fitting:,} in sweep.json; --csv and --json write all of them."
        )
    return {
        "sweep.csv": ("text/csv", "".join([head, *lines[:kept]])),
        "sweep.json": ("application/json", f"[{inside}]"),
    }, cut


def _fitting(sizes: Sequence[int]) -> int:
    """How many of the first ones there is room for."""
    room = _MAX_CHARACTERS
    for place, size in enumerate(sizes):
        room -= size
        if room < 0:
            return place
    return len(sizes)
