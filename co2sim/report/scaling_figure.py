"""The picture of `co2sim scale`: throughput per GPU over GPUs, a panel for each cluster."""

import json
from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

import altair as alt
import vl_convert

from co2sim.common.units import counted
from co2sim.prediction.case import Case
from co2sim.prediction.published import ThroughputCell
from co2sim.prediction.published_speeds import SpeedComparison
from co2sim.prediction.result import Result
from co2sim.report.chart_style import CONFIG, HEIGHT, TEXT, Rows, by_strategy, data
from co2sim.report.line_charts import STAR, banded, gpu_axis

_WIDTH = 340
_LETTER = 7
"""Pixels, about."""


def draw(
    cases: Sequence[Case],
    results: Sequence[Result],
    comparisons: Sequence[SpeedComparison],
    uneven: str = "",
) -> dict[str, bytes]:
    """The picture as PNG and SVG. Bands are 90 % intervals, stars are published.

    Hollow points do not fit in memory. `uneven` says what makes ranks differ.
    """
    drawn = chart(cases, results, comparisons, uneven).to_dict()
    drawn["config"] = CONFIG | {"background": "white", "font": "sans-serif"}
    drawn["config"]["legend"] = CONFIG["legend"] | {"labelLimit": 0, "columns": 2}
    text = json.dumps(drawn).replace(TEXT, "#000000")
    return {
        "png": vl_convert.vegalite_to_png(text, scale=2),
        "svg": vl_convert.vegalite_to_svg(text).encode(),
    }


def chart(
    cases: Sequence[Case],
    results: Sequence[Result],
    comparisons: Sequence[SpeedComparison],
    uneven: str,
) -> Any:
    """The picture as Altair has it."""
    names = list(dict.fromkeys(result.strategy for result in results))
    pairs = zip(cases, results, strict=True)
    panels = [
        _panel(
            [result for _, result in group],
            names,
            [one for one in comparisons if one.cell.cluster == cluster and one.strategy in names],
        )
        for cluster, group in groupby(pairs, key=lambda pair: str(pair[0].cluster))
    ]
    first, width = results[0], len(panels) * _WIDTH // _LETTER
    batch = counted(first.tokens_per_gpu_per_step, first.unit)
    heading = f"{first.model}, {batch} per GPU and step, {first.precision}"
    signs = ["Bands are 90 % intervals"] if any(map(_known, results)) else []
    signs += ["stars are published"] if comparisons else []
    signs += [] if all(r.fits_in_memory for r in results) else ["hollow: does not fit in memory"]
    title = alt.TitleParams(
        wrap(heading + (f"; {uneven}" if uneven else ""), width),
        subtitle=wrap(", ".join(signs), width),
        anchor="middle",
    )
    return alt.hconcat(*panels, title=title).resolve_scale(y="shared")


def _known(result: Result) -> bool:
    return result.tokens_per_s_low is not None


def _panel(
    results: Sequence[Result], names: Sequence[str], comparisons: Sequence[SpeedComparison]
) -> Any:
    rows: Rows = [
        {
            "strategy": one.strategy,
            "gpus": one.gpus,
            "value": one.tokens_per_s_per_gpu,
            "low": None if one.tokens_per_s_low is None else one.tokens_per_s_low / one.gpus,
            "high": None if one.tokens_per_s_high is None else one.tokens_per_s_high / one.gpus,
            "fits": one.fits_in_memory,
        }
        for one in results
    ]
    stars: Rows = [
        {"strategy": one.strategy, "gpus": cell.gpus, "value": cell.value / cell.gpus}
        for one in comparisons
        if isinstance(cell := one.cell, ThroughputCell)
    ]
    sizes = sorted({row["gpus"] for row in (*rows, *stars)})
    x = gpu_axis(sizes)
    y = alt.Y(
        "value:Q",
        title=f"{results[0].unit}s/s per GPU",
        scale=alt.Scale(zero=True),
        axis=alt.Axis(format=",d"),
    )
    layers = banded(rows, x, y, names, [], several=len({row["gpus"] for row in rows}) > 1)
    if stars:
        mark = alt.Chart(data(stars)).mark_point(shape=STAR, size=200, filled=False, strokeWidth=2)
        layers.append(mark.encode(x=x, y=y, color=by_strategy(names)[0]))
    title = alt.TitleParams(
        wrap(results[0].cluster, _WIDTH // _LETTER), fontSize=11, fontWeight="normal"
    )
    return alt.layer(*layers, title=title, width=_WIDTH, height=HEIGHT)
