"""When a rank dies, hangs or raises: all stop in time, say who and where, and leave nothing."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from co2sim.trace import read_json_lines

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
DEADLINE = 4.0
"""Seconds that the ranks of these tests wait for each other."""

STOPPED = r"stopped (in|after) '\S+' of round [01]"
"""Who is told of a failure may be between two ops, or just behind the rank that failed."""

CLUSTER = """
name = "slow loopback"
source = "for this test"
nodes = 1
gpus_per_node = 3
gpu = "virtual"
backend = "gloo"
intra = { bandwidth = "1 GB/s", latency = "50 us" }
inter = { bandwidth = "1 GB/s", latency = "50 us" }
"""


def run_with_fault(fault: str, folder: Path, nproc: int = 3) -> tuple[int, str, float, set[int]]:
    """Exit code, what was printed, seconds after the fault, and processes that were left."""
    (folder / "cluster.toml").write_text(CLUSTER)
    command = [
        *(sys.executable, str(ROOT / "tests" / "faulty_rank.py")),
        *("run", "-c", str(folder / "cluster.toml"), "-m", "gpt2-small", "-s", "ddp"),
        *("--kernels", "sleep", "--set", "model.layers=2", "--deadline", f"{DEADLINE} s"),
        *("--out", str(folder / "out")),
    ]
    script = (
        "import sys; from realrun.launch.local import run_local;"
        f"sys.exit(run_local({command!r}, {nproc}, grace=5))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAULT": fault, "TAG": str(folder)}
    environment["FAULT_TIME"] = str(folder / "time")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    seconds = time.time() - float((folder / "time").read_text())
    return done.returncode, done.stderr, seconds, left_behind(folder)


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


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill:startup:1", r"rank 1 was killed by SIGKILL"),
        ("kill:compute:2", rf"rank 2 was killed by SIGKILL; {STOPPED}"),
        ("kill:before:0", rf"rank 0 was killed by SIGKILL; {STOPPED}"),
        ("kill:inside:1", rf"rank 1 was killed by SIGKILL; {STOPPED}"),
        ("stop:compute:1", r"rank 1 gives no sign of life; stopped in '\S+' of round 1"),
        ("hang:compute:2", r"rank 2 is not there: it is in '\S+' of round 1; stopped in"),
        (
            "raise:compute:0",
            rf"rank 0 raised ValueError in '\S+' of round 1: a kernel went wrong; {STOPPED}",
        ),
        ("stop:startup:2", r"rank 2 did not come within 4 s"),
    ],
)
def test_all_ranks_stop_in_time_and_name_the_missing_one(
    fault: str, said: str, tmp_path: Path
) -> None:
    """Exit code 1, within the deadline and 5 s; survivors name rank, op and round."""
    code, errors, seconds, left = run_with_fault(fault, tmp_path)
    assert code == 1, errors
    assert not left
    victim = int(fault[-1])
    for rank in {0, 1, 2} - {victim}:
        own = re.findall(rf"^\[rank {rank}\] error: (.*)$", errors, re.MULTILINE)
        assert len(own) == 1, errors
        assert re.search(said, own[0]), errors
        if "startup" not in fault:
            path = tmp_path / "out" / "ddp" / "partial" / f"rank{rank}.jsonl"
            assert str(path) in own[0]
            assert {span.round for span in read_json_lines(path).spans} >= {0}
            stopped = path.stat().st_mtime - float((tmp_path / "time").read_text())
            assert stopped < DEADLINE + 5
    killed_by_launcher = 5.0  # a rank that hangs for good
    assert seconds < DEADLINE + 5 + killed_by_launcher
