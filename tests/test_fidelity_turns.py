"""Turns of a probe and a run: what predicts, and how turns are counted."""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from co2sim import Case
from co2sim.cluster import GPU, Cluster, Link
from co2sim.compute import compute_time

torch = pytest.importorskip("torch", reason="the extra `real` is not installed")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from fidelity_turns import configurations  # noqa: E402
from fidelity_turns_job import COPY, ENOUGH_TURNS, WORKS, Job, Times  # noqa: E402

OVERHEAD = 1e-5
PROCESSOR = GPU("any", 1e11, 1e10, {"fp32": 5e10}, ((1.0, 1.0),), launch_overhead=OVERHEAD)
FAST = Link(1e15, 0.0)
CLUSTER = Cluster("two", PROCESSOR, 2, 1, FAST, FAST, "gloo", "stream")


def kernels(slower: float, *factors: float) -> tuple[Times, Times]:
    """What a rank takes for the kernels of a probe, so many times as long as the cluster says.

    Before and after a run; each pass times its factor.
    """
    times = {work: compute_time(work, PROCESSOR, "fp32") for work in (*WORKS, COPY)}
    side = {
        work: [OVERHEAD + slower * factor * (time - OVERHEAD) for factor in factors or (1.0, 1.0)]
        for work, time in times.items()
    }
    return side, side


@pytest.fixture
def job() -> Job:
    """Data parallelism on links that take no time."""
    return Job.of(Case(cluster=CLUSTER, model="tiny-5m", strategy="ddp", precision="fp32"))


def test_kernels_as_the_cluster_says_predict_what_it_predicts(job: Job) -> None:
    """So the fit adds nothing of its own."""
    there = job.on([kernels(1.0), kernels(1.0)]).predicted()[0]
    assert there.round_time_s == pytest.approx(job.predicted()[0].round_time_s, rel=1e-6)


def test_the_slower_rank_sets_the_pace(job: Job) -> None:
    """Half the speed on one rank: all but launch overheads takes twice as long."""
    before = job.predicted()[0].round_time_s
    after = job.on([kernels(1.0), kernels(2.0)]).predicted()[0].round_time_s
    assert after == pytest.approx(2 * before, rel=0.01)


def test_ranks_that_differ_from_moment_to_moment_wait_for_each_other() -> None:
    """As far as the kernels around a run do: a round gets longer, though the means are the same."""
    sharded = Job.of(Case(cluster=CLUSTER, model="tiny-5m", strategy="zero3", precision="fp32"))
    steady, uneven = (sharded.on([kernels(1.0, 1 - by, 1 + by)] * 2) for by in (0.0, 0.2))
    assert (steady.jitter, uneven.jitter) == (0.0, pytest.approx(0.2 * 2**0.5, rel=0.05))
    (there,) = steady.predicted()
    longer = fmean(one.round_time_s for one in uneven.predicted()) / there.round_time_s
    assert 1.01 < longer < 1.2


def test_streams_share_the_processor_as_the_probe_says(job: Job) -> None:
    """Kernels alone cannot tell: what streams that communicate compute would cost nothing."""
    shared = replace(job.case.load()[0].value.gpu, streams="shared")
    given = Job.of(replace(job.case, cluster=replace(CLUSTER, gpu=shared)))
    assert given.on([kernels(1.0)]).prepared.cluster.gpu.streams == "shared"


def test_turns_fill_the_time_that_is_given(job: Job) -> None:
    """As many as fit, and enough for a median; without any time three."""
    assert job.turns(0.0) == 3
    assert job.turns(1.0) == ENOUGH_TURNS
    assert job.turns(10_000.0) == pytest.approx(10 * job.turns(1000.0), rel=0.05)


def test_a_configuration_counts_by_the_median_of_its_turns() -> None:
    """One turn with a stall changes nothing; rate, length and strategy tell them apart."""
    times = [(1.0, 1.02), (1.0, 1.03), (9.0, 1.04)]
    turn = {"length": 256, "kernel_s": 0.03, "jitter": 0.1}
    turn |= {"measured_busy_s": 0.1, "predicted_busy_s": 0.2}
    rows = [
        turn | {"rate": rate, "strategy": "ddp", "measured_s": seen, "predicted_s": there}
        for rate in ("1 Gbit/s", "3 Gbit/s")
        for seen, there in times
    ]
    found = configurations(rows)
    assert found["error"].tolist() == pytest.approx([0.02, 0.02])
    assert found["busy"].tolist() == pytest.approx([1.0, 1.0])
    assert found["turns"].tolist() == [3, 3]
