"""What every page has: escaped texts, data inside, and a policy that lets only its scripts run."""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from co2sim import __version__
from co2sim.report.bundle import vega
from co2sim.report.rounds import Round
from co2sim.report.tables import Table
from co2sim.report.text.screen import Screen

_PACKAGE = "co2sim.report"


def environment(*packages: str) -> Environment:
    """Templates of these packages, and those that all pages share."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in (*packages, _PACKAGE)]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["data"] = data
    return made


def data(value: object) -> Markup:
    """JSON inside of a script element, which nothing in a text can end."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above


def policy(scripts: Iterable[str], *more: str) -> str:
    """A content security policy: these scripts, and nothing from anywhere else but `more`."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    rules = [
        "default-src 'none'",
        " ".join(["script-src", *(hashes or ["'none'"])]),
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        *more,
    ]
    return "; ".join(rules)


def link(kind: str, content: str) -> str:
    """A file as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content.encode()).decode()}"


def asset(name: str, package: str = _PACKAGE) -> Markup:
    """A script or style of this package, never text from an input."""
    text = (resources.files(package) / "templates" / name).read_text("utf-8")
    return Markup(text)  # noqa: S704 - ours


MAX_ROUNDS = 12
"""Timelines of more strategies are left out."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart (a Vega-Lite specification), a table, or both; then the table is folded away.

    `label` is for those who do not see the chart.
    """

    title: str
    note: str = ""
    label: str = ""
    chart: Mapping[str, Any] | None = None
    table: Table | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Timelines:
    """Rounds by their names, of which two are shown, one above the other, in one time axis.

    `chart` is the specification that the bars of a round go into.
    """

    note: str
    rounds: Mapping[str, Round]
    chart: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of a page; `key` is its anchor. `text` is prose that is HTML already.

    `lead` says that its first figure is on the first screen instead.
    """

    key: str
    title: str
    intro: str = ""
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    timelines: Timelines | None = None
    text: Markup | None = None
    lead: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        figures = self.figures[self.lead :]
        return not (figures or self.warnings or self.notes or self.timelines or self.text)


_BEHIND = {"batch", "tried", "names", "note"}
"""Named lines of a screen that say how it was asked, not what to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page says.

    `screen` is the answer, as the command prints it: its first sentence is the heading. With named
    lines the first chart of the page stands beside them. `doubts` are what the answer leaves open.
    `commands` repeat the figures. `files` are kind and content by name, as a reader saves them.
    """

    screen: Screen
    doubts: Sequence[str] = ()
    sections: Sequence[PageSection]
    commands: Sequence[str]
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The first sentence of the answer."""
        first, more, _ = self.screen.answer[0].partition(". ")
        return f"{first}." if more else first

    @property
    def sentences(self) -> list[str]:
        """The rest of the answer."""
        rest = self.screen.answer[0].partition(". ")[2]
        return [*([rest] if rest else []), *self.screen.answer[1:]]

    @property
    def lists(self) -> list[dict[str, list[str]]]:
        """The named lines before the chart, and those behind it.

        A line without a name belongs to the one before.
        """
        lists: list[dict[str, list[str]]] = [{}, {}]
        name = ""
        for head, text in self.screen.rows:
            name = head or name
            lists[name in _BEHIND].setdefault(name, []).append(text)
        return lists

    @property
    def table(self) -> Table | None:
        """The cases beside each other."""
        screen = self.screen
        legend = " ".join(screen.legend)
        return Table(screen.columns, screen.table, screen.left, legend) if screen.table else None


def _lead(sections: Sequence[PageSection]) -> tuple[str, Figure] | None:
    """The first chart of a page, with its section; None where something else comes before it."""
    first = next((section for section in sections if section.figures), None)
    return (first.key, first.figures[0]) if first and first.figures[0].chart else None


def render(page: Page) -> bytes:
    """The file. Without a chart there is no script in it, and no extra needed."""
    sections = [section for section in page.sections if not section.empty]
    charts: dict[str, Any] = {
        f"{section.key}-{figure_number}": figure.chart
        for section in sections
        for figure_number, figure in enumerate(section.figures)
        if figure.chart is not None
    }
    lead = _lead(sections) if page.screen.rows else None
    if lead:
        sections = [replace(one, lead=one.key == lead[0]) for one in sections]
        sections = [one for one in sections if not one.empty]
    lines = next((section.timelines for section in sections if section.timelines), None)
    if lines:
        charts["timeline"] = lines.chart
    scripts = {"vega": vega(), "page": asset("page.js")} if charts else {}
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            sections=sections,
            lead=lead,
            charts=charts,
            rounds={name: one.to_dict() for name, one in lines.rounds.items()} if lines else {},
            links={name: link(*content) for name, content in page.files.items()},
            scripts={name: Markup(text) for name, text in scripts.items()},  # noqa: S704 - ours
            policy=policy(scripts.values()),
            style=asset("page.css"),
            version=__version__,
        )
        .encode()
    )


_WIDE = Markup('<div class="wide" tabindex="0" role="region" aria-label="{label}">')
_CODE = {"fence", "code_block"}


def from_markdown(text: str, *, deeper: int = 0) -> Markup:
    """Markdown as a part of a page, its headings some levels deeper; no picture comes from afar.

    Pictures are shown as their texts. Tables and code scroll in their own box.
    """
    parser = MarkdownIt("js-default")
    shown = list(_framed(parser.parse(text)))
    for block in shown:
        if block.type in {"heading_open", "heading_close"}:
            block.tag = f"h{min(6, int(block.tag[1]) + deeper)}"
        for token in block.children or ():
            if token.type == "image":
                token.type, token.tag, token.children = "text", "", None
    return Markup(parser.renderer.render(shown, parser.options, {}))  # noqa: S704 - escaped by the parser


def _framed(blocks: Sequence[Token]) -> Iterator[Token]:
    """The blocks, with tables and code in boxes that scroll."""
    for start, block in enumerate(blocks):
        if block.type == "table_open":
            yield _html(_WIDE.format(label=_label(blocks[start:])))
        if block.type in _CODE:
            yield _html(_WIDE.format(label="code"))
        style = block.attrs.pop("style", "") if block.type in {"th_open", "td_open"} else ""
        if style == "text-align:right":
            block.attrSet("class", "figure")
        yield block
        if block.type in {"table_close", *_CODE}:
            yield _html(Markup("</div>\n"))


def _label(blocks: Sequence[Token]) -> str:
    """The names of a table's columns."""
    names = []
    for before, block in pairwise(blocks):
        if before.type == "thead_close":
            break
        if before.type == "th_open":
            names.append(block.content)
    return ", ".join(name for name in names if name)


def _html(text: Markup) -> Token:
    return Token("html_block", "", 0, content=str(text))
