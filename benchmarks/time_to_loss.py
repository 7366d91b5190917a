"""Wall-clock to a given loss in the lab: predicted by co2sim before, measured after.

    sudo python benchmarks/time_to_loss.py                # an hour on two quiet cores
    sudo python benchmarks/time_to_loss.py --seeds 2      # two thirds of it
    sudo python benchmarks/time_to_loss.py --quick        # a trial of seconds

torch's DDP and post-local SGD, torchft's LocalSGD and DiLoCo, and our LocalSGD, SlowMo, DiLoCo,
Streaming DiLoCo and CO2, as published and with a delay that it measures, train the same GPT from
the same weights on the same samples, on four nodes at 100 and at 1000 Mbit/s, in rounds of 12 steps
(CO2 with a delay also in the shortest that co2sim finds hidden). A local step takes 100 ms, as on a
device of a known speed: what its arithmetic leaves of that is waited for before anything is sent.

What goes into a prediction is known before the run begins:

- how many steps the loss takes: from a run of the same training and seed without a lab;
- the time of a local step: from calibrations in the lab before each seed. In one nothing is sent
  (also in DDP, and by CO2 whose workers do not average); one in which something is sent all
  the time tells how much that slows the steps down; one with an average after each step what the
  network attains of its stated rate; one with tensors of hardly any bytes what the cores need for
  the messages of torchft's LocalSGD. Cores and network work at the same time: the slower counts;
- all communication: by co2sim, from the rate of the lab and what is attained of it. Methods of
  torch and torchft have the schedule of the strategy that does the same.

The loss to reach is the worst with which a run without a lab ends (--target gives another): CO2 as
published is run first, and the others end soon after they have come as low. Between two validations
the loss is taken to fall evenly. Learning rates and outer steps are those of convergence.csv.
Seconds are rank 0's, without validation; waits are those of the rank that waited least.

Each finished run is a row of time_to_loss-runs.csv; what is there is not run again: remove the file
to measure again. Writes time_to_loss.csv, time_to_loss.md and time_to_loss.png.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reports import RESULTS, folder, machine, made_by, parser, table
from reports import installed as version
from time_to_loss_plan import (
    CONTENDERS,
    FREE,
    Known,
    Plan,
    curve,
    free_ask,
    installed,
    lab_asks,
    next_run,
    reached,
    read,
    target_of,
)
from time_to_loss_runs import run_ranks

from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from realrun.lab.lab import Lab, run_lab
from realrun.launch.launcher import run_local
from realrun.train.tasks.presets import GPTS


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
        for ask in lab_asks(plan, known, results, rate):
            row = known.get(ask.key(plan))
            if row is None or ask.entry.calibrates:
                continue
            free = free_ask(plan, ask)
            before = reached(curve(known[free.key(plan)]), target)
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
                "efficiency": row["efficiency"],
                "steps": before[0] if before else None,
                "measured_steps": after[0] if after else None,
                "predicted_step_s": row["predicted_step_s"],
                "measured_step_s": row["step_s"],
                "predicted_s": predicted,
                "measured_s": after[1] if after else None,
                "error": predicted / after[1] - 1 if predicted and after else None,
                "waited_s": row["waited"],
                "rounds": row["rounds"],
                "predicted_delay": free.delay or None,
                "delay": row["used_delay"],
                "late_steps": row["late_steps"],
                "curve": [] if row["error"] else curve(row),
            }


def report(plan: Plan, known: Known, frame: pd.DataFrame, target: float) -> str:
    """The tables in Markdown, and what they are about."""
    shape = GPTS[plan.size]
    chosen = "given" if plan.target else "the worst that one of the runs without a lab ended with"
    absent = [one.name for one in CONTENDERS if not installed(one)]
    notes = [f"{', '.join(absent)}: torchft is not installed."] if absent else []
    failed = [row for row in known.values() if row["plan"] == plan.label and row["error"]]
    notes += [f"{r['name']}, {r['where']}, seed {r['seed']}: {r['error']}." for r in failed]
    return f"""\
# Time to a loss in the lab

A GPT of {shape.parameters:,} parameters, {plan.nodes} nodes of one rank, {plan.batch} x\
 {shape.context} characters a step, learning rates for {plan.steps} steps, seeds\
 {", ".join(map(str, plan.seeds))}. The loss to reach is {target:.4f} nats per character, {chosen};\
 validated every {plan.every} steps, with a straight line between. A local step takes\
 {plan.pace * 1e3:g} ms, as on a device of a known speed: what its arithmetic leaves of that is\
 waited for ({frame["late_steps"].mean():.1%} of the steps took longer by themselves; at most\
 {frame["late_steps"].max():.1%} in a run). Predicted before: steps from a\
 run without a lab; a local step, how much sending slows it down, and what the network attains of\
 its stated rate, from calibrations in the lab, as are the averages of torchft's LocalSGD beside\
 their bytes; communication by co2sim.\
 Means over seeds, ± the standard deviation. torchft-nightly: {version("torchft-nightly")}.\
 {machine()}

{table([cells for rate in plan.rates for cells in _times(frame[frame["rate"] == rate])])}

{chr(10).join(_ranking(frame[frame["rate"] == rate]) for rate in plan.rates)}

{_hidden(frame)}

{" ".join(notes)}

{made_by()}
"""


def _by_method(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(name, frame[frame["method"] == name]) for name in dict.fromkeys(frame["method"])]


def _times(frame: pd.DataFrame) -> Iterator[dict[str, str]]:
    """The lines of a rate, as they are ranked."""
    groups = _by_method(frame)
    for name, group in sorted(groups, key=lambda pair: pair[1]["measured_s"].mean()):
        whole = group.dropna(subset=["predicted_s", "measured_s"])
        steps = f"{whole['steps'].mean():.0f}"
        if ((whole["steps"] - whole["measured_steps"]).abs() > 1).any():
            steps += f" (in the lab {whole['measured_steps'].mean():.0f})"
        errors = whole["predicted_s"].mean() / whole["measured_s"].mean() - 1
        missing = len(group) - len(whole)
        yield {
            "rate": group["rate"].iloc[0],
            "method": name + (f" ({missing} of {len(group)} did not reach it)" if missing else ""),
            "schedule": f"`{group['strategy'].iloc[0]}`",
            "steps": steps if len(whole) else "-",
            "local step ms": _ms(group["local_step_s"]),
            "rate attained": f"{group['efficiency'].mean():.0%}",
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
    chosen = frame[frame["predicted_delay"].notna()]
    rows = [
        _hidden_cells(rate, name, group, frame[frame["rate"] == rate])
        for (rate, name), group in chosen.groupby(["rate", "method"], sort=False)
    ]
    if not rows:
        return ""
    return f"""\
What was hidden of the averages of a round where training chose the delay. All rounds count, the\
 first ones, too, in which it is measured. *Waited* is the least that one of the ranks waited: the\
 others waited for slower ranks, too:

{table(rows)}"""


def _hidden_cells(rate: str, name: str, ours: pd.DataFrame, runs: pd.DataFrame) -> dict[str, str]:
    waited = ours["waited_s"].sum() / ours["rounds"].sum()
    cells = {
        "rate": rate,
        "method": name,
        "delay: co2sim": f"{ours['predicted_delay'].iloc[0]:.0f}",
        "delay: training, by seed": ", ".join(f"{value:.0f}" for value in ours["delay"]),
        "waited in a round ms": f"{waited * 1e3:.1f}",
    }
    blocking = runs[runs["method"] == "LocalSGD"]
    if blocking.empty:
        return cells
    took = blocking["waited_s"].sum() / blocking["rounds"].sum()
    alone = (blocking["predicted_step_s"] - blocking["local_step_s"]).mean() * _tau(blocking)
    return {
        **cells,
        "LocalSGD waited ms": f"{took * 1e3:.1f}",
        "hidden of that": f"{1 - waited / took:.1%}",
        "an average by co2sim ms": f"{alone * 1e3:.1f}",
        "hidden of this": f"{1 - waited / alone:.1%}",
    }


def _tau(frame: pd.DataFrame) -> int:
    return int(str(frame["strategy"].iloc[0]).partition("tau=")[2].partition(",")[0])


def draw(frame: pd.DataFrame, target: float) -> bytes:
    """Above: the loss of the first seed over wall-clock. Below: all times to the loss."""
    rates = list(dict.fromkeys(frame["rate"]))
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(5.2 * max(2, len(rates)), 7.2), layout="constrained")
        axes = figure.subplots(2, len(rates), squeeze=False, height_ratios=(3, 2))
        for (above, below), rate in zip(axes.T, rates, strict=True):
            runs = frame[frame["rate"] == rate]
            above.set_title(rate, fontsize=9)
            _draw_losses(above, runs, target)
            _draw_times(below, runs)
        axes[0][0].set_ylabel("validation loss, nats per character")
        figure.legend(
            *axes[0][0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            frameon=False,
        )
        return render(figure, "png")


def _draw_losses(axis: Axes, frame: pd.DataFrame, target: float) -> None:
    for name, group in _by_method(frame):
        points = group["curve"].iloc[0]
        axis.plot(
            [seconds for _, seconds, _ in points],
            [loss for _, _, loss in points],
            label=name,
            color=_colour(name),
            linestyle="--" if name.startswith("torch") else "-." if name.startswith("CO2") else "-",
            linewidth=1.2,
        )
    axis.axhline(target, color="grey", linestyle=":", linewidth=1)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds")


def _draw_times(axis: Axes, frame: pd.DataFrame) -> None:
    """A line for each method, the fastest on top; every seed is a point."""
    groups = sorted(_by_method(frame), key=lambda pair: -pair[1]["measured_s"].mean())
    for height, (name, group) in enumerate(groups):
        for column, filled in (("measured_s", True), ("predicted_s", False)):
            axis.plot(
                group[column],
                [height] * len(group),
                linestyle="",
                marker="o",
                color=_colour(name),
                markerfacecolor=_colour(name) if filled else "none",
                markersize=4 if filled else 7,
            )
    axis.set_yticks(range(len(groups)), [name for name, _ in groups], fontsize=7)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds to the loss: dots measured, rings predicted")


def _colour(name: str) -> str:
    names = [one.name for one in CONTENDERS]
    return COLOURS[names.index(name) % len(COLOURS)]


def main() -> None:
    """Start the ranks, or be one of them; then write what is there."""
    command = parser(__doc__, "two methods, the smallest model on two nodes, 24 steps, one rate")
    usual = Plan()
    command.add_argument("--steps", type=int, default=usual.steps)
    command.add_argument("--seeds", type=int, default=len(usual.seeds), help="how many")
    command.add_argument("--target", type=float, default=0.0, help="the loss to reach")
    command.add_argument("--report", action="store_true", help="run nothing, only write the table")
    command.add_argument("--where", default="", help=argparse.SUPPRESS)  # for the ranks
    given = command.parse_args()
    if given.seeds < 1:
        command.error(f"--seeds is {given.seeds}; it must be at least 1")
    if given.steps < 2 * usual.every or given.steps % usual.every:
        command.error(
            f"--steps is {given.steps}; it must be a multiple of {usual.every}, at least twice it"
        )
    plan = (
        Plan.small()
        if given.quick
        else replace(usual, steps=given.steps, seeds=tuple(range(given.seeds)), target=given.target)
    )
    with folder(given) as out:
        if given.where:
            run_ranks(plan, out, RESULTS, given.where)
            return
        code = 0
        for where in (FREE, *plan.rates):
            code = code or (0 if given.report else run_missing(plan, out, where))
        if code:
            sys.exit(code)
        if next_run(plan, read(out), RESULTS, FREE) is not None:
            command.error(f"--report: {out} does not hold all runs without a lab")

        write(plan, read(out), out, RESULTS)


def run_missing(plan: Plan, out: Path, where: str) -> int:
    """Start the ranks there until no run is missing; the exit code.

    A run that fails ends them: it is noted, and not repeated.
    """
    ranks = [sys.executable, __file__, *sys.argv[1:], "--out", str(out), "--where", where]
    while next_run(plan, known := read(out), RESULTS, where) is not None:
        if where == FREE:
            code = run_local(ranks, plan.nodes)
        else:
            code = run_lab(ranks, Lab(plan.nodes, 1, where))
        if code > 1 or (code and len(read(out)) == len(known)):
            return code  # control-C, or no run at all
    return 0


if __name__ == "__main__":
    main()
