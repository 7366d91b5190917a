"""Published results against predictions: errors, intervals, the command."""

import json
import tomllib
from pathlib import Path

import pytest
from test_published_tables import CO2
from typer.testing import CliRunner

from analysis.cli.app import app
from analysis.published.cells import from_papers
from analysis.published.predict import CellPrediction, summaries, validate
from analysis.published.runs import PAPERS

nightly = pytest.mark.nightly
ALLOWED = 0.005
"""By which a mean absolute error may rise: half a point."""

slow = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[pytest.param("two", marks=slow), pytest.param("all", marks=nightly)]
)
def rows(request: pytest.FixtureRequest) -> list[CellPrediction]:
    """Of CO2 and the smallest model of ZeRO++, and of all cells."""
    cells = from_papers()
    few = [c for c in cells if c.source == "co2" or (c.source, c.name[:3]) == ("zeropp", "18B")]
    return validate(few if request.param == "two" else cells)


# --- errors and intervals ------------------------------------------------------------------------


def test_mean_errors_do_not_rise(rows: list[CellPrediction]) -> None:
    """The guard: no mean absolute error above what `papers/errors.toml` states, plus 0.5 points."""
    assert rows
    stated_errors = tomllib.loads((PAPERS / "errors.toml").read_text())
    found = {
        (source, use): one.mape
        for (source, use, strategy), one in summaries(rows).items()
        if strategy == "all"
    }
    assert found.keys() == {(row.cell.source, row.cell.use) for row in rows}
    for (source, use), error in found.items():
        assert use in stated_errors.get(source, {}), f"papers/errors.toml has no {source}.{use}"
        assert error <= stated_errors[source][use] + ALLOWED, (source, use, error)


def test_published_values_lie_in_their_intervals(rows: list[CellPrediction]) -> None:
    """At least 80 % of the check cells of papers lie inside the 90 % interval of the prediction."""
    checks = [row for row in rows if row.cell.use == "check" and row.has_interval]
    assert sum(row.inside for row in checks) >= 0.8 * len(checks)
    assert all(row.low < row.predicted < row.high for row in checks)


# --- the command ---------------------------------------------------------------------------------


@slow
def test_the_commands_print_tables_json_and_figures(tmp_path: Path) -> None:
    """`validate --cells --json`, with figures and Markdown beside it."""
    runner = CliRunner()
    path = tmp_path / "cells.csv"
    path.write_text(CO2)
    asked = ["validate", "--cells", str(path), "--json", "--markdown", str(tmp_path / "r.md")]
    found = runner.invoke(app, [*asked, "--figures", str(tmp_path / "f")])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)  # a slow machine says on stderr how far it is
    assert {"source", "cell", "use", "published", "predicted", "error"} <= rows[0].keys()
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)
    assert [row["use"] for row in rows] == ["fit", "check", "check", "check"]
    (figure,) = (tmp_path / "f").iterdir()
    assert figure.name == "co2-cells.png"  # of no figure of the paper: its name says so
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| source |" in (tmp_path / "r.md").read_text()
