"""Checkpoints of real trainings: damaged files, a full disk, a folder to read only, kill -9."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import realrun

from co2sim.errors import Co2simError
from realrun.train import draft, folder, log
from realrun.train.manifest import MANIFEST, Manifest
from realrun.train.settings import TrainSettings

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
TRAIN = (
    *("train", "--size", "tiny", "--context", "16", "--batch", "8", "--log-every", "4"),
    *("--steps", "24", "--eval-every", "8", "-s", "co2:tau=4", "--checkpoint-every", "6"),
)


def call(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `realrun` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "realrun", *arguments],
        cwd=place,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def errors(done: subprocess.CompletedProcess[str]) -> str:
    """The lines of errors; a slow machine also tells how far it is."""
    lines = done.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not re.search(r": step \d+ of \d+, loss ", line))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training of two ranks in out; its checkpoints are of steps 18 and 24."""
    place = tmp_path_factory.mktemp("trained")
    done = realrun(place, 2, *TRAIN)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    shutil.copytree(trained / "out", tmp_path / "out")
    return tmp_path


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.dist
def test_a_flipped_bit_ends_all_ranks_with_one_line(copied: Path) -> None:
    """The rank, the file, and what to do; ranks without a launcher that looks first: code 1."""
    flip(copied / "out/checkpoints/step-000024/rank1.safetensors")
    done = realrun(copied, 2, *TRAIN, "--resume")
    assert done.returncode == 1
    assert errors(done) == (
        "error: cannot read the checkpoint out/checkpoints/step-000024: rank 1: rank1.safetensors:"
        " its checksum is not that of manifest.json; step-000018 is whole: go on from it with"
        " --resume --from-step 18\n"
    )
    assert (copied / "err1").read_text() == ""


@pytest.mark.dist
def test_the_offered_command_goes_on_bit_for_bit(trained: Path, copied: Path) -> None:
    """The launcher refuses the damaged one, with one line and code 2, before any rank starts."""
    last = copied / "out/checkpoints/step-000024"
    (last / "rank0.json").unlink()
    done = call(copied, *TRAIN, "--nproc", "2", "--resume")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "step-000024: rank0.json: No such file or directory; step-000018 is whole" in done.stderr
    offered = re.search(r"with (--resume --from-step 18)$", done.stderr)
    assert offered
    again = realrun(copied, 2, *TRAIN, *offered[1].split())
    assert again.returncode == 0, again.stderr
    one, other = (torch.load(place / "out" / folder.MODEL) for place in (trained, copied))
    assert all(torch.equal(one[name], other[name]) for name in one)
    Manifest.of(last).check(last)  # written anew


@pytest.mark.dist
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--resume", "--from-step", "7"), "--from-step is 7, and there is no such checkpoint:"),
        (("--from-step", "18"), "--from-step says how to go on from a checkpoint: it needs --re"),
        (("--trust",), "--trust says how to go on from a checkpoint: it needs --resume"),
    ],
)
def test_what_to_go_on_from_is_checked_first(
    trained: Path, more: tuple[str, ...], said: str
) -> None:
    """One line, exit code 2."""
    done = call(trained, *TRAIN, "--nproc", "2", *more)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)],  # noqa: S607 - of any system
            check=False,
            capture_output=True,
        ).returncode
    )
    if not mounted:
        pytest.skip("a disk of its own needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)  # noqa: S607 - as above


def remount(place: Path, option: str) -> None:
    """Change the disk."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)  # noqa: S607


@pytest.mark.dist
def test_a_full_disk_is_said_and_what_was_written_goes_on(disk: Path, tmp_path: Path) -> None:
    """All ranks end with the cause; no draft stays; with more room the training goes on."""
    out = ("--out", str(disk / "out"))
    done = realrun(tmp_path, 2, *TRAIN, *out)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: cannot write the checkpoint \S+/step-000012: (rank \d: )?rank\d\.safetensors: No"
        r" space left on device\n",
        errors(done),
    ), done.stderr
    assert (tmp_path / "err1").read_text() == ""
    (kept,) = (disk / "out/checkpoints").iterdir()
    Manifest.of(kept).check(kept)
    remount(disk, "size=40m")
    done = realrun(tmp_path, 2, *TRAIN, *out, "--resume")
    assert done.returncode == 0, done.stderr


@pytest.mark.dist
def test_a_disk_that_is_full_of_the_log_is_said(disk: Path, tmp_path: Path) -> None:
    """Rank 0 alone writes it, and says so in the one line that there is."""
    remount(disk, "size=12k")
    words = dict(zip(TRAIN[1::2], TRAIN[2::2], strict=True))
    words |= {"--steps": "2000", "--log-every": "1", "--eval-every": "0", "-s": "local_sgd:tau=4"}
    words |= {"--checkpoint-every": "0", "--out": str(disk / "out")}
    done = realrun(tmp_path, 2, "train", *(word for pair in words.items() for word in pair))
    said = f"error: cannot write {disk}/out/log.csv: no space left on device\n"
    assert (errors(done), done.returncode) == (said, 2)
    assert (tmp_path / "err1").read_text() == ""
    assert log.read(disk / "out")


@pytest.mark.dist
def test_a_folder_to_read_only_is_said(disk: Path, tmp_path: Path) -> None:
    """When the first checkpoint is written, too: a disk may change while a training goes on."""
    remount(disk, "size=40m")
    place = disk / "out/checkpoints"
    place.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(place), str(place)], check=True)  # noqa: S607
    try:
        remount(place, "bind,ro")
        done = realrun(tmp_path, 2, *TRAIN, "--out", str(disk / "out"))
    finally:
        subprocess.run(["umount", str(place)], check=True)  # noqa: S607
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: cannot write the checkpoint \S+/step-000006: rank 0: \.step-000006\.[0-9a-f]{16}:"
        r" Read-only file system\n",
        errors(done),
    ), done.stderr
    assert (tmp_path / "err1").read_text() == ""


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
from realrun.cli import main
sys.argv[0] = "realrun"
main()
"""


@pytest.mark.dist
def test_a_file_that_may_not_grow_is_said(tmp_path: Path) -> None:
    """A limit of the system, without root: the file and the cause, and no draft."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *TRAIN, "--nproc", "1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert errors(done) == (
        "[rank 0] error: cannot write the checkpoint out/checkpoints/step-000006:"
        " rank0.safetensors: File too large\nerror: rank 0 exited with code 1\n"
    )
    assert list((tmp_path / "out/checkpoints").iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from realrun.train import draft
from realrun.train.folder import CHECKPOINTS, IDENTITY, checkpoint_name
from realrun.train.manifest import Manifest, rank_files

folder = Path(sys.argv[1])
for step in range(int(sys.argv[2]), 10**6):
    place = folder / CHECKPOINTS / checkpoint_name(step)
    made = draft.begin(place)
    with draft.held(made):
        names = (IDENTITY, *rank_files(0))
        data = step.to_bytes(4, "little") * 500_000
        sums = {name: draft.write_file(made / name, [data]) for name in names}
        draft.finish(made, place, Manifest(step, 1, sums))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_9_during_a_write_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    """At 20 random times: what was told to be written is there, all are whole, drafts go."""
    chosen, last, drafts = random.Random(9), 0, 0  # noqa: S311 - when, by a seed
    for _ in range(20):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(last + 1)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout
        first = writer.stdout.readline()  # it is at it
        time.sleep(chosen.random() * 0.1)
        writer.send_signal(signal.SIGKILL)
        told = (first + writer.communicate()[0]).split()
        found = folder.checkpoints(tmp_path)
        for one in found:
            Manifest.of(one).check(one)
        assert folder.step_of(found[-1]) >= int(told[-1]) > last
        last = folder.step_of(found[-1])
        drafts += len(list((tmp_path / folder.CHECKPOINTS).glob(".*")))
        draft.clean(tmp_path)
        assert not list((tmp_path / folder.CHECKPOINTS).glob(".*"))
    assert drafts > 5  # it was killed in the middle of one


@pytest.mark.dist
@pytest.mark.slow
def test_bits_flipped_in_a_checkpoint_of_a_training_are_refused(copied: Path) -> None:
    """300 of 300, over all bytes of all files, by what the launcher does before any rank."""
    from realrun.cli.train_rank import check_out  # noqa: PLC0415 - of a command line

    settings = TrainSettings(
        size="tiny", context=16, batch=8, steps=24, warmup=12, strategy="co2:tau=4"
    )
    path = copied / "out/checkpoints/step-000024"
    files = sorted(path.iterdir())
    assert {one.name for one in files} > {MANIFEST, folder.IDENTITY}
    check_out(settings, copied / "out", 2, folder.Resume())
    sizes = [one.stat().st_size for one in files]
    chosen = random.Random(300)  # noqa: S311 - which bits, by a seed
    for _ in range(300):
        (file,) = chosen.choices(files, sizes)
        place, bit = chosen.randrange(file.stat().st_size), 1 << chosen.randrange(8)
        for back in (False, True):
            with file.open("r+b") as opened:
                opened.seek(place)
                (byte,) = opened.read(1)
                opened.seek(place)
                opened.write(bytes([byte ^ bit]))
            if not back:
                with pytest.raises(Co2simError, match=re.escape(f"{file.name}: ")):
                    check_out(settings, copied / "out", 2, folder.Resume())
    check_out(settings, copied / "out", 2, folder.Resume())
