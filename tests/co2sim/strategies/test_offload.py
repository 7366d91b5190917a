"""Optimizer states on the host: what crosses the link, memory on both sides, and step times."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

from co2sim import Case, strategies
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.offloading import ASSUMED
from co2sim.models.memory import host_memory
from co2sim.prediction.driver import run
from co2sim.schedule.schedule import Compute, DType, Layout, Schedule
from co2sim.simulation.chakra.export import durations
from co2sim.simulation.costs import traffic
from co2sim.simulation.run import execute

M = 2000
"""Parameters of the tiny model."""

SHARES = {"ddp": 1, "zero1": 4, "zero1(shard=node)": 2, "zero2": 4, "zero3": 4, "fsdp": 4}
"""GPUs that divide optimizer states on two nodes of two."""

GRADIENT = {"fsdp": 4}
"""Bytes of one that goes to the host, if not 2: fsdp reduces in fp32."""


def cluster(**changes: Any) -> Cluster:
    """Two nodes of two GPUs: 4 GB/s to a host whose optimizer moves 0.5 GB/s for each."""
    known = {
        "gpu": tiny.gpu(host_link=5e9),
        "host_link_efficiency": 0.8,
        "host_memory_bandwidth": 2e9,
        "host_optimizer_efficiency": 0.25,
    }
    return tiny.cluster(2, 2, **known | changes)


def on_host(schedule: Schedule) -> dict[str, tuple[str, float]]:
    """Place and bytes of what is not on the GPU, by op."""
    return {
        op.name: (op.work.place, op.work.memory_bytes)
        for op in schedule.body
        if isinstance(op.work, Compute) and op.work.place != "gpu"
    }


@pytest.mark.parametrize("strategy", SHARES)
@given(st.integers(1, 3))
def test_a_share_goes_to_the_host_once_a_step_and_comes_back(
    strategy: str, accumulation: int
) -> None:
    """Gradients of 2 bytes (fsdp: 4), 28 of optimizer traffic, parameters of 2, for each."""
    made = tiny.schedule(strategy, offload="optimizer", accumulation=accumulation)
    share, width = M // SHARES[strategy], GRADIENT.get(strategy, 2)
    assert on_host(made) == {
        "to_host": ("link", width * share),
        "optimizer": ("host", 28 * share),
        "from_host": ("link", 2 * share),
    }


@pytest.mark.parametrize("strategy", SHARES)
def test_nothing_else_changes_but_where_the_optimizer_runs(strategy: str) -> None:
    """The same collectives; and the next step begins behind the parameters that come back."""
    plain, offloaded = (tiny.schedule(strategy, offload=one) for one in ("none", "optimizer"))
    assert traffic(plain, cluster()) == traffic(offloaded, cluster())
    trace = execute(offloaded, cluster(), precision="bf16", rounds=2)
    assert trace.violations(offloaded) == []
    spans = tiny.by_op(trace)
    back = spans[0, "from_host"].end
    assert all(span.start >= back for (turn, _), span in spans.items() if turn == 1)
    order = [spans[0, name] for name in ("to_host", "optimizer", "from_host")]
    assert all(one.end == other.start for one, other in pairwise(order))


@pytest.mark.parametrize("strategy", SHARES)
def test_a_step_takes_transfers_and_the_host_longer_and_its_own_optimizer_less(
    strategy: str,
) -> None:
    """4 GB/s over the link, 0.5 GB/s on the host, and 1 TB/s on the GPU that no longer does it."""
    plain, offloaded = (
        simulate(cluster(), tiny.model(), strategy, offload=one) for one in ("none", "optimizer")
    )
    share, width = M / SHARES[strategy], GRADIENT.get(strategy, 2)
    more = (width + 2) * share / 4e9 + 28 * share / 0.5e9 - 28 * share / 1e12
    assert offloaded.step_time_s - plain.step_time_s == pytest.approx(more, rel=1e-6)
    assert offloaded.exposed_comm_s == pytest.approx(plain.exposed_comm_s, rel=1e-6, abs=1e-12)
    parts = offloaded.breakdown_s
    assert parts["to_host"] == pytest.approx(width * share / 4e9)
    assert parts["host_optimizer"] == pytest.approx(28 * share / 0.5e9)
    assert parts["from_host"] == pytest.approx(2 * share / 4e9)


@pytest.mark.parametrize("strategy", SHARES)
def test_states_and_master_copies_leave_the_gpu_for_the_host(strategy: str) -> None:
    """12 bytes a parameter and its gradient on the host; fsdp keeps parameters of 2 bytes."""
    made = strategies.parse(strategy)
    jobs = [tiny.job(offload=one) for one in ("none", "optimizer")]
    plain, offloaded = (made.memory(job, Layout(2, 2)) for job in jobs)
    share, width = M / SHARES[strategy], GRADIENT.get(strategy, 2)
    gone = 12 if strategy != "fsdp" else 8 + 2  # moments, and 2 of the 4 bytes of a parameter
    assert sum(plain.values()) - sum(offloaded.values()) == pytest.approx(gone * share)
    assert "optimizer" not in offloaded
    schedule = made.schedule(jobs[1], Layout(2, 2))
    assert host_memory(jobs[1], schedule) == pytest.approx((12 + width) * share)
    assert host_memory(jobs[0], made.schedule(jobs[0], Layout(2, 2))) == 0


@pytest.mark.parametrize(
    ("changes", "there", "moved", "held"),
    [
        ({"precision": DType.FP32}, 4, 24, 12 + 4),
        ({"optimizer": "sgd"}, 2, 20, 8 + 2),
        ({"main_gradients": True}, 4, 28, 12 + 4),
    ],
)
def test_other_types_and_optimizers(
    changes: dict[str, Any], there: int, moved: int, held: int
) -> None:
    """fp32: a master copy on the host, too. sgd: one moment. Gradients as the GPU has them."""
    job = tiny.job(offload="optimizer", **changes)
    made = strategies.parse("zero1").schedule(job, Layout(2, 2))
    sizes = {name: size * 4 / M for name, (_, size) in on_host(made).items()}
    assert sizes == {"to_host": there, "optimizer": moved, "from_host": job.precision.bytes}
    assert host_memory(job, made) == held * M / 4


def test_the_host_memory_of_a_node_is_said_and_what_is_assumed_of_it() -> None:
    """By hand: 8.03 billion parameters over 64 GPUs, 14 bytes each; a DGX H100 states the rest."""
    case = Case(cluster="dgx-h100", model="llama3-8b", strategy="zero2", offload="optimizer")
    found, plain = run(case), run(replace(case, offload="none"))
    each = 14 * 8_030_261_248 / 64
    assert f"{each / 1e9:.2f} GB of the host's memory for each GPU" in found.notes[0]
    assert f"{8 * each / 1e9:.1f} GB on a node" in found.notes[0]
    efficiencies = {"cluster.host_link_efficiency", "cluster.host_optimizer_efficiency"}
    paths = {fact.path for fact in found.assumed} - {fact.path for fact in plain.assumed}
    assert paths == efficiencies
    other = run(replace(case, cluster="p5.48xlarge", gpus=16))
    assert {f"cluster.{path}" for path in ASSUMED} - {f.path for f in other.assumed} == {
        "cluster.gpu.host_link"
    }
    assert not any("host's memory" in note for note in plain.notes)
    given = {"host_link_efficiency": "0.9", "host_optimizer_efficiency": "0.5"}
    assert not efficiencies & {f.path for f in run(replace(case, overrides=given)).assumed}


def test_a_pipeline_updates_each_stage_on_its_host() -> None:
    """Two stages on a node each: the longest of a step grows by what the first one's host takes."""
    case = Case(
        cluster="dgx-h100", model="llama3-8b", strategy="zero1", gpus=16, pp=2, global_batch=64
    )
    plain, offloaded = run(case), run(replace(case, offload="optimizer"))
    share = case.job().stage(0).workload.parameters / 8
    link, host = 64e9 * 0.75, 76.8e9 * 0.13
    more = 4 * share / link + 28 * share / host
    gained = offloaded.step_time_s - plain.step_time_s
    assert gained == pytest.approx(more, rel=0.02)  # less the optimizer of the GPU
    assert "8 GPUs" not in offloaded.notes[0]
    assert "on a node" in offloaded.notes[0]


@pytest.mark.parametrize("strategy", ["zeropp", "co2", "local_sgd", "diloco", "slowmo"])
def test_others_are_refused(strategy: str) -> None:
    """One line that names those which it combines with."""
    case = Case(cluster="dgx-h100", model="gpt2-small", strategy=strategy, offload="optimizer")
    with pytest.raises(OptionError, match=f"ddp, zero1, .* and fsdp; not with {strategy}"):
        case.stage()


def test_an_exported_trace_has_the_times_of_the_host() -> None:
    """In whole microseconds."""
    slow = cluster(host_memory_bandwidth=2e6)
    made = tiny.schedule("ddp", offload="optimizer")
    times = dict(zip([op.name for op in made.body], durations(made, slow, "bf16"), strict=True))
    assert times["to_host"] == 1
    assert times["optimizer"] == round(28 * M / 0.5e6 * 1e6)
