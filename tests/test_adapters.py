"""Local updates in Lightning, Accelerate and Transformers: their own checkpoints, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pages import ROOT, blocks  # noqa: E402 - as the next
from together import together  # noqa: E402 - needs torch

OPTIONS: list[dict[str, Any]] = [{"tau": 4}, {"tau": 4, "delay": 2}]
LIBRARIES = ("lightning", "accelerate", "transformers")


def calls(folder: Path, **own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Functions with their arguments, and with a folder for their files."""
    return {name: {"folder": str(folder)} | arguments for name, arguments in own.items()}


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks gave, by function."""
    pytest.importorskip("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    own = {"trained": {"cases": OPTIONS}, "resumed": {"cases": OPTIONS}}
    own |= {"other_checkpoints": {}, "refused": {}, "replaced": {}, "broken": {}}
    own |= {"broadcasts": {}}
    found = together("lightning_workers", 2, calls(folder, **own))
    found |= together("lightning_workers", 2, calls(folder, stopped={}))
    return found | together("lightning_workers", 2, calls(folder, signalled={}))


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks gave, by function."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("accelerate")
    own = {"trained": {"cases": OPTIONS, "stop": 9}}
    return together("accelerate_workers", 2, calls(folder, **own) | {"refused": {}})


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks gave, by function."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("transformers")
    own = {"trained": {"cases": OPTIONS}}
    own |= {"without_files": {}, "best": {}, "refused": {}, "replaced": {}, "broken": {}}
    found = together("transformers_workers", 2, calls(folder, **own))
    return found | together("transformers_workers", 2, calls(folder, stopped={}))


# --- Lightning -----------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(OPTIONS)), ids=str)
def test_lightning_trains_as_a_loop_of_ones_own(case: int, lightning: dict[str, list[Any]]) -> None:
    """Bit for bit; all ranks end alike, and validate the consensus, which a checkpoint holds."""
    first, second = (answer[case] for answer in lightning["trained"])
    for one in (first, second):
        assert one["end"] == one["own"] == first["end"]
        assert one["validated"] == first["validated"]
        assert one["saved"] in one["validated"]
    assert first["seen"] != second["seen"]
    assert first["files"] == [
        "last.ckpt",
        *(f"step={step}.ckpt{end}" for step in (12, 18, 6) for end in ("", ".ranks")),
    ]


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(OPTIONS)), ids=str)
def test_lightning_resumes_bit_for_bit(case: int, lightning: dict[str, list[Any]]) -> None:
    """From the middle of two rounds, and from the end, by a link."""
    names = ("step=6.ckpt", "step=12.ckpt", "last.ckpt")
    for answer in lightning["resumed"]:
        assert answer[case] == dict.fromkeys(names, True)


@pytest.mark.dist
def test_other_checkpoints_of_lightning(lightning: dict[str, list[Any]]) -> None:
    """Of DDP; removed ones leave nothing; a damaged and a missing file end in one line."""
    for answer in lightning["other_checkpoints"]:
        assert answer["began"]
        assert answer["left"] == ["step=18.ckpt", "step=18.ckpt.ranks"]
        damaged, missing = answer["told"]
        assert ": rank 1: rank1.safetensors: " in damaged
        assert "step=18.ckpt.ranks/step18: state.json: " in missing


@pytest.mark.dist
def test_lightning_without_steps_on_one_rank_is_refused(lightning: dict[str, list[Any]]) -> None:
    """A GradScaler."""
    for told in lightning["refused"]:
        assert told.startswith("precision is '16-mixed', whose GradScaler skips steps")


@pytest.mark.dist
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_an_exception_on_one_rank_ends_all(library: str, request: pytest.FixtureRequest) -> None:
    """Long before the deadline; the others name the rank and its exception."""
    other, own = request.getfixturevalue(library)["broken"]
    assert own["told"] == "ValueError: a bad batch"
    assert other["told"].startswith("RankFailure: ")
    assert "rank 1 raised ValueError (a bad batch) after " in other["told"]
    assert max(other["took"], own["took"]) < 30


@pytest.mark.dist
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_an_early_stop_on_one_rank_ends_all(library: str, request: pytest.FixtureRequest) -> None:
    """Long before the deadline; both sides name rank 1, and the numbers of steps of both."""
    other, own = request.getfixturevalue(library)["stopped"]
    assert other["told"].startswith("RankFailure: ")
    assert "failed: rank 1 is at " in other["told"]
    assert " after 5 steps; rank 0 has taken " in other["told"]
    assert "rank 1 has taken 5" in own["told"]
    assert max(other["took"], own["took"]) < 30


@pytest.mark.dist
def test_sigterm_on_one_rank_of_lightning_ends_all(lightning: dict[str, list[Any]]) -> None:
    """At once: it does not wait in its handler for others, which are told."""
    other, own = lightning["signalled"]
    assert own["told"].startswith("SIGTERMException")
    assert other["told"].startswith("RankFailure: ")
    assert "rank 1 raised SIGTERMException after 5 steps" in other["told"]
    assert max(other["took"], own["took"]) < 30


@pytest.mark.dist
def test_lightning_asks_no_other_rank_at_every_step(lightning: dict[str, list[Any]]) -> None:
    """It broadcast before each batch whether SIGTERM had come, and all waited for rank 0."""
    assert max(lightning["broadcasts"]) < 24


@pytest.mark.dist
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_callbacks_find_the_end_and_may_replace_it(
    library: str, request: pytest.FixtureRequest
) -> None:
    """All find one model; of what each puts there, such as an EMA, all end with the mean."""
    first, second = request.getfixturevalue(library)["replaced"]
    assert first["found"] == second["found"]
    for one in (first, second):
        assert one["end"] == [[2.0]] * len(one["end"])


# --- Accelerate ----------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(OPTIONS)), ids=str)
def test_accelerate_trains_as_a_loop_of_ones_own(
    case: int, accelerate: dict[str, list[Any]]
) -> None:
    """Bit for bit, on from a checkpoint, too, whose model is the consensus."""
    first, second = (answer[case] for answer in accelerate["trained"])
    for one in (first, second):
        assert one["end"] == one["own"] == first["end"]
        assert one["went on"]
        assert one["again"] == one["end"]
        assert one["saved"]
    assert first["files"] == ["rank0.safetensors", "rank1.safetensors", "state.json"]


@pytest.mark.dist
def test_accelerate_with_shards_or_a_scaler_is_refused(accelerate: dict[str, list[Any]]) -> None:
    """In one line that says what to use instead."""
    for sharded, half in accelerate["refused"]:
        assert sharded.startswith("Accelerate is set up for FSDP; local updates need a whole model")
        assert half.startswith("mixed_precision is 'fp16', whose GradScaler skips steps")


# --- Transformers --------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(OPTIONS)), ids=str)
def test_transformers_trains_as_a_loop_of_ones_own(
    case: int, transformers: dict[str, list[Any]]
) -> None:
    """Bit for bit, on from checkpoints, too; evaluated and saved is the consensus."""
    first, second = (answer[case] for answer in transformers["trained"])
    for one in (first, second):
        assert one["end"] == one["own"] == first["end"]
        assert one["again"] == {"checkpoint-5": True, "checkpoint-10": True}
        assert one["evaluated"] == first["evaluated"]
        assert one["saved"]
        assert one["kept"] == one["evaluated"][0]
        assert len(one["evaluated"]) == 3


@pytest.mark.dist
def test_transformers_begins_at_a_checkpoint_of_ddp(transformers: dict[str, list[Any]]) -> None:
    """A first round begins at its model; all ranks end alike, elsewhere than with their files."""
    one, other = transformers["without_files"]
    assert one == other
    assert one != transformers["trained"][0][0]["end"]


@pytest.mark.dist
def test_the_best_model_of_transformers_is_loaded_last(
    transformers: dict[str, list[Any]],
) -> None:
    """After all averages have been used; and a retry on one rank only is refused."""
    assert transformers["best"] == [True, True]
    for told in transformers["refused"]:
        assert told.startswith("auto_find_batch_size is True, which begins anew on one rank")


# --- other numbers of ranks, and the page ---------------------------------------------------------


@pytest.mark.dist
def test_one_rank_goes_on_where_two_agreed(tmp_path: Path) -> None:
    """A warning says what is lost; the buffers are those of the library's own file."""
    together("rank_files_workers", 2, {"save": {"folder": str(tmp_path)}})
    (answer,) = together("rank_files_workers", 1, {"load": {"folder": str(tmp_path)}})["load"]
    assert answer["began"]
    (told,) = answer["told"]
    assert "local_updates is of 2 ranks, and here are 1: all begin at the anchor" in told


@pytest.mark.dist
def test_files_of_another_form_are_one_line(tmp_path: Path) -> None:
    """Though their checksums are right; and files of another number of optimizers."""
    together("rank_files_workers", 1, {"save": {"folder": str(tmp_path)}})
    (told,) = together("rank_files_workers", 1, {"crafted": {"folder": str(tmp_path)}})["crafted"]
    *crafted, optimizers = told
    for one in crafted:
        assert one.startswith("DamagedError: cannot read ")
        assert "state.json: " in one
        assert "\n" not in one
    assert optimizers.endswith("it is of 1 optimizer, and here are 2")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_scripts_of_the_page_run(library: str, tmp_path: Path) -> None:
    """On two ranks, as written; only on the CPU."""
    pytest.importorskip(library)
    (script,) = (
        block.text
        for block in blocks(ROOT / "docs" / "frameworks.md")
        if f"adapters.{library} " in block.text
    )
    (tmp_path / "script.py").write_text(script)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(
        [sys.executable, *start],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ACCELERATE_USE_CPU": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folders = {"accelerate": "out/state/local_updates", "transformers": "out/model"}
    assert (tmp_path / folders.get(library, "lightning_logs")).is_dir()
