"""Recomputation of a part of the layers, and of operators: bytes, FLOP, kernels and exchanges."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moments import passing

from co2sim.catalog import load_cluster, load_model, load_stack
from co2sim.models.operators import Attention, Model
from co2sim.models.transformer import Experts, Transformer, language_model
from co2sim.prediction.job import stage_of
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import Collective, Kernels, Kind
from co2sim.simulation.costs import compute_time
from co2sim.training.framework import OPERATORS, recomputation
from co2sim.training.memory import timeline
from co2sim.training.workload import Workload

H, A, S, B, F = 64, 4, 32, 2, 256
"""Width, heads, tokens, samples, and columns of the MLP."""


LAYERS = {"llama3-8b": 32, "qwen3-30b-a3b": 48}


def gpt(layers: int = 7, **options: Any) -> Model:
    """A GPT with GELU, unless `options` say otherwise."""
    body = Transformer(layers=layers, hidden=H, heads=A, ffn=F, **options)
    return language_model("gpt", body, vocab=96, tokens=S, tied=True)


def job(recompute: str = "none", **options: Any) -> Workload:
    """Two samples."""
    return Workload(**{"model": gpt(), "micro_batch": B, "recompute": recompute} | options)


def kept(one: Workload) -> float:
    """Bytes of a micro-batch that wait for its backward pass."""
    two, once = (passing(one, held).total for held in (2.0, 1.0))
    return float(two[0] - once[0])


def backward(one: Workload, block: int = 1) -> Kernels:
    """The kernels of a layer's backward pass."""
    found = one.share.works()[block].backward.kernels
    assert found
    return found


# --- how it is written -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "read"),
    [("full / 2", "full/2"), ("mlp+norms", "norms+mlp"), (" mlp + attention ", "attention+mlp")],
)
def test_it_is_read_in_one_way(given_: str, read: str) -> None:
    """However operators are ordered, and whatever spaces there are."""
    assert str(recomputation(given_)) == read
    case = Question(cluster="dgx-h100", model="llama3-8b", strategy="fsdp", recompute=given_)
    assert case.recompute == read
    assert recomputation(read) == recomputation(given_)


# --- a part of the layers ----------------------------------------------------------------------


@pytest.mark.parametrize(("every", "names"), [(2, "135"), (3, "25"), (7, "6")])
@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
def test_every_kth_layer_is_run_again(every: int, names: str, checkpointing: str) -> None:
    """As torchtitan counts them, from 1: those that K divides. Ends are never among them."""
    one = job(f"full/{every}", checkpointing=checkpointing)
    again = [block.name for block in one.model.blocks if one.repeats(block)]
    assert again == [f"layer{name}" for name in names]
    plain, full = (job(how, checkpointing=checkpointing) for how in ("none", "full"))
    for place, work in enumerate(one.works()):
        like = full if work.block.name in again else plain
        assert work.backward == like.works()[place].backward
        assert work.forward == plain.works()[place].forward


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_memory_of_a_part_is_that_of_kept_layers_and_inputs(every: int) -> None:
    """32 s b h for a layer that is kept, 2 s b h for one that is not: floor(7 / K) of them.

    All of them are there at the loss; a layer that runs again has no more than it would have kept.
    """
    repeated = 7 // every
    found, plain = passing(job(f"full/{every}")), passing(job())
    at_loss = found.at(found.moments.index("loss"))
    layer, ends = 32 * S * B * H + 4 * A * S * B, 4 * S * B * H
    assert at_loss["checkpoints"] == repeated * 2 * S * B * H
    assert at_loss.get("activations", 0.0) == (7 - repeated) * layer + ends
    for number in range(7):
        back = found.moments.index(f"backward of layer{number}")
        fewer = (number // every) * layer
        was, now = (each.items["activations"][back] for each in (plain, found))
        assert now == was - fewer


def test_stages_count_their_own_layers() -> None:
    """Each rank counts from 1: 7 layers in two stages of 4 and 3 give two, and one."""
    found = [stage_of(job("full/2", pp=2), number) for number in (0, 1)]
    names = [[one.name for one in part.model.blocks if part.repeats(one)] for part in found]
    assert names == [["layer1", "layer3"], ["layer5"]]


# --- what operators keep -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recompute", "eager", "flash"),
    [
        ("norms", 2 * 2 * S * B * H, 2 * 2 * S * B * H),
        ("activation", 2 * S * B * F, 2 * S * B * F),
        ("mlp", 2 * 2 * S * B * F, 2 * 2 * S * B * F),
        ("attention", 2 * A * S * S * B, 4 * A * S * B),
        (
            "norms+attention+activation",
            2 * S * B * (2 * H + F) + 2 * A * S * S * B,
            2 * S * B * (2 * H + F) + 4 * A * S * B,
        ),
    ],
)
def test_a_gpt_layer_saves_what_its_operators_keep(
    recompute: str, eager: float, flash: float
) -> None:
    """Outputs of two norms; of GELU; of GELU and what it reads; scores, or their statistics."""
    for attention, expected in (("eager", eager), ("flash", flash)):
        saved = kept(job(attention=attention)) - kept(job(recompute, attention=attention))
        assert saved == pytest.approx(7 * expected)


# --- what is done again ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operator", "flops"),
    [
        ("llama3-8b", "mlp", 2 * 3 * 4096 * 14336),
        ("llama3-8b", "attention", 4 * 4096 * 8192),
        ("qwen3-30b-a3b", "mlp", 2 * (2048 * 128 + 8 * 3 * 2048 * 768)),
    ],
)
def test_counted_flop_are_those_of_the_operators(name: str, operator: str, flops: int) -> None:
    """For every token and layer; half of the scores are above the diagonal, and count."""
    model = load_model(name).value
    plain, more = (
        Workload(model, recompute=how).hardware_flops_per_sample for how in ("none", operator)
    )
    assert more - plain == pytest.approx(LAYERS[name] * model.tokens * flops)


@pytest.mark.parametrize(
    ("recompute", "gated", "elements", "calls"),
    [
        ("norms", True, 2 * 2 * H, 2),
        ("activation", False, 2 * F, 1),
        ("norms+mlp", True, 2 * 2 * H + 2 * 3 * F, 5),
    ],
)
def test_elementwise_kernels_read_and_write_once_more(
    recompute: str,
    gated: bool,  # noqa: FBT001 - pytest's
    elements: int,
    calls: int,
) -> None:
    """By hand, in 2-byte numbers of all tokens."""
    plain, more = (backward(job(how, model=gpt(gated=gated))) for how in ("none", recompute))
    assert more.elementwise_bytes - plain.elementwise_bytes == 2 * S * B * elements
    assert more.calls - plain.calls == calls
    assert more.attention == plain.attention


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
def test_an_mlp_is_multiplied_again(checkpointing: str) -> None:
    """Both products, or the first one where the last result is not needed; no others."""
    again = job("mlp", checkpointing=checkpointing, attention="eager")
    assert (
        [one.count for one in backward(again).products]
        == [
            *[2.0] * 5,  # queries, keys and values in one, two of scores, the output, and then:
            *[3.0, 3.0 if checkpointing == "reentrant" else 2.0],
        ][1:]
    )


def test_attention_is_computed_again() -> None:
    """Eager: two products and the scores. Flash: a forward pass, which reads and writes again."""
    plain, more = (backward(job(how, attention="eager")) for how in ("none", "attention"))
    assert [one.count for one in more.products] == [2, 3, 3, 2, 2, 2]
    assert more.elementwise_bytes - plain.elementwise_bytes == 2 * 2 * A * S * S * B
    plain, more = (backward(job(how)) for how in ("none", "attention"))
    assert more.attention.flops == 4 * S * S * H * B / 2  # causal
    assert more.attention.backward == plain.attention.backward
    assert more.attention.bytes - plain.attention.bytes == 2 * 4 * S * H * B
    assert more.products == plain.products


def test_repeated_operands_are_cast_again() -> None:
    """In fp8: the inputs of both products of the MLP, read twice and written in two layouts."""
    plain, more = (backward(job(how, narrow="fp8")) for how in ("none", "mlp"))
    assert more.cast_bytes - plain.cast_bytes == S * B * (H + F) * (2 * 2 + 2)


# --- equal to what there was -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"cp": 2}, {"tp": 2}])
def test_scores_of_eager_attention_are_what_selective_repeats(options: dict[str, Any]) -> None:
    """Megatron-LM's selective recomputation is core_attn of its modules."""
    old, new = (job(how, attention="eager", **options).share for how in ("selective", "attention"))
    assert old.works() == new.works()
    assert (passing(old).total == passing(new).total).all()
    assert old.hardware_flops_per_sample == new.hardware_flops_per_sample


# --- exchanges ---------------------------------------------------------------------------------


def exchanges(one: Workload, kind: Kind) -> int:
    """Collectives of a kind beside the passes over a layer."""
    found = one.share.works()[1].backward.exchanges
    every: Iterable[Collective] = (*found.before, *found.beside, *found.behind)
    return sum(each.kind is kind for each in every)


@pytest.mark.parametrize(
    ("options", "kind", "more"),
    [
        ({"tp": 2, "checkpointing": "reentrant"}, Kind.ALL_REDUCE, {"mlp": 1}),
        ({"tp": 2}, Kind.ALL_REDUCE, {}),
        ({"tp": 2, "sequence_parallel": True}, Kind.ALL_GATHER, {"mlp": 1}),
        ({"ep": 4, "checkpointing": "reentrant"}, Kind.ALL_TO_ALL, {"mlp": 2}),
        ({"cp": 2}, Kind.ALL_GATHER, {"attention": 1}),
        ({"cp": 2, "context": "all_to_all"}, Kind.ALL_TO_ALL, {"attention": 2}),
    ],
)
def test_what_operators_exchange_they_exchange_again(
    options: dict[str, Any], kind: Kind, more: dict[str, int]
) -> None:
    """The MLP its input, its sum and its tokens; attention the keys of other ranks."""
    experts = Experts(count=4, active=2, width=32) if "ep" in options else None
    one = job(model=gpt(experts=experts), **options)
    for operator in OPERATORS:
        again = exchanges(replace(one, recompute=operator), kind)
        assert again - exchanges(one, kind) == more.get(operator, 0)


# --- less memory, more time --------------------------------------------------------------------

GPUS = [load_cluster(name).value.gpu for name in ("dgx-h100", "a100-tcp80-calibrated")]
GPUS += [load_stack("megatron-core").value.within(load_cluster("dgx-h100").value).gpu]

BODIES = st.fixed_dictionaries(
    {
        "layers": st.integers(2, 5),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([1, 16, 64]),
        "gated": st.booleans(),
        "norms": st.integers(1, 4),
        "qk_norm": st.sampled_from(["none", "head"]),
        "experts": st.sampled_from([None, Experts(count=8, active=3, width=32, shared=16)]),
    }
)
JOBS = st.fixed_dictionaries(
    {
        "model": BODIES.map(lambda body: gpt(**body)),
        "attention": st.sampled_from(["flash", "eager"]),
        "checkpointing": st.sampled_from(["reentrant", "non_reentrant"]),
        "loss": st.sampled_from(["fused", "eager"]),
        "kept": st.sampled_from([1.0, 1.65]),
        "tp": st.sampled_from([1, 1, 2]),
    }
)
SETS = [
    "+".join(some) for count in range(1, 5) for some in combinations(OPERATORS, count)
]  # every set of operators


def memory(one: Workload) -> float:
    """Bytes at the peak of its passes."""
    return float(timeline(one.share, {}).total.max())


def time(one: Workload, gpu: Any) -> float:
    """Of all passes."""
    works = one.share.works()
    return math.fsum(
        compute_time(each, gpu, "bf16") for work in works for each in (work.forward, work.backward)
    )


@given(JOBS, st.sampled_from(SETS), st.sampled_from(OPERATORS), st.sampled_from(GPUS))
def test_less_kept_is_less_memory_and_no_less_time(
    options: dict[str, Any], some: str, one: str, gpu: Any
) -> None:
    """For a further operator, and between none and full.

    With full the input of the layer that is run again counts twice, and its scores are there again;
    those of attention that is made again never count, as with selective.
    """
    if options["tp"] == 2 and options["model"].blocks[1].of(Attention)[0].keys == 1:
        options = {**options, "tp": 1}
    more = "+".join(dict.fromkeys([*some.split("+"), one]))
    full = job("full", **options)
    jobs = [job("none", **options), job(some, **options), job(more, **options), full]
    sizes, times = [memory(each) for each in jobs], [time(each, gpu) for each in jobs]
    flops = [each.share.hardware_flops_per_sample for each in jobs]
    slack = 1 + 1e-9
    sizes[-1] -= 2 * S * B * H
    if "attention" in more:
        sizes[-1] -= (2 * S if options["attention"] == "eager" else 4) * A * S * B
    for before, after in zip(range(3), range(1, 4), strict=True):
        assert sizes[after] <= sizes[before] * slack
        assert times[before] <= times[after] * slack
        assert flops[before] <= flops[after] * slack


@given(JOBS, st.integers(1, 5), st.integers(1, 3), st.sampled_from(GPUS))
def test_more_layers_again_are_less_memory_and_no_less_time(
    options: dict[str, Any], every: int, times: int, gpu: Any
) -> None:
    """Those of full/K are among those of full/(K/n).

    The input of the layer that is run again counts twice: beside the others, and in the layer.
    """
    options = {**options, "tp": 1}
    few, many = (job(f"full/{each}", **options) for each in (every * times, every))
    assert memory(many) <= (memory(few) + 2 * S * B * H) * (1 + 1e-9)
    assert time(few, gpu) <= time(many, gpu) * (1 + 1e-9)
    assert few.hardware_flops_per_sample <= many.hardware_flops_per_sample
