"""Pages of `co2analysis compare` and `validate` in a real browser."""

from pathlib import Path

import pytest
from browsing import PHONE, SCHEMES, Opened, browser, marks, needs_axe
from playwright.sync_api import Browser
from simulated_record import measured, more_latency, slower_network
from test_analysis_pages import EVIL, compared, invented, text_of, validated

from analysis.measured.comparison import compare
from co2sim.report.html import Page, PageSection, from_markdown, render
from co2sim.report.text.screen import Screen
from co2sim.simulation.noise import Noise

__all__ = ["browser"]

pytestmark = marks[1:]
slow, nightly = pytest.mark.slow, pytest.mark.nightly

PAGES = ["compare", "validate", "prose"]
PROSE = f"""# dropped

{EVIL} and ![not ours](http://x.org/p.png)

## Tables

| {" | ".join(f"column {n}" for n in range(12))} |
|{" --- |" * 12}
| {" | ".join(f"cell{n}" * 3 for n in range(12))} |

### Code

```sh
{"a long command --with options " * 9}
```
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of three causes, published cells, and Markdown with all it has."""
    runs = compared({EVIL: ("ddp", slower_network), "latency": ("zero2", more_latency)})
    runs.append(compare("slow node", measured("zero3", noise=Noise(node_speed={1: 0.7}))))
    prose = [PageSection("prose", "Prose", text=from_markdown(PROSE, deeper=1))]
    texts = {
        "compare": text_of(runs),
        "validate": validated(invented("co2", "zeropp", "zeropp-volume")),
        "prose": render(
            Page(screen=Screen(answer=["Yes."]), sections=prose, commands=["x " * 300])
        ).decode(),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize(
    "scheme", [pytest.param("light", marks=slow), pytest.param("dark", marks=nightly)]
)
@pytest.mark.parametrize("name", PAGES)
def test_every_chart_is_drawn_and_nothing_is_asked_of_a_network(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str
) -> None:
    """No error, no warning, no request but for the file; readable at 360 px; a PDF has pages."""
    opened = Opened(browser, pages[name], color_scheme=scheme, viewport=PHONE)
    assert opened.said == []
    assert opened.requests() == [pages[name].as_uri()]
    assert opened.page.locator("h1").count() == 1
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    pdf = opened.page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000


@nightly
@needs_axe
@SCHEMES
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_violation(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str
) -> None:
    """Contrast, texts of pictures, order of headings, tables, boxes that scroll."""
    opened = Opened(browser, pages[name], color_scheme=scheme, bypass_csp=True)
    for closed in opened.page.locator("details > summary:visible").all()[:3]:
        closed.click()
    assert opened.violations("heading-order") == []
