"""Cells of `papers/`: what is read, and predicted for what it names, or listed with reasons."""

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import one_sample
import pytest
from places import GOLDEN, ROOT

from analysis.published.cells import Cell, from_papers, unpredicted
from analysis.published.predict import predict, result_of, validate
from analysis.published.runs import PAPERS
from analysis.published.tables import known_cells
from co2sim.catalog import names
from co2sim.common.errors import CatalogError
from co2sim.prediction.published import read_cells, read_speeds

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
RATIO = CELL + "over = { gpus = 8 }\n"
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


def test_a_paper_says_what_it_is() -> None:
    """Key, title, authors, year, where to find it, and the settings of its experiments."""
    for folder in sorted({path.parent for path in PAPERS.glob("*/*.toml")}):
        paper = tomllib.loads((folder / "paper.toml").read_text())
        assert paper["key"] == folder.name
        assert {"title", "authors", "year", "url", "settings"} <= paper.keys()
        assert paper["settings"]["source"]
        for cluster in paper["settings"].get("clusters", []):
            assert cluster in names("clusters")


# --- the reader ----------------------------------------------------------------------------------


def test_speeds_of_strategies_that_are_not_ours_are_left_out(tmp_path: Path) -> None:
    """They have no prediction."""
    path = tmp_path / "results.toml"
    path.write_text(CELL + CELL.replace("zero2", "pipeline"))
    assert [cell.strategy for cell in read_speeds(path)] == ["zero2"]
    assert len(read_cells(path)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cell = 3", "[[cell]]"),
        ("[[cell", "results.toml: "),
        (CELL.replace('"tokens_per_s"', '"speed"'), "quantity is 'speed'"),
        (CELL.replace("gpus", "gpu"), "gpus is missing"),
        (CELL + CELL.replace("= 16", "= 0"), "cell 2: gpus is 0"),
        (CELL.replace("60000", "0"), "value is 0"),
        (CELL + "rounding = -1", "rounding is -1"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """In one line: the file, the cell, the name, what is given and what is allowed."""
    path = tmp_path / "results.toml"
    path.write_text(text)
    with pytest.raises(CatalogError) as caught:
        read_cells(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))


# --- sources -------------------------------------------------------------------------------------


def simulated(cluster: str, gpus: int) -> float:
    """Tokens per second of the cell, asked of the simulator directly."""
    return one_sample.simulate(
        cluster,
        "gpt2-xl",
        "zero2:owners=true",
        gpus=gpus,
        micro_batch=2,
        precision="bf16",
        loss="fused",
    ).tokens_per_s


def test_a_new_source_is_predicted_under_its_name_on_its_cluster_with_its_model(
    source: Source,
) -> None:
    """Nothing of CO2's enters, and the interval is that of the run.

    The micro-batch, the precision and the options of strategies are those of `[simulation]`.
    """
    folder = source(CELL, RATIO)
    throughput, ratio = (cell for cell in from_papers(folder) if cell.source == "toy")
    assert throughput.name == "gpt2-xl, 16 GPUs, zero2"
    small, large = simulated("a100-tcp80", 8), simulated("a100-tcp80", 16)
    assert predict(throughput) == pytest.approx(large)
    assert predict(ratio) == pytest.approx(large / 16 / (small / 8))
    (row, _) = validate([throughput, ratio])
    assert row.high / row.predicted == pytest.approx(
        result_of(throughput.setup).tokens_per_s_high / result_of(throughput.setup).tokens_per_s
    )
    known = [cell for cell in from_papers(folder) if cell.source == "co2"]
    assert known == [cell for cell in from_papers() if cell.source == "co2"]


@pytest.mark.parametrize(
    ("cell", "paper", "token"),
    [
        (CELL.replace("zero2", "pipeline:stages=4"), PAPER, "'pipeline'"),
        (CELL.replace("gpt2-xl", "gpt2-xxl"), PAPER, "'gpt2-xl'"),
        (CELL.replace("= 16", "= 12"), PAPER, "12"),
        (CELL, PAPER.replace("micro_batch = 2", ""), "2048"),
        (CELL, None, "[simulation]"),
        (CELL.replace("a100-tcp80", ""), PAPER, "not stated"),
    ],
)
def test_what_is_not_predicted_is_listed_with_the_reason(
    source: Source, cell: str, paper: str | None, token: str
) -> None:
    """And the cells of all other sources are predicted as before."""
    folder = source(cell, paper=paper)
    (found,) = (one for one in unpredicted(folder) if one.source == "toy")
    assert token in found.reason
    assert found.published == 60000
    assert {one.source for one in from_papers(folder)} == {"co2"}


@pytest.mark.parametrize(
    ("cell", "change", "words"),
    [
        (CELL, ("tokens_per_gpu = 2048", ""), ("cell 2: ", "'tokens_per_gpu'")),
        (CELL, ('"bf16"', '"bf17"'), ("cell 2: ", "precision is 'bf17'")),
        (CELL.replace("zero2", "zero2:bukket=3"), ("", ""), ("cell 2: ", "bukket")),
        (CELL, ("micro_batch", "micro_bach"), ("paper.toml", "'micro_batch'")),
        (CELL, ("micro_batch", 'cluster = "dgx-h100"\nmicro_batch'), ("'clusters'",)),
        (CELL, ("[simulation]", "[simulation"), ("toy/paper.toml",)),
    ],
)
def test_what_is_wrong_is_one_line(
    source: Source, cell: str, change: tuple[str, str], words: tuple[str, ...]
) -> None:
    """It names the file, and the cell where the paper alone is right."""
    first = CELL.replace("zero2", "pipeline")  # listed, whatever its paper says
    folder = source(first, cell, paper=PAPER.replace(*change))
    with pytest.raises(CatalogError) as caught:
        from_papers(folder)
    for part in (str(folder / "toy"), *words):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_of_papers_that_a_folder_does_not_hold_are_left_out(source: Source) -> None:
    """Found by themselves, they are not read; given with --data, they are refused."""
    folder = source(CELL)
    assert {cell.source for cell in known_cells(folder)} == {"co2", "toy"}
    with pytest.raises(CatalogError, match="vtrain"):
        known_cells(folder, GOLDEN / "iteration-rows.csv")


# --- tensor and pipeline parallelism: predicted with constants of runs without --------------------


@pytest.fixture(scope="module")
def parallel() -> list[Cell]:
    """The cells of both sources: checks."""
    found = [cell for cell in from_papers() if cell.source in {"vtrain_nodes", "megatron_sp"}]
    assert len(found) == 102
    assert {cell.use for cell in found} == {"check"}
    return found


def table_of(heading: str) -> list[str]:
    """The rows of errors below a heading of docs/validation.md."""
    text = (ROOT / "docs" / "validation.md").read_text().partition(heading)[2]
    return [row for row in text.partition("\n##")[0].splitlines() if row.endswith(" % |")]


@pytest.mark.nightly
def test_pipelines_are_predicted_within_a_tenth_on_average(parallel: list[Cell]) -> None:
    """81 runs on 64 to 512 GPUs; the page has their errors by number of stages."""
    errors: dict[int, list[float]] = {}
    for cell in parallel:
        if cell.setup.pp > 1:
            errors.setdefault(cell.setup.pp, []).append(predict(cell) / cell.published - 1)
    every = [error for some in errors.values() for error in some]
    assert len(every) == 81
    assert fmean(map(abs, every)) < 0.1
    assert max(map(abs, every)) < 0.33
    assert fmean(errors[2]) < fmean(errors[32])  # the last stage, with the head, is too slow
    expected = []
    for stages, some in sorted(errors.items()):
        shown = [100 * error for error in some]
        figures = (f"{fmean(map(abs, shown)):.1f} %", f"{fmean(shown):+.1f} %")
        ends = f"{min(shown):+.1f} to {max(shown):+.1f} %"
        expected.append(" | ".join([str(stages), str(len(some)), *figures, ends]))
    assert [row.strip("| ") for row in table_of("### Pipelines")] == expected
    assert all(result_of(cell.setup).fits_in_memory for cell in parallel[::5])
