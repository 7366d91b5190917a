"""The page of `co2sim explore`: with a grid inside, or one that asks a server."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from markupsafe import Markup

from co2sim import __version__
from co2sim.common.plots import COLOURS
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.contract import BY_THE_HOUR
from co2sim.prediction.counted import WEEK
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.report import html, sections
from co2sim.report.bundle import vega
from co2sim.report.chart_style import (
    HEIGHT,
    ROW,
    STRATEGIES,
    TEXT,
    Encoding,
    Spec,
    by_strategy,
    spec,
)
from co2sim.report.charts import memory_line, shares_of
from co2sim.report.explore.exploration import MAX_STRATEGIES, Control, Exploration
from co2sim.report.explore.grid import MAX_CASES, Exactness, ExploreGrid
from co2sim.report.tables import Answered
from co2sim.studies.grid import display_name

_PACKAGE = "co2sim.report.explore"


def static_page(
    question: Exploration,
    grid: ExploreGrid,
    cases: Sequence[tuple[Question, Result]],
    command: str,
) -> bytes:
    """A page that holds its grid; `cases` are those with which it begins."""
    first = cases[0][0].load()
    named = [
        Answered(display_name(case.cluster), name, case, result, None)
        for name, (case, result) in zip(question.titles, cases, strict=True)
    ]
    content = {
        "server": None,
        "grid": grid.to_dict(),
        "asked": asked(question, grid.controls),
    }
    page, _ = render(
        title=f"{first[1].value.name} on {first[0].value.name}",
        content=content,
        exactness=exactness(grid),
        sections=[sections.trust(named, named), sections.inputs(named)],
        command=command,
        scripts=["grid.js", "explore.js"],
        policy=(),
    )
    return page


def asked(question: Exploration, controls: Sequence[Control]) -> dict[str, Any]:
    """What the page knows of a question beside figures."""
    hardware, trained = question.case(0, {}).load()
    cluster = question.case(0, begin(controls)).load()[0].value
    price, low, high = cluster.price_per_gpu, hardware.value.price_low, hardware.value.price_high
    if price != hardware.value.price_per_gpu:  # another price has not the range of the one given
        low, high = None, None
    return {
        "title": f"{trained.value.name} on {cluster.name}",
        "controls": [control.to_dict() for control in controls],
        "strategies": question.titles,
        "unit": trained.value.unit,
        "gpus": question.job.gpus or cluster.layout.world_size,
        "price": price,
        "price_low": low,
        "price_high": high,
        "currency": cluster.currency,
        "bill": _bill(cluster),
        "spot": cluster.spot,
        "failures": cluster.failures is not None,
        "week": WEEK,
        "project": [question.goal.project.factor, *question.goal.project.ends],
        "tokens": question.tokens,
    }


def _bill(cluster: Cluster) -> dict[str, Any]:
    """What `hardware.contract.bill` needs besides time, GPUs and the plain price (None)."""
    contract = cluster.contract or BY_THE_HOUR
    return {
        "gpus": max(contract.least_gpus, cluster.layout.world_size if contract.whole else 0),
        "ways": [(least, price if text else None) for text, least, price in contract.offers(0.0)],
        "storing": contract.storing,
        "leaving": contract.leaving,
    }


def begin(controls: Sequence[Control]) -> dict[str, str]:
    """What is set beside what was given where all controls are where they begin."""
    stops = {
        slider.path: slider.stops[slider.at].setting for slider in controls if not slider.given
    }
    return {path: setting for path, setting in stops.items() if setting is not None}


def render(
    *,
    title: str,
    content: Mapping[str, Any],
    exactness: Sequence[str],
    sections: Sequence[Any],
    command: str,
    scripts: Sequence[str],
    policy: Sequence[str],
) -> tuple[bytes, str]:
    """The file and its policy. `scripts` are ours, `policy` what they may do beside running."""
    texts = [vega(), *(str(html.asset(name, _PACKAGE)) for name in scripts)]
    specs = {
        "curve": curve(),
        "shares": shares(),
        "memory": memory(),
    }
    rules = html.policy(texts, *policy)
    page = (
        html.environment(_PACKAGE)
        .get_template("explore.html.j2")
        .render(
            title=title,
            content=content,
            charts=specs,
            exactness=exactness,
            sections=sections,
            command=command,
            server=content["server"] is not None,
            scripts=[Markup(text) for text in texts],  # noqa: S704 - ours
            policy=rules,
            style=html.asset("page.css") + html.asset("explore.css", _PACKAGE),
            version=__version__,
        )
        .encode()
    )
    return page, rules


def exactness(grid: ExploreGrid) -> list[str]:
    """How exact the figures between simulated positions are: first in short, then all."""
    simulated = f"{grid.simulated:,} cases were simulated for this page."
    if grid.ended:
        simulated += " Control-C ended it: others are missing, or less exact than asked for."
    exact: Exactness = grid.exactness
    if not exact.checked:
        return [simulated if grid.ended else f"{simulated} Every position of every slider is one."]
    end = (
        "as asked for"
        if exact.met
        else "it was ended"
        if grid.ended
        else f"at most {MAX_CASES:,} cases make a page"
    )
    short = (
        f"{simulated} Between them throughput is off by up to {exact.largest:.2%} at"
        f" {exact.checked} random positions; the tolerance is {exact.tolerance:.2%} ({end})."
    )
    more = (
        "Figures between simulated positions are interpolated; memory, micro-batch and"
        " recomputation are those of the nearest one. At these random positions, none of which was"
        " simulated for the page, they were compared with the simulator's: throughput is"
        f" off by {exact.median:.2%} at the median, exposed communication by"
        f" {100 * exact.largest_exposed:.2f} points of a round at most. Elsewhere it may be more."
        " How far the simulator itself is off stands below, and in the 90 % intervals."
    )
    return [short, more]


def server_page(
    view: Mapping[str, Any], catalog: Mapping[str, Any], token: str
) -> tuple[bytes, int, dict[str, str]]:
    """A page that asks the server which gave it out: content, status and headers."""
    content = {"server": {"token": token, "view": view, "catalog": catalog}, "grid": None}
    page, policy = render(
        title="co2sim explore",
        content=content,
        exactness=["Every figure is simulated for this page, as by the command co2sim run."],
        sections=[],
        command="",
        scripts=["server.js", "explore.js"],
        policy=["connect-src 'self'"],
    )
    return page, 200, {"content-security-policy": f"{policy}; frame-ancestors 'none'"}


_BAND = 0.15
_ROWS, _NOW = alt.NamedData("rows"), alt.NamedData("now")


def curve() -> Spec:
    """A figure over a control, a line for each strategy; a dashed line is where the slider is.

    The page sets the titles, the kind of the scale of y, and the strategies of colours and shapes.
    """
    colour, shape = by_strategy([str(number) for number in range(MAX_STRATEGIES)])
    x = alt.X("text:N", sort=None, title="x", axis=alt.Axis(labelOverlap=True, labelAngle=0))
    y = alt.Y("value:Q", title="y", scale=alt.Scale(nice=False, padding=10))
    base = alt.Chart(_ROWS).transform_filter("isValid(datum.value)")
    ends = {"y": alt.Y("low:Q", title="y"), "y2": "high:Q"}
    tips = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("text:N", title="at"),
        alt.Tooltip("shown:N", title="value"),
        alt.Tooltip("interval:N", title="90 % interval"),
        alt.Tooltip("memory:N"),
    ]
    band = base.transform_filter("isValid(datum.low)").mark_area(opacity=_BAND)
    fill = alt.condition("datum.fits", alt.value(1.0), alt.value(0.0))
    marks: Encoding = {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": tips}
    points = base.mark_point(size=60, filled=False).encode(**marks)
    inside = base.mark_point(size=60, filled=True).encode(**marks, opacity=fill)
    layers = [
        band.encode(x=x, color=colour, **ends),
        base.mark_line().encode(x=x, y=y, color=colour),
        inside,
        points,
        alt.Chart(_NOW).mark_rule(strokeDash=[4, 3], color=TEXT).encode(x=x),
    ]
    return spec(alt.layer(*layers), HEIGHT)


def shares() -> Spec:
    """What a round is spent on, a bar for each strategy."""
    return spec(shares_of(_ROWS), ROW)


def memory() -> Spec:
    """The memory of a GPU, a bar and its 90 % interval for each strategy, beside what it has."""
    bars = (
        alt.Chart(_ROWS)
        .mark_bar(color=COLOURS[0])
        .encode(
            x=alt.X("size:Q", title="GiB on a GPU"),
            y=STRATEGIES,
            tooltip=[
                "strategy:N",
                alt.Tooltip("size:Q", format=".3~g", title="GiB"),
                alt.Tooltip("interval:N", title="90 % interval"),
                alt.Tooltip("memory:N"),
            ],
        )
    )
    ends = (
        alt.Chart(_ROWS)
        .transform_filter("isValid(datum.low)")
        .mark_rule(strokeWidth=2, color=TEXT)
        .encode(x="low:Q", x2="high:Q", y=STRATEGIES)
    )
    return spec(alt.layer(bars, ends, memory_line(_NOW, "has:Q")), ROW)
