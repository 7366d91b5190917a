"""Start the ranks of a study, again where a run failed, until no run is missing."""

import sys
from pathlib import Path

from convergence_plan import Plan, missing
from finished_runs import read

from realrun.launch.local import run_local


def complete(plan: Plan, path: Path, workers: int) -> int:
    """Run what is missing in the file, by this very script as ranks; the exit code.

    A run that fails is noted by the ranks, and not repeated; control-C, or no run at all, ends it.
    """
    ranks = [sys.executable, *sys.argv, "--out", str(path.parent)]
    code = 0
    while missing(plan, known := read(path)):
        code = run_local(ranks, workers)
        if code > 1 or (code and len(read(path)) == len(known)):
            break
    return code
