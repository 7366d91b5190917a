"""Hosts that were idle: the first collective after a pause takes longer."""

from dataclasses import replace

import pytest
import tiny

from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster, Link
from co2sim.schedule.schedule import WORLD, After, Collective, Compute, DType, Kind, Op, Schedule
from co2sim.simulation.processor import FULLY_IDLE, Hosts
from co2sim.simulation.run import execute

WAKE, STEP = 1e-3, 0.2e-3
GATHER = Collective(Kind.ALL_GATHER, "x", 1, DType.INT8, WORLD)


def cluster(wake_up: float = WAKE) -> Cluster:
    """Two nodes on one machine; a step takes 0.2 ms, bytes next to nothing."""
    link = Link(1e15, STEP)
    return tiny.cluster(2, 1, inter=link, backend="gloo", hosts="shared", wake_up=wake_up)


def ends(body: Schedule, on: Cluster, rounds: int = 1, *, fold: bool = False) -> dict[str, float]:
    """When the ops of the last round end, in ms from its first start."""
    trace = execute(body, on, precision="bf16", rounds=rounds, fold=fold)
    last = [span for span in trace.spans if span.round == rounds - 1]
    begin = min(span.start for span in last)
    return {span.op: (span.end - begin) * 1e3 for span in last}


@pytest.mark.parametrize(("pause", "wait"), [(1e-3, 0.2), (4e-3, 0.8), (5e-3, 1.0), (1.0, 1.0)])
def test_the_longer_the_pause_the_longer_it_takes(pause: float, wait: float) -> None:
    """In proportion, up to 5 ms of idleness."""
    on = cluster()
    kernel = Compute("pause", pause * on.gpu.peak["bf16"])
    ops = Op("first", GATHER, "comm"), Op("pause", kernel, "compute", (After("first"),))
    body = Schedule("pause", (*ops, Op("second", GATHER, "comm", (After("pause"),))))
    seconds = ends(replace(body), on)
    length = seconds["pause"] - seconds["first"]
    assert min(1.0, length * 1e-3 / FULLY_IDLE) == pytest.approx(wait, rel=0.01)
    assert seconds["second"] - seconds["pause"] == pytest.approx(wait + 0.2, rel=0.01)


def test_what_starts_while_hosts_wake_up_waits_for_the_same_moment() -> None:
    """One that starts after 0.4 of 1 ms waits for the other 0.6; no collective wakes them twice."""
    hosts = Hosts(WAKE)
    assert hosts.begin(7.0) == pytest.approx(WAKE)
    assert hosts.begin(7.0004) == pytest.approx(0.6e-3)
    assert hosts.begin(7.002) == 0
    for _ in range(3):
        hosts.end(7.003)
    assert hosts.begin(7.003) == 0
    hosts.end(7.003)
    assert hosts.begin(7.003 + FULLY_IDLE / 2) == pytest.approx(WAKE / 2)


def test_hosts_of_their_own_do_not_wake_up_together() -> None:
    """It is simulated for one machine only; one line says so."""
    with pytest.raises(OptionError, match=r"wake_up is 0\.001 s, but hosts are apart"):
        replace(cluster(), hosts="apart")
