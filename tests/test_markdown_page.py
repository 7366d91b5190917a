"""Markdown on a page: what it becomes, and what it cannot do."""

import base64
import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from co2sim.report.markdown import sections, to_html
from co2sim.report.page import Page, render

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
    for tag, attributes in Tags(to_html("".join(parts))).found:
        assert tag in HARMLESS
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        assert not (attributes.get("href") or "").startswith(("javascript:", "data:"))


def test_a_picture_that_we_have_is_inside_with_its_words() -> None:
    """As a figure with a caption; the text for those who do not see it is escaped."""
    content = b"\x89PNG..."
    text = to_html('before\n\n![seen & "read"](a.png)\n', {"a.png": (content, 'less < "more"')})
    (image,) = [attributes for tag, attributes in Tags(text).found if tag == "img"]
    data = base64.b64encode(content).decode()
    assert image == {"alt": 'less < "more"', "src": f"data:image/png;base64,{data}"}
    assert "<figcaption><p>seen &amp; &#34;read&#34;</p></figcaption>" in text


def test_a_picture_that_nobody_gave_is_its_text() -> None:
    """Wherever it comes from: a page asks no network for anything."""
    text = to_html("![one](https://x.org/a.png) and ![two](b.png)")
    assert text == "<p>one and two</p>\n"


def test_tables_and_code_scroll_in_boxes_with_names() -> None:
    """A reader with a keyboard reaches them, one with a screen reader hears what they are."""
    text = to_html("| a | b |\n| --- | ---: |\n| c | 1 |\n\n```sh\nls\n```\n\n    indented\n")
    found = Tags(text).found
    boxes = [attributes for tag, attributes in found if tag == "div"]
    assert [box["aria-label"] for box in boxes] == ["a, b", "code", "code"]
    assert all(box["tabindex"] == "0" and box["class"] == "wide" for box in boxes)
    cells = [attributes for tag, attributes in found if tag in {"th", "td"}]
    assert cells == [{}, {"class": "figure"}] * 2
    assert text.count("</div>") == 3


def test_headings_go_deeper_and_no_further_than_six() -> None:
    """Below the heading of their section."""
    text = to_html("# a\n\n## b\n\n###### c\n", deeper=2)
    assert re.findall(r"<(h\d)>(\w)</h\d>", text) == [("h3", "a"), ("h4", "b"), ("h6", "c")]


def test_each_heading_of_the_second_level_is_a_section() -> None:
    """The first level is dropped: the answer of the page takes its place. Nothing else is lost."""
    found = sections("# t\n\none\n\n## B *b* `x`\n\n### c\n\ntwo\n\n## D\n\n> ## e\n", "First")
    assert [one.title for one in found] == ["First", "B b x", "D"]
    texts = [str(one.text) for one in found]
    assert texts[0] == "<p>one</p>\n"
    assert texts[1] == "<h3>c</h3>\n<p>two</p>\n"
    assert "<h2>e</h2>" in texts[2]
    assert len({one.key for one in found}) == 3


def test_what_has_no_text_is_left_out_of_the_page() -> None:
    """Neither a section nor a link to one."""
    for text in ("", "# only a title\n", "## a\n## b\n"):
        found = sections(text, "First")
        page = render(Page(answer=["Yes."], sections=found, commands=["x"])).decode()
        assert [one.empty for one in found] == [True] * len(found)
        assert re.findall(r'<h2 id="([^"]+)"', page) == ["repeat"]
