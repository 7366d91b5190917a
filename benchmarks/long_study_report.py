"""The table and the figure of `long_study.py`: gaps to DDP, beside what the bound says."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import pandas as pd
from convergence_plan import Ask
from finished_runs import Known
from long_study_plan import COMPARED, LINES, LongStudy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from reports import machine, made_by, table

from analysis.convergence import bound
from analysis.convergence.bound import Bound
from analysis.convergence.lateness import Late
from analysis.convergence.setting import Setting
from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2
from realrun.train.figure import MARKERS
from realrun.train.outer import pairs

DDP, LOCAL = COMPARED[:2]


def write(study: LongStudy, known: Known, constants: Mapping[str, Any], out: Path) -> None:
    """Write long_study.csv, .md and .png of what is there."""
    frame = summary(study, known, constants)
    if frame.empty:
        return
    frame.to_csv(out / "long_study.csv", index=False)
    text = report(frame, study, known, constants)
    (out / "long_study.md").write_text(text)
    (out / "long_study.png").write_bytes(draw(frame))
    print(text)


def summary(study: LongStudy, known: Known, constants: Mapping[str, Any]) -> pd.DataFrame:
    """A line for each length and method of which there are runs.

    `above_ddp` is the mean over the seeds that both have, as are its ends; so is `above_local`.
    """
    lines: list[dict[str, Any]] = []
    for steps in study.lengths:
        asks = {name: study.counted(steps, name, known) for name in LINES}
        found = {name: _losses(line, known) for name, line in asks.items()}
        for name, losses in found.items():
            if not losses:
                continue
            ask = asks[name][-1]
            gaps = _gaps(losses, found[DDP])
            lines.append(
                {
                    "steps": steps,
                    "configuration": name,
                    "loss": mean(losses.values()),
                    "seeds": len(losses),
                    "lr": ask.lr,
                    "kept": ask.choice,
                    "above_ddp": mean(gaps) if gaps else math.nan,
                    "least": min(gaps, default=math.nan),
                    "most": max(gaps, default=math.nan),
                    "above_local": mean(_gaps(losses, found[LOCAL]) or [math.nan]),
                    "bound": bounded(ask, constants),
                }
            )
    return pd.DataFrame(lines)


def _losses(asks: list[Ask], known: Known) -> dict[int, float]:
    """Last validation losses by seed."""
    return {ask.seed: float(known[ask.key]["validation_loss"]) for ask in asks}


def _gaps(losses: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    return [loss - base[seed] for seed, loss in losses.items() if seed in base]


def bounded(ask: Ask, constants: Mapping[str, Any]) -> float:
    """The bound of the mean of E|grad f|^2 for a method, at the step that is best for it.

    Fragments and the gap penalty are left out, since the bound knows neither of them: all of the
    model is late, and the penalty is 1. NaN where nothing is proven: for predict = 1.
    """
    strategy, tau = parse(ask.configuration.strategy), ask.configuration.tau
    options = {name: float(value) for name, value in pairs(ask.choice).items()}
    late = None
    if isinstance(strategy, CO2) and isinstance(strategy.delay, int):
        kept = {name: options.pop(name) for name in ("keep", "predict") if name in options}
        if kept.get("predict") == 1:
            return math.nan
        late = Late(steps=strategy.delay, **kept)
    setting = Setting(
        smoothness=constants["smoothness"],
        noise=constants["noise"]["value"],
        gap=constants["gap"]["value"],
        workers=constants["workers"],
        rounds=ask.budget.steps // tau,
        local_steps=tau,
        inner_step=1.0,
        outer_step=options.get("lr", 1.0),
        momentum=options.get("momentum", 0.0),
        delay=int(isinstance(strategy, CO2)),
        late=late,
    )
    found = bound.evaluate(bound.tuned(setting))
    assert isinstance(found, Bound)
    return found.total


def report(
    frame: pd.DataFrame, study: LongStudy, known: Known, constants: Mapping[str, Any]
) -> str:
    """The tables in Markdown."""
    base, tuned = study.base, study.tuned(known)
    rows = [
        {
            "steps": f"{line['steps']:,}",
            "configuration": str(line["configuration"]),
            "loss": f"{line['loss']:.4f}",
            "above DDP": _signed(line["above_ddp"]),
            "above LocalSGD": _signed(line["above_local"]),
            "seeds": str(line["seeds"]),
            "lr": f"{line['lr']:g}",
            "outer step": str(line["kept"]) or "-",
            "bound": "-" if math.isnan(line["bound"]) else f"{line['bound']:.3g}",
        }
        for _, line in frame.iterrows()
    ]
    return f"""\
# The gap to DDP in longer trainings

Model, data, batch and warm-up are those of [the convergence study](convergence.md), and so are the\
 runs of {base.steps:,} steps. Runs of other lengths have the same schedule: {base.warmup} steps of\
 warm-up, then half a cosine to a tenth. Outer step and what is kept are the best of there. The\
 learning rate of longer runs is 0.005 for all; at 3,072 steps it is the better of 0.005 and 0.01\
 where both were tried with another seed ({tuned} of {len(COMPARED)} lines). {machine()}

*Loss* is the validation loss of the mean of the workers after the last step; *above* are means of\
 differences of the same seeds. *Bound* is that of `co2analysis bound` of the mean of E|∇f|², for\
 plain SGD with the inner step that is best for each line, with L = {constants["smoothness"]:.4g},\
 σ² = {constants["noise"]["value"]:.4g}, Δ = {constants["gap"]["value"]:.4g}, ζ = 0, as\
 `realrun train --estimate` finds them with LocalSGD in {base.steps:,} steps. It knows no\
 fragments, no gap penalty and no Adam, and it is not proven for `predict=1`.

{table(rows)}

How gaps fall: the slope of log gap over log steps between the shortest and the longest run.

{table(_slopes(frame))}

{made_by()} Every run is in long_study-runs.csv, those of {base.steps:,} steps in\
 convergence-runs.csv.
"""


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.4f}"


def excess(frame: pd.DataFrame) -> pd.DataFrame:
    """The lines that have a gap to DDP, with that of the bound as `bound_above_ddp`."""
    base = frame[frame["configuration"] == DDP].set_index("steps")["bound"]
    found = frame[(frame["configuration"] != DDP) & frame["above_ddp"].notna()].copy()
    found["bound_above_ddp"] = found["bound"] - found["steps"].map(base)
    return found


def _slopes(frame: pd.DataFrame) -> list[dict[str, str]]:
    rows = []
    for name, line in excess(frame).groupby("configuration", sort=False):
        ends = line.iloc[[0, -1]]
        run = math.log(ends["steps"].iloc[1] / ends["steps"].iloc[0])
        cells = {"configuration": str(name)}
        cells["steps"] = " to ".join(f"{steps:,}" for steps in ends["steps"])
        for title, column in (("measured", "above_ddp"), ("bound", "bound_above_ddp")):
            first, last = ends[column]
            falls = run > 0 and first > 0 and last > 0
            cells[title] = f"{math.log(last / first) / run:+.2f}" if falls else "-"
        rows.append(cells)
    return rows


def draw(frame: pd.DataFrame) -> bytes:
    """What was measured beside the bound, both above DDP's."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(10.0, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        lines = excess(frame)
        _lines(left, lines, "above_ddp")
        left.set_title("measured: validation loss above DDP's, nats per character", fontsize=9)
        _lines(right, lines, "bound_above_ddp")
        right.set_title("bound of the mean of E|∇f|² with plain SGD, above DDP's", fontsize=9)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return render(figure, "png")


def _lines(axis: Axes, lines: pd.DataFrame, column: str) -> None:
    for place, (name, line) in enumerate(lines.groupby("configuration", sort=False)):
        colour = COLOURS[place]
        axis.plot(line["steps"], line[column], color=colour, marker=MARKERS[place], label=str(name))
        if column == "above_ddp":
            axis.vlines(line["steps"], line["least"], line["most"], color=colour, linewidth=3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("steps of the training")
    steps = sorted(set(lines["steps"]))
    axis.set_xticks(steps, [f"{one:,}" for one in steps])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
