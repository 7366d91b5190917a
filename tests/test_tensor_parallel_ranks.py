"""Ranks that share layers, as real processes: the same schedules over Gloo, and in the lab."""

import json
from pathlib import Path

import pytest
from ranks import on_ranks, realrun
from test_realrun_cli import CLUSTER
from tiny import VARIANTS

from co2sim import Case, study
from realrun import record

pytest.importorskip("torch")
pytestmark = pytest.mark.dist


@pytest.mark.parametrize("per_node", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_strategy_runs_on_ranks_that_share_layers_and_breaks_no_rule(per_node: int) -> None:
    """Pairs share layers; all else meets those with one place in their pairs, in checking mode."""
    variants = VARIANTS[:: 4 if per_node == 4 else 3]
    found = on_ranks(
        "strategies_with_shared_layers",
        4,
        gpus_per_node=per_node,
        module="tensor_parallel_workers",
        variants=variants,
    )
    for rank in range(4):
        pair, alike = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert [text for text, *_ in found[rank]] == variants
        for text, broken, sharing, others in found[rank]:
            assert (broken, sharing) == ([], pair), text
            assert set(others) <= set(alike), text


@pytest.mark.nightly
def test_the_command_runs_them_and_its_record_predicts_them(tmp_path: Path) -> None:
    """`realrun run --tp 2`: JSON says so, and the record holds what a prediction needs."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    options = ("--tp", "2", "--sequence-parallel", "--rounds", "1", "--kernels", "sleep", "--check")
    done = realrun(
        tmp_path,
        4,
        *("run", "-c", "cluster.toml", "-m", "tiny-5m", "-s", "fsdp"),
        *options,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["tp"], figures["sequence_parallel"], figures["gpus"]) == (2, True, 4)
    kept = record.read(tmp_path / "out" / "fsdp")
    assert (kept.case.tp, kept.case.sequence_parallel) == (2, True)
    assert isinstance(kept.case, Case)
    predicted = study.run(kept.case)
    assert predicted.tp == 2
    assert predicted.wire_bytes_per_gpu_per_step == figures["wire_bytes_per_gpu_per_step"]
    assert figures["round_time_s"] >= predicted.round_time_s - predicted.exposed_comm_s
