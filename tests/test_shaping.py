"""Shaped links: token buckets, against the virtual-scheduling form of the same algorithm."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import TypeAlias, get_args

import pytest
import simpy
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim.hardware.cluster import Cluster, Hosts, Link
from co2sim.schedule.schedule import (
    NODE,
    PEERS,
    WORLD,
    Collective,
    DType,
    Group,
    Kind,
    Op,
    Schedule,
)
from co2sim.simulation.collective_cost import footprint
from co2sim.simulation.network import Network
from co2sim.simulation.run import execute
from co2sim.simulation.token_bucket import Shaper

Loads: TypeAlias = dict[Hashable, float]

RATE = 10.0


def ends(
    flows: list[tuple[float, Loads]],
    capacity: Loads,
    bursts: Loads,
    least: float = 0.0,
    pace: float = math.inf,
    lag: float = 0.0,
) -> list[float]:
    """When each flow (start, bytes on each link) ends."""
    env = simpy.Environment()
    shapers = {link: Shaper(burst, pace, lag) for link, burst in bursts.items()}
    network = Network(env, capacity, shapers)
    found: dict[int, float] = {}

    def begin(number: int, loads: Loads) -> None:
        solo = max(size / capacity[link] for link, size in loads.items())

        def done() -> None:
            found[number] = env.now

        network.transfer(loads, 0.0, solo, done, least=least)

    for number, (start, loads) in enumerate(flows):
        timer = env.timeout(start)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _, n=number, sizes=loads: begin(n, sizes))  # type: ignore[misc]
    env.run()
    return [found[number] for number in range(len(flows))]


def test_a_burst_passes_at_once_and_is_earned_again_in_pauses() -> None:
    """100 B at 10 B/s with a burst of 40: 6 s, then 10 s, and 8 s after a pause of 2 s."""
    flows: list[tuple[float, Loads]] = [
        (0.0, {"nic": 100.0}),
        (6.0, {"nic": 100.0}),
        (18.0, {"nic": 100.0}),
    ]
    assert ends(flows, {"nic": RATE}, {"nic": 40.0}) == pytest.approx([6.0, 16.0, 26.0])


def test_hosts_need_time_for_the_bytes_of_a_burst() -> None:
    """The burst of 40 B passes at 20 B/s: 2 s. The link, idle meanwhile, earns 20 B in them.

    The other 60 B take 6 s. Two flows that come at once pass half of the burst each, together.
    """
    one: list[tuple[float, Loads]] = [(0.0, {"nic": 100.0}), (8.0, {"nic": 20.0})]
    assert ends(one, {"nic": RATE}, {"nic": 40.0}, pace=20.0) == pytest.approx([8.0, 9.0])
    two: list[tuple[float, Loads]] = [(0.0, {"nic": 20.0}), (0.0, {"nic": 20.0})]
    assert ends(two, {"nic": RATE}, {"nic": 40.0}, pace=20.0) == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(("lag", "times"), [(0.1, [6.6, 16.6]), (1.0, [10.0, 20.0])])
def test_what_outlives_its_burst_falls_behind(lag: float, times: list[float]) -> None:
    """Of 100 B 40 pass at once. 6 s are left, and a tenth more: these 6 B are there for the next.

    It passes them at once, and loses as many again. No flow loses more than its burst gained.
    """
    flows: list[tuple[float, Loads]] = [(0.0, {"nic": 100.0}), (times[0], {"nic": 100.0})]
    assert ends(flows, {"nic": RATE}, {"nic": 40.0}, lag=lag) == pytest.approx(times)
    small: list[tuple[float, Loads]] = [(0.0, {"nic": 40.0}), (0.0, {"gpu": 10.0})]
    assert ends(small, {"nic": RATE, "gpu": 1.0}, {"nic": 40.0}, lag=lag) == [0.0, 10.0]


@given(
    st.floats(0.0, 60.0),
    st.lists(st.tuples(st.floats(0.01, 12.0), st.floats(1.0, 200.0)), min_size=1, max_size=8),
)
def test_one_after_the_other_agrees_with_virtual_scheduling(
    burst: float, sizes: list[tuple[float, float]]
) -> None:
    """The oracle is the generic cell rate algorithm (ITU-T I.371), which keeps no credit at all.

    A byte may leave when the theoretical arrival time is at most burst / rate ahead.
    """
    due, now = 0.0, 0.0
    flows: list[tuple[float, Loads]] = []
    expected = []
    for pause, size in sizes:
        now += pause
        flows.append((now, {"nic": size}))
        due = max(due, now) + size / RATE
        now = max(now, due - burst / RATE)
        expected.append(now)
    assert ends(flows, {"nic": RATE}, {"nic": burst} if burst else {}) == pytest.approx(expected)


# --- collectives ---------------------------------------------------------------------------------

LATENCY = 1e-3


def shaped(
    nodes: int,
    burst: float,
    per_node: int = 1,
    pace: float | None = None,
    hosts: Hosts = "apart",
    lag: float = 0.0,
) -> Cluster:
    """1 MB/s between nodes, 4 MB/s inside, 1 ms a step, Gloo, the same burst on every link."""
    return tiny.cluster(
        nodes,
        per_node,
        intra=Link(4e6, LATENCY, burst=burst, burst_bandwidth=pace, burst_lag=lag),
        inter=Link(1e6, LATENCY, burst=burst, burst_bandwidth=pace, burst_lag=lag),
        backend="gloo",
        hosts=hosts,
    )


def in_a_row(kind: Kind, size: int, cluster: Cluster, count: int, group: Group = WORLD) -> float:
    """Seconds of some equal collectives, one right after the other."""
    work = Collective(kind, "x", size, DType.INT8, group)
    body = Schedule("row", tuple(Op(f"{number}", work, "comm") for number in range(count)))
    trace = execute(body, cluster, precision="bf16", rounds=1, fold=False)
    return max(span.end for span in trace.spans)


@given(
    st.sampled_from(list(Kind)),
    st.integers(1, 200_000),
    st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (1, 2)]),
    st.sampled_from([0.0, 300.0, 2_000.0, 50_000.0]),
    st.sampled_from([None, 3e6, 2e7]),
    st.sampled_from(get_args(Hosts)),
    st.sampled_from([0.0, 0.15, 2.0]),
)
def test_alone_is_what_the_simulation_takes_after_a_pause(
    kind: Kind,
    size: int,
    layout: tuple[int, int],
    burst: float,
    pace: float | None,
    hosts: Hosts,
    lag: float,
) -> None:
    """The closed form of the cost model, and the network event by event.

    A burst that passes at once slows nothing. Whether hosts are shared changes nothing for one
    collective alone.
    """
    cluster = shaped(layout[0], burst, layout[1], pace, hosts, lag)
    work = Collective(kind, "x", size, DType.INT8, WORLD)
    alone = footprint(work, cluster).alone(cluster)
    assert in_a_row(kind, size, cluster, 1) == pytest.approx(alone, rel=1e-9)
    plain = shaped(layout[0], 0.0, layout[1])
    assert footprint(work, cluster).latency <= alone
    if pace is None:
        assert alone <= footprint(work, plain).alone(plain) * (1 + 1e-12)


@pytest.mark.parametrize("burst", [0.0, 2_000.0])
def test_collectives_in_flight_share_a_host(burst: float) -> None:
    """Two all-gathers of 100 B, three steps of 1 ms each: 3 ms both, on one machine 6 ms.

    Large ones share the link anyway: 2 x 30 ms for 3/4 of 40 kB at 1 MB/s, and their steps beside.
    """

    def both(size: int, hosts: Hosts) -> float:
        work = Collective(Kind.ALL_GATHER, "x", size, DType.INT8, WORLD)
        body = Schedule("both", tuple(Op(stream, work, stream) for stream in ("a", "b")))
        cluster = shaped(4, burst, hosts=hosts)
        trace = execute(body, cluster, precision="bf16", rounds=1, fold=False)
        return max(span.end for span in trace.spans)

    small = (0.0 if burst else 2 * 75e-6) + 3 * LATENCY
    assert both(100, "apart") == pytest.approx(small)
    assert both(100, "shared") == pytest.approx(small + 3 * LATENCY)
    apart, shared = both(40_000, "apart"), both(40_000, "shared")
    assert 60e-3 - 2e-3 <= apart <= shared <= apart + 3 * LATENCY


def test_every_collective_takes_the_overhead_of_a_call() -> None:
    """On top of steps and bytes, in the closed form and simulated; a rank alone calls nobody."""
    plain = shaped(4, 2_000.0)
    slow = replace(plain, call_overhead=5e-3)
    for size in (100, 40_000):
        before, after = (in_a_row(Kind.ALL_GATHER, size, one, 1) for one in (plain, slow))
        assert after == pytest.approx(before + 5e-3)
    work = Collective(Kind.ALL_GATHER, "x", 100, DType.INT8, WORLD)
    assert footprint(work, replace(shaped(1, 0.0), call_overhead=5e-3)).latency == 0


@given(st.sampled_from([WORLD, NODE, PEERS]), st.sampled_from(get_args(Hosts)))
def test_folded_and_unfolded_ranks_share_bursts_and_hosts_alike(group: Group, hosts: Hosts) -> None:
    """Groups of one kind: each gets the same part of the credit, and of the machine."""
    work = Collective(Kind.ALL_GATHER, "x", 10_000, DType.INT8, group)
    body = Schedule("both", tuple(Op(stream, work, stream) for stream in ("a", "b")))
    cluster = shaped(3, 2_000.0, 2, 2e7, hosts)
    folded, unfolded = (
        {
            round(span.end, 12)
            for span in execute(body, cluster, precision="bf16", rounds=2, fold=fold).spans
        }
        for fold in (True, False)
    )
    assert sorted(folded) == pytest.approx(sorted(unfolded))
