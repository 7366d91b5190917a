"""What frameworks hold besides: a claim for each habit that a stack states."""

import pytest

from co2sim.models.transformer import Transformer, language_model
from co2sim.prediction.job import layers_by_cost
from co2sim.schedule.schedule import Layout
from co2sim.strategies import parse
from co2sim.training.memory import Timeline, timeline
from co2sim.training.workload import Workload

HIDDEN, TOKENS, VOCABULARY, LAYERS, FFN = 64, 32, 1000, 3, 192
ROW = TOKENS * HIDDEN * 2
"""Bytes of the states of a sample between layers."""


def job(kv_heads: int = 4, **changes: object) -> Workload:
    """A small Llama."""
    body = Transformer(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=4,
        kv_heads=kv_heads,
        ffn=FFN,
        gated=True,
        bias=False,
        norm="rmsnorm",
    )
    model = language_model("llama", body, vocab=VOCABULARY, tokens=TOKENS, tied=False)
    return Workload(model, **changes)  # type: ignore[arg-type]


def line(work: Workload, strategy: str = "ddp", gpus: int = 1) -> Timeline:
    """What a GPU holds."""
    return timeline(work, parse(strategy).memory(work, Layout(1, gpus)))


@pytest.mark.parametrize(("kv_heads", "copies"), [(4, 3), (2, 1)])
def test_copies_are_of_the_output_and_of_joined_keys(kv_heads: int, copies: int) -> None:
    """As many keys as queries stay with these, and fewer do not; the output is copied either way.

    nanotron v0.4, models/llama.py: CausalSelfAttention.
    """
    plain, more = (
        line(job(kv_heads, keeps=keeps)).most("activations") for keeps in ((), ("copies",))
    )
    assert more - plain == pytest.approx(LAYERS * copies * ROW)


def test_compiled_layers_do_not_keep_the_result_of_their_last_product() -> None:
    """Selective recomputation saves every second product, but nobody reads the last one again."""
    eager, compiled = (
        line(
            job(recompute="selective", selective="products", compiled=compiled, loss_bytes=(2, 2))
        ).items["activations"]
        for compiled in (False, True)
    )
    kept = (eager - compiled)[LAYERS + 1]  # behind the last layer
    assert kept == pytest.approx(LAYERS * ROW)


def test_a_loss_holds_what_its_code_says() -> None:
    """That of nanotron is in place: two arrays in fp32 on the way forward."""
    logits = VOCABULARY * TOKENS
    held = line(job(loss="eager", loss_bytes=(8, 6)))
    moment = held.moments.index("loss")
    assert held.items["logits"][moment : moment + 2] == pytest.approx([8 * logits, 6 * logits])


def test_outputs_that_are_held_have_logits_and_keys() -> None:
    """use_cache is on unless Hugging Face's own checkpointing turns it off: two rows a layer."""
    held = line(job(recompute="full", keeps_outputs=True))
    logits = 4 * VOCABULARY * TOKENS
    assert held.items["outputs"][-1] == pytest.approx(logits + LAYERS * 2 * ROW)
    kept = line(job(keeps_outputs=True))  # keys are activations where nothing runs again
    assert kept.items["outputs"][-1] == pytest.approx(logits)


def test_copies_at_the_reduction_and_at_the_update_are_of_its_parameters() -> None:
    """Of all of them before they are divided, and of a share while it is updated."""
    work = job(reduce_bytes=4, update_bytes=12)
    held = line(work, "zero1", 4)
    assert held.items["reduction"][-2] == pytest.approx(4 * work.trained)
    assert held.items["update"][-1] == pytest.approx(12 * work.trained / 4)


def test_stages_by_cost_give_the_last_fewer_layers() -> None:
    """The head is 2.45 layers of nanotron's 1B: 24 layers are 7, 7, 6 and 4 on four stages.

    By get_block_compute_costs of its models/llama.py and build_model of models/base.py.
    """
    body = Transformer(
        layers=24, hidden=2048, heads=32, ffn=4096, gated=True, bias=False, norm="rmsnorm"
    )
    model = language_model("1b", body, vocab=50257, tokens=16, tied=True)
    assert layers_by_cost(Workload(model, pp=4)) == [7, 7, 6, 4]


def test_streams_do_not_share_blocks() -> None:
    """FSDP2 makes shards of gradients and gathered units on streams of their own.

    At the loss neither is there, and the allocator has the blocks of both; and that of the last
    reduction in fp32, which is of the root, and larger than the logits.
    """
    work = job(loss="fused")
    held = line(work, "fsdp", 4)
    root = 2 * VOCABULARY * HIDDEN + HIDDEN
    moment = held.moments.index("loss")
    assert held.cached[moment] == pytest.approx(work.trained + (2 + 4) * root, rel=1e-3)
    assert line(work, "ddp", 4).cached[moment] == 0


def test_logits_in_fp32_do_not_fit_into_the_block_of_those_in_16_bits() -> None:
    """At the backward pass of an eager loss the latter is free, and held."""
    held = line(job(loss="eager"))
    moment = held.moments.index("backward of the loss")
    assert held.cached[moment] == pytest.approx(2 * VOCABULARY * TOKENS)
    assert line(job(loss="fused")).cached[moment] == 0
