"""What all figures share: colours, style, and how a figure becomes a file."""

import io
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart, with grey for yellow."""

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY = COLOURS

STYLE: dict[Any, Any] = {"font.size": 9, "svg.hashsalt": "co2sim"}
"""Settings for `matplotlib.rc_context`: small print, and the same bytes for the same SVG."""

GRID: dict[Any, Any] = {"axes.grid": True, "grid.alpha": 0.3}
"""Added to STYLE where values are read off the axes."""

PLAIN_TEXT: dict[Any, Any] = {"text.parse_math": False}
"""Added to STYLE where a name may hold a dollar sign, which would begin a formula."""


_DATES: dict[str, dict[Any, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""What leaves the date out, by kind of file."""


def render(figure: "Figure", kind: str, dpi: float = 150) -> bytes:
    """The content of a file of some kind, such as "png" or "svg"; the date is left out.

    A character that the font does not have becomes a box, without a warning.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from font")
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=_DATES.get(kind))
    return buffer.getvalue()
