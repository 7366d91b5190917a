"""The tables of `tasks.py`."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd
from finished_runs import Known
from reports import machine, made_by, table
from tasks_figures import draw
from tasks_plan import Delays, budget, final, methods, tasks


def write(
    out: Path, known: Known, timed: dict[str, dict[str, Any]], delays: Delays, *, quick: bool
) -> None:
    """Write tasks.csv, tasks.md and the figures."""
    frame = summary(known, timed, delays, quick=quick)
    frame.to_csv(out / "tasks.csv", index=False)
    text = report(frame, quick=quick)
    (out / "tasks.md").write_text(text, "utf-8")
    for task in tasks(quick=quick):
        (out / f"tasks-{task}.png").write_bytes(draw(task, known, delays, quick=quick))
    print(text)


def summary(
    known: Known, timed: dict[str, dict[str, Any]], delays: Delays, *, quick: bool
) -> pd.DataFrame:
    """A line for each task and method."""
    lines = []
    for task in tasks(quick=quick):
        steps = budget(task, quick=quick).steps
        for name in methods(quick=quick):
            asks = final(name, task, delays, known, quick=quick)
            rows = [known[ask.key] for ask in asks]
            losses = [float(row["validation_loss"]) for row in rows]
            step_s = timed[task][name]["step_s"]
            lines.append(
                {
                    "task": task,
                    "method": name,
                    "delay": delays[task] if asks[0].configuration.name != name else None,
                    "lr": asks[0].lr,
                    "outer": asks[0].choice,
                    "loss": mean(losses),
                    "deviation": stdev(losses),
                    "accuracy": mean(float(row["accuracy"] or "nan") for row in rows),
                    "step_ms": 1e3 * step_s,
                    "seconds": steps * step_s,
                    "late_steps": timed[task][name]["late_steps"],
                }
            )
    return pd.DataFrame(lines)


def report(frame: pd.DataFrame, *, quick: bool) -> str:
    """The tables in Markdown."""
    parts = [
        f"## {task}\n\n{table([_line(row) for _, row in rows.iterrows()])}\n"
        for task, rows in frame.groupby("task", sort=False)
    ]
    given = budget(tasks(quick=quick)[0], quick=quick)
    return f"""\
# Five tasks by six methods

{given.workers} workers, size {given.size}, {given.steps} steps of {given.batch} samples; mean and
standard deviation of the last validation loss over the seeds, learning rate and outer step chosen
with another one. A step: in a lab of {given.workers} nodes at 100 Mbit/s, with 100 ms for a local
one; the time is that of all steps. At most {frame["late_steps"].max():.1%} of the local steps took
longer than 100 ms.

{chr(10).join(parts)}
{machine()}

{made_by()}
"""


def _line(row: pd.Series) -> dict[str, str]:
    name = row["method"] + (f" ({row['delay']:.0f})" if pd.notna(row["delay"]) else "")
    right = "" if pd.isna(row["accuracy"]) else f"{row['accuracy']:.1%}"
    return {
        "method": name,
        "lr": f"{row['lr']:g}",
        "outer step": row["outer"],
        "loss": f"{row['loss']:.4f} ± {row['deviation']:.4f}",
        "right": right,
        "a step": f"{row['step_ms']:.0f} ms",
        "time": f"{row['seconds']:.1f} s",
    }
