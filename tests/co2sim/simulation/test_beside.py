"""Jobs that share uplinks: what they lose is what links that are full leave them."""

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim.hardware.cluster import Cluster, Link
from co2sim.hardware.fabric import Fabric, Tier
from co2sim.schedule.schedule import WORLD, Collective, Compute, DType, Kind, Op, Schedule
from co2sim.simulation.beside import Meeting, Sharer

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
        assert one.alone == pytest.approx(0.5e-3)
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
