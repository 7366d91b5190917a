"""Bad input of `co2analysis`: exit code 2, one line with what was given, and nothing is written."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command, refused
from simulated_record import measured

from analysis.convergence import trends
from analysis.published.runs import DATA_VARIABLE, PAPERS
from realrun.record import write

PROBLEM = "bound --smoothness 2 --noise 1 --gap 3 --workers 8 --rounds 10000"
BOUND = f"{PROBLEM} --local-steps 8"
TAU = "tau --smoothness 1 --noise 1 --gap 1"
WORDS = {
    "BOUND": BOUND,
    "PROBLEM": PROBLEM,
    "VERIFY": BOUND.replace("bound", "verify"),
    "TAU": TAU,
    "ON": f"{TAU} -c a100-tcp80",
    "FIGURES": "figures --out made",
}
ZEROPP = """model_params_b,tokens_per_gpu,ib_links_100gbps_per_node,\
zero3_tflops_per_gpu,zeropp_tflops_per_gpu
18,1024,1,14,31
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a run, a file and three tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    write(Path("runs/ddp"), measured("ddp"))
    Path("file").touch()
    Path("binary.csv").write_bytes(bytes(range(256)))
    Path("zeropp.csv").write_text(ZEROPP)
    Path("elsewhere/co2").mkdir(parents=True)
    for name in ("paper.toml", "results.toml"):
        text = (PAPERS / "co2" / name).read_text().replace("CO2, ICLR 2024", "Another paper")
        Path("elsewhere/co2", name).write_text(text)


@pytest.mark.parametrize(("line", "token"), refused("co2analysis-refused.txt", **WORDS))
def test_bad_input_is_one_line(co2analysis: Command, tmp_path: Path, line: str, token: str) -> None:
    """The line names the option, what is allowed, or the nearest name, before any work."""
    before = sorted(tmp_path.rglob("*"))
    done = co2analysis(*line.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert token in done.err
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_data_are_named(co2analysis: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn: one line that says what to install, exit code 2."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    trends.digits.cache_clear()
    done = co2analysis("trends", "--taus", "1")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert ".[analysis]" in done.err


def test_commands_need_neither_torch_nor_altair_to_start() -> None:
    """As after `pip install .`: help comes, and bad input is one line."""
    without = "import sys; sys.modules.update(dict.fromkeys(('torch', 'altair', 'vl_convert')))"
    code = f"{without}; from analysis.cli import main; main()"
    helped = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, check=True)
    assert b"compare" in helped.stdout
    refused = subprocess.run(
        [sys.executable, "-c", code, "compare", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
