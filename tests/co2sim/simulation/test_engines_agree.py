"""Fast engines, folded ranks and fused ops give the times of SimPy, of all ranks, and of all ops.

Streams, groups, waits and sizes are random, on every kind of cluster; and so are the strategies,
each of which runs once besides.
"""

from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st
from random_schedules import random_schedules

from co2sim import strategies
from co2sim.hardware.cluster import Cluster, HostEffects, Link
from co2sim.hardware.fabric import Fabric, Tier
from co2sim.schedule.schedule import (
    LEADERS,
    NODE,
    PEERS,
    WORLD,
    Collective,
    Compute,
    DType,
    Kind,
    Layout,
    Schedule,
)
from co2sim.schedule.token_routing import TokenRouting
from co2sim.simulation import event_engine
from co2sim.simulation.costs import compute_time, traffic
from co2sim.simulation.lowering import LoweredSchedule, lower, shared_works, without_communication
from co2sim.simulation.metrics import breakdown, communication, window
from co2sim.simulation.noise import QUIET, Noise
from co2sim.simulation.reference_engine import Simulation
from co2sim.simulation.run import execute, run
from co2sim.strategies import chaining

LINKS = {"intra": Link(10e9, 1e-7), "inter": Link(1e9, 1e-6)}

KINDS: dict[str, dict[str, Any]] = {
    "nccl": {},
    "gloo": {"backend": "gloo"},
    "stream": {"communicators": "stream"},
    "interference": {"interference": 0.3},
    "busy": {"inter": Link(1e9, 1e-6, relay_efficiency=0.5, busy_efficiency=0.4)},
    "hierarchical": {"all_reduce": "hierarchical"},
    "tiers": {"inter": Link(1e9, 1e-6), "fabric": Fabric(Tier(2, 8.0), Tier(4, 9.0))},
    "hashed": {"fabric": Fabric(Tier(2, 2.0), paths="hashed", flows=2)},
    "scattered": {"fabric": Fabric(Tier(2, 8.0), Tier(4, 9.0), placement="scattered")},
    "cyclic": {"fabric": Fabric(Tier(2, 8.0), placement="cyclic")},
    "uneven": {"node_spread": 0.05, "step_spread": 0.03},
    "all": {"backend": "gloo", "interference": 0.2, "inter": Link(1e9, 1e-6, busy_efficiency=0.7)},
}
"""Whatever makes ops slower that run side by side."""

HOSTS: dict[str, dict[str, Any]] = {
    "calls": {"host": HostEffects(call_interference=1e-6)},
    "one core": {"gpu": tiny.slow_gpu(), "host": HostEffects(one_core=True)},
    "host": {
        "backend": "gloo",
        "interference": 0.2,
        "gpu": tiny.slow_gpu(),
        "inter": Link(1e9, 1e-6, busy_efficiency=0.7),
        "host": HostEffects(one_core=True, call_interference=1e-6),
    },
}
"""What only the reference simulates."""

kinds = st.sampled_from(list(KINDS))
all_kinds = st.sampled_from([*KINDS, *HOSTS])
shapes = st.sampled_from([(1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)])
noises = st.sampled_from(
    [QUIET, Noise(jitter=0.2), Noise(straggle=0.3), Noise(node_speed={0: 0.5}, jitter=0.1)]
)
variants = st.sampled_from(tiny.VARIANTS)


def cluster(kind: str, nodes: int, gpus: int, **changes: Any) -> Cluster:
    """Of two sites where the layout has two."""
    return tiny.cluster(nodes, gpus, **LINKS | (KINDS | HOSTS)[kind] | changes)


def lowered(
    schedule: Schedule, on: Cluster, noise: Noise = QUIET, *, free: bool = False
) -> LoweredSchedule:
    """Three rounds, ranks folded where they can be."""
    work = lower(schedule, on, precision="bf16", rounds=3, noise=noise, fold=True, slowdown=1.1)
    return without_communication(work) if free else work


def check_engine(work: LoweredSchedule) -> None:
    """Whatever engine runs it: the same starts and ends as in SimPy."""
    for quick, simulated in zip(run(work), Simulation(work).run(), strict=True):
        np.testing.assert_allclose(quick, simulated, rtol=1e-9, atol=1e-15)


# --- engines -------------------------------------------------------------------------------------

bools = st.booleans()
works = st.one_of(
    st.builds(Compute, st.just("work"), st.integers(0, 40).map(lambda us: us * 1e5)),
    st.builds(
        Collective,
        st.sampled_from([Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST]),
        st.just("buffer"),
        st.integers(1, 3000),
        st.just(DType.INT8),
        st.sampled_from([WORLD, NODE, PEERS, LEADERS]),
    ),
    st.builds(
        Collective,
        st.just(Kind.ALL_TO_ALL),
        st.just("tokens"),
        st.integers(1, 3000),
        st.just(DType.INT8),
        st.just(WORLD),
        routed=st.builds(TokenRouting, st.integers(1, 4), st.just(48), st.just(1), by_node=bools),
    ),
)


schedules = random_schedules(works, ["compute", "gather", "reduce", "outer"], most=10)


@pytest.mark.parametrize("kind", KINDS)
@given(schedules, shapes)
def test_random_schedules_end_when_simpy_says(
    kind: str, schedule: Schedule, shape: tuple[int, int]
) -> None:
    """Queues of communicators, shared links, and computing that slows and is slowed down."""
    check_engine(lowered(schedule, cluster(kind, *shape)))


@given(schedules, shapes, kinds, noises, st.booleans())
def test_uneven_ranks_end_when_simpy_says(
    schedule: Schedule,
    shape: tuple[int, int],
    kind: str,
    noise: Noise,
    free: bool,  # noqa: FBT001 - Hypothesis gives it
) -> None:
    """Jitter, stragglers, slow nodes and free communication on random schedules."""
    check_engine(lowered(schedule, cluster(kind, *shape), noise, free=free))


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_every_strategy_ends_when_simpy_says(strategy: str) -> None:
    """Where all of a cluster is shared, and where communication is free and ops have jitter."""
    schedule = tiny.schedule(strategy)
    check_engine(lowered(schedule, cluster("all", 2, 2)))
    check_engine(lowered(schedule, cluster("interference", 2, 2), Noise(jitter=0.1), free=True))


@given(variants, kinds, noises, st.booleans())
def test_strategies_end_when_simpy_says_on_every_kind_of_cluster(
    strategy: str,
    kind: str,
    noise: Noise,
    free: bool,  # noqa: FBT001 - Hypothesis gives it
) -> None:
    """Four nodes of two GPUs, on which gathers, reductions and averages meet."""
    work = lowered(tiny.schedule(strategy, (4, 2)), cluster(kind, 4, 2), noise, free=free)
    check_engine(work)


ALL_MEET = [
    *("ddp", "ddp(bucket_mib=0.001)", "zero1(bucket=700)", "zero2(bucket=700)", "zero3"),
    *("zero3(prefetch=900,max_live=1300)", "fsdp", "fsdp(version=1,clip=false)"),
    *("local_sgd(tau=3)", "diloco(tau=4,fragments=4,delay=3,dtype=int4)"),
    *("co2.published(tau=2,staleness=2)", "co2(tau=3,delay=1,keep=0.5,predict=0.25)"),
]
"""Every collective is of all ranks."""


@given(
    st.sampled_from(ALL_MEET),
    st.sampled_from([(4, 2), (2, 8), (8, 8)]),
    st.builds(
        Noise,
        jitter=st.sampled_from([0.0, 0.05, 0.5]),
        straggle=st.sampled_from([0.0, 0.3]),
        node_speed=st.dictionaries(st.integers(0, 1), st.floats(0.2, 2), max_size=2),
        seed=st.integers(0, 9),
    ),
    st.floats(0, 2),
    st.sampled_from(["nccl", "gloo", "stream", "tiers", "scattered"]),
)
def test_ranks_that_differ_slow_down_beside_communication_as_simpy_says(
    strategy: str, shape: tuple[int, int], noise: Noise, interference: float, kind: str
) -> None:
    """Of 8 to 64 ranks, all in NumPy; in SimPy 16,384 would take minutes."""
    on = cluster(kind, *shape, interference=interference)
    work = lowered(tiny.schedule(strategy, shape), on, noise)
    assert event_engine.applies(work, shared_works(work))
    check_engine(work)


def test_ranks_that_meet_in_parts_are_left_to_simpy() -> None:
    """A node's collective slows the computes of that node only, so that no pace is that of all."""
    noise, slows = Noise(jitter=0.1), cluster("interference", 4, 2)
    work = lowered(tiny.schedule("zeropp", (4, 2)), slows, noise)
    assert not event_engine.applies(work, shared_works(work))


ratios = st.sampled_from([0.5, 1.0, 2.0, 8.0])
fabrics = st.builds(
    Fabric,
    st.builds(
        Tier,
        st.just(2),
        ratios,
        st.sampled_from([1.0, 1.5]),
        background=ratios.map(lambda r: r / 16),
    ),
    st.none() | st.builds(Tier, st.just(4), ratios),
    nics=st.sampled_from([1, 2]),
    rails=st.booleans(),
    paths=st.sampled_from(["spread", "hashed"]),
    placement=st.sampled_from(["packed", "scattered", "cyclic"]),
    share=st.sampled_from([0.5, 1.0]),
)


@given(variants, fabrics, st.sampled_from(["nccl", "gloo", "interference"]), noises)
def test_random_fabrics_take_the_times_of_simpy(
    strategy: str, fabric: Fabric, kind: str, noise: Noise
) -> None:
    """Eight nodes of two GPUs, folded, and each rank for itself."""
    on = cluster(kind, 8, 2, fabric=fabric)
    check_engine(lowered(tiny.schedule(strategy, (8, 2)), on, noise))


@given(variants, fabrics)
def test_one_rank_stands_for_all_on_any_fabric(strategy: str, fabric: Fabric) -> None:
    """Folded and unfolded, on leaves of two nodes."""
    check_folding(tiny.schedule(strategy, (4, 2)), cluster("nccl", 4, 2, fabric=fabric))


@pytest.mark.parametrize("pod", [2, 3, 4, 5, 6, 7])
def test_one_rank_stands_for_the_busiest_pod_of_blocks(pod: int) -> None:
    """Blocks of 4 nodes on leaves: no rank alone is later, and where they line up all are equal."""
    schedule = tiny.schedule("zeropp(hpz_group=8)", (12, 2))
    on = cluster("tiers", 12, 2, fabric=Fabric(Tier(pod, 8.0)))
    if pod in {2, 4}:
        check_folding(schedule, on)
    folded, whole = (
        execute(schedule, on, precision="bf16", rounds=2, fold=fold).grid(schedule)[1].max()
        for fold in (True, False)
    )
    assert folded >= whole * (1 - 1e-9)


# --- folding -------------------------------------------------------------------------------------


def led(schedule: Schedule) -> bool:
    """Whether the first ranks of nodes do something alone; the others wait for them."""
    return any(isinstance(op.work, Collective) and op.work.group.led for op in schedule.body)


def check_folding(schedule: Schedule, on: Cluster, noise: Noise = QUIET) -> dict[int, int]:
    """Every rank does what the rank that stands for it does; which ranks stand for how many."""
    folded, whole = (
        execute(schedule, on, precision="bf16", rounds=2, noise=noise, fold=fold)
        for fold in (True, False)
    )
    assert whole.violations(schedule, 1e-12) == folded.violations(schedule) == []
    assert len(whole.ranks) == sum(folded.ranks.values()) == on.layout.world_size
    speeds, g = noise.node_slowdowns(on.layout), on.gpus_per_node
    stands = {speeds[rank // g]: place for place, rank in enumerate(folded.ranks)}
    alike = list(range(0, len(whole.ranks), g if led(schedule) else 1))
    twins = [stands[speeds[rank // g]] for rank in alike]
    for one, all_ in zip(folded.grid(schedule), whole.grid(schedule), strict=True):
        np.testing.assert_allclose(all_[..., alike], one[..., twins], rtol=1e-9, atol=1e-15)
    return dict(folded.ranks)


@given(
    st.sampled_from([*tiny.BY_SITE, *tiny.VARIANTS]),
    st.sampled_from([(2, 2, 2), (4, 1, 2), (4, 2, 2), (6, 1, 3), (4, 2, 4)]),
    all_kinds,
)
@example("diloco(tau=2,dtype=int4,worker=site,inner=zero3)", (4, 2, 2), "nccl")
@example("slowmo(tau=2,worker=site,inner=zero3)", (4, 2, 2), "tiers")
@example("overlap_local_sgd(tau=2,worker=site,inner=ddp)", (4, 2, 2), "busy")
def test_one_rank_stands_for_all_of_all_sites(
    strategy: str, shape: tuple[int, int, int], kind: str
) -> None:
    """Sites of one node and of several, two sites and more."""
    schedule = strategies.parse(strategy).schedule(tiny.job(), Layout(*shape))
    on = cluster(kind, *shape[:2], sites=shape[2], wan=Link(1e8, 1e-5))
    assert check_folding(schedule, on) == {0: on.layout.world_size}


@given(
    st.sampled_from([v for v in tiny.VARIANTS if "hpz_group" not in v]),
    st.sampled_from(["nccl", "gloo"]),
)
@example("co2.published(tau=2,worker=node,average=leader)", "nccl")
def test_slow_nodes_unfold_only_what_differs(strategy: str, kind: str) -> None:
    """With two speeds there are two classes of ranks, and they do what all ranks would do."""
    noise = Noise(node_speed={1: 0.5, 3: 0.5})
    folded = check_folding(tiny.schedule(strategy, (4, 2)), cluster(kind, 4, 2), noise)
    assert folded == {0: 4, 2: 4}


# --- fusing --------------------------------------------------------------------------------------


def figures(schedule: Schedule, on: Cluster, rounds: int = 4) -> dict[str, float]:
    """Everything that is said of a schedule on a cluster."""
    trace = execute(schedule, on, precision="bf16", rounds=rounds)
    during = window(trace, schedule, rounds - 1)
    seen, sent = communication(trace, schedule, during), traffic(schedule, on)
    computes = [op.work for op in schedule.body if isinstance(op.work, Compute)]
    return {
        "round": during.round_time,
        "busy": seen.busy,
        "waiting": seen.waiting,
        "sent": sent.gpu,
        "nic": sent.nic,
        "seconds": sum(compute_time(work, on.gpu, "bf16") for work in computes),
        "flops": sum(work.flops for work in computes),
        "bytes": sum(work.memory_bytes for work in computes),
        **breakdown(trace, schedule),
    }


def both(strategy: str, **changes: Any) -> tuple[Schedule, Schedule]:
    """The schedule op by op, and fused."""
    whole = tiny.schedule(strategy, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chaining, "FUSED_FROM", 0)
        return whole, tiny.schedule(strategy, **changes)


@given(variants, all_kinds, st.integers(1, 2))
def test_fused_schedules_have_the_figures_of_their_ops_on_every_kind_of_cluster(
    strategy: str, kind: str, accumulation: int
) -> None:
    """Also where computes are slowed down in their midst."""
    on = cluster(kind, 2, 2)
    whole, fused = both(strategy, accumulation=accumulation)
    assert figures(fused, on) == pytest.approx(figures(whole, on), rel=1e-9)


def test_reductions_stay_behind_their_own_block_when_fused() -> None:
    """Small buckets are reduced as early as before: what they wait for ends a fused row."""
    waits = [
        {op.name: op.after[0].op.rpartition(".")[2] for op in made.body if "reduce" in op.name}
        for made in both("zero2(bucket=700)")
    ]
    assert len(waits[0]) > 1
    assert waits[0] == waits[1]
