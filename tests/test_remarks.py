"""Notes that many results have alike: they are true, and told once."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command as Run

from co2sim.cluster import Cluster
from co2sim.noise import Noise
from co2sim.remarks import EAGER_ATTENTION, EAGER_LOSS, IDLE_CHECKPOINTING, SCALE
from co2sim.result import Result
from co2sim.study import simulate

LARGE = ("-c", "dgx-h100", "-m", "gpt2-small", "-s", "fsdp", "-s", "ddp")


def of(nodes: int, **changes: Any) -> Cluster:
    """Nodes of eight tiny GPUs."""
    return tiny.cluster(nodes, 8, **changes)


@pytest.mark.parametrize(("nodes", "told"), [(16, ()), (17, (SCALE,))])
def test_above_128_gpus_it_says_that_costs_of_scale_are_not_counted(
    nodes: int, told: tuple[str, ...]
) -> None:
    """Sixteen nodes of eight are the most without that note."""
    assert simulate(of(nodes), tiny.model(), "fsdp").notes == told


@pytest.mark.parametrize("number", ["interference", "node_spread", "step_spread"])
def test_a_cluster_with_one_of_the_numbers_has_no_such_note(number: str) -> None:
    """Any of the three counts some of it; so do ranks that are uneven by jitter or straggle."""
    assert simulate(of(17, **{number: 0.02}), tiny.model(), "fsdp").notes == ()
    uneven = Noise(straggle=0.1)
    assert simulate(of(17), tiny.model(), "fsdp", noise=uneven).notes == ()


def test_all_gpus_of_a_pipeline_count() -> None:
    """A stage has 64 of the 256 GPUs."""
    found = simulate("dgx-h100", "gpt2-small", "fsdp", gpus=256, pp=4, accumulation=4)
    assert found.notes == (SCALE,)


def test_commands_tell_it_once_for_all_strategies(cli: Run) -> None:
    """In scale and sweep; JSON has it with every result, and a sweep shows no column for it."""
    start = "on more than 128 GPUs"
    for asked in (
        ("scale", *LARGE, "-g", "128,256,512", "--jobs", "1"),
        ("sweep", *LARGE[:6], "-g", "256", "--vary", "micro_batch=1,2", "--jobs", "1"),
    ):
        ended = cli(*asked)
        assert ended.out.count(start) == 1, ended
        assert "chosen" not in ended.out
    found = json.loads(cli("scale", *LARGE, "-g", "128,256", "--jobs", "1", "--json").out)
    assert [one["notes"] == [SCALE] for one in found["results"]] == [False, True, False, True]


def test_a_page_tells_it_once(cli: Run) -> None:
    """Without the name of one of the cases that have it."""
    cli("run", *LARGE, "-g", "256", "--report", "page.html")
    text = Path("page.html").read_text(encoding="utf-8")
    assert text.count(f"<li>{SCALE}</li>") == 1


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


EAGER = {"attention": EAGER_ATTENTION, "loss": EAGER_LOSS}


@pytest.mark.parametrize("option", EAGER)
@pytest.mark.parametrize("pp", [1, 2])
def test_without_kernels_eager_options_change_memory_alone(option: str, pp: int) -> None:
    """The note says so, and it is true: the time is the same, and the memory is not."""
    one, other = (
        simulate("dgx-h100", "gpt2-small", "fsdp", gpus=8, pp=pp, **asked)  # type: ignore[arg-type]
        for asked in ({}, {option: "eager"})
    )
    assert (one.notes, other.notes) == ((), (EAGER[option],))
    assert other.step_time_s == one.step_time_s
    assert other.memory_bytes_per_gpu["total"] > one.memory_bytes_per_gpu["total"]


def test_with_kernels_eager_options_take_time() -> None:
    """No note: both options change the time."""
    eager = {"attention": "eager", "loss": "eager"}
    one, other = (
        simulate("h100-calibrated", "gpt2-small", "fsdp", gpus=8, **asked)  # type: ignore[arg-type]
        for asked in ({}, eager)
    )
    assert other.notes == ()
    assert other.step_time_s > one.step_time_s


def test_a_model_without_attention_has_no_note_on_it() -> None:
    """Images have no scores and no logits, so eager changes nothing that a note tells of."""
    found: Result = simulate(
        "dgx-h100", "resnet-50", "ddp", gpus=8, attention="eager", loss="eager"
    )
    assert found.notes == ()
