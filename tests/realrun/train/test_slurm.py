"""The script for Slurm: a job that is told to end leaves a checkpoint, and is queued again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytest.importorskip("torch")

STEPS = 300
JOB = os.getpid()
"""Its number, which the port is made from: another one in each process of tests."""
SCRIPT = ROOT / "examples" / "train.sbatch"

SRUN = """#!{python}
import os, signal, subprocess, sys
size = int(os.environ["SLURM_NTASKS"])
places = [{{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}} for rank in range(size)]
tasks = [subprocess.Popen(sys.argv[1:], env={{**os.environ, **place}}) for place in places]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
open("srun.cpus", "w").write(os.environ["SRUN_CPUS_PER_TASK"])
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") echo 127.0.0.1 ;;
  requeue*) echo "$2" >> requeued ;;
  *) exit 1 ;;
esac
"""


def write(path: Path, text: str) -> None:
    """An executable file."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(folder: Path) -> None:
    """The job on two ranks over Gloo, with a small training; all else as in the script.

    It ends well, but in step 10 `srun` gets SIGTERM.
    """
    script = SCRIPT.read_text()
    for written, here in (
        ("BACKEND=nccl ", "BACKEND=gloo "),
        ("--size large", "--size tiny --context 8 --log-every 4 --warmup 4"),
        ("--steps 20000 --batch 256 --checkpoint-every 500", f"--steps {STEPS} --batch 4"),
        ("tau=12,delay=auto,worker=node,inner=ddp", "tau=4"),
    ):
        assert written in script
        script = script.replace(written, here)
    write(folder / "job.sh", script)
    write(folder / "bin" / "srun", SRUN.format(python=sys.executable))
    write(folder / "bin" / "scontrol", SCONTROL)
    rank = ROOT / "tests" / "helpers" / "dying_rank.py"
    write(folder / "bin" / "realrun", f'#!/bin/sh\nexec {sys.executable} {rank} "$@"\n')
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DIES": "stop:0:10",
        "SLURM_JOB_ID": str(JOB),
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_JOB_NODELIST": "node[1-1]",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_SUBMIT_DIR": str(folder),
    }
    done = subprocess.run(
        ["/bin/bash", "job.sh"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def record(folder: Path) -> tuple[bool, int]:
    """Whether the training was stopped, and its last step."""
    out = folder / "out" / "train"
    last = (out / "log.csv").read_text().splitlines()[-1]
    return json.loads((out / "train.json").read_text())["stopped"], int(last.split(",")[0])


@pytest.mark.nightly
@pytest.mark.dist
def test_a_job_that_is_told_to_end_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """SIGTERM to all ranks: a checkpoint, and `scontrol requeue`; the next part is the last."""
    run(tmp_path)
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    assert (tmp_path / "srun.cpus").read_text() == "3"
    stopped, step = record(tmp_path)
    assert stopped
    assert 0 < step < STEPS
    run(tmp_path)
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    assert record(tmp_path) == (False, STEPS)
