"""The pages of `co2sim report`, `plan`, `solve` and `sweep` in a real browser: drawn, and seen."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from browsing import SCHEMES, Opened, browser, marks, needs_axe
from commands import written
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from places import ROOT
from playwright.sync_api import Browser, expect
from test_decision_pages import EVIL, SOLVE, SWEEP, plan
from test_study_page import REPORT

from co2sim.cli import main

__all__ = ["browser", "plan"]

pytestmark = marks

COARSE = 16
"""Pixels of a tile; the smoothing of fonts differs from machine to machine."""
AREA = 320
"""Pixels of the side of a square."""

FORTY = [
    f"{name}:tau={tau},worker=node{inner}"
    for name in ("co2", "diloco")
    for tau in (2, 4, 6, 8, 12, 16, 20, 24, 32, 48)
    for inner in ("", ",inner=fsdp")
]
EXPLORE = (
    *("explore", "-m", "gpt2-small", "-c", "a100-tcp80", "-s", "ddp", "--tokens", "1e10"),
    *("-s", "co2:tau=12,delay=1,worker=node", "--vary", "gpus=8,16", "--vary", "micro_batch=1"),
    *("--vary", "inter.latency=25 us", "--vary", "strategy.tau=12,48"),
    *("--vary", "strategy.delay=1", "--vary", "inter.bandwidth=25 Gbit/s, 80 Gbit/s, 200 Gbit/s"),
)
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


# ---- how they look


@pytest.fixture(scope="session")
def looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of `make run`, and one of the explorer, as their commands write them."""
    folder = tmp_path_factory.mktemp("looks")
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    recipe = re.search(r"^run:.*\n\t(.*)$", makefile, re.MULTILINE)
    assert recipe
    words = shlex.split(recipe[1].replace("--out out --report out/", "--out . --report "))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(ROOT / "papers", folder / "papers")
        for given in (words[1:], [*EXPLORE, "--out", "explore.html"]):
            patch.setattr("sys.argv", ["co2sim", *given])
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code
    return {name: folder / f"{name}.html" for name in ("report", "explore")}


def difference(one: Image.Image, other: Image.Image) -> float:
    """How far apart two pictures are, where they are furthest: on average over a square."""
    height = min(one.height, other.height)
    off = np.abs(tiles(one, height) - tiles(other, height))
    side = AREA // COARSE
    return float(sliding_window_view(off, (side, side)).mean(axis=(2, 3)).max())


def tiles(shot: Image.Image, height: int) -> NDArray[np.float64]:
    """The brightness of tiles, from 0 to 1."""
    cut = shot.convert("L").crop((0, 0, shot.width, height))
    small = cut.resize((shot.width // COARSE, height // COARSE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255
