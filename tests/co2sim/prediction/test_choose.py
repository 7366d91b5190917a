"""What is open is chosen: a batch in words, against all that could be; tau and delay."""

from dataclasses import replace
from itertools import product
from typing import Any

import one_sample
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim import OptionError, simulate
from co2sim.catalog import DEFAULT_STACK, load_model, load_stack
from co2sim.hardware.cluster import Cluster, Link
from co2sim.models.transformer import Transformer, language_model
from co2sim.prediction.choose import (
    HEADROOM,
    RECOMPUTES,
    choose_batch,
    published_batches,
    samples_of,
)
from co2sim.prediction.driver import make_case as case_of
from co2sim.prediction.driver import trace
from co2sim.prediction.figures import shared_batch
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.strategies.co2 import CO2

MODEL = language_model(
    "gpt", Transformer(layers=4, hidden=512, heads=8, ffn=2048), vocab=1000, tokens=512, tied=True
)
STACK = load_stack(DEFAULT_STACK).value
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


@pytest.mark.parametrize("strategy", ["diloco(tau=100, delay=2)", "co2(tau=100, delay=100)"])
def test_a_batch_is_chosen_beside_any_delay(strategy: str) -> None:
    """The shortest round of a strategy may have to be longer than its delay."""
    job = {"cluster": "dgx-h100", "model": "gpt2-small", "gpus": 16, "global_batch": 64}
    assert simulate(**job, strategy=strategy, **OPEN).micro_batch >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        {"model": "llama3-8b", "strategy": "fsdp"},
        {"model": "llama-13b", "strategy": "zero1", "tp": 2, "pp": 4, "interleave": 2},
        {"model": "llama-13b", "strategy": "zero1", "tp": 2, "pp": 4, "schedule": "zbv"},
        {"model": "gpt2-small", "strategy": "co2.published(tau=4, worker=node)"},
    ],
    ids=str,
)
def test_none_of_a_real_model_is_faster(job: dict[str, Any]) -> None:
    """Of what the stack can run: with kernels, a host that may be slower, and stages."""
    job = {"cluster": "dgx-h100", "gpus": 32, "global_batch": 256, **job}
    chosen = simulate(**job, **OPEN)
    each = 256 * job.get("tp", 1) * job.get("pp", 1) // 32
    turns = job["pp"] if "interleave" in job else 1
    every = [
        simulate(**job, micro_batch=micro, recompute=recompute)
        for recompute, micro in product(RECOMPUTES, (1, 2, 4, 8, 16, 32, 64))
        if each % (micro * turns) == 0 and STACK.recomputes_by(recompute)
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


# --- tau and delay ----------------------------------------------------------------------------


KERNELS = 2000 * (4 * 4 + 2) / 1e12 + 2000 * (4 * 8 + 2) / 1e12
"""Seconds of a round of the tiny model that fill the displacement, and use its average."""


def slow(steps: float) -> Cluster:
    """Four nodes of one GPU whose average of 2000 fp32 numbers takes as long as `steps` steps."""
    return tiny.cluster(4, 1, inter=Link(2 * 3 / 4 * 8000 / (steps * tiny.local_step())))


def exposed(tau: int, delay: int, steps: float) -> float:
    """The fraction of a round that an average exposes, by the steps that it takes."""
    step = tiny.local_step()
    late = max(0.0, steps - delay) * step
    return late / (tau * step + KERNELS + late)


def chosen(strategy: str, cluster: Cluster, **options: Any) -> Result:
    """The result of the tiny model."""
    return one_sample.simulate(cluster, tiny.model(), strategy, **options)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.02, 8.0))
def test_the_exposed_time_of_a_delay_is_what_its_steps_do_not_cover(
    tau: int, delay: int, steps: float
) -> None:
    """Of an average as long as `steps` local steps, max(0, steps - delay) are exposed per round.

    So with delay=tau it is hidden exactly when it takes less than the local steps of a round.
    """
    delay = min(delay, tau)
    result = chosen(f"co2(tau={tau},delay={delay})", slow(steps))
    late = max(0.0, steps - delay) * tiny.local_step()
    assert result.exposed_comm_s == pytest.approx(late, rel=1e-9, abs=1e-15)
    whole = tau * tiny.local_step() + KERNELS + late
    assert result.round_time_s == pytest.approx(whole, rel=1e-9)


@given(st.integers(1, 8), st.floats(0.02, 8.0))
def test_the_delay_chosen_is_the_least_that_leaves_a_hundredth_exposed(
    tau: int, steps: float
) -> None:
    """As a search through all delays with the closed form says; the whole round if none does."""
    hidden = (delay for delay in range(1, tau + 1) if exposed(tau, delay, steps) <= 0.01)
    expected = next(hidden, tau)
    found = chosen(f"co2(tau={tau},delay=auto,fragments=1)", slow(steps))
    assert found.strategy == f"co2(tau={tau}, delay={expected})"
    (note,) = found.notes
    assert f"{found.exposed_share:.1%}" in note
    if expected > 1:
        assert f"{exposed(tau, expected - 1, steps):.1%}" in note
    assert ("no delay" in note) == (exposed(tau, tau, steps) > 0.01)


@given(st.floats(0.02, 7.0), st.integers(1, 10))
def test_the_round_chosen_is_the_shortest_that_hides_its_average(steps: float, delay: int) -> None:
    """By the closed form, with the average used at the end of a round; a given delay is kept."""
    hidden = (tau for tau in range(1, 400) if exposed(tau, tau, steps) <= 0.01)
    shortest = next(hidden)
    found = chosen("co2(tau=auto,delay=auto,fragments=1)", slow(steps))
    assert found.steps_per_round == shortest
    assert found.exposed_share <= 0.01
    kept = chosen(f"co2(tau=auto,delay={delay})", slow(steps))
    assert kept.strategy == f"co2(tau={max(shortest, delay)}, delay={delay})"


def test_the_figures_are_those_of_the_number_chosen() -> None:
    """Nothing but the note tells a choice from the same number given; a trace has it, too."""
    found, other = (
        chosen(f"co2(tau=6,delay={delay})", slow(3.0)) for delay in ("auto,fragments=1", 3)
    )
    assert found.notes
    assert replace(found, notes=()) == other
    assert Result.from_dict(found.to_dict()) == found
    strategy = CO2(tau=6, delay="auto", fragments=1)
    case = case_of(slow(3.0), tiny.model(), strategy, micro_batch=1, accumulation=1)
    assert trace(case)[0].name == "co2(tau=6, delay=3)"


# --- fragments, and what is predicted ----------------------------------------------------------


@given(st.integers(2, 6), st.floats(0.02, 1.0))
def test_one_fragment_for_each_step_needs_a_delay_of_one(tau: int, busy: float) -> None:
    """By default: a network busy for a share of the round has each fragment there in one step."""
    found = chosen(f"co2(tau={tau},delay=auto)", slow(0.98 * busy * tau))
    assert found.strategy == f"co2(tau={tau}, delay=1, fragments={tau})"
    whole = chosen(f"co2(tau={tau},delay=auto,fragments=1)", slow(0.98 * busy * tau))
    assert found.exposed_share <= max(0.01, whole.exposed_share)


def test_what_is_predicted_is_bounded_where_the_delay_is_chosen() -> None:
    """It is kept where it dies out; averages that take the whole round would repeat it for ever."""
    short = chosen("co2(tau=12,delay=auto,fragments=1,keep=0.25,predict=1)", slow(3))
    assert "predict=1.0" in short.strategy
    long = chosen("co2(tau=4,delay=auto,fragments=1,keep=0.25,predict=1)", slow(20))
    assert long.strategy == "co2(tau=4, delay=4, keep=0.25, predict=0.75)"
    assert any("0.75" in note for note in long.notes)


@pytest.mark.parametrize("name", ["node_spread", "interference"])
def test_what_no_longer_round_could_hide_makes_no_round_longer(name: str) -> None:
    """Slower nodes take as much of every round, and an average takes the same from its computing.

    So training, which compares the times of an average and of a step, finds the same tau.
    """
    taus = []
    for value in (0.0, 0.3):
        cluster = replace(slow(3.0), **{name: value})
        taus.append(chosen("co2(tau=auto,delay=2)", cluster).strategy)
    assert taus[0] == taus[1] == "co2(tau=3, delay=2)"
