"""A new source in `papers/`: its cells are predicted for what they name, or listed with reasons."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import ROOT, blocks

import co2sim
from analysis.published.csv_tables import known_cells
from analysis.published.errors import validate
from analysis.published.paper_cells import from_papers, unpredicted
from analysis.published.papers import PAPERS
from analysis.published.predict import predict
from co2sim.calibrations import record
from co2sim.errors import CatalogError
from co2sim.published_speeds import read_speeds

PAPER = """key = "toy"
[simulation]
precision = "bf16"
tokens_per_gpu = 2048
micro_batch = 2
options = { zero2 = "owners=true" }
"""
CELL = """[[cell]]
where = "a table of the test"
quantity = "tokens_per_s"
value = 60000
cluster = "a100-tcp80"
model = "gpt2-xl"
strategy = "zero2"
gpus = 16
use = "check"
"""
RATIO = CELL.replace("tokens_per_s", "scalability_ratio").replace(
    "gpus = 16", "from_gpus = 8\nto_gpus = 16"
)
Source = Callable[..., Path]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Writes the source `toy`; gives the folder of papers."""

    def write(*cells: str, paper: str | None = PAPER) -> Path:
        folder = tmp_path / "toy"
        folder.mkdir()
        if paper is not None:
            (folder / "paper.toml").write_text(paper)
        (folder / "results.toml").write_text("\n".join(cells))
        shutil.copytree(PAPERS / "co2", tmp_path / "co2")
        return tmp_path

    return write


def simulated(cluster: str, gpus: int) -> float:
    """Tokens per second of the cell, asked of the simulator directly."""
    return co2sim.simulate(
        cluster, "gpt2-xl", "zero2:owners=true", gpus=gpus, micro_batch=2, precision="bf16"
    ).tokens_per_s


def test_a_new_source_is_predicted_under_its_name_on_its_cluster_with_its_model(
    source: Source,
) -> None:
    """Nothing of CO2's enters: neither its cluster and model, nor the intervals of its constants.

    The micro-batch, the precision and the options of strategies are those of `[simulation]`.
    """
    folder = source(CELL, RATIO)
    throughput, ratio = (cell for cell in from_papers(folder) if cell.source == "toy")
    assert throughput.name == "gpt2-xl, 16 GPUs, zero2"
    small, large = simulated("a100-tcp80", 8), simulated("a100-tcp80", 16)
    assert predict(throughput) == pytest.approx(large)
    assert predict(ratio) == pytest.approx(large / 16 / (small / 8))
    assert not any(row.has_interval for row in validate([throughput, ratio]))
    known = [cell for cell in from_papers(folder) if cell.source == "co2"]
    assert known == [cell for cell in from_papers() if cell.source == "co2"]


def test_clusters_and_names_say_what_stands_for_those_of_the_cells(source: Source) -> None:
    """`clusters` replaces the named cluster only; `names` is how tables call a model."""
    words = 'clusters = { a100-tcp80 = "dgx-h100" }\nnames = { gpt2-xl = "1.5B" }\n'
    folder = source(CELL, CELL.replace("a100-tcp80", "a100-roce800"), paper=PAPER + words)
    moved, same = (cell for cell in from_papers(folder) if cell.source == "toy")
    assert moved.setup.cluster == "dgx-h100"
    assert same.setup.cluster == "a100-roce800"
    assert moved.name == "1.5B, 16 GPUs, zero2"


def test_another_model_of_a_known_source_has_no_interval(source: Source) -> None:
    """CO2's constants were fitted to the passes of one model on one cluster."""
    folder = source(CELL)
    results = folder / "co2" / "results.toml"
    results.write_text(results.read_text() + CELL.replace("gpt2-xl", "llama-7b"))
    *known, new = (cell for cell in from_papers(folder) if cell.source == "co2")
    assert {cell.group for cell in known} == {"a100-co2"}
    assert (new.setup.model, new.group) == ("llama-7b", "")


@pytest.mark.parametrize(
    ("cell", "paper", "reason"),
    [
        (CELL.replace("zero2", "pipeline:stages=4"), PAPER, "no strategy is called 'pipeline'"),
        (CELL.replace("gpt2-xl", "gpt2-xxl"), PAPER, "did you mean 'gpt2-xl'?"),
        (CELL.replace("a100-tcp80", "a100-tcp8"), PAPER, "did you mean 'a100-tcp80'?"),
        (CELL.replace("= 16", "= 12"), PAPER, "12"),
        (CELL, PAPER.replace("micro_batch = 2", ""), "seq_len 2048 exceeds the 1024"),
        (CELL, PAPER.replace("[simulation]", "[settings]"), "no [simulation] in its paper.toml"),
        (CELL, None, "no [simulation] in its paper.toml"),
        (
            CELL.replace("tokens_per_s", "tflops_per_gpu") + "tokens_per_gpu = 2048",
            PAPER,
            "this quantity is predicted for zeropp only",
        ),
    ],
)
def test_what_is_not_predicted_is_listed_with_the_reason(
    source: Source, cell: str, paper: str | None, reason: str
) -> None:
    """And the cells of all other sources are predicted as before."""
    folder = source(cell, paper=paper)
    (found,) = (one for one in unpredicted(folder) if one.source == "toy")
    assert reason in found.reason
    assert found.published == 60000
    assert {one.source for one in from_papers(folder)} == {"co2"}


@pytest.mark.parametrize(
    ("cell", "change", "words"),
    [
        (CELL, ("tokens_per_gpu = 2048", ""), "[simulation] has no 'tokens_per_gpu'"),
        (CELL, ("= 2048", "= 2047"), "2047 tokens per GPU are not 2 equal sequences"),
        (CELL, ("micro_batch", 'cluster = "dgx-h100"\nmicro_batch'), "[simulation] has 'cluster'"),
        (CELL.replace("zero2", "zero2:bukket=3"), ("", ""), "bukket"),
    ],
)
def test_what_is_wrong_with_a_source_is_told_with_file_and_cell(
    source: Source, cell: str, change: tuple[str, str], words: str
) -> None:
    """In one line."""
    first = CELL.replace("zero2", "pipeline")  # listed, whatever its paper says
    folder = source(first, cell, paper=PAPER.replace(*change))
    with pytest.raises(CatalogError) as caught:
        from_papers(folder)
    assert f"{folder / 'toy' / 'results.toml'}, cell 2: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("micro_batch", "micro_bach", "unknown name 'micro_bach'; did you mean 'micro_batch'?"),
        ("= 2048", '= "2048"', "tokens_per_gpu is '2048'; it must be a whole number"),
        ("micro_batch = 2", "micro_batch = 0", "micro_batch is 0; it must be above 0"),
        ('{ zero2 = "owners=true" }', '"zero2"', "options is 'zero2'; it must be"),
    ],
)
def test_what_simulation_does_not_know_is_refused(
    source: Source, old: str, new: str, words: str
) -> None:
    """A misspelt name would be dropped in silence."""
    folder = source(CELL, paper=PAPER.replace(old, new))
    with pytest.raises(CatalogError) as caught:
        from_papers(folder)
    assert str(caught.value).startswith(f"{folder / 'toy' / 'paper.toml'}: [simulation]: ")
    assert words in str(caught.value)


def test_scale_compares_each_cell_on_the_clusters_that_its_source_names(source: Source) -> None:
    """As published, and as simulated where that differs; not on the cluster of another cell."""
    words = 'clusters = { a100-tcp80 = "a100-tcp80-calibrated" }\n'
    other = CELL.replace("a100-tcp80", "dgx-h100").replace("zero2", "ddp")
    folder = source(CELL, other, paper=PAPER + words)
    found = [(one.cluster, one.strategy) for one in read_speeds(folder / "toy" / "results.toml")]
    assert found == [
        ("a100-tcp80", "zero2"),
        ("a100-tcp80-calibrated", "zero2:owners=true"),
        ("dgx-h100", "ddp"),
    ]


# --- the table that is only referred to ---------------------------------------------------------

RELEASE = """# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,\
tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)
8,64,1,1024,16,12,1024,2,4,1,70.5
8,16,1,512,8,4,1024,1,8,1,31.5
4,16,1,1024,16,24,1024,1,1,4,44.5
2,4,1,1024,16,12,1024,1,2,1,92.5
"""
"""Made-up times in the form of the authors' release."""


def test_the_steps_on_the_page_make_the_table_of_iteration_times(tmp_path: Path) -> None:
    """They keep data parallelism alone; rows that entered the fit are marked so, others check."""
    (tmp_path / "vTrain" / "data").mkdir(parents=True)
    (tmp_path / "vTrain" / "data" / "ground_truth_single.csv").write_text(RELEASE)
    (script,) = (b.text for b in blocks(ROOT / "docs" / "validation.md") if b.kind == "bash")
    lines = [line for line in script.splitlines() if not line.startswith(("git ", "co2analysis "))]
    assert len(lines) == len(script.splitlines()) - 2
    subprocess.run(["/bin/bash", "-euc", "\n".join(lines)], cwd=tmp_path, check=True)
    cells = [cell for cell in known_cells(PAPERS, tmp_path / "data") if cell.source == "vtrain"]
    assert [(cell.published, cell.use) for cell in cells] == [(92.5, "fit"), (31.5, "check")]


def test_configurations_that_were_fitted_on_are_named(tmp_path: Path) -> None:
    """As many as the catalog's record says; a line that cannot be read is named."""
    lines = (PAPERS / "vtrain" / "fitted.csv").read_text().splitlines()
    rows = [line for line in lines if not line.startswith("#")][1:]
    assert len(set(rows)) == len(rows) == record()["a100-data-parallel"]["cells"]
    shutil.copytree(PAPERS, tmp_path / "papers")
    (tmp_path / "papers" / "vtrain" / "fitted.csv").write_text("\n".join([*lines[:3], "2,4,1"]))
    table = tmp_path / "a100_dp_iteration_times.csv"
    table.write_text(f"{lines[2]},iteration_ms\n{rows[0]},92.5\n")
    with pytest.raises(CatalogError, match=r"fitted.csv, line 4: hidden is ''"):
        known_cells(tmp_path / "papers", table)
