"""Markdown on a page: its headings, tables, code and pictures; HTML in it is shown as text."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from co2sim.report.html import PageSection

_FIGURE = Markup(
    '<figure><img alt="{alt}" src="data:image/png;base64,{data}">'
    "<figcaption><p>{caption}</p></figcaption></figure>\n"
)
_WIDE = Markup('<div class="wide" tabindex="0" role="region" aria-label="{label}">')
_CODE = {"fence", "code_block"}
_PICTURE = ["paragraph_open", "inline", "paragraph_close"]

Pictures = Mapping[str, tuple[bytes, str]]
"""PNG files by the names that the Markdown has for them, each with a text that says what it shows.

The text is for those who do not see it.
"""


def to_html(text: str, pictures: Pictures | None = None, *, deeper: int = 0) -> Markup:
    """Markdown as a part of a page, its headings some levels deeper; no picture comes from afar.

    Pictures that are not given are shown as their texts. Tables and code scroll in their own box.
    """
    parser = _parser()
    return _rendered(parser, parser.parse(text), pictures or {}, deeper)


def sections(text: str, first: str, pictures: Pictures | None = None) -> list[PageSection]:
    """A section of a page for each heading of the second level; without the first level's.

    What stands before the first of them is called `first`.
    """
    parser = _parser()
    parts = list(_parts(parser.parse(text), first))
    return [
        PageSection(
            f"part-{place}", title, text=_rendered(parser, blocks, pictures or {}, 0) or None
        )
        for place, (title, blocks) in enumerate(parts)
    ]


def _parser() -> MarkdownIt:
    return MarkdownIt("js-default")


def _parts(blocks: Sequence[Token], first: str) -> Iterator[tuple[str, list[Token]]]:
    """Blocks under each heading of the second level, without the headings of the first two."""
    title, found, inside = first, list[Token](), ""
    for block in blocks:
        if block.type == "heading_open" and block.tag in {"h1", "h2"} and block.level == 0:
            inside = block.tag
            if inside == "h2":
                yield title, found
                title, found = "", []
        elif block.type == "heading_close" and block.tag == inside:
            inside = ""
        elif inside == "h2":
            title = "".join(token.content for token in block.children or ())
        elif not inside:
            found.append(block)
    yield title, found


def _rendered(
    parser: MarkdownIt, blocks: Sequence[Token], pictures: Pictures, deeper: int
) -> Markup:
    shown = list(_framed(blocks, pictures))
    for block in shown:
        if block.type in {"heading_open", "heading_close"}:
            block.tag = f"h{min(6, int(block.tag[1]) + deeper)}"
        for token in block.children or ():
            if token.type == "image":
                _to_text(token)
    environment: dict[str, Any] = {}
    return Markup(parser.renderer.render(shown, parser.options, environment))  # noqa: S704 - escaped by the parser


def _framed(blocks: Sequence[Token], pictures: Pictures) -> Iterator[Token]:
    """The blocks, with tables and code in boxes that scroll, and pictures as figures."""
    at = 0
    while at < len(blocks):
        block = blocks[at]
        picture = _picture(blocks[at : at + 3], pictures)
        if picture is not None:
            yield picture
            at += 3
            continue
        if block.type == "table_open":
            yield _html(_WIDE.format(label=_label(blocks[at:])))
        if block.type in _CODE:
            yield _html(_WIDE.format(label="code"))
        style = block.attrs.pop("style", "") if block.type in {"th_open", "td_open"} else ""
        if style == "text-align:right":
            block.attrSet("class", "figure")
        yield block
        if block.type in {"table_close", *_CODE}:
            yield _html(Markup("</div>\n"))
        at += 1


def _picture(blocks: Sequence[Token], pictures: Pictures) -> Token | None:
    """A paragraph that is one picture that we have, as a figure; None for all else."""
    if [block.type for block in blocks] != _PICTURE:
        return None
    inside = blocks[1].children or []
    if len(inside) != 1 or inside[0].type != "image" or inside[0].attrs["src"] not in pictures:
        return None
    content, alt = pictures[str(inside[0].attrs["src"])]
    data = base64.b64encode(content).decode()
    return _html(_FIGURE.format(alt=alt, data=data, caption=inside[0].content))


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


def _to_text(token: Token) -> None:
    """A picture of another page, as the text that stands for it."""
    token.type, token.tag, token.children = "text", "", None
