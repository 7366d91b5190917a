"""The figure of `elastic.py`: losses through a kill beside undisturbed ones."""

import io
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.figure import Figure

_BACKGROUND = "#f2f2f2"


@dataclass(frozen=True)
class Curve:
    """Validation losses by step, and the steps at which a worker was lost and came back."""

    steps: list[int]
    losses: list[float]
    lost: list[int]
    back: list[int]


def draw(curves: Mapping[str, tuple[Curve, Curve]], tau: int) -> bytes:
    """A panel for each method, as PNG: undisturbed, and with one worker killed."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.4 * len(curves), 3.2), layout="constrained")
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, (method, (calm, hit)) in zip(panels, curves.items(), strict=True):
            for lost, back in zip(hit.lost, [*hit.back, hit.steps[-1]], strict=False):
                axes.axvspan(lost, back, color=_BACKGROUND, label="three of four workers train")
            axes.plot(calm.steps, calm.losses, color="#0072b2", lw=1.6, label="undisturbed")
            axes.plot(
                hit.steps, hit.losses, color="#d55e00", lw=1.2, ls="--", label="a worker killed"
            )
            axes.set_title(f"{method}, rounds of {tau} steps")
            axes.set_xlabel("local steps")
            axes.grid(axis="y", color="#dddddd", lw=0.5)
        panels[0].set_ylabel("validation loss, nats per character")
        panels[0].legend(frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=160)
    return out.getvalue()
