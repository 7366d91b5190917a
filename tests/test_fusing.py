"""Long rounds with fewer ops: the same times, sums and bytes as op by op."""

from typing import Any

import pytest
import tiny

from co2sim.cluster import Cluster, Link
from co2sim.compute import compute_time
from co2sim.cost import traffic
from co2sim.metrics import breakdown, communication, window
from co2sim.schedule import Compute, Schedule
from co2sim.simulator import execute
from co2sim.strategies import chaining

CLUSTERS: list[dict[str, Any]] = [
    {},
    {"interference": 0.3},
    {"call_interference": 1e-4},
    {"gpu": tiny.slow_and_shared()},
    {"inter": Link(1e9, 1e-6, busy_efficiency=0.5)},
    {"node_spread": 0.05, "step_spread": 0.03},
]


def figures(schedule: Schedule, cluster: Cluster, rounds: int = 4) -> dict[str, float]:
    """Everything that is said of a schedule on a cluster."""
    trace = execute(schedule, cluster, precision="bf16", rounds=rounds)
    during = window(trace, schedule, rounds - 1)
    seen, sent = communication(trace, schedule, during), traffic(schedule, cluster)
    return {
        "round": during.round_time,
        "busy": seen.busy,
        "waiting": seen.waiting,
        "sent": sent.gpu,
        "nic": sent.nic,
        **breakdown(trace, schedule),
    }


def computing(schedule: Schedule, cluster: Cluster) -> tuple[float, ...]:
    """Seconds, FLOP and bytes of all its works."""
    works = [op.work for op in schedule.body if isinstance(op.work, Compute)]
    seconds = sum(compute_time(work, cluster.gpu, "bf16") for work in works)
    return seconds, sum(work.flops for work in works), sum(work.memory_bytes for work in works)


def both(strategy: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Schedule, ...]:
    """The schedule op by op, and fused."""
    whole = tiny.schedule(strategy, **changes)
    monkeypatch.setattr(chaining, "_FUSED_FROM", 0)
    return whole, tiny.schedule(strategy, **changes)


@pytest.mark.parametrize("changes", CLUSTERS, ids=str)
@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_a_fused_schedule_has_the_figures_of_its_ops(
    strategy: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every strategy, with two micro-steps: round, communication, waits, bytes, time by kernel."""
    cluster = tiny.cluster(2, 2, **changes)
    whole, fused = both(strategy, monkeypatch, accumulation=2)
    assert len(fused.body) <= len(whole.body)
    assert figures(fused, cluster) == pytest.approx(figures(whole, cluster), rel=1e-9)
    assert computing(fused, cluster) == pytest.approx(computing(whole, cluster), rel=1e-12)


def test_what_is_fused_reads_like_the_ops_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes between reductions become one op each; reductions and their waits stay."""
    _, fused = both("co2(tau=2,worker=node)", monkeypatch, accumulation=2)
    names = [op.name for op in fused.body if op.name.startswith("s1.")]
    assert names == [
        "s1.m0.forward.embedding..head",
        "s1.m0.backward.head..embedding",
        "s1.m0.reduce0",
        "s1.m1.forward.embedding..head",
        "s1.m1.backward.head..embedding",
        "s1.m1.reduce0",
        "s1.optimizer",
    ]


def test_ops_that_others_wait_for_stay_the_last_of_their_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small buckets are reduced as early as before: behind their own block, not behind all."""
    whole, fused = both("zero2(bucket=700)", monkeypatch)

    def behind(schedule: Schedule) -> dict[str, str]:
        return {op.name: op.after[0].op for op in schedule.body if op.name.startswith("reduce")}

    def last(name: str) -> str:
        return name.rpartition(".")[2]

    assert len(behind(whole)) > 1
    assert {k: last(v) for k, v in behind(fused).items()} == {
        k: last(v) for k, v in behind(whole).items()
    }


def test_only_long_rounds_are_fused() -> None:
    """From 5,000 ops on; shorter ones show every block in their timeline."""
    assert "s0.forward.layer0" in {op.name for op in tiny.schedule("co2(tau=500)").body}
    assert "s0.forward.embedding..head" in {op.name for op in tiny.schedule("co2(tau=600)").body}
