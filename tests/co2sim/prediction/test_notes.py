"""What a result says beside its figures: options that hold it back, and what is not counted."""

from typing import Any

import pytest
import tiny
from one_sample import simulate

from co2sim.hardware.cluster import Cluster, Link
from co2sim.prediction.result import Result
from co2sim.simulation.noise import Noise

SLOW = {"inter": Link(1e8)}


def on_slow(strategy: str, **changes: Any) -> Result:
    """The tiny model, whose largest block has 640 parameters, on a slow network."""
    return simulate(tiny.cluster(**SLOW), tiny.model(), strategy, **changes)


def of(nodes: int, **changes: Any) -> Cluster:
    """Nodes of eight tiny GPUs."""
    return tiny.cluster(nodes, 8, **changes)


# --- warnings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("small", "large", "tokens"),
    [
        ("zero3(prefetch=100)", "zero3(prefetch=640)", ["4 of 4 blocks", "prefetch=640 "]),
        (
            "zero3(prefetch=640,max_live=700)",
            "zero3(prefetch=640,max_live=1140)",
            ["3 of 3 blocks", "1,140 parameters", "; max_live=1140 "],
        ),
        (
            "zero3(prefetch=100,max_live=700)",
            "zero3(prefetch=640,max_live=1140)",
            ["; prefetch=640,max_live=1140 "],
        ),
    ],
)
def test_a_budget_below_the_largest_block_is_named_with_a_better_one(
    small: str, large: str, tokens: list[str]
) -> None:
    """Which blocks, the options that are enough, and the speed that they give."""
    found, better = on_slow(small), on_slow(large)
    assert better.tokens_per_s > found.tokens_per_s
    (line,) = found.warnings
    assert all(token in line for token in tokens), line
    assert f" {better.tokens_per_s:,.0f} " in line
    assert line.endswith(f" {found.tokens_per_s:,.0f}")
    assert better.warnings == ()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "ddp", "co2.published(worker=node)"])
def test_there_is_no_warning_without_a_cause(strategy: str) -> None:
    """Blocks below the budget, other strategies, a GPU that is alone, a network of no cost."""
    assert on_slow(strategy).warnings == ()
    fast = tiny.cluster(intra=Link(1e18), inter=Link(1e18))
    for cluster in (tiny.cluster(1, 1), fast):
        assert simulate(cluster, tiny.model(), "zero3(prefetch=0)").warnings == ()


# --- notes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["interference", "node_spread", "step_spread", "straggle"])
def test_a_number_that_counts_costs_of_scale_takes_the_note_away(number: str) -> None:
    """Any of three of the cluster, and uneven ranks."""
    straggle = number == "straggle"
    cluster = of(17) if straggle else of(17, **{number: 0.02})
    noise = Noise(straggle=0.1 * straggle)
    assert simulate(cluster, tiny.model(), "fsdp", noise=noise).notes == ()
