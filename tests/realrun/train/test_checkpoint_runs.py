"""Checkpoints of trainings with real ranks: resumed, damaged, in use, and restarted by torchrun."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from ranks import realrun

pytest.importorskip("torch")

import torch

from realrun.execute import world
from realrun.train import folder, log
from realrun.train.folder import Saved

WORDS = (
    *("train", "--size", "tiny", "--context", "16", "--batch", "8", "-s", "co2.published:tau=4"),
    *("--log-every", "4", "--steps", "24", "--eval-every", "8", "--checkpoint-every", "6"),
)
nightly = pytest.mark.nightly
dist = pytest.mark.dist


def end(place: Path) -> dict[str, torch.Tensor]:
    """The parameters with which a training ended."""
    found: dict[str, torch.Tensor] = torch.load(place / "out" / folder.MODEL)
    return found


def one_line(place: Path, *more: str) -> tuple[int, str]:
    """How a training of two ranks fails: exit code, and the line, which rank 0 alone writes."""
    for path in place.glob("err?"):
        path.unlink()
    done = realrun(place, 2, *WORDS, *more)
    assert (place / "err1").read_text() == ""
    lines = [one for one in done.stderr.splitlines() if not re.search(r": step \d+ of", one)]
    assert len(lines) == 1, done.stderr
    return done.returncode, lines[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training of two ranks in out; its checkpoints are of steps 18 and 24."""
    place = tmp_path_factory.mktemp("trained")
    done = realrun(place, 2, *WORDS)
    assert done.returncode == 0, done.stderr
    return place


@dist
@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_offered_one_goes_on_bit_for_bit(
    trained: Path, tmp_path: Path
) -> None:
    """Within a round of CO2, with an average under way; what was damaged is written again."""
    shutil.copytree(trained / "out", tmp_path / "out")
    last = tmp_path / "out/checkpoints/step-000024"
    data = bytearray((last / "rank1.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (last / "rank1.safetensors").write_bytes(data)
    code, line = one_line(tmp_path, "--resume")
    assert code == 1
    assert "step-000024: rank 1: rank1.safetensors: " in line
    offered = line.partition(" with ")[2]
    assert offered == "--resume --from-step 18"
    again = realrun(tmp_path, 2, *WORDS, *offered.split())
    assert again.returncode == 0, again.stderr
    one, other = end(trained), end(tmp_path)
    assert all(torch.equal(one[name], other[name]) for name in one)
    Saved.of(last).check(last)


def test_what_ranks_wrote_before_a_restart_is_not_seen() -> None:
    """Its store stays over restarts; a rank that died would still count as dead."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    for attempt in ("0", "1", "2"):
        seen = world._of_attempt(store, {"TORCHELASTIC_RESTART_COUNT": attempt})
        assert not seen.check(["key"])
        seen.set("key", attempt)
    assert world._of_attempt(store, {}).get("key") == b"0"


@dist
@nightly
def test_torchrun_restarts_from_the_last_checkpoint(trained: Path, tmp_path: Path) -> None:
    """A rank is killed in step 15; --max-restarts with --resume ends as if it had not been."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    rank = ROOT / "tests" / "helpers" / "dying_rank.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*(sys.executable, "-m", *torchrun, "--max-restarts", "1", rank, *WORDS), "--resume"],
        cwd=tmp_path,
        env={**environment, "DIES": "kill:1:15", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    one, other = end(trained), end(tmp_path)
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [row.step for row in log.read(tmp_path / "out")]
    assert steps == [row.step for row in log.read(trained / "out")]
