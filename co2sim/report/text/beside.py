"""What jobs lose that share the uplinks of a fabric."""

from collections.abc import Sequence

from co2sim.common.tables import console, print_lines, print_table
from co2sim.studies.beside import Beside

TEXTS = 2
"""Columns of texts, before those of figures."""


def columns_of(jobs: Sequence[Beside]) -> list[str]:
    """The names of the columns; of the memory only where one does not fit."""
    return [*_COLUMNS, *([] if all(job.fits_in_memory for job in jobs) else ["memory"])]


def rows_of(jobs: Sequence[Beside]) -> list[list[str]]:
    """A row for the job that was asked about, and one for each beside it."""
    memory = len(columns_of(jobs)) > len(_COLUMNS)
    return [
        [
            str(row),
            f"{job.model}, {job.name}",
            f"{job.gpus:,}",
            f"{job.leaf_nodes}",
            f"{job.step_time_s:.3g} s",
            f"{job.lost:.1%}" + ("" if job.error is None else f" ± {100 * job.error:.1f}"),
            f"{job.worst:.1%}",
            f"{job.uses:.0%}",
            f"{job.meets:.0%}",
            *([job.memory_fit if job.fits_in_memory else job.memory_fit.upper()] if memory else []),
        ]
        for row, job in enumerate(jobs, 1)
    ]


def title_of(jobs: Sequence[Beside]) -> str:
    """What the table is."""
    return (
        f"Beside each other, on the same leaves, begun at random moments (draws: {jobs[0].draws})"
    )


def files_of(files: Sequence[str]) -> list[str]:
    """Which rows are of which file: those beside the first job are from `files`."""
    rows = [(str(row), file) for row, file in enumerate(files, 2)]
    return [
        f"{', '.join(row for row, other in rows if other == file)}: {file}"
        for file in dict.fromkeys(files)
    ]


def print_beside(jobs: Sequence[Beside], files: Sequence[str]) -> None:
    """A table: the job that was asked about, and those beside it, which are from `files`."""
    out = console()
    print_lines(out, "")
    print_table(out, title_of(jobs), columns_of(jobs), rows_of(jobs), TEXTS, after=False)
    print_lines(out, *files_of(files), *LEGEND, "")


_COLUMNS = (
    "",
    "job",
    "GPUs",
    "nodes a leaf",
    "step alone",
    "speed lost",
    "at worst",
    "uplinks used",
    "with others",
)
LEGEND = (
    "step alone: on its nodes of each leaf, without the others",
    "speed lost: mean of the draws, with its standard error; at worst: largest of them",
    "uplinks used: part of the time in which it sends; with others: they do as well",
)
