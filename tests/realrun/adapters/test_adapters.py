"""Local updates in Lightning, Accelerate and Transformers: their own checkpoints, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


from pages import blocks
from places import ROOT
from ranks import on_ranks

OPTIONS: list[dict[str, Any]] = [{"tau": 4}, {"tau": 4, "delay": 2}]
pytestmark = [pytest.mark.dist, pytest.mark.nightly]

LIBRARIES = ("lightning", "accelerate", "transformers")


def two(library: str, function: str, folder: Path, **arguments: Any) -> list[Any]:
    """What a function with a folder for its files gives on two ranks."""
    pytest.importorskip(library)
    module = f"{library}_workers"
    given = {"folder": str(folder), **arguments}
    # a library changes the process that it is in, and leaves ranks that cannot go on
    return on_ranks(function, 2, module=module, last=True, **given)


# --- Lightning -----------------------------------------------------------------------------------


def test_lightning_trains_as_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Bit for bit; all ranks end alike, and validate the consensus, which a checkpoint holds.

    It is resumed bit for bit from the middle of two rounds, and from the end, by a link.
    """
    for case in OPTIONS:
        folder = tmp_path / str(case)
        first, second = (answer[0] for answer in two("lightning", "trained", folder, cases=[case]))
        for one in (first, second):
            assert one["end"] == one["own"] == first["end"]
            assert one["validated"] == first["validated"]
            assert one["saved"] in one["validated"]
        assert first["seen"] != second["seen"]
        names = [f"step={step}.ckpt{end}" for step in (12, 18, 6) for end in ("", ".ranks")]
        assert first["files"] == ["last.ckpt", *names]
        for answer in two("lightning", "resumed", folder, cases=[case]):
            assert answer[0] == dict.fromkeys(("step=6.ckpt", "step=12.ckpt", "last.ckpt"), True)


def test_other_checkpoints_of_lightning(tmp_path: Path) -> None:
    """Of DDP; removed ones leave nothing; a damaged and a missing file end in one line."""
    for answer in two("lightning", "other_checkpoints", tmp_path):
        assert answer["began"]
        assert answer["left"] == ["step=18.ckpt", "step=18.ckpt.ranks"]
        damaged, missing = answer["told"]
        assert "rank1.safetensors" in damaged
        assert "state.json" in missing


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_an_exception_on_one_rank_ends_all(library: str, tmp_path: Path) -> None:
    """Long before the deadline; the others name the rank and its exception."""
    other, own = two(library, "broken", tmp_path)
    assert own["told"] == "ValueError: a bad batch"
    assert other["told"].startswith("RankFailure: ")
    assert "rank 1 raised ValueError" in other["told"]


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_an_early_stop_on_one_rank_ends_all(library: str, tmp_path: Path) -> None:
    """Long before the deadline: both sides name rank 1, and the numbers of steps of both.

    Where ranks do nothing together but averages, the rank takes part in them, and both end well.
    """
    other, own = two(library, "stopped", tmp_path)
    if library == "transformers":
        assert other["told"] == own["told"] == ""
        return
    assert other["told"].startswith("RankFailure: ")
    assert "rank 1 is at " in other["told"]
    assert "rank 1 has taken 5" in own["told"]


# --- Accelerate ----------------------------------------------------------------------------------


def test_accelerate_trains_as_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Bit for bit, on from a checkpoint, too, whose model is the consensus."""
    for answers in zip(*two("accelerate", "trained", tmp_path, cases=OPTIONS, stop=9), strict=True):
        for one in answers:
            assert one["end"] == one["own"] == answers[0]["end"]
            assert one["went on"]
            assert one["again"] == one["end"]
            assert one["saved"]
        assert answers[0]["files"] == ["rank0.safetensors", "rank1.safetensors", "state.json"]


def test_accelerate_with_shards_or_a_scaler_is_refused(tmp_path: Path) -> None:
    """In one line that says what to use instead."""
    for sharded, half in two("accelerate", "refused", tmp_path):
        assert "FSDP" in sharded
        assert "'fp16'" in half


# --- Transformers --------------------------------------------------------------------------------


def test_transformers_trains_as_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Bit for bit, on from checkpoints, too; evaluated and saved is the consensus.

    From a checkpoint of DDP, which has no files of ranks, it begins at its model.
    """
    found = two("transformers", "trained", tmp_path, cases=OPTIONS)
    for answers in zip(*found, strict=True):
        for one in answers:
            assert one["end"] == one["own"] == answers[0]["end"]
            assert one["again"] == {"checkpoint-5": True, "checkpoint-10": True}
            assert one["evaluated"] == answers[0]["evaluated"]
            assert one["saved"]
            assert one["kept"] == one["evaluated"][0]
            assert len(one["evaluated"]) == 3
    one, other = two("transformers", "without_files", tmp_path)
    assert one == other != found[0][0]["end"]


# --- other numbers of ranks, and the page ---------------------------------------------------------


def run_script(text: str, ranks: int, folder: Path) -> None:
    """Run a script of the page under torchrun; only on the CPU."""
    (folder / "script.py").write_text(text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *start, "script.py"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ACCELERATE_USE_CPU": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


PAGE = ROOT / "docs" / "frameworks.md"


@pytest.mark.parametrize(
    ("name", "ranks"), [("plain", 2), ("fsdp2", 4), ("tensor_parallel", 4)], ids=str
)
def test_the_scripts_without_a_library_run(name: str, ranks: int, tmp_path: Path) -> None:
    """Plain PyTorch, FSDP2, and tensor parallelism with FSDP2, as written."""
    (script,) = (one.text for one in blocks(PAGE) if one.title == f"{name}_training.py")
    run_script(script, ranks, tmp_path)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_scripts_of_the_page_run(library: str, tmp_path: Path) -> None:
    """On two ranks, as written; only on the CPU."""
    pytest.importorskip(library)
    (script,) = (one.text for one in blocks(PAGE) if f"adapters.{library} " in one.text)
    run_script(script, 2, tmp_path)
    folders = {"accelerate": "out/state/local_updates", "transformers": "out/model"}
    assert (tmp_path / folders.get(library, "lightning_logs")).is_dir()
