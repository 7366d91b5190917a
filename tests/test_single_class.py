"""One class of ranks: the same times as SimPy, with fewer events."""

from collections.abc import Mapping

import numpy as np
import pytest
import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_simulator import SECOND

from co2sim import single_class
from co2sim.cluster import Cluster, Link
from co2sim.lowering import Lowered, lower
from co2sim.noise import QUIET
from co2sim.schedule import (
    LEADERS,
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Kind,
    Op,
    Schedule,
)
from co2sim.sharing import shared_works
from co2sim.simulator import _Simulation

BYTES_PER_SECOND = 1e9


def lowered(schedule: Schedule, cluster: Cluster, rounds: int = 3) -> Lowered:
    """The schedule on the cluster, one class of ranks for all."""
    return lower(
        schedule, cluster, precision="bf16", rounds=rounds, noise=QUIET, fold=True, free=False
    )


def same(work: Lowered) -> None:
    """SimPy gives the same starts and ends."""
    found = single_class.run(work, shared_works(work))
    for quick, simulated in zip(found, _Simulation(work).run(None), strict=True):
        np.testing.assert_allclose(quick, simulated, rtol=1e-9, atol=1e-15)


def shape(op: Op) -> tuple[str, str]:
    """What an op does, without its size."""
    return op.stream, str(op.work)


works = st.one_of(
    st.builds(
        Compute, st.just("work"), st.integers(0, 40).map(lambda tenths: tenths * SECOND / 10)
    ),
    st.builds(
        Collective,
        st.sampled_from([Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST]),
        st.just("buffer"),
        st.integers(1, 3_000_000_000),
        st.just(DType.INT8),
        st.sampled_from([WORLD, NODE, PEERS, LEADERS]),
    ),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Bodies of up to twelve ops of random sizes on up to four streams, with random waits."""
    size = draw(st.integers(1, 12))
    body = []
    for index in range(size):
        targets = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 2)), max_size=3))
        after = tuple(After(f"op{target}", ago + (target >= index)) for target, ago in targets)
        stream = draw(st.sampled_from(["compute", "gather", "reduce", "outer"]))
        body.append(Op(f"op{index}", draw(works), stream, after))
    return Schedule("random", tuple(body))


@settings(max_examples=400)
@given(
    schedules(),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.fixed_dictionaries(
        {
            "backend": st.sampled_from(["nccl", "gloo"]),
            "communicators": st.sampled_from(["group", "stream"]),
            "interference": st.sampled_from([0.0, 0.4]),
            "call_interference": st.sampled_from([0.0, 0.03]),
            "gpu": st.sampled_from([tiny.gpu(), tiny.gpu(streams="shared")]),
        }
    ),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([0.0, 0.01]),
)
def test_on_random_schedules_all_ends_are_those_that_simpy_simulates(
    schedule: Schedule,
    layout: tuple[int, int],
    changes: Mapping[str, object],
    busy: float,
    latency: float,
) -> None:
    """Queues of communicators, shared links, and computing that slows and is slowed down."""
    links = {
        "intra": Link(5 * BYTES_PER_SECOND, latency),
        "inter": Link(BYTES_PER_SECOND, 2 * latency, busy_efficiency=busy),
    }
    work = lowered(schedule, tiny.cluster(*layout, **links, **changes))
    assume(len(work.classes) == 1)
    same(work)


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backend": "gloo"},
        {"communicators": "stream"},
        {"interference": 0.4},
        {"gpu": tiny.slow_and_shared()},
        {"inter": Link(1e9, 1e-6, busy_efficiency=0.5)},
        {"sites": 2, "wan": Link(1e8, 1e-5)},
    ],
    ids=["nccl", "gloo", "stream", "interference", "shared", "busy", "sites"],
)
def test_every_strategy_ends_when_simpy_says(strategy: str, changes: Mapping[str, object]) -> None:
    """Four nodes of two GPUs, on which gathers, reductions and averages meet."""
    links = {"intra": Link(10e9, 1e-7), "inter": Link(1e9, 1e-6)}
    work = lowered(tiny.schedule(strategy, (4, 2)), tiny.cluster(4, 2, **{**links, **changes}))
    assert len(work.classes) == 1
    same(work)


def test_progress_goes_from_nothing_to_all() -> None:
    """What is reported never falls, and ends at 1."""
    schedule = tiny.schedule("zero3", (4, 2), accumulation=40)
    work = lowered(schedule, tiny.cluster(4, 2), rounds=20)
    told: list[float] = []
    single_class.run(work, shared_works(work), told.append)
    assert len(told) > 3
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
