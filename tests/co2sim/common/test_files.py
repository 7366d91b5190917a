"""Files from others: what is opened, how much of it is read, and what of it is shown."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from analysis.published.tables import from_csv
from co2sim.catalog import load_cluster, load_model
from co2sim.common import files
from co2sim.common.errors import CatalogError, OptionError, cut, error_line, visible
from co2sim.common.files import write_atomically
from co2sim.prediction.published import read_speeds
from realrun.launch.launcher import run_local

EXAMPLE = (ROOT / "examples/my-cluster.toml").read_text()
GPU = (ROOT / "examples/my-gpu.toml").read_text()
RUN = ("-m", "gpt2-small", "-s", "ddp", "-g", "4")


READERS: dict[str, Callable[[Path], object]] = {
    "toml": lambda path: load_cluster(str(path)),
    "json": lambda path: load_model(str(path)),
    "csv": lambda path: from_csv(path, "check"),
    "published": read_speeds,
}
SUFFIXES = {"toml": ".toml", "json": ".json", "csv": ".csv", "published": ".toml"}


@pytest.mark.parametrize("kind", READERS)
def test_only_regular_files_of_a_limited_size_are_read(tmp_path: Path, kind: str) -> None:
    """Whatever reads them: no reader waits, and none reads without end."""
    pipe, device, folder, large = (tmp_path / f"{n}{SUFFIXES[kind]}" for n in "abcd")
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    folder.mkdir()
    with large.open("wb") as file:
        file.truncate(16_000_001)
    regular = "not a regular file"
    for path, token in (
        (pipe, regular),
        (device, regular),
        (folder, "folder|regular"),
        (large, "larger than 16 MB"),
    ):
        with pytest.raises(CatalogError, match=token):
            READERS[kind](path)


@pytest.mark.parametrize("name", ["gpu", "failures"])
def test_a_cluster_from_others_names_no_other_file_of_this_disk(tmp_path: Path, name: str) -> None:
    """Neither by its path, nor through a link."""
    (tmp_path / "secret.toml").write_text(GPU)
    inside = tmp_path / "cluster"
    inside.mkdir()
    (inside / "l.toml").symlink_to(tmp_path / "secret.toml")
    lines = [line for line in EXAMPLE.splitlines() if not line.startswith(f"{name} =")]
    for other in (
        *("/dev/zero", "/etc/passwd", "../secret.toml", "..", "below/../../secret.toml", "l.toml"),
    ):
        (inside / "mine.toml").write_text("\n".join([f"{name} = {json.dumps(other)}", *lines]))
        with pytest.raises(CatalogError, match="in the folder of this"):
            load_cluster(str(inside / "mine.toml"))


@pytest.mark.parametrize("beside", ["own.toml", "./own.toml", "below/own.toml"])
def test_a_cluster_names_files_beside_it_and_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """From whatever folder it is read; on the command line any file may be named."""
    path = tmp_path / "a" / beside
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(GPU)
    (tmp_path / "a/mine.toml").write_text(EXAMPLE.replace('"a100-40"', json.dumps(beside)))
    want = tomllib.loads(GPU)["name"]
    assert load_cluster(str(tmp_path / "a/mine.toml")).value.gpu.name == want
    monkeypatch.chdir(tmp_path / "a")
    assert load_cluster("mine.toml").value.gpu.name == want
    assert load_cluster("dgx-h100", {"gpu": str(path)}).value.gpu.name == want


DEEP = {
    "arrays": "a = " + "[" * 5000,
    "names": "a" + ".a" * 300_000 + " = 1",
    "a header": "[a" + ".a" * 300_000 + "]",
    "closed": "a = " + "[" * 40 + "]" * 40,
}


@pytest.mark.parametrize("what", DEEP)
def test_toml_that_is_nested_deeply_is_refused_before_it_is_read(what: str) -> None:
    """Reading such names would take hours."""
    with pytest.raises(ValueError, match="more than 32 levels deep"):
        files.toml(DEEP[what])


@given(st.recursive(st.text() | st.floats(allow_nan=False), st.lists, max_leaves=20))
def test_json_is_read_as_written_but_for_control_characters(tree: object) -> None:
    """Of any tree of a depth that is allowed."""

    def shown(node: object) -> object:
        return list(map(shown, node)) if isinstance(node, list) else visible_or_same(node)

    def visible_or_same(node: object) -> object:
        return visible(node) if isinstance(node, str) else node

    assert files.json_tree(json.dumps(tree)) == shown(tree)
    assert files.json_line(json.dumps(tree)) == shown(tree)


@given(st.text())
def test_a_line_of_error_is_one_short_line_of_visible_characters(text: str) -> None:
    """Whatever is in it; both ends of a longer one are kept."""
    for message in (text, text * 100, "begin " + text * 100 + " end"):
        line = error_line(message)
        assert line.startswith("error: ")
        assert len(line) <= 400
        assert len(line.splitlines()) == 1
        assert visible(line) == line
    assert error_line("begin " + "x" * 10_000 + " end").endswith(" end")
    assert cut("abc", 3) == "abc"


def test_an_escape_sequence_in_a_name_does_not_reach_the_terminal(
    cli: Command, tmp_path: Path
) -> None:
    """Of a cluster, in tables, lists, schedules and JSON; it is shown as text."""
    path = tmp_path / "evil.toml"
    evil = r"\u001b]0;pwned\u0007\u001b[2J\u202e"
    lines = [line for line in EXAMPLE.splitlines() if not line.startswith(("name", "source"))]
    path.write_text("\n".join([f'name = "{evil}"', f'source = "{evil}"', *lines]))
    for words in (
        ["run", "-c", str(path), *RUN],
        ["run", "-c", str(path), *RUN, "--json"],
        ["show", "-c", str(path), *RUN],
        ["list", str(path)],
    ):
        ended = cli(*words)
        assert ended.code == 0
        assert visible(ended.out) == ended.out
        assert visible(ended.err) == ended.err
    assert r"\x1b]0;pwned\x07" in cli("run", "-c", str(path), *RUN).out
    ended = cli("run", "-c", "\x1b[2J", *RUN)
    assert visible(ended.err) == ended.err
    assert r"\x1b[2J" in ended.err


def test_drafts_are_new_files_with_random_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody put where a draft could be is neither opened nor followed; all is synced."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    names: list[str] = []
    synced: list[int] = []
    opened = os.open

    def watched(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            names.append(Path(path).name)
            assert flags & os.O_EXCL
            assert flags & os.O_NOFOLLOW
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "fsync", synced.append)
    (tmp_path / f".a.csv.{os.getpid()}").symlink_to(victim)  # the name of a draft, once
    for _ in range(3):
        write_atomically({tmp_path / "a.csv": b"new"})
    assert len(set(names)) == 3
    assert len(synced) == 6  # the file and its folder
    assert victim.read_text() == "kept"
    assert (tmp_path / "a.csv").read_bytes() == b"new"
    monkeypatch.setattr("secrets.token_hex", lambda _: "same")
    (tmp_path / ".draft-same").symlink_to(victim)
    with pytest.raises(OptionError, match="exists"):
        write_atomically({tmp_path / "a.csv": b"newer"})
    assert victim.read_text() == "kept"
    assert (tmp_path / ".draft-same").is_symlink()
    assert (tmp_path / "a.csv").read_bytes() == b"new"


# --- runs from others ---------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize(
    "words",
    [
        ["run", "-c", "nope", *RUN[:4]],
        pytest.param(
            ["train", "--task", "text", "--out", "/proc/nowhere"], marks=pytest.mark.nightly
        ),
    ],
)
def test_bad_input_of_ranks_is_one_line_and_code_2(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of three ranks, started as a lab starts them, refuses it: it is told once."""
    pytest.importorskip("torch")
    assert run_local(["realrun", *words], 3) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(r"\[rank \d\] error: ", lines[0])
