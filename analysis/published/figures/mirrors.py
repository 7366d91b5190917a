"""Which figures and tables of papers are drawn, from which published cells, and how."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure

from analysis.published.cells import Quantity
from analysis.published.errors import CellPrediction
from analysis.published.figures.co2 import scalability
from analysis.published.figures.zeropp import throughput, volume


@dataclass(frozen=True, slots=True)
class Mirror:
    """A figure of ours, the `place` of a source that it mirrors, and the quantity that it shows.

    `place` is what the field `where` of its cells begins with. A number in `name` is in there, too.
    Without `draw` it shows what is published only.
    """

    name: str
    place: str
    title: str
    quantity: Quantity | Literal["quality"]
    draw: Callable[[Sequence[CellPrediction]], Figure] | None = None

    def holds(self, where: str) -> bool:
        """Whether a cell of this place is in it; figure 7 does not hold what figure 70 says."""
        rest = where.removeprefix(self.place)
        return rest != where and not rest[:1].isalnum()


_DEEPSPEED = "DeepSpeed ZeRO++ announcement, June 2023"

MIRRORS = (
    Mirror(
        "co2-table-3",
        "CO2, ICLR 2024, Table 3",
        "CO2, table 3: TransNormerLLM 7B, 8 A100 a node, 80 Gbit/s TCP/IP between nodes",
        "tokens_per_s",
        scalability,
    ),
    Mirror(
        "co2-quality-results",
        "CO2, ICLR 2024, quality results",
        "CO2, quality of trained models",
        "quality",
    ),
    Mirror(
        "co2-ablation-of-the-staleness-gap-penalty",
        "CO2, ICLR 2024, ablation of the staleness gap penalty",
        "CO2, ablation of the staleness gap penalty",
        "quality",
    ),
    *(
        Mirror(
            f"zeropp-announcement-figure-{number}",
            f"{_DEEPSPEED}, figure {number}",
            f"Announcement of ZeRO++, figure {number}: 384 V100, 16 a node",
            "tflops_per_gpu",
            throughput,
        )
        for number in (6, 7, 8)
    ),
    Mirror(
        "zeropp-announcement-table-of-communication-volume",
        f"{_DEEPSPEED}, table of communication volume",
        "Announcement of ZeRO++, table of communication volume",
        "inter_node_volume",
        volume,
    ),
)


def mirror_of(where: str, quantity: str) -> Mirror | None:
    """The figure that shows a cell of this place and quantity."""
    return next((one for one in MIRRORS if one.quantity == quantity and one.holds(where)), None)
