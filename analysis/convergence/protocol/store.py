"""Measured cells: made in parallel, kept in a folder, and read again by the next run."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

from joblib import Parallel, delayed, parallel_config
from pydantic import Field, TypeAdapter
from pydantic_core import to_json

from analysis.convergence.protocol import clip_checks, controls, grid_plan, oracle, rate_fits
from analysis.convergence.protocol.clip_checks import ClippingCell, ClippingTask
from analysis.convergence.protocol.controls import ControlCell, ControlTask
from analysis.convergence.protocol.grid import GridCell, GridTask
from analysis.convergence.protocol.oracle import (
    LateOracleCell,
    LateOracleTask,
    OracleCell,
    OracleTask,
)
from analysis.convergence.protocol.rate_fits import RateCell, RateTask
from co2sim.common.errors import CatalogError
from co2sim.common.files import MAX_RECORD_BYTES, read_bytes, write_atomically
from co2sim.common.progress import Done

Task: TypeAlias = OracleTask | GridTask | RateTask | ControlTask | LateOracleTask | ClippingTask
Cell: TypeAlias = OracleCell | GridCell | RateCell | ControlCell | LateOracleCell | ClippingCell
_CELLS: TypeAdapter[Cell] = TypeAdapter(Annotated[Cell, Field(discriminator="kind")])
WING = Path(__file__).parents[1]
"""The folder of everything that decides what a cell holds."""
_MAX_JOBS = 4
"""Processes per core; more only take memory."""


def plan(*, quick: bool) -> Iterator[Task]:
    """All cells of the protocol."""
    for planned in (
        oracle.plan,
        grid_plan.plan,
        rate_fits.plan,
        controls.plan,
        oracle.late_oracle_plan,
        grid_plan.late_grid_plan,
        clip_checks.plan,
    ):
        yield from planned(quick=quick)


def measure(folder: Path, *, quick: bool, jobs: int, progress: Done | None = None) -> list[Cell]:
    """Measure all cells that `folder` does not hold yet; finished ones stay there if interrupted.

    `progress` gets how many cells are done, and how many there are. No more than four processes per
    core are started.
    """
    tasks = list(plan(quick=quick))
    made_by = version(WING)
    places = [folder / _name(task, made_by) for task in tasks]
    cells = {at: cell for at, task in enumerate(tasks) if (cell := kept(places[at], task))}
    # tasks that take long go first, so that no core waits for the last one
    missing = sorted(set(range(len(tasks))) - cells.keys(), key=lambda at: -tasks[at].work)
    tell = progress or (lambda *_: None)
    tell(len(cells), len(tasks))
    jobs = min(jobs, _MAX_JOBS * (os.cpu_count() or 1))
    with parallel_config(backend="loky", inner_max_num_threads=1):
        results = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)(
            delayed(_measured)(at, tasks[at]) for at in missing
        )
        for at, cell in results:
            write_atomically({places[at]: encoded(cell)})
            cells[at] = cell
            tell(len(cells), len(tasks))
    return [cells[at] for at in range(len(tasks))]


def kept(path: Path, task: Task) -> Cell | None:
    """The cell of a file; None without a file, if it was cut off, or is of another task.

    Raises CatalogError for what is no regular file, and for what cannot be read.
    """
    try:
        cell = _CELLS.validate_json(read_bytes(path, MAX_RECORD_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror or error}") from error
    return cell if cell.task == task else None


def encoded(cell: Cell) -> bytes:
    """The JSON that `kept` reads again; what diverged stays infinite or NaN."""
    return to_json(cell, inf_nan_mode="constants")


def _measured(at: int, task: Task) -> tuple[int, Cell]:
    return at, task.measure()


def version(folder: Path) -> str:
    """A hash of all modules in a folder: a change of any of them makes measured cells stale."""
    modules = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()


def _name(task: Task, made_by: str) -> str:
    kind = type(task).__name__.removesuffix("Task")
    key = hashlib.sha256(kind.encode() + to_json(task) + made_by.encode()).hexdigest()
    return f"{kind.lower()}-{key[:16]}.json"
