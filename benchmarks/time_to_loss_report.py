"""The tables and the figure of `time_to_loss.py`."""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reports import installed as version
from reports import machine, made_by, table
from time_to_loss_plan import (
    CONTENDERS,
    Known,
    Plan,
    curve,
    delay_at,
    free_ask,
    installed,
    lab_asks,
    reached,
    target_of,
)

from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from realrun.train.shapes import GPTS

MARKERS = "os^v<>DPX*"


def write(plan: Plan, known: Known, out: Path, results: Path) -> None:
    """Write time_to_loss.csv, .md and .png of the runs that are there."""
    frame = pd.DataFrame(lines(plan, known, results))
    words = report(plan, known, frame, target_of(plan, known, results))
    frame.drop(columns="curve").to_csv(out / "time_to_loss.csv", index=False)
    (out / "time_to_loss.md").write_text(words)
    (out / "time_to_loss.png").write_bytes(draw(frame, target_of(plan, known, results)))
    print(words)


def lines(plan: Plan, known: Known, results: Path) -> Iterator[dict[str, Any]]:
    """A line for each run in a lab: what was predicted, and what was measured."""
    target = target_of(plan, known, results)
    for rate in plan.rates:
        delay = delay_at(plan, known, rate)
        for ask in lab_asks(plan, known, results, rate):
            row = known.get(ask.key(plan))
            if row is None or ask.entry.calibrates:
                continue
            free = known[free_ask(ask.entry, ask.seed, delay).key(plan)]
            before = reached(curve(free), target)
            after = None if row["error"] else reached(curve(row), target)
            predicted = before[0] * row["predicted_step_s"] if before else None
            yield {
                "rate": rate,
                "method": ask.entry.name,
                "seed": ask.seed,
                "strategy": ask.entry.strategy,
                "lr": ask.entry.lr,
                "outer": ask.entry.outer,
                "target": target,
                "local_step_s": row["local_step_s"],
                "interference": row["interference"],
                "steps": before[0] if before else None,
                "measured_steps": after[0] if after else None,
                "predicted_step_s": row["predicted_step_s"],
                "measured_step_s": row["step_s"],
                "predicted_s": predicted,
                "measured_s": after[1] if after else None,
                "error": predicted / after[1] - 1 if predicted and after else None,
                "waited_s": row["waited"],
                "rounds": row["rounds"],
                "predicted_delay": delay if ask.entry.measures_delay else None,
                "delay": row["used_delay"],
                "failed": row["error"],
                "curve": [] if row["error"] else curve(row),
            }


def report(plan: Plan, known: Known, frame: pd.DataFrame, target: float) -> str:
    """The tables in Markdown, and what they are about."""
    del known
    shape = GPTS[plan.size]
    chosen = "given" if plan.target else "the worst that one of the runs without a lab ends with"
    absent = [one.name for one in CONTENDERS if not installed(one)]
    notes = [f"{', '.join(absent)}: torchft is not installed."] if absent else []
    notes += [f"{r['method']} at {r['rate']}: {r['failed']}." for r in _failed(frame)]
    return f"""\
# Time to a loss in the lab

A GPT of {shape.parameters:,} parameters, {plan.nodes} nodes of one rank, {plan.batch} x\
 {shape.context} characters a step, learning rates for {plan.steps} steps, seeds\
 {", ".join(map(str, plan.seeds))}. The loss to reach is {target:.4f} nats per character, {chosen};\
 validated every {plan.every} steps. Predicted before: steps from a run without a lab, a local step\
 from a calibration in the lab where nothing is sent, communication by co2sim from the stated rate.\
 Means over seeds, ± the standard deviation. torchft-nightly: {version("torchft-nightly")}.\
 {machine()}

{table([cells for rate in plan.rates for cells in _times(frame[frame["rate"] == rate])])}

{chr(10).join(_ranking(frame[frame["rate"] == rate]) for rate in plan.rates)}

{_hidden(frame)}

{" ".join(notes)}

{made_by()}
"""


def _failed(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [dict(row) for row in frame[frame["failed"] != ""].to_dict("records")]


def _by_method(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(name, frame[frame["method"] == name]) for name in dict.fromkeys(frame["method"])]


def _times(frame: pd.DataFrame) -> Iterator[dict[str, str]]:
    """The lines of a rate, as they are ranked."""
    groups = _by_method(frame)
    for name, group in sorted(groups, key=lambda pair: pair[1]["measured_s"].mean()):
        whole = group.dropna(subset=["predicted_s", "measured_s"])
        steps = f"{whole['steps'].mean():.0f}"
        if (whole["steps"] != whole["measured_steps"]).any():
            steps += f" (in the lab {whole['measured_steps'].mean():.0f})"
        errors = whole["predicted_s"].mean() / whole["measured_s"].mean() - 1
        missing = len(group) - len(whole)
        yield {
            "rate": group["rate"].iloc[0],
            "method": name + (f" ({missing} of {len(group)} did not reach it)" if missing else ""),
            "schedule": f"`{group['strategy'].iloc[0]}`",
            "steps": steps if len(whole) else "-",
            "local step ms": _ms(group["local_step_s"]),
            "step ms: predicted": _ms(group["predicted_step_s"]),
            "step ms: measured": _ms(group["measured_step_s"]),
            "time to loss: predicted s": _spread(whole["predicted_s"]),
            "time to loss: measured s": _spread(whole["measured_s"]),
            "error": f"{errors:+.1%}" if len(whole) else "-",
            "error by seed": ", ".join(f"{error:+.1%}" for error in whole["error"]) or "-",
        }


def _ms(seconds: "pd.Series[float]") -> str:
    return f"{seconds.mean() * 1e3:.1f}"


def _spread(values: "pd.Series[float]") -> str:
    if not len(values):
        return "-"
    return f"{values.mean():.1f}" + (f" ± {values.std():.1f}" if len(values) > 1 else "")


def _ranking(frame: pd.DataFrame) -> str:
    """Who is first, measured and predicted."""
    means = frame.groupby("method")[["measured_s", "predicted_s"]].mean().dropna()
    if means.empty:
        return ""
    measured = means["measured_s"].sort_values()
    ahead = ""
    if len(measured) > 1:
        ahead = f" The first takes {1 - measured.iloc[0] / measured.iloc[1]:.1%} less than the next"
        ahead += f" ({measured.index[1]})."
    before = ", ".join(means["predicted_s"].sort_values().index)
    return (
        f"{frame['rate'].iloc[0]}, measured: {', '.join(measured.index)}.{ahead} Predicted:"
        f" {before}.\n"
    )


def _hidden(frame: pd.DataFrame) -> str:
    """What was hidden of the averages of CO2 that chose its delay, beside what LocalSGD waited."""
    rows = []
    for rate in dict.fromkeys(frame["rate"]):
        runs = frame[frame["rate"] == rate]
        ours, blocking = runs[runs["predicted_delay"].notna()], runs[runs["method"] == "LocalSGD"]
        if ours.empty:
            continue
        waited = ours["waited_s"].sum() / ours["rounds"].sum()
        cells = {
            "rate": rate,
            "delay: co2sim": f"{ours['predicted_delay'].iloc[0]:.0f}",
            "delay: training, by seed": ", ".join(f"{value:.0f}" for value in ours["delay"]),
            "waited per average ms": f"{waited * 1e3:.1f}",
        }
        if len(blocking):
            took = blocking["waited_s"].sum() / blocking["rounds"].sum()
            cells["LocalSGD waited ms"] = f"{took * 1e3:.1f}"
            cells["hidden"] = f"{1 - waited / took:.1%}"
            alone = blocking["predicted_step_s"] - blocking["local_step_s"]
            said = mean(alone) * _tau(blocking)
            cells["an average by co2sim ms"] = f"{said * 1e3:.1f}"
            cells["hidden of that"] = f"{1 - waited / said:.1%}"
        rows.append(cells)
    if not rows:
        return ""
    return f"""\
What CO2 with the delay that it measured hid of its averages, all of them counted, the first ones,\
 too, which it measures:

{table(rows)}"""


def _tau(frame: pd.DataFrame) -> int:
    return int(str(frame["strategy"].iloc[0]).partition("tau=")[2].partition(",")[0])


def draw(frame: pd.DataFrame, target: float) -> bytes:
    """Loss over wall-clock for every rate: lines of the first seed, and all times to the loss."""
    rates = list(dict.fromkeys(frame["rate"]))
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(max(7.8, 5.2 * len(rates)), 5.2), layout="constrained")
        axes = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
        for axis, rate in zip(axes, rates, strict=True):
            _draw_rate(axis, frame[frame["rate"] == rate], target)
            axis.set_title(rate, fontsize=9)
        axes[0].set_ylabel("validation loss, nats per character")
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            frameon=False,
        )
        return render(figure, "png")


def _draw_rate(axis: Axes, frame: pd.DataFrame, target: float) -> None:
    """Filled markers: measured; open ones, below: predicted."""
    for place, (name, group) in enumerate(_by_method(frame)):
        points = group["curve"].iloc[0]
        look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        axis.plot(
            [seconds for _, seconds, _ in points],
            [loss for _, _, loss in points],
            label=name,
            markersize=4,
            markevery=(len(points) // 2, max(1, len(points))),
            linewidth=1,
            **look,
        )
    axis.axhline(target, color="grey", linestyle=":", linewidth=1)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds")
