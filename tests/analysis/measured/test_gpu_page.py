"""`co2analysis gpu`: measurements of one GPU beside predictions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from places import ROOT

from analysis.measured.gpu_page import read, tables
from co2sim.catalog import load_cluster, load_model, load_stack
from co2sim.simulation.costs import compute_time
from co2sim.training.workload import Workload

H100 = ROOT / "benchmarks/results/gpu/h100.json"


def test_errors_are_those_of_the_prediction_of_the_same_work() -> None:
    """A forward pass over four layers of Llama 3.1 8B, by hand."""
    (table,) = [one for one in tables(read(H100, ["dgx-h100"])) if one.title == "Layers"]
    work = Workload(load_model("llama3-8b").value).works()[1].forward
    gpu = load_stack("torchtitan-eager").value.on(load_cluster("dgx-h100").value.gpu)
    predicted = 4 * compute_time(work, gpu, "bf16")
    rows = json.loads(H100.read_text())["sections"]["layers"]
    asked = ("llama3-8b", "eager", 4)
    row = next(r for r in rows if (r["model"], r["kind"], r["layers"]) == asked)
    shown = next(r for r in table.rows if r[0].startswith("llama3-8b") and r[1:3] == ("eager", "4"))
    place = table.columns.index("error, dgx-h100, torchtitan-eager")
    assert shown[place].split(",")[0] == f"{100 * (predicted / row['forward'] - 1):+.0f} %"


def test_a_page_has_every_section_and_what_failed(tmp_path: Path, co2analysis: Command) -> None:
    """Of the measurements that come with the repository, and of a section that failed."""
    found = json.loads(H100.read_text())
    found["failures"] = {"layers": "OutOfMemoryError: too large"}
    del found["sections"]["layers"]
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    done = co2analysis("gpu", str(tmp_path), "--out", str(tmp_path / "gpu.md"))
    assert done.code == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "layers failed: OutOfMemoryError" in page
    for title in ("Rates", "Matrix products", "Training steps", "Memory", "Quantization"):
        assert f"## {title}" in page
    assert "## Layers" not in page


def dry(script: str, out: Path) -> None:
    """Run a script for GPUs without one."""
    pytest.importorskip("torch")
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "benchmarks/gpu" / script), str(out)],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.dist
def test_the_script_for_several_gpus_runs_dry_over_gloo(tmp_path: Path) -> None:
    """Two processes, with one queue of launches and with eight."""
    dry("run_several.sh", tmp_path)
    for connections in (1, 8):
        found = json.loads((tmp_path / f"connections{connections}/several.json").read_text())
        assert found["failures"] == {}
        assert all(found["sections"].values())


@pytest.mark.nightly
@pytest.mark.dist
def test_the_script_for_a_gpu_runs_dry_without_one(tmp_path: Path) -> None:
    """Every section measures tiny shapes, and the page is made."""
    dry("run.sh", tmp_path)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failures"] == {}
    assert found["quick"]
    assert all(found["sections"][name] for name in found["sections"] if name != "sleeps")
    assert "a dry run on a CPU" in (tmp_path / "gpu.md").read_text()
