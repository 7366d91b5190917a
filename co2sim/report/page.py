"""The page: one HTML file that holds all it needs and asks no network for anything."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from co2sim import __version__
from co2sim.decide.levers import Lever, levers
from co2sim.errors import Co2simError
from co2sim.frames import to_frame
from co2sim.report import bar_charts, line_charts, tables
from co2sim.report.bundle import vega
from co2sim.report.rounds import Round, last_round
from co2sim.report.study import Answered, Study
from co2sim.totals import to_dict

_MOST_ROUNDS = 12
"""Timelines of more strategies are left out."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its words: `label` for those who do not see it, and the same as a table."""

    key: str
    title: str
    note: str
    label: str
    table: tables.Table | None = None


def render(study: Study) -> bytes:
    """The page. It takes a few simulations: a round of each strategy, and what more would buy."""
    specs: dict[str, Any] = {}
    rounds = _rounds(study)
    gains = _gains(study)
    specs |= _timeline(rounds)
    parts = {
        "speed": _speed_figures(study, specs),
        "money": _money_figures(study, specs),
        "time": _time_figures(study, specs),
        "memory": _memory_figures(study, specs),
        "gains": _gain_figures(gains, specs),
    }
    frame = to_frame(study.cases, study.results, goal=study.goal, tokens=study.tokens)
    results = [
        {"cluster_key": one.cluster, **to_dict(one.case, one.result, study.goal, study.tokens)}
        for one in study.all
    ]
    files = {
        "study.csv": ("text/csv", frame.to_csv(index=False)),
        "study.json": ("application/json", json.dumps(results, indent=1)),
    }
    scripts = {"vega": vega(), "page": _asset("page.js")}
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            study=study,
            parts=parts,
            rounds={name: found.to_dict() for name, found in rounds.items()},
            timed=study.largest[study.best.cluster][0],
            predicted=tables.published(study),
            sources=tables.sources(study),
            errors=tables.errors(study),
            inputs=tables.inputs(study),
            warnings=_lines(study, "warnings"),
            notes=_lines(study, "notes"),
            specs=specs,
            links={name: _link(*content) for name, content in files.items()},
            scripts={name: Markup(text) for name, text in scripts.items()},  # noqa: S704 - ours
            policy=_policy(scripts.values()),
            style=Markup(_asset("page.css")),  # noqa: S704 - ours
            version=__version__,
        )
        .encode()
    )


def _speed_figures(study: Study, specs: dict[str, Any]) -> list[Figure]:
    found = []
    for number, (cluster, group) in enumerate(study.clusters.items()):
        unit = group[0].result.unit
        specs[f"speed{number}"] = line_charts.scaling(study, cluster)
        found.append(
            Figure(
                f"speed{number}",
                f"{unit}s per second on {cluster}",
                "Bands are 90 % intervals. Hollow points do not fit in memory."
                " Stars are published.",
                f"{unit}s per second by number of GPUs, a line for each strategy",
                tables.speeds(group),
            )
        )
        relative = line_charts.per_gpu(study, cluster)
        if relative:
            specs[f"relative{number}"] = relative
            found.append(
                Figure(
                    f"relative{number}",
                    f"What a GPU gives on {cluster}",
                    "Throughput per GPU, relative to the fewest GPUs. 100 % is perfect scaling.",
                    "throughput per GPU by number of GPUs, a line for each strategy",
                )
            )
    return found


def _money_figures(study: Study, specs: dict[str, Any]) -> list[Figure]:
    table = tables.trainings(study)
    if table is None:
        return []
    front = line_charts.front(study)
    if front is None:
        return [Figure("", "What it takes", "", "", table)]
    specs["front"] = front
    note = (
        "Lines are intervals: of the speed, together with the range of the price. Nothing is"
        " cheaper and faster than what the dashed line joins. Hollow points do not fit in memory."
    )
    label = "money by days, a point for each case"
    return [Figure("front", "Days and money", note, label, table)]


def _time_figures(study: Study, specs: dict[str, Any]) -> list[Figure]:
    found = []
    for number, (cluster, group) in enumerate(study.largest.items()):
        specs[f"shares{number}"] = bar_charts.shares(group)
        gpus = group[0].result.gpus
        found.append(
            Figure(
                f"shares{number}",
                f"A round on {gpus} GPUs of {cluster}",
                "Exposed: computing waits for it. The table sums the spans of one rank by work;"
                " they overlap.",
                "shares of the time of a round, a bar for each strategy",
                tables.times(group),
            )
        )
    return found


def _memory_figures(study: Study, specs: dict[str, Any]) -> list[Figure]:
    found = []
    for number, (cluster, group) in enumerate(study.largest.items()):
        specs[f"memory{number}"] = bar_charts.memory(group)
        found.append(
            Figure(
                f"memory{number}",
                f"A GPU of {cluster}, of {group[0].result.gpus}",
                "The dashed line is what the GPU has.",
                "memory of a GPU by item, a bar for each strategy",
                tables.memory(group),
            )
        )
    return found


def _gain_figures(gains: Sequence[Lever], specs: dict[str, Any]) -> list[Figure]:
    if not gains:
        return []
    specs["gains"] = bar_charts.gains([{"change": one.change, "gain": one.gain} for one in gains])
    label = "growth of throughput where one number of the hardware is a tenth better"
    note = "Each number by itself, by simulation; latencies are divided by 1.1."
    return [
        Figure("gains", "What a tenth more of each number gives", note, label, tables.gains(gains))
    ]


def _rounds(study: Study) -> dict[str, Round]:
    """The last round of every strategy at the largest size of the cluster of the answer."""
    group = study.largest[study.best.cluster]
    return {one.strategy: last_round(one.case) for one in group[:_MOST_ROUNDS]}


def _timeline(rounds: Mapping[str, Round]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(bar.kind for one in rounds.values() for bar in one.bars))
    lanes = max(len({bar.stream for bar in one.bars}) for one in rounds.values())
    return {"timeline": bar_charts.timeline(kinds, lanes)}


def _gains(study: Study) -> list[Lever]:
    """Of the answer's case; none where it cannot be simulated again."""
    try:
        return [one for one in levers(study.best.case) if one.gain]
    except Co2simError:
        return []


def _lines(study: Study, kind: str) -> list[str]:
    """Warnings, or notes, at the most GPUs, once each, behind the case."""
    found: dict[str, Answered] = {}
    for one in (one for group in study.largest.values() for one in group):
        for text in getattr(one.result, kind):
            found.setdefault(text, one)
    return [
        f"{one.strategy} on {one.result.gpus} GPUs of {one.cluster}: {text}"
        for text, one in found.items()
    ]


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("co2sim.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["data"] = _data
    return made


def _data(value: object) -> Markup:
    """JSON inside of a script element, which nothing in a text can end."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above


def _policy(scripts: Any) -> str:
    """Scripts that are in the page, and nothing from anywhere else."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _link(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _asset(name: str) -> str:
    return (resources.files("co2sim.report") / "templates" / name).read_text("utf-8")
