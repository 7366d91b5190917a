"""The pages of `co2sim plan`, `solve` and `sweep`, and a report of 40 strategies, in a browser."""

import json
from pathlib import Path

import pytest
from browsing import PHONE, SCHEMES, Opened, browser, marks, needs_axe
from playwright.sync_api import Browser
from test_decision_pages import EVIL, SOLVE, SWEEP, asked_plan
from test_plan import OFFER
from test_report import rendered

from co2sim.case import Case
from co2sim.cli import main
from co2sim.grid import over_sizes
from co2sim.report import bundle
from co2sim.report.study import Study
from co2sim.step_factors import NO_GOAL
from co2sim.study import run

__all__ = ["browser"]

pytestmark = marks

FORTY = [
    f"{name}:tau={tau},worker=node{inner}"
    for name in ("co2", "diloco")
    for tau in (2, 4, 6, 8, 12, 16, 20, 24, 32, 48)
    for inner in ("", ",inner=fsdp")
]


def study_of_forty() -> Study:
    """Forty strategies on three sizes, with what it costs."""
    job = Case(cluster="", model="gpt2-small", strategy="", overrides={"price_per_gpu": "2 USD/h"})
    cases = over_sizes(job, ["a100-tcp80"], FORTY, "8,16,32")
    return Study(
        cases=cases,
        results=[run(case) for case in cases],
        goal=NO_GOAL,
        tokens=1e10,
        comparisons=(),
        command="co2sim report ...",
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind; the clusters of the plan are called like scripts."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("plan", "solve", "sweep", "forty")}
    offers = folder / "fast.toml", folder / "slow.toml"
    for path, price, rate in zip(offers, (3.0, 2.0), (1600, 25), strict=True):
        path.write_text(OFFER.format(name=EVIL, price=price, rate=rate, nodes=2), "utf-8")
    plan = asked_plan((str(offers[0]), str(offers[1])), "--set", "failures=meta-rsc-1")
    with pytest.MonkeyPatch.context() as patch:
        for name, given in (("plan", plan), ("solve", SOLVE), ("sweep", SWEEP)):
            patch.setattr("sys.argv", ["co2sim", *given, "--report", str(found[name])])
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code
    found["forty"].write_bytes(rendered(study_of_forty()))
    return found


KINDS = pytest.mark.parametrize("kind", ["plan", "solve", "sweep", "forty"])


@KINDS
@SCHEMES
def test_every_chart_is_drawn_and_nothing_is_asked_of_a_network(
    browser: Browser, pages: dict[str, Path], kind: str, scheme: str
) -> None:
    """No error, no warning of a chart, and no request but for the file; names run no script."""
    opened = Opened(browser, pages[kind], color_scheme=scheme)
    assert opened.said == []
    assert opened.requests() == [pages[kind].as_uri()]
    assert not opened.page.get_by_text("could not be drawn").count()
    if kind == "plan":
        assert opened.page.get_by_text(EVIL).count()


@KINDS
def test_it_is_readable_on_a_phone_and_prints(
    browser: Browser, pages: dict[str, Path], kind: str
) -> None:
    """At 360 px nothing but a table scrolls sideways; a PDF has pages."""
    opened = Opened(browser, pages[kind], viewport=PHONE)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    pdf = opened.page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000


@pytest.mark.parametrize("kind", ["plan", "solve", "sweep"])  # forty has what sweep has, more often
@needs_axe
@SCHEMES
def test_axe_finds_no_serious_violation(
    browser: Browser, pages: dict[str, Path], kind: str, scheme: str
) -> None:
    """Contrast, names of controls, order of headings, tables: nothing serious or critical."""
    opened = Opened(browser, pages[kind], color_scheme=scheme, bypass_csp=True)
    assert opened.violations() == []


def test_ticks_have_units(browser: Browser, pages: dict[str, Path]) -> None:
    """The axis of a bandwidth says Gbit/s, that of a share per cent."""
    opened = Opened(browser, pages["solve"])
    texts = opened.page.locator("[data-chart=target-0-0] svg text").all_text_contents()
    assert {"1 Gbit/s", "10 Gbit/s", "100 Gbit/s"} <= set(texts)
    assert {"90 %", "50 %"} <= set(texts)


def test_the_timeline_of_the_choice_is_above_that_of_the_runner_up(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """Both are drawn from the start, with all their bars."""
    opened = Opened(browser, pages["plan"])
    rounds = json.loads(opened.page.locator("#rounds").text_content() or "")
    shown = [opened.page.locator("select.round").nth(place).input_value() for place in (0, 1)]
    assert [name.partition(":")[0] for name in shown] == ["choice", "runner-up"]
    for place, name in enumerate(shown):
        bars = opened.page.locator("[data-round]").nth(place)
        count = bars.locator(".mark-rect path[aria-roledescription=bar]").count()
        assert count == len(rounds[name]["bars"]) > 0


def test_forty_strategies_are_all_named_and_the_legend_picks_one(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """Every name is in the legend; a click fades the other lines, and shows one interval."""
    opened = Opened(browser, pages["forty"])
    chart = opened.page.locator("[data-chart=speed-0]")
    names = chart.locator(".role-legend-label text")
    assert names.count() == 40
    lines = chart.locator(".mark-line path")

    def opacities(kind: str) -> list[str | None]:
        shown = chart.locator(f".mark-{kind} path[aria-roledescription]")
        return [one.get_attribute("opacity") for one in shown.all()]

    assert lines.count() == 40
    before = opacities("line")
    assert set(before) <= {None, "1"}
    assert set(opacities("area")) == {"0"}
    names.nth(3).click()
    opened.page.wait_for_timeout(500)
    after = opacities("line")
    assert after.count("0.1") == 39
    assert opacities("area").count("0.18") == 1
    assert opened.said == []


def test_a_report_of_forty_strategies_is_small(pages: dict[str, Path]) -> None:
    """At most 2 MB beside the bundle."""
    assert pages["forty"].stat().st_size - len(bundle.vega().encode()) < 2e6
