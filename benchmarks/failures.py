"""Kill one rank of three in every phase, ten times each: all others stop in time and say why.

    python benchmarks/failures.py            # a few minutes
    python benchmarks/failures.py --quick    # one rank, once

Writes benchmarks/results/failures.md.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from reports import machine, made_by, parser, publish, table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("helpers", "realrun/launch")]
from test_failures import DEADLINE, HEART, arguments  # noqa: E402

PHASES = {
    "kill:startup": "killed at start-up",
    "kill:compute": "killed in compute",
    "kill:before": "killed before a collective",
    "kill:inside": "killed inside a collective",
    "stop:compute": "frozen in compute (SIGSTOP)",
    "raise:compute": "a kernel raises",
}


def main() -> None:
    """Run all, and write the table."""
    options = parser(__doc__, "one rank is killed, once").parse_args()
    only, times = ("kill:compute", 1) if options.quick else ("", 10)
    rows = []
    for fault, words in PHASES.items():
        if only not in fault:
            continue
        good, seconds = 0, []
        for number in range(times):
            victim = number % 3
            with tempfile.TemporaryDirectory() as name:
                took, fine = attempt(f"{fault}:{victim}", Path(name))
            good += fine
            seconds.append(took)
            print(f"{fault}:{victim} {'ok' if fine else 'NOT OK'} {took:.1f} s", file=sys.stderr)
        rows.append(
            {
                "rank fails": words,
                "stopped in time": f"{good} of {times}",
                "median s": f"{median(seconds):.1f}",
                "longest s": f"{max(seconds):.1f}",
            }
        )
    text = f"""\
# What happens when a rank fails

Three ranks, a deadline of {DEADLINE:g} s. *Stopped in time*: every other rank ended by itself\
 within the deadline and 5 s, with an error that names the rank, its op and its round (at start-up:\
 the rank), exit code 1, partial traces written (not at start-up), and no process left. Seconds are\
 from the fault to the last survivor's partial trace. {machine()}

{table(rows)}

{made_by()}
"""
    publish(options, "failures", text)


def launched_with_fault(fault: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of three ranks by the launcher, one of which fails as `fault` says."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "helpers" / "faulty_rank.py"),
        *arguments(folder),
    ]
    script = (
        "import sys; from realrun.launch.launcher import run_local;"
        f"sys.exit(run_local({command!r}, 3, grace=5))"
    )
    own = {"PYTHONPATH": str(ROOT), "FAULT": fault, "TAG": str(folder), **HEART}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **own, "FAULT_TIME": str(folder / "time")},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def left_behind(folder: Path) -> set[int]:
    """Processes of that run that still live."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("TAG") == str(folder):
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def attempt(fault: str, folder: Path) -> tuple[float, bool]:
    """Seconds until the survivors had stopped, and whether all was as it should be."""
    victim = int(fault[-1])
    done = launched_with_fault(fault, folder)
    seconds = time.time() - float((folder / "time").read_text())
    left = left_behind(folder)
    survivors = {0, 1, 2} - {victim}
    place = "" if "startup" in fault else r".*'\S+' of round 1"
    told = [
        re.search(rf"^\[rank {rank}\] error: rank {victim} {place}", done.stderr, re.MULTILINE)
        for rank in survivors
    ]
    traces = [folder / "out" / "ddp" / "partial" / f"rank{rank}.jsonl" for rank in survivors]
    if "startup" not in fault:
        if not all(path.exists() for path in traces):
            return seconds, False
        began = float((folder / "time").read_text())
        seconds = max(path.stat().st_mtime for path in traces) - began
    return seconds, done.returncode == 1 and all(told) and not left and seconds < DEADLINE + 5


if __name__ == "__main__":
    main()
