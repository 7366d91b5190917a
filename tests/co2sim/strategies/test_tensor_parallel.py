"""Tensor parallelism over several nodes, and on more ranks than there are heads of keys."""

from dataclasses import replace

import pytest
import tiny
from small_gpt import BODY, VOCAB, planned, small

from co2sim.catalog import load_model
from co2sim.models.operators import Attention, Product, shard_model
from co2sim.models.transformer import language_model
from co2sim.prediction.question import Question
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.schedule import Compute, Kind, Layout, tensor
from co2sim.simulation.costs import traffic
from co2sim.simulation.run import execute
from co2sim.strategies import parse
from co2sim.training.memory import kept_bytes
from co2sim.training.workload import Workload

TOKENS, HIDDEN = 32, 64
NODES = tiny.cluster(nodes=2, gpus_per_node=2)
"""1 GB/s between nodes and 10 inside, no latency; rings."""
WHOLE = Workload(language_model("gpt", BODY, vocab=VOCAB, tokens=TOKENS, tied=False), tp=4)
KEYS = replace(BODY, kv_heads=2, bias="qkv", dropout=False)
"""Eight heads of queries, two of keys and values; a head has eight columns."""
SUMS = 2 * 2 + 2 * 2 + 1 + 1
"""All-reduces there and back: two of each of two layers, one of the embedding and of the head."""


def test_exchanges_of_ranks_on_two_nodes_cross_the_network() -> None:
    """A ring of four sends 1.5 times a buffer through the cards of a node.

    Buffers are rows x hidden in bf16, and three numbers of a row in fp32 of the loss.
    """
    made = planned("ddp", WHOLE, NODES.layout)
    sent = 1.5 * (SUMS * TOKENS * HIDDEN * 2 + 3 * TOKENS * 4)
    assert traffic(made, NODES).nic == sent
    assert {str(work.group) for work in tiny.collectives(made)} == {"tensor(4)"}


def test_a_step_on_two_nodes_waits_for_the_network() -> None:
    """As long as it computes, and as the bytes of its exchanges need at 1 GB/s."""
    made = planned("ddp", WHOLE, NODES.layout)
    share = WHOLE.share
    works = [op.work for op in made.body if isinstance(op.work, Compute)]
    computing = sum(max(work.flops, work.memory_bytes) / 1e12 for work in works)
    sent = 1.5 * (SUMS * TOKENS * HIDDEN * 2 + 3 * TOKENS * 4) / tiny.GIGA
    assert share.parameters < WHOLE.parameters
    for fold in (True, False):
        trace = execute(made, NODES, precision="bf16", rounds=1, fold=fold)
        assert tiny.makespan(trace) == pytest.approx(computing + sent, rel=1e-9)


def test_data_parallel_ranks_of_groups_on_two_nodes_meet_across_nodes() -> None:
    """Two groups of two nodes each: what a rank reduces, it reduces with its own place.

    All ranks of a node do so at once through its cards: of two rings of two, each sends its buffer
    once.
    """
    nodes = tiny.cluster(nodes=4, gpus_per_node=2)
    made = planned("zero1", WHOLE, nodes.layout)
    (reduced,) = tiny.collectives(made, Kind.REDUCE_SCATTER)
    assert str(reduced.group) == "world/4"
    assert list(reduced.group.members(3, nodes.layout)) == [3, 7]
    gradients = WHOLE.share.parameters * 2
    exchanged = traffic(planned("ddp", WHOLE, NODES.layout), NODES).nic
    # there and back: half of the gradients and of the parameters, of two GPUs of a node
    assert traffic(made, nodes).nic == exchanged + 2 * 2 * gradients / 2


def test_a_rank_has_a_whole_head_of_keys() -> None:
    """Eight ranks of two heads: one of eight heads of queries, and a copy of a quarter's keys."""
    model = small(KEYS, TOKENS)
    part = shard_model(model, Mesh(tp=8))
    layer, head = part.blocks[1], HIDDEN // 8
    product = layer.of(Product)[0]
    (attention,) = layer.of(Attention)
    assert product.widths == (head, head, head)
    assert product.tensors == (HIDDEN * head,) * 3
    assert product.kept == 3 * head
    assert (attention.heads, attention.keys) == (1, 1)
    # beside the copies: matrices, and biases of queries, keys and values
    copies = 2 * 2 * (8 - 2) * (HIDDEN + 1) * head
    even = shard_model(model, Mesh(tp=2))
    divided = {"layer0", "layer1"}
    for whole, half, eighth in zip(model.blocks, even.blocks, part.blocks, strict=True):
        if whole.name in divided:
            alone = 2 * half.parameters - whole.parameters  # norms
            assert 8 * (eighth.parameters - alone) == whole.parameters - alone + copies / 2


def test_what_is_kept_of_keys_that_ranks_copy() -> None:
    """A layer of eight ranks keeps three columns of heads a row where an even part has 1.5."""
    job = Workload(small(KEYS, TOKENS), tp=8, micro_batch=3)
    even = replace(job, model=small(replace(KEYS, kv_heads=8), TOKENS))
    kept, same = (kept_bytes(each, each.share.executed[1][1]) for each in (job, even))
    assert kept == same
    head, h, f = HIDDEN // 8, HIDDEN, 4 * HIDDEN
    # two norms with input and output, queries, keys, values, output of attention, columns of the
    # MLP before and behind the function; in bf16. And the statistics of a head in fp32
    elements = 4 * h + 3 * head + head + 2 * f // 8
    assert kept == 3 * TOKENS * (2 * elements + 4)


def test_gradients_of_copies_are_summed_up_by_those_that_have_them() -> None:
    """Four ranks for each head: matrices and biases of a head of keys and of one of values."""
    job = Workload(small(KEYS, TOKENS), tp=8, accumulation=2)
    made = planned("ddp", job, Layout(1, 8))
    sums = tiny.collectives(made, Kind.ALL_REDUCE, "keys")
    assert len(sums) == 2 * 2  # layers, micro-steps
    assert {one.elements for one in sums} == {2 * (HIDDEN + 1) * HIDDEN // 8}
    assert {one.group for one in sums} == {tensor(4)}
    assert not tiny.collectives(planned("ddp", replace(job, tp=2), Layout(1, 8)), buffer="keys")


def test_of_frozen_keys_adapters_are_summed_up() -> None:
    """The matrix of an adapter that meets a head of keys: rank x columns, of keys and of values."""
    job = Workload(small(replace(KEYS, bias=False), TOKENS), tp=8, lora=4)
    sums = tiny.collectives(planned("ddp", job, Layout(1, 8)), Kind.ALL_REDUCE, "keys")
    assert {one.elements for one in sums} == {2 * 4 * HIDDEN // 8}


def test_states_of_copies_are_kept_on_every_rank() -> None:
    """Llama 3 70B on two nodes: parameters in bf16, and 12 bytes for each of AdamW."""
    model = load_model("llama3-70b").value
    job = Workload(model, tp=16, sequence_parallel=True)
    h, f, vocab, layers, head = 8192, 28672, 128256, 80, 128
    keys = 2 * h * head  # one of eight heads, for two ranks
    layer = 2 * h * h // 16 + keys + 3 * h * f // 16 + 2 * h
    mine = layers * layer + 2 * vocab // 16 * h + h
    assert job.share.parameters == mine
    states = parse("ddp").memory(job.share, Layout(8, 1))
    assert (states["parameters"], states["optimizer"]) == (2.0 * mine, 12.0 * mine)


def test_queries_keys_and_values_are_gathered_in_place_of_copies() -> None:
    """Eight ranks have an eighth of each matrix; all get the columns of all heads, and keep theirs.

    Gradients of 8 + 2 + 2 heads are reduce-scattered, in each of two layers and micro-steps.
    """
    job = Workload(small(KEYS, TOKENS), tp=8, gathers_keys=True, accumulation=2)
    head = HIDDEN // 8
    product = job.share.model.blocks[1].of(Product)[0]
    assert product.tensors == (HIDDEN * head, HIDDEN * head // 4, HIDDEN * head // 4)
    copies = replace(job, gathers_keys=False)
    kept, same = (kept_bytes(each, each.share.executed[1][1]) for each in (job, copies))
    assert kept == same
    made = planned("ddp", job, Layout(1, 8))
    keys = tiny.collectives(made, buffer="keys")
    assert {work.elements for work in keys} == {TOKENS * (8 + 2 + 2) * head}
    assert {str(work.group) for work in keys} == {"tensor(8)"}
    kinds = [work.kind for work in keys]
    assert kinds.count(Kind.ALL_GATHER) == kinds.count(Kind.REDUCE_SCATTER) == 2 * 2
    again = replace(job, recompute="full", checkpointing="reentrant")
    kinds = [
        work.kind for work in tiny.collectives(planned("ddp", again, Layout(1, 8)), buffer="keys")
    ]
    assert kinds.count(Kind.ALL_GATHER) == 2 * kinds.count(Kind.REDUCE_SCATTER)


def test_a_stack_has_copies_of_keys_or_gathers_them() -> None:
    """Megatron-Core gathers; torchtitan has neither, and lacks nothing with as many heads."""
    case = Question(
        cluster="dgx-h100", model="llama3-70b", strategy="zero1", gpus=16, tp=16,
        sequence_parallel=True, stack="megatron-core",
    )  # fmt: skip
    assert not case.job().lacks()
    assert case.job().workload.gathers_keys
    other = replace(case, stack="torchtitan", strategy="fsdp")
    assert other.job().lacks() == ("no copies of keys (tp=16, 8 heads of keys)",)
    assert not replace(other, tp=8).job().lacks()
