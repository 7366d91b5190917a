"""Bad input of `co2analysis`: exit code 2, one line with what was given, and nothing is written."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from simulated_record import measured

from analysis.convergence import trends
from analysis.published.runs import DATA_VARIABLE, PAPERS
from realrun.record import write

BOUND = "bound --smoothness 2 --noise 1 --gap 3 --workers 8 --rounds 10000 --local-steps 8"
VERIFY = BOUND.replace("bound", "verify")
TAU = "tau --smoothness 1 --noise 1 --gap 1"
ON = f"{TAU} -c a100-tcp80"
FIGURES = "figures --out made"
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


@pytest.mark.parametrize(
    ("line", "token"),
    [
        ("compare", "RUN"),
        ("compare none", "none"),
        ("compare .", "run"),
        ("compare runs/ddp --cluster dgx-h100", "2 x 2"),
        ("compare runs/ddp --cluster dgx-h10", "dgx-h100"),
        ("compare runs/ddp --set inter.bandwith=1us", "inter.bandwidth"),
        ("compare runs/ddp --set gpu=h100", "--cluster"),
        ("compare runs/ddp --set inter.bandwidth=1", "unit"),
        ("compare runs/ddp --set model.layers=1", "model.layers"),
        ("compare runs/ddp --figure out.pdf", ".svg"),
        ("compare runs/ddp --figure out.png --rank 4", "0 to 3"),
        ("compare runs/ddp --rank x", "rank"),
        ("compare runs/ddp --report c.pdf", ".html"),
        ("lab -m tiny-5m -s ddp --report file/c.html", "file"),
        ("lab -m tiny-5m -s ddp --kernels flops", "--probe"),
        ("lab -m tiny-5m -s ddp --cluster dgx-h100 --probe", "--probe"),
        ("lab -m tiny-5m -s dpd", "ddp"),
        ("validate --report c.pdf", ".html"),
        ("runs --source nanotrn", "nanotron"),
        ("runs --papers none", "none"),
        ("validate --cells nowhere.csv", "nowhere.csv"),
        ("validate --cells .", "directory"),
        ("validate --cells binary.csv", "UTF-8"),
        ("validate --data zeropp.csv", "gpus"),
        ("validate --markdown file/r.md", "file"),
        ("validate --figures file/x", "file"),
        ("calibrate --group a100", "v100-zeropp"),
        ("goodput --papers runs", "goodput.toml"),
        ("figures", "--out"),
        (f"{FIGURES} --format pdf,pgn", "'png'"),
        (f"{FIGURES} --format=", "png"),
        (f"{FIGURES} --only co2-table-4", "'co2-table-3'"),
        (f"{FIGURES} --papers runs", "papers"),
        (f"{FIGURES} --papers elsewhere", "elsewhere"),
        ("figures --out file --only co2-table-3", "file"),
        ("bound", "--local-steps"),
        ("bound --gap 3 --noise 1 --rounds 9 --workers 2", "--smoothness"),
        (f"{BOUND} --penalty inf", "penalty"),
        (f"{BOUND} --momentum 1", "momentum"),
        (f"{BOUND} --delay 9", "delay is 9"),
        (f"{BOUND} --delay x", "--delay"),
        (f"{BOUND} --keep 0.5", "--keep"),
        (f"{BOUND} --delay 2 --predict 1", "predict is 1"),
        (f"{BOUND} --allowed-delay -1", "--allowed-delay"),
        (f"{ON} --target nan", "--target"),
        (TAU, "--cluster"),
        (f"{TAU} --taus 4 --gpus 8 runs/ddp", "--gpus, --taus"),
        ("tau -c a100-tcp80 --noise 1", "--smoothness, --gap"),
        (f"{ON} -s co2.published:worker=node,tau=8", "--taus"),
        (f"{ON} -s ddp", "ddp"),
        (f"{ON} --penalty 2 --most-penalty 2", "most_penalty"),
        ("trends --workers 257", "256"),
        ("trends --steps 4000 --seeds 3", "12,000"),
        ("trends --taus 1,600", "512"),
        ("verify --gap 3 --noise 1", "--smoothness"),
        (f"{VERIFY} --seeds 1", "--seeds"),
        (f"{VERIFY} --seeds 1000000", "--workers times --seeds"),
        (f"{VERIFY} --phi 0", "--phi"),
        (f"{VERIFY} --delay 3 --keep 0.5 --phi 1", "keep 1"),
        (f"{VERIFY} --delay 0 --most-penalty 2", "gap-aware"),
    ],
)
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
