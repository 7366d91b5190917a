"""How fast the pages of `co2sim explore` are in a browser; with --out the table is kept.

    python benchmarks/explore.py            # a minute or two
    python benchmarks/explore.py --quick    # few moves of a slider

It needs the extra `explore`, playwright and Chromium. A move is one input event of a slider; it has
arrived when the table and the bars have changed and the browser has drawn a frame. While nothing
moves the page asks for the other positions of the slider; at once after the page was opened, or
after another slider was moved, the server has to simulate. The last column decides nothing: a
machine may be busy.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from reports import folder, machine, made_by, parser, table
from speed import SpeedLine

_REST = 4000
"""Milliseconds in which the page has asked for all positions."""
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
COMMAND = (sys.executable, "-m", "co2sim", "explore")
STRATEGIES = ("ddp", "zero3", "zeropp", "co2:tau=12,delay=1,worker=node")
QUESTION = ("-c", "cloud-100g", "-m", "gpt2-xl", *(x for s in STRATEGIES for x in ("-s", s)))
FEW = {
    "gpus": "64, 128",
    "micro_batch": "1",
    "inter.latency": "140 us, 145 us, 150 us, 155 us, 160 us",
    "strategy.tau": "12",
    "strategy.delay": "1",
}
"""Positions of the page without a server: what is measured is not how it is made."""

MOVE = """stop => new Promise(done => {
  const slider = document.querySelector('[data-path="inter.bandwidth"]');
  const shown = () => [byId("figures").textContent, byId("shares").innerHTML];
  const before = shown();
  const start = performance.now();
  slider.value = stop;
  slider.dispatchEvent(new Event("input"));
  const look = () => {
    const now = shown();
    if (now.every((text, at) => text !== before[at])) done(performance.now() - start);
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})"""
DRAG = """stops => new Promise(done => {
  const slider = document.querySelector('[data-path="inter.bandwidth"]');
  let start = 0;
  const next = () => {
    slider.value = stops.shift();
    slider.dispatchEvent(new Event("input"));
    start = performance.now();
    if (stops.length) setTimeout(next, 16);
    else look();
  };
  const look = () => {
    if (document.body.dataset.ready) done(performance.now() - start);
    else requestAnimationFrame(look);
  };
  next();
})"""
CHANGE = """() => {
  const slider = document.querySelector('[data-path="inter.latency"]');
  slider.value = (Number(slider.value) + 1) % (Number(slider.max) + 1);
  slider.dispatchEvent(new Event("input"));
}"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    """Measure, print, keep."""
    options = parser(__doc__, "few moves").parse_args()
    opened = 2 if options.quick else 10
    with folder(options) as out:
        lines = measured(opened, every=6 if options.quick else 1)
        text = "\n\n".join([table([line.cells for line in lines]), machine(), made_by()])
        print(text)
        (out / "explore.md").write_text(text + "\n", "utf-8")


def measured(opened: int, every: int) -> list[SpeedLine]:
    """All lines of the table."""
    if not CHROMIUM:
        sys.exit("no Chromium: apt-get install chromium-headless-shell")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as name:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        path = Path(name) / "page.html"
        varied = [part for pair in FEW.items() for part in ("--vary", "=".join(pair))]
        subprocess.run([*COMMAND, *QUESTION, *varied, "-o", str(path)], check=True)
        lines: list[SpeedLine] = []
        ends: list[float] = []
        with served(ends) as address:
            for what, url in (("without a server", path.as_uri()), ("with a server", address)):
                paints = []
                for _ in range(opened):
                    page = browser.new_page()
                    page.goto(url)
                    page.wait_for_selector("body[data-ready]")
                    paints.append(page.evaluate(PAINT) / 1e3)
                    page.close()
                page = browser.new_page()
                page.goto(url)
                page.wait_for_selector("body[data-ready]")
                rested, moves, drag = moved(page, every)
                lines.append(SpeedLine(f"first paint, {what}", paints, "s", 1))
                what_moves = f"table and bars after a move of a slider, {what}"
                lines.append(SpeedLine(what_moves, rested, "ms", 100))
                lines.append(SpeedLine(f"{what_moves}, at once", moves, "ms", 100))
                last = f"everything, the curve too, after the end of a drag, {what}"
                lines.append(SpeedLine(last, drag, "ms"))
                page.close()
        browser.close()
    lines.append(SpeedLine("the server's end after control-C", ends, "s", 2))
    return lines


def moved(page: Page, every: int) -> tuple[list[float], list[float], list[float]]:
    """Times of moves after a rest, of moves at once, and of what follows a drag, in seconds."""
    slider = page.locator('[data-path="inter.bandwidth"]')
    now, last = int(slider.input_value()), int(slider.get_attribute("max") or 0)
    others = [stop for stop in range(0, last + 1, every) if stop != now]
    page.wait_for_timeout(_REST)
    rested = [move(page, stop) for stop in others]
    change(page)
    at_once = []
    for stop in others:  # before the positions have been asked for
        at_once.append(move(page, stop))
        change(page)
    drags = [page.evaluate(DRAG, others[part::3]) / 1e3 for part in range(3)]
    return rested, at_once, drags


def move(page: Page, stop: int) -> float:
    """Seconds until the table and the bars show a position."""
    taken = float(page.evaluate(MOVE, stop))
    page.wait_for_selector("body[data-ready]")
    return taken / 1e3


def change(page: Page) -> None:
    """Ask another question: what is simulated for it is new."""
    page.evaluate(CHANGE)
    page.wait_for_selector("body[data-ready]")


@contextmanager
def served(ends: list[float]) -> Iterator[str]:
    """The address of a server; how long it took to end is added to `ends`."""
    with subprocess.Popen([*COMMAND, *QUESTION], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process.stdout.readline().split()[1]
        start = time.perf_counter()
        process.send_signal(signal.SIGINT)
        process.wait()
        ends.append(time.perf_counter() - start)


if __name__ == "__main__":
    main()
