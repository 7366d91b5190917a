"""`co2sim calibrate`: a stack fitted to runs, what they say of it as tables, and its file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from co2sim.cli import options, output
from co2sim.common.cli import print_json
from co2sim.common.errors import OptionError, given
from co2sim.common.files import is_regular, text_of, write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.report.text.screen import Screen, print_screen
from co2sim.studies.calibration import HEAD, NUMBERS, Calibrated, stack_file
from co2sim.studies.calibration import calibrate as fitted
from co2sim.studies.measured_runs import MeasuredRun, measured_runs
from co2sim.training.memory import GIB, reserved

_FAR_OFF = 0.15
"""Error of a run behind its own calibration that is worth a warning."""


@options.case_options("place", "job", "pipeline", optional=("model", "strategy"))
def calibrate(
    case: Question,
    runs: Annotated[
        Path,
        typer.Option(
            metavar="FILE.csv",
            help="One row a run: tokens_per_s_per_gpu, tokens_per_s, step_time or a trace of"
            " PyTorch's profiler, and any of model, strategy, gpus, micro_batch and the other"
            " options in which runs differ; memory_gib, if known.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE.toml", help="The stack to write, for --stack.")
    ],
    jobs: options.Jobs = -1,
    full: options.Full = False,  # noqa: FBT002
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Fit a software stack of your own to runs that you measured.

    It starts from --stack, and moves what the runs determine: the speed of kernels, the host, and
    what communication and differences between nodes cost. Predictions with it have narrower
    intervals the nearer they are to these runs.
    """
    _check_out(out)
    measured = measured_runs(runs, case)
    calibrated = fitted(measured, jobs)
    write_atomically({out: stack_file(case, measured, calibrated, runs.name)})
    if json_:
        print_json(_plain(measured, calibrated))
        return
    path = out if out.name != str(out) else f"./{out}"
    screen = _screen(case.load_stack().value.name, runs.name, measured, calibrated)
    ways = output.more(full=full, files=[out], report=False)
    print_screen(screen, f"{ways}; predict with --stack {path}", whole=full)
    if full:
        print_lines(console(), "")
        _print_details(measured, calibrated)


_OF_RUNS = ("run", "measured", "before", "after", "error before", "error after")


def _screen(
    stack: str, file: str, measured: Sequence[MeasuredRun], calibrated: Calibrated
) -> Screen:
    """The answer: how far off runs were and are, and what they say of the stack."""
    errors = [
        [
            abs(result.tokens_per_s_per_gpu / run.tokens_per_s_per_gpu - 1)
            for run, result in zip(measured, results, strict=True)
        ]
        for results in (calibrated.first, calibrated.last)
    ]
    before, after = (f"{sum(each) / len(each):.1%}" for each in errors)
    fitted_to = f"{stack}, fitted to {counted(len(measured), 'run')} of {file}"
    learned = sorted(calibrated.values, key=lambda name: -calibrated.determined[name])
    said = [f"{name} ({calibrated.determined[name]:.0%})" for name in learned[:_LEARNED]]
    return Screen(
        answer=[f"{fitted_to}: {after} off in the mean, {before} before."],
        columns=_OF_RUNS,
        table=_runs(measured, calibrated),
        rows=[
            *(("warning", text) for text in _misfits(measured, calibrated)),
            ("learned", f"{', '.join(said)}: how much of what was not known these runs say"),
        ],
        least=1,
    )


_FEW = 8
"""Runs that are all on the screen."""
_LEARNED = 4
"""Numbers that are named, those that runs say the most of."""


def _print_details(measured: Sequence[MeasuredRun], calibrated: Calibrated) -> None:
    """What the runs say of every number, and of memory."""
    shown = console()
    columns = "number", "before", "after", "learned", "meaning"
    print_table(shown, "numbers of the stack", columns, _numbers(calibrated), left=1)
    if len(measured) > _FEW:
        print_table(shown, "tokens/s of a GPU", _OF_RUNS, _runs(measured, calibrated), left=1)
    if any(run.memory for run in measured):
        title, rows = "memory that PyTorch reserves", _memories(measured, calibrated)
        print_table(shown, title, _OF_RUNS[:4], rows, left=1)
    print_lines(
        shown,
        "learned: the part of what was not known of a number that these runs say; 100 %: all of it",
        *(f"warning: {text}" for text in _misfits(measured, calibrated)),
    )


def _check_out(out: Path) -> None:
    """Refuse to write over what is no calibrated stack, such as the runs."""
    if out.suffix != ".toml":
        raise OptionError(f"--out is {given(str(out))}; it must end in .toml")
    if not out.parent.is_dir():
        raise OptionError(f"--out is {given(str(out))}; its folder does not exist")
    if out.exists() and not (is_regular(out) and text_of(out).startswith(f"# {HEAD}")):
        raise OptionError(f"--out is {given(str(out))}, which is there; give a new name")


def _misfits(runs: Sequence[MeasuredRun], calibrated: Calibrated) -> list[str]:
    """A warning for each run that no values of the numbers describe."""
    pairs = zip(runs, calibrated.last, strict=True)
    errors = {
        run.where: result.tokens_per_s_per_gpu / run.tokens_per_s_per_gpu - 1
        for run, result in pairs
    }
    return [
        f"{where} is still {error:+.0%} off: the row is wrong, or the run does something"
        " that is not modelled; intervals near it are as much wider"
        for where, error in errors.items()
        if abs(error) > _FAR_OFF
    ]


def _numbers(calibrated: Calibrated) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for n in NUMBERS:
        if n.name not in calibrated.before:
            continue
        after = calibrated.values.get(n.name, calibrated.before[n.name])
        scale, unit = (1e6, " us") if n.unit else (1.0, "")
        rows.append(
            (
                n.name,
                f"{calibrated.before[n.name] * scale:.4g}{unit}",
                f"{after * scale:.4g}{unit}",
                f"{calibrated.determined[n.name]:.0%}" if n.name in calibrated.values else "no",
                n.meaning,
            )
        )
    return rows


def _runs(runs: Sequence[MeasuredRun], calibrated: Calibrated) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for run, first, last in zip(runs, calibrated.first, calibrated.last, strict=True):
        speeds = [result.tokens_per_s_per_gpu for result in (first, last)]
        errors = [speed / run.tokens_per_s_per_gpu - 1 for speed in speeds]
        rows.append(
            (
                f"{run.where.rpartition(', ')[2]}: {_named(last)}",
                f"{run.tokens_per_s_per_gpu:,.0f}",
                *(f"{speed:,.0f}" for speed in speeds),
                *(f"{error:+.1%}" for error in errors),
            )
        )
    return rows


def _memories(runs: Sequence[MeasuredRun], calibrated: Calibrated) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for run, first, last in zip(runs, calibrated.first, calibrated.last, strict=True):
        if run.memory is not None:
            sizes = (run.memory, *(reserved(r.memory_bytes_per_gpu) for r in (first, last)))
            name = f"{run.where.rpartition(', ')[2]}: {_named(last)}"
            rows.append((name, *(f"{size / GIB:.1f} GiB" for size in sizes)))
    return rows


def _named(result: Result) -> str:
    """What tells a run from others of its model."""
    parts = [f"{result.strategy} on {counted(result.gpus, 'GPU')}"]
    parts += [f"tp {result.tp}"] if result.tp > 1 else []
    parts += [f"pp {result.pp}"] if result.pp > 1 else []
    steps = f" x {result.accumulation}" if result.accumulation > 1 else ""
    return ", ".join([*parts, f"micro-batch {result.micro_batch}{steps}"])


def _plain(runs: Sequence[MeasuredRun], calibrated: Calibrated) -> dict[str, Any]:
    return {
        "numbers": {
            name: {
                "before": before,
                "after": calibrated.values.get(name, before),
                "determined": calibrated.determined[name] if name in calibrated.values else 0.0,
            }
            for name, before in calibrated.before.items()
        },
        "runs": [
            {
                "where": run.where,
                "run": _named(last),
                "measured_tokens_per_s_per_gpu": run.tokens_per_s_per_gpu,
                "before_tokens_per_s_per_gpu": first.tokens_per_s_per_gpu,
                "after_tokens_per_s_per_gpu": last.tokens_per_s_per_gpu,
                "measured_reserved_bytes": run.memory,
                "after_reserved_bytes": reserved(last.memory_bytes_per_gpu),
            }
            for run, first, last in zip(runs, calibrated.first, calibrated.last, strict=True)
        ],
    }
