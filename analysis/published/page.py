"""The page of `co2analysis validate`: how far predictions are from published numbers."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from analysis.published import charts, formats
from analysis.published.errors import CellPrediction
from analysis.published.report import ValidationReport
from co2sim.common.units import counted, figures
from co2sim.report import markdown
from co2sim.report.html import Figure, Page, PageSection
from co2sim.report.tables import Table

_QUANTITIES = {
    "tflops_per_gpu": "TFLOP/s per GPU",
    "tokens_per_s": "Tokens per second",
    "iteration_ms": "Milliseconds of an iteration",
    "inter_node_volume": "Volume between nodes, in sizes of the model",
    "": "Ratios",
}
_COLUMNS = ("source", "cell", "strategy", "use", "published", "predicted", "error", "low", "high")


def page(
    report: ValidationReport,
    text: str,
    numbers: Sequence[Mapping[str, Any]],
    command: str,
    missing: Sequence[str] = (),
) -> Page:
    """`text` is the report as Markdown, `numbers` its cells as JSON has them.

    `missing` says what was not read.
    """
    return Page(
        answer=_answer(report.rows),
        doubts=missing,
        sections=[
            _errors(report.rows),
            _cells(report.rows),
            PageSection("whole", "The whole report", text=markdown.to_html(text, deeper=1)),
        ],
        commands=[command],
        files={
            "cells.csv": ("text/csv", _csv(numbers)),
            "cells.json": ("application/json", json.dumps(numbers)),
            "report.md": ("text/markdown", text),
        },
    )


_USES = {"check": "nothing was", "fit": "constants were"}


def _answer(rows: Sequence[CellPrediction]) -> list[str]:
    """Of cells that nothing was fitted to, and apart from them of the others; then of intervals."""
    by_use = {use: [row for row in rows if row.cell.use == use] for use in _USES}
    found = [
        f"{counted(len(mine), 'published number')} that {_USES[use]} fitted to: {_judged(mine)}"
        for use, mine in by_use.items()
        if mine
    ]
    known = {use: [row.inside for row in mine if row.has_interval] for use, mine in by_use.items()}
    held = [
        f"{sum(inside)} of the {len(inside)} that {_USES[use]} fitted to"
        for use, inside in known.items()
        if inside
    ]
    if held:
        found.append(
            f"Published numbers in the 90 % interval of their prediction, of those that have"
            f" one: {', and '.join(held)}."
        )
    return found


def _judged(rows: Sequence[CellPrediction]) -> str:
    off, middle = (median(abs(row.error) for row in rows), median(row.error for row in rows))
    worst = max(rows, key=lambda row: abs(row.error))
    return (
        f"predictions are off by {off:.1%} in the median (signed: {formats.signed(middle)}), and by"
        f" {formats.signed(worst.error)} at most ({worst.cell.source}: {worst.cell.name})."
    )


def _errors(rows: Sequence[CellPrediction]) -> PageSection:
    groups: dict[tuple[str, str], list[CellPrediction]] = {}
    for row in rows:
        groups.setdefault((row.cell.source, charts.FITTED[row.cell.use]), []).append(row)
    lines = []
    for (source, use), some in sorted(groups.items()):
        worst = max(some, key=lambda row: abs(row.error))
        inside = [row.inside for row in some if row.has_interval]
        lines.append(
            [
                source,
                use,
                worst.cell.name,
                str(len(some)),
                formats.percent(median(abs(row.error) for row in some)),
                formats.signed(median(row.error for row in some)),
                formats.percent(fmean(abs(row.error) for row in some)),
                formats.signed(worst.error),
                formats.whole_percent(fmean(inside) if inside else None),
            ]
        )
    columns = (
        *("source", "use", "largest error: cell", "cells", "median absolute", "median signed"),
        *("mean absolute", "largest", "in 90 % interval"),
    )
    figure = Figure(
        title="",
        note="A mark for each published number; to the right of 0 the prediction is too high.",
        label="signed errors, a line for each source and use",
        chart=charts.errors(rows),
        table=Table(columns, lines, 3),
    )
    return PageSection("errors", "Errors", figures=[figure])


def _cells(rows: Sequence[CellPrediction]) -> PageSection:
    """A chart for each quantity."""
    groups: dict[str, list[CellPrediction]] = {}
    for row in rows:
        name = "" if row.cell.over else row.cell.quantity
        groups.setdefault(name, []).append(row)
    found = [
        Figure(
            title=_QUANTITIES[name],
            label=f"predicted over published: {_QUANTITIES[name]}",
            chart=charts.cells(groups[name], rows),
            table=_table(groups[name]),
        )
        for name in _QUANTITIES
        if name in groups
    ]
    intro = (
        "On the dashed line prediction and publication are equal. Constants were fitted to hollow"
        " squares, and not to filled circles. Thin lines are 90 % intervals. Point at a mark to"
        " read its name."
    )
    return PageSection("cells", "Predicted against published", intro, found)


def _table(rows: Sequence[CellPrediction]) -> Table:
    lines = [
        [
            row.cell.source,
            row.cell.name,
            charts.FITTED[row.cell.use],
            figures(row.cell.published),
            figures(row.predicted),
            formats.signed(row.error),
            f"{figures(row.low)} to {figures(row.high)}" if row.has_interval else "-",
        ]
        for row in rows
    ]
    columns = ("source", "cell", "use", "published", "predicted", "error", "90 % interval")
    return Table(columns, lines, 3)


def _csv(numbers: Iterable[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(numbers)
    return out.getvalue()
