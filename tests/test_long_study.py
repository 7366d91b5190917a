"""The plan of the long study: which runs it wants, at which learning rates."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from convergence_plan import (  # type: ignore[import-not-found]
    RUNS,
    SEEDS,
    TUNING_SEED,
    Ask,
    missing,
)
from reports import Known, read  # type: ignore[import-not-found]
from long_study_plan import (  # type: ignore[import-not-found]
    COMPARED,
    LINES,
    RATES,
    LongStudy,
)

BASE = read(Path(__file__).parent.parent / "benchmarks/results" / RUNS)
STUDY = LongStudy.usual()


def finished(better: float) -> tuple[list[Ask], Known]:
    """All runs in their order, if the loss at 3,072 steps is least at this rate."""
    known, asked = dict(BASE), []
    while asks := missing(STUDY.asks, known):
        asked.append(asks[0])
        known[asks[0].key] = {"validation_loss": abs(asks[0].lr - better)}
        assert len(asked) < 100
    return asked, known


@pytest.mark.parametrize("better", RATES)
def test_the_rate_is_chosen_at_3072_steps_and_the_lower_one_in_longer_runs(better: float) -> None:
    """With the tuning seed; runs that count have other seeds."""
    asked, known = finished(better)
    for steps in STUDY.lengths:
        for name in COMPARED:
            rates = {ask.lr for ask in STUDY.counted(steps, name, known)}
            assert steps != 3072 or rates == {better}
            assert steps <= 3072 or rates == {min(RATES)}
    tuned = [ask for ask in asked if ask.seed == TUNING_SEED]
    assert {ask.budget.steps for ask in tuned} == {3072}
    assert sorted({ask.lr for ask in tuned}) == sorted(RATES)
    assert len(tuned) == len(RATES) * len(COMPARED)
    assert STUDY.tuned(known) == len(COMPARED)


def test_before_the_rate_is_chosen_runs_of_the_lower_one_count() -> None:
    """Of a study that was cut short the first runs of 3,072 steps are told."""
    known = dict(BASE)
    first = [ask for ask in missing(STUDY.asks, known) if ask.budget.steps == 3072]
    for ask in first[: len(LINES)]:
        known[ask.key] = {"validation_loss": 2.0}
    assert STUDY.tuned(known) == 0
    for name in LINES:
        (counted,) = STUDY.counted(3072, name, known)
        assert (counted.seed, counted.lr) == (0, min(RATES))


def test_runs_of_768_steps_are_those_of_the_convergence_study() -> None:
    """None of them is run again; what a method keeps is the best of there, at every length."""
    asked, known = finished(RATES[0])
    assert 768 not in {ask.budget.steps for ask in asked}
    for name in COMPARED:
        counted = STUDY.counted(768, name, known)
        (choice,) = {ask.choice for ask in counted}
        assert [ask.seed for ask in counted] == list(SEEDS)
        assert {ask.choice for ask in asked if ask.configuration.name == name} == {choice}


def test_runs_differ_in_length_only() -> None:
    """Model, batch and warm-up stay; there are as many validations."""
    for steps in STUDY.lengths:
        budget = STUDY.budget(steps)
        assert budget.steps == steps
        assert budget.steps == 8 * budget.eval_every
        others = (budget.size, budget.batch, budget.warmup, budget.workers)
        assert others == ("mini", 32, 48, 4)
