"""The page of `co2analysis validate`: how far predictions are from published numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from analysis.published.predict import CellPrediction, ErrorSummary, summarized
from analysis.published.report import ValidationReport, percent, signed, whole_percent
from co2sim.common.units import counted, figures
from co2sim.report.chart_style import (
    HEIGHT,
    PALETTE,
    ROW,
    TEXT,
    Spec,
    coloured,
    cycled,
    data,
    equality,
    interval,
    shaped,
    spec,
)
from co2sim.report.html import Figure, Page, PageSection, from_markdown
from co2sim.report.tables import Table
from co2sim.report.text.screen import Screen

_FITTED = {"fit": "fitted", "check": "not fitted"}
"""What the use of a cell means, as a text."""

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
        screen=Screen(answer=_answer(report.rows)),
        doubts=missing,
        sections=[
            _errors(report.rows),
            _cells(report.rows),
            PageSection("whole", "The whole report", text=from_markdown(text, deeper=1)),
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
    lines = [
        f"{counted(len(mine), 'published number')} that {_USES[use]} fitted to: {_judged(mine)}"
        for use, mine in by_use.items()
        if mine
    ]
    inside_by_use = {
        use: [row.inside for row in mine if row.has_interval] for use, mine in by_use.items()
    }
    held = [
        f"{sum(inside)} of the {len(inside)} that {_USES[use]} fitted to"
        for use, inside in inside_by_use.items()
        if inside
    ]
    if held:
        lines.append(
            f"Published numbers in the 90 % interval of their prediction, of those that have"
            f" one: {', and '.join(held)}."
        )
    return lines


def _judged(rows: Sequence[CellPrediction]) -> str:
    errors = ErrorSummary.of(rows)
    worst = errors.worst
    return (
        f"predictions are off by {errors.median:.1%} in the median (signed:"
        f" {signed(errors.median_bias)}), and by {signed(worst.error)} at most"
        f" ({worst.cell.source}: {worst.cell.name})."
    )


def _errors(rows: Sequence[CellPrediction]) -> PageSection:
    groups = summarized(rows, lambda row: [(row.cell.source, _FITTED[row.cell.use])])
    lines = [
        [
            source,
            use,
            errors.worst.cell.name,
            str(errors.cells),
            percent(errors.median),
            signed(errors.median_bias),
            percent(errors.mape),
            signed(errors.worst.error),
            whole_percent(errors.inside),
        ]
        for (source, use), errors in sorted(groups.items())
    ]
    columns = (
        *("source", "use", "largest error: cell", "cells", "median absolute", "median signed"),
        *("mean absolute", "largest", "in 90 % interval"),
    )
    figure = Figure(
        title="",
        note="A mark for each published number; to the right of 0 the prediction is too high.",
        label="signed errors, a line for each source and use",
        chart=_errors_chart(rows),
        table=Table(columns, lines, 3),
    )
    return PageSection("errors", "Errors", figures=[figure])


def _cells(rows: Sequence[CellPrediction]) -> PageSection:
    """A chart for each quantity."""
    groups: dict[str, list[CellPrediction]] = {}
    for row in rows:
        name = "" if row.cell.over else row.cell.quantity
        groups.setdefault(name, []).append(row)
    panels = [
        Figure(
            title=_QUANTITIES[name],
            label=f"predicted over published: {_QUANTITIES[name]}",
            chart=_cells_chart(groups[name], rows),
        )
        for name in _QUANTITIES
        if name in groups
    ]
    intro = (
        "On the dashed line prediction and publication are equal. Constants were fitted to hollow"
        " squares, and not to filled circles. Thin lines are 90 % intervals. Point at a mark to"
        " read its name; the whole report has a table."
    )
    return PageSection("cells", "Predicted against published", intro, panels)


def _csv(numbers: Sequence[Mapping[str, Any]]) -> str:
    return str(pd.DataFrame(numbers, columns=_COLUMNS).to_csv(index=False, lineterminator="\n"))


# --- charts --------------------------------------------------------------------------------------

_SHAPES = {"not fitted": "circle", "fitted": "square"}
_LABELS = alt.Axis(labelExpr="split(datum.label, ', ')", labelLimit=220)


def _errors_chart(rows: Sequence[CellPrediction]) -> Spec:
    """Signed errors of cells, a line for each source and use."""
    marks = sorted(map(_row, rows), key=lambda row: (row["source"], row["fitted"]))
    ticks = (
        alt.Chart(data(marks))
        .mark_tick(thickness=2, opacity=0.8, height=ROW - 8)
        .encode(
            x=alt.X(
                "error:Q",
                title="error of the prediction",
                axis=alt.Axis(format="+.0%", tickCount=8, labelSeparation=6),
                scale=alt.Scale(padding=12),
            ),
            y=alt.Y("group:N", sort=None, title=None, axis=_LABELS),
            color=_colours(rows).legend(None),
            tooltip=_TIPS,
        )
    )
    zero = alt.Chart(data([{"error": 0}])).mark_rule(color=TEXT).encode(x="error:Q")
    return spec(alt.layer(zero, ticks), (ROW + 8) * len({row["group"] for row in marks}))


def _cells_chart(rows: Sequence[CellPrediction], every: Sequence[CellPrediction]) -> Spec:
    """Predicted over published values with the line where they are equal; bars are intervals.

    Colours are those of the sources of `every` cell. Cells that were fitted to are hollow squares.
    """
    marks = list(map(_row, rows))
    values = [value for row in rows for value in (row.cell.published, row.predicted)]
    ends = [min(values) / 1.2, max(values) * 1.2]
    log = alt.Scale(type="log", domain=ends, nice=False, clamp=True)
    axis = _axis(*ends)
    x = alt.X("published:Q", scale=log, title="published", axis=axis)
    y = alt.Y("predicted:Q", scale=log, title="predicted", axis=axis)
    colour = _colours(every, rows)
    layers = [equality(x, y, ends)]
    if any(row["low"] is not None for row in marks):  # marks of nothing have no text either
        layers.append(interval(marks, "y", {"x": x, "y": y, "color": colour}, opacity=0.25))
    uses = {row["fitted"] for row in marks}
    shape = shaped("fitted", {use: name for use, name in _SHAPES.items() if use in uses})
    layers += [
        alt.Chart(data(here))
        .mark_point(size=55, filled=name == "not fitted", opacity=0.9)
        .encode(x=x, y=y, color=colour, shape=shape, tooltip=_TIPS)
        for name in reversed(_SHAPES)
        if (here := [row for row in marks if row["fitted"] == name])
    ]
    return spec(alt.layer(*layers), HEIGHT)


def _colours(
    every: Sequence[CellPrediction], shown: Sequence[CellPrediction] | None = None
) -> alt.Color:
    """The same colour for a source in every chart; the legend names those that are shown."""
    names = sorted({row.cell.source for row in every})
    colours = dict(zip(names, cycled(PALETTE, len(names)), strict=True))
    here = sorted({row.cell.source for row in (every if shown is None else shown)})
    return coloured("source", {name: colours[name] for name in here})


def _row(row: CellPrediction) -> dict[str, Any]:
    fitted = _FITTED[row.cell.use]
    return {
        "cell": row.cell.name,
        "source": row.cell.source,
        "fitted": fitted,
        "group": f"{row.cell.source}, {fitted}",
        "published": row.cell.published,
        "predicted": row.predicted,
        "low": row.low if row.has_interval else None,
        "high": row.high if row.has_interval else None,
        "error": row.error,
        "said": f"{figures(row.predicted)} for {figures(row.cell.published)}",
        "off": signed(row.error),
        "interval": f"{figures(row.low)} to {figures(row.high)}" if row.has_interval else "none",
    }


_TIPS = [
    alt.Tooltip("cell:N"),
    alt.Tooltip("source:N"),
    alt.Tooltip("fitted:N", title="use"),
    alt.Tooltip("said:N", title="predicted for published"),
    alt.Tooltip("off:N", title="error"),
    alt.Tooltip("interval:N", title="90 % interval"),
]


def _axis(low: float, high: float) -> alt.Axis:
    """Marks at equal distances where the ends are near to each other, else at powers of ten.

    Where these are few, at 2 and 5 times them, too.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high / low < _NEAR:
        steps = (part * 10.0**power for power in range(first - 2, last) for part in (1, 2, 5))
        step = next(step for step in steps if high - low <= _MAX * step)
        every = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    else:
        parts = (1, 2, 5) if last - first <= _FEW else (1,)
        every = [part * 10.0**power for power in range(first, last + 1) for part in parts]
    values = [float(f"{tick:.6g}") for tick in every if low <= tick <= high]
    return alt.Axis(format="~s" if high >= _THOUSANDS else "~g", values=values)


_THOUSANDS = 1000
_NEAR = 5
_MAX = 6
"""Steps between marks."""
_FEW = 3
"""Powers of ten."""
