"""What jobs lose that share the uplinks of a fabric."""

from collections.abc import Sequence

from co2sim.common.tables import console, print_lines, print_table
from co2sim.studies.beside import Beside


def print_beside(jobs: Sequence[Beside], files: Sequence[str]) -> None:
    """A table: the job that was asked about, and those beside it, which are from `files`."""
    out = console()
    print_lines(out, "")
    rows = [
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
        ]
        for row, job in enumerate(jobs, 1)
    ]
    columns = [
        "",
        "job",
        "GPUs",
        "nodes a leaf",
        "step alone",
        "speed lost",
        "at worst",
        "uplinks used",
        "with others",
    ]
    title = (
        f"Beside each other, on the same leaves, begun at random moments (draws: {jobs[0].draws})"
    )
    print_table(out, title, columns, rows, 2, after=False)
    for file in dict.fromkeys(files):
        those = [str(row) for row, other in enumerate(files, 2) if other == file]
        print_lines(out, f"{', '.join(those)}: {file}")
    print_lines(out, *_LEGEND, "")


_LEGEND = (
    "step alone: on its nodes of each leaf, without the others",
    "speed lost: mean of the draws, with its standard error; at worst: largest of them",
    "uplinks used: part of the time in which it sends; with others: they do as well",
)
