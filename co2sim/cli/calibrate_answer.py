"""`co2sim calibrate`: what runs say of a stack, as tables, and the file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from co2sim.common.files import write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted
from co2sim.prediction.case import Case
from co2sim.studies.calibration import NUMBERS, Calibrated, calibrate
from co2sim.studies.measured_runs import MeasuredRun, measured_runs
from co2sim.studies.stack_file import stack_file


def calibrating(job: Case, path: Path, out: Path, jobs: int, *, as_json: bool) -> None:
    """Fit to the rows of `path`, write the stack to `out`, and print."""
    runs = measured_runs(path, job)
    found = calibrate(runs, jobs)
    write_atomically({out: stack_file(job, runs, found, path.name)})
    if as_json:
        print(json.dumps(_plain(runs, found), indent=2))
        return
    shown = console()
    title = f"{job.load_stack().value.name}: {counted(len(runs), 'run')} of {path.name}"
    columns = "number", "before", "after", "determined", "meaning"
    print_table(shown, title, columns, _numbers(found), left=1)
    of_runs = "run", "measured", "before", "after", "error before", "error after"
    print_table(shown, "tokens/s of a GPU", of_runs, _runs(runs, found), left=1)
    print_lines(shown, f"written: {out}; predict with --stack {out}")


def _numbers(found: Calibrated) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in NUMBERS:
        if one.name not in found.before:
            continue
        after = found.values.get(one.name, found.before[one.name])
        scale, unit = (1e6, " us") if one.unit else (1.0, "")
        rows.append(
            (
                one.name,
                f"{found.before[one.name] * scale:.4g}{unit}",
                f"{after * scale:.4g}{unit}",
                f"{found.determined[one.name]:.0%}" if one.name in found.values else "no",
                one.meaning,
            )
        )
    return rows


def _runs(runs: Sequence[MeasuredRun], found: Calibrated) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for run, first, last in zip(runs, found.first, found.last, strict=True):
        speeds = [one.tokens_per_s_per_gpu for one in (first, last)]
        errors = [speed / run.tokens_per_s_per_gpu - 1 for speed in speeds]
        rows.append(
            (
                f"{run.where.rpartition(', ')[2]}: {last.strategy} on {last.gpus} GPUs",
                f"{run.tokens_per_s_per_gpu:,.0f}",
                *(f"{speed:,.0f}" for speed in speeds),
                *(f"{error:+.1%}" for error in errors),
            )
        )
    return rows


def _plain(runs: Sequence[MeasuredRun], found: Calibrated) -> dict[str, Any]:
    return {
        "numbers": {
            name: {
                "before": before,
                "after": found.values.get(name, before),
                "determined": found.determined[name] if name in found.values else 0.0,
            }
            for name, before in found.before.items()
        },
        "runs": [
            {
                "where": run.where,
                "measured_tokens_per_s_per_gpu": run.tokens_per_s_per_gpu,
                "before_tokens_per_s_per_gpu": first.tokens_per_s_per_gpu,
                "after_tokens_per_s_per_gpu": last.tokens_per_s_per_gpu,
            }
            for run, first, last in zip(runs, found.first, found.last, strict=True)
        ],
    }
