"""Figures of the papers: what is drawn is what was published and predicted, and can be read."""

import re
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from analysis.published.errors import CellPrediction
from analysis.published.figures import co2
from analysis.published.figures.mirrors import MIRRORS, Mirror, mirror_of
from analysis.published.figures.paper_figures import NotDrawn, PaperFigure, paper_figures
from analysis.published.figures.style import FORMATS, LOOKS, PLAIN, STYLE_FILE, Look
from analysis.published.figures.zeropp import throughput
from analysis.published.papers import PAPERS, papers
from analysis.published.predict import predict
from analysis.published.zeropp_cells import zeropp_cell

KEYS = ("co2", "zeropp")
SMALLEST_PRINT = 7

slow = pytest.mark.slow  # the published runs are simulated for a quarter of a minute


@pytest.fixture(scope="module")
def drawn() -> tuple[list[PaperFigure], list[NotDrawn]]:
    """All figures, predicted once, and what is in none."""
    return paper_figures(PAPERS)


@pytest.fixture(scope="module")
def figures(drawn: tuple[list[PaperFigure], list[NotDrawn]]) -> dict[str, Figure]:
    """Every figure as it is drawn, laid out."""
    found = {}
    for one in drawn[0]:
        with style.context(STYLE_FILE, after_reset=True):
            figure = one.make()
            FigureCanvasAgg(figure).draw()
        found[one.mirror.name] = figure
    return found


@pytest.fixture(scope="module")
def files(drawn: tuple[list[PaperFigure], list[NotDrawn]]) -> dict[str, bytes]:
    """Every file by its name."""
    return {name: made for one in drawn[0] for name, made in one.files(FORMATS).items()}


# --- what is drawn -------------------------------------------------------------------------------


@slow
def test_every_published_cell_is_drawn_or_named_with_its_reason(
    drawn: tuple[list[PaperFigure], list[NotDrawn]],
) -> None:
    """By place and value none is lost and none is twice; only unstated conditions keep one out."""
    stated = Counter(
        (cell["where"], cell["value"])
        for key in KEYS
        for cell in tomllib.loads((PAPERS / key / "results.toml").read_text())["cell"]
    )
    shown, left_out = drawn
    found = Counter((row.cell.where, row.cell.published) for one in shown for row in one.rows)
    found += Counter((row.where, row.value) for one in shown for row in one.alone)
    assert found + Counter((one.where, one.published) for one in left_out) == stated
    assert {one.reason for one in left_out} == {"network and micro-batch not stated"}
    assert all("abstract" in one.where for one in left_out)


@slow
def test_the_table_of_the_docs_counts_what_is_drawn(
    drawn: tuple[list[PaperFigure], list[NotDrawn]],
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


@slow
def test_a_figure_holds_cells_of_its_place_only(
    drawn: tuple[list[PaperFigure], list[NotDrawn]],
) -> None:
    """What its name says, the source says of every cell."""
    for one in drawn[0]:
        for where in (*(row.cell.where for row in one.rows), *(row.where for row in one.alone)):
            assert where.startswith(one.mirror.place)


@slow
def test_bars_and_diamonds_are_the_published_values_and_the_predictions(
    drawn: tuple[list[PaperFigure], list[NotDrawn]], figures: dict[str, Figure]
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
            for pair in sorted((row.cell.published, predict(row.cell)) for row in rows)
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
    drawn: tuple[list[PaperFigure], list[NotDrawn]], figures: dict[str, Figure]
) -> None:
    """A star for every published quality, and no sign of ours."""
    for one in drawn[0]:
        if one.alone:
            stars = [value(sign) for sign in all_signs(figures[one.mirror.name], "*")]
            assert sorted(stars) == sorted(row.value for row in one.alone)
            assert not one.rows


@slow
def test_the_lines_of_table_3_are_predictions_with_the_published_stars(
    drawn: tuple[list[PaperFigure], list[NotDrawn]], figures: dict[str, Figure]
) -> None:
    """Points at `predict` of a run on so many GPUs; a star for every published throughput."""
    (table,) = (one for one in drawn[0] if one.mirror.name == "co2-table-3")
    figure = figures["co2-table-3"]
    speeds = [row for row in table.rows if not row.cell.over]
    stars = [(float(x), float(y)) for one in all_signs(figure, "*") for x, y in one.get_xydata()]
    assert sorted(stars) == sorted((row.cell.setup.gpus, row.cell.published) for row in speeds)
    points = [point for line in co2.curves(table.rows).values() for point in line]
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xydata()) > 1]
    values = [float(y) for line in lines for y in line.get_ydata()]
    assert values == pytest.approx([predict(point.cell) for point in points])
    assert {point.cell.setup for point in points if point.cell.use == "fit"} == {
        row.cell.setup for row in speeds if row.cell.use == "fit"
    }
    hollow = [one for look in LOOKS for one in all_signs(figure, look.marker) if is_hollow(one)]
    assert len(hollow) == sum(row.cell.use == "fit" for row in speeds) > 0


@slow
def test_what_was_fitted_on_is_hollow_and_what_is_predicted_is_filled(
    drawn: tuple[list[PaperFigure], list[NotDrawn]], figures: dict[str, Figure]
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


@pytest.mark.parametrize("mirror", MIRRORS, ids=lambda mirror: mirror.name)
def test_a_name_says_what_is_mirrored(mirror: Mirror) -> None:
    """Its numbers are those that the source states; without one there is none in the name."""
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


# --- can it be read ------------------------------------------------------------------------------


def lightness(colour: str) -> float:
    """Of a colour in grey print: 0 is black."""
    return float(sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgb(colour), strict=True)))


@pytest.mark.parametrize(("one", "other"), list(combinations((*LOOKS, PLAIN), 2)))
def test_series_can_be_told_apart_in_grey(one: Look, other: Look) -> None:
    """Bars differ in hatch, lines in marker and dashes; nothing depends on colour alone."""
    assert one.hatch != other.hatch
    if PLAIN not in {one, other}:  # of bars only
        assert one.marker != other.marker
        assert one.line != other.line


def test_bars_beside_each_other_differ_in_lightness_too() -> None:
    """Of any two looks that follow each other, one is clearly darker."""
    fills = [lightness(look.fill) for look in LOOKS]
    assert all(abs(a - b) > 0.15 for a, b in pairwise(fills))
    assert all(lightness(look.colour) < 0.7 for look in LOOKS)  # seen on white


@slow
def test_no_text_is_cut_off_or_tiny_and_no_number_is_on_another(
    figures: dict[str, Figure],
) -> None:
    """All text lies in the picture; numbers, titles and labels of one figure do not overlap."""
    for name, figure in figures.items():
        check_texts(name, figure)


@pytest.mark.parametrize("panels", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [(18,), (18, 49, 91, 138)])
def test_further_cells_of_zeropp_can_be_read_too(panels: int, sizes: tuple[int, ...]) -> None:
    """Whatever numbers of links and micro-batches a table has; predictions are invented here."""
    paper = papers()["zeropp"]
    rows = [
        CellPrediction(zeropp_cell(paper, size, tokens, links, strategy, 100.0, "check"), 99.0)
        for tokens, links in [(t, n) for t in (1024, 2048) for n in (1, 2, 4, 8)][:panels]
        for size in sizes
        for strategy in ("zero3", "zeropp")
    ]
    with style.context(STYLE_FILE, after_reset=True):
        figure = throughput(rows)
        FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == panels
    check_texts("further cells", figure)


def check_texts(name: str, figure: Figure) -> None:
    """Every text is in the picture, and on no other."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    labels = {id(label) for axis in figure.axes for label in inner_ticks(axis)}
    boxes = [
        (text, Text.get_window_extent(text, renderer)) for text in texts if id(text) not in labels
    ]
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, (name, text)
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, (name, text)
        assert text.get_fontsize() >= SMALLEST_PRINT
    for (one, box), (other, beside) in combinations(boxes, 2):
        assert not box.padded(-2).overlaps(beside.padded(-2)), (name, one, other)


def inner_ticks(axis: Axes) -> list[Text]:
    """Labels of ticks that lie beyond the ends of an axis, and so are not drawn."""
    found = []
    for one, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        for tick in (*one.get_major_ticks(), *one.get_minor_ticks()):
            shown = low <= tick.get_loc() <= high and tick.label1.get_visible()
            found += [tick.label2] if shown else [tick.label1, tick.label2]
    return found


# --- files ---------------------------------------------------------------------------------------


@slow
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


@slow
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


@slow
def test_files_do_not_depend_on_the_user_or_on_other_formats(
    drawn: tuple[list[PaperFigure], list[NotDrawn]],
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
