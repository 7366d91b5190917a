"""What every layer of the protocol shares: claims, and cells that are measured once and kept."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from joblib import Memory, Parallel, delayed, parallel_config

import analysis.convergence
from co2sim.common.progress import progress_bar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, and what was measured."""

    claim: str
    passed: bool
    measured: str


@dataclass(frozen=True, slots=True)
class Cells:
    """Measures cells in `jobs` processes. In a folder finished ones stay, if it is interrupted."""

    folder: Path | None = None
    jobs: int = 1

    def __call__(self, measure: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
        """`measure` of each tuple of arguments, in their order."""
        if self.folder is not None:
            measure = Memory(self.folder / version(), verbose=0).cache(measure)
        if self.jobs == 1:
            return [measure(*task) for task in tasks]
        measured = []
        with (
            progress_bar(f"measuring {measure.__module__}") as progress,
            parallel_config(backend="loky", inner_max_num_threads=1),
        ):
            calls = (delayed(measure)(*task) for task in tasks)
            for cell in Parallel(n_jobs=self.jobs, return_as="generator", batch_size=1)(calls):
                measured.append(cell)
                if progress:
                    progress(len(measured), len(tasks))
        return measured


def version() -> str:
    """A hash of all modules that decide what a cell holds: a change makes kept cells stale."""
    folders = [Path(__file__).parent, *map(Path, analysis.convergence.__path__)]
    modules = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    code = b"".join(path.read_bytes() for path in modules if not path.name.startswith("test_"))
    return hashlib.sha256(code).hexdigest()[:16]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
