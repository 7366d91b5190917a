"""A training's folder: one training at a time, and none over what is left of another."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import in_process
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from co2sim.errors import OptionError  # noqa: E402 - as the next
from co2sim.schedule import Layout  # noqa: E402
from realrun.cli import main  # noqa: E402
from realrun.train import checkpoint, folder, lock, log  # noqa: E402
from realrun.train.folder import Resume  # noqa: E402
from realrun.train.settings import TrainSettings  # noqa: E402

TRAIN = ("train", "--size", "tiny", "--context", "16", "--batch", "8", "-s", "co2:tau=4")
SETTINGS = TrainSettings(size="tiny", context=16, batch=8, strategy="co2:tau=4")
ALONE: Any = SimpleNamespace(rank=0, layout=Layout(1, 1), device=torch.device("cpu"))


def held(out: Path) -> int:
    """Another training is under way; gives what it holds the folder by."""
    number = os.open(out, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    return number


def saved(out: Path) -> Path:
    """A checkpoint of this training."""
    return checkpoint.save(out, 4, {}, SETTINGS.identity(), ALONE)


@pytest.mark.parametrize(
    ("prepare", "more", "token"),
    [
        (held, "", "another training is under way in out"),
        (lambda out: os.mkfifo(out / folder.LOG), "--resume", "out/log.csv"),
        (lambda out: (out / folder.LOG).touch(), "", "--resume"),
        (lambda out: (saved(out) / folder.STATE).unlink(), "--resume", "step-000004: state.json"),
        (lambda out: (saved(out), (out / folder.LOG).mkdir()), "--resume", "out/log.csv"),
        (
            lambda out: (saved(out), (out / folder.LOG).write_text("a,b\n1,2\n")),
            "--resume",
            "out/log.csv",
        ),
        (saved, "--resume --from-step 7", "are of steps 4"),
        (saved, "--resume --seed 5", "its seed is"),
        (Path.exists, "--resume --from-step 7", "holds none"),
        (Path.exists, "--from-step 7", "--resume"),
    ],
)
def test_the_launcher_refuses_a_folder_before_any_rank_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path], Any],
    more: str,
    token: str,
) -> None:
    """In one line, with exit code 2, and leaves it as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lock, "_PATIENCE", 0.0)
    (tmp_path / "out").mkdir()
    number = prepare(Path("out"))
    before = sorted((tmp_path / "out").rglob("*"))
    ended = in_process("realrun", main, monkeypatch, capsys)(*TRAIN, *more.split(), "--nproc", "1")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert token in ended.err
    assert sorted((tmp_path / "out").rglob("*")) == before
    if prepare is held:
        os.close(number)


def test_a_folder_is_free_once_the_other_training_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed a moment ago is waited for; looking makes neither folder nor file."""
    lock.check_free(tmp_path / "out")
    number, waited = held(tmp_path), []
    monkeypatch.setattr(time, "sleep", lambda s: (waited.append(s), os.close(number)))
    lock.check_free(tmp_path)
    assert len(waited) == 1
    with lock.alone(tmp_path / "new"), lock.alone(tmp_path):
        assert [one.name for one in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("name", [folder.LOG, folder.RECORD, folder.MODEL, "checkpoints/step-4"])
def test_nothing_is_written_over_what_is_left_of_a_training(tmp_path: Path, name: str) -> None:
    """Whichever part of it is left; --resume does not begin one that has ended."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(OptionError, match="--resume"):
        folder.check_new(tmp_path)
    if name in (folder.RECORD, folder.MODEL):
        with pytest.raises(OptionError, match="has ended"):
            Resume().checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((folder.LOG, os.mkfifo), (folder.MODEL, os.mkdir), (folder.FIGURE, os.mkfifo)),
        *((folder.CHECKPOINTS, Path.touch), (folder.CHECKPOINTS, lambda at: at.symlink_to("no"))),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    """A pipe would be waited for, and a folder told once all is trained."""
    make(tmp_path / name)
    for check in (folder.check_new, Resume().checkpoint):
        with pytest.raises(OptionError, match=name):
            check(tmp_path)


def test_a_full_disk_is_said_of_the_log(tmp_path: Path) -> None:
    """With the name of the file; closing it afterwards is no error."""
    written = log.Log(tmp_path)
    assert written._file is not None
    written._file.close()
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        written._file = full
        with pytest.raises(OptionError, match=r"log\.csv: no space left"):
            written.add(log.LogRow(step=1, tokens=8, seconds=0.1, train_loss=4.5, lr=0.1))
    written.close()


def test_checkpoints_are_named_by_the_digits_of_ascii(tmp_path: Path) -> None:
    """Python takes others for numbers, too."""
    for name in ("step-\u0664", "step-000004", "step-12", ".step-000008"):
        (tmp_path / folder.CHECKPOINTS / name).mkdir(parents=True)
    assert [folder.step_of(one) for one in folder.checkpoints(tmp_path)] == [4, 12]
    last, first = Resume().checkpoint(tmp_path), Resume(4).checkpoint(tmp_path)
    assert (last and last.name, first and first.name) == ("step-12", "step-000004")


@given(st.text(max_size=300))
def test_what_an_error_shows_is_short_and_obeyed_by_no_terminal(text: str) -> None:
    """No control character, no line break; of long texts the end, which tells more of a path."""
    found = folder.shown(text)
    assert found.isprintable()
    assert len(found) <= 80
    if text.isascii() and text.isalnum():
        assert found.endswith(text[-77:])
