"""How well every strategy learns from the same tokens: four workers, real text, tuned rates.

    python benchmarks/convergence.py            # about an hour on two cores; go on with the same
    python benchmarks/convergence.py --quick    # two configurations, too short to mean anything

Every configuration is tuned with a seed of its own on the final validation loss: the learning rate
on a grid of factors of 2, extended while the best is at its edge, then the outer step on a small
grid at that rate. The best is run with three other seeds. All runs share one launch of the ranks.

Each finished run is a row of convergence-runs.csv; what is there is not run again. Writes
convergence.csv, convergence.md and convergence.png.
"""

import os
import sys

from convergence_plan import StudyBudget, next_run, read
from reports import folder, parser

from realrun.launch.local import run_local


def main() -> None:
    """Start the ranks, or be one of them; then write what is complete."""
    command = parser(__doc__, "two configurations of a tiny model, in seconds")
    command.add_argument("--report", action="store_true", help="run nothing, only write the table")
    given = command.parse_args()
    budget = StudyBudget.small() if given.quick else StudyBudget()
    with folder(given) as out:
        if "RANK" in os.environ:
            from convergence_runs import run_ranks  # noqa: PLC0415 - torch, for the ranks alone

            run_ranks(budget, out)
            return
        ranks = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
        code = 0
        while not given.report and next_run(budget, read(out)) is not None:
            before = len(read(out))
            code = run_local(ranks, budget.workers)
            if code > 1 or (code and len(read(out)) == before):
                break  # control-C, or no run at all; else a failed run is noted, and not repeated
        from convergence_report import write  # noqa: PLC0415 - figures, which no rank draws

        write(budget, read(out), out)
    sys.exit(code)


if __name__ == "__main__":
    main()
