"""Published training runs: all are read, those that count load, and bad rows are refused."""

from pathlib import Path

import pytest

from analysis.published.runs import PAPERS, TrainingRun, training_runs
from co2sim.catalog import names
from co2sim.common.errors import CatalogError, OptionError

PAPER = """key = "toy"
url = "https://example.org"

[runs]
file = "runs.csv"
"""
COLUMNS = (
    "id,stack,model,cluster,gpus,strategy,micro_batch,accumulation,tp,pp,interleave,"
    "sequence_parallel,precision,recompute,attention,loss,checkpointing,optimizer,overrides,"
    "tokens_per_s_per_gpu,memory_gib,memory_kind,out_of_memory,needs,headline,url,note"
)
ROW = (
    "7,torchtitan,llama3-8b,dgx-h100,16,fsdp,2,4,1,1,1,false,bf16,auto,flash,fused,"
    "non_reentrant,adamw,gpu.memory=95 GiB; model.seq_len=4096,6514,62.0,reserved,false,"
    '"torch.compile, fp8",true,,a note'
)
ROWS = f"# Facts published by a test; one line a run.\n{COLUMNS}\n{ROW}\n"


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, int], TrainingRun]:
    """All published runs, by paper and id."""
    return {(run.paper, run.id): run for run in training_runs()}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder of papers with one, of one run."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "paper.toml").write_text(PAPER)
    (tmp_path / "toy" / "runs.csv").write_text(ROWS)
    return tmp_path


# --- the published runs --------------------------------------------------------------------------


def test_all_published_runs_are_read(runs: dict[tuple[str, int], TrainingRun]) -> None:
    """808 runs of 36 sources, of which 597 count in figures of errors; ids are unique in all."""
    assert len(runs) == 808
    assert len({number for _, number in runs}) == 808
    assert len({paper for paper, _ in runs}) == 36
    assert sum(run.is_counted for run in runs.values()) == 597


def test_every_paper_with_runs_has_rows(runs: dict[tuple[str, int], TrainingRun]) -> None:
    """Every folder with rows says so in its `paper.toml`, and is read."""
    assert {path.parent.name for path in PAPERS.glob("*/runs.csv")} == {paper for paper, _ in runs}


def test_every_run_that_counts_loads(runs: dict[tuple[str, int], TrainingRun]) -> None:
    """Its stack is in the catalog, its cluster and model load, and fit the GPUs of the run."""
    for run in runs.values():
        assert run.stack in names("stacks"), run.id
        if run.is_counted:
            cluster, model = run.case().load()
            assert cluster.value.resized(run.gpus).layout.world_size == run.gpus, run.id
            assert model.value.parameters > 0, run.id


def test_a_run_that_was_read_off_a_chart_says_so(runs: dict[tuple[str, int], TrainingRun]) -> None:
    """Those of DeepSpeed on Azure only: 204.49 TFLOP/s per GPU with 175B, sequences of 512."""
    assert {run.paper for run in runs.values() if run.read_off} == {"deepspeed_azure"}
    run = runs["deepspeed_azure", 232]
    per_token = 96 * 96 * 12288**2 * (1 + 512 / (6 * 12288) + 50304 / (16 * 96 * 12288))
    assert run.tokens_per_s_per_gpu == pytest.approx(204.49e12 / per_token, rel=1e-3)


# --- a run ---------------------------------------------------------------------------------------


def test_a_run_has_what_its_row_says(toy: Path) -> None:
    """Overrides are pairs, needs are parts, and a row without a url has that of the paper."""
    (run,) = training_runs(toy)
    assert run.overrides == {"gpu.memory": "95 GiB", "model.seq_len": "4096"}
    assert run.needs == ("torch.compile", "fp8")
    assert (run.paper, run.url, run.read_off) == ("toy", "https://example.org", False)


def test_a_case_has_the_values_of_its_run(toy: Path) -> None:
    """Automatic recomputation is the stack's own; further overrides give way to the row's."""
    (run,) = training_runs(toy)
    case = run.case({"gpu.memory": "1 GB", "interference": "0"})
    assert (case.stack, case.gpus, case.accumulation) == ("torchtitan", 16, 4)
    assert case.recompute == "selective"
    assert case.overrides == {"gpu.memory": "95 GiB", "interference": "0", "model.seq_len": "4096"}


def test_a_case_may_differ_from_its_run(toy: Path) -> None:
    """What is asked for comes before the row."""
    (run,) = training_runs(toy)
    case = run.case(recompute="full", stack="xla", gpus=32)
    assert (case.recompute, case.stack, case.gpus) == ("full", "xla", 32)


def test_a_run_without_a_cluster_is_no_case(runs: dict[tuple[str, int], TrainingRun]) -> None:
    """The error names the run and what it needs; with another cluster it is a case."""
    run = runs["swiss_ai", 447]
    with pytest.raises(OptionError, match=r"447 of swiss_ai.*GH200"):
        run.case()
    assert run.case(cluster="dgx-h100").gpus == 64


# --- rows that are wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (",16,fsdp", ",sixteen,fsdp", "line 3: gpus is 'sixteen'; it must be a whole number"),
        (",2,4,1,1,1,", ",2,4,3,1,1,", "tp 3"),
        (",6514,", ",,", "headline"),
        (",false,bf16", ",no,bf16", "sequence_parallel is 'no'; it must be true or false"),
        ("; model.seq_len=4096", "; model.seq_len", "overrides"),
        (",a note", "", "line 3: 26 fields under 27 columns"),
        (",gpus,", ",gpu,", "gpus is missing"),
        (ROW, f"{ROW}\n{ROW}", "line 4: id 7 stands there twice"),
        ('file = "runs.csv"', 'file = "../runs.csv"', "../runs.csv"),
    ],
)
def test_what_is_wrong_is_one_line(toy: Path, old: str, new: str, words: str) -> None:
    """The error names the file, and of a row the line, the column, what is given and the rule."""
    for path in (toy / "toy").iterdir():
        path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(CatalogError) as caught:
        training_runs(toy)
    assert str(toy / "toy") in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_papers_without_runs_are_left_out(toy: Path) -> None:
    """A paper may have cells only."""
    path = toy / "toy" / "paper.toml"
    path.write_text(PAPER.partition("[runs]")[0])
    assert training_runs(toy) == []
