"""The table and the figure of `convergence.py`."""

import json
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
import pandas as pd
from convergence_plan import (
    CLIP,
    TUNING_SEED,
    StudyBudget,
    configurations,
    wanted,
)
from finished_runs import Known
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from reports import machine, made_by, table

from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from realrun.train.figure import MARKERS

CURVES = (
    *("AdamW-DDP", "LocalSGD 12", "SlowMo 12", "DiLoCo 12"),
    *("CO2 delay 1, tau 12, 12 fragments", "CO2 delay 4, tau 12"),
)
"""Drawn over tokens, together with the best CO2 as published at tau 3 and at tau 12."""


def write(budget: StudyBudget, known: Known, out: Path) -> None:
    """Write convergence.csv, .md and .png of what is complete."""
    frame = summary(budget, known)
    if frame.empty:
        return
    frame.drop(columns="curve").to_csv(out / "convergence.csv", index=False)
    text = report(frame, budget, known)
    (out / "convergence.md").write_text(text)
    (out / "convergence.png").write_bytes(draw(frame))
    print(text)


def summary(budget: StudyBudget, known: Known) -> pd.DataFrame:
    """A line for each configuration whose runs are all there."""
    lines = []
    for configuration in configurations(budget):
        asks = list(wanted(configuration, budget, known))
        if any(ask.key not in known for ask in asks):
            continue
        rows = [known[ask.key] for ask in asks if ask.seed != TUNING_SEED]
        losses = [float(row["validation_loss"]) for row in rows]
        lines.append(
            {
                "configuration": configuration.name,
                "loss": mean(losses),
                "spread": stdev(losses),
                "lowest": min(losses),
                "highest": max(losses),
                "accuracy": mean(float(row["accuracy"]) for row in rows),
                "seeds": len(rows),
                "lr": float(rows[0]["lr"]),
                "outer": rows[0]["choice"] if configuration.keeps else rows[0]["outer"],
                "penalty": mean(float(row["penalty"]) for row in rows),
                "clipped": mean(float(row["clipped"]) for row in rows),
                "tuning_runs": len(asks) - len(rows),
                "curve": [json.loads(row["curve"]) for row in rows],
            }
        )
    return pd.DataFrame(lines)


def report(frame: pd.DataFrame, budget: StudyBudget, known: Known) -> str:
    """The table in Markdown."""
    facts = json.loads(next(row["facts"] for row in known.values() if row["facts"]))
    base = frame.set_index("configuration")["loss"].get("AdamW-DDP", float("nan"))
    tokens = budget.steps * budget.batch * 64
    rows = [
        {
            "configuration": line["configuration"],
            "loss": f"{line['loss']:.4f} ± {line['spread']:.4f}",
            "above DDP": f"{line['loss'] - base:+.4f}",
            "accuracy": f"{line['accuracy']:.1%}",
            "lr": f"{line['lr']:g}",
            "outer step": line["outer"] or "-",
            "Λ": "-" if line["configuration"] == "AdamW-DDP" else f"{line['penalty']:.2f}",
            "clipped": "-" if line["configuration"] == "AdamW-DDP" else f"{line['clipped']:.1%}",
        }
        for _, line in frame.iterrows()
    ]
    return f"""\
# Convergence on real text

A GPT of {facts["parameters"]:,} parameters on the characters of Python {facts["python"]}'s\
 standard library (data {facts["sha256"][:12]}), {budget.workers} workers, {budget.steps} steps of\
 {budget.batch} x 64 characters ({tokens:,} in all), AdamW, {budget.warmup} steps of warm-up,\
 cosine to a tenth. {machine()}

*Loss* is the validation loss of the mean of the workers after the last step, in nats per\
 character: mean and standard deviation of {int(frame["seeds"].max())} seeds. Learning rate and\
 outer step were tuned for each line with another seed; with a delay what is kept was tuned, too.\
 For CO2 as published the mean of the workers is the anchor, which has not seen the last round: its\
 average is still under way. *Λ* is the mean penalty, *clipped* the share of elements of the\
 momentum that were clipped, at {CLIP} x lr x tau.

{table(rows)}

{made_by()} Every run is in convergence-runs.csv.
"""


def draw(frame: pd.DataFrame) -> bytes:
    """Losses over tokens of some, and the last loss of all."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(12.0, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _curves(left, frame)
        _last(right, frame)
        return render(figure, "png")


def _curves(axis: Axes, frame: pd.DataFrame) -> None:
    lines = frame.set_index("configuration")
    shown = [name for name in CURVES if name in lines.index]
    for tau in (3, 12):  # eight lines in all, as many as there are colours
        of_tau = [name for name in lines.index if name.startswith(f"CO2 {tau},")]
        if of_tau:
            shown.append(min(of_tau, key=lambda name: float(lines.loc[name, "loss"])))
    for place, name in enumerate(shown):
        curves = lines.loc[name, "curve"]
        tokens = [at for at, _ in curves[0]]
        losses = [[loss for _, loss in at] for at in zip(*curves, strict=True)]
        colour = COLOURS[place % len(COLOURS)]
        axis.plot(
            tokens,
            [mean(at) for at in losses],
            color=colour,
            marker=MARKERS[place % len(MARKERS)],
            markersize=4,
            label=name,
        )
        axis.fill_between(
            tokens, [min(at) for at in losses], [max(at) for at in losses], color=colour, alpha=0.2
        )
    lowest, highest = frame["lowest"].min(), frame["highest"].max()
    axis.set_ylim(lowest - 0.05, highest + 0.6)
    axis.set_xlabel("tokens of all workers")
    axis.set_ylabel("validation loss, nats per character")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_title(
        "Best CO2 as published at tau 3 and 12, and others: mean and range of the seeds", fontsize=9
    )
    axis.legend(frameon=False, fontsize=8)


def _last(axis: Axes, frame: pd.DataFrame) -> None:
    places = range(len(frame))[::-1]
    axis.hlines(places, frame["lowest"], frame["highest"], color=COLOURS[0], linewidth=3, alpha=0.4)
    axis.plot(frame["loss"], places, "o", color=COLOURS[0], markersize=5)
    axis.set_yticks(places, frame["configuration"])
    base = frame.loc[frame["configuration"] == "AdamW-DDP", "loss"]
    if len(base):
        axis.axvline(float(base.iloc[0]), color="grey", linestyle=":", linewidth=1)
    axis.set_xlabel("validation loss after the last step: mean and range of the seeds")
