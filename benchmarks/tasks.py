"""Five kinds of tasks by six methods: what they learn from the same samples, and in what time.

    sudo python benchmarks/tasks.py            # two hours on two cores; go on with the same
    sudo python benchmarks/tasks.py --quick    # two methods on one task, in seconds

Text, masked text, images, segmentation and point clouds, each by DDP, LocalSGD, SlowMo, DiLoCo and
CO2, as published and with the delay that it chooses in the lab. First some rounds of each are timed
in a lab of four nodes at 100 Mbit/s, with local steps of 100 ms. Then all train outside the lab, as
the network does not change what is learned: learning rates and outer steps are chosen with a seed
of their own, for the loss at the end, and the best of each trains with three seeds. At last
`realrun train` trains a model of each task for the figures.

What is timed stands in tasks-lab.json, finished trainings are rows of tasks-runs.csv, and neither
is made again. Writes tasks.md, tasks.csv and a figure for each task.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from convergence_launch import complete
from finished_runs import read
from reports import folder, parser
from tasks_plan import LATE, Delays, budget, study, tasks

from realrun.launch.lab import run_lab
from realrun.launch.lab_plan import Lab

RUNS, TIMES = "tasks-runs.csv", "tasks-lab.json"
RATE = "100 Mbit/s"


def main() -> None:
    """Start the ranks, or be one of them; then write the tables and the figures."""
    command = parser(__doc__, "two methods on one task")
    command.add_argument("--in-lab", action="store_true", help=argparse.SUPPRESS)  # for the ranks
    given = command.parse_args()
    with folder(given) as out:
        if given.in_lab:
            from tasks_lab import run_lab_ranks  # noqa: PLC0415 - torch, for the ranks alone

            run_lab_ranks(out / TIMES, quick=given.quick)
            return
        if "RANK" in os.environ:
            from convergence_runs import run_ranks  # noqa: PLC0415 - torch, for the ranks alone

            run_ranks(partial(study, delays(times(out)), given.quick), out / RUNS)
            return
        nodes = budget(tasks(quick=given.quick)[0], quick=given.quick).workers
        timed = times(out) if (out / TIMES).exists() else {}
        if any(task not in timed for task in tasks(quick=given.quick)):
            ranks = [sys.executable, __file__, *sys.argv[1:], "--out", str(out), "--in-lab"]
            if code := run_lab(ranks, Lab(nodes, 1, RATE)):
                sys.exit(code)
        chosen = delays(times(out))
        if code := complete(partial(study, chosen, given.quick), out / RUNS, nodes):
            sys.exit(code)
        from tasks_report import write  # noqa: PLC0415 - figures, which no rank draws

        write(out, read(out / RUNS), times(out), chosen, quick=given.quick)


def times(out: Path) -> dict[str, dict[str, Any]]:
    """What was timed in the lab, by task and method."""
    found: dict[str, dict[str, Any]] = json.loads((out / TIMES).read_text("utf-8"))
    return found


def delays(timed: dict[str, dict[str, Any]]) -> Delays:
    """What CO2 chose in the lab."""
    return {task: int(rows[LATE]["delay"]) for task, rows in timed.items()}  # type: ignore[misc]


if __name__ == "__main__":
    main()
