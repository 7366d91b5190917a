"""Context parallelism: ranks that divide sequences, and what they exchange for attention."""

from functools import partial

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate
from small_gpt import small

from co2sim.models.operators import Attention
from co2sim.models.transformer import Experts, LatentAttention, Transformer
from co2sim.prediction.job import schedule_of
from co2sim.schedule.schedule import Collective, Kind, Layout
from co2sim.strategies import parse
from co2sim.training.workload import Workload

TOKENS = 64
BODY = Transformer(
    layers=3, hidden=32, heads=8, kv_heads=4, ffn=64, gated=True, bias=False, norm="rmsnorm"
)
LATENT = LatentAttention(kv_rank=8, q_rank=8, nope=4, rope=4, value=8)
LAYOUT = Layout(2, 8)
JOB = {"cluster": "dgx-h100", "model": "llama3-8b", "strategy": "fsdp", "gpus": 16}


model = partial(small, BODY, TOKENS)


def exchanged(strategy: str, job: Workload) -> list[Collective]:
    """What ranks of a sequence exchange."""
    return tiny.collectives(schedule_of(parse(strategy), job, LAYOUT), buffer="context")


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([{}, {"windows": (16, 0)}, {"latent": LATENT}]),
    st.booleans(),
)
def test_all_ranks_of_a_sequence_together_compute_what_one_does(
    cp: int,
    changes: dict[str, object],
    routed: bool,  # noqa: FBT001
) -> None:
    """Products, scores and activations are divided; parameters are whole on each."""
    more = {"experts": Experts(count=4, active=2, width=16)} if routed else {}
    whole = model(**changes, **more)
    share = Workload(whole, cp=cp).share.model
    for part, all_ in zip(share.blocks, whole.blocks, strict=True):
        assert cp * part.flops == pytest.approx(all_.flops)
        kept, all_kept = (sum(op.rows * op.kept for op in one.operators) for one in (part, all_))
        assert cp * kept == pytest.approx(all_kept)
        assert part.parameters == all_.parameters
        assert cp * part.logits == all_.logits
        for one, other in zip(part.of(Attention), all_.of(Attention), strict=True):
            assert cp * one.flops == pytest.approx(other.flops)
            assert cp * one.statistics_bytes == other.statistics_bytes
            assert one.length == other.length


@pytest.mark.parametrize("context", ["all_gather", "ring"])
def test_keys_and_values_of_all_tokens_come_in_every_pass(context: str) -> None:
    """16 keys and values a token and layer; backward again, and their gradients go back."""
    job = Workload(model(), micro_batch=3, cp=4, context=context)  # type: ignore[arg-type]
    found = exchanged("zero1", job)
    assert {str(one.group) for one in found} == {"context(4)"}
    assert {one.elements for one in found} == {3 * TOKENS * 2 * 16}
    kinds = [one.kind for one in found]
    assert kinds.count(Kind.ALL_GATHER) == 2 * 3
    assert kinds.count(Kind.REDUCE_SCATTER) == 3


def test_all_to_alls_give_heads_for_tokens_and_back() -> None:
    """Queries, keys and values of a rank's tokens, then the output: in both passes."""
    job = Workload(model(), cp=4, context="all_to_all")
    found = exchanged("ddp", job)
    assert {one.kind for one in found} == {Kind.ALL_TO_ALL}
    own, output = TOKENS // 4 * (32 + 2 * 16), TOKENS // 4 * 32
    assert [one.elements for one in found] == [own, output] * 3 * 2


def test_a_repeated_pass_exchanges_again_and_kept_attention_does_not() -> None:
    """Full recomputation gathers keys a third time; repeated products do not need them."""
    plain, full, products = (
        len(exchanged("ddp", Workload(model(), cp=2, **options)))  # type: ignore[arg-type]
        for options in (
            {},
            {"recompute": "full"},
            {"recompute": "selective", "selective": "products"},
        )
    )
    assert (plain, full, products) == (9, 12, 9)


def test_gradients_are_reduced_over_all_ranks_and_parameters_sharded_over_them() -> None:
    """Ranks of a sequence are data-parallel ones for all but the batch."""
    divided, whole = (
        tiny.collectives(schedule_of(parse("fsdp"), Workload(model(), cp=cp), LAYOUT))
        for cp in (2, 1)
    )
    assert [work for work in divided if work.buffer != "context"] == whole


def test_a_group_of_a_sequence_trains_on_one_batch() -> None:
    """Half as many samples in a step of half the computation, and memory for half the tokens."""
    one, two = (simulate(**JOB, cp=cp, stack="megatron-core") for cp in (1, 2))  # type: ignore[arg-type]
    assert two.tokens_per_gpu_per_step == one.tokens_per_gpu_per_step / 2
    assert two.memory_bytes_per_gpu["activations"] == pytest.approx(
        one.memory_bytes_per_gpu["activations"] / 2, rel=1e-3
    )
    assert two.tokens_per_s < one.tokens_per_s
    assert (one.cp, two.cp) == (1, 2)
    batch = simulate(**JOB, cp=2, global_batch=32)  # type: ignore[arg-type]
    assert batch.accumulation == 32 // 8
