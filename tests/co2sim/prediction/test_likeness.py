"""How alike two runs are: the distance of evidence, and the differences that it names."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from co2sim.prediction import driver
from co2sim.prediction.evidence import nearest, published_runs
from co2sim.prediction.likeness import Traits, differences, unlikeness
from co2sim.prediction.question import Question

TEXTS = {
    "stack": ("torchtitan", "nanotron"),
    "gpu": ("H100", "A100"),
    "shares": ("states", "parameters"),
    "recompute": ("none", "full"),
    "precision": ("bf16", "fp8"),
}
WHOLE = ("parameters", "gpus", "divided", "micro_batch")
REAL = ("sequence", "batch", "watts", "memory_bandwidth")
counts = st.integers(1, 2**30)
rates = st.floats(1e-3, 1e15)
every_trait = st.builds(
    Traits,
    **{name: st.sampled_from(texts) for name, texts in TEXTS.items()},
    **dict.fromkeys(WHOLE, counts),
    **dict.fromkeys(REAL, rates),
)


@given(every_trait, every_trait)
def test_the_distance_is_symmetric_and_the_sum_of_what_is_named(
    here: Traits, there: Traits
) -> None:
    """None is below 0, and each that counts is among the differences, the largest first."""
    assert unlikeness(here, there) == pytest.approx(unlikeness(there, here))
    sizes = [difference.size for difference in differences(here, there)]
    assert math.fsum(sizes) == pytest.approx(unlikeness(here, there))
    assert sizes == sorted(sizes, reverse=True)
    assert all(size > 0 for size in sizes)


@given(every_trait, every_trait)
def test_only_equal_runs_have_no_distance(here: Traits, there: Traits) -> None:
    """Any trait that differs counts; of GPUs of two generations that alone."""
    assert unlikeness(here, here) == 0
    assert not differences(here, here)
    assume(here != there)
    assert unlikeness(here, there) > 0
    for name in (field.name for field in fields(Traits)):
        one = replace(here, **{name: getattr(there, name)})
        assert (unlikeness(here, one) > 0) == (getattr(here, name) != getattr(there, name))


@given(every_trait, st.sampled_from((*WHOLE, *REAL)), st.integers(1, 20), st.integers(1, 20))
def test_what_is_further_away_has_a_larger_distance(
    here: Traits, name: str, near: int, more: int
) -> None:
    """Of every number, up and down."""
    value = getattr(here, name)
    up = [replace(here, **{name: value * 2**power}) for power in (near, near + more)]
    assert unlikeness(here, up[0]) < unlikeness(here, up[1])
    assert unlikeness(up[1], up[0]) < unlikeness(up[1], here)


@given(every_trait, every_trait, every_trait)
def test_no_detour_is_shorter(first: Traits, second: Traits, third: Traits) -> None:
    """On GPUs of one generation."""
    second, third = replace(second, gpu=first.gpu), replace(third, gpu=first.gpu)
    around = unlikeness(first, second) + unlikeness(second, third)
    assert unlikeness(first, third) <= around * (1 + 1e-9)


def test_what_is_not_known_of_one_does_not_count() -> None:
    """Such as the power limit of a GPU."""
    run = published_runs()[0]
    assert unlikeness(run, replace(run, watts=0.0)) == 0


def test_another_power_limit_batch_or_recomputation_is_another_run() -> None:
    """H100 of 500 W with slower memory are not those of a DGX: the first line says so."""
    case = Question(
        cluster="dgx-h100",
        model="llama3-8b",
        strategy="fsdp",
        gpus=128,
        micro_batch=2,
        recompute="selective",
    )
    near, *_ = nearest(case, driver.run(case))
    assert (near.run.watts, near.run.gpus) == (500.0, 128)
    assert {difference.trait for difference in near.differences} == {"watts", "memory_bandwidth"}
    assert near.distance > 1
    same = replace(case, overrides={"gpu.tdp": "500 W", "gpu.memory_bandwidth": "2400 GB/s"})
    assert nearest(same, driver.run(same))[0].distance == pytest.approx(0, abs=1e-6)
    others = ({"micro_batch": 1}, {"recompute": "full"}, {"accumulation": 4})
    for change in others:
        changed = replace(same, **change)
        first, *_ = nearest(changed, driver.run(changed))
        assert first.distance > 0
