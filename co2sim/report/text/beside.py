"""What jobs lose that share the uplinks of a fabric."""

from collections.abc import Sequence

from co2sim.common.tables import console, print_lines, print_table
from co2sim.studies.beside import Beside


def print_beside(jobs: Sequence[Beside]) -> None:
    """A table: the job that was asked about, and those beside it."""
    out = console()
    print_lines(out, "")
    rows = [
        [
            job.name,
            f"{job.gpus:,}",
            f"{job.step:.3g} s",
            f"{job.lost:.1%}",
            f"{job.worst:.1%}",
            f"{job.uses:.0%}",
            f"{job.meets:.0%}",
        ]
        for job in jobs
    ]
    columns = ["job", "GPUs", "step alone", "loses", "at worst", "uplinks used", "with others"]
    title = "Beside each other, on the same leaves, begun at random moments"
    print_table(out, title, columns, rows)
