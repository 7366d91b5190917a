"""Control-C in `co2analysis`: what it says of the disk is true."""

import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from analysis.cli import main, measured
from analysis.convergence.protocol import checks, store
from analysis.published import errors

LAB = ["lab", "--nodes", "2", "--rate", "1 Gbit/s", "--model", "tiny-5m", "-s", "ddp"]
CELLS = "measured cells are kept"
NOTHING = "nothing was written"
RUNS = "runs that had finished are kept"


def interrupted(*_: Any, **__: Any) -> NoReturn:
    """Control-C."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "module", "function", "kept"),
    [
        (["validate", "--markdown", "report.md"], errors, "validate", NOTHING),
        (["verify", "--quick", "--out", "."], store, "measure", CELLS),
        (["verify", "--quick", "--out", "."], checks, "judge", CELLS),
        ([*LAB, "--out", "."], measured, "_in_lab", RUNS),
    ],
)
def test_control_c_says_what_is_on_the_disk(
    command: list[str],
    module: object,
    function: str,
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only a lab and `verify` keep something: all else is written at the end, at once."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, function, interrupted)
    if function == "judge":
        monkeypatch.setattr(store, "measure", lambda *_, **__: [])
    monkeypatch.setattr(sys, "argv", ["co2analysis", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted; {kept}"
    assert [path.name for path in tmp_path.iterdir()] == []
