"""`delay=auto` and `tau=auto`: the numbers chosen are the least that hide an average."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command
from hypothesis import given
from hypothesis import strategies as st

from co2sim import hiding
from co2sim.cluster import Cluster, Link
from co2sim.errors import OptionError
from co2sim.result import Result
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2
from co2sim.study import describe as case_of
from co2sim.study import simulate, trace

KERNELS = 2000 * (4 * 4 + 2) / 1e12 + 2000 * (4 * 8 + 2) / 1e12
"""Seconds of a round of the tiny model that fill the displacement, and use its average."""


def slow(steps: float) -> Cluster:
    """Four nodes of one GPU whose average of 2000 fp32 numbers takes as long as `steps` steps."""
    return tiny.cluster(4, 1, inter=Link(2 * 3 / 4 * 8000 / (steps * tiny.local_step())))


def exposed(tau: int, delay: int, steps: float) -> float:
    """The fraction of a round that an average of so many steps exposes."""
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


@given(st.integers(1, 60), st.integers(-10, 90), st.integers(-5, 65), st.integers(1, 60))
def test_the_search_finds_the_edge_wherever_it_starts(
    low: int, guess: int, edge: int, width: int
) -> None:
    """The least number that holds, or the highest; and never is the highest itself asked."""
    high, asked = low + width, []

    def holds(number: int) -> bool:
        asked.append(number)
        return number >= edge

    assert hiding.least_that_holds(low, high, guess, holds) == min(max(edge, low), high)
    assert all(low <= number < high for number in asked)
    assert len(asked) == len(set(asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "bandwidth"),
    [
        ("node", "20 Gbit/s"),
        pytest.param("node,inner=ddp", "80 Gbit/s", marks=pytest.mark.nightly),
        pytest.param("node,average=leader,dtype=bf16", "20 Gbit/s", marks=pytest.mark.nightly),
    ],
)
def test_inside_nodes_too_no_shorter_delay_would_do(worker: str, bandwidth: str) -> None:
    """All delays simulated one by one: what the steps inside a node expose is none of its business.

    "Hidden" is against the round without averages, which communicates inside nodes all the same.
    """
    options: dict[str, Any] = {"gpus": 32, "overrides": {"inter.bandwidth": bandwidth}}
    times = {}
    for delay in range(1, 13):
        how = f"co2(tau=12,worker={worker},delay={delay})"
        times[delay] = simulate("a100-tcp80", "gpt2-xl", how, **options).round_time_s
    found = simulate(
        "a100-tcp80", "gpt2-xl", f"co2(tau=12,worker={worker},delay=auto,fragments=1)", **options
    )
    delay = parse(found.strategy).delay  # type: ignore[attr-defined]
    least = min(times.values())
    assert times[delay] <= least * 1.01 / 0.99
    assert delay == 1 or times[delay - 1] > least * 1.01
    assert found.exposed_comm_s > 0  # of inner steps


def test_the_figures_are_those_of_the_number_chosen() -> None:
    """Nothing but the note tells a choice from the same number given; a trace has it, too."""
    found, other = (
        chosen(f"co2(tau=6,delay={delay})", slow(3.0)) for delay in ("auto,fragments=1", 3)
    )
    assert found.notes
    assert replace(found, notes=()) == other
    assert Result.from_dict(found.to_dict()) == found
    case = case_of(slow(3.0), tiny.model(), CO2(tau=6, delay="auto", fragments=1))
    assert trace(case)[0].name == "co2(tau=6, delay=3)"


def test_noise_is_left_out_of_the_choice() -> None:
    """With jitter, stragglers or a slow node the number is the same, and the note says so."""
    for noise in ({"jitter": 0.3}, {"straggle": 0.5}, {"node_speed": {1: 0.2}}):
        found = chosen("co2(tau=6,delay=auto,fragments=1)", slow(3.0), **noise)
        assert found.strategy == "co2(tau=6, delay=3)"
        (note,) = found.notes
        assert "without jitter" in note


def test_a_round_beyond_all_bounds_is_refused_at_once() -> None:
    """No schedule of a million steps is built to learn that a network is too slow."""
    with pytest.raises(OptionError, match="10000 steps"):
        chosen("co2(tau=auto,delay=auto,fragments=1)", slow(1e6))


def test_one_gpu_has_nothing_to_hide() -> None:
    """Alone, an average takes no time: the least numbers are chosen."""
    found = chosen("co2(tau=auto,delay=auto,fragments=1)", tiny.cluster(1, 1))
    assert found.strategy == "co2(tau=1, delay=1)"


# --- commands ----------------------------------------------------------------------------------

ON = ("-c", "a100-tcp80", "-m", "gpt2-small", "-g", "16", "-s", "co2:delay=auto,fragments=1")


def test_commands_take_auto_and_say_what_was_chosen(cli: Command, tmp_path: Path) -> None:
    """`run` names the number, and a trace is of it."""
    assert "co2(tau=12, delay=7)" in cli("run", *ON).out
    assert cli("trace", *ON, "-o", "x.jsonl").code == 0
    assert "delay=7" in (tmp_path / "x.jsonl").read_text()


@given(st.integers(2, 6), st.floats(0.02, 1.0))
def test_one_fragment_for_each_step_needs_a_delay_of_one(tau: int, busy: float) -> None:
    """By default: a network busy for a share of the round has each fragment there in one step."""
    found = chosen(f"co2(tau={tau},delay=auto)", slow(0.98 * busy * tau))
    assert found.strategy == f"co2(tau={tau}, delay=1, fragments={tau})"
    whole = chosen(f"co2(tau={tau},delay=auto,fragments=1)", slow(0.98 * busy * tau))
    assert found.exposed_share <= max(0.01, whole.exposed_share)


def test_rounds_in_fragments_have_two_steps_at_least() -> None:
    """Where tau and fragments are open: two halves of a round send half of what one step would."""
    found = chosen("co2(tau=auto,delay=auto)", slow(0.5))
    assert found.strategy == "co2(tau=2, delay=1, fragments=2)"
    whole = chosen("co2(tau=auto,delay=auto,fragments=1)", slow(0.5))
    assert whole.strategy == "co2(tau=1, delay=1)"


def test_fragments_are_within_a_round() -> None:
    """No more than steps, and none without a delay."""
    with pytest.raises(OptionError, match="1 to 12"):
        CO2(tau=12, delay=1, fragments=13)
    with pytest.raises(OptionError, match="delay"):
        CO2(fragments=2)
    found = chosen("co2(tau=auto,delay=auto,fragments=5)", slow(0.5))
    assert found.strategy == "co2(tau=5, delay=1, fragments=5)"


def test_what_is_predicted_is_bounded_where_the_delay_is_chosen() -> None:
    """It is kept where it dies out; averages that take the whole round would repeat it for ever."""
    short = chosen("co2(tau=12,delay=auto,fragments=1,keep=0.25,predict=1)", slow(3))
    assert "predict=1.0" in short.strategy
    long = chosen("co2(tau=4,delay=auto,fragments=1,keep=0.25,predict=1)", slow(20))
    assert long.strategy == "co2(tau=4, delay=4, keep=0.25, predict=0.75)"
    assert any("0.75" in note for note in long.notes)
