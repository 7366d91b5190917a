"""Local updates in Lightning, Accelerate and Transformers: their own checkpoints, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from commands import python
from pages import blocks
from places import ROOT
from ranks import on_ranks

pytest.importorskip("torch")

LIBRARIES = ("lightning", "accelerate", "transformers")
OPTIONS: list[dict[str, Any]] = [{"tau": 4}, {"tau": 4, "delay": 2}]
pytestmark = [pytest.mark.dist, pytest.mark.nightly]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "claim",
    [
        "lightning trains_as_a_loop_of_ones_own",
        "lightning resumes_bit_for_bit",
        "accelerate trains_as_a_loop_of_ones_own",
        "transformers trains_as_a_loop_of_ones_own",
    ],
)
def test_a_library_trains_as_a_loop_of_ones_own(
    claim: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit; all ranks end alike, and evaluate and save the consensus; and so on."""
    on_two_ranks(claim, tmp_path, options=options)


@pytest.mark.parametrize(
    "claim",
    [
        "lightning reads_other_checkpoints",
        "transformers begins_at_a_checkpoint_of_ddp",
        *(f"{library} ends_all_by_an_exception_on_one" for library in LIBRARIES[::2]),
        *(f"{library} ends_all_by_an_early_stop_on_one" for library in LIBRARIES[::2]),
        "accelerate refuses_shards_and_a_scaler",
    ],
)
def test_a_library_ends_as_its_function_says(claim: str, tmp_path: Path) -> None:
    """Other checkpoints, and what goes wrong."""
    on_two_ranks(claim, tmp_path)


def on_two_ranks(claim: str, folder: Path, **arguments: Any) -> None:
    """Call the function of a library that makes a claim, with a folder for its files."""
    library, function = claim.split()
    pytest.importorskip(library)
    # a library changes the process that it is in, and leaves ranks that cannot go on
    module = f"{library}_workers"
    on_ranks(function, 2, module=module, last=True, folder=folder, **arguments)


def run_script(text: str, ranks: int, folder: Path) -> None:
    """Run a script of the page under torchrun; only on the CPU."""
    (folder / "script.py").write_text(text)
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    cpu = {"ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = python(folder, *start, "script.py", **cpu)
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
