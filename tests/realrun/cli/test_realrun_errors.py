"""Bad input of `realrun`: one line on stderr, exit code 2, and nothing is started or written."""

import shlex
from pathlib import Path

import pytest
from commands import in_process, refused
from test_realrun_cli import CLUSTER

pytest.importorskip("torch")

from realrun.cli import main

CASE = "run -c cluster.toml -m tiny-5m"
TRAIN = "train --nproc 2"
WORDS = {
    "CASE": CASE,
    "RUN": f"{CASE} --rounds 2 --kernels sleep",
    "TRAIN": TRAIN,
    "SMALL": f"{TRAIN} --size tiny --context 16 --batch 8 --steps 24",
    "LAB": "lab run --nodes 4 --rate '1 Gbit/s'",
}


@pytest.mark.parametrize(("line", "token"), refused("realrun-refused.txt", **WORDS))
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    line: str,
    token: str,
) -> None:
    """It says what was given, or what is allowed."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    ended = in_process("realrun", main, monkeypatch, capsys)(*shlex.split(line))
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert token in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]
