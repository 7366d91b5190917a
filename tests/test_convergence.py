"""The plan of the convergence study: what is run next, given what is there."""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from convergence_plan import (  # type: ignore[import-not-found]
    RATES,
    RUNS,
    SEEDS,
    TUNING_SEED,
    Ask,
    StudyBudget,
    configurations,
    missing,
    study,
)
from reports import append, read  # type: ignore[import-not-found]

BUDGET = StudyBudget()
PLAN = partial(study, BUDGET)


def finished(
    best_lr: float, best_choice: int
) -> tuple[dict[tuple[str, ...], dict[str, object]], list[Ask]]:
    """All runs, if the loss is least at a rate and at one of the outer steps."""
    known: dict[tuple[str, ...], dict[str, object]] = {}
    asked = []
    while asks := missing(PLAN, known):
        ask = asks[0]
        asked.append(ask)
        place = ask.configuration.choices.index(ask.choice)
        wrong = abs(math.log2(ask.lr / best_lr)) + 0.1 * abs(place - best_choice)
        known[ask.key] = {"validation_loss": 2 + wrong}
        assert len(asked) < 1000
    return known, asked


@pytest.mark.parametrize("best", [5e-3, 1e-2, 2e-2, 1.25e-3])
def test_every_configuration_is_reported_at_its_best(best: float) -> None:
    """Three seeds, none of them that of the tuning, at the best rate and outer step."""
    _, asked = finished(best, 1)
    for configuration in configurations(BUDGET):
        mine = [ask for ask in asked if ask.configuration == configuration]
        reported = [ask for ask in mine if ask.seed != TUNING_SEED]
        assert [ask.seed for ask in reported] == list(SEEDS)
        assert {ask.lr for ask in reported} == {best}
        wanted = configuration.choices[min(1, len(configuration.choices) - 1)]
        assert {ask.choice for ask in reported} == {wanted}
        assert mine[-3:] == reported


def test_a_best_rate_at_the_edge_is_looked_beyond() -> None:
    """By factors of 2, twice at most; one inside the grid is not."""
    inside = {ask.lr for ask in finished(RATES[1], 0)[1] if ask.configuration.name == "AdamW-DDP"}
    assert inside == set(RATES)
    above = {ask.lr for ask in finished(1.0, 0)[1] if ask.configuration.name == "AdamW-DDP"}
    assert above == {*RATES, 2 * RATES[-1], 4 * RATES[-1]}
    below = {ask.lr for ask in finished(1e-6, 0)[1] if ask.configuration.name == "AdamW-DDP"}
    assert below == {*RATES, RATES[0] / 2, RATES[0] / 4}


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    """Rows survive in the file; the plan goes on behind them; another budget starts anew."""
    path = tmp_path / RUNS
    assert read(path) == {}
    first = missing(PLAN, {})[0]
    row = {
        "budget": BUDGET.label,
        "configuration": first.configuration.name,
        "choice": first.choice,
        "lr": f"{first.lr:g}",
        "seed": str(first.seed),
        "validation_loss": 2.5,
        "error": "",
    }
    append(path, row)
    known = read(path)
    assert known[first.key]["validation_loss"] == 2.5
    assert missing(PLAN, known) == missing(PLAN, {})[1:]
    other = StudyBudget(steps=96)
    assert missing(partial(study, other), known)[0] == replace(first, budget=other)
    append(path, {**row, "lr": "1", "validation_loss": float("inf"), "error": "loss is nan"})
    failed = read(path)[BUDGET.label, first.configuration.name, first.choice, "1", row["seed"]]
    assert failed["validation_loss"] == float("inf")


def test_clips_grow_with_what_a_round_can_move() -> None:
    """A quarter of lr x tau, so that the share that is clipped can be compared."""
    clipped = next(c for c in configurations(BUDGET) if c.name == "CO2 48, clip")
    assert clipped.outer("momentum=0.5,lr=1", 0.01) == "momentum=0.5,lr=1,gap=constant,clip=0.12"


def test_a_choice_is_split_between_strategy_and_outer_step() -> None:
    """CO2 with a delay: what is kept belongs to the strategy, momentum and lr to the outer step."""
    late = next(c for c in configurations(BUDGET) if c.name == "CO2 delay 4, tau 12")
    choice = "keep=0.25,predict=1,momentum=0.2,lr=0.9"
    assert choice in late.choices
    strategy = late.trained(choice)
    assert strategy == "co2:tau=12,delay=4,fragments=1,keep=0.25,predict=1"
    assert late.outer(choice, 0.01) == "momentum=0.2,lr=0.9"
    assert (late.trained("keep=1"), late.outer("keep=1", 0.01)) == (f"{late.strategy},keep=1", "")
    assert late.choices[0] == "keep=0.5,predict=0.5"  # that of CO2 itself, in rounds of 12
    slow = next(c for c in configurations(BUDGET) if c.kind == "slowmo")
    assert slow.trained("momentum=0.5,lr=1") == slow.strategy
    assert slow.outer("momentum=0.5,lr=1", 0.01) == "momentum=0.5,lr=1"
