"""A real browser for the tests of pages: Chromium, what a page says in it, and axe.

Tests that import this are skipped where something is missing.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
AXE = os.environ.get("AXE", "")
"""The path of axe.min.js, from the npm package axe-core."""
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
PHONE = {"width": 360, "height": 740}
_LONGEST = 200_000
"""Milliseconds that a page may take for anything."""

marks = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium-headless-shell"),
]
needs_axe = pytest.mark.skipif(
    not AXE, reason="AXE does not name axe.min.js of the npm package axe-core"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium, without a window."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for each module that imports this."""
    with chromium() as found:
        yield found


class Opened:
    """A page in the browser, with what it said and asked for."""

    undrawn = ".chart:not(:has(svg))"
    """What there is none of once it is ready."""

    def __init__(self, browser: Browser, address: str | Path, **context: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.address = address.as_uri() if isinstance(address, Path) else address
        self.page: Page = browser.new_context(**context).new_page()
        self.page.set_default_timeout(_LONGEST)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(self.address)
        self.ready()

    def ready(self) -> None:
        """Wait until everything is drawn."""
        expect(self.page.locator(self.undrawn)).to_have_count(0, timeout=_LONGEST)

    def requests(self) -> list[str]:
        """What was asked of a network."""
        return [url for url in self.asked if not url.startswith(("data:", "blob:"))]

    def dark(self) -> bool:
        """Whether the ink is lighter than the paper."""
        ink, paper = (
            self.page.evaluate(f"getComputedStyle(document.body).{name}")
            for name in ("color", "backgroundColor")
        )
        ink, paper = (sum(map(int, re.findall(r"\d+", text)[:3])) for text in (ink, paper))
        return ink > paper

    def violations(self, *others: str) -> list[tuple[str, str]]:
        """What axe finds that is serious or critical, and of other rules whatever it finds."""
        self.page.add_script_tag(path=AXE)
        return [
            (one["id"], one["nodes"][0]["html"][:200])
            for one in self.page.evaluate("axe.run()")["violations"]
            if one["impact"] in {"serious", "critical"} or one["id"] in others
        ]
