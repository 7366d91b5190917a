"""Figures of the papers, and `co2analysis figures`: drawn is what was published and predicted."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from commands import Command
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from places import GOLDEN

from analysis.published import paper_figures as module
from analysis.published.cells import Cell, Unpredicted, from_papers, unpredicted
from analysis.published.figure_style import FORMATS, STYLE_FILE
from analysis.published.paper_figures import PaperFigure, draw, paper_figures
from analysis.published.predict import CellPrediction
from analysis.published.report import signed
from analysis.published.runs import PAPERS
from analysis.published.tables import from_csv, ratios

KEYS = ("co2", "zeropp")
QUICK = "zeropp-announcement-table-of-communication-volume"
"""The figure that takes least to predict."""
slow, nightly = pytest.mark.slow, pytest.mark.nightly
Drawn = tuple[list[PaperFigure], list[Unpredicted]]


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    """All figures, with predictions that are invented, and what is in none."""
    cells = [*from_papers(), *(one.cell for one in unpredicted() if one.cell)]
    known = {
        cell: CellPrediction(cell, cell.published * (1.1 + 0.01 * n))
        for n, cell in enumerate(cells)
    }
    known |= {
        cell: replace(row, low=0.9 * row.predicted, high=1.2 * row.predicted)
        for cell, row in known.items()
        if cell.group
    }
    return paper_figures(PAPERS, known=known)


def invented(cells: Sequence[Cell]) -> list[CellPrediction]:
    """A throughput that grows with the GPUs."""
    values = [100.0 * cell.setup.gpus**0.9 for cell in cells]
    return [
        CellPrediction(cell, v, 0.9 * v, 1.1 * v) for cell, v in zip(cells, values, strict=True)
    ]


@pytest.fixture
def _points(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Points of curves are invented, too."""
    module._predicted.cache_clear()
    monkeypatch.setattr(module, "validate", invented)
    yield
    module._predicted.cache_clear()


@pytest.fixture
def figures(drawn: Drawn, _points: None) -> dict[str, Figure]:
    """Every figure as it is drawn."""
    with style.context(STYLE_FILE, after_reset=True):
        return {one.mirror.name: one.make() for one in drawn[0]}


@pytest.fixture(scope="module")
def files(drawn: Drawn) -> dict[str, bytes]:
    """Every file by its name."""
    return {name: made for one in drawn[0] for name, made in one.files(FORMATS).items()}


# --- what is drawn -------------------------------------------------------------------------------


def test_every_published_cell_is_drawn_or_named_with_its_reason(
    drawn: Drawn,
) -> None:
    """By place and value none is lost and none is twice; only unstated conditions keep one out."""
    stated = Counter((cell["where"], cell["value"]) for cell in stated_cells())
    shown, left_out = drawn
    found = Counter((row.cell.where, row.cell.published) for one in shown for row in one.rows)
    found += Counter((row.where, row.value) for one in shown for row in one.alone)
    assert found + Counter((one.where, one.published) for one in left_out) == stated
    assert {one.reason for one in left_out} == {"network and micro-batch not stated"}
    assert all("abstract" in one.where for one in left_out)


@slow
def test_bars_and_diamonds_are_the_published_values_and_the_predictions(
    drawn: Drawn, figures: dict[str, Figure]
) -> None:
    """On every bar of a published value is the diamond of its own prediction, with its interval."""
    for one in drawn[0]:
        figure = figures[one.mirror.name]
        rows = [row for row in one.rows if row.cell.over or one.mirror.name != "co2-table-3"]
        pairs = [
            (bar.get_y() + bar.get_height(), value(sign))
            for axis in figure.axes
            for bar in bars(axis)
            for sign in signs(axis, "D")
            if bar.get_x() < sign.get_xydata()[0][0] < bar.get_x() + bar.get_width()
        ]
        assert sorted(pairs) == [
            pytest.approx(pair)
            for pair in sorted((row.cell.published, row.predicted) for row in rows)
        ]
        ends = [end for axis in figure.axes for end in intervals(axis)]
        expected = [
            (row.low, row.high) if row.has_interval else (row.predicted, row.predicted)
            for row in rows
        ]
        expected += [
            (row.value - row.spread, row.value + row.spread) for row in one.alone if row.spread
        ]
        assert sorted(ends) == [pytest.approx(pair) for pair in sorted(expected)]


def stated_cells() -> list[dict[str, Any]]:
    """All published cells of both papers."""
    texts = ((PAPERS / key / "results.toml").read_text() for key in KEYS)
    return [cell for text in texts for cell in tomllib.loads(text)["cell"]]


def bars(axis: Axes) -> list[Rectangle]:
    """The bars of an axis."""
    return [patch for patch in axis.patches if isinstance(patch, Rectangle)]


def signs(axis: Axes, marker: str) -> list[Line2D]:
    """The lines of an axis with a marker."""
    return [one for one in axis.get_lines() if one.get_marker() == marker]


def value(line: Line2D) -> float:
    """Of a single point."""
    ((_, found),) = line.get_xydata().tolist()
    return float(found)


def intervals(axis: Axes) -> list[tuple[float, float]]:
    """Ends of the error bars of an axis."""
    found = []
    for lines in axis.collections:
        if isinstance(lines, LineCollection):
            ends = ((path[0][1], path[-1][1]) for path in lines.get_segments())
            found += [(float(low), float(high)) for low, high in ends]
    return found


# --- files ---------------------------------------------------------------------------------------


@nightly
def test_files_do_not_depend_on_the_user_or_on_other_formats(
    drawn: Drawn,
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn again, one format alone, under other settings of matplotlib: the same bytes."""
    for name, setting in (("font.size", 20.0), ("pdf.fonttype", 3), ("axes.grid", False)):
        monkeypatch.setitem(mpl.rcParams, name, setting)
    for one in drawn[0]:
        for kind in reversed(FORMATS):
            for name, content in one.files([kind]).items():
                assert content == files[name], name


@slow
def test_tables_that_mirror_no_figure_have_figures_of_their_own() -> None:
    """Of iteration times and of FSDP's runs, in the order of the sources."""
    golden = GOLDEN
    cells = [
        cell
        for name in ("iteration-rows.csv", "fsdp-rows.csv")
        for cell in from_csv(golden / name, "check")
    ]
    cells += ratios(cells)
    made = draw([CellPrediction(cell, 1.1 * cell.published) for cell in cells], PAPERS)
    assert list(made) == ["a100-iteration-errors.png", "fsdp-errors.png", "fsdp-scaling.png"]
    assert all(content.startswith(b"\x89PNG") for content in made.values())


# --- the command ---------------------------------------------------------------------------------


@slow
def test_json_and_text_list_files_and_values(co2analysis: Command, tmp_path: Path) -> None:
    """Of each value what was published, what is ours, and whether it is a prediction."""
    asked = ("figures", "--out", str(tmp_path), "--only", QUICK, "--format", "svg")
    found = co2analysis(*asked, "--json")
    assert found.code == 0
    report = json.loads(found.out)
    (figure,) = report["figures"]
    assert figure["files"] == [str(tmp_path / f"{QUICK}.svg")]
    assert "<text" not in (tmp_path / f"{QUICK}.svg").read_text()
    cells = figure["cells"]
    assert figure["published"] == len(cells) == figure["predicted"]
    errors = [cell["error"] for cell in cells if cell["published"]]
    for cell in cells:
        assert cell["is"] == "predicted"
        if cell["published"]:
            assert cell["error"] == pytest.approx(cell["ours"] / cell["published"] - 1)
        else:
            assert (cell["ours"], cell["error"]) == (0, None)
    largest = max(errors, key=abs)
    assert figure["predicted_error_largest"] == largest
    assert (figure["fitted"], figure["fitted_error_median"]) == (0, None)
    shown = co2analysis(*asked).out
    assert all(token in shown for token in (QUICK, signed(largest), f"{len(cells)} published"))
