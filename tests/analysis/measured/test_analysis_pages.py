"""Pages of `co2analysis compare` and `validate`: they say what the commands say."""

import csv
import html
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from commands import Command
from html_pages import drawn_points, files, held, loads
from simulated_record import measured, more_latency, same, slower_gpu, slower_network

from analysis.measured.comparison import RunComparison, compare
from analysis.measured.page import page
from analysis.published import page as published
from analysis.published.cells import from_papers
from analysis.published.predict import CellPrediction
from analysis.published.report import ValidationReport, render
from co2sim.report.html import render as rendered
from realrun.record import write

pytestmark = pytest.mark.slow  # each page takes half a second

EVIL = "<script>alert(1)</script>"


def compared(names: dict[str, Any]) -> list[RunComparison]:
    """Runs by name that were "measured" on a cluster that was changed so."""
    return [compare(name, measured(strategy, change)) for name, (strategy, change) in names.items()]


@pytest.fixture(scope="module")
def three() -> list[RunComparison]:
    """One that is too slow for its network, one for its GPUs, and one as predicted."""
    return compared(
        {
            "ddp": ("ddp", slower_network),
            "co2": ("co2.published(tau=2)", slower_gpu),
            "right": ("zero3", same),
        }
    )


def text_of(runs: list[RunComparison]) -> str:
    """Their page."""
    return rendered(page(runs, "co2analysis compare runs")).decode()


@pytest.fixture(scope="module")
def text(three: list[RunComparison]) -> str:
    """Their page."""
    return text_of(three)


def test_what_is_drawn_are_the_times_of_the_runs(text: str, three: list[RunComparison]) -> None:
    """Bars are the figures of the record and the prediction; points are the ops with both times."""
    specs = held(text, "specs")
    for place, run in enumerate(three):
        (rows,) = specs[f"times-{place}"]["datasets"].values()
        bars = {(row["what"].partition(",")[0], row["side"]): row["ms"] for row in rows}
        predicted, found = run.predicted, run.measured
        assert bars["round time", "predicted"] == pytest.approx(1e3 * predicted.round_time_s)
        assert bars["round time", "measured"] == pytest.approx(1e3 * found["round_time_s"])
        assert bars["communication busy", "measured"] == pytest.approx(1e3 * found["comm_busy_s"])
        points = {row["op"]: row for row in drawn_points(specs[f"ops-{place}"]) if "op" in row}
        ops = {op.label: op for op in run.ops if op.predicted and op.measured}
        assert points.keys() == ops.keys()
        for name, op in ops.items():
            assert points[name]["measured"] == pytest.approx(1e3 * op.measured)
            assert points[name]["predicted"] == pytest.approx(1e3 * op.predicted)
            assert points[name]["cause"] == (op.cause.words if op.cause else "agrees")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with two runs."""
    monkeypatch.chdir(tmp_path)
    write(Path("runs/ddp"), measured("ddp", slower_network))
    write(Path("runs/zero2"), measured("zero2", more_latency))


@pytest.mark.usefixtures("runs")
def test_the_files_are_what_the_command_prints(co2analysis: Command) -> None:
    """JSON is --json, CSV is --csv, and the page names its command."""
    given = ["compare", "runs", "--json", "--csv", "ops.csv", "--report", "pages/c.html"]
    done = co2analysis(*given)
    assert (done.code, done.err) == (0, "")
    text = Path("pages/c.html").read_text("utf-8")
    inside = files(text)
    assert json.loads(inside["comparison.json"]) == json.loads(done.out)
    assert inside["ops.csv"] == Path("ops.csv").read_bytes()
    assert f"<code>co2analysis {' '.join(given)}</code>" in text


# --- validate -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells() -> list[CellPrediction]:
    """Cells of the papers, some fitted to, some not; predictions are invented."""
    return invented("co2", "zeropp-volume")


def invented(*sources: str) -> list[CellPrediction]:
    """All cells of some sources, each with another error; an interval but for volumes."""
    found = []
    for n, cell in enumerate(cell for cell in from_papers() if cell.source in sources):
        value = cell.published * (1.05 + 0.03 * n) * (-1 if cell.published < 0 else 1)
        timed = cell.quantity != "inter_node_volume"
        ends = (value / 1.2, value * 1.1) if timed else (math.nan, math.nan)
        found.append(CellPrediction(cell, value, *ends))
    return found


def validated(rows: list[CellPrediction], missing: tuple[str, ...] = ()) -> str:
    """The page of cells."""
    report = ValidationReport(rows=rows)
    numbers = [row.to_dict() for row in rows]
    made = published.page(report, render(report), numbers, "co2analysis validate", missing)
    return rendered(made).decode()


@pytest.fixture(scope="module")
def whole(cells: list[CellPrediction]) -> str:
    """The page of these cells, with a table that was not read."""
    return validated(cells, missing=("a.csv was not read",))


def test_every_cell_is_drawn_once_with_its_numbers(cells: list[CellPrediction], whole: str) -> None:
    """As a tick among the errors, and as a point of its quantity: hollow if it was fitted to."""
    text = whole
    specs = held(text, "specs")
    expected = sorted((row.cell.name, row.cell.published, row.predicted) for row in cells)

    def drawn(spec: dict[str, Any], mark: str, *, filled: bool | None = None) -> list[Any]:
        layers = [
            layer
            for layer in spec["layer"]
            if layer["mark"]["type"] == mark and layer["mark"].get("filled") is filled
        ]
        rows = [row for layer in layers for row in spec["datasets"][layer["data"]["name"]]]
        return [(row["cell"], row["published"], row["predicted"]) for row in rows]

    assert sorted(drawn(specs["errors-0"], "tick")) == expected
    panels = [spec for name, spec in specs.items() if name.startswith("cells-")]
    solid = [row for spec in panels for row in drawn(spec, "point", filled=True)]
    hollow = [row for spec in panels for row in drawn(spec, "point", filled=False)]
    assert sorted(solid + hollow) == expected
    fitted = {row.cell.name for row in cells if row.cell.use == "fit"}
    assert {name for name, *_ in hollow} == fitted


def test_the_files_of_validate_hold_every_cell(cells: list[CellPrediction], whole: str) -> None:
    """JSON as the command prints it, and CSV with the same numbers."""
    inside = files(whole)
    numbers = json.loads(inside["cells.json"])
    assert numbers == json.loads(json.dumps([row.to_dict() for row in cells]))
    rows = list(csv.DictReader(io.StringIO(inside["cells.csv"].decode())))
    assert [float(row["error"]) for row in rows] == [one["error"] for one in numbers]
    assert "## Predicted against published" in inside["report.md"].decode()


def test_hostile_names_are_text(cells: list[CellPrediction]) -> None:
    """Of a run and of a cell: scripts, quotes, Markdown, umlauts and 200 characters."""
    name = f'{EVIL} "ü" ![x](http://x.org/p.png) {"ü" * 200}'
    run = replace(compared({"ddp": ("ddp", slower_network)})[0], name=name)
    row = replace(cells[0], cell=replace(cells[0].cell, name=name))
    for text in (text_of([run, run]), validated([row, *cells])):
        assert EVIL not in text
        assert html.escape(EVIL) in text
        assert "ü" * 200 in text
        assert "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
        assert not loads(text)
