"""How well every strategy learns from the same tokens: four workers, real text, tuned rates.

    python benchmarks/convergence.py            # about an hour on two cores; go on with the same
    python benchmarks/convergence.py --quick    # three configurations, too short to mean anything

Every configuration is tuned with a seed of its own on the final validation loss: the learning rate
on a grid of factors of 2, extended while the best is at its edge, then the outer step on a small
grid at that rate. The best is run with three other seeds. All runs share one launch of the ranks.

Each finished run is a row of convergence-runs.csv; what is there is not run again. Writes
convergence.csv, convergence.md and convergence.png.
"""

import os
import sys
from functools import partial

from convergence_launch import complete
from convergence_plan import RUNS, StudyBudget, study
from finished_runs import read
from reports import folder, parser


def main() -> None:
    """Start the ranks, or be one of them; then write what is complete."""
    command = parser(__doc__, "three configurations of a tiny model, in seconds")
    command.add_argument("--report", action="store_true", help="run nothing, only write the table")
    given = command.parse_args()
    budget = StudyBudget.small() if given.quick else StudyBudget()
    plan = partial(study, budget)
    with folder(given) as out:
        path = out / RUNS
        if "RANK" in os.environ:
            from convergence_runs import run_ranks  # noqa: PLC0415 - torch, for the ranks alone

            run_ranks(plan, path)
            return
        code = 0 if given.report else complete(plan, path, budget.workers)
        from convergence_report import write  # noqa: PLC0415 - figures, which no rank draws

        write(budget, read(path), out)
    sys.exit(code)


if __name__ == "__main__":
    main()
