"""A page of headings, paragraphs, tables and pictures, as Markdown or as one HTML file."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CSS = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #ccc;
text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}"""


@dataclass(frozen=True, slots=True)
class Heading:
    """A line of the table of contents; level 1 is the title."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Column names, and rows of texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG, by the name of its file."""

    file: str
    caption: str


Block = Heading | Text | Table | Picture


def markdown(blocks: Sequence[Block]) -> bytes:
    """The page; pictures are files beside it."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"{'#' * level} {text}")
            case Text(text):
                parts.append(text)
            case Table(columns, rows):
                lines = [columns, ["---"] * len(columns), *rows]
                cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
            case Picture(file, caption):
                parts.append(f"![{caption}]({file})")
    return ("\n\n".join(parts) + "\n").encode()


def to_html(blocks: Sequence[Block], pictures: Mapping[str, bytes]) -> bytes:
    """The page with its pictures inside."""
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title><style>{_CSS}</style></head><body>",
    ]
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"<h{level}>{html.escape(text)}</h{level}>")
            case Text(text):
                parts.append(f"<p>{html.escape(text)}</p>")
            case Table(columns, rows):
                parts.append(
                    "<table>" + _line(columns, "th") + "".join(_line(r, "td") for r in rows)
                )
                parts.append("</table>")
            case Picture(file, caption):
                data = base64.b64encode(pictures[file]).decode()
                shown = html.escape(caption, quote=True)
                parts.append(
                    f"<img alt='{shown}' src='data:image/png;base64,{data}'><p>{shown}</p>"
                )
    return ("\n".join([*parts, "</body></html>"]) + "\n").encode()


def _line(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
