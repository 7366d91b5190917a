"""The figure of a training: loss against steps, tokens and wall-clock."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from realrun.train.log import LogRow

MARKERS = "osD^vP*X"

_AXES = {"step": "step", "tokens": "{}s of all ranks", "seconds": "seconds, without validation"}
_PALE = 0.35


def draw(
    runs: Mapping[str, Sequence[LogRow]],
    title: str,
    unit: str = "token",
    loss: str = "cross-entropy, nats per token",
) -> bytes:
    """A PNG, a colour for each run: pale its training loss, with markers its validation loss."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(11.0, 3.9), layout="constrained")
        axes = figure.subplots(1, len(_AXES), sharey=True)
        for axis, (name, label) in zip(axes, _AXES.items(), strict=True):
            for place, (run, rows) in enumerate(runs.items()):
                _lines(axis, name, rows, f"{run}: " if len(runs) > 1 else "", place)
            axis.set_xlabel(label.format(unit))
            axis.set_xlim(left=0)
            if name != "seconds":
                axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[0].set_ylabel(loss)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(title if len(runs) > 1 else f"{next(iter(runs))}: {title}")
        return render(figure, "png")


def _lines(axis: Axes, name: str, rows: Sequence[LogRow], prefix: str, place: int) -> None:
    colour = COLOURS[place % len(COLOURS)]
    seen = [row for row in rows if row.validation_loss is not None]
    axis.plot(
        [getattr(row, name) for row in rows],
        [row.train_loss for row in rows],
        color=colour,
        alpha=_PALE,
        linewidth=1,
        label=f"{prefix}training, rank 0",
    )
    axis.plot(
        [getattr(row, name) for row in seen],
        [row.validation_loss for row in seen],  # type: ignore[arg-type]
        color=colour,
        marker=MARKERS[place % len(MARKERS)],
        markersize=4,
        label=f"{prefix}validation, mean of the workers",
    )
