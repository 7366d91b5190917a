"""Checkpoints: what is read is what was written, or is refused by name; nothing in them is run."""

import errno
import io
import json
import math
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import Layout
from realrun.errors import CheckpointError, DamagedError
from realrun.train import checkpoint, folder, log
from realrun.train.folder import STATE, Resume, Saved, check_checkpoint, checkpoints

IDENTITY = {"strategy": "co2.published(tau=4)", "lr": 0.01, "betas": (0.9, 0.95)}
RANKS = 2
FILES = ["rank0.safetensors", "rank1.safetensors", STATE]
BARRIER = threading.Barrier(RANKS)
VALUES: list[Any] = [None] * RANKS
THREAD = threading.local()
"""Which rank a thread is, of how many."""


@pytest.fixture(autouse=True, scope="module")
def gathered() -> Iterator[None]:
    """Ranks are threads of this process, and hear each other through a list."""

    def gather(value: Any) -> list[Any]:
        if getattr(THREAD, "ranks", 1) == 1:
            return [value]
        VALUES[THREAD.rank] = value
        BARRIER.wait(10)
        found = list(VALUES)
        BARRIER.wait(10)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_gather", gather)
        yield


def on_ranks(work: Callable[[Any], Any], ranks: int = RANKS) -> list[Any]:
    """What a function gives or raises on each rank."""

    def one(rank: int) -> Any:
        THREAD.rank, THREAD.ranks = rank, ranks
        try:
            return work(SimpleNamespace(rank=rank, layout=Layout(1, ranks)))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def state(rank: int, step: int) -> dict[str, Any]:
    """What a rank saves, small."""
    made = torch.Generator().manual_seed(100 * step + rank)
    return {
        "model": [torch.randn(5, 3, generator=made), torch.randn(4, generator=made)],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.95)},
        "losses": [4.5 + rank, float("inf")],
    }


def write(place: Path, step: int, given_: Any = None, ranks: int = RANKS) -> list[Any]:
    """What all ranks give that write a state after a step."""
    mine = [given_ or state(rank, step) for rank in range(ranks)]
    return on_ranks(lambda w: checkpoint.save(place, step, mine[w.rank], IDENTITY, w), ranks)


def save(place: Path, *steps: int, ranks: int = RANKS) -> list[Path]:
    """Checkpoints after these steps."""
    for step in steps:
        assert all(isinstance(one, Path) for one in write(place, step, ranks=ranks))
    return checkpoints(place)


def load(path: Path, identity: Any = IDENTITY, ranks: int = RANKS) -> list[Any]:
    """What all ranks read or raise."""
    return on_ranks(lambda world: checkpoint.load(path, identity, world), ranks)


def whole(path: Path, ranks: int = RANKS) -> bool:
    """Whether all ranks read what they wrote."""
    step = folder.step_of(path)
    return shown(load(path, ranks=ranks)) == shown([state(rank, step) for rank in range(ranks)])


def shown(value: Any) -> str:
    """A text that differs where types or any bits do."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return f"{value.dtype} {value.shape} {raw}"
    if isinstance(value, dict):
        return f"{{{[(shown(key), shown(one)) for key, one in value.items()]}}}"
    if isinstance(value, list | tuple):
        return f"{type(value)}{[shown(one) for one in value]}"
    return repr(value)


def names(place: Path) -> list[str]:
    """What is in a folder."""
    return sorted(one.name for one in place.iterdir())


def refused(path: Path) -> str:
    """The one line of all ranks that refuse a checkpoint."""
    said = load(path)
    assert all(isinstance(one, DamagedError) and one.everywhere for one in said), said
    assert str(said[0]) == str(said[1])
    assert str(said[0]).isprintable()
    assert len(str(said[0])) <= 390
    return str(said[0])


def refused_by_all(path: Path) -> tuple[str, str]:
    """The line of the ranks, and that of the launcher, which looks before they start."""
    with pytest.raises(DamagedError) as caught:
        check_checkpoint(path, IDENTITY, RANKS)
    return refused(path), str(caught.value)


BASE = torch.arange(6.0)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bytes in any dtype and shape, some of them not contiguous, or parts of others."""
    dtype = draw(st.sampled_from(sorted(checkpoint._DTYPES, key=str)))
    shape = torch.Size(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = 2 * max(1, shape.numel()) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=count, max_size=count)))
    raw = torch.frombuffer(data, dtype=torch.uint8) & (1 if dtype == torch.bool else 255)
    one = raw.view(dtype)[: shape.numel()].reshape(shape)
    return one.transpose(0, -1) if shape and draw(st.booleans()) else one


STATES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(STATES)
@example({"twice": [BASE, BASE], "parts": (BASE[:2], BASE[1:]), ("a", 1): BASE.view(2, 3).t()})
@example([torch.tensor(1.5, requires_grad=True), torch.zeros(0, 3), BASE > 2])
def test_any_state_comes_back_bit_for_bit(written: Any) -> None:
    """Types, keys that are numbers, tuples, NaN, and tensors of all kinds, also of one memory."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "state"
        checkpoint.write(place, {"": written}, {}, 0)
        assert names(Path(name)) == ["state"]
        assert shown(checkpoint.read(place, Saved.of(place), 0)) == shown({"": written})


COMPLEX = torch.zeros(1, dtype=torch.complex64)


@pytest.mark.parametrize("one", [object(), {1}, COMPLEX, BASE.to_sparse()], ids=type)
def test_what_cannot_be_saved_is_refused_with_its_place(one: Any, tmp_path: Path) -> None:
    """Nothing is left of the checkpoint."""
    (said,) = write(tmp_path, 6, {"outer": [0, one]}, ranks=1)
    assert isinstance(said, CheckpointError)
    assert ": outer/1 is " in str(said)
    assert names(tmp_path / folder.CHECKPOINTS) == []


def test_every_rank_gets_its_own_state_back_and_two_checkpoints_stay(tmp_path: Path) -> None:
    """What was left of a write goes, and nothing else. What is later does not count."""
    place = tmp_path / folder.CHECKPOINTS
    own = [".mine", f".step-000006.{'0' * 16}.txt", "step-x"]
    for name in (*own, f".step-000006.{'0' * 16}"):
        (place / name / "inside").mkdir(parents=True)
    link = place / f".step-000024.{'2' * 16}"
    link.symlink_to(place / ".mine")
    found = save(tmp_path, 6, 12, 18)
    assert names(place) == sorted([*own, link.name, "step-000012", "step-000018"])
    assert names(place / ".mine") == ["inside"]
    for path in found:
        assert whole(path)
        assert names(path) == FILES
        check_checkpoint(path, IDENTITY, RANKS)
    save(tmp_path, 14)
    assert [folder.step_of(one) for one in checkpoints(tmp_path)] == [12, 14, 18]
    assert load(write(tmp_path, 18, {"new": 1})[0]) == [{"new": 1}] * RANKS  # it is replaced


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Whole checkpoints after steps 6 and 12."""
    return save(tmp_path_factory.mktemp("two"), 6, 12)


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """A copy of a checkpoint that has no other beside it."""
    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / folder.CHECKPOINTS / path.name
        shutil.copytree(path, target)
        yield target


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@example(STATE, 0.0, 0)
def test_a_flipped_bit_is_refused_with_the_name_of_the_file(
    two: list[Path], name: str, where: float, bit: int
) -> None:
    """By all ranks, and by the launcher; both say which checkpoint is whole."""
    file = two[1] / name
    data = bytearray(file.read_bytes())
    at = int(where * len(data))
    try:
        data[at] ^= 1 << bit
        file.write_bytes(data)
        lines = refused_by_all(two[1])
    finally:
        data[at] ^= 1 << bit
        file.write_bytes(data)
    assert all(f": {name}: " in one and "--from-step 6" in one for one in lines)
    assert (": rank 1: " in lines[0]) == (name == "rank1.safetensors")


HARMS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "too large": lambda path: os.truncate(path, 20_000_000_000),
    "missing": Path.unlink,
    "of another rank": lambda path: shutil.copy(path.with_name(FILES[path.name == FILES[0]]), path),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@given(st.sampled_from(FILES), st.sampled_from(sorted(HARMS)))
@example("rank0.safetensors", "missing")
def test_a_damaged_file_is_named(two: list[Path], name: str, harm: str) -> None:
    """Whatever happened to it; with no whole checkpoint before it none is offered."""
    with copied(two[1]) as path:
        before = shutil.copytree(two[0], path.with_name(two[0].name))
        shutil.copytree(two[1], path.with_name("step-000018"))
        HARMS[harm](before / name)
        HARMS[harm](path / name)
        assert all(f": {name}: " in one and "--out" in one for one in refused_by_all(path))


def test_a_checkpoint_of_another_training_is_refused_by_all(two: list[Path]) -> None:
    """It is not damaged, so no other one is offered."""
    wrong = {**IDENTITY, "lr": 1.0}
    for identity, ranks, token in ((wrong, 2, "lr is 0.01, not 1.0"), (IDENTITY, 1, "ranks is 2")):
        for said in load(two[1], identity, ranks):
            assert token in str(said)
            assert not isinstance(said, DamagedError)
        with pytest.raises(CheckpointError, match=token):
            check_checkpoint(two[1], identity, ranks)


def craft(path: Path, data: bytes | None = None, **content: Any) -> None:
    """Change the file of rank 0, or parts of state.json, so that all checksums fit."""
    text = json.loads((path / STATE).read_bytes())
    del text["sha256"]
    if data is not None:
        (path / FILES[0]).write_bytes(data)
        text["files"][FILES[0]] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    (path / STATE).write_bytes(folder.state_text(text | content))


ODD = [None, 3, -1, "x", [], {}, [None, None], {"a": 1, "b": 2}, {FILES[0]: 3}]
ODD += [{"tensor": "x"}, {"map": 3}, {"map": [[[], 1]]}, {"tuple": None}, {"x": []}]
ODD += [{"bytes": size, "sha256": ""} for size in (-1, math.inf, 10**400, "x")]


@given(st.sampled_from(["identity", "files", "states", "file", "state"]), st.sampled_from(ODD))
@example("state", {"tensor": "x"})
def test_a_crafted_state_is_one_line(two: list[Path], what: str, value: Any) -> None:
    """Who can write a file can write checksums, too; what it holds is still only data."""
    with copied(two[0]) as path:
        was = Saved.of(path)
        parts = {"state": {"states": [value, was.states[1]]}}
        parts |= {"file": {"files": {**was.files, FILES[0]: value}}}
        craft(path, **parts.get(what, {what: value}))
        found, _ = load(path)
    if isinstance(found, CheckpointError):
        assert str(found).isprintable()
    else:
        assert what in ("state", "states")  # it is one, though of no training


class Runs:
    """An object whose pickle makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return os.mkdir, (self.place,)


def test_nothing_in_a_checkpoint_is_run(two: list[Path], tmp_path: Path) -> None:
    """Pickles, and files of torch, are refused in the place of tensors and of JSON."""
    file, ran = io.BytesIO(), tmp_path / "ran"
    torch.save(Runs(ran), file)
    for data in (pickle.dumps(Runs(ran)), file.getvalue()):
        with copied(two[0]) as path:
            craft(path, data)
            assert f": rank 0: {FILES[0]}: " in refused(path)
            (path / STATE).write_bytes(data)
            assert f": {STATE}: " in refused(path)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Runs(ran)))  # noqa: S301 - made here
    assert ran.exists()  # they work: they were not read before


def opened(number: int) -> Path:
    """The file or folder of a descriptor."""
    return Path(f"/proc/self/fd/{number}").resolve()


class KilledError(BaseException):
    """The process is gone: nothing after it is done."""


@contextmanager
def failing(after: int, error: BaseException) -> Iterator[list[str]]:
    """Calls that change a disk fail once `after` of them were done; gives their names.

    An OSError comes once. A killed process does nothing any more, and the file that it was about to
    bring to the disk loses its second half.
    """
    done: list[str] = []
    dies = isinstance(error, KilledError)

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(first: Any, *given: Any, **more: Any) -> Any:
            done.append(name)
            if len(done) <= after or (len(done) > after + 1 and not dies):
                return call(first, *given, **more)
            if name == "fsync" and dies and opened(first).is_file():
                os.truncate(first, os.fstat(first).st_size // 2)
            raise error

        return inner

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "fsync", "rename", "replace"):
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        if dies:
            patch.setattr(shutil, "rmtree", wrapped("rmtree", shutil.rmtree))
        yield done


@pytest.mark.parametrize("step", [12, 18], ids=["again", "next"])
@pytest.mark.parametrize("error", [KilledError(), OSError(errno.EIO, "broken")], ids=type)
def test_a_failure_at_any_moment_leaves_the_last_whole_checkpoint(
    tmp_path: Path, step: int, error: BaseException
) -> None:
    """A killed process, or a disk that fails once. What is left of it goes with the next write."""
    dies, done = isinstance(error, KilledError), [""]
    for after in count():
        if len(done) < after:  # the last time all went well
            break
        place = tmp_path / str(after)
        save(place, 6, 12, ranks=1)
        with failing(after, error) as done, suppress(KilledError):
            write(place, step, ranks=1)
        kept = checkpoints(place)
        assert all(whole(path, ranks=1) for path in kept)
        assert folder.step_of(kept[-1]) >= (6 if step == 12 and dies else 12)
        assert dies or names(place / folder.CHECKPOINTS) == [one.name for one in kept]
        save(place, 24, ranks=1)
        assert len(names(place / folder.CHECKPOINTS)) == len(checkpoints(place)) == 2
    assert done.count("fsync") == 4  # both files, the draft, and the folder that has its name


def test_a_full_disk_is_told_by_all_ranks_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank, the file and the cause in one line; the checkpoint before is whole."""
    (before,) = save(tmp_path, 6)
    sync = os.fsync

    def full(number: int) -> None:
        if "rank1" in opened(number).name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    for said in write(tmp_path, 12):
        assert isinstance(said, CheckpointError)
        assert said.everywhere
        assert "step-000012: rank 1: rank1.safetensors: No space" in str(said)
    assert names(before.parent) == [before.name]
    assert whole(before)


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
    assert Resume().checkpoint(tmp_path / "new") is None
    last, first = Resume().checkpoint(tmp_path), Resume(4).checkpoint(tmp_path)
    assert (last and last.name, first and first.name) == ("step-12", "step-000004")
