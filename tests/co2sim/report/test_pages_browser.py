"""The pages of `co2sim report`, `plan`, `solve` and `sweep` in a real browser: drawn, and seen."""

import json
from pathlib import Path

import pytest
from browsing import PHONE, SCHEMES, Opened, browser, marks, needs_axe
from commands import written
from playwright.sync_api import Browser, expect
from test_decision_pages import EVIL, SOLVE, SWEEP, plan
from test_study_page import REPORT

__all__ = ["browser", "plan"]

pytestmark = marks

FORTY = [
    f"{name}:tau={tau},worker=node{inner}"
    for name in ("co2", "diloco")
    for tau in (2, 4, 6, 8, 12, 16, 20, 24, 32, 48)
    for inner in ("", ",inner=fsdp")
]
NIGHTLY = pytest.mark.nightly


@pytest.fixture
def page(kind: str, tmp_path_factory: pytest.TempPathFactory, plan: tuple[str, ...]) -> Path:
    """A page of a kind; the clusters of the plan are called like scripts."""
    forty = (
        *("report", "-c", "a100-tcp80", "-m", "gpt2-small", "-g", "8,16,32", "--tokens", "1e10"),
        *("--set", "price_per_gpu=2 USD/h", *(word for name in FORTY for word in ("-s", name))),
    )
    commands = {
        "report": REPORT,
        "plan": plan,
        "solve": (*SOLVE, "--json"),
        "sweep": (*SWEEP, "--json"),
        "forty": forty,
    }
    return written(tmp_path_factory, *commands[kind]).path


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *((kind, "light") for kind in ("report", "plan", "solve", "sweep")),
        *(
            pytest.param(kind, "dark", marks=NIGHTLY)
            for kind in ("report", "plan", "solve", "sweep", "forty")
        ),
    ],
)
def test_every_chart_is_drawn_and_nothing_is_asked_of_a_network(
    browser: Browser, page: Path, kind: str, scheme: str
) -> None:
    """No word on the console, no request but for the file; names run no script."""
    opened = Opened(browser, page, color_scheme=scheme)
    assert opened.page.locator(".chart svg").count() > 1
    assert opened.said == []
    assert opened.requests() == [page.as_uri()]
    assert not opened.page.get_by_text("could not be drawn").count()
    assert opened.dark() == (scheme == "dark")
    if kind == "plan":
        assert opened.page.get_by_text(EVIL).count()


@NIGHTLY
@pytest.mark.parametrize("kind", ["report", "plan", "solve", "sweep"])
@needs_axe
@SCHEMES
def test_axe_finds_no_serious_violation(browser: Browser, page: Path, scheme: str) -> None:
    """Contrast, names of controls, order of headings, tables: nothing serious or critical."""
    opened = Opened(browser, page, color_scheme=scheme, bypass_csp=True)
    assert opened.violations() == []


@NIGHTLY
@pytest.mark.parametrize("kind", ["report"])
def test_a_choice_changes_its_timeline_alone(browser: Browser, page: Path) -> None:
    """The bars are those of the strategy; both timelines keep one time axis."""
    opened = Opened(browser, page)
    rounds = json.loads(opened.page.locator("#rounds").text_content() or "")
    names = list(rounds)
    places = opened.page.locator("[data-round]")

    def check(*shown: str) -> None:
        for place, name in enumerate(shown):
            bars = places.nth(place).locator(".mark-rect path[aria-roledescription=bar]")
            expect(bars).to_have_count(len(rounds[name]["bars"]))

    check(names[0], names[1])
    opened.page.locator("select.round").nth(0).select_option(names[2])
    check(names[2], names[1])
    last = (
        "place => [...place.querySelectorAll('.role-axis-label text')]"
        ".map(text => text.textContent).filter(text => /^[0-9,.]+$/.test(text)).pop()"
    )
    ends = [places.nth(place).evaluate(last) for place in (0, 1)]
    assert ends[0]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "kind", ["plan", *(pytest.param(kind, marks=NIGHTLY) for kind in ("report", "solve", "sweep"))]
)
def test_on_a_phone_names_are_whole_and_the_chart_is_before_the_tables(
    browser: Browser, page: Path
) -> None:
    """The page is as wide as the phone, tables scroll in their boxes, no legend ends with dots."""
    opened = Opened(browser, page, viewport=PHONE)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    tops = [
        opened.page.locator(place).first.bounding_box()
        for place in ("h1", "header dd", "header .chart", "table:visible")
    ]
    heights = [box["y"] for box in tops if box]
    assert len(heights) == len(tops)
    assert heights == sorted(heights)
    legends = opened.page.locator(".role-legend-label text").all_text_contents()
    assert legends
    assert not [name for name in legends if name.endswith("…")]
