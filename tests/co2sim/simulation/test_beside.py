"""Jobs that share uplinks: what they lose is what links that are full leave them."""

from collections.abc import Generator, Hashable, Mapping
from statistics import fmean

import pytest
import simpy
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster, Link
from co2sim.hardware.fabric import Fabric, Tier
from co2sim.schedule.schedule import WORLD, Collective, Compute, DType, Kind, Op, Schedule
from co2sim.simulation import beside
from co2sim.simulation.beside import Meeting, SharedNetwork, Sharer
from co2sim.simulation.costs import cost_of
from co2sim.simulation.lowering import Transfer
from co2sim.simulation.network import Network

SIZE = 1_000_000


def cluster(nodes: int = 2, *, oversubscription: float = 4.0, **fabric: object) -> Cluster:
    """Nodes of one GPU with 1 GB/s, two of the four of each leaf; uplinks have 1 GB/s in all."""
    leaf = Tier(4, oversubscription)
    return tiny.cluster(
        nodes, 1, inter=Link(1e9, 0.0), fabric=Fabric(leaf, share=0.25, **fabric)
    )  # fmt: skip


def repeated(*works: Compute | Collective) -> Schedule:
    """A round of works, one after the other."""
    return Schedule("job", tuple(Op(f"op{n}", work, "main") for n, work in enumerate(works)), 1)


EXCHANGE = Collective(Kind.ALL_GATHER, "x", SIZE, DType.INT8, WORLD)
"""Half of the bytes leave each of two nodes: 0.5 ms."""


def compute(seconds: float) -> Compute:
    """On a GPU of 1 TFLOP/s."""
    return Compute("work", seconds * 1e12)


def test_two_jobs_that_only_communicate_have_half_each() -> None:
    """Uplinks as fast as one network card: each takes twice as long, always beside the other."""
    job = Sharer(repeated(EXCHANGE), cluster(), "bf16")
    for one in Meeting([job, job], draws=2).run():
        assert one.alone == pytest.approx([0.5e-3] * 2)
        assert one.slowdown == pytest.approx(2)
        assert one.meets == pytest.approx(1)
        assert one.uses == pytest.approx(1)


@given(st.integers(1, 3), st.floats(1, 8))
def test_jobs_lose_nothing_where_uplinks_hold_them_all(others: int, wide: float) -> None:
    """As long as all cards together have no more than the uplinks."""
    on = cluster(oversubscription=4 / (others + 1) / wide)
    job = Sharer(repeated(EXCHANGE, compute(1e-4)), on, "bf16")
    for one in Meeting([job] * (1 + others), draws=1).run():
        assert one.worst == pytest.approx(1)


def test_a_job_that_computes_half_of_the_time_slows_less_down() -> None:
    """Beside one that always communicates, 0.5 ms of its round of 1 ms become 1 ms: by half."""
    busy = Sharer(repeated(EXCHANGE), cluster(), "bf16")
    half = Sharer(repeated(EXCHANGE, compute(0.5e-3)), cluster(), "bf16")
    first, second = Meeting([half, busy], draws=3).run()
    assert first.slowdown == pytest.approx(1.5, rel=1e-2)
    assert first.meets == pytest.approx(2 / 3, rel=5e-2)
    assert second.slowdown == pytest.approx(1.5, rel=5e-2)


def test_jobs_with_their_own_leaves_never_meet() -> None:
    """A group inside a leaf uses no uplink."""
    inside = tiny.cluster(2, 1, inter=Link(1e9, 0.0), fabric=Fabric(Tier(4, 4.0), share=0.5))
    job = Sharer(repeated(EXCHANGE), inside, "bf16")
    for one in Meeting([job, job], draws=1).run():
        assert (one.worst, one.meets, one.uses) == (pytest.approx(1), 0, 0)


def test_hashed_connections_meet_as_often_as_is_counted() -> None:
    """Two connections on two uplinks, in two pods: 1.75 of them in the mean, drawn or counted."""
    fabric = Fabric(Tier(1, 1.0, speed=0.5e9), paths="hashed", flows=2)
    on = tiny.cluster(2, 1, inter=Link(1e9, 0.0), fabric=fabric)
    alone = fmean(Meeting([Sharer(repeated(EXCHANGE), on, "bf16")], draws=400).run()[0].alone)
    assert cost_of(EXCHANGE, on).duration_alone(on) == pytest.approx(1.75 * 0.5e-3)
    assert alone == pytest.approx(1.75 * 0.5e-3, rel=0.05)


def test_jobs_meet_on_single_uplinks_where_paths_are_hashed() -> None:
    """With an uplink for each of both, they meet half of the time in each of two pods."""
    fabric = Fabric(Tier(2, 1.0), share=0.5, paths="hashed", flows=1)
    on = tiny.cluster(2, 1, inter=Link(1e9, 0.0), fabric=fabric)
    job = Sharer(repeated(EXCHANGE), on, "bf16")
    one, other = Meeting([job, job], draws=200).run()
    assert one.slowdown == pytest.approx(1.75, rel=0.05)
    assert one.worst == pytest.approx(2)
    assert other.slowdown == pytest.approx(one.slowdown)
    assert min(one.rounds) >= min(one.alone) * (1 - 1e-9)


SIZES = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 3), min_size=1)
"""Connections of a transfer on each of its links."""


@given(st.lists(SIZES, min_size=1, max_size=4), st.lists(st.integers(0, 30), max_size=12))
def test_links_that_hold_nobody_back_and_rates_that_recur_change_nothing(
    shapes: list[dict[str, int]], begins: list[int]
) -> None:
    """Transfers of a few shapes in two sizes end as on a network that solves them all."""
    transfers = [
        Transfer({link: size * n for link, n in on.items()}, on, 0.0, max(on.values()) * size / 1e3)
        for on in shapes
        for size in (1e3, 2e3)
    ]

    def ends(network_type: type[Network]) -> list[float]:
        env, done = simpy.Environment(), [0.0] * len(begins)
        network = network_type(env, dict.fromkeys("abcde", 1e3))

        def begin(index: int) -> Generator[simpy.Event]:
            yield env.timeout(begins[index] / 7)
            network.transfer(
                transfers[index % len(transfers)],
                lambda: done.__setitem__(index, env.now),
            )

        for index in range(len(begins)):
            env.process(begin(index))
        env.run()
        return done

    assert ends(SharedNetwork) == pytest.approx(ends(Network), rel=1e-6)


def test_only_uplinks_that_can_hold_a_job_back_are_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 32 in eight pods a job alone has one that is as full as any: the others are left out."""
    networks = list[Mapping[Hashable, float]]()

    class Noted(SharedNetwork):
        def __init__(self, env: simpy.Environment, capacity: Mapping[Hashable, float]) -> None:
            networks.append(capacity)
            super().__init__(env, capacity)

    monkeypatch.setattr(beside, "SharedNetwork", Noted)
    fabric = Fabric(Tier(4, 1.0), share=0.25, paths="hashed", flows=8)
    on = tiny.cluster(8, 1, inter=Link(1e9, 0.0), fabric=fabric)
    Meeting([Sharer(repeated(EXCHANGE), on, "bf16")], draws=1).run()
    assert [sum(link[0] == "leaf" for link in links) for links in networks] == [1, 1]


def test_draws_end_where_they_do_not_differ() -> None:
    """Four of jobs that always communicate; all eight of those that meet on one uplink or not."""
    job = Sharer(repeated(EXCHANGE), cluster(), "bf16")
    assert len(Meeting([job, job]).run()[0].rounds) == 4
    fabric = Fabric(Tier(2, 1.0), share=0.5, paths="hashed", flows=1)
    on = tiny.cluster(2, 1, inter=Link(1e9, 0.0), fabric=fabric)
    hashed = Sharer(repeated(EXCHANGE), on, "bf16")
    assert len(Meeting([hashed, hashed]).run()[0].rounds) == 8


def test_more_ops_than_can_be_simulated_are_refused() -> None:
    """A job of very short rounds beside one of long ones."""
    short = Sharer(repeated(compute(1e-7)), cluster(), "bf16")
    long = Sharer(repeated(EXCHANGE, compute(10.0)), cluster(), "bf16")
    with pytest.raises(OptionError):
        Meeting([short, long]).run()
