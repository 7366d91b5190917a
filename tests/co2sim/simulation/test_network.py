"""Flows that share links: worked out by hand, by what fairness promises, and on one machine."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import simpy
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim.hardware.cluster import FULLY_IDLE, Cluster, HostEffects, Link, TokenBucket
from co2sim.schedule.schedule import (
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Op,
    Schedule,
)
from co2sim.simulation.costs import cost_of
from co2sim.simulation.lowering import Transfer
from co2sim.simulation.network import Network, max_min_rates
from co2sim.simulation.one_machine import Cores, HostNetwork, HostTransfer
from co2sim.simulation.run import execute
from co2sim.simulation.token_bucket import Shaper

Loads = Mapping[Hashable, float]
LINKS = ("a", "b", "c", "d", "e")


def finish_times(
    flows: list[tuple[float, Loads]],
    capacity: Mapping[Hashable, float],
    network: Callable[..., Any] = Network,
    transfer: Callable[[Loads, float], Any] = lambda loads, solo: Transfer(loads, {}, 0.0, solo),
) -> list[float]:
    """When each flow (start, bytes on each link) ends."""
    env = simpy.Environment()
    links = network(env, capacity)
    ends: dict[int, float] = {}

    def begin(number: int, loads: Loads) -> None:
        solo = max(size / capacity[link] for link, size in loads.items())
        links.transfer(transfer(loads, solo), lambda: ends.setdefault(number, env.now))

    for number, (start, loads) in enumerate(flows):
        timer = env.timeout(start)
        timer.callbacks.append(lambda _, n=number, sizes=loads: begin(n, sizes))
    env.run()
    return [ends[number] for number in range(len(flows))]


def test_a_flow_alone_takes_latency_and_its_slowest_link() -> None:
    """Alone, a flow takes its latency and the longest time of any of its links."""
    late = lambda loads, solo: Transfer(loads, {}, 0.5, solo)  # noqa: E731
    capacity = {"gpu": 10, "nic": 20}
    assert finish_times([(0, {"gpu": 30, "nic": 40})], capacity, transfer=late) == [3.5]


def test_a_link_that_changes_its_capacity_changes_the_rates_on_it() -> None:
    """100 B: 2 s at 10 B/s, 4 s at 5, the rest at 10 again; a flow that comes later is slow, too.

    A flow of 20 B comes at 3 s: both get 2.5 B/s until 6 s, then 5 B/s.
    """
    env = simpy.Environment()
    network = Network(env, {"nic": 10.0})
    ends: dict[str, float] = {}

    def send(name: str, size: float) -> None:
        what = Transfer({"nic": size}, {}, 0.0, size / 10)
        network.transfer(what, lambda: ends.setdefault(name, env.now))

    for at, call in (
        (0, lambda: send("a", 100.0)),
        (2, lambda: network.resize("nic", 5.0)),
        (3, lambda: send("b", 20.0)),
        (6, lambda: network.resize("nic", 10.0)),
    ):
        timer = env.timeout(at)
        timer.callbacks.append(lambda _, do=call: do())
    env.run()
    # a has 100 - 20 - 5 - 7.5 = 67.5 B left at 6 s, b 12.5 B: done at 8.5 s, then a has 55 B
    assert ends == pytest.approx({"b": 8.5, "a": 8.5 + 5.5})


def fluid(
    flows: list[tuple[float, frozenset[str], float]], capacity: Mapping[Hashable, float]
) -> list[float]:
    """When each flow (start, path, bytes) ends, if all rates are set anew at every event."""
    left = {number: size for number, (_, _, size) in enumerate(flows)}
    ends, now = [0.0] * len(flows), 0.0
    while left:
        active = [n for n in left if flows[n][0] <= now]
        rates = max_min_rates([dict.fromkeys(flows[n][1], 1.0) for n in active], capacity)
        done = [now + left[n] / rate for n, rate in zip(active, rates, strict=True)]
        then = min([*done, *(flows[n][0] for n in left if flows[n][0] > now)])
        for number, rate, end in zip(active, rates, done, strict=True):
            left[number] -= rate * (then - now)
            if end <= then * (1 + 1e-12):
                ends[number] = then
                del left[number]
        now = then
    return ends


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 8).map(float),
            st.frozensets(st.sampled_from(LINKS), min_size=1, max_size=3),
            st.integers(1, 50).map(float),
        ),
        min_size=1,
        max_size=7,
    ),
    st.fixed_dictionaries({link: st.integers(1, 20).map(float) for link in LINKS}),
)
def test_flows_end_as_in_a_fluid_whose_rates_are_all_set_anew_at_every_event(
    flows: list[tuple[float, frozenset[str], float]], capacity: dict[str, float]
) -> None:
    """Flows that share links through others have their rates changed, too, and at the time.

    The rates are fair ones, as the next test says; bytes are the same on all links of a flow.
    """
    loads: list[tuple[float, Loads]] = [
        (start, dict.fromkeys(path, size)) for start, path, size in flows
    ]
    assert finish_times(loads, capacity) == pytest.approx(fluid(flows, capacity), rel=1e-9)


capacities = st.fixed_dictionaries({link: st.floats(0.1, 100.0) for link in LINKS})
sizes = st.dictionaries(st.sampled_from(LINKS), st.floats(0.1, 100.0), min_size=1)
loads_of_flows = st.lists(sizes, min_size=1, max_size=7)


def used(loads: list[dict[str, float]], rates: list[float]) -> dict[str, float]:
    """Bytes per second on each link."""
    return {
        link: sum(rate * flow.get(link, 0.0) for flow, rate in zip(loads, rates, strict=True))
        for link in LINKS
    }


@given(loads_of_flows, capacities)
def test_rates_are_feasible_and_every_flow_has_a_bottleneck(
    loads: list[dict[str, float]], capacity: dict[str, float]
) -> None:
    """No link is overfull, and every flow crosses a full one where nobody gets more than it.

    That is the definition of max-min fairness (Bertsekas and Gallager, Data Networks, 6.5.2).
    """
    rates = max_min_rates(loads, capacity)
    total = used(loads, rates)
    assert all(total[link] <= capacity[link] * (1 + 1e-6) for link in LINKS)
    for flow, rate in zip(loads, rates, strict=True):
        assert any(
            total[link] >= capacity[link] * (1 - 1e-6)
            and all(
                rate * size >= other_rate * other[link] * (1 - 1e-6)
                for other, other_rate in zip(loads, rates, strict=True)
                if link in other
            )
            for link, size in flow.items()
        )


# --- one machine as a cluster: token buckets, and cores ---------------------------------------


RATE = 10.0


def ends(
    flows: list[tuple[float, Loads]],
    capacity: Loads,
    bursts: Loads,
    pace: float = math.inf,
    lag: float = 0.0,
) -> list[float]:
    """When each flow (start, bytes on each link) ends."""
    shapers = {link: Shaper(size, capacity[link], pace, lag) for link, size in bursts.items()}
    return finish_times(
        flows,
        capacity,
        lambda env, links: HostNetwork(env, links, shapers),
        lambda loads, solo: HostTransfer(loads, {}, 0.0, solo, 0.0),
    )


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
    *,
    one_machine: bool = False,
    lag: float = 0.0,
) -> Cluster:
    """1 MB/s between nodes, 4 MB/s inside, 1 ms a step, Gloo, the same burst on every link."""
    bucket = TokenBucket(burst, pace, lag) if burst else None
    return tiny.cluster(
        nodes,
        per_node,
        intra=Link(4e6, LATENCY),
        inter=Link(1e6, LATENCY),
        backend="gloo",
        host=HostEffects(one_machine, intra=bucket, inter=bucket),
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
    st.booleans(),
    st.sampled_from([0.0, 0.15, 2.0]),
)
def test_alone_is_what_the_simulation_takes_after_a_pause(
    kind: Kind,
    size: int,
    layout: tuple[int, int],
    burst: float,
    pace: float | None,
    one_machine: bool,  # noqa: FBT001 - Hypothesis gives it
    lag: float,
) -> None:
    """The closed form of the cost model, and the network event by event.

    A burst that passes at once slows nothing. One collective alone shares the cores with none.
    """
    cluster = shaped(layout[0], burst, layout[1], pace, one_machine=one_machine, lag=lag)
    work = Collective(kind, "x", size, DType.INT8, WORLD)
    alone = cost_of(work, cluster).duration_alone(cluster)
    assert in_a_row(kind, size, cluster, 1) == pytest.approx(alone, rel=1e-9)
    plain = shaped(layout[0], 0.0, layout[1])
    assert cost_of(work, cluster).latency <= alone
    if pace is None:
        assert alone <= cost_of(work, plain).duration_alone(plain) * (1 + 1e-12)


@pytest.mark.parametrize("burst", [0.0, 2_000.0])
def test_collectives_in_flight_share_a_host(burst: float) -> None:
    """Two all-gathers of 100 B, three steps of 1 ms each: 3 ms both, on one machine 6 ms.

    Large ones share the link anyway: 2 x 30 ms for 3/4 of 40 kB at 1 MB/s, and their steps beside.
    """

    def both(size: int, *, one_machine: bool) -> float:
        work = Collective(Kind.ALL_GATHER, "x", size, DType.INT8, WORLD)
        body = Schedule("both", tuple(Op(stream, work, stream) for stream in ("a", "b")))
        cluster = shaped(4, burst, one_machine=one_machine)
        trace = execute(body, cluster, precision="bf16", rounds=1, fold=False)
        return max(span.end for span in trace.spans)

    small = (0.0 if burst else 2 * 75e-6) + 3 * LATENCY
    assert both(100, one_machine=False) == pytest.approx(small)
    assert both(100, one_machine=True) == pytest.approx(small + 3 * LATENCY)
    apart, shared = (both(40_000, one_machine=one) for one in (False, True))
    assert 60e-3 - 2e-3 <= apart <= shared <= apart + 3 * LATENCY


def test_every_collective_takes_the_overhead_of_a_call() -> None:
    """On top of steps and bytes, in the closed form and simulated; a rank alone calls nobody."""
    plain = shaped(4, 2_000.0)
    slow = replace(plain, call_overhead=5e-3)
    for size in (100, 40_000):
        before, after = (in_a_row(Kind.ALL_GATHER, size, one, 1) for one in (plain, slow))
        assert after == pytest.approx(before + 5e-3)
    work = Collective(Kind.ALL_GATHER, "x", 100, DType.INT8, WORLD)
    assert cost_of(work, replace(shaped(1, 0.0), call_overhead=5e-3)).latency == 0


@given(st.sampled_from([WORLD, NODE, PEERS]), st.booleans())
def test_folded_and_unfolded_ranks_share_bursts_and_cores_alike(
    group: Group,
    one_machine: bool,  # noqa: FBT001 - Hypothesis gives it
) -> None:
    """Groups of one kind: each gets the same part of the credit, and of the machine."""
    work = Collective(Kind.ALL_GATHER, "x", 10_000, DType.INT8, group)
    body = Schedule("both", tuple(Op(stream, work, stream) for stream in ("a", "b")))
    cluster = shaped(3, 2_000.0, 2, 2e7, one_machine=one_machine)
    folded, unfolded = (
        {
            round(span.end, 12)
            for span in execute(body, cluster, precision="bf16", rounds=2, fold=fold).spans
        }
        for fold in (True, False)
    )
    assert sorted(folded) == pytest.approx(sorted(unfolded))


# --- cores that sleep -----------------------------------------------------------------------------

WAKE, STEP = 1e-3, 0.2e-3
GATHER = Collective(Kind.ALL_GATHER, "x", 1, DType.INT8, WORLD)


@pytest.mark.parametrize(("pause", "wait"), [(1e-3, 0.2), (4e-3, 0.8), (5e-3, 1.0), (1.0, 1.0)])
def test_the_longer_the_pause_the_longer_it_takes(pause: float, wait: float) -> None:
    """In proportion, up to 5 ms of idleness."""
    host = HostEffects(one_machine=True, wake_up=WAKE)
    on = tiny.cluster(2, 1, inter=Link(1e15, STEP), backend="gloo", host=host)
    kernel = Compute("pause", pause * on.gpu.peak["bf16"])
    ops = Op("first", GATHER, "comm"), Op("pause", kernel, "compute", (After("first"),))
    body = Schedule("pause", (*ops, Op("second", GATHER, "comm", (After("pause"),))))
    trace = execute(body, on, precision="bf16", rounds=1, fold=False)
    seconds = {span.op: span.end * 1e3 for span in trace.spans}
    length = seconds["pause"] - seconds["first"]
    assert min(1.0, length * 1e-3 / FULLY_IDLE) == pytest.approx(wait, rel=0.01)
    assert seconds["second"] - seconds["pause"] == pytest.approx(wait + 0.2, rel=0.01)


def test_what_starts_while_hosts_wake_up_waits_for_the_same_moment() -> None:
    """One that starts after 0.4 of 1 ms waits for the other 0.6; no collective wakes them twice."""
    hosts = Cores(WAKE)
    assert hosts.begin(7.0) == pytest.approx(WAKE)
    assert hosts.begin(7.0004) == pytest.approx(0.6e-3)
    assert hosts.begin(7.002) == 0
    for _ in range(3):
        hosts.end(7.003)
    assert hosts.begin(7.003) == 0
    hosts.end(7.003)
    assert hosts.begin(7.003 + FULLY_IDLE / 2) == pytest.approx(WAKE / 2)
