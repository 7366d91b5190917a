"""What ranks that share layers hold, do and exchange, in every strategy; and where tokens go."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from moments import most, passing
from small_gpt import BODY, TOKENS, VOCAB, job, planned

from co2sim.hardware.cluster import Cluster, Link
from co2sim.models.transformer import Transformer, language_model
from co2sim.schedule import schedule as sched
from co2sim.schedule.schedule import WORLD, Group, Kind, Layout, tensor
from co2sim.schedule.token_routing import TokenRouting, most_load
from co2sim.simulation.costs import costs_of, traffic
from co2sim.simulation.run import execute
from co2sim.training.memory import STATES, kept_bytes
from co2sim.training.workload import Workload

DIVISIONS = [(2, False), (4, False), (2, True), (4, True)]
"""Ranks that share layers, and whether they divide the sequence."""

GROUPS = [WORLD, sched.NODE, sched.PEERS, sched.LEADERS, sched.SITE, sched.SITE_PEERS]
GROUPS += [sched.block(2), sched.peers_of_blocks(2)]


def cluster(nodes: int = 2, gpus: int = 4, **changes: object) -> Cluster:
    """A tiny cluster with latencies."""
    links = {"intra": Link(1e10, 1e-7), "inter": Link(1e9, 1e-6)}
    return tiny.cluster(nodes, gpus, **links | changes)


@given(
    st.sampled_from(GROUPS),
    st.sampled_from([(1, 4, 1), (2, 4, 1), (3, 8, 1), (4, 4, 2), (4, 8, 2)]),
    st.sampled_from([1, 2, 4]),
)
def test_ranks_meet_those_with_their_own_place_in_other_tensor_parallel_groups(
    group: Group, shape: tuple[int, int, int], stride: int
) -> None:
    """A group with a stride is the group itself where each of its ranks stands for `stride`."""
    layout = Layout(*shape)
    inner = Layout(layout.nodes, layout.gpus_per_node // stride, layout.sites)
    if group.ranks and inner.world_size % group.ranks:
        return
    wide = replace(group, stride=stride)
    for rank in range(layout.world_size):
        found, alike = wide.members(rank, layout), group.members(rank // stride, inner)
        assert [member // stride for member in found] == list(alike)
        assert {member % stride for member in found} == {rank % stride}
        assert rank in found
    together = [set(tensor(stride).members(rank, layout)) for rank in range(layout.world_size)]
    assert all(len({member // stride for member in one}) == 1 for one in together)


@given(st.sampled_from(tiny.VARIANTS), st.sampled_from([(4, False), (2, True), (8, True)]))
def test_every_strategy_combines_with_it_folded_or_not(
    strategy: str, division: tuple[int, bool]
) -> None:
    """One rank stands for all: the trace is that of all ranks, each simulated on its own.

    Of eight that share layers on two nodes, too.
    """
    tp, sequence = division
    here = cluster(4 if tp > 4 else 2, 4)
    schedule = planned(strategy, job(tp, sequence=sequence), here.layout)
    folded, unfolded = (
        execute(schedule, here, precision="bf16", rounds=1, fold=fold).grid(schedule)
        for fold in (True, False)
    )
    # who wait for the leaders start earlier
    alike = [
        rank for rank in range(here.layout.world_size) if "leader" not in strategy or rank % 4 < tp
    ]
    one = folded.ends if len(alike) == folded.ends.shape[-1] else folded.ends[..., :1]
    np.testing.assert_allclose(unfolded.ends[..., alike] - one, 0, atol=1e-14)


@pytest.mark.parametrize(
    "strategy", ["ddp", "zeropp", "co2.published(tau=2,worker=node,inner=fsdp)"]
)
@pytest.mark.parametrize(("tp", "sequence"), DIVISIONS)
def test_each_pass_exchanges_what_megatron_does(strategy: str, tp: int, sequence: bool) -> None:  # noqa: FBT001 - pytest's
    """Forward: the embedding and two sums a layer; backward: two sums a layer and the head's.

    Along the sequence each of them is a reduce-scatter and an all-gather, and the inputs of
    products are gathered once more for the gradients of weights.
    """
    schedule = planned(strategy, job(tp, sequence=sequence), Layout(2, 4))
    sums = schedule.steps * (2 * 2 * BODY.layers + 2)
    inputs = schedule.steps * (2 * BODY.layers + 1)
    counts = {
        Kind.ALL_REDUCE: 0 if sequence else sums,
        Kind.REDUCE_SCATTER: sums if sequence else 0,
        Kind.ALL_GATHER: sums + inputs if sequence else 0,
    }
    for kind, count in counts.items():
        found = tiny.collectives(schedule, kind, "activations")
        assert [(w.elements, w.group) for w in found] == [
            (TOKENS * BODY.hidden, tensor(tp))
        ] * count
    loss = tiny.collectives(schedule, Kind.ALL_REDUCE, "loss")
    assert [work.elements for work in loss] == [TOKENS] * 3 * schedule.steps


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_on_links_are_those_of_the_closed_form(tp: int) -> None:
    """2 (t-1)/t of b s h elements for each sum, on the GPU's link, and nothing leaves the node."""
    here, micro = cluster(2, 4), 3
    whole = planned("local_sgd(tau=1)", job(micro_batch=micro), here.layout)
    schedule = planned("local_sgd(tau=1)", job(tp, micro_batch=micro), here.layout)
    costs = [
        cost
        for number in schedule.work_numbers
        if (cost := costs_of(schedule, here)[number]) is not None
        and schedule.works[number].group == tensor(tp)  # type: ignore[union-attr]
    ]
    sums, ring = 4 * BODY.layers + 2, 2 * (tp - 1) / tp
    expected = ring * (sums * 2 * micro * TOKENS * BODY.hidden + 3 * 4 * micro * TOKENS)
    assert sum(cost.intra for cost in costs) == pytest.approx(expected)
    assert {cost.inter for cost in costs} == {0.0}
    # the average: one group of every place sends its part, all parts together the whole model
    held = job(tp).share.parameters
    groups = 8 // tp
    assert traffic(schedule, here).nic == pytest.approx(tp * 2 * (groups - 1) / groups * 4 * held)
    assert traffic(whole, here).nic == pytest.approx(2 * 7 / 8 * 4 * job().parameters)


@pytest.mark.parametrize(("tp", "sequence"), DIVISIONS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_together_do_the_flop_of_the_model(tp: int, sequence: bool, recompute: str) -> None:  # noqa: FBT001 - pytest's
    """Of matrix products and attention; the vocabulary is filled up to equal parts."""
    one = job(recompute=recompute)
    part = job(tp, sequence=sequence, recompute=recompute).share
    for whole, divided in zip(one.works(), part.works(), strict=True):
        for name in ("forward", "backward"):
            did, does = getattr(whole, name).flops, getattr(divided, name).flops
            assert tp * does == pytest.approx(did, rel=1e-12), (whole.block.name, name)


@given(
    *(st.sampled_from(values) for values in ([1, 2, 4, 8], [False, True], [16, 48], [1, 3])),
    st.booleans(),
)
def test_activations_are_those_of_korthikanti(
    tp: int,
    sequence: bool,  # noqa: FBT001
    tokens: int,
    micro: int,
    eager: bool,  # noqa: FBT001 - pytest's
) -> None:
    """A layer keeps s b h (10 + 24/t + 5 a s / (h t)); sequence: s b h (34 + 5 a s / h) / t.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, equations 2 and 4. Without the scores that is
    the table's row of selective recomputation, s b h (10 + 24/t) and 34 s b h / t.
    """
    model = language_model("gpt", BODY, vocab=VOCAB, tokens=tokens, tied=True)
    sequence = sequence and tp > 1
    work = Workload(
        model,
        micro_batch=micro,
        attention="eager" if eager else "flash",
        recompute="none",
        tp=tp,
        sequence_parallel=sequence,
    )
    s, b, h, a = tokens, micro, BODY.hidden, BODY.heads
    scores = 5 * a * s / h if eager else 4 * a / h  # flash keeps 4 bytes for every row instead
    around = 34 / tp if sequence else 10 + 24 / tp
    found = kept_bytes(work.share, work.share.executed[1][1])
    assert found == pytest.approx(s * b * h * (around + scores / tp))


@pytest.mark.parametrize("tp", [2, 4])
def test_parameters_are_divided_but_for_norms_positions_and_biases_of_outputs(tp: int) -> None:
    """Norms and biases of outputs of a layer, the last norm, and the positions stay whole."""
    h = BODY.hidden
    whole = BODY.layers * (2 * 2 * h + 2 * h) + 2 * h + TOKENS * h
    share = job(tp).share.parameters
    assert share == whole + (job().parameters - whole) // tp
    held = most(job(tp), "ddp", Layout(2, 4 // tp))
    assert sum(held[name] for name in STATES) == 16 * share


@pytest.mark.parametrize(
    ("hidden", "heads", "published"),
    [(6144, 64, (66.84, 49.42, 16.18, 7.64)), (25600, 160, (58.31, 62.04, 20.27, 9.42))],
    ids=["22B", "1T"],
)
def test_activations_of_published_models_are_those_that_were_measured(
    hidden: int, heads: int, published: tuple[float, ...]
) -> None:
    """Per cent of those without recomputation and along the sequence not divided, on 8 GPUs.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, figure 7, as quoted in the validation of
    Calculon (calculon/llm/validation.py); shapes from its models.
    """
    body = Transformer(layers=1, hidden=hidden, heads=heads, ffn=4 * hidden, dropout=True)
    model = language_model("gpt", body, vocab=8, tokens=2048, tied=True)

    def layer(recompute: str, along: bool) -> float:  # noqa: FBT001 - below
        options: dict[str, Any] = {"recompute": recompute, "sequence_parallel": along}
        work = Workload(model, attention="eager", tp=8, **options).share
        if recompute == "full":
            return passing(work).most("checkpoints")
        return kept_bytes(work, work.executed[1][1])

    ways = (("none", True), ("selective", False), ("selective", True), ("full", False))
    kept = [100 * layer(*way) / layer("none", along=False) for way in ways]
    assert kept == pytest.approx(published, abs=0.15)


# --- where tokens go --------------------------------------------------------------------------


V3 = TokenRouting(8, 256, 7168, groups=8, active_groups=4)
"""DeepSeek-V3: 8 of 256 experts, from 4 of 8 groups."""


def choices(routing: TokenRouting) -> Iterator[tuple[int, ...]]:
    """All that a router may choose, each equally often."""
    size = routing.count // routing.groups
    for groups in combinations(range(routing.groups), routing.active_groups):
        allowed = chain.from_iterable(range(g * size, (g + 1) * size) for g in groups)
        yield from combinations(allowed, routing.active)


SMALL = [
    (TokenRouting(2, 6, 1), (1, 2, 3, 6)),
    (TokenRouting(3, 8, 1), (1, 2, 4, 8)),
    (TokenRouting(2, 8, 1, 4, 2), (1, 2, 4, 8)),
    (TokenRouting(3, 8, 1, 2, 1), (2, 4, 8)),
    (TokenRouting(2, 12, 1, 3, 2), (2, 3, 4, 6)),
    (TokenRouting(4, 12, 1, 4, 3), (2, 3, 4, 6)),
]


@pytest.mark.parametrize(("routing", "nodes"), SMALL)
def test_expected_nodes_are_the_mean_over_all_choices(
    routing: TokenRouting, nodes: tuple[int, ...]
) -> None:
    """Groups may be parts of nodes, several of a node, or lie across the border of two."""
    for many in nodes:
        each = routing.count // many
        met = [len({expert // each for expert in chosen}) for chosen in choices(routing)]
        assert routing.nodes(many) == pytest.approx(sum(met) / len(met))


def test_tokens_of_deepseek_v3_meet_at_most_four_of_eight_nodes() -> None:
    """A group is a node: 4 (1 - C(96, 8) / C(128, 8)) of them, and of 20,000 draws as many."""
    assert V3.nodes(8) == pytest.approx(4 * (1 - math.comb(96, 8) / math.comb(128, 8)))
    draw, met = random.Random(1), 0  # noqa: S311 - to count
    for _ in range(20_000):
        groups = draw.sample(range(8), 4)
        allowed = [32 * group + place for group in groups for place in range(32)]
        met += len({expert // 32 for expert in draw.sample(allowed, 8)})
    assert V3.nodes(8) == pytest.approx(met / 20_000, abs=0.02)  # four standard errors


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_expected_nodes_are_within_bounds(
    active: int, groups: int, chosen: int, nodes: int
) -> None:
    """At least one, at most as many as there are, or as experts; groups make them fewer."""
    chosen = min(chosen, groups)
    count = groups * 12
    found = TokenRouting(active, count, 1, groups, chosen).nodes(nodes)
    assert found <= min(nodes, active) * (1 + 1e-9)
    if count % nodes == 0:
        assert found >= 1 - 1e-9
        assert found <= TokenRouting(active, count, 1).nodes(nodes) * (1 + 1e-9)


def test_one_rank_gets_all_tokens_at_most() -> None:
    """Of 2 experts in 8 on 4 ranks: each of a token's two, from all 4 ranks."""
    assert most_load(2, 8, 4) == 4
    assert most_load(8, 256, 64) == 32  # each token half of its eight, on four experts
    assert most_load(8, 256, 1) == 1
