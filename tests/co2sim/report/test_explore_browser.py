"""Both pages of `co2sim explore` in a real browser: one with a grid inside, one with a server."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("pebble", reason="the extra `explore` is not installed")
pytest.importorskip("httpx2", reason="httpx2 is not installed")

from browsing import PHONE, SCHEMES, Opened, browser, marks, needs_axe
from one_sample import simulate
from playwright.sync_api import Browser, expect
from test_explore import STRATEGIES, TOKENS, TOLERANCE, few, made, question
from test_explore_server import OWN, Served

from co2sim.prediction.driver import run
from co2sim.prediction.driver import simulate as simulate_open
from co2sim.prediction.totals import totals_of
from co2sim.report.explore.grid import between, build
from co2sim.report.explore.page import static_page

__all__ = ["browser"]

pytestmark = marks
NIGHTLY = pytest.mark.nightly

EVIL = "<script>alert(1)</script>"
LONG = ("ü\"'&<b>" * 40)[:200]
CHECKS = "#strategies input[type=checkbox]"
ONE_SAMPLE = ("--micro-batch", "1", "--accumulation", "1", "--recompute", "none")
MODEL = Path("co2sim/catalog/models/gpt2-small.toml")


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page with the grid that the tests in this process have."""
    path = tmp_path_factory.mktemp("explore") / "page.html"
    asked, grid = made()
    cases = [asked.case(place, {}) for place in range(len(STRATEGIES))]
    path.write_bytes(static_page(asked, grid, [(case, run(case)) for case in cases], "co2sim ..."))
    return path.as_uri()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server: its page begins with two strategies, a price and failures."""
    more = ["-s", STRATEGIES[1], "--tokens", "1e10", *ONE_SAMPLE]
    for pair in ("price_per_gpu=2 USD/h", "failures=meta-rsc-1"):
        more += ["--set", pair]
    server = Served(tmp_path_factory.mktemp("served"), *more, gpus=16)
    yield server.address
    server.end()


class Explorer(Opened):
    """A page of the explorer: its sliders and figures."""

    undrawn = "body:not([data-ready])"

    def move(self, path: str, stop: int) -> str:
        """Move a slider; the text beside it."""
        slider = self.page.locator(f'input[data-path="{path}"]')
        event = "(input, stop) => { input.value = stop; input.dispatchEvent(new Event('input')); }"
        slider.evaluate(event, stop)
        self.ready()
        return self.page.locator(f'.slider:has([data-path="{path}"]) output').inner_text()

    def press(self, name: str) -> None:
        """Press a button."""
        self.page.get_by_role("button", name=name).click()
        self.ready()

    def fill(self, name: str, text: str, *, leave: bool = True) -> None:
        """Type into a field, and leave it."""
        field = self.page.locator(f'[id="{name}"]')
        field.fill(text)
        if leave:
            field.blur()

    def give(self, kind: str, name: str, content: bytes) -> None:
        """Upload a file."""
        file = {"name": name, "mimeType": "text/plain", "buffer": content}
        self.page.locator(f"#{kind}-file").set_input_files(files=[file])  # type: ignore[list-item]

    def speed(self, strategy: str) -> float:
        """Tokens/s in the table."""
        return number(self.table()[strategy]["tokens/s"])

    def table(self) -> dict[str, dict[str, str]]:
        """Cells by strategy and heading."""
        rows = self.page.evaluate(
            "[...document.querySelectorAll('#figures tr')]"
            ".map(row => [...row.children].map(one => one.textContent))"
        )
        return {row[0]: dict(zip(rows[0], row, strict=False)) for row in rows[1:]}

    def view(self) -> dict[str, Any]:
        """Everything that a link has to restore."""
        return {
            "outputs": self.page.locator(".slider output").all_inner_texts(),
            "table": self.table(),
            "answer": self.page.locator("#answer").inner_text(),
            "tokens": self.page.locator("#tokens").input_value(),
            "fields": [one.input_value() for one in self.page.locator(".pick input").all()],
            "x": self.page.locator("#x").evaluate("one => one.selectedOptions[0].text"),
            "y": self.page.locator("#y").input_value(),
            "shown": [one.is_checked() for one in self.page.locator(CHECKS).all()],
        }

    def close(self) -> None:
        """Nothing was said, and nothing asked but of the page's own server."""
        assert self.said == []
        own = re.match(r"\w+://[^/]*/", self.address)
        if self.address.startswith("file:"):
            assert {url.partition("#")[0] for url in self.requests()} == {
                self.address.partition("#")[0]
            }
        else:
            assert all(url.startswith(own[0]) for url in self.requests())
        self.page.context.close()


Open = Callable[..., Explorer]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Open pages; at the end each of them has said nothing."""
    all_of_them: list[Explorer] = []

    def call(address: str, **context: Any) -> Explorer:
        all_of_them.append(Explorer(browser, address, **context))
        return all_of_them[-1]

    yield call
    for one in all_of_them:
        one.close()


def number(text: str) -> float:
    """What a cell says."""
    return float(text.replace(",", "").removeprefix("x ").removesuffix(" %"))


@pytest.fixture(params=["static", "served"])
def address(request: pytest.FixtureRequest) -> str:
    """Of each of the two pages."""
    return str(request.getfixturevalue(request.param))


# ---- figures


def test_every_chart_is_drawn_and_a_slider_moves_the_figures(opened: Open, address: str) -> None:
    """To those of the simulator; the console is silent, and nothing is asked of a network."""
    explorer = opened(address)
    assert explorer.page.locator(".chart svg").count() == 3
    before = explorer.table()
    speed = explorer.move("inter.bandwidth", 3)
    assert explorer.table() != before
    check(explorer, {"inter.bandwidth": speed}, tolerance(address))


def tolerance(address: str) -> float:
    """A server's figures are exact; those of a page that has none are interpolated."""
    return 2 * TOLERANCE if address.startswith("file:") else 1e-3


def check(explorer: Explorer, settings: dict[str, str], tolerance: float) -> None:
    """Compare the table with the simulator."""
    table, asked = explorer.table(), replace(question(gpus=16), tokens=TOKENS)
    for place, title in enumerate(asked.titles):
        case = asked.case(place, settings)
        result = run(case)
        total = totals_of(case, result, TOKENS)
        (row,) = [
            row for name, row in table.items() if name == title or place == list(table).index(name)
        ]
        assert number(row["tokens/s"]) == pytest.approx(result.tokens_per_s, rel=tolerance, abs=1)
        low, high = map(number, row["90 % interval"].split(" to "))
        assert low == pytest.approx(result.tokens_per_s_low, rel=tolerance, abs=1)
        assert high == pytest.approx(result.tokens_per_s_high, rel=tolerance, abs=1)
        assert number(row["exposed"]) == pytest.approx(100 * result.exposed_share, abs=3)
        needed, _, ends = row["GiB"].partition(" (")
        sizes = needed, *ends.partition(")")[0].split(" to ")
        for text, size in zip(
            sizes,
            (
                result.memory_bytes_per_gpu["total"],
                result.memory_bytes_low,
                result.memory_bytes_high,
            ),
            strict=True,
        ):
            assert number(text) == pytest.approx(size / 2**30, rel=0.06)
        assert number(row["useful time"]) == pytest.approx(100 * total.goodput, abs=0.1)
        assert number(row["days"]) == pytest.approx(total.days, rel=tolerance + 0.01)
        assert number(row["USD"]) == pytest.approx(total.cost, rel=tolerance + 0.01)


def test_the_page_interpolates_as_python_does(opened: Open, static: str) -> None:
    """Everywhere along the bandwidth: the same numbers, to the six digits that the page has."""
    _, grid = made()
    explorer = opened(static)
    at = [control.at for control in grid.controls]
    axis = [control.path for control in grid.controls].index("inter.bandwidth")
    many = [[*at[:axis], stop, *at[axis + 1 :]] for stop in range(len(grid.controls[axis].stops))]
    found = explorer.page.evaluate("many => source.figures(many)", many)
    for positions, shown in zip(many, found, strict=True):
        for one, figures in zip(grid.strategies, shown, strict=True):
            expected = between(one, grid.controls, tuple(positions))
            for name, value in expected.items():
                rounded = isinstance(value, float)
                close = pytest.approx(value, rel=1e-5, abs=1e-6) if rounded else value
                assert figures[name] == close, name


@NIGHTLY
def test_keys_move_a_slider(opened: Open, address: str) -> None:
    """Arrows and End; a screen reader hears the text, not the place."""
    explorer = opened(address)
    slider = explorer.page.locator('input[data-path="inter.bandwidth"]')
    before = explorer.table()
    slider.focus()
    start = int(slider.input_value())
    slider.press("ArrowLeft")
    explorer.ready()
    assert int(slider.input_value()) == start - 1
    assert explorer.table() != before
    slider.press("End")
    explorer.ready()
    text = explorer.page.locator('.slider:has([data-path="inter.bandwidth"]) output').inner_text()
    assert slider.get_attribute("aria-valuetext") == text == "400 Gbit/s"


@NIGHTLY
def test_two_configurations_are_compared(opened: Open, address: str) -> None:
    """Keep, move: the table has the old throughput, and the ratio of the new one to it."""
    explorer = opened(address)
    first = explorer.table()
    explorer.press("Keep this to compare")
    explorer.move("inter.bandwidth", 0)
    second = explorer.table()
    for name, row in second.items():
        assert row["kept: tokens/s"] == first[name]["tokens/s"]
        ratio = number(row["tokens/s"]) / number(first[name]["tokens/s"])
        assert number(row["now against kept"]) == pytest.approx(ratio, rel=0.01)
        assert ratio < 0.9
    explorer.press("Drop what is kept")
    assert "now against kept" not in next(iter(explorer.table().values()))


@NIGHTLY
def test_a_link_restores_the_view(opened: Open, address: str) -> None:
    """Sliders, what was kept, hidden strategies, tokens and the chart, in another browser."""
    explorer = opened(address)
    explorer.move("inter.bandwidth", 3)
    explorer.press("Keep this to compare")
    explorer.move("price_per_gpu", 1)
    explorer.move("gpus", 0)
    explorer.page.locator(CHECKS).nth(1).uncheck()
    explorer.ready()
    explorer.page.locator("#tokens").fill("3e9")
    explorer.ready()
    explorer.page.locator("#x").select_option(label="price of a GPU")
    explorer.ready()
    explorer.page.locator("#y").select_option("cost")
    explorer.ready()
    link = explorer.page.evaluate("location.href")
    again = opened(link)
    assert again.view() == explorer.view()
    assert "now against kept" in next(iter(again.table().values()))
    assert again.page.locator(CHECKS).nth(1).is_checked() is False
    again.press("Back to the beginning")
    assert again.view() == opened(address).view()


# ---- names of strangers


@NIGHTLY
def test_names_run_no_script(opened: Open, tmp_path: Path, served: str) -> None:
    """A cluster called like a script, a model of 200 characters with quotes and umlauts."""
    cluster, model = tmp_path / "evil.toml", tmp_path / 'm "ü" &.toml'
    for path, text, name in ((cluster, OWN, EVIL), (model, MODEL.read_text("utf-8"), LONG)):
        line = f"name = {json.dumps(name)}"
        path.write_text(
            re.sub(r"(?m)^name = .*$", lambda _, line=line: line, text, count=1), "utf-8"
        )
    asked = question("ddp", cluster=str(cluster), model=str(model), overrides={})
    grid = build(asked, few(asked), 0.5, 1)
    case = asked.case(0, {})
    page = tmp_path / "page.html"
    page.write_bytes(static_page(asked, grid, [(case, run(case))], f"co2sim {EVIL}"))
    explorer = opened(page.as_uri())
    assert explorer.page.locator("h1").inner_text() == f"{LONG} on {EVIL}"
    assert explorer.page.title() == f"{LONG} on {EVIL}"

    server = opened(served)
    for kind, file in (("cluster", cluster), ("model", model)):
        server.give(kind, f"{kind}.toml", file.read_bytes())
        expect(server.page.locator(f"#{kind}")).to_have_value(f"{kind}.toml")
    server.ready()
    heading = server.page.locator("h1").inner_text()
    assert heading.startswith(LONG)
    assert EVIL in heading
    assert server.page.evaluate("document.documentElement.scrollWidth") <= 1280


# ---- forms


@NIGHTLY
def test_forms_answer_while_typing_and_change_the_question(opened: Open, served: str) -> None:
    """The nearest name is said, the words of the command line for a unit; then new figures."""
    explorer = opened(served)
    page = explorer.page
    explorer.fill("cluster", "cloud-25", leave=False)
    expect(page.locator("#cluster-wrong")).to_contain_text("'cloud-25g'")
    explorer.fill("cluster", "cloud-25g")
    expect(page.locator("h1")).to_contain_text("25 Gbit/s")
    explorer.fill("size", "16")
    expect(page.locator("#answer")).to_contain_text("On 16 GPUs")
    explorer.fill("model", "gpt2-medium")
    expect(page.locator("h1")).to_contain_text("medium")
    explorer.fill("name", "zero3")
    expect(page.locator("#strategies .name")).to_have_count(3)
    page.locator("#strategies summary").nth(1).click()
    page.locator("#strategies button").nth(1).click()
    expect(page.locator("#strategies .name")).to_have_text(["ddp", "zero3"])
    explorer.ready()
    given = ("cloud-25g", "gpt2-medium", "zero3")
    assert list(explorer.table()) == ["ddp", "zero3"]
    expected = simulate(*given, gpus=16).tokens_per_s
    assert explorer.speed("zero3") == pytest.approx(expected, abs=1)
    page.locator("#numbers summary").click()
    explorer.fill("fact-inter.bandwidth", "50", leave=False)
    wrong = page.locator('[id="fact-inter.bandwidth-wrong"]')
    expect(wrong).to_contain_text("'50'")
    explorer.fill("fact-inter.bandwidth", "50 Gbit/s")
    expect(wrong).to_have_text("")
    expect(page.locator("h1")).to_contain_text("inter.bandwidth=50 Gbit/s")
    explorer.ready()
    explorer.fill("size", "128")
    expect(page.locator("#answer")).to_contain_text("On 128 GPUs")
    explorer.ready()
    expected = simulate(*given, gpus=128, overrides={"inter.bandwidth": "50 Gbit/s"}).tokens_per_s
    assert explorer.speed("zero3") == pytest.approx(expected, abs=1)
    explorer.fill("price", "3", leave=False)
    expect(page.locator("#price-wrong")).to_contain_text("no unit")
    explorer.fill("price", "3 USD/h")
    expect(page.locator('input[data-path="price_per_gpu"]')).to_have_count(1)
    explorer.ready()
    page.get_by_text("Batch, precision").click()
    explorer.fill("global_batch", "24")
    expect(page.locator("#failed")).to_contain_text("128 GPUs")
    explorer.ready()
    assert opened(page.evaluate("location.href")).view() == explorer.view()
    explorer.said.clear()  # what the browser says of answers that refuse


@NIGHTLY
def test_the_report_and_the_commands_repeat_the_figures(
    opened: Open, served: str, tmp_path: Path
) -> None:
    """The report opens without a word and holds both strategies; each command gives the figure."""
    explorer = opened(served)
    explorer.move("inter.bandwidth", 2)
    with explorer.page.expect_download() as saved:
        explorer.page.get_by_role("button", name="Save a report").click()
    path = tmp_path / "report.html"
    saved.value.save_as(path)
    browser = explorer.page.context.browser
    assert browser
    report = Opened(browser, path)
    text = report.page.inner_text("body")
    assert all(name in text for name in explorer.table())
    assert report.said == []
    explorer.page.get_by_role("button", name="Show the commands").click()
    expect(explorer.page.locator("#command")).to_contain_text("co2sim run")
    commands = explorer.page.locator("#command").inner_text().splitlines()
    rows = list(explorer.table().values())
    assert len(commands) == len(rows) == 2
    for command, row in zip(commands, rows, strict=True):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"{json.loads(done.stdout)['tokens_per_s']:,.0f}" == row["tokens/s"]


LINK = "&cluster=dgx-h100&model=llama3.2-1b&strategy=ddp&strategy=co2:tau=12,delay=1,worker=node"


@NIGHTLY
def test_a_row_says_what_the_slider_and_the_field_say(opened: Open, served: str) -> None:
    """Whichever of both was changed last; what is typed is a position of the slider."""
    explorer = opened(f"{served}#{LINK}")
    page, field = explorer.page, explorer.page.locator("#strategy-1-tau")
    page.locator("#strategies summary").nth(1).click()
    for stop in (0, 2):
        text = explorer.move("strategy.tau", stop)
        assert f"co2(tau={text}, delay=1, worker=node)" in explorer.table()
        expect(field).to_have_value(text)
        expect(page.locator("#strategies .name").nth(1)).to_contain_text(f"tau={text},")
    explorer.fill("strategy-1-tau", "24")
    slider = page.locator('.slider:has([data-path="strategy.tau"]) output')
    expect(slider).to_have_text("24")
    explorer.ready()
    expect(page.locator("#figures")).to_contain_text("co2(tau=24, delay=1, worker=node)")


@NIGHTLY
def test_the_first_lines_say_what_was_taken_of_what_is_open(opened: Open, served: str) -> None:
    """Batch, micro-batch, micro-steps, recomputation, precision and stack, as `simulate` has."""
    explorer = opened(f"{served}#{LINK}&hide=co2(tau=12, delay=1, worker=node)")
    said = explorer.page.locator("#batch").inner_text()
    result = simulate_open("dgx-h100", "llama3.2-1b", "ddp")
    assert result.global_batch
    for words in (
        f"{result.global_batch:,} samples",
        f"micro-batch {result.micro_batch} x {result.accumulation} micro-step",
        f"recompute {result.recompute}; {result.precision}; {result.stack}",
    ):
        assert words in said
    assert explorer.speed("ddp") == pytest.approx(result.tokens_per_s, abs=1)


@NIGHTLY
def test_another_cluster_resets_what_belongs_to_the_last(opened: Open, served: str) -> None:
    """GPUs, prices and numbers of it, given or by slider; those of the model stay."""
    of_cluster = "&size=16&set=price_per_gpu=3 USD/h&set=inter.latency=20 us&gpus=8"
    explorer = opened(
        f"{served}#{LINK}{of_cluster}&set=model.seq_len=4096&inter.bandwidth=1 Tbit/s"
    )
    expect(explorer.page.locator("#size")).to_have_value("16")
    explorer.fill("cluster", "dgx-a100")
    expect(explorer.page.locator("h1")).to_contain_text("A100")
    explorer.ready()
    expect(explorer.page.locator("#size")).to_have_value("")
    expect(explorer.page.locator("#done")).to_have_text("")
    link = parse_qs(urlsplit(explorer.page.url).fragment)
    assert link["set"] == ["model.seq_len=4096"]
    assert not {"size", "gpus", "inter.bandwidth"} & set(link)


@NIGHTLY
def test_a_price_is_asked_for_and_what_would_fit_is_said(opened: Open, served: str) -> None:
    """Where none is known; changes of a strategy that does not fit."""
    explorer = opened(f"{served}#&cluster=dgx-h100&model=llama-13b&strategy=ddp")
    assert "DOES NOT FIT" in explorer.table()["ddp"]["GiB"]
    expect(explorer.page.locator("#fitting")).to_contain_text("what would fit")
    expect(explorer.page.locator("#price-hint")).to_be_hidden()
    without = opened(f"{served}#&cluster=a800-1600g&model=llama-13b&strategy=fsdp")
    expect(without.page.locator("#price-hint")).to_be_visible()
    without.fill("price", "5 USD/h")
    expect(without.page.locator('input[data-path="price_per_gpu"]')).to_have_count(1)
    expect(without.page.locator("#price-hint")).to_be_hidden()
    without.ready()


# ---- for everybody


@NIGHTLY
@SCHEMES
def test_it_follows_the_scheme_and_is_readable_on_a_phone_and_on_paper(
    opened: Open, address: str, scheme: str
) -> None:
    """At 360 px nothing but a table scrolls sideways; dark paper has light ink; no sliders."""
    explorer = opened(address, viewport=PHONE, color_scheme=scheme)
    explorer.press("Keep this to compare")
    assert explorer.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert explorer.dark() == (scheme == "dark")
    explorer.page.emulate_media(media="print")
    assert not explorer.page.locator("#controls").is_visible()
    assert explorer.page.locator("#figures").is_visible()


@NIGHTLY
@needs_axe
@SCHEMES
def test_axe_finds_no_serious_violation(opened: Open, address: str, scheme: str) -> None:
    """Contrast, names of controls, order of headings, tables: nothing serious or critical."""
    explorer = opened(address, color_scheme=scheme, bypass_csp=True)
    for details in explorer.page.locator("details").all():
        details.evaluate("one => one.open = true")
    explorer.press("Keep this to compare")
    assert explorer.violations() == []
