"""`realrun train` as users call it; its checkpoints are resumed, damaged, used after a restart."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, python
from places import ROOT
from ranks import realrun_on_ranks
from torch import nn

from co2sim import Question, strategies
from co2sim.common.errors import OptionError
from co2sim.prediction import driver
from realrun.errors import LabError
from realrun.execute import world
from realrun.lab.lab import check_machine
from realrun.train import folder, log
from realrun.train.algorithm_registry import LOCAL_UPDATES
from realrun.train.folder import Saved
from realrun.train.settings import IN_EVERY_STEP, TrainSettings
from realrun.train.tasks.presets import GPTS

DYING = ROOT / "tests" / "helpers" / "dying_rank.py"
SMALL = ("--size", "tiny", "--context", "16", "--batch", "8", "--log-every", "4")
TRAIN = ("train", *SMALL, "--steps", "24", "--eval-every", "8")
CO2 = (*TRAIN, "-s", "co2.published", "--tau", "4", "--outer", "momentum=0.2,clip=1")
WORDS = (*CO2, "--checkpoint-every", "6")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a whole training of two ranks in out, and what it printed."""
    place = tmp_path_factory.mktemp("trained")
    done = realrun_on_ranks(place, 2, *WORDS)
    assert done.returncode == 0, done.stderr
    return place, done.stdout


def ends_alike(place: Path, other: Path) -> bool:
    """Whether trainings in two folders ended with the same parameters."""
    model, again = (torch.load(each / "out" / folder.MODEL) for each in (place, other))
    return all(torch.equal(model[name], again[name]) for name in model)


@pytest.mark.dist
def test_a_training_leaves_its_log_figure_parameters_and_record(trained: tuple[Path, str]) -> None:
    """And says on one line each how it went."""
    out, printed = trained[0] / "out", trained[1]
    assert re.search(
        r"^co2\.published\(tau=4\) with momentum=0.2, clip=1 on 2 ranks: 61,248 parameters,"
        r" 24 steps, 3,072 tokens,",
        printed,
    ), printed
    assert re.search(r"^outer steps 6, sent", printed, re.MULTILINE)
    late = r"^tau 4, delay 1 round, (\d) of 6 averages came late, (\d+\.\d)% of the time waiting"
    said = re.search(late, printed, re.MULTILINE)
    assert said, printed
    rows = log.read(out)
    assert [row.step for row in rows] == [4, 8, 12, 16, 20, 24]
    assert [row.step for row in rows if row.validation_loss] == [8, 16, 24]
    assert [row.rounds for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(a.seconds < b.seconds for a, b in pairwise(rows))
    record = json.loads((out / folder.RECORD).read_text())
    assert record["settings"]["strategy"] == "co2.published(tau=4)"
    figures = record["figures"]
    assert figures["late"] == int(said[1])
    assert 0 <= figures["waited"] / figures["seconds"] == figures["waiting_share"] < 1
    assert f"{figures['waiting_share']:.1%}" == f"{said[2]}%"
    assert len(record["facts"]["sha256"]) == 64
    assert record["facts"]["python"] == sys.version.split()[0]
    weights = torch.load(out / folder.MODEL)
    assert sum(tensor.numel() for tensor in weights.values()) == record["facts"]["parameters"]
    assert (out / folder.FIGURE).read_bytes().startswith(b"\x89PNG")
    left = {path.name for path in (out / "checkpoints").iterdir()}
    assert left == {"step-000018", "step-000024"}  # two are kept, and no draft


@pytest.mark.dist
@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_offered_one_goes_on_bit_for_bit(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    """Within a round of CO2, with an average under way; what was damaged is written again.

    The refusal is one line, which rank 0 alone writes.
    """
    shutil.copytree(trained[0] / "out", tmp_path / "out")
    last = tmp_path / "out/checkpoints/step-000024"
    data = bytearray((last / "rank1.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (last / "rank1.safetensors").write_bytes(data)
    done = realrun_on_ranks(tmp_path, 2, *WORDS, "--resume")
    assert (done.returncode, (tmp_path / "err1").read_text()) == (1, "")
    (line,) = (text for text in done.stderr.splitlines() if not re.search(r": step \d+ of", text))
    assert "step-000024: rank 1: rank1.safetensors: " in line
    offered = line.partition(" with ")[2]
    assert offered == "--resume --from-step 18"
    again = realrun_on_ranks(tmp_path, 2, *WORDS, *offered.split())
    assert again.returncode == 0, again.stderr
    assert ends_alike(trained[0], tmp_path)
    Saved.of(last).check(last)


def test_what_ranks_wrote_before_a_restart_is_not_seen() -> None:
    """Its store stays over restarts; a rank that died would still count as dead."""
    store: Any = torch.distributed.HashStore()
    for attempt in ("0", "1", "2"):
        seen = world._of_attempt(store, {"TORCHELASTIC_RESTART_COUNT": attempt})
        assert not seen.check(["key"])
        seen.set("key", attempt)
    assert world._of_attempt(store, {}).get("key") == b"0"


@pytest.mark.dist
@pytest.mark.nightly
def test_torchrun_restarts_from_the_last_checkpoint(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    """A rank is killed in step 15; --max-restarts with --resume ends as if it had not been."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = (*torchrun, "--max-restarts", "1", DYING, *WORDS, "--resume")
    done = python(tmp_path, *words, DIES="kill:1:15")
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert ends_alike(trained[0], tmp_path)
    steps, expected = (
        [row.step for row in log.read(place / "out")] for place in (tmp_path, trained[0])
    )
    assert steps == expected


LAUNCH = """
import sys
from realrun.launch.launcher import run_local
sys.exit(run_local(sys.argv[1:], 2, grace=30.0, ask_first=True))
"""


def dying(place: Path, dies: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A training of two ranks, one of which dies as `dies` says."""
    return python(place, "-c", LAUNCH, sys.executable, DYING, *arguments, DIES=dies)


@pytest.mark.nightly
@pytest.mark.dist
def test_what_a_rank_raises_in_a_step_is_one_line_on_each(tmp_path: Path) -> None:
    """Whatever it is: the rank says what it was and where, and so does the other one."""
    done = dying(tmp_path, "raise:1:9", *CO2, "--deadline", "5 s")
    assert done.returncode == 1, done.stderr
    said = r"rank 1 raised ValueError in 'local step 9' of round 2: no such letter"
    for rank in (0, 1):
        assert re.search(rf"^\[rank {rank}\] error: {said}", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
@pytest.mark.dist
def test_a_training_that_is_told_to_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    """The ranks are asked to stop, and do so together; the launcher ends as a shell expects."""
    more = "--steps 100000 -s co2.published:tau=4 --checkpoint-every 0"
    done = dying(tmp_path, "stop:1:15", "train", *SMALL, *more.split())
    assert done.returncode == 143, done.stderr
    stopped = re.search(r"stopped after step (\d+);", done.stdout)
    assert stopped, done.stdout + done.stderr
    kept = tmp_path / "out" / "checkpoints" / f"step-{int(stopped[1]):06d}"
    assert (kept / "state.json").exists()


@pytest.mark.nightly
@pytest.mark.lab
def test_a_lab_trains_with_one_command(tmp_path: Path) -> None:
    """Two nodes at 100 Mbit/s, of one rank each."""
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))
    done = python(
        tmp_path,
        *("-m", "realrun", "lab", "run", "--nodes", "2", "--rate", "100 Mbit/s", "--", "realrun"),
        *(*TRAIN, "-s", "co2.published:tau=4", "--evaluate", "after", "--json"),
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["step"] == 24
    assert figures["validation_loss"] < 4.5
    assert figures["bytes_sent"] == 6 * 4 * 61_248  # two ranks send everything once, in fp32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of parts of its own
def test_every_strategy_of_the_package_can_be_trained(
    realrun: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is refused for want of an algorithm, and each says how its ranks share.

    A user's own is, in one line; and where models are wrapped, too, whatever lets it in.
    """
    from realrun.train import parallelize  # noqa: PLC0415 - for the mark

    for name in strategies.STRATEGIES:
        assert TrainSettings(strategy=name).name.startswith(name)
        assert (name in IN_EVERY_STEP) != (name in LOCAL_UPDATES)
    mine = type("Mine", (strategies.CO2,), {"name": "mine", "__slots__": ()})
    monkeypatch.setitem(strategies.STRATEGIES, "mine", mine)
    ended = realrun("train", "--nproc", "2", "-s", "mine")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "mine has no training algorithm" in ended.err
    with pytest.raises(OptionError, match="mine"):
        parallelize.shared(strategies.DDP(), "mine", nn.Linear(2, 2), None, None)


def test_what_is_trained_can_be_predicted(realrun: Command, tmp_path: Path) -> None:
    """The file of --describe is a model of co2sim, of as many parameters."""
    (tmp_path / "model.toml").write_text(realrun("train", "--size", "mini", "--describe").out)
    case = Question(cluster="dgx-h100", model=str(tmp_path / "model.toml"), strategy="co2")
    assert driver.run(case).model == f"GPT of {GPTS['mini'].parameters} parameters"
