"""Many cases, in order, with a progress bar, on one process or several."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from co2sim.case import Case
from co2sim.errors import Co2simError, OptionError
from co2sim.result import Result
from co2sim.strategies.step import title
from co2sim.study import run


def run_all(cases: Sequence[Case], jobs: int) -> list[Result]:
    """The results of `cases`. The first that fails ends it all: its error names the case."""
    if jobs == 0 or jobs < -1:
        raise OptionError(f"jobs is {jobs}; it must be -1 (all cores), or 1 or more")
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        return list(bar.track(_results(cases, jobs), total=len(cases)))


def _results(cases: Sequence[Case], jobs: int) -> Iterator[Result]:
    if jobs == 1 or len(cases) == 1:
        yield from map(_run, cases)
        return
    from joblib import Parallel, delayed  # noqa: PLC0415 - 0.1 s that one process does not need

    work = (delayed(_run_in)(Path.cwd(), case) for case in cases)
    yield from Parallel(n_jobs=jobs, return_as="generator")(work)


def _run_in(folder: Path, case: Case) -> Result:
    """Workers outlive a call: paths of files are relative to the folder of the caller."""
    os.chdir(folder)
    return _run(case)


def _run(case: Case) -> Result:
    try:
        return run(case)
    except Co2simError as error:
        strategy = case.strategy if isinstance(case.strategy, str) else title(case.strategy)
        raise type(error)(f"{strategy} on {case.gpus or 'all'} GPUs: {error}") from error
