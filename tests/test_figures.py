"""What all figures share."""

import matplotlib as mpl
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from co2sim.console.figures import COLOURS, STYLE, render


def drawn(kind: str) -> bytes:
    """A small figure with a text in every colour."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.0, 2.0))
        axis = figure.subplots()
        for place, colour in enumerate(COLOURS):
            axis.plot([0, 1], [place, place], color=colour, label=f"line {place}")
        axis.legend()
        return render(figure, kind)


@pytest.mark.parametrize(
    ("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_figure_is_rendered_in_every_kind(kind: str, start: bytes) -> None:
    """As the content of a file of that kind."""
    assert drawn(kind).startswith(start)


@pytest.mark.parametrize(
    ("kind", "date"), [("png", b"tIME"), ("svg", b"dc:date"), ("pdf", b"Date")]
)
def test_the_same_figure_is_the_same_file(kind: str, date: bytes) -> None:
    """No date, and no random names inside."""
    assert drawn(kind) == drawn(kind)
    assert date not in drawn(kind)


def test_colours_differ_in_lightness_or_hue() -> None:
    """No two of the palette are alike in all three channels."""
    found = [to_rgb(colour) for colour in COLOURS]
    for place, one in enumerate(found):
        for other in found[:place]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.15
