"""What a result says beside its figures: options that hold it back, and what is not counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command

import co2sim
from co2sim.cluster import Cluster, Link
from co2sim.noise import Noise
from co2sim.remarks import EAGER_ATTENTION, EAGER_LOSS, IDLE_CHECKPOINTING, SCALE
from co2sim.result import Result
from co2sim.study import simulate

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
def test_stages_of_a_pipeline_are_warned_of_too() -> None:
    """Blocks are those of all stages, and both speeds those of the pipeline."""
    found, better = (
        simulate("dgx-h100", "mpt-7b", name, gpus=64, pp=4, accumulation=8)
        for name in ("zero3", "zero3(prefetch=214695936)")
    )
    (line,) = found.warnings
    assert "34 of 34 blocks" in line
    assert f" {better.tokens_per_s:,.0f} " in line
    assert better.warnings == ()


@pytest.mark.slow
def test_zero3_inside_a_node_is_compared_with_fsdp() -> None:
    """Its options cannot be given there, so the inner strategy is named; FSDP must be faster."""
    found, better = (
        simulate("dgx-h100", "llama3-8b", f"co2(tau=2,worker=node,inner={inner})", gpus=16)
        for inner in ("zero3", "fsdp")
    )
    assert better.tokens_per_s > found.tokens_per_s
    (line,) = found.warnings
    assert "inner=fsdp" in line
    assert f" {better.tokens_per_s:,.0f} " in line
    hidden = "co2(tau=12,worker=node,inner=zero3)"
    assert simulate("h100-calibrated", "llama3-8b", hidden, gpus=64).warnings == ()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "ddp", "co2(worker=node)"])
def test_there_is_no_warning_without_a_cause(strategy: str) -> None:
    """Blocks below the budget, other strategies, a GPU that is alone, a network of no cost."""
    assert on_slow(strategy).warnings == ()
    fast = tiny.cluster(intra=Link(1e18), inter=Link(1e18))
    for cluster in (tiny.cluster(1, 1), fast):
        assert simulate(cluster, tiny.model(), "zero3(prefetch=0)").warnings == ()


def test_with_stragglers_the_gain_is_that_of_equal_ranks() -> None:
    """The warning's two speeds have the ratio that they have without noise."""

    def speeds(found: Result) -> list[float]:
        words = found.warnings[0].replace(",", "").split()
        return [float(words[place]) for place in (words.index("gives") + 1, -1)]

    quiet, uneven = (
        on_slow("zero3(prefetch=100)", noise=n) for n in (Noise(), Noise(straggle=0.3))
    )
    better, now = speeds(uneven)
    assert now == pytest.approx(uneven.tokens_per_s, abs=1)
    assert better / now == pytest.approx(speeds(quiet)[0] / speeds(quiet)[1], rel=1e-3)


def test_frames_and_json_have_the_warning() -> None:
    """In frames as one text, empty where there is none; in JSON as a list."""
    found = on_slow("zero3(prefetch=100)")
    assert json.loads(json.dumps(found.to_dict()))["warnings"] == list(found.warnings)
    frame = co2sim.scale(tiny.cluster(**SLOW), tiny.model(), ["zero3(prefetch=100)", "ddp"], gpus=4)
    assert list(frame["warnings"]) == [found.warnings[0], ""]


@pytest.mark.slow
def test_solving_for_a_bandwidth_warns(cli: Command) -> None:
    """Of the case as it is."""
    asked = "solve inter.bandwidth --for efficiency=90% -c dgx-h100 -m gpt2-small -g 16"
    ended = cli(*asked.split(), "-s", "zero3:prefetch=1000")
    assert "warning: zero3(prefetch=1000): " in ended.out


# --- notes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "notes"), [(16, ()), (17, (SCALE,))])
def test_above_128_gpus_costs_of_scale_are_not_counted(nodes: int, notes: tuple[str, ...]) -> None:
    """Sixteen nodes of eight are the most without that note."""
    assert simulate(of(nodes), tiny.model(), "fsdp").notes == notes


def test_all_gpus_of_a_pipeline_count_for_scale() -> None:
    """A stage has 64 of the 256 GPUs."""
    found = simulate("dgx-h100", "gpt2-small", "fsdp", gpus=256, pp=4, accumulation=4)
    assert found.notes == (SCALE,)


@pytest.mark.parametrize("number", ["interference", "node_spread", "step_spread", "straggle"])
def test_a_number_that_counts_costs_of_scale_takes_the_note_away(number: str) -> None:
    """Any of three of the cluster, and uneven ranks."""
    straggle = number == "straggle"
    cluster = of(17) if straggle else of(17, **{number: 0.02})
    noise = Noise(straggle=0.1 * straggle)
    assert simulate(cluster, tiny.model(), "fsdp", noise=noise).notes == ()


@pytest.mark.slow
def test_commands_show_a_note_of_many_results_once(cli: Command) -> None:
    """In scale and sweep; JSON has it with every result."""
    for asked in (
        ("scale", *LARGE, "-g", "128,256,512", "--jobs", "1"),
        ("sweep", *LARGE[:6], "-g", "256", "--vary", "micro_batch=1,2", "--jobs", "1"),
    ):
        assert " ".join(cli(*asked).out.split()).count(SCALE[:22]) == 1
    found = json.loads(cli("scale", *LARGE, "-g", "128,256", "--jobs", "1", "--json").out)
    assert [one["notes"] == [SCALE] for one in found["results"]] == [False, True, False, True]


@pytest.mark.slow
def test_a_page_shows_a_note_of_many_results_once(cli: Command) -> None:
    """Without the name of one of them."""
    cli("run", *LARGE, "-g", "256", "--report", "page.html")
    assert Path("page.html").read_text(encoding="utf-8").count(f"<li>{SCALE}</li>") == 1


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_reentrant_checkpointing_counts_where_blocks_are_recomputed(recompute: str) -> None:
    """Elsewhere time and memory are the same, and the note says so."""
    one, other = (
        simulate(
            "h100-calibrated", "gpt2-small", "fsdp", gpus=8, recompute=recompute, checkpointing=how
        )
        for how in ("non_reentrant", "reentrant")
    )
    same = (one.step_time_s, one.memory_bytes_per_gpu) == (
        other.step_time_s,
        other.memory_bytes_per_gpu,
    )
    assert same == (recompute != "full")
    assert (IDLE_CHECKPOINTING in other.notes) == same


@pytest.mark.parametrize(("option", "note"), [("attention", EAGER_ATTENTION), ("loss", EAGER_LOSS)])
def test_eager_options_take_time_only_on_gpus_with_kernels(option: str, note: str) -> None:
    """Elsewhere they change memory alone, and the note says so; of images they change nothing."""
    eager: dict[str, Any] = {option: "eager"}
    for pp in (1, 2):
        one, other = (
            simulate("dgx-h100", "gpt2-small", "fsdp", gpus=8, pp=pp, **asked)
            for asked in ({}, eager)
        )
        assert (one.notes, other.notes) == ((), (note,))
        assert other.step_time_s == one.step_time_s
        assert other.memory_bytes_per_gpu["total"] > one.memory_bytes_per_gpu["total"]
    one, other = (
        simulate("h100-calibrated", "gpt2-small", "fsdp", gpus=8, **asked) for asked in ({}, eager)
    )
    assert other.notes == ()
    assert other.step_time_s > one.step_time_s
    assert simulate("dgx-h100", "resnet-50", "ddp", gpus=8, **eager).notes == ()
