"""Local updates in torchtitan's trainer: its debug model, its checkpoints, on Gloo.

torchtitan is not among the requirements of development: `make torchtitan` installs it.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make torchtitan")

from commands import python
from pages import blocks
from places import ROOT
from ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.nightly]

DELAYED: dict[str, Any] = {"algorithm": "CO2", "tau": 4, "delay": 2}
CASES: list[dict[str, Any]] = [
    {"algorithm": "CO2.published", "tau": 2},
    DELAYED,
    {"algorithm": "LocalSGD", "tau": 3},
    {"algorithm": "DiLoCo", "tau": 2},
]
NAMES = [f"{one['algorithm']}{'-delay' * ('delay' in one)}" for one in CASES]
INSIDE = {"FSDP2": {**DELAYED, "tensor_parallel": 1}, "TP": {**DELAYED, "tensor_parallel": 2}}
"""Two workers of two ranks."""


def on(nproc: int, function: str, folder: Path, **arguments: Any) -> list[Any]:
    """What a function with a folder for its files gives on ranks."""
    # meshes of several ranks stay in a process, and torchtitan takes those of one model for another
    given = {"folder": str(folder), "last": nproc > 2, **arguments}
    return on_ranks(function, nproc, module="torchtitan_workers", **given)


@pytest.mark.parametrize(
    ("nproc", "case"),
    [*((2, one) for one in CASES), *((4, one) for one in INSIDE.values())],
    ids=[*NAMES, *INSIDE],
)
def test_it_trains_as_a_loop_of_ones_own(nproc: int, case: dict[str, Any], tmp_path: Path) -> None:
    """Within 1e-6, where parameters move by 1e-3, though ranks have other numbers of tokens.

    Batches in parts, clipped gradients and the schedule are those of the config.
    """
    for apart, moved in on(nproc, "compared", tmp_path, **case):
        assert apart < 1e-6
        assert moved > 1e-3


@pytest.mark.parametrize(
    ("nproc", "case"),
    [(2, DELAYED), *((4, one) for one in INSIDE.values())],
    ids=["one rank", *INSIDE],
)
def test_what_is_validated_and_saved_is_the_consensus(
    nproc: int, case: dict[str, Any], tmp_path: Path
) -> None:
    """The same on all ranks, however many a worker has; at last what training ends with."""
    first, *others = on(nproc, "trained", tmp_path, **case)
    assert others == [first] * (nproc - 1)
    _, third, sixth = first["validated"]
    assert first["saved"] == [third, sixth, first["end"]]
    assert len({third, sixth, first["end"]}) == 3


@pytest.mark.parametrize(
    ("nproc", "case"),
    [(2, CASES[0]), (2, CASES[3]), *((4, one) for one in INSIDE.values())],
    ids=["CO2", "DiLoCo", *INSIDE],
)
def test_a_resumed_run_equals_one_that_was_not_cut(
    nproc: int, case: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit, from between rounds and from within one, with averages under way.

    Checkpoints are written while training goes on.
    """
    whole = on(nproc, "trained", tmp_path, async_mode="async", **case)[0]
    for step, validated in ((6, []), (3, whole["validated"][2:])):
        for answer in on(nproc, "trained", tmp_path, step=step, **case):
            assert answer == {"end": whole["end"], "validated": validated, "saved": []}


def test_a_new_algorithm_begins_at_the_consensus(tmp_path: Path) -> None:
    """At a checkpoint's step, with other workers, or their optimizers; loads are no steps."""
    third = on(2, "trained", tmp_path, **CASES[0])[0]["saved"][0]
    for workers, without in ((2, []), (4, ["optimizer", "dataloader"])):
        given: dict[str, Any] = {"workers": workers, "step": 3, "without": without}
        assert on(workers, "begun_at", tmp_path, **given) == [third] * workers


def test_mistakes_are_refused_in_one_line(tmp_path: Path) -> None:
    """What makes no workers, and replicas that torchtitan averages itself (HSDP)."""
    for told in on(2, "refused", tmp_path):
        assert "data_parallel_replicate_degree is 1" in told["one worker"]
        assert "pipeline_parallel_degree is 2" in told["pipeline"]
        assert "global_batch_size is 3" in told["batch"]
        assert "algorithm is 'co2'" in told["name"]
        assert "LocalUpdateTrainer.Config" in told["other trainer"]
        assert "is spread over ranks [0, 1]" in told["HSDP"]
        assert not any("\n" in one for one in told.values())


def test_an_exception_on_one_rank_ends_all(tmp_path: Path) -> None:
    """Long before the deadline; the others name the rank and its exception."""
    other, own = on(2, "broken", tmp_path, last=True)
    assert own == "ValueError: a bad sentence"
    assert other.startswith("RankFailure: ")
    assert "rank 1 raised ValueError" in other


def test_the_config_of_the_page_trains(tmp_path: Path) -> None:
    """As written, by torchtitan's own command, with other options on the command line."""
    (script,) = (
        block.text
        for block in blocks(ROOT / "docs" / "frameworks.md")
        if "adapters.torchtitan " in block.text
    )
    (tmp_path / "co2_in_titan.py").write_text(script)
    assets = tmp_path / "tests" / "assets"  # which are in torchtitan's repository
    (assets / "c4_test").mkdir(parents=True)
    lines = [json.dumps({"text": "a b c d e f g h " * 20}) for _ in range(64)]
    (assets / "c4_test" / "data.json").write_text("\n".join(lines))
    (assets / "tokenizer").mkdir()
    words = {word: place for place, word in enumerate(["<s>", "</s>", *"abcdefgh"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<s>"}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (assets / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    place = ROOT / "tests" / "helpers"
    shutil.copy(place / "torchtitan_on_cpu.py", tmp_path / "train.py")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    chosen = (
        "--module co2_in_titan --config debug_model --parallelism.data_parallel_replicate_degree 2"
    )
    small = (
        "--training.seq_len 64 --training.local_batch_size 1 --training.steps 5"
        " --training.disable_cuda_graphs --local_updates.tau 2 --checkpoint.enable"
    )
    path = os.pathsep.join(map(str, (ROOT, tmp_path)))
    done = python(tmp_path, *start, *chosen.split(), *small.split(), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "outputs" / "checkpoint" / "step-5" / ".metadata").is_file()
