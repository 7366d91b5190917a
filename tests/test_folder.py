"""A training's folder: one training at a time, and none over what is left of another."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import realrun

from co2sim.errors import OptionError
from realrun.cli import main, train_rank
from realrun.train import draft, folder, lock, log
from realrun.train.folder import Resume
from realrun.train.manifest import MANIFEST, FileSum, Manifest

TRAIN = (
    *("train", "--size", "tiny", "--context", "16", "--batch", "8", "--log-every", "4"),
    *("--steps", "8", "--eval-every", "8", "-s", "co2:tau=4", "--checkpoint-every", "4"),
)

HOLD = """
import sys, time
from pathlib import Path
from realrun.train.lock import alone
with alone(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def holder(place: Path) -> subprocess.Popen[str]:
    """A process that has a folder for itself."""
    found = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "mine\n"
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is waited for only briefly."""
    monkeypatch.setattr(lock, "_PATIENCE", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_folder_is_of_one_training_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second one is refused in one line before ranks start, and leaves the folder as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    process = holder(tmp_path / "out")
    with process:
        monkeypatch.setattr(sys, "argv", ["realrun", *TRAIN, "--nproc", "1"])
        with pytest.raises(SystemExit) as ended:
            main()
        process.kill()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert "another training is under way in out: wait until it ends, or choose" in said
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_training_frees_its_folder(tmp_path: Path) -> None:
    """The one after it waits until the process has gone, and leaves no file."""
    process = holder(tmp_path)
    with process:
        os.kill(process.pid, signal.SIGSTOP)
        process.kill()
        began = time.monotonic()
        lock.check_free(tmp_path)
    assert time.monotonic() - began < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("impatient")
def test_a_folder_is_held_until_the_last_rank_of_a_training_has_left(tmp_path: Path) -> None:
    """An elastic one in the lab goes on without rank 0, which found the folder free."""
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(lock.alone(tmp_path))()
        second.enter_context(lock.among(tmp_path))
        first.close()
        with pytest.raises(OptionError, match="another training is under way"):
            lock.check_free(tmp_path)
        second.close()
        lock.check_free(tmp_path)


def test_a_folder_that_is_not_there_is_free_and_stays_so(tmp_path: Path) -> None:
    """Looking makes nothing."""
    lock.check_free(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("impatient")
def test_ranks_without_our_launcher_are_refused_too(tmp_path: Path) -> None:
    """As under torchrun: rank 0 looks itself."""
    (tmp_path / "out").mkdir()
    process = holder(tmp_path / "out")
    with process:
        done = realrun(tmp_path, 2, *TRAIN)
        process.kill()
    assert done.returncode == 2
    assert re.fullmatch(r"error: another training is under way in out: .*\n", done.stderr)
    assert (tmp_path / "err1").read_text() == ""
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "left", [folder.LOG, folder.RECORD, folder.MODEL, "checkpoints/step-000004"]
)
def test_nothing_is_written_over_what_is_left_of_a_training(tmp_path: Path, left: str) -> None:
    """Whichever part of it is left."""
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("")
    with pytest.raises(OptionError, match="holds a training run already"):
        folder.check_new(tmp_path)


def test_an_ended_training_without_checkpoints_is_not_begun_anew_by_resume(tmp_path: Path) -> None:
    """Its log and its parameters would be lost."""
    (tmp_path / folder.RECORD).write_text("{}")
    with pytest.raises(OptionError, match=r"has ended \(train.json\), and no checkpoint to go on"):
        Resume().checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_checkpoints_need_a_folder(tmp_path: Path, kind: str) -> None:
    """Said before the first step, not with the first checkpoint."""
    place = tmp_path / folder.CHECKPOINTS
    if kind == "file":
        place.write_text("")
    elif kind == "link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        os.mkfifo(place)
    for check in (folder.check_new, Resume().checkpoint):
        with pytest.raises(OptionError, match="checkpoints is not a folder: remove it"):
            check(tmp_path)


@pytest.mark.parametrize("name", [folder.LOG, folder.MODEL, folder.FIGURE])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_files_of_a_training_need_regular_files(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    """A pipe would be waited for, and a folder told once all is trained."""
    make(tmp_path / name)
    for check in (folder.check_new, Resume().checkpoint):
        with pytest.raises(OptionError, match=f"{name} is not a regular file: remove it, or"):
            check(tmp_path)


def test_a_pipe_in_the_folder_is_refused_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line that names the file, and exit code 2."""
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "log.csv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["realrun", *TRAIN, "--resume", "--nproc", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = "error: out/log.csv is not a regular file: remove it, or choose another --out\n"
    assert capsys.readouterr().err == said


def test_a_full_disk_is_said_of_the_log(tmp_path: Path) -> None:
    """With the name of the file; closing it afterwards is no error."""
    row = log.LogRow(step=1, tokens=8, seconds=0.1, train_loss=4.5, lr=0.1)
    written = log.Log(tmp_path)
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        assert written._file is not None
        written._file.close()
        written._file = full
        with pytest.raises(OptionError, match=r"^cannot write .*/log.csv: no space left on device"):
            written.add(row)
    written.close()


def test_the_log_is_checked_before_a_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the launcher, which starts no rank."""
    place = tmp_path / "out" / folder.CHECKPOINTS / "step-000004"
    place.mkdir(parents=True)
    (tmp_path / "out" / folder.LOG).write_text("broken,log\n1,2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_rank, "check_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["realrun", *TRAIN, "--resume", "--nproc", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: out/log.csv is not the log of a training: 'step'\n"


@pytest.mark.dist
def test_a_log_that_rank_0_cannot_read_ends_all_with_one_line(tmp_path: Path) -> None:
    """Where no launcher has looked before, as under torchrun."""
    done = realrun(tmp_path, 2, *TRAIN)
    assert done.returncode == 0, done.stderr
    (tmp_path / "out" / folder.LOG).write_text("broken,log\n1,2\n")
    for path in tmp_path.glob("err*"):
        path.unlink()
    began = time.monotonic()
    done = realrun(tmp_path, 2, *TRAIN, "--resume")
    assert time.monotonic() - began < 30
    said = "error: cannot go on: rank 0: out/log.csv is not the log of a training: 'step'\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert (tmp_path / "err1").read_text() == ""


def test_other_digits_are_no_step(tmp_path: Path) -> None:
    """Python takes them for numbers; no checkpoint has such a name."""
    (tmp_path / folder.CHECKPOINTS / "step-\u0664").mkdir(parents=True)
    assert folder.checkpoints(tmp_path) == []


@pytest.mark.dist
def test_a_state_that_one_rank_cannot_take_ends_all_with_one_line(tmp_path: Path) -> None:
    """Its files are as they were written, but of no training: the rank is named, none waits."""
    done = realrun(tmp_path, 2, *TRAIN)
    assert done.returncode == 0, done.stderr
    last = folder.checkpoints(tmp_path / "out")[-1]
    text = (last / "rank1.json").read_text()
    (last / "rank1.json").write_text(text.replace('"losses"', '"gains"'))
    rewrite(last)
    began = time.monotonic()
    done = realrun(tmp_path, 2, *TRAIN, "--resume")
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot read the checkpoint out/checkpoints/step-000008: rank 1: it holds no state"
        " of this training; step-000004 is whole: go on from it with --resume --from-step 4\n"
    )


def rewrite(checkpoint: Path) -> None:
    """Write the manifest anew, as if the files were what had been saved."""
    written = Manifest.of(checkpoint)
    shutil.copy(checkpoint / MANIFEST, checkpoint.parent / "before.json")
    sums: dict[str, FileSum] = {}
    for name in written.files:
        data = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        sums[name] = draft.write_file(checkpoint / name, [data])
    (checkpoint / MANIFEST).write_text(Manifest(written.step, written.ranks, sums).text())
    assert json.loads((checkpoint / MANIFEST).read_text())["step"] == written.step
