"""A batch in words: how large it is, and how GPUs take it, against all that could be."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim import OptionError, simulate
from co2sim.catalog import load_model
from co2sim.models.architecture import Transformer, language_model
from co2sim.prediction.choose import (
    HEADROOM,
    RECOMPUTES,
    choose_batch,
    published_batches,
    samples_of,
)
from co2sim.prediction.figures import shared_batch
from co2sim.prediction.question import Question

MODEL = language_model(
    "gpt", Transformer(layers=4, hidden=512, heads=8, ffn=2048), vocab=1000, tokens=512, tied=True
)
OPEN: dict[str, Any] = {"micro_batch": "auto", "recompute": "auto"}


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("gpt2-small", 2**19), ("llama3-8b", 2**22), ("llama3-70b", 2**22), ("llama3-405b", 2**24)],
)
def test_a_batch_is_that_of_published_trainings_of_the_size(model: str, tokens: int) -> None:
    """In samples, a power of two."""
    found = load_model(model).value
    samples, source = samples_of("auto", found)
    assert samples * found.tokens == tokens
    assert any(one.source in source for one in published_batches())


@pytest.mark.parametrize("text", ["4M-tokens", "4000k-tokens"])
def test_tokens_are_samples_to_the_nearest(text: str) -> None:
    """Of 8,192 tokens 488; 512 are near, and more micro-batches divide them."""
    case = Question(
        cluster="dgx-h100", model="llama3-8b", strategy="fsdp", gpus=16, global_batch=text
    )
    found = choose_batch(case)[0]
    assert found.global_batch == 512


jobs = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(
            ["ddp", "zero1", "zero2", "fsdp", "zero3", "co2.published(tau=2)"]
        ),
        "pp": st.sampled_from([1, 2]),
        "global_batch": st.sampled_from([16, 48, 64, 256]),
    }
)


@settings(max_examples=settings.default.max_examples // 16)  # each is some tens of cases
@given(jobs, st.sampled_from([1e8, 3e8, 1e9, 1e10]))
def test_none_that_fits_is_faster(job: dict[str, Any], memory: float) -> None:
    """Of all micro-batches that divide the samples, with and without recomputation."""
    cluster = tiny.cluster(2, 4)
    cluster = replace(cluster, gpu=replace(cluster.gpu, memory=memory))
    chosen = simulate(cluster, MODEL, **job, **OPEN)
    each = job["global_batch"] // (8 // job["pp"])
    kinds = set(RECOMPUTES) - {"selective"}  # of which the model has nothing
    every = [
        simulate(cluster, MODEL, **job, micro_batch=micro, recompute=recompute)
        for recompute, micro in product(kinds, range(1, each + 1))
        if each % micro == 0
    ]
    room = memory * (1 - HEADROOM)
    inside = [one for one in every if one.memory_bytes_per_gpu["total"] <= room]
    if inside:
        best = max(one.tokens_per_s for one in inside)
        assert chosen.memory_bytes_per_gpu["total"] <= room
        assert chosen.tokens_per_s == pytest.approx(best, rel=1e-9)
    else:
        least = min(one.memory_bytes_per_gpu["total"] for one in every)
        assert chosen.memory_bytes_per_gpu["total"] == pytest.approx(least)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        {"model": "llama3-8b", "strategy": "fsdp"},
        {"model": "llama-13b", "strategy": "zero1", "tp": 2, "pp": 4, "interleave": 2},
        {"model": "gpt2-small", "strategy": "co2.published(tau=4, worker=node)"},
    ],
    ids=str,
)
def test_none_of_a_real_model_is_faster(job: dict[str, Any]) -> None:
    """With kernels, a host that may be slower than they are, and stages."""
    job = {"cluster": "dgx-h100", "gpus": 32, "global_batch": 256, **job}
    chosen = simulate(**job, **OPEN)
    each = 256 * job.get("tp", 1) * job.get("pp", 1) // 32
    turns = job["pp"] if "interleave" in job else 1
    every = [
        simulate(**job, micro_batch=micro, recompute=recompute)
        for recompute, micro in product(RECOMPUTES, (1, 2, 4, 8, 16, 32, 64))
        if each % (micro * turns) == 0
    ]
    room = chosen.gpu_memory_bytes * (1 - HEADROOM)
    inside = [one for one in every if one.memory_bytes_per_gpu["total"] <= room]
    assert chosen.tokens_per_s == pytest.approx(max(one.tokens_per_s for one in inside), rel=1e-9)


@pytest.mark.parametrize("name", ["micro_batch", "global_batch", "recompute"])
def test_what_executes_a_schedule_needs_numbers(name: str) -> None:
    """One line says who chooses."""
    case = Question(
        cluster="dgx-h100", model="gpt2-small", strategy="ddp", gpus=8, **{name: "auto"}
    )
    with pytest.raises(OptionError, match=rf"{name}=auto is chosen by simulation"):
        case.stage()


def test_a_batch_that_nobody_asked_for_has_as_many_micro_steps_as_are_simulated() -> None:
    """A published batch has thousands of times the tokens of a tiny model's samples."""
    found = simulate(tiny.cluster(1, 2), replace(MODEL, tokens=1), "ddp", micro_batch=1)
    assert found.accumulation == 10_000
    assert any("the most that are simulated" in note for note in found.notes)


def test_numbers_are_left_as_they_are() -> None:
    """Nothing is chosen for who gives all."""
    case = Question(cluster="dgx-h100", model="llama3-8b", strategy="fsdp", gpus=8, micro_batch=2)
    assert choose_batch(case) == (case, ())


def test_a_comparison_over_sizes_says_what_its_steps_share() -> None:
    """Samples of all GPUs, tokens of one, or nothing."""
    job: dict[str, Any] = {"cluster": "dgx-h100", "model": "llama3-8b", "strategy": "fsdp"}

    def said(**options: Any) -> str:
        return shared_batch([simulate(**job, gpus=gpus, **options) for gpus in (8, 64)])

    assert said() == "512 samples x 8,192 tokens = 4,194,304 tokens per step"
    assert said(micro_batch=1, accumulation=1) == "8,192 tokens per GPU and step"
    sizes = [simulate(**job, gpus=8, micro_batch=micro, accumulation=1) for micro in (1, 2)]
    assert "different" in shared_batch(sizes)
