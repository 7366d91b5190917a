"""How pages look: pictures that somebody has looked at, kept as references for the next change."""

import re
import shlex
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import Browser, sync_playwright

from co2sim.cli import main

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
ROOT = Path(__file__).parents[1]
LOOKS = Path(__file__).parent / "golden" / "looks"
VERSION = LOOKS / "browser.txt"
"""With which browser the references were taken."""
README = ROOT / "examples" / "report.png"
"""The README's picture: the top of the page that `make run` writes."""
TOP = 1130
"""Pixels of it."""

COARSE = 16
"""Pixels of a tile; the smoothing of fonts differs from machine to machine."""
NEAR = 0.02
"""Of full brightness, on average over a page."""
LONGER = 0.02
"""Of its height."""

EXPLORE = (
    *("explore", "-m", "gpt2-small", "-c", "a100-tcp80", "-s", "ddp", "--tokens", "1e10"),
    *("-s", "co2:tau=12,delay=1,worker=node", "--vary", "gpus=8,16", "--vary", "micro_batch=1"),
    *("--vary", "inter.latency=25 us", "--vary", "strategy.tau=12,48"),
    *("--vary", "strategy.delay=1", "--vary", "inter.bandwidth=25 Gbit/s, 80 Gbit/s, 200 Gbit/s"),
)
SHOTS = [
    (page, scheme, width)
    for page in ("report", "explore")
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360))
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium-headless-shell"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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


@pytest.mark.parametrize(("name", "scheme", "width"), SHOTS)
def test_a_page_looks_as_it_did(
    browser: Browser,
    pages: dict[str, Path],
    request: pytest.FixtureRequest,
    name: str,
    scheme: str,
    width: int,
) -> None:
    """As high, and as bright everywhere, as the picture that was looked at last."""
    update = bool(request.config.getoption("--update-golden"))
    known = VERSION.read_text("utf-8").strip() if VERSION.exists() else ""
    if browser.version != known and not update:
        pytest.skip(f"the pictures are of Chromium {known}; this is {browser.version}")
    reference = LOOKS / f"{name}-{scheme}-{width}.png"
    taken = picture(browser, pages[name], scheme, width)
    if update:
        LOOKS.mkdir(exist_ok=True)
        VERSION.write_text(f"{browser.version}\n", "utf-8")
        taken.quantize(64).save(reference, optimize=True)
        if (name, scheme, width) == SHOTS[0]:
            taken.crop((0, 0, width, TOP)).quantize(128).save(README, optimize=True)
    kept = Image.open(reference)
    assert taken.width == kept.width
    assert taken.height == pytest.approx(kept.height, rel=LONGER)
    height = min(taken.height, kept.height)
    assert np.abs(tiles(taken, height) - tiles(kept, height)).mean() < NEAR


def test_a_changed_page_is_noticed() -> None:
    """The comparison can fail: a chart of 300 x 280 pixels that is gone is seen."""
    page = Image.new("RGB", (1280, 2000), "white")
    changed = page.copy()
    changed.paste("black", (100, 100, 400, 380))
    assert np.abs(tiles(page, 2000) - tiles(changed, 2000)).mean() > NEAR


def picture(browser: Browser, page: Path, scheme: str, width: int) -> Image.Image:
    """The whole page, when all its charts are drawn."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    opened = context.new_page()
    opened.goto(page.as_uri())
    opened.wait_for_function(
        "[...document.querySelectorAll('.chart')].every(one => one.querySelector('svg'))"
    )
    shot = opened.screenshot(full_page=True)
    context.close()
    return Image.open(BytesIO(shot)).convert("RGB")


def tiles(shot: Image.Image, height: int) -> NDArray[np.float64]:
    """The brightness of tiles, from 0 to 1."""
    cut = shot.convert("L").crop((0, 0, shot.width, height))
    small = cut.resize((shot.width // COARSE, height // COARSE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255
