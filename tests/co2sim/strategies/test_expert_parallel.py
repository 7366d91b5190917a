"""Expert parallelism: what every rank holds, exchanges and reduces."""

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate
from small_gpt import planned, routed_job, small

from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster, Link
from co2sim.models.operators import Block, ExpertExchange
from co2sim.models.transformer import Experts, Transformer
from co2sim.prediction import driver
from co2sim.prediction.bounds import Shared, StepBound
from co2sim.prediction.job import schedule_of
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import (
    Collective,
    DType,
    Kind,
    Layout,
    Schedule,
    experts,
    replicas_of_experts,
)
from co2sim.simulation.costs import cost_of, traffic
from co2sim.simulation.run import execute
from co2sim.strategies import parse
from co2sim.training.memory import kept_bytes
from co2sim.training.workload import Workload

BODY = Transformer(
    layers=3,
    hidden=32,
    heads=4,
    ffn=64,
    gated=True,
    bias=False,
    norm="rmsnorm",
    experts=Experts(count=16, active=2, width=16, dense=1),
)
MODEL = small(BODY, 8)
BUSY = small(BODY, 8, experts=replace(BODY.experts, load=1.5))
EXPERTS = 2 * 16 * 3 * 32 * 16  # layers, experts, matrices, their sizes
DENSE = MODEL.parameters - EXPERTS
JOB = Workload(MODEL, micro_batch=3, ep=4)
LAYOUT = Layout(2, 8)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([0, 8, 16]))
def test_every_rank_meets_those_with_its_experts_once(ep: int, among: int) -> None:
    """Groups of each kind divide all ranks, and two of a pair meet in one rank only."""
    ranks = range(LAYOUT.world_size)
    if among and among % ep:
        return
    for group in (experts(ep), replicas_of_experts(ep, among)):
        members = [group.members(rank, LAYOUT) for rank in ranks]
        assert all(rank in members[rank] for rank in ranks)
        assert {tuple(members[one]) for rank in ranks for one in members[rank]} == {
            tuple(one) for one in members
        }
    for rank in ranks:
        together = set(experts(ep).members(rank, LAYOUT))
        alike = set(replicas_of_experts(ep, among).members(rank, LAYOUT))
        assert together & alike == {rank}
        assert len(alike) == (among or LAYOUT.world_size) // ep


NODES = [f"{name}:shard=node" for name in ("fsdp", "zero1", "zero2")]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", *NODES])
def test_gradients_are_reduced_where_they_belong(strategy: str) -> None:
    """Of experts a rank reduces its own quarter among the ranks that have it, too."""
    made = schedule_of(parse(strategy), JOB, LAYOUT)
    kind = "all_reduce" if strategy == "ddp" else "reduce_scatter"
    node = strategy in NODES
    found = tiny.moved(made)
    world, replicas = ("node", "shards(2)/4") if node else ("world", "replicas(4)")
    reduced = {name: count for name, count in found.items() if name.startswith(kind)}
    assert reduced == {f"{kind} {world}": DENSE, f"{kind} {replicas}": EXPERTS // 4}
    if node:  # shards of all are then reduced between the nodes
        again = sum(count for name, count in found.items() if name.startswith("all_reduce"))
        assert again == DENSE // 8 + EXPERTS // 4 // 2


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_parameters_are_gathered_where_they_belong(strategy: str) -> None:
    """fsdp: all but the root twice; zero1: all once, behind the optimizer."""
    moved = tiny.moved(schedule_of(parse(strategy), JOB, LAYOUT))
    found = {name: count for name, count in moved.items() if name.startswith("all_gather")}
    root = sum(MODEL.blocks[place].parameters for place in (0, -1))
    times = 2 if strategy == "fsdp" else 1
    assert found == {
        "all_gather world": times * DENSE - (times - 1) * root,
        "all_gather replicas(4)": times * EXPERTS // 4,
    }


def test_megatron_fsdp_shards_experts_among_those_with_the_same() -> None:
    """16 ranks, of which four have the same quarter of the experts; two micro-steps.

    Layers are gathered for each pass, and reduced behind each backward one; embedding and head are
    gathered once. Of each parameter a rank holds its part: 2 bytes, 2 of its gradient, and 12 of
    states. Whole are embedding and head, and at most all layers, since these are small.
    """
    job, strategy = replace(JOB, accumulation=2), parse("fsdp:version=megatron,reduce=bf16")
    ends = sum(MODEL.blocks[place].parameters for place in (0, -1))
    assert without_tokens("fsdp:version=megatron,reduce=bf16", job) == {
        "all_gather world": ends + 2 * 2 * (DENSE - ends),
        "all_gather replicas(4)": 2 * 2 * EXPERTS // 4,
        "reduce_scatter world": 2 * DENSE,
        "reduce_scatter replicas(4)": 2 * EXPERTS // 4,
    }
    memory, owned = strategy.memory(job.share, LAYOUT), DENSE / 16 + EXPERTS / 16
    held = [memory[name] for name in ("parameters", "gradients", "optimizer")]
    assert held == [2 * owned, 2 * owned, 12 * owned]
    layers = DENSE - ends + EXPERTS // 4
    gathered = memory["gathered"]
    assert (gathered.forward[0], gathered.loss) == (2 * (ends + layers), 2 * ends)  # type: ignore[union-attr, index]
    alone = replace(job, ep=16)
    assert not any("replicas" in name for name in without_tokens("fsdp:version=megatron", alone))
    whole = strategy.memory(alone.share, LAYOUT)["gathered"]
    assert whole.forward[0] == 2 * DENSE  # type: ignore[union-attr, index]


def test_experts_that_are_alone_in_a_node_are_reduced_between_nodes_only() -> None:
    """Eight ranks of a node with two experts each: whole gradients of these go to the other node.

    Their states are not divided.
    """
    job = replace(JOB, ep=8)
    for strategy in ("zero1:shard=node", "zero2:shard=node"):
        made = schedule_of(parse(strategy), job, LAYOUT)
        found = tiny.moved(made)
        del found["all_to_all experts(8)"]
        assert found == {
            "reduce_scatter node": DENSE,
            "all_gather node": DENSE,
            "all_reduce peers": DENSE // 8 + EXPERTS // 8,
        }
        memory = parse(strategy).memory(job.share, LAYOUT)
        assert memory["optimizer"] == 12 * (DENSE / 8 + EXPERTS / 8)


def without_tokens(strategy: str, job: Workload, layout: Layout = LAYOUT) -> dict[str, int]:
    """Elements of all collectives by kind and group, but for tokens on their way to experts."""
    moved = tiny.moved(schedule_of(parse(strategy), job, layout))
    return {name: count for name, count in moved.items() if f"experts({job.ep})" not in name}


def test_with_zero3_experts_are_gathered_and_reduced_among_those_with_the_same() -> None:
    """Every parameter twice, every gradient once: of experts a quarter, among four ranks."""
    assert without_tokens("zero3", JOB) == {
        "all_gather world": 2 * DENSE,
        "all_gather replicas(4)": 2 * EXPERTS // 4,
        "reduce_scatter world": DENSE,
        "reduce_scatter replicas(4)": EXPERTS // 4,
    }
    memory = parse("zero3").memory(JOB.share, LAYOUT)
    owned = DENSE / 16 + EXPERTS / 16
    assert (memory["parameters"], memory["optimizer"]) == (2 * owned, 12 * owned)


def test_with_zero3_a_rank_that_has_its_own_experts_sends_none() -> None:
    """They are no part of what is gathered, of what waits for reduction, nor of what is sent."""
    job = replace(JOB, ep=16)
    expected = {"all_gather world": 2 * DENSE, "reduce_scatter world": DENSE}
    assert without_tokens("zero3", job) == expected
    alone, shared = (
        parse("zero3:prefetch=0").memory(each.share, LAYOUT)["gathered"] for each in (job, JOB)
    )
    dense = [2.0 * sum(block.tensors) for block in job.share.model.blocks]
    layer = 2.0 * EXPERTS / 2 / 4
    assert alone.forward == tuple(dense)  # type: ignore[union-attr]
    assert shared.forward == tuple(  # type: ignore[union-attr]
        size + layer * (place in {2, 3}) for place, size in enumerate(dense)
    )


def test_with_zero3_experts_cross_the_network_once_for_each_that_has_them() -> None:
    """On two nodes of eight: a ring of all 16, and four rings of four, three times each.

    A ring of m sends (m - 1) / m of its buffer through the cards of a node. Alone a gather of a
    layer's experts takes as long as the bytes of all four rings at 1 GB/s.
    """
    here = tiny.cluster(2, 8)
    made = schedule_of(parse("zero3:prefetch=0"), JOB, here.layout)
    experts_of_rank = EXPERTS / 4 * 2
    sent = 3 * (15 / 16 * DENSE * 2 + 4 * 3 / 4 * experts_of_rank)
    assert traffic(made, here).nic == pytest.approx(sent, rel=1e-9)
    lasts = 4 * 3 / 4 * experts_of_rank / 2 / tiny.GIGA
    for fold in (True, False):
        spans = tiny.by_op(execute(made, here, precision="bf16", rounds=1, fold=fold))
        span = spans[0, "gather_experts.forward.layer1"]
        assert span.end - span.start == pytest.approx(lasts, rel=1e-9)


def test_with_zeropp_experts_stay_in_the_node_to_go_back() -> None:
    """Two ranks of a node have the same: these hold a secondary copy, and sum up gradients first.

    The exchange between nodes is of half of them.
    """
    moved = without_tokens("zeropp", JOB)
    layers = [block for block in JOB.share.model.blocks if block.parameters]
    assert moved == {
        "all_gather world": DENSE,
        "all_gather node": DENSE,
        "all_to_all node": DENSE,
        "all_to_all peers": sum(-(-sum(block.tensors) // 8) for block in layers)
        + EXPERTS // 4 // 2,
        "all_gather replicas(4)": EXPERTS // 4,
        "all_gather shards(2)/4": EXPERTS // 4,
        "all_to_all shards(2)/4": EXPERTS // 4,
    }
    memory = parse("zeropp").memory(JOB.share, LAYOUT)
    assert memory["secondary"] == 2 * (DENSE / 8 + EXPERTS / 4 / 2)
    made = tiny.collectives(schedule_of(parse("zeropp"), JOB, LAYOUT))
    quantized = {work.dtype for work in made if str(work.group) == "replicas(4)"}
    assert quantized == {DType.INT8}


def test_with_zeropp_a_node_that_has_each_expert_once_gathers_none_to_go_back() -> None:
    """Sixteen ranks of two nodes divide them: two of four nodes have the same, and exchange."""
    job, layout = replace(JOB, ep=16), Layout(4, 8)
    moved = without_tokens("zeropp", job, layout)
    of_experts = {name: count for name, count in moved.items() if "replicas" in name}
    assert of_experts == {
        "all_gather replicas(16)": EXPERTS // 16,
        "all_to_all replicas(16)": EXPERTS // 16,
    }
    assert not any("shards" in name for name in moved)
    memory = parse("zeropp").memory(job.share, layout)
    assert memory["secondary"] == 2 * (DENSE / 8 + EXPERTS / 16)


LOCAL = ["co2.published", "local_sgd", "diloco", "slowmo", "overlap_local_sgd", "co2:delay=2"]


@pytest.mark.parametrize("strategy", LOCAL)
def test_a_worker_averages_the_share_of_each_of_its_ranks(strategy: str) -> None:
    """A node of eight is a worker: of experts a rank has a quarter, of which two own half each.

    What it owns it averages with its place in the other node, and gathers inside.
    """
    name = f"{strategy}{',' if ':' in strategy else ':'}tau=2,worker=node,inner=zero2"
    made = schedule_of(parse(name), JOB, LAYOUT)
    (average,) = [work for work in tiny.collectives(made) if str(work.group) == "peers"]
    share = -(-DENSE // 8) + EXPERTS // 4 // 2
    assert average.elements == share
    moved = tiny.moved(made)
    gathered = {group: moved[f"all_gather {group}"] for group in ("node", "shards(2)/4")}
    # of the two steps, one of which leaves the gathering to the average, if it is used behind it
    assert gathered == {"node": 2 * DENSE, "shards(2)/4": 2 * EXPERTS // 4}
    held = parse(name).memory(JOB.share, LAYOUT)
    inner = parse("zero2").memory(JOB.share, Layout(1, 8))
    copies = {"co2:delay=2": 4, "local_sgd": 1}.get(strategy, 3)
    assert held["outer"] == copies * share * 4
    assert held["optimizer"] == inner["optimizer"] == 12 * (DENSE / 8 + EXPERTS / 8)


def test_fragments_of_a_worker_are_parts_of_its_experts_too() -> None:
    """Three fragments: together all that a rank owns."""
    name = "diloco:tau=6,fragments=3,worker=node,inner=zero3"
    made = schedule_of(parse(name), JOB, LAYOUT)
    averages = [work for work in tiny.collectives(made) if str(work.group) == "peers"]
    owned = DENSE / 8 + EXPERTS / 8
    assert len(averages) == 3
    assert owned <= sum(work.elements for work in averages) < owned + 2 * 3


def test_sites_are_workers_with_experts() -> None:
    """Two nodes of four are a site: eight ranks, of which two have the same experts."""
    layout = Layout(4, 4, 2)
    made = schedule_of(parse("local_sgd:tau=2,worker=site,inner=zero1"), JOB, layout)
    (average,) = [work for work in tiny.collectives(made) if str(work.group) == "site_peers"]
    assert average.elements == -(-DENSE // 8) + EXPERTS // 4 // 2
    groups = {str(work.group) for work in tiny.collectives(made)}
    assert groups == {"site", "shards(2)/4", "site_peers", "experts(4)"}


@pytest.mark.parametrize(("worker", "gpus"), [("gpu", 1), ("node", 8)])
def test_a_worker_without_all_experts_is_refused(worker: str, gpus: int) -> None:
    """Workers step on their own: experts of others would be other ones."""
    job = replace(JOB, ep=16)
    with pytest.raises(OptionError, match=rf"multiple of 16 GPUs; worker={worker} has {gpus}"):
        schedule_of(parse(f"co2.published:worker={worker}"), job, LAYOUT)
    with pytest.raises(OptionError, match="not all experts"):
        schedule_of(parse("co2.published:worker=node,average=leader"), JOB, LAYOUT)


def test_nodes_that_share_experts_replicate_what_is_the_same() -> None:
    """States divided in nodes of eight, experts on 16: those of other nodes have the same ones."""
    job, layout = replace(JOB, ep=16), Layout(4, 8)
    assert without_tokens("zero1:shard=node", job, layout) == {
        "reduce_scatter node": DENSE,
        "all_gather node": DENSE,
        "all_reduce peers": sum(-(-size // 8) for size in [DENSE]),
        "all_reduce replicas(16)": EXPERTS // 16,
    }
    moved = without_tokens("fsdp:shard=node", job, layout)
    assert moved["all_reduce replicas(16)"] == EXPERTS // 16
    assert "all_gather replicas(16)" not in moved


def test_tensor_parallel_ranks_with_the_same_experts_sum_up_gradients() -> None:
    """Eight of one node share layers, four divide experts: pairs have had different tokens."""
    job = replace(JOB, model=small(replace(BODY, heads=8), 8), tp=8, sequence_parallel=True)
    moved = without_tokens("ddp", job, Layout(1, 8))
    reduced = {name: n for name, n in moved.items() if "replicas" in name}
    assert reduced == {"all_reduce replicas(4)": EXPERTS // 4}


@given(st.sampled_from(tiny.VARIANTS))
def test_every_strategy_combines_with_experts_folded_or_not(strategy: str) -> None:
    """One rank stands for all; where a worker has all experts, and none leads or owns."""
    here, job = tiny.cluster(2, 4, intra=Link(1e10, 1e-7), inter=Link(1e9, 1e-6)), routed_job(4)
    local = "tau" in strategy and "worker=node" not in strategy
    if local or "leader" in strategy or "owners" in strategy:
        with pytest.raises(OptionError, match="ep=4"):
            planned(strategy, job, here.layout)
        return
    made = planned(strategy, job, here.layout)
    folded, unfolded = (
        execute(made, here, precision="bf16", rounds=2, fold=fold).grid(made)
        for fold in (True, False)
    )
    np.testing.assert_allclose(unfolded.ends - folded.ends[..., :1], 0, atol=1e-14)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([2, 4, 8, 16]))
def test_all_ranks_together_own_every_parameter_once(ep: int, ranks: int) -> None:
    """However experts are divided."""
    if ranks % ep:
        return
    share = replace(JOB, ep=ep).share
    assert ranks * share.owned(ranks) == pytest.approx(MODEL.parameters)
    assert share.owned(1) == share.parameters == DENSE + EXPERTS / ep


def test_a_share_computes_for_as_many_tokens_as_without() -> None:
    """Tokens of others come for those that leave; a busier rank gets more of them."""

    def kept(block: Block) -> float:
        return sum(op.rows * op.kept for op in block.operators)

    plain, divided = (replace(JOB, ep=ep).share.model.blocks[2] for ep in (1, 4))
    assert divided.flops == plain.flops
    assert kept(divided) == kept(plain)
    assert divided.parameters < plain.parameters
    uneven = replace(JOB, model=BUSY).share.model.blocks[2]
    routed = 2.0 * 8 * 2 * 3 * 32 * 16
    assert uneven.flops - divided.flops == pytest.approx(routed / 2)
    sent = {op.elements_sent for op in uneven.of(ExpertExchange)}
    assert sent == {math.ceil(8 * 2 * 32 * 1.5)}


@pytest.mark.parametrize(
    ("recompute", "checkpointing", "ways"),
    [
        ("none", "reentrant", "tbtb"),
        ("full", "reentrant", "tbtbtb"),
        ("full", "non_reentrant", "tbttb"),
    ],
)
def test_tokens_go_to_the_experts_and_back_in_every_pass(
    recompute: str, checkpointing: str, ways: str
) -> None:
    """Not back where a repeated pass stops before its last product; by node as they came.

    Those apart and even are all-to-alls as any others.
    """
    job = replace(JOB, ep=16, recompute=recompute, checkpointing=checkpointing)  # type: ignore[arg-type]
    flat = tiny.collectives(schedule_of(parse("ddp"), job, LAYOUT), Kind.ALL_TO_ALL)
    assert all(one.routed is None for one in flat)
    assert len(flat) == 2 * len(ways)  # two layers with experts
    assert {one.elements for one in flat} == {3 * 8 * 2 * 32}  # samples, tokens, experts, hidden
    assert {str(one.group) for one in flat} == {"experts(16)"}
    asked_for = replace(job, experts_all_to_all="hierarchical")
    moved = tiny.collectives(schedule_of(parse("ddp"), asked_for, LAYOUT), Kind.ALL_TO_ALL)
    forward = [ways[:2]] * 2
    seen = "".join("b" if one.routed and one.routed.back else "t" for one in moved)
    assert seen == "".join(forward) + ways[2:] * 2
    assert {replace(one, routed=None) for one in moved} == set(flat)
    assert all(one.routed and one.routed.by_node for one in moved)


def test_tokens_of_uneven_loads_say_so() -> None:
    """So ranks can send as unevenly as the model says."""
    job = replace(JOB, model=BUSY)
    moved = tiny.collectives(schedule_of(parse("ddp"), job, LAYOUT), Kind.ALL_TO_ALL)
    assert {one.routed and one.routed.load for one in moved} == {1.5}


def test_a_stack_says_how_tokens_travel() -> None:
    """By node a step is shorter where the network limits, and nothing changes on one node."""
    job = {"cluster": "dgx-h100", "model": "qwen3-30b-a3b", "strategy": "zero1", "gpus": 64}
    for ep, equal in ((64, False), (8, True)):
        flat, by_node = (
            simulate(**job, ep=ep, overrides={"stack.experts_all_to_all": how})  # type: ignore[arg-type]
            for how in ("flat", "hierarchical")
        )
        if equal:
            assert by_node.step_time_s == flat.step_time_s
        else:
            assert by_node.step_time_s < flat.step_time_s
            assert by_node.nic_bytes_per_node_per_step < flat.nic_bytes_per_node_per_step


def test_with_tensor_parallelism_each_gpu_sends_its_part_of_the_sequence() -> None:
    """Experts stay whole; groups of experts hold tensor-parallel GPUs one by one."""
    job = replace(JOB, tp=2, sequence_parallel=True)
    made = schedule_of(parse("zero1"), job, LAYOUT)
    sent = tiny.collectives(made, Kind.ALL_TO_ALL)
    assert {one.elements for one in sent} == {3 * 4 * 2 * 32}
    assert {str(one.group) for one in sent} == {"experts(4)"}
    assert tiny.moved(made)["reduce_scatter replicas(4)"] == EXPERTS // 4
    tensor = [one for one in tiny.collectives(made, Kind.ALL_GATHER) if one.buffer == "activations"]
    # forward: two inputs of the dense layer, one of each other, one of the head; backward: as many
    # again, and those of outputs, the embedding's too
    assert len(tensor) == 5 + 5 + 5


def test_an_answer_says_how_experts_are_divided_and_ranks_agree() -> None:
    """Folded ranks give the time that all ranks give."""
    job = {"cluster": "dgx-h100", "model": "qwen3-30b-a3b", "strategy": "fsdp", "gpus": 16, "ep": 8}
    folded, whole = (simulate(**job, fold=fold) for fold in (True, False))  # type: ignore[arg-type]
    assert folded.ep == 8
    assert folded.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)


def test_a_candidate_with_experts_is_no_faster_than_its_own_computation() -> None:
    """Nor than the closer bound, which counts what its strategy adds."""
    job = Question(
        cluster="dgx-b200", model="qwen3-30b-a3b", strategy="zero1", ep=8, stack="megatron-core"
    )
    for strategy in ("zero1", "fsdp", "zero3", "zeropp", "co2:tau=2,delay=1,worker=node"):
        bound = StepBound(replace(job, strategy=strategy, gpus=64, accumulation=1).job(), Shared())
        case = replace(job, strategy=strategy, gpus=64, micro_batch=4, accumulation=4)
        step = driver.run(case).step_time_s * (1 + 1e-9)
        assert bound.quick(4, 4, "none").seconds <= bound.close(4, 4, "none").seconds <= step


def test_what_is_kept_of_one_load_is_not_taken_for_another() -> None:
    """Schedules are kept by the parts that ranks have: a load changes these, and no whole block."""
    job = {"cluster": "dgx-h100", "model": "qwen3-30b-a3b", "strategy": "zero1", "gpus": 8, "ep": 8}
    steps = [
        simulate(**job, overrides={"model.experts.load": load}).step_time_s  # type: ignore[arg-type]
        for load in ("1", "2", "1")
    ]
    assert steps[0] == steps[2] < steps[1]


BOTH = replace(JOB, tp=2)
ROWS, SENT = 8 * 2, 3 * 32
"""Tokens for experts of a sample, and what of all samples a row of them has."""


@pytest.mark.parametrize(
    ("mesh", "group", "sent", "joined"),
    [
        ({"sequence_parallel": True}, "experts(4)", ROWS // 2, {}),
        (
            {"sequence_parallel": True, "etp": 2},
            "experts(4)/2",
            ROWS // 2,
            {"all_gather": ROWS, "reduce_scatter": ROWS},
        ),
        ({}, "experts(4)", ROWS // 2, {"all_gather": ROWS}),
        ({"etp": 2}, "experts(4)/2", ROWS, {"all_reduce": ROWS}),
    ],
)
def test_tensor_parallel_ranks_send_tokens_and_join_them(
    mesh: dict[str, int], group: str, sent: int, joined: dict[str, int]
) -> None:
    """Their own part of the sequence, or of equal tokens; who share experts work on all of them.

    There and back in both passes of two layers; what is joined is joined once in each pass.
    """
    job = replace(BOTH, **mesh)
    tokens = tiny.collectives(schedule_of(parse("ddp"), job, LAYOUT), buffer="tokens")
    exchanged = [work for work in tokens if work.kind is Kind.ALL_TO_ALL]
    assert len(exchanged) == 2 * 2 * 2
    assert {str(work.group) for work in exchanged} == {group}
    assert {work.elements for work in exchanged} == {sent * SENT}
    others = [work for work in tokens if work.kind is not Kind.ALL_TO_ALL]
    assert len(others) == 2 * 2 * len(joined)
    assert {(str(work.kind), work.elements) for work in others} == {
        (kind, rows * SENT) for kind, rows in joined.items()
    }
    assert {str(work.group) for work in others} <= {"tensor(2)"}


def test_ranks_that_share_experts_have_a_part_of_each() -> None:
    """Half of four of 16 experts: as many FLOP for twice the tokens, which they keep as sorted."""
    whole, half = (replace(BOTH, sequence_parallel=True, etp=etp).share for etp in (1, 2))
    assert (whole.expert_parameters, half.expert_parameters) == (EXPERTS // 4, EXPERTS // 8)
    assert whole.parameters - half.parameters == EXPERTS // 8
    layers = [each.model.blocks[2] for each in (whole, half)]
    assert layers[0].flops == layers[1].flops
    kept = [kept_bytes(each, each.executed[2][1]) for each in (whole, half)]
    # results of the first products and of the function are half as wide for twice the rows
    assert kept[1] - kept[0] == 3 * 2 * (ROWS - ROWS // 2) * 32
    for each in (whole, half):
        memory = parse("zero1").memory(each, Layout(2, 4))
        dense = each.parameters - each.expert_parameters
        assert memory["parameters"] == 2 * each.parameters
        assert memory["optimizer"] == 12 * (dense / 8 + EXPERTS / 16)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_gradients_of_a_part_of_an_expert_meet_those_of_the_same_part(strategy: str) -> None:
    """Eight ranks have all experts once; of 16 two have the same part of the same ones."""
    job = replace(BOTH, sequence_parallel=True, etp=2)
    moved = tiny.moved(schedule_of(parse(strategy), job, LAYOUT))
    kind = "all_reduce" if strategy == "ddp" else "reduce_scatter"
    assert moved[f"{kind} replicas(8)"] == EXPERTS // 8


def test_tokens_of_ranks_that_share_experts_cross_the_network_beside_each_other() -> None:
    """Of eight ranks that divide them on two nodes half of what each sends leaves its node.

    Two groups of four ranks on a node share its cards: 4 x 2 x 1/2 buffers, at 1 GB/s. What came is
    gathered inside the node.
    """
    here = tiny.cluster(2, 8)
    job = replace(JOB, tp=2, etp=2, ep=8, sequence_parallel=True)
    made = schedule_of(parse("ddp"), job, here.layout)
    tokens = {work.kind: work for work in tiny.collectives(made, buffer="tokens")}
    sent = cost_of(tokens[Kind.ALL_TO_ALL], here)
    assert str(tokens[Kind.ALL_TO_ALL].group) == "experts(8)/2"
    size = ROWS // 2 * SENT * 2
    assert sent.bytes_per_link(here)[1] == 4 * size
    assert sent.duration_alone(here) == pytest.approx(4 * size / tiny.GIGA)
    gathered = cost_of(tokens[Kind.ALL_GATHER], here)
    assert gathered.bytes_per_link(here)[:2] == (ROWS * SENT * 2 / 2, 0)
    for fold in (True, False):
        spans = tiny.by_op(execute(made, here, precision="bf16", rounds=1, fold=fold))
        lasts = [span.end - span.start for (_, op), span in spans.items() if "exchange" in op]
        assert sum(lasts) == pytest.approx(_exchanged(made, here))


def _exchanged(made: Schedule, here: Cluster) -> float:
    """Seconds of all exchanges of passes, one after the other."""
    works = (op.work for op in made.body if ".exchange" in op.name)
    return sum(
        cost_of(work, here).duration_alone(here) for work in works if isinstance(work, Collective)
    )


def test_a_stack_says_what_it_lacks_of_experts_with_tensor_parallelism() -> None:
    """Megatron-Core needs a divided sequence for experts, and only for these."""
    case = Question(
        cluster="dgx-h100",
        model="qwen3-30b-a3b",
        strategy="zero1",
        stack="megatron-core",
        gpus=16,
        tp=2,
        ep=4,
    )
    (lacking,) = case.job().lacks()
    assert lacking == "tp=2 with experts only with sequence_parallel"
    assert not replace(case, sequence_parallel=True, etp=2).job().lacks()
    assert not replace(case, model="llama3-8b", ep=1).job().lacks()
    eager = replace(case, stack="torchtitan", strategy="fsdp", sequence_parallel=True, etp=2)
    assert eager.job().lacks() == ("no etp with fsdp",)


@given(
    st.sampled_from(["ddp", "zero1", "zero3", "zeropp", "fsdp", "local_sgd:tau=2,worker=node"]),
    st.sampled_from([{}, {"sequence_parallel": True}]),
)
def test_ranks_that_share_experts_fold(strategy: str, mesh: dict[str, bool]) -> None:
    """One rank stands for all of two nodes of eight."""
    job = routed_job(4, tp=2, etp=2, **mesh)
    here = tiny.cluster(2, 8, intra=Link(1e10, 1e-7), inter=Link(1e9, 1e-6))
    made = planned(strategy, job, here.layout)
    folded, unfolded = (
        execute(made, here, precision="bf16", rounds=2, fold=fold).grid(made)
        for fold in (True, False)
    )
    np.testing.assert_allclose(unfolded.ends - folded.ends[..., :1], 0, atol=1e-14)
