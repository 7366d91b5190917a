"""Figures of the papers, and `co2analysis figures`: drawn is what was published and predicted."""

import json
import re
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from commands import Command
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from analysis.published.cells import Cell
from analysis.published.csv_tables import from_csv
from analysis.published.errors import CellPrediction
from analysis.published.figures import co2
from analysis.published.figures.all_figures import draw
from analysis.published.figures.paper_figures import (
    MIRRORS,
    NotDrawn,
    PaperFigure,
    mirror_of,
    paper_figures,
)
from analysis.published.figures.style import FORMATS, LOOKS, PLAIN, STYLE_FILE
from analysis.published.figures.zeropp import throughput
from analysis.published.formats import signed
from analysis.published.fsdp_rows import ratios
from analysis.published.paper_cells import from_papers, unpredicted, zeropp_cell
from analysis.published.papers import PAPERS, papers
from analysis.published.predict import predict

KEYS = ("co2", "zeropp")
QUICK = "zeropp-announcement-table-of-communication-volume"
"""The figure that takes least to predict."""
slow, nightly = pytest.mark.slow, pytest.mark.nightly
Drawn = tuple[list[PaperFigure], list[NotDrawn]]


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
    co2._predicted.cache_clear()
    monkeypatch.setattr(co2, "validate", invented)
    yield
    co2._predicted.cache_clear()


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


@nightly
def test_the_table_of_the_docs_counts_what_is_drawn(
    drawn: Drawn,
) -> None:
    """A row for each figure, with its published, predicted and fitted numbers; and the sum."""
    page = (Path(__file__).parent.parent / "docs" / "validation.md").read_text()
    found = {
        name: [int(count.strip() or 0) for count in counts.split("|")[1:4]]
        for name, counts in re.findall(r"^\| `([\w-]+)` \|(.+)\|$", page, re.MULTILINE)
        if name in {one.mirror.name for one in drawn[0]}
    }
    assert found == {
        one.mirror.name: [
            one.published,
            *(sum(row.cell.use == use for row in one.rows) for use in ("check", "fit")),
        ]
        for one in drawn[0]
    }
    total = sum(one.published for one in drawn[0])
    assert f"{total} of {total + len(drawn[1])} numbers are drawn" in page


def test_a_figure_holds_cells_of_its_place_only(
    drawn: Drawn,
) -> None:
    """What its name says, the source says of every cell."""
    for one in drawn[0]:
        for where in (*(row.cell.where for row in one.rows), *(row.where for row in one.alone)):
            assert where.startswith(one.mirror.place)


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


@slow
def test_what_is_not_predicted_is_drawn_as_published(
    drawn: Drawn, figures: dict[str, Figure]
) -> None:
    """A star for every published quality, and no sign of ours."""
    for one in drawn[0]:
        if one.alone:
            stars = [value(sign) for sign in all_signs(figures[one.mirror.name], "*")]
            assert sorted(stars) == sorted(row.value for row in one.alone)
            assert not one.rows


@slow
def test_the_lines_of_table_3_are_predictions_with_the_published_stars(
    drawn: Drawn, figures: dict[str, Figure]
) -> None:
    """Points at the prediction of so many GPUs; a star for every published throughput."""
    (table,) = (one for one in drawn[0] if one.mirror.name == "co2-table-3")
    figure = figures["co2-table-3"]
    speeds = [row for row in table.rows if not row.cell.over]
    stars = [(float(x), float(y)) for one in all_signs(figure, "*") for x, y in one.get_xydata()]
    assert sorted(stars) == sorted((row.cell.setup.gpus, row.cell.published) for row in speeds)
    points = [point for line in co2.curves(table.rows).values() for point in line]
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xydata()) > 1]
    values = [float(y) for line in lines for y in line.get_ydata()]
    assert values == [point.predicted for point in points]
    assert {point.cell.setup.gpus for point in points} == {8, 16, 32, 64, 128}
    assert {point.cell.setup for point in points if point.cell.use == "fit"} == {
        row.cell.setup for row in speeds if row.cell.use == "fit"
    }
    hollow = [one for look in LOOKS for one in all_signs(figure, look.marker) if is_hollow(one)]
    assert len(hollow) == sum(row.cell.use == "fit" for row in speeds) > 0


@nightly
def test_points_of_curves_are_predictions(drawn: Drawn) -> None:
    """Of a run on so many GPUs; those whose published value was fitted to are marked so."""
    (table,) = (one for one in drawn[0] if one.mirror.name == "co2-table-3")
    for line in co2.curves(table.rows).values():
        assert [one.predicted for one in line] == [predict(one.cell) for one in line]


@slow
def test_what_was_fitted_on_is_hollow_and_what_is_predicted_is_filled(
    drawn: Drawn, figures: dict[str, Figure]
) -> None:
    """As many hollow diamonds as fitted cells, with dotted intervals; the legend names both."""
    for one in drawn[0]:
        figure = figures[one.mirror.name]
        rows = [row for row in one.rows if row.cell.over or one.mirror.name != "co2-table-3"]
        fitted = sum(row.cell.use == "fit" for row in rows)
        diamonds = all_signs(figure, "D")
        assert sum(is_hollow(sign) for sign in diamonds) == fitted
        assert len(diamonds) == len(rows)
        words = " ".join(text.get_text() for text in figure.legends[0].get_texts())
        uses = {row.cell.use for row in one.rows}
        assert ("fitted, no prediction" in words) == ("fit" in uses)
        assert ("predicted (plain)" in words) == ("check" in uses)
        assert ("does not" in words) == bool(one.alone)
    ratio = next(row for one in drawn[0] for row in one.rows if row.cell.published == 2.2)
    assert ratio.cell.use == "fit"  # it is made of bars that were fitted on


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


def all_signs(figure: Figure, marker: str) -> list[Line2D]:
    """Those of all axes; the legend is none."""
    return [one for axis in figure.axes for one in signs(axis, marker)]


def value(line: Line2D) -> float:
    """Of a single point."""
    ((_, found),) = line.get_xydata().tolist()
    return float(found)


def is_hollow(line: Line2D) -> bool:
    """Whether its marker is white inside."""
    return to_rgb(line.get_markerfacecolor()) == (1.0, 1.0, 1.0)


def intervals(axis: Axes) -> list[tuple[float, float]]:
    """Ends of the error bars of an axis."""
    found = []
    for lines in axis.collections:
        if isinstance(lines, LineCollection):
            ends = ((path[0][1], path[-1][1]) for path in lines.get_segments())
            found += [(float(low), float(high)) for low, high in ends]
    return found


# --- names ---------------------------------------------------------------------------------------


def test_a_name_says_what_is_mirrored() -> None:
    """Its numbers are those that the source states; without one there is none in the name."""
    for mirror in MIRRORS:
        place = mirror.place.partition("ICLR 2024")[2] or mirror.place.partition("June 2023")[2]
        assert re.findall(r"-(\d+)", mirror.name) == re.findall(r"\d+", place)
        for kind in ("figure", "table", "ablation"):
            assert (kind in mirror.name) == (kind in place.lower())


def test_places_that_only_begin_alike_are_others() -> None:
    """Figure 7 is not figure 70, and other quantities of its place are not drawn there."""
    place = "DeepSpeed ZeRO++ announcement, June 2023, figure 7"
    found = mirror_of(f"{place}, bar label", "tflops_per_gpu")
    assert found is not None
    assert found.name == "zeropp-announcement-figure-7"
    assert mirror_of(f"{place}0", "tflops_per_gpu") is None
    assert mirror_of(place, "quality") is None


@slow
@pytest.mark.parametrize("panels", [1, 8])
def test_further_cells_of_zeropp_are_drawn_in_panels(panels: int) -> None:
    """One for each number of links and micro-batch; predictions are invented here."""
    paper = papers()["zeropp"]
    rows = [
        CellPrediction(zeropp_cell(paper, size, tokens, links, strategy, 100.0, "check"), 99.0)
        for tokens, links in [(t, n) for t in (1024, 2048) for n in (1, 2, 4, 8)][:panels]
        for size in (18, 49)
        for strategy in ("zero3", "zeropp")
    ]
    with style.context(STYLE_FILE, after_reset=True):
        figure = throughput(rows)
    assert len(figure.axes) == panels
    heights = [bar.get_height() for axis in figure.axes for bar in bars(axis)]
    assert heights.count(100.0) == len(rows)
    assert [value(sign) for sign in all_signs(figure, "D")] == [99.0] * len(rows)


def test_series_can_be_told_apart_in_grey() -> None:
    """Bars differ in hatch, lines in marker and dashes; nothing depends on colour alone."""
    for one, other in combinations((*LOOKS, PLAIN), 2):
        assert one.hatch != other.hatch
        if PLAIN not in {one, other}:  # of bars only
            assert one.marker != other.marker
            assert one.line != other.line


# --- files ---------------------------------------------------------------------------------------


@nightly
def test_fonts_are_embedded_as_truetype(files: dict[str, bytes]) -> None:
    """Every font of a PDF is TrueType with its file inside; none is Type 3, as publishers ask."""
    for name, content in files.items():
        if name.endswith(".pdf"):
            fonts = set(re.findall(rb"/BaseFont /([^\s/]+)", content))
            assert fonts, name
            assert all(b"DejaVuSans" in font for font in fonts)
            kinds = set(re.findall(rb"/Subtype /(Type\d|CIDFontType\d|TrueType)", content))
            assert kinds <= {b"Type0", b"CIDFontType2", b"TrueType"}, (name, kinds)
            assert content.count(b"/FontFile2") == len(fonts)


@nightly
def test_an_svg_needs_no_font_and_no_other_file(files: dict[str, bytes]) -> None:
    """Its text is drawn as outlines, and nothing is loaded from elsewhere."""
    found = [content for name, content in files.items() if name.endswith(".svg")]
    assert found
    for content in found:
        tree = ET.fromstring(content)  # noqa: S314 - our own file
        tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
        assert "text" not in tags
        assert "path" in tags
        links = [v for e in tree.iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert all(link.startswith("#") for link in links)
        assert b"<dc:date>" not in content


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
    golden = Path(__file__).parent / "golden"
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


@nightly
def test_it_writes_every_figure_in_every_format_and_says_what_it_mirrors(
    co2analysis: Command, tmp_path: Path
) -> None:
    """A line for what each mirrors, one with counts and errors, one per file; then what is left."""
    found = co2analysis("figures", "--out", str(tmp_path / "f"))
    assert found.code == 0
    blocks = re.split(r"^(?=\S+: mirrors )", found.out, flags=re.MULTILINE)[1:]
    written = re.findall(r"written (.+)", found.out)
    assert sorted(written) == sorted(str(path) for path in (tmp_path / "f").iterdir())
    assert len(written) == 3 * len(blocks)
    counts = [int(number) for number in re.findall(r"^  (\d+) published", found.out, re.MULTILINE)]
    stated = len(stated_cells())
    assert f"{sum(counts)} of {stated}" in found.out
    assert found.out.count("not drawn: ") == stated - sum(counts) > 0


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
