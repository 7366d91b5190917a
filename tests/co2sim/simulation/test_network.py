"""Flows that share links: cases worked out by hand, and what max-min fairness promises."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim.simulation.lowering import Transfer
from co2sim.simulation.network import Network, max_min_rates

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
