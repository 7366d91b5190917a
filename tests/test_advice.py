"""What a result warns of: a prefetch budget that the largest block exceeds, and what it costs."""

import json
from dataclasses import replace

import pytest
import tiny

import co2sim
from co2sim.cluster import Link
from co2sim.noise import Noise
from co2sim.result import Result
from co2sim.study import simulate

SLOW = {"inter": co2sim.Link(1e8)}


def given(strategy: str, **changes: object) -> Result:
    """The tiny model, whose largest block has 640 parameters, on a slow network."""
    return simulate(tiny.cluster(**SLOW), tiny.model(), strategy, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["zero3", "zeropp"])
def test_a_block_above_the_budget_is_named_with_what_a_larger_budget_gives(name: str) -> None:
    """The number that is needed, and the speed that a simulation with it gives."""
    found = given(f"{name}(prefetch=100)")
    better = given(f"{name}(prefetch=640)")
    assert better.tokens_per_s > found.tokens_per_s
    (line,) = found.warnings
    assert line == (
        "prefetch=100: that prefetch budget is less than 4 of 4 blocks need (embedding has 640"
        " parameters), so these are gathered only when they are needed; prefetch=640 gives"
        f" {better.tokens_per_s:,.0f} tokens/s"
        f" instead of {found.tokens_per_s:,.0f}"
    )
    assert better.warnings == ()


def test_an_option_that_gains_nothing_is_said_to() -> None:
    """Where communication takes nearly no time, gathering ahead gives the same."""
    fast = tiny.cluster(intra=Link(1e18), inter=Link(1e18))
    (line,) = simulate(fast, tiny.model(), "zero3(prefetch=100)").warnings
    assert "; prefetch=640 gives no more than these " in line


def test_max_live_is_named_where_it_is_too_small_as_well() -> None:
    """A block and the one before it: 640 + 500."""
    (line,) = given("zero3(prefetch=100,max_live=700)").warnings
    assert "; prefetch=640,max_live=1140 gives " in line


def test_zero3_inside_a_node_is_compared_with_fsdp() -> None:
    """Its options cannot be given there, so the inner strategy is named."""
    large = tiny.model()
    blocks = (replace(large.blocks[0], tensors=(60_000_000,)), *large.blocks[1:])
    large = replace(large, blocks=blocks)
    found, better = (
        simulate(tiny.cluster(), large, f"co2(tau=2,worker=node,inner={inner})")
        for inner in ("zero3", "fsdp")
    )
    (line,) = found.warnings
    start = (
        "inner=zero3 has prefetch=50000000: that prefetch budget is less than 1 of 4 blocks need"
    )
    assert line.startswith(f"{start} (embedding has 60,000,000 parameters)")
    assert "; inner=fsdp gives " in line
    assert f" {better.tokens_per_s:,.0f} tokens/s" in line


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "ddp", "co2(worker=node)"])
def test_there_is_no_warning_without_a_cause(strategy: str) -> None:
    """Blocks below the budget, other strategies, and a GPU that is alone."""
    assert given(strategy).warnings == ()
    alone = simulate(tiny.cluster(1, 1), tiny.model(), "zero3(prefetch=0)")
    assert alone.warnings == ()


def test_with_stragglers_the_gain_is_that_of_equal_ranks() -> None:
    """The warning's two speeds have the ratio that they have without noise."""

    def speeds(found: Result) -> list[float]:
        words = found.warnings[0].replace(",", "").split()
        return [float(words[place]) for place in (words.index("gives") + 1, -1)]

    quiet, uneven = (given("zero3(prefetch=100)", noise=n) for n in (Noise(), Noise(straggle=0.3)))
    better, now = speeds(uneven)
    assert now == pytest.approx(uneven.tokens_per_s, abs=1)
    assert better / now == pytest.approx(speeds(quiet)[0] / speeds(quiet)[1], rel=1e-3)


def test_tables_and_json_have_the_warning() -> None:
    """In frames as one text, empty where there is none; in JSON as a list."""
    found = given("zero3(prefetch=100)")
    assert json.loads(json.dumps(found.to_dict()))["warnings"] == list(found.warnings)
    frame = co2sim.scale(tiny.cluster(**SLOW), tiny.model(), ["zero3(prefetch=100)", "ddp"], gpus=4)
    assert list(frame["warnings"]) == [found.warnings[0], ""]
