"""Optimizer states divided inside nodes: what every collective moves, memory, and step times."""

from dataclasses import replace

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from moments import most

from co2sim import strategies
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import Layout
from co2sim.simulation.run import execute

M = 2000
"""Parameters of the tiny model."""
WIDTH = 2
"""Bytes of one, and of its gradient."""

stages = st.sampled_from(["zero1", "zero2"])
nodes, gpus = st.integers(2, 5), st.sampled_from([2, 4, 5])


@given(stages, nodes, gpus, st.integers(1, 3))
def test_a_share_is_reduced_between_nodes_once_a_step(
    stage: str, n: int, g: int, accumulation: int
) -> None:
    """Stage 2 scatters gradients in every micro-step, stage 1 in the last one."""
    made = tiny.schedule(f"{stage}(shard=node)", (n, g), accumulation=accumulation)
    times = accumulation if stage == "zero2" else 1
    assert tiny.moved(made) == {
        "reduce_scatter node": times * M,
        "all_reduce peers": M // g,
        "all_gather node": M,
    }


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_step_takes_its_parts_one_after_the_other(stage: str) -> None:
    """Without overlap: passes, scatter, all-reduce, a quarter of the optimizer, gather.

    Three nodes of four. The GPUs of a node all-reduce at once and share its network cards, so that
    it takes as long as one that has them all would for all gradients.
    """
    n, g = 3, 4
    job = tiny.job(overlap=False)
    cluster = tiny.cluster(n, g)
    made = strategies.parse(f"{stage}(shard=node)").schedule(job, Layout(n, g))
    trace = execute(made, cluster, precision="bf16", rounds=1)
    passes = [work for pair in job.works() for work in (pair.forward, pair.backward)]
    works = [*passes, job.update.by_elements(M // g)]
    computes = sum(max(work.flops, work.memory_bytes) / 1e12 for work in works)
    inside = 2 * (g - 1) / g * WIDTH * M / 10e9
    between = 2 * (n - 1) / n * WIDTH * M / 1e9
    assert tiny.makespan(trace) == pytest.approx(computes + inside + between)


def test_groups_of_any_ranks_are_parts_of_nodes_or_full_nodes() -> None:
    """Two GPUs of a node of four, or two nodes of them; each with its own peers."""
    for shard in (2, 8):
        made = tiny.schedule(f"zero1(shard={shard})", (4, 4))
        assert tiny.moved(made) == {
            f"reduce_scatter block({shard})": M,
            f"all_reduce peers({shard})": M // shard,
            f"all_gather block({shard})": M,
        }
        memory = most(tiny.job(), f"zero2(shard={shard})", Layout(4, 4))
        assert memory["optimizer"] == 12 * M / shard


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_single_node_has_no_peers_and_a_single_gpu_nothing_to_divide(stage: str) -> None:
    """One node: the stage itself. Nodes of one GPU: whole states, all-reduced once a step."""
    inside = tiny.schedule(f"{stage}(shard=node)", (1, 4))
    assert inside.body == tiny.schedule(stage, (1, 4)).body
    alone = tiny.schedule(f"{stage}(shard=node)", (4, 1), accumulation=2)
    assert tiny.moved(alone) == {"all_reduce world": M}
    memory = most(tiny.job(), f"{stage}(shard=node)", Layout(4, 1))
    assert memory == most(tiny.job(), "ddp", Layout(4, 1))


def test_it_combines_with_gpus_that_share_layers_sequences_and_stages() -> None:
    """tp: a node has so many fewer shares. cp: all ranks reduce. pp: the GPUs of a stage."""
    case = Question(cluster="dgx-h100", model="llama3-8b", strategy="zero1(shard=node)", gpus=32)
    for changes, shares, groups in [
        ({"tp": 2, "sequence_parallel": True}, 4, {"node/2", "peers/2"}),
        ({"cp": 2}, 8, {"node", "peers"}),
    ]:
        made = replace(case, **changes).stage()  # type: ignore[arg-type]
        met = {str(work.group) for work in tiny.collectives(made.schedule)}
        assert groups <= met
        assert "world" not in met
        expected = 12 * made.workload.share.parameters / shares
        assert made.memory()["optimizer"] == pytest.approx(expected)
    stage = replace(case, pp=8, global_batch=64).job().stage(0)  # four GPUs of a node
    assert stage.memory()["optimizer"] == 12 * stage.workload.share.parameters / 4
