"""Which engine runs a schedule, and that all of them give the same times."""

from collections.abc import Mapping

import numpy as np
import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st
from test_simulator import schedules

from co2sim import lockstep
from co2sim.cluster import Cluster, Link
from co2sim.lowering import Lowered, lower
from co2sim.noise import Noise
from co2sim.schedule import Schedule
from co2sim.sharing import shared_works
from co2sim.simulator import _run, _Simulation

LINKS = {"intra": Link(10e9, 1e-7), "inter": Link(1e9, 1e-6)}
BUSY = LINKS | {"inter": Link(1e9, 1e-6, busy_efficiency=0.4)}
WAN = {"sites": 2, "wan": Link(1e8, 1e-5)}
JITTER = Noise(jitter=0.1)


def lowered(
    schedule: Schedule, cluster: Cluster, noise: Noise, rounds: int = 4, *, free: bool = False
) -> Lowered:
    """The schedule on the cluster, ranks folded where they can be."""
    return lower(
        schedule, cluster, precision="bf16", rounds=rounds, noise=noise, fold=True, free=free
    )


def same(work: Lowered) -> None:
    """The engine that is chosen gives the starts and ends of SimPy."""
    for quick, simulated in zip(_run(work, None), _Simulation(work).run(None), strict=True):
        np.testing.assert_allclose(quick, simulated, rtol=1e-12, atol=0)


def in_lockstep(work: Lowered) -> bool:
    """Whether the ranks advance in lockstep."""
    return lockstep.applies(work, shared_works(work))


noises = st.sampled_from(
    [Noise(), JITTER, Noise(straggle=0.3), Noise(node_speed={0: 0.5}, jitter=0.1)]
)


@given(
    schedules(),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    noises,
    st.sampled_from(["nccl", "gloo"]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
)
def test_random_schedules_take_what_simpy_simulates(
    schedule: Schedule,
    shape: tuple[int, int],
    noise: Noise,
    backend: str,
    busy: float,
    free: bool,  # noqa: FBT001
) -> None:
    """Whatever streams, waits and groups."""
    inter = Link(1e9, 1e-6, busy_efficiency=busy)
    cluster = tiny.cluster(*shape, **LINKS | {"inter": inter}, backend=backend)
    same(lowered(schedule, cluster, noise, free=free))


@given(
    st.sampled_from(tiny.VARIANTS),
    st.sampled_from(
        [LINKS, LINKS | {"backend": "gloo"}, LINKS | {"all_reduce": "hierarchical"}, LINKS | WAN]
    ),
    noises,
    st.sampled_from(["free", "paid"]),
)
@example("ddp", LINKS, JITTER, "paid")
@example("local_sgd(tau=3)", LINKS | WAN, Noise(straggle=0.2), "paid")
@example("overlap_local_sgd(tau=3)", LINKS, JITTER, "paid")
@example("diloco(tau=4,fragments=2,delay=1)", LINKS, JITTER, "paid")
@example("co2(tau=9,worker=node)", BUSY, JITTER, "paid")
@example("zero3", LINKS | {"interference": 0.5}, JITTER, "free")
@example("zeropp", LINKS | {"interference": 0.5, "gpu": tiny.slow_and_shared()}, JITTER, "free")
def test_strategies_take_what_simpy_simulates(
    strategy: str, changes: Mapping[str, object], noise: Noise, transfers: str
) -> None:
    """Jitter, stragglers, shared NICs, several sites, free communication."""
    schedule, cluster = tiny.schedule(strategy, (4, 2)), tiny.cluster(4, 2, **changes)
    work = lowered(schedule, cluster, noise, free=transfers == "free")
    same(work)
    assert in_lockstep(work) or transfers == "paid" or "gpu" in changes


@pytest.mark.parametrize("strategy", ["ddp", "zero2(bucket=700)", "co2(tau=9)", "local_sgd(tau=3)"])
def test_collectives_that_follow_each_other_run_in_lockstep(strategy: str) -> None:
    """Nothing else is on their links."""
    assert in_lockstep(
        lowered(tiny.schedule(strategy, (4, 2)), tiny.cluster(4, 2, **LINKS), JITTER)
    )


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("ddp", {"interference": 0.3}),
        ("ddp", {"call_interference": 1e-4}),
        ("ddp", {"inter": BUSY["inter"]}),
        ("zeropp", {"gpu": tiny.slow_and_shared()}),
        ("zero3", {}),
        ("co2(tau=2,worker=node,average=leader)", {}),
    ],
)
def test_what_depends_on_the_order_on_links_is_left_to_simpy(
    strategy: str, changes: Mapping[str, object]
) -> None:
    """Collectives that may meet on links, and compute that is slowed down."""
    cluster = tiny.cluster(4, 2, **{**LINKS, **changes})
    assert not in_lockstep(lowered(tiny.schedule(strategy, (4, 2)), cluster, JITTER))
