"""The page of `co2sim report` in a real browser."""

import json
from pathlib import Path

import pytest
from browsing import PHONE, SCHEMES, Opened, browser, marks, needs_axe
from playwright.sync_api import Browser
from test_report import PRICED, rendered, study_of

__all__ = ["browser"]

pytestmark = marks


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about training 1e9 tokens on two clusters."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    study = study_of(["a100-tcp80", "a100-roce800"], tokens=1e9, overrides=PRICED)
    path.write_bytes(rendered(study))
    return path


@SCHEMES
def test_every_chart_is_drawn_and_nothing_is_asked_of_a_network(
    browser: Browser, report: Path, scheme: str
) -> None:
    """No error, no warning, and no request but for the file itself."""
    opened = Opened(browser, report, color_scheme=scheme)
    assert opened.said == []
    assert opened.requests() == [report.as_uri()]
    ink, paper = (
        opened.page.evaluate(f"getComputedStyle(document.body).{name}")
        for name in ("color", "backgroundColor")
    )
    assert (sum(_rgb(ink)) < sum(_rgb(paper))) == (scheme == "light")


def _rgb(text: str) -> list[int]:
    return [int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(",")]


def test_a_choice_changes_its_timeline_alone(browser: Browser, report: Path) -> None:
    """The bars are those of the strategy; both timelines keep one time axis."""
    opened = Opened(browser, report)
    rounds = json.loads(opened.page.locator("#rounds").text_content() or "")
    names = list(rounds)
    places = opened.page.locator("[data-round]")

    def bars(place: int) -> int:
        return places.nth(place).locator(".mark-rect path[aria-roledescription=bar]").count()

    assert [bars(0), bars(1)] == [len(rounds[name]["bars"]) for name in names[:2]]
    opened.page.locator("select.round").nth(0).select_option(names[2])
    opened.page.wait_for_timeout(500)
    assert [bars(0), bars(1)] == [len(rounds[name]["bars"]) for name in (names[2], names[1])]
    last = (
        "place => [...place.querySelectorAll('.role-axis-label text')]"
        ".map(text => text.textContent).filter(text => /^[0-9,.]+$/.test(text)).pop()"
    )
    ends = [places.nth(place).evaluate(last) for place in (0, 1)]
    assert ends[0]
    assert ends[0] == ends[1]


def test_it_is_readable_on_a_phone_and_prints(browser: Browser, report: Path) -> None:
    """At 360 px nothing but a table scrolls sideways; a PDF has pages."""
    opened = Opened(browser, report, viewport=PHONE)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    pdf = opened.page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000


def test_names_run_no_script(browser: Browser, tmp_path: Path) -> None:
    """A cluster called <script>alert(1)</script>, in headings, tables and tooltips."""
    source = Path("co2sim/catalog/clusters/a100-tcp80.toml").read_text("utf-8")
    path = tmp_path / "evil.toml"
    path.write_text(source.replace("name = ", 'name = "<script>alert(1)</script>" # ', 1), "utf-8")
    out = tmp_path / "r.html"
    out.write_bytes(rendered(study_of([str(path)])))
    opened = Opened(browser, out)
    assert opened.said == []
    assert opened.page.get_by_text("<script>alert(1)</script>").count()


@needs_axe
@SCHEMES
def test_axe_finds_no_serious_violation(browser: Browser, report: Path, scheme: str) -> None:
    """Contrast, names of controls, order of headings, tables: nothing serious or critical."""
    opened = Opened(browser, report, color_scheme=scheme, bypass_csp=True)
    assert opened.violations() == []
