"""How the gap to DDP changes with the length of the training, beside what the bound says.

    python benchmarks/long_study.py            # 90 minutes on two cores; go on with the same
    python benchmarks/long_study.py --quick    # two lines of a tiny model, in seconds

A few lines of the convergence study, whose runs of 768 steps are taken from there, at 3,072, 6,144
and 12,288 steps. Each finished run is a row of long_study-runs.csv; what is there is not run again.
The constants of the bound are estimated once, in long_study-estimate.json.

Writes long_study.csv, long_study.md and long_study.png.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from convergence_launch import complete
from convergence_plan import RUNS as BASE_RUNS
from convergence_plan import Ask
from finished_runs import Known, read
from long_study_plan import RUNS, LongStudy
from reports import RESULTS, folder, parser

from realrun.launch.local import run_local

ESTIMATE = "long_study-estimate.json"


def main() -> None:
    """Start the ranks, or be one of them; then write what is complete."""
    command = parser(__doc__, "two lines of a tiny model, in seconds")
    command.add_argument("--report", action="store_true", help="run nothing, only write the table")
    given = command.parse_args()
    study = LongStudy.small() if given.quick else LongStudy.usual()
    base = {} if given.quick else read(RESULTS / BASE_RUNS)

    def plan(known: Known) -> list[Ask]:
        return [ask for ask in study.asks({**base, **known}) if ask.key not in base]

    with folder(given) as out:
        path = out / RUNS
        if "RANK" in os.environ:
            from convergence_runs import run_ranks  # noqa: PLC0415 - torch, for the ranks alone

            run_ranks(plan, path)
            return
        code = 0 if given.report else complete(plan, path, study.base.workers)
        if not (out / ESTIMATE).exists():
            if given.report:
                command.error(f"--report: {out} has no {ESTIMATE}; run it without --report")
            estimate(study, out / ESTIMATE)
        from long_study_report import write  # noqa: PLC0415 - figures, which no rank draws

        constants: dict[str, Any] = json.loads((out / ESTIMATE).read_text())
        write(study, {**base, **read(path)}, constants, out)
    sys.exit(code)


def estimate(study: LongStudy, path: Path) -> None:
    """Measure the constants of the bound in a run of local SGD of the base's length."""
    base = study.base
    with tempfile.TemporaryDirectory() as name:
        command = (
            *("realrun", "train", "--strategy", "local_sgd:tau=12", "--lr", "0.01"),
            *("--size", base.size, "--steps", str(base.steps), "--batch", str(base.batch)),
            *("--warmup", str(base.warmup), "--estimate", "--out", name),
        )
        code = run_local(command, base.workers)
        if code:
            sys.exit(code)
        shutil.copy(Path(name) / "estimate.json", path)


if __name__ == "__main__":
    main()
