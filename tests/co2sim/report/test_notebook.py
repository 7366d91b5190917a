"""What becomes HTML in a notebook and on a page: short, whole, and every name stays text."""

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

import co2sim
from co2sim import OptionError, Question
from co2sim.common import html_card
from co2sim.prediction import driver
from co2sim.report.html import from_markdown
from co2sim.schedule.schedule import Schedule
from co2sim.simulation.trace import SpanTable, Trace, by_stream, last_end


class Page(HTMLParser):
    """The elements and texts of a piece of HTML; it refuses what is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count an element."""
        assert {name for name, _ in attrs} <= {"style"}
        self.open.append(tag)
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        if data.strip():
            self.texts.append(data)


def tiny_trace(name: str = "ddp") -> tuple[Schedule, Trace]:
    """A small schedule with its simulation."""
    return driver.trace(Question(cluster="a100-tcp80", model="gpt2-small", strategy=name, gpus=16))


@given(st.text(min_size=1, max_size=400), st.text(min_size=1, max_size=400))
def test_any_text_comes_back_as_text(one: str, other: str) -> None:
    """Whatever characters a name has, a browser reads the name, and one element for each cell."""
    page = Page(html_card.card(one, [(other, one)], (one, other), [other]))
    cells = {
        "div": 1,
        "p": 2,
        "b": 1,
        "thead": 1,
        "tbody": 1,
        "table": 1,
        "tr": 2,
        "th": 3,
        "td": 1,
    }
    assert {name: page.elements.count(name) for name in set(page.elements)} == cells
    assert [text for text in page.texts if text in {one, other}] == [
        text for text in (one, one, other, other, one, other) if text.strip()
    ]


def test_the_answer_is_first_with_its_interval_then_figures_then_warnings() -> None:
    """As a sentence; what the figures depend on follows them."""
    found = replace(simulate("a100-tcp80", "gpt2-small", "ddp", gpus=16), warnings=("mind this",))
    texts = Page(found._repr_html_()).texts
    interval = f"90 %: {found.tokens_per_s_low:,.0f} to {found.tokens_per_s_high:,.0f}"
    assert texts[0].startswith("ddp on 16 GPUs of ")
    assert f"{found.tokens_per_s:,.0f} tokens/s ({interval})." in texts[0]
    assert texts.index("step") < texts.index("Warning: mind this")
    assert any(text.startswith("90 % interval: ") for text in texts)
    assert any(text.startswith("Assumed, without a source: ") for text in texts)
    unknown = ("tokens_per_s_low", "tokens_per_s_high", "memory_bytes_low", "memory_bytes_high")
    measured = replace(found, **dict.fromkeys(unknown))
    assert "90 %:" not in measured._repr_html_()


@pytest.mark.parametrize("strategy", ["ddp", "co2(tau=3, delay=1)"])
def test_a_trace_sums_the_spans_of_a_rank_by_stream(strategy: str) -> None:
    """The same from the arrays of a simulation as from single spans, and what a loop would sum."""
    schedule, trace = tiny_trace(strategy)
    assert isinstance(trace.spans, SpanTable)
    spans = tuple(trace.spans)
    found = by_stream(trace.spans, 0)
    assert list(found) == list(schedule.streams)
    for stream, (count, taken) in found.items():
        own = [span for span in spans if (span.rank, span.stream) == (0, stream)]
        assert count == len(own)
        assert taken == pytest.approx(math.fsum(span.end - span.start for span in own))
    assert set(by_stream(spans, 0)) == set(found)
    assert {name: pair[0] for name, pair in by_stream(spans, 0).items()} == {
        name: pair[0] for name, pair in found.items()
    }
    assert last_end(trace.spans) == last_end(spans) == max(span.end for span in spans)
    texts = Page(trace._repr_html_()).texts
    assert f"{len(spans):,} spans" in texts[0]
    assert "Rank 0 stands for 16 equal ranks." in texts


def test_without_altair_a_chart_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line; what shows itself as HTML still does."""
    schedule, trace = tiny_trace()
    result = simulate("a100-tcp80", "gpt2-small", "ddp", gpus=16)
    frame = co2sim.scale("a100-tcp80", "gpt2-small", "ddp", gpus=[8, 16])
    monkeypatch.setattr("co2sim.report.bundle.find_spec", lambda _: None)
    for drawn in (
        lambda: co2sim.plot(result),
        lambda: co2sim.plot(schedule),
        lambda: co2sim.plot(trace, schedule=schedule),
        lambda: co2sim.plot(frame),
    ):
        with pytest.raises(OptionError) as caught:
            drawn()
        assert "pip install '.[report]'" in str(caught.value)
        assert "\n" not in str(caught.value)
    for shown in (result, schedule, trace):
        assert Page(shown._repr_html_()).elements.count("table") == 1


# --- Markdown on a page -----------------------------------------------------------------------


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
