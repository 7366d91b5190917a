"""`realrun train --elastic` as users call it: what it takes, what it refuses, and in the lab."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from co2sim.errors import OptionError
from realrun.cli import main, ranks
from realrun.errors import LabError
from realrun.launch.lab import check_machine
from realrun.launch.membership import LIFE
from realrun.train import lock

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
TRAIN = ("train", "--size", "tiny", "--context", "16", "--batch", "8", "--steps", "24")
ELASTIC = (*TRAIN, "--elastic", "-s", "co2:tau=4")

Refused = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Refused:
    """What `realrun` says, on one line, with exit code 2 and before anything starts."""

    def run(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["realrun", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert ended.value.code == 2
        assert captured.err.count("\n") == 1
        assert not list(tmp_path.iterdir())
        return captured.err

    return run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("-s", "ddp"), "co2, diloco, local_sgd, slowmo; ddp cannot go on without one"),
        (("-s", "zeropp"), "zeropp cannot go on without one"),
        (("-s", "overlap_local_sgd"), "overlap_local_sgd cannot go on without one"),
        (("-s", "co2:worker=node"), "--elastic needs worker=gpu"),
        (("-s", "co2:delay=auto"), "not delay=auto"),
        (("-s", "co2", "--resume"), "--resume needs all ranks throughout"),
        (("-s", "co2", "--estimate"), "--estimate needs all ranks throughout"),
        (("-s", "co2", "--backend", "nccl"), "--elastic needs --backend gloo"),
        (("-s", "co2", "--evaluate", "after"), "--elastic needs --evaluate during"),
        (("-s", "co2", "--checkpoint-every", "5"), "--checkpoint-every does not apply"),
        (("-s", "co2", "--stop", "12"), "--stop does not apply"),
        (("-s", "co2", "--restarts", "-1"), "--restarts is -1; it must be at least 0"),
    ],
)
def test_what_cannot_be_elastic_is_refused_in_words(
    given: tuple[str, ...], said: str, refused: Refused
) -> None:
    """Once, by the launcher."""
    assert "2 workers at least, and there is 1" in refused(*ELASTIC, "--nproc", "1")
    assert said in refused(*TRAIN, "--elastic", "--nproc", "2", *given)


def test_a_launcher_that_starts_ranks_anew_is_needed(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an elastic training for such a launcher."""
    assert "--elastic needs a launcher that starts ranks anew" in refused(*ELASTIC)
    assert "--restarts is for what starts the ranks" in refused(*ELASTIC, "--restarts", "3")
    assert "--restarts needs --elastic" in refused(*TRAIN, "--restarts", "3", "--nproc", "2")
    assert "--restarts is -1" in refused("lab", "run", "--restarts", "-1", "--", "true")
    monkeypatch.setenv(LIFE, "0")
    assert "the launcher was given --restarts: `realrun train` needs" in refused(*TRAIN)


def test_the_launcher_has_the_folder_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody else can begin there while rank 0 starts anew; afterwards it is free."""
    started: list[str] = []

    def start(*_: object, **__: object) -> int:
        with pytest.raises(OptionError, match="another training is under way in out"):
            lock.check_free(Path("out"))
        started.append(os.environ["REALRUN_FOLDER_HELD"])
        return 0

    monkeypatch.setattr(lock, "_PATIENCE", 0.1)
    monkeypatch.setattr(ranks, "start", start)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["realrun", *ELASTIC, "--nproc", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, started) == (0, ["1"])
    assert "REALRUN_FOLDER_HELD" not in os.environ
    lock.check_free(Path("out"))


@pytest.mark.dist
def test_nobody_needs_to_die(tmp_path: Path) -> None:
    """The figures are JSON, and the record says that all were there throughout."""
    done = subprocess.run(
        [sys.executable, "-m", "realrun", *ELASTIC, "--nproc", "2", "--json"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 24
    facts = json.loads((tmp_path / "out" / "train.json").read_text())["facts"]
    assert facts["elastic"] == {
        "losses": 0,
        "rejoins": 0,
        "seconds_stood_still": 0,
        "rounds_by_members": {"2": 6},
        "anchors_equal": True,
    }
    (row,) = csv.DictReader((tmp_path / "out" / "elastic.csv").read_text().splitlines())
    assert (row["members"], row["same"]) == ("0.0 1.0", "2")
    assert (tmp_path / "out" / "model.pt").exists()
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.parametrize("method", ["CO2 as published", "DiLoCo"])
def test_in_the_lab_the_others_go_on_and_the_lost_one_comes_back(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one round and the deadline, with one anchor; then no process is left."""
    try:
        check_machine()
    except LabError as error:
        pytest.skip(str(error))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    import elastic  # type: ignore[import-not-found]  # noqa: PLC0415 - a folder of scripts

    (kill,) = elastic.killed(tmp_path / "out", method, 1, np.random.default_rng(1))
    assert kill.good, kill
    assert kill.stood_still_s <= kill.went_on_s
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TAG") == str(tmp_path / "out"):
                left.append(process.pid)
        except (psutil.Error, OSError):
            continue
    assert left == []
