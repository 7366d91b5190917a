"""Markdown on a page: its headings, tables and code; HTML in it is shown as text."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

_WIDE = Markup('<div class="wide" tabindex="0" role="region" aria-label="{label}">')
_CODE = {"fence", "code_block"}


def to_html(text: str, *, deeper: int = 0) -> Markup:
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
                _to_text(token)
    environment: dict[str, Any] = {}
    return Markup(parser.renderer.render(shown, parser.options, environment))  # noqa: S704 - escaped by the parser


def _framed(blocks: Sequence[Token]) -> Iterator[Token]:
    """The blocks, with tables and code in boxes that scroll."""
    for place, block in enumerate(blocks):
        if block.type == "table_open":
            yield _html(_WIDE.format(label=_label(blocks[place:])))
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


def _to_text(token: Token) -> None:
    """A picture of another page, as the text that stands for it."""
    token.type, token.tag, token.children = "text", "", None
