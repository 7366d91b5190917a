"""Markdown on a page: what it becomes, and what it cannot do."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from co2sim.report.html import from_markdown

HARMLESS = {
    *("p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "a"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li"),
    *("table", "thead", "tbody", "tr", "th", "td", "div"),
}


class Tags(HTMLParser):
    """The tags of some HTML, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.found.append((tag, dict(attrs)))


PARTS = [
    *("<script>", "</script>", "<img src=x onerror=y>", "![a](http://x.org/p.png)", '"', "'"),
    *("# ", "## ", "| a | b |\n| --- | --- |\n| c |", "```", "`", "\n", "\n\n", "ü & <b>"),
    *("[x](javascript:alert(1))", "[y](data:text/html,x)", "> ", "    ", "1. ", "- "),
]


@given(st.lists(st.sampled_from(PARTS), max_size=12))
def test_no_text_becomes_a_tag_that_acts_or_loads(parts: list[str]) -> None:
    """Only tags that Markdown has, without pictures, handlers and addresses that run."""
    for tag, attributes in Tags(from_markdown("".join(parts))).found:
        assert tag in HARMLESS
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        assert not (attributes.get("href") or "").startswith(("javascript:", "data:"))


def test_tables_and_code_scroll_in_boxes_with_names() -> None:
    """A reader with a keyboard reaches them, one with a screen reader hears what they are."""
    text = from_markdown("| a | b |\n| --- | ---: |\n| c | 1 |\n\n```sh\nls\n```\n\n    indented\n")
    found = Tags(text).found
    boxes = [attributes for tag, attributes in found if tag == "div"]
    assert [box["aria-label"] for box in boxes] == ["a, b", "code", "code"]
    assert all(box["tabindex"] == "0" and box["class"] == "wide" for box in boxes)
    cells = [attributes for tag, attributes in found if tag in {"th", "td"}]
    assert cells == [{}, {"class": "figure"}] * 2
    assert text.count("</div>") == 3
