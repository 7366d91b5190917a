"""The scaling figure: what it says is inside the picture, whole, and not on top of each other."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import matplotlib as mpl
import pytest
import tiny
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from co2sim import Case, simulate
from co2sim.cli.figure import draw, figure
from co2sim.published_cells import ThroughputCell
from co2sim.published_speeds import SpeedComparison
from co2sim.result import Result

LONG = "co2(tau=48, worker=node, inner=zero2, dtype=bf16, average=leader)"
NAMES = (
    LONG,
    "diloco(tau=500, fragments=4, delay=10, worker=node, inner=zero3, dtype=bf16, scale_block=512)",
    "zeropp(hpz_group=8, scale_block=1024)",
    "overlap_local_sgd(tau=48, worker=node, inner=zero1)",
    *("slowmo(tau=12, worker=node)", "zero2(bucket=8388608, owners=true)", "ddp", "zero3"),
)
MANY = tuple(range(8, 129, 8))


def published_cell(gpus: int, strategy: str) -> ThroughputCell:
    """A published throughput on the first cluster."""
    return ThroughputCell(
        where="table 1", quantity="tokens_per_s", value=20000.0, use="fit",
        cluster="c0", model="m", strategy=strategy, gpus=gpus,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result() -> Result:
    """Any result, without an interval; the figure takes no more from it than what is below."""
    found = simulate(tiny.cluster(), tiny.model(), "ddp")
    return replace(found, tokens_per_s_low=None, tokens_per_s_high=None)


def drawn(
    result: Result,
    *,
    clusters: int = 1,
    names: Sequence[str] = NAMES,
    sizes: Sequence[int] = (8, 16, 128),
    published: bool = False,
    fits: bool = True,
    cells: Sequence[ThroughputCell] = (),
) -> Figure:
    """The figure of a study with these sizes, laid out."""
    cases, results = [], []
    title = "16 nodes of 8 A100-80GB, 80 Gbit/s TCP/IP, with inter.bandwidth=25 Gbit/s, nodes=64"
    for cluster in range(clusters):
        for place, name in enumerate(names):
            for size in sizes:
                cases.append(Case(cluster=f"c{cluster}", model="m", strategy="ddp", gpus=size))
                speed = 3000.0 / (1 + place * (size > 8))
                made = replace(result, cluster=title, strategy=name, gpus=size)
                made = replace(made, tokens_per_s=speed * size, tokens_per_s_per_gpu=speed)
                results.append(replace(made, fits_in_memory=fits or size > 16))
    if published:
        cells = [published_cell(sizes[0], name) for name in names]
    with mpl.rc_context({"font.size": 9}):
        found = figure(
            cases, results, [SpeedComparison(cell, cell.strategy, 1.0) for cell in cells]
        )
        FigureCanvasAgg(found).draw()
    return found


def box(found: Figure, text: Text) -> Bbox:
    """Where a text stands, in pixels."""
    canvas = found.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    return text.get_window_extent(canvas.get_renderer())


def inside(found: Figure, text: Text) -> bool:
    """Whether all of a text is in the picture."""
    where, whole = box(found, text), found.bbox
    return bool(
        where.x0 >= whole.x0
        and where.x1 <= whole.x1
        and where.y0 >= whole.y0
        and where.y1 <= whole.y1
    )


@pytest.mark.parametrize("clusters", [1, 2, 4])
@pytest.mark.parametrize("strategies", [1, 3, 8])
@pytest.mark.parametrize("published", [True, False])
def test_every_name_is_in_the_picture(
    result: Result,
    clusters: int,
    strategies: int,
    published: bool,  # noqa: FBT001 - pytest's
) -> None:
    """Legend, titles and labels of axes are whole, and no legend hides an axis."""
    names = NAMES[:strategies]
    found = drawn(result, clusters=clusters, names=names, published=published, fits=False)
    legend = found.legends[0]
    shown = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
    expected = [*names, "hollow: does not fit in memory", *(["published"] if published else [])]
    assert shown == [*expected, "linear from the best per GPU"]
    texts = [
        *legend.get_texts(),
        *(axis.title for axis in found.axes),
        *(axis.xaxis.label for axis in found.axes),
        *(axis.yaxis.label for axis in found.axes),
        *(text for text in found.texts),
    ]
    assert all(inside(found, text) for text in texts if text.get_text())
    top = max(box(found, text).y1 for text in legend.get_texts())
    assert all(box(found, axis.xaxis.label).y0 > top for axis in found.axes if axis.get_xlabel())


@pytest.mark.parametrize(("sizes", "there"), [((8,), False), ((8, 16), True)])
def test_the_linear_line_is_in_the_legend_where_it_is_drawn(
    result: Result,
    sizes: tuple[int, ...],
    there: bool,  # noqa: FBT001 - pytest's
) -> None:
    """Not with a single size; where it is drawn it lies on top of every strategy."""
    found = drawn(result, names=["ddp"], sizes=sizes)
    labels = [text.get_text() for text in found.legends[0].get_texts()]
    assert labels == ["ddp", *(["linear from the best per GPU"] if there else [])]
    dotted = [line for line in found.axes[0].lines if line.get_linestyle() == ":"]
    assert len(dotted) == there
    others = [line.get_zorder() for line in found.axes[0].lines if line not in dotted]
    assert all(line.get_zorder() > max(others) for line in dotted)


def test_a_name_beyond_the_font_gives_no_warning(result: Result) -> None:
    """Pytest makes an error of the warning that matplotlib has for every such character."""
    case = Case(cluster="c", model="m", strategy="ddp", gpus=8)
    files = draw([case], [replace(result, cluster="\u96c6\u7fa4", gpus=8)], [])
    assert all(files[kind] for kind in ("png", "svg"))


@pytest.mark.parametrize("strategies", [1, 8])
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 4, 8), (8,), (16, 32), (8, 16, 32, 64, 128), MANY])
def test_axes_have_labels_that_can_be_read(
    result: Result, strategies: int, sizes: tuple[int, ...]
) -> None:
    """Several labelled values of throughput, however narrow; no two counts of GPUs overlap."""
    found = drawn(result, names=NAMES[:strategies], sizes=sizes)
    above, below = found.axes
    low, high = above.get_ylim()
    ticks = [value for value in above.get_yticks() if low <= value <= high]
    labels = [label.get_text() for label in above.get_yticklabels()]
    assert len(ticks) >= 3
    assert len(set(labels)) == len(labels) >= 3
    shown = [label for label in below.get_xticklabels() if label.get_text()]
    assert shown[-1].get_text() == str(sizes[-1])
    assert shown[0].get_text() == str(sizes[0])
    assert len(shown) == len(sizes) or len(shown) >= 5
    boxes = sorted(box(found, label).extents.tolist() for label in shown)
    assert all(left[2] < right[0] for left, right in pairwise(boxes))


@pytest.mark.parametrize("fits", [True, False])
def test_many_strategies_are_told_apart(result: Result, fits: bool) -> None:  # noqa: FBT001
    """No two of 24 have colour and marker in common, and the legend shows what the lines have."""
    names = [f"co2(tau={tau})" for tau in range(1, 25)]
    found = drawn(result, names=names, fits=fits)
    lines = [line for line in found.axes[0].get_lines() if line.get_markersize() == 5]
    (legend,) = found.legends
    signs = legend.get_lines()[: len(names)]
    looks = [
        (line.get_color(), line.get_marker()) for line in lines if line.get_linestyle() != "None"
    ]
    assert len(set(looks)) == len(looks) == 24
    assert looks == [(line.get_color(), line.get_marker()) for line in signs]


def test_points_that_do_not_fit_are_hollow(result: Result) -> None:
    """Of a strategy that fits from 128 GPUs on, the smaller sizes have white markers."""
    line = next(
        line
        for line in drawn(result, names=["ddp"], fits=False).axes[0].get_lines()
        if line.get_markerfacecolor() == "white"
    )
    assert list(line.get_xdata()) == [8, 16]


def test_stars_stand_where_they_were_published(result: Result) -> None:
    """A cell of 20,000 tokens/s on 8 GPUs is a star at just that place."""
    lines = drawn(result, names=["ddp"], published=True).axes[0].get_lines()
    (star,) = [line for line in lines if line.get_marker() == "*"]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([8], [20000.0])


def test_a_star_between_the_sizes_has_its_label(result: Result) -> None:
    """A cell published for 32 GPUs is marked as such in a study of 8 and 128."""
    cell = published_cell(32, "ddp")
    found = drawn(result, names=["ddp"], sizes=(8, 128), cells=[cell])
    assert [label.get_text() for label in found.axes[1].get_xticklabels()] == ["8", "32", "128"]


def test_a_name_with_a_dollar_is_no_formula(result: Result) -> None:
    """Mathematical markup is off: the name is drawn as it is."""
    case = Case(cluster="c", model="m", strategy="ddp", gpus=8)
    priced = replace(result, cluster="nodes at 2 $/h or 3 $/h", gpus=8)
    svg = draw([case], [priced], [])["svg"].decode()
    assert "<!-- nodes at 2 $/h or 3 $/h -->" in svg


def test_intervals_are_bands_in_the_colours_of_their_lines(result: Result) -> None:
    """From low to high in both rows, the lower one per GPU relative to the smallest size."""
    sizes = (8, 16)
    cases = [Case(cluster="c", model="m", strategy="ddp", gpus=size) for size in sizes]
    plain = [
        replace(result, strategy="ddp", gpus=n, tokens_per_s=100.0 * n, tokens_per_s_per_gpu=100.0)
        for n in sizes
    ]
    with_band = [
        replace(one, tokens_per_s_low=90.0 * one.gpus, tokens_per_s_high=120.0 * one.gpus)
        for one in plain
    ]
    assert not figure(cases, plain, []).axes[0].collections
    found = figure(cases, with_band, [])
    for axis, scale in zip(found.axes, ((8, 16), (0.01, 0.01)), strict=True):
        (band,) = axis.collections
        corners = {(float(x), float(y)) for path in band.get_paths() for x, y in path.vertices}
        for size, factor in zip(sizes, scale, strict=True):
            for end in (90.0, 120.0):
                assert any(corner == pytest.approx((size, end * factor)) for corner in corners)
        assert to_rgb(band.get_facecolor()[0][:3]) == to_rgb(axis.lines[0].get_color())
    assert "90 % interval" in [text.get_text() for text in found.legends[0].get_texts()]


def test_the_interval_of_a_single_size_is_a_vertical_line(result: Result) -> None:
    """A band needs two sizes."""
    one = replace(result, gpus=8, tokens_per_s_low=90.0, tokens_per_s_high=120.0)
    axis = figure([Case(cluster="c", model="m", strategy="ddp", gpus=8)], [one], []).axes[0]
    (line,) = axis.collections
    ((low, high),) = [path.vertices[:, 1] for path in line.get_paths()]
    assert (low, high) == (90.0, 120.0)
