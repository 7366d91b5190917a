"""Checkpoints: what is read back is what was written, or is refused; nothing in them is run."""

import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import random
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from co2sim.errors import OptionError
from co2sim.schedule import Layout
from realrun.errors import CheckpointError, DamagedError
from realrun.train import checkpoint, draft, folder
from realrun.train.manifest import (
    MANIFEST,
    OLD,
    FileSum,
    Manifest,
    Reading,
    check_checkpoint,
)
from realrun.train.tensor_file import join, read_tensors, split, tensor_parts

IDENTITY = {"strategy": "co2(tau=4)", "lr": 0.01}
RANKS = 2
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
Ranks = Callable[[Callable[[Any], Any]], list[Any]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Calls a function on two ranks that are threads; what it gave or raised on each."""
    barrier, texts = threading.Barrier(RANKS), [""] * RANKS

    def gather(device: Any, text: str) -> list[str]:
        texts[device.rank] = text
        barrier.wait(10)
        found = list(texts)
        barrier.wait(10)
        return found

    def on_all(work: Callable[[Any], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            try:
                device = SimpleNamespace(rank=rank)
                return work(SimpleNamespace(rank=rank, layout=Layout(1, RANKS), device=device))
            except CheckpointError as error:
                return error

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(one, range(RANKS)))

    monkeypatch.setattr("realrun.train.everywhere._gather", gather)
    return on_all


def state(rank: int, step: int) -> dict[str, Any]:
    """What a rank saves, small."""
    made = torch.Generator().manual_seed(100 * step + rank)
    return {
        "model": [torch.randn(5, 3, generator=made), torch.randn(4, generator=made)],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.95)},
        "step": step,
        "losses": [4.5 + rank, float("inf")],
    }


def save(on_all: Ranks, place: Path, *steps: int) -> list[Path]:
    """Checkpoints after these steps."""
    for step in steps:
        found = on_all(
            lambda world, step=step: checkpoint.save(
                place, step, state(world.rank, step), IDENTITY, world
            )
        )
        assert all(isinstance(one, Path) for one in found), found
    return folder.checkpoints(place)


def load(on_all: Ranks, path: Path, *, trust: bool = False) -> list[Any]:
    """What all ranks read or raise."""
    return on_all(lambda world: checkpoint.load(path, IDENTITY, world, trust=trust))


def equal(one: Any, other: Any) -> bool:
    """Of one type, and bit for bit the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bits(one) == bits(other)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(equal(a, b) for a, b in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return repr(one) == repr(other)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def refused(on_all: Ranks, path: Path) -> str:
    """The one line of all ranks that refuse a checkpoint; the launcher refuses it, too."""
    said = load(on_all, path)
    assert all(isinstance(one, DamagedError) and one.everywhere for one in said), said
    assert str(said[0]) == str(said[1])
    with pytest.raises(DamagedError) as caught:
        check_checkpoint(path, IDENTITY, RANKS, trust=False)
    for line in (str(said[0]), str(caught.value)):
        assert len(line) <= 390
        assert line.isprintable()
        assert line.startswith("cannot read the checkpoint ")
    assert str(caught.value).rpartition("; ")[2] == str(said[0]).rpartition("; ")[2]
    return str(said[0])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bytes in any dtype and shape, some of them not contiguous, or parts of others."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = 2 * max(1, torch.Size(shape).numel()) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    whole = raw.view(dtype)[: torch.Size(shape).numel()].reshape(shape)
    return whole.transpose(0, -1) if shape and draw(st.booleans()) else whole


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), tensors())
KEYS = st.one_of(st.text(max_size=4), st.integers())
STATES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


@given(STATES)
def test_any_state_comes_back_bit_for_bit(given_: Any) -> None:
    """Through both files: types, keys that are numbers, tuples, NaN, and tensors of all kinds."""
    named: dict[str, Tensor] = {}
    text = json.dumps(split(given_, "", named))
    data = b"".join(tensor_parts(named))
    found = tensors_of(data)
    assert equal(join(json.loads(text), found), given_)


def test_what_we_write_is_what_safetensors_would_write() -> None:
    """Byte for byte, for tensors of all dtypes; names need not be ASCII."""
    made = {
        f"{number}/é{dtype}": torch.arange(6).reshape(2, 3).to(dtype)
        for number, dtype in enumerate(reversed(DTYPES))
    }
    made |= {"a": torch.zeros(0), "scalar": torch.tensor(2.5)}
    data = b"".join(tensor_parts(made))
    assert data == safetensors.torch.save(made)
    assert equal(tensors_of(data), {name: made[name] for name in tensors_of(data)})
    assert tensors_of(data).keys() == made.keys()


@given(st.data())
def test_a_file_of_tensors_that_safetensors_refuses_is_refused(draws: st.DataObject) -> None:
    """Headers with other numbers, names or bytes; what both read is the same."""
    made = {"a": torch.arange(6).reshape(2, 3), "b": torch.zeros(0), "c": torch.ones(4) > 0}
    data = bytearray(b"".join(tensor_parts(made)))
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draws.draw(st.integers(1, 3))):
        data[draws.draw(st.integers(0, header - 1))] = draws.draw(
            st.one_of(st.sampled_from(b'0123456789-[]{},:." eFIU'), st.integers(0, 255))
        )
    try:
        found = tensors_of(bytes(data))
    except ValueError:
        return
    assert equal(dict(sorted(found.items())), dict(sorted(theirs(bytes(data)).items())))


def theirs(data: bytes) -> dict[str, Tensor]:
    """What the library reads."""
    return safetensors.torch.load(data)


def tensors_of(data: bytes) -> dict[str, Tensor]:
    """What we read."""
    with ThreadPoolExecutor(1) as beside:
        return read_tensors(Reading(io.BytesIO(data), beside, len(data)))


def test_what_json_cannot_hold_is_refused_with_its_place() -> None:
    """Objects would need a pickle."""
    with pytest.raises(CheckpointError, match="outer/0 is a object: it cannot be saved"):
        split({"outer": [object()]}, "", {})
    with pytest.raises(CheckpointError, match=r"0/a is of torch\.complex64, which cannot be saved"):
        tensor_parts({"0/a": torch.zeros(1, dtype=torch.complex64)})


def test_every_rank_gets_its_own_state_back(ranks: Ranks, tmp_path: Path) -> None:
    """Two checkpoints are kept, and nothing else is in their folder."""
    found = save(ranks, tmp_path, 6, 12, 18)
    assert [one.name for one in found] == ["step-000012", "step-000018"]
    assert len(list((tmp_path / folder.CHECKPOINTS).iterdir())) == 2
    for path, step in zip(found, (12, 18), strict=True):
        assert equal(load(ranks, path), [state(0, step), state(1, step)])
        check_checkpoint(path, IDENTITY, RANKS, trust=False)


def test_300_of_300_flipped_bits_are_refused_with_the_name_of_the_file(
    ranks: Ranks, tmp_path: Path
) -> None:
    """One bit anywhere in any file: by all ranks with one line, and by the launcher."""
    before, path = save(ranks, tmp_path, 6, 12)
    names = sorted(one.name for one in path.iterdir())
    assert len(names) == 2 + 2 * RANKS
    chosen = random.Random(18)  # noqa: S311 - which bits, by a seed
    for _ in range(300):
        name = chosen.choice(names)
        data = (path / name).read_bytes()
        flipped = bytearray(data)
        flipped[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        (path / name).write_bytes(flipped)
        said = refused(ranks, path)
        assert f"{name}: " in said
        assert said.endswith("; step-000006 is whole: go on from it with --resume --from-step 6")
        if name.startswith("rank"):
            assert f": rank {name[4]}: {name}: " in said
        (path / name).write_bytes(data)
    assert equal(load(ranks, path), [state(0, 12), state(1, 12)])
    assert equal(load(ranks, before), [state(0, 6), state(1, 6)])


def truncated(path: Path) -> None:
    """The last byte is missing."""
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path: Path) -> None:
    """No byte is left."""
    path.write_bytes(b"")


def longer(path: Path) -> None:
    """A byte too many."""
    path.write_bytes(path.read_bytes() + b"\n")


def linked(path: Path) -> None:
    """The right bytes, but behind a link."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def piped(path: Path) -> None:
    """A pipe, which would never end."""
    path.unlink()
    os.mkfifo(path)


def folded(path: Path) -> None:
    """A folder."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [truncated, emptied, longer, linked, piped, folded, Path.unlink])
@pytest.mark.parametrize("name", [MANIFEST, folder.IDENTITY, "rank1.safetensors", "rank0.json"])
def test_a_damaged_file_is_named(
    ranks: Ranks, tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    """Whatever happened to it."""
    (path,) = save(ranks, tmp_path, 6)
    harm(path / name)
    said = refused(ranks, path)
    assert f": {name}: " in said
    assert (harm is linked) == (": it is a link;" in said)
    assert said.endswith("; no checkpoint before it is whole: start again with another --out")


@pytest.mark.parametrize(
    ("one", "other"), [("rank0.safetensors", "rank1.safetensors"), ("rank0.json", "rank1.json")]
)
def test_files_in_each_others_places_are_refused(
    ranks: Ranks, tmp_path: Path, one: str, other: str
) -> None:
    """A rank must not go on with what another one held."""
    (path,) = save(ranks, tmp_path, 6)
    data = (path / one).read_bytes()
    (path / one).write_bytes((path / other).read_bytes())
    (path / other).write_bytes(data)
    assert f": rank 0: {one}: " in refused(ranks, path)


def test_files_of_another_checkpoint_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A manifest or a rank's file of another step, and a whole checkpoint under another name."""
    before, path = save(ranks, tmp_path, 6, 12)
    kept = {one.name: one.read_bytes() for one in path.iterdir()}
    for name, said in (
        (MANIFEST, ": manifest.json: it is of step 6;"),
        ("rank1.safetensors", ": rank1.safetensors: its checksum is not that of manifest.json;"),
    ):
        (path / name).write_bytes((before / name).read_bytes())
        assert said in refused(ranks, path)
        (path / name).write_bytes(kept[name])
    path.rename(path.with_name("step-000018"))
    last = folder.checkpoints(tmp_path)[-1]
    assert ": manifest.json: it is of step 12;" in refused(ranks, last)


CRAFTED = {
    "a number": b"3",
    "a list": b"[1]",
    "deep nesting": b"[" * 100_000,
    "no files": b'{"format": 1, "step": 6, "ranks": 2}',
    "infinity": b'{"format": 1, "step": Infinity, "ranks": 2, "files": {}}',
    "files elsewhere": Manifest(6, 1, {"../../x": FileSum(1, ""), "b": FileSum(1, "")}).text(),
    "many ranks": Manifest(6, 10**15, {}).text(),
    "files of no rank": Manifest(6, 1, {str(one): FileSum(1, "") for one in range(3)}).text(),
    "negative ranks": Manifest(6, -1, {}).text(),
    "no text": b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("text", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_manifest_is_one_line(ranks: Ranks, tmp_path: Path, text: str | bytes) -> None:
    """Also one with the right checksum of itself."""
    (path,) = save(ranks, tmp_path, 6)
    (path / MANIFEST).write_bytes(text.encode() if isinstance(text, str) else text)
    assert ": manifest.json: it is not what was written;" in refused(ranks, path)


def tensors_header(text: str) -> bytes:
    """A file of tensors that has only a header."""
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rank0.json", b"[" * 100_000),
        ("rank0.json", b'{"tensor": "x"}'),
        ("rank0.json", b'{"map": 3}'),
        ("rank0.json", b'{"a": 1, "b": 2}'),
        ("rank0.safetensors", b"\xff" * 64),
        ("rank0.safetensors", b""),
        ("rank0.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000),
        ("rank0.safetensors", tensors_header('{"a": 3}')),
        (
            "rank0.safetensors",
            tensors_header(f'{{"a":{{"dtype":"F32","shape":[0,{10**30}],"data_offsets":[0,0]}}}}'),
        ),
        ("rank0.safetensors", b"\x02" + bytes(7) + b"{}" + b"too many"),
    ],
)
def test_a_crafted_file_is_one_line_though_its_checksum_is_right(
    ranks: Ranks, tmp_path: Path, name: str, data: bytes
) -> None:
    """Who can write a file can write a manifest, too; what it holds is still only data."""
    (path,) = save(ranks, tmp_path, 6)
    sums = dict(Manifest.of(path).files)
    (path / name).unlink()
    sums[name] = draft.write_file(path / name, [data])
    (path / MANIFEST).write_text(Manifest(6, RANKS, sums).text())
    for said in load(ranks, path):
        assert isinstance(said, DamagedError)
        assert f": rank 0: {name}: " in str(said)
        assert len(str(said)) <= 390


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        (folder.IDENTITY, 20_000_000_000, "it is larger than 1 MB"),
        ("rank1.json", 20_000_000_000, "it is larger than 16 MB"),
        (MANIFEST, 20_000_000_000, "it is larger than 4 MB"),
        (folder.IDENTITY, 1_000_001, "it is larger than 1 MB"),
        ("rank1.json", 16_000_001, "it is larger than 16 MB"),
    ],
)
def test_a_file_that_is_too_large_is_not_read(
    ranks: Ranks, tmp_path: Path, name: str, size: int, said: str
) -> None:
    """Though the manifest says that this is its size; nothing so large is ever in memory."""
    (path,) = save(ranks, tmp_path, 6)
    os.truncate(path / name, size)
    if name != MANIFEST:
        sums = dict(Manifest.of(path).files)
        own = hashlib.sha256((path / name).read_bytes()).hexdigest() if size < 10**9 else "0" * 64
        sums[name] = FileSum(size, own)
        (path / MANIFEST).write_text(Manifest(6, RANKS, sums).text())
    tracemalloc.start()
    found = load(ranks, path)
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()
    for line in found:
        assert isinstance(line, DamagedError)
        assert f"{name}: {said}; no checkpoint" in str(line)


def test_what_could_not_be_read_is_not_written(ranks: Ranks, tmp_path: Path) -> None:
    """A state with more than is read back is refused, and nothing is left of it."""
    state_ = {"text": "x" * 16_000_000}
    for said in ranks(lambda world: checkpoint.save(tmp_path, 6, state_, IDENTITY, world)):
        assert str(said).endswith("rank 0: rank0.json: it would be larger than 16 MB")
    assert not list((tmp_path / folder.CHECKPOINTS).iterdir())


def test_a_manifest_of_many_ranks_fits(tmp_path: Path) -> None:
    """Ten thousand of them, whose files are as large as any."""
    one = FileSum(10**12, "f" * 64)
    names = [f"rank{rank}.{kind}" for rank in range(10_000) for kind in ("json", "safetensors")]
    path = tmp_path / "step-000006"
    path.mkdir()
    written = Manifest(6, 10_000, {folder.IDENTITY: one, **dict.fromkeys(names, one)})
    (path / MANIFEST).write_text(written.text())
    assert Manifest.of(path) == written


@pytest.mark.parametrize("old", [False, True])
def test_a_folder_behind_a_link_is_refused_as_files_are(
    ranks: Ranks, tmp_path: Path, *, old: bool
) -> None:
    """Whoever the link belongs to; the one before it is offered."""
    _, path = save(ranks, tmp_path, 6, 12)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    if old:
        (path / MANIFEST).rename(path / OLD)
    for line in load(ranks, path, trust=old):
        assert "step-000012: it is a link, not a folder; step-000006 is whole" in str(line)


class Runs:
    """An object whose pickle runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def test_a_crafted_checkpoint_runs_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """A pickle in the old format's .metadata stays unread, with a manifest beside it or without."""
    (path,) = save(ranks, tmp_path, 6)
    ran = tmp_path / "ran"
    crafted = pickle.dumps(Runs(f"touch {ran}"))
    (path / OLD).write_bytes(crafted)
    assert equal(load(ranks, path), [state(0, 6), state(1, 6)])
    (path / MANIFEST).unlink()
    for said in load(ranks, path):
        assert "is of the old format, and reading that can run code that is in it" in str(said)
        assert str(said).endswith("add --trust if you know who wrote it")
        assert len(str(said)) <= 390
    with pytest.raises(CheckpointError, match="it is of the old format"):
        check_checkpoint(path, IDENTITY, RANKS, trust=False)
    assert not ran.exists()
    load(ranks, path, trust=True)
    assert ran.exists()  # the crafted one works: it was not read before


def test_the_old_format_is_read_with_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; a damaged one is one line, not a traceback of torch."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import checkpoints  # type: ignore[import-not-found]  # noqa: PLC0415 - a folder of scripts

    monkeypatch.setattr(checkpoints, "IDENTITY_OF", IDENTITY)
    world: Any = SimpleNamespace(rank=0, layout=Layout(1, 1), device=torch.device("cpu"))
    path = tmp_path / folder.CHECKPOINTS / folder.checkpoint_name(6)
    with pytest.warns(UserWarning, match="torch.distributed"):
        checkpoints.write_pickled(path, state(0, 6), 0, 1)
    with pytest.raises(CheckpointError, match="add --trust"):
        checkpoint.load(path, IDENTITY, world)
    assert equal(checkpoint.load(path, IDENTITY, world, trust=True), state(0, 6))
    check_checkpoint(path, IDENTITY, 1, trust=True)
    (path / OLD).write_bytes((path / OLD).read_bytes()[:-20])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, IDENTITY, world, trust=True)
    assert len(str(caught.value)) <= 390
    (path / folder.IDENTITY).write_text("[1]")
    with pytest.raises(CheckpointError, match=r"identity\.json: it is no JSON object"):
        check_checkpoint(path, IDENTITY, 1, trust=True)


def test_a_checkpoint_of_another_training_is_refused_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """With one line; it is not damaged, so no other is offered."""
    (path,) = save(ranks, tmp_path, 6)
    other = {**IDENTITY, "lr": 1.0}
    for said in ranks(lambda world: checkpoint.load(path, other, world)):
        assert str(said).endswith(": it is of another training: its lr is 0.01, not 1.0")


def full(path: Path, parts: Any, written: Callable[..., FileSum]) -> FileSum:
    """Write, but the disk is full for the tensors of rank 1."""
    if path.name == "rank1.safetensors":
        path.write_bytes(parts[0])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return written(path, parts)


def test_a_full_disk_is_told_by_all_ranks_and_leaves_nothing(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank and the cause in one line; no draft, and the checkpoint before is whole."""
    (before,) = save(ranks, tmp_path, 6)
    written = draft.write_file
    monkeypatch.setattr(draft, "write_file", lambda path, parts: full(path, parts, written))
    found = ranks(lambda world: checkpoint.save(tmp_path, 12, state(0, 12), IDENTITY, world))
    for one in found:
        assert isinstance(one, CheckpointError)
        assert one.everywhere
        assert str(one).endswith("step-000012: rank 1: rank1.safetensors: No space left on device")
    assert list((tmp_path / folder.CHECKPOINTS).iterdir()) == [before]
    assert equal(load(ranks, before), [state(0, 6), state(1, 6)])


def test_when_the_last_rename_fails_the_checkpoint_in_its_place_stays(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second write of the same step replaces the first, or leaves it as it was."""
    (path,) = save(ranks, tmp_path, 6)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == path and self.name in made:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return rename(self, target)

    made: list[str] = []
    begin = draft.begin
    monkeypatch.setattr(draft, "begin", lambda place: (made.append((d := begin(place)).name), d)[1])
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", failing)
        found = ranks(lambda world: checkpoint.save(tmp_path, 6, state(1, 1), IDENTITY, world))
    assert all("Input/output error" in str(one) for one in found), found
    assert list(path.parent.iterdir()) == [path]
    assert equal(load(ranks, path), [state(0, 6), state(1, 6)])
    ranks(lambda world: checkpoint.save(tmp_path, 6, state(world.rank, 1), IDENTITY, world))
    assert list(path.parent.iterdir()) == [path]
    assert equal(load(ranks, path), [state(0, 1), state(1, 1)])


def test_going_on_from_an_earlier_step_keeps_it(ranks: Ranks, tmp_path: Path) -> None:
    """Until two are whole after it: what is later, and perhaps damaged, does not count."""
    save(ranks, tmp_path, 12, 18)
    names = [one.name for one in save(ranks, tmp_path, 14)]
    assert names == ["step-000012", "step-000014", "step-000018"]


def test_drafts_that_were_left_are_removed_and_others_are_not(ranks: Ranks, tmp_path: Path) -> None:
    """Of both formats, unless they are being written, are links, or are not drafts at all."""
    place = tmp_path / folder.CHECKPOINTS
    left = [place / ".step-000006", place / f".step-000012.{'0' * 16}"]
    stay = [place / name for name in (".step-x", ".mine", f".step-000012.{'0' * 16}.txt")]
    busy = place / f".step-000018.{'1' * 16}"
    target = tmp_path / "target"
    for one in (*left, *stay, busy, target):
        one.mkdir(parents=True)
        (one / "file").write_text("x")
    link = place / f".step-000024.{'2' * 16}"
    link.symlink_to(target)
    with draft.held(busy):
        save(ranks, tmp_path, 30)
        assert {one.name for one in place.iterdir()} == {
            one.name for one in (*stay, busy, link, place / "step-000030")
        }
    draft.clean(tmp_path)
    assert not busy.exists()
    assert (target / "file").exists()


def test_a_draft_is_held_while_ranks_write(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a lock that another process sees, from the first file to the last."""
    written, seen = draft.write_file, []

    def looked(path: Path, parts: Any) -> FileSum:
        number = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            seen.append(path.name)
        finally:
            os.close(number)
        return written(path, parts)

    monkeypatch.setattr(draft, "write_file", looked)
    (path,) = save(ranks, tmp_path, 6)
    assert sorted(seen) == sorted(one.name for one in path.iterdir())


def test_names_of_drafts_cannot_be_foreseen_and_no_link_is_followed(
    tmp_path: Path,
) -> None:
    """A file that is there already is an error, too."""
    place = tmp_path / folder.CHECKPOINTS / "step-000006"
    names = {draft.begin(place).name for _ in range(3)}
    assert all(len(name) == len(".step-000006.") + 16 for name in names)
    victim = tmp_path / "victim"
    victim.write_text("x")
    (tmp_path / "link").symlink_to(victim)
    for path in (tmp_path / "link", victim):
        with pytest.raises(FileExistsError):
            draft.write_file(path, [b"y"])
    assert victim.read_text() == "x"


def test_a_step_to_go_on_from_must_be_there(tmp_path: Path) -> None:
    """The steps that are there are told."""
    assert folder.Resume().checkpoint(tmp_path) is None
    with pytest.raises(OptionError, match=r"--from-step is 7, and there is no such .* holds none"):
        folder.Resume(7).checkpoint(tmp_path)
    for step in (6, 12):
        (tmp_path / folder.CHECKPOINTS / folder.checkpoint_name(step)).mkdir(parents=True)
    assert folder.Resume(6).checkpoint(tmp_path) == folder.checkpoints(tmp_path)[0]
    with pytest.raises(OptionError, match="are of steps 6, 12"):
        folder.Resume(7).checkpoint(tmp_path)


@given(st.text(max_size=300))
def test_what_an_error_shows_is_short_and_obeyed_by_no_terminal(text: str) -> None:
    """No control character, no line break; of long texts the end, which tells more of a path."""
    found = folder.shown(text)
    assert found.isprintable()
    assert len(found) <= 80
    if text.isascii() and text.isalnum():
        assert found.endswith(text[-77:])
