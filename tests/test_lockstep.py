"""Lockstep: the same times as SimPy, bit for bit, or a plain word that it cannot be."""

from collections.abc import Mapping

import numpy as np
import pytest
import tiny
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from test_simulator import schedules

from co2sim import lockstep
from co2sim.cluster import Cluster, Link
from co2sim.lowering import Lowered, lower
from co2sim.noise import Noise
from co2sim.schedule import Schedule
from co2sim.simulator import _Simulation

LINKS = {"intra": Link(10e9, 1e-7), "inter": Link(1e9, 1e-6)}


def lowered(
    schedule: Schedule, cluster: Cluster, noise: Noise, rounds: int = 4, *, free: bool = False
) -> Lowered:
    """The schedule on the cluster, ranks folded where they can be."""
    return lower(
        schedule, cluster, precision="bf16", rounds=rounds, noise=noise, fold=True, free=free
    )


def same(work: Lowered) -> None:
    """Both engines give the same starts and ends."""
    for quick, simulated in zip(lockstep.run(work), _Simulation(work).run(None), strict=True):
        np.testing.assert_allclose(quick, simulated, rtol=1e-12, atol=0)


noises = st.sampled_from(
    [Noise(), Noise(jitter=0.2), Noise(straggle=0.3), Noise(node_speed={0: 0.5}, jitter=0.1)]
)


@settings(max_examples=200)
@given(
    schedules(),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    noises,
    st.sampled_from(["nccl", "gloo"]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
)
def test_on_random_schedules_lockstep_is_what_simpy_simulates(
    schedule: Schedule,
    shape: tuple[int, int],
    noise: Noise,
    backend: str,
    busy: float,
    free: bool,  # noqa: FBT001
) -> None:
    """Whatever streams, waits and groups: where lockstep runs to its end, it is right."""
    inter = Link(1e9, 1e-6, busy_efficiency=busy)
    cluster = tiny.cluster(*shape, **LINKS | {"inter": inter}, backend=backend)
    work = lowered(schedule, cluster, noise, free=free)
    try:
        lockstep.run(work)
    except lockstep.Overtaken:
        reject()
    same(work)


QUICK = [
    *("ddp(bucket_mib=0.001)", "zero1(bucket=700)", "zero2(bucket=700)", "local_sgd(tau=3)"),
    *("co2(tau=9)", "co2(tau=12,worker=node)", "overlap_local_sgd(tau=3)"),
    *("slowmo(tau=2,worker=node,inner=ddp)", "diloco(tau=4,fragments=2,delay=1)"),
]


@pytest.mark.parametrize("strategy", QUICK)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backend": "gloo"},
        {"all_reduce": "hierarchical"},
        {"sites": 2, "wan": Link(1e8, 1e-5)},
    ],
    ids=["nccl", "gloo", "hierarchical", "sites"],
)
@pytest.mark.parametrize("noise", [Noise(), Noise(jitter=0.1), Noise(straggle=0.2)], ids=str)
def test_strategies_whose_collectives_follow_each_other_run_in_lockstep(
    strategy: str, changes: Mapping[str, object], noise: Noise
) -> None:
    """Jitter, stragglers, and averages of all ranks of a node that share its NICs."""
    cluster = tiny.cluster(4, 2, **{**LINKS, **changes})
    same(lowered(tiny.schedule(strategy, (4, 2)), cluster, noise))


@pytest.mark.parametrize("noise", [Noise(jitter=0.1), Noise(straggle=0.2)], ids=str)
def test_gathers_and_reductions_of_one_communicator_may_run_in_lockstep(noise: Noise) -> None:
    """One that starts at the very instant at which another ends has not been overtaken."""
    same(lowered(tiny.schedule("zero3", (4, 2)), tiny.cluster(4, 2, **LINKS), noise))


@pytest.mark.parametrize("strategy", ["co2(tau=9,worker=node)", "co2(tau=9)", "local_sgd(tau=3)"])
@pytest.mark.parametrize("noise", [Noise(jitter=0.1), Noise(straggle=0.2)], ids=str)
def test_nics_that_attain_less_while_their_node_computes_run_in_lockstep(
    strategy: str, noise: Noise
) -> None:
    """Averages of several workers, on NICs whose capacity changes with what each node does."""
    busy = LINKS | {"inter": Link(1e9, 1e-6, busy_efficiency=0.4)}
    same(lowered(tiny.schedule(strategy, (4, 2)), tiny.cluster(4, 2, **busy), noise))


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
@pytest.mark.parametrize("noise", [Noise(), Noise(jitter=0.1)], ids=str)
def test_free_communication_always_runs_in_lockstep(strategy: str, noise: Noise) -> None:
    """What takes no time shares nothing, even where communication would slow computing down."""
    cluster = tiny.cluster(4, 2, **LINKS, interference=0.5)
    same(lowered(tiny.schedule(strategy, (4, 2)), cluster, noise, free=True))


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_streams_share_a_processor_where_communication_is_free(strategy: str) -> None:
    """They compute as before, and so does what is slowed down."""
    cluster = tiny.cluster(4, 2, **LINKS, interference=0.5, gpu=tiny.slow_and_shared())
    same(lowered(tiny.schedule(strategy, (4, 2)), cluster, Noise(), free=True))


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("ddp", {"interference": 0.3}),
        ("ddp", {"call_interference": 1e-4}),
        ("zeropp", {"gpu": tiny.slow_and_shared()}),
        ("co2(tau=2,worker=node,inner=zero3)", {}),
        ("co2(tau=2,worker=node,average=leader)", {}),
    ],
)
def test_what_depends_on_the_order_on_links_is_left_to_simpy(
    strategy: str, changes: Mapping[str, object]
) -> None:
    """Work inside the node beside a broadcast or sharded steps, and compute that is slowed down."""
    cluster = tiny.cluster(4, 2, **{**LINKS, **changes})
    with pytest.raises(lockstep.Overtaken):
        lockstep.run(lowered(tiny.schedule(strategy, (4, 2)), cluster, Noise(jitter=0.1)))
