"""What a result says beside its figures: options that hold it back, and what is not counted."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command
from one_sample import simulate

from co2sim.hardware.cluster import Cluster, Link
from co2sim.prediction.notes import SCALE
from co2sim.prediction.result import Result
from co2sim.simulation.noise import Noise

SLOW = {"inter": Link(1e8)}
LARGE = ("-c", "dgx-h100", "-m", "gpt2-small", "-s", "fsdp", "-s", "ddp")


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
        ("zeropp(prefetch=100)", "zeropp(prefetch=640)", ["4 of 4 blocks", "prefetch=640 "]),
        ("zero3(prefetch=360)", "zero3(prefetch=640)", ["3 of 4 blocks", "prefetch=640 "]),
        (
            "zero3(prefetch=640,max_live=700)",
            "zero3(prefetch=640,max_live=1140)",
            ["3 of 3 blocks", "1,140 parameters", "; max_live=1140 "],
        ),
        (
            "zero3(prefetch=640,max_live=860)",
            "zero3(prefetch=640,max_live=1140)",
            ["2 of 3 blocks", "; max_live=1140 "],
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


@pytest.mark.slow
def test_zero3_inside_a_node_is_compared_with_fsdp() -> None:
    """Its options cannot be given there, so the inner strategy is named; FSDP must be faster."""
    found, better = (
        simulate(
            "dgx-h100",
            "llama3-8b",
            f"co2.published(tau=2,worker=node,inner={inner})",
            gpus=16,
            overrides={"node_spread": "0"},
        )
        for inner in ("zero3", "fsdp")
    )
    assert better.tokens_per_s > found.tokens_per_s
    (line,) = found.warnings
    assert "inner=fsdp" in line
    assert f" {better.tokens_per_s:,.0f} " in line
    hidden = "co2.published(tau=12,worker=node,inner=zero3)"
    found = simulate("h100-3200g", "llama3-8b", hidden, gpus=64, stack="composer-2023")
    assert found.warnings == ()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "ddp", "co2.published(worker=node)"])
def test_there_is_no_warning_without_a_cause(strategy: str) -> None:
    """Blocks below the budget, other strategies, a GPU that is alone, a network of no cost."""
    assert on_slow(strategy).warnings == ()
    fast = tiny.cluster(intra=Link(1e18), inter=Link(1e18))
    for cluster in (tiny.cluster(1, 1), fast):
        assert simulate(cluster, tiny.model(), "zero3(prefetch=0)").warnings == ()


@pytest.mark.slow
def test_solving_for_a_bandwidth_warns(cli: Command) -> None:
    """Of the case as it is."""
    asked = "solve inter.bandwidth --for efficiency=90% -c dgx-h100 -m gpt2-small -g 16"
    ended = cli(*asked.split(), "-s", "zero3:prefetch=1000")
    assert "warning: zero3(prefetch=1000): " in ended.out


# --- notes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["interference", "node_spread", "step_spread", "straggle"])
def test_a_number_that_counts_costs_of_scale_takes_the_note_away(number: str) -> None:
    """Any of three of the cluster, and uneven ranks."""
    straggle = number == "straggle"
    cluster = of(17) if straggle else of(17, **{number: 0.02})
    noise = Noise(straggle=0.1 * straggle)
    assert simulate(cluster, tiny.model(), "fsdp", noise=noise).notes == ()


@pytest.mark.slow
def test_a_page_shows_a_note_of_many_results_once(cli: Command) -> None:
    """Without the name of one of them."""
    even = ("--set", "interference=0", "--set", "node_spread=0")
    cli("run", *LARGE, "-g", "256", *even, "--report", "page.html")
    assert Path("page.html").read_text(encoding="utf-8").count(f"<li>{SCALE}</li>") == 1
