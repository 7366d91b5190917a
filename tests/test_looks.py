"""How pages look: pictures that somebody has looked at, kept as references for the next change."""

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from browsing import Opened, browser, marks
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, Page

from co2sim.cli import main

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
AREA = 320
"""Pixels of the side of a square."""
NEAR = 0.01
"""Of full brightness, on average over any square."""
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

__all__ = ["browser"]

pytestmark = marks


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
    assert difference(taken, kept) < NEAR


@pytest.mark.parametrize(("name", "scheme", "width"), SHOTS)
def test_a_chart_that_is_gone_is_noticed(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    """Any one of the reference, where this browser draws it: paper in its place is too far off."""
    kept = Image.open(LOOKS / f"{name}-{scheme}-{width}.png").convert("RGB")
    with shown(browser, pages[name], scheme, width) as opened:
        boxes = [one.bounding_box() for one in opened.locator(".chart svg.marks").all()]
    assert len(boxes) > 2
    for box in boxes:
        assert box
        x, y = round(box["x"]), round(box["y"])
        changed = kept.copy()
        changed.paste(
            kept.getpixel((2, y)),  # type: ignore[arg-type]
            (x, y, x + round(box["width"]), y + round(box["height"])),
        )
        assert difference(changed, kept) > NEAR, box


@contextmanager
def shown(browser: Browser, page: Path, scheme: str, width: int) -> Iterator[Page]:
    """A page, when all its charts are drawn."""
    size = {"width": width, "height": 900}
    opened = Opened(browser, page, viewport=size, color_scheme=scheme, reduced_motion="reduce").page
    yield opened
    opened.context.close()


def picture(browser: Browser, page: Path, scheme: str, width: int) -> Image.Image:
    """The whole page."""
    with shown(browser, page, scheme, width) as opened:
        return Image.open(BytesIO(opened.screenshot(full_page=True))).convert("RGB")


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
