"""Bad input of `realrun`: one line on stderr, exit code 2, and nothing is started or written."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command, refused
from ranks import TWO_RANKS

pytest.importorskip("torch")

from realrun.train import checkpoint, folder
from realrun.train.settings import TrainSettings

CASE = "run -c cluster.toml -m tiny-5m"
TRAIN = "train --nproc 2"
SMALL = {"size": "tiny", "context": 16, "batch": 8}
OF_ONE = "train --size tiny --context 16 --batch 8 -s co2.published:tau=4 --nproc 1"
WORDS = {
    "CASE": CASE,
    "RUN": f"{CASE} --rounds 2 --kernels sleep",
    "TRAIN": TRAIN,
    "SMALL": f"{TRAIN} --size tiny --context 16 --batch 8 --steps 24",
    "OF_ONE": OF_ONE,
    "OF_ALL": OF_ONE.removesuffix(" -s co2.published:tau=4 --nproc 1"),
    "LAB": "lab run --nodes 4 --rate '1 Gbit/s'",
}


def saved(out: Path, **settings: Any) -> Path:
    """A checkpoint of a training on one rank."""
    chosen = TrainSettings(strategy="co2.published:tau=4", **SMALL, **settings)
    path = out / folder.CHECKPOINTS / "step-000004"
    checkpoint.write(path, {}, {**chosen.identity(), "ranks": 1}, 0)
    return path


FOLDERS: dict[str, Callable[[Path], object]] = {
    "empty": Path.exists,
    "logged": lambda out: (out / folder.LOG).touch(),
    "ended": lambda out: (out / folder.RECORD).touch(),
    "trained": lambda out: (out / folder.MODEL).touch(),
    "model-folder": lambda out: (out / folder.MODEL).mkdir(),
    "figure-folder": lambda out: (out / folder.FIGURE).mkdir(),
    "log-pipe": lambda out: os.mkfifo(out / folder.LOG),
    "checkpoints-file": lambda out: (out / folder.CHECKPOINTS).touch(),
    "checkpoints-link": lambda out: (out / folder.CHECKPOINTS).symlink_to("no"),
    "saved": saved,
    "stateless": lambda out: (saved(out) / folder.STATE).unlink(),
    "constant": lambda out: saved(out, final_lr=1.0, warmup=1),
    "no-log": lambda out: (saved(out), (out / folder.LOG).write_text("a,b\n1,2\n")),
}
"""Folders of trainings, by name."""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cluster, and with all of these."""
    place = tmp_path_factory.mktemp("there")
    (place / "cluster.toml").write_text(TWO_RANKS)
    for name, prepare in FOLDERS.items():
        (place / name).mkdir()
        prepare(place / name)
    return place


@pytest.fixture
def cli(there: Path, realrun: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `realrun` in it."""
    monkeypatch.chdir(there)
    return realrun


@pytest.mark.parametrize(("line", "token"), refused("realrun-refused.txt", **WORDS))
def test_bad_input_is_one_line(cli: Command, there: Path, line: str, token: str) -> None:
    """It says what was given, or what is allowed."""
    before = sorted(there.rglob("*"))
    ended = cli(*shlex.split(line))
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert token in ended.err
    assert sorted(there.rglob("*")) == before


def test_a_folder_with_a_training_under_way_is_refused(
    cli: Command, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it holds."""
    monkeypatch.setattr(folder, "_PATIENCE", 0.0)
    with folder.alone(there / "empty"):
        ended = cli(*OF_ONE.split(), "--out", "empty")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "another training is under way in empty" in ended.err
