"""`co2analysis lab` predicts from what it runs: which commands it starts in the lab, or refuses."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from analysis.cli import main, measured

Lab = Callable[..., tuple[int, list[list[str]], str]]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Lab:
    """Run the command with nothing in the lab: exit code, commands that would run, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str) -> tuple[int, list[list[str]], str]:
        commands: list[list[str]] = []

        def record(_: Sequence[str], command: Sequence[str]) -> None:
            commands.append(list(command))

        monkeypatch.setattr(measured, "_in_lab", record)
        monkeypatch.setattr(measured, "_compared", lambda _: [])
        monkeypatch.setattr(measured, "_report", lambda *_, **__: None)
        job = ("lab", "--nodes", "2", "--model", "tiny-5m", "-s", "ddp", "--out", "out")
        monkeypatch.setattr(sys, "argv", ["co2analysis", *job, *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), commands, capsys.readouterr().err

    return run


def after(name: str, command: Sequence[str]) -> str | None:
    """The value of an option, if it is there."""
    return command[command.index(name) + 1] if name in command else None


def test_the_probe_measures_the_kernels_that_run(lab: Lab) -> None:
    """Real kernels in the precision of the run; the virtual GPU only beside kernels that sleep."""
    for options, gpu, precision, hosts in [
        ((), "virtual", None, "only"),
        (("--probe",), "virtual", None, "links too"),
        (("--probe", "--kernels", "flops"), None, "fp32", "links too"),
        (("--probe", "--kernels", "flops", "--precision", "bf16"), None, "bf16", "links too"),
    ]:
        code, (probe, run), _ = lab(*options)
        assert code == 0
        assert (probe[0], run[0]) == ("probe", "run")
        assert after("--gpu", probe) == gpu
        assert after("--precision", probe) == precision
        assert ("--stated" in probe) == (hosts == "only")
        assert after("--cluster", run) == after("--out", probe)
        assert after("--kernels", run) == ("flops" if "flops" in options else "sleep")


def test_a_cluster_of_ones_own_is_predicted_from_and_not_probed(lab: Lab) -> None:
    """Further options go on to `realrun run`."""
    code, commands, _ = lab("--kernels", "flops", "--cluster", "mine.toml", "--rounds", "3")
    assert code == 0
    ((name, *rest),) = commands
    assert name == "run"
    assert after("--cluster", rest) == "mine.toml"
    assert after("--rounds", rest) == "3"
