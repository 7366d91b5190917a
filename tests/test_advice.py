"""What a result warns of: a prefetch budget that the largest block exceeds, and what it costs."""

import json

import pytest
import tiny
from commands import Command

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


def test_an_option_that_gains_nothing_is_not_named() -> None:
    """Where communication takes nearly no time, gathering ahead gives the same."""
    fast = tiny.cluster(intra=Link(1e18), inter=Link(1e18))
    assert simulate(fast, tiny.model(), "zero3(prefetch=100)").warnings == ()


def test_max_live_is_named_where_it_is_too_small_as_well() -> None:
    """A block and the one before it: 640 + 500."""
    (line,) = given("zero3(prefetch=100,max_live=700)").warnings
    assert "; prefetch=640,max_live=1140 gives " in line


def test_max_live_is_named_alone_where_it_alone_is_too_small() -> None:
    """The blocks that hold most together are named, and the speed without that limit."""
    found, better = (given(f"zero3(prefetch=640,max_live={most})") for most in (700, 1140))
    assert better.tokens_per_s > found.tokens_per_s
    (line,) = found.warnings
    assert line == (
        "max_live=700: that limit is less than 3 of 3 blocks need beside the one before (embedding"
        " and layer0 have 1,140 parameters), so these are gathered only when they are needed;"
        f" max_live=1140 gives {better.tokens_per_s:,.0f} tokens/s instead of"
        f" {found.tokens_per_s:,.0f}"
    )
    assert better.warnings == ()


def test_stages_of_a_pipeline_are_warned_of_too() -> None:
    """Blocks are those of all stages, and both speeds those of the pipeline."""
    found, better = (
        simulate("dgx-h100", "mpt-7b", name, gpus=64, pp=4, accumulation=8)
        for name in ("zero3", "zero3(prefetch=214695936)")
    )
    (line,) = found.warnings
    assert "less than 34 of 34 blocks need (embedding has 214,695,936 parameters)" in line
    assert line.endswith(
        f"; prefetch=214695936 gives {better.tokens_per_s:,.0f} tokens/s instead of"
        f" {found.tokens_per_s:,.0f}"
    )
    assert better.warnings == ()


def test_solving_for_a_pipeline_warns(cli: Command) -> None:
    """Who asks what network a pipeline needs hears that an option holds it back."""
    asked = "solve inter.bandwidth --for efficiency=90% -c dgx-h100 -m mpt-7b -g 64 -s zero3"
    ended = cli(*asked.split(), "--pp", "4", "--accumulation", "8")
    assert "warning: zero3: prefetch=50000000" in ended.out


def test_fsdp_is_advised_only_where_it_is_faster() -> None:
    """Here communication is hidden with both, and FSDP takes longer: no word."""
    found, other = (
        simulate("h100-calibrated", "llama3-8b", f"co2(tau=12,worker=node,inner={inner})", gpus=64)
        for inner in ("zero3", "fsdp")
    )
    assert other.tokens_per_s < found.tokens_per_s
    assert found.warnings == ()


def test_zero3_inside_a_node_is_compared_with_fsdp() -> None:
    """Its options cannot be given there, so the inner strategy is named."""
    found, better = (
        simulate("dgx-h100", "llama3-8b", f"co2(tau=2,worker=node,inner={inner})", gpus=16)
        for inner in ("zero3", "fsdp")
    )
    assert better.tokens_per_s > found.tokens_per_s
    (line,) = found.warnings
    assert line == (
        "inner=zero3 has prefetch=50000000: that prefetch budget is less than 34 of 34 blocks need"
        " (head has 525,340,672 parameters), so these are gathered only when they are needed;"
        f" inner=fsdp gives {better.tokens_per_s:,.0f} tokens/s instead of"
        f" {found.tokens_per_s:,.0f}"
    )


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
