"""Published tables as CSV: what is read, what is refused with its line, what counts as fitted."""

import math
import shutil
from pathlib import Path

import pytest
from places import GOLDEN

from analysis.published.cells import Cell
from analysis.published.predict import predict
from analysis.published.runs import PAPERS
from analysis.published.tables import RATIOS, from_csv, further_cells, known_cells, ratios
from co2sim.common.errors import CatalogError
from co2sim.schedule.schedule import DType

ZEROPP = """model_params_b,tokens_per_gpu,ib_links_100gbps_per_node,\
zero3_tflops_per_gpu,zeropp_tflops_per_gpu
18,1024,1,14,31
138,2048,4,,50
"""
CO2 = """method,network,tau,gpus,words_per_s,scalability_16_to_128,note
adamw_zero2,80 Gbit/s TCP/IP,,16,3488,,
co2_zero2,80 Gbit/s TCP/IP,48,128,304736,1.06,
co2_zero2,80 Gbit/s TCP/IP,12,128,,0.86,
"""
TIMES = """set,gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,iteration_ms
single,2,8,1,512,8,4,1024,50.0
single,8,64,2,512,8,6,1024,70.0
"""
FSDP = (GOLDEN / "fsdp-rows.csv").read_text()


def written(tmp_path: Path, text: str, name: str = "cells.csv") -> Path:
    """A CSV file."""
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    """Made-up rows of LLM Foundry's three GPUs, on one node and on several."""
    return from_csv(written(tmp_path_factory.mktemp("rows"), FSDP), "check")


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("text", "count"), [(ZEROPP, 3), (CO2, 4), (TIMES, 2)])
def test_a_table_in_each_format_is_read_and_predicted(
    tmp_path: Path, text: str, count: int
) -> None:
    """Every number of a row that is given is a cell; all have finite, positive predictions."""
    cells = from_csv(written(tmp_path, text), "check")
    assert len({cell.name for cell in cells}) == len(cells) == count
    for cell in cells:
        assert 0 < predict(cell) < math.inf


def test_a_row_of_fsdp_is_the_run_that_it_describes(fsdp: list[Cell]) -> None:
    """Cluster, shape, batch, what is sharded and recomputed, and in which type gradients meet."""
    run = fsdp[0].setup
    assert (run.cluster, run.gpus) == ("h100-3200g", 16)
    assert (run.micro_batch, run.accumulation) == (4, 1)
    assert (run.recompute, run.attention, run.checkpointing) == ("none", "flash", "non_reentrant")
    assert fsdp[2].setup.recompute == "full"
    reduced = [getattr(c.setup.parsed(), "reduce", None) for c in (fsdp[0], fsdp[3])]
    assert reduced == [DType.FP32, DType.BF16]
    again = [getattr(c.setup.parsed(), "reshard_after_forward", None) for c in fsdp[2:4]]
    assert again == [True, False]
    model = run.case().stage().workload.model
    assert (model.parameters, model.tokens) == (510_218_240, 2048)


def test_ratios_are_of_rows_that_differ_in_gpus_only(tmp_path: Path, fsdp: list[Cell]) -> None:
    """Per GPU, to the fewest GPUs of several nodes; one node and other batches take no part."""
    (ratio,) = ratios(fsdp)
    assert ratio.source == RATIOS
    assert (ratio.over[0].gpus, ratio.setup.gpus) == (16, 64)
    assert ratio.published == pytest.approx(3e6 / 64 / (0.8e6 / 16))
    many, few = (predict(cell) / cell.setup.gpus for cell in (fsdp[1], fsdp[0]))
    assert predict(ratio) == pytest.approx(many / few)
    head, first, second, *_ = FSDP.splitlines()
    other = second.replace(",4,1,256,", ",8,1,512,")
    path = written(tmp_path, f"{head}\n{first}\n{other}")
    assert not list(ratios(from_csv(path, "check")))


# --- what is refused -----------------------------------------------------------------------------


REFUSED = {
    "zeropp": [
        (ZEROPP.partition("\n")[0] + "\n", "no rows"),
        (ZEROPP.replace("model_params_b", "tokens_per_gpu"), "tokens_per_gpu twice"),
        (ZEROPP.replace("14,31", "14,31,7"), "line 2: 6 fields under 5"),
        (ZEROPP.replace("1024,1,", "1024,9,"), "'dgx2-ib9'"),
    ],
    "co2": [
        (CO2.replace("IP,48", "IP,99999"), "line 3: co2.published: tau"),
        (CO2.replace("IP,48", "IP,"), "line 3: tau is ''"),
        (CO2.replace("48,128", "48,64"), "line 3: scalability_16_to_128"),
        (CO2 + "# again\n" + CO2.splitlines()[1], "line 6: it says the same as line 2"),
    ],
    "times": [
        (TIMES.replace("2,8,1", "2,7,1"), "line 2: global_batch 7"),
        (TIMES.replace("8,64,2", "16,64,2"), "line 3: 16 GPUs"),
        (TIMES.replace("single,2", '"single,2'), "line 2"),
    ],
    "fsdp": [
        (FSDP.replace(",64,800000", ",63,800000"), "global_batch 63"),
        (FSDP.replace(",510218240", ",520000000", 1), "510218240"),
        (FSDP.replace("amp_bf16", "amp_fp8", 1), "bf16"),
    ],
    "other": [("a,b\n1,2\n", "no known table")],
}
"""Tables, and what is said of each."""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    """One line names the file and its line, what was given, and what is allowed."""
    for text, token in REFUSED[kind]:
        with pytest.raises(CatalogError, match=r"cells\.csv") as caught:
            from_csv(written(tmp_path, text), "check")
        assert token in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_a_number_in_two_tables_is_refused(tmp_path: Path) -> None:
    """As one that stands twice in one table: it would count twice."""
    paths = [written(tmp_path, CO2, name) for name in ("one.csv", "other.csv")]
    with pytest.raises(CatalogError, match=r"other.csv: .* one.csv|other.csv: .*one.csv"):
        further_cells(paths, [], PAPERS, lambda _: None)


# --- the tables that are only referred to ---------------------------------------------------------


def test_a_broken_line_of_the_fitted_configurations_is_named(tmp_path: Path) -> None:
    """With the file and the line; a file outside of the folder is refused."""
    for key in ("co2", "vtrain"):
        shutil.copytree(PAPERS / key, tmp_path / key)
    lines = (PAPERS / "vtrain" / "fitted.csv").read_text().splitlines()
    written(tmp_path / "vtrain", "\n".join([*lines[:3], "2,4,1"]), "fitted.csv")
    table = written(tmp_path, TIMES, "a100_dp_iteration_times.csv")
    with pytest.raises(CatalogError, match=r"fitted.csv, line 4: 3 fields"):
        known_cells(tmp_path, table)
    about = (PAPERS / "vtrain" / "paper.toml").read_text()
    (tmp_path / "vtrain" / "paper.toml").write_text(about.replace("fitted.csv", "../fitted.csv"))
    with pytest.raises(CatalogError, match=r"paper.toml: \[data\]"):
        known_cells(tmp_path, table)
