"""`delay=auto` and `tau=auto`: the numbers chosen are the least that hide an average."""

from dataclasses import replace
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

from co2sim.hardware.cluster import Cluster, Link
from co2sim.prediction.driver import make_case as case_of
from co2sim.prediction.driver import trace
from co2sim.prediction.result import Result
from co2sim.strategies.co2 import CO2

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
    return simulate(cluster, tiny.model(), strategy, **options)


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
