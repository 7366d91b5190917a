"""The table and the figure of `time_to_loss.py`."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from reports import table

from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from realrun.train import LogRow


def times(frame: pd.DataFrame) -> str:
    """The table in Markdown."""
    return table([_cells(line) for _, line in frame.iterrows()])


def _cells(r: "pd.Series[str]") -> dict[str, str]:
    missing = pd.isna(r["predicted_s"]) or pd.isna(r["measured_s"])
    steps = "-" if pd.isna(r["steps"]) else f"{r['steps']:.0f}"
    seconds = ["-"] * 3
    if not missing:
        if r["steps"] != r["measured_steps"]:
            steps += f" (in the lab {r['measured_steps']:.0f})"
        error = r["predicted_s"] / r["measured_s"] - 1
        seconds = [f"{r['predicted_s']:.1f}", f"{r['measured_s']:.1f}", f"{error:+.1%}"]
    return {
        "rate": r["rate"],
        "strategy": f"`{r['strategy']}`",
        "steps": steps,
        "local step ms": f"{r['local_step_s'] * 1e3:.1f}",
        "step ms: predicted": f"{r['predicted_step_s'] * 1e3:.1f}",
        "step ms: measured": f"{r['measured_step_s'] * 1e3:.1f}",
        "time to loss: predicted s": seconds[0],
        "time to loss: measured s": seconds[1],
        "error": seconds[2],
    }


def draw(
    frame: pd.DataFrame,
    curves: Mapping[tuple[str, str], tuple[Sequence[LogRow], float]],
    rates: Sequence[str],
) -> bytes:
    """Loss over wall-clock for every rate: measured lines, predicted ones dashed."""
    names = list(dict.fromkeys(frame["entry"]))
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(max(7.8, 5.2 * len(rates)), 4.4), layout="constrained")
        axes = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
        for axis, rate in zip(axes, rates, strict=True):
            for place, name in enumerate(names):
                rows, step = curves[rate, name]
                seen = [row for row in rows if row.validation_loss is not None]
                losses = [row.validation_loss or 0.0 for row in seen]
                colour = COLOURS[place]
                axis.plot(
                    [row.seconds for row in seen], losses, color=colour, label=f"{name}, measured"
                )
                axis.plot(
                    [row.step * step for row in seen],
                    losses,
                    color=colour,
                    linestyle="--",
                    label=f"{name}, predicted",
                )
            axis.axhline(frame["target"].iloc[0], color="grey", linestyle=":", linewidth=1)
            axis.set_xlim(left=0)
            axis.set_title(rate, fontsize=9)
            axis.set_xlabel("seconds")
        axes[0].set_ylabel("validation loss, nats per character")
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(names),
            frameon=False,
        )
        return render(figure, "png")
