"""Sites as workers: who meets, what crosses the links between sites, memory, and simulation."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from test_cost import messages
from test_memory import GB, PARAMETERS, big

from co2sim import strategies
from co2sim.case import Case
from co2sim.cluster import Cluster, Link, Tier
from co2sim.cost import footprint, traffic
from co2sim.errors import OptionError, ScheduleError
from co2sim.metrics import communication, window
from co2sim.noise import Noise
from co2sim.schedule import SITE, SITE_PEERS, WORLD, Collective, DType, Kind, Layout, Op, Schedule
from co2sim.simulator import execute
from co2sim.strategies.co2 import CO2
from co2sim.study import simulate
from co2sim.trace import Trace
from co2sim.trace_lines import read_json_lines

LATENT = {"intra": Link(10e9, 1e-7), "inter": Link(1e9, 1e-6)}

VARIANTS = [
    "co2(tau=2,worker=site)",
    "co2(tau=2,staleness=2,worker=site,inner=ddp)",
    "co2(tau=3,delay=2,worker=site,inner=zero1)",
    "co2(tau=3,delay=1,fragments=3,worker=site,inner=fsdp)",
    "co2(tau=2,delay=1,worker=site,inner=zero3,dtype=int8)",
    "diloco(tau=4,worker=site)",
    "diloco(tau=4,fragments=2,delay=1,worker=site,inner=fsdp)",
    "diloco(tau=2,dtype=int4,worker=site,inner=zero3)",
    "local_sgd(tau=2,worker=site)",
    "slowmo(tau=2,worker=site,inner=zero3)",
    "overlap_local_sgd(tau=2,worker=site,inner=ddp)",
]
"""Strategies with a worker per site."""

SHAPES = [(2, 2, 2), (4, 1, 2), (4, 2, 2), (6, 1, 3), (4, 2, 4)]
"""Nodes, GPUs per node, sites: sites of one node and of several, two sites and more."""

shapes, variants = st.sampled_from(SHAPES), st.sampled_from(VARIANTS)


def cluster(shape: tuple[int, int, int], **changes: Any) -> Cluster:
    """Links between sites ten times as slow as those between nodes."""
    nodes, gpus, sites = shape
    fields: dict[str, Any] = {**LATENT, "sites": sites, "wan": Link(1e8, 1e-5)}
    return tiny.cluster(nodes, gpus, **fields | changes)


def schedule(strategy: str, shape: tuple[int, int, int], **changes: Any) -> Schedule:
    """The schedule of a strategy for the tiny job."""
    return strategies.parse(strategy).schedule(tiny.job(**changes), Layout(*shape))


def run(text: str, on: Cluster, rounds: int = 3, **options: Any) -> Trace:
    """Simulate rounds of the tiny job."""
    made = strategies.parse(text).schedule(tiny.job(), on.layout)
    return execute(made, on, precision="bf16", rounds=rounds, **options)


# --- who meets ---------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_site_is_its_ranks_and_its_peers_are_one_rank_of_each_site(
    sites: int, per_site: int, gpus: int
) -> None:
    """Of (site, place) the ranks of a site share the first, and peers the second."""
    layout = Layout(sites * per_site, gpus, sites)
    places = {rank: divmod(rank, per_site * gpus) for rank in range(layout.world_size)}
    for rank, (site, place) in places.items():
        inside = [one for one, (where, _) in places.items() if where == site]
        across = [one for one, (_, where) in places.items() if where == place]
        assert list(SITE.members(rank, layout)) == inside
        assert list(SITE_PEERS.members(rank, layout)) == across


def test_sites_of_a_layout_are_equal() -> None:
    """One site holds all."""
    with pytest.raises(ScheduleError, match="4 equal sites"):
        Layout(6, 2, 4)
    assert SITE.members(3, Layout(3, 2)) == WORLD.members(3, Layout(3, 2))
    assert len(SITE_PEERS.members(3, Layout(3, 2))) == 1


def test_the_schedule_is_the_golden_one(golden: Callable[[str, str], None]) -> None:
    """On two sites of two nodes of 2 GPUs a rank averages a fourth of every fragment."""
    for text in ("co2(tau=2,delay=1,worker=site)", "diloco(tau=2,worker=site,inner=fsdp)"):
        name = text.replace("(", "-").replace("=", "-").replace(",", "-").removesuffix(")")
        golden(name, f"{schedule(text, (4, 2, 2))}\n")


@given(variants)
def test_where_a_site_is_a_node_it_does_not_matter_which_of_them_is_the_worker(
    strategy: str,
) -> None:
    """Every op starts and ends when it does with worker=node, and memory is the same."""
    on = cluster((4, 2, 4))
    by_node = strategy.replace("worker=site", "worker=node")
    spans = [[span[:5] for span in run(text, on).spans] for text in (strategy, by_node)]
    assert spans[0] == spans[1]
    one, other = (
        strategies.parse(text).memory(tiny.job(), on.layout) for text in (strategy, by_node)
    )
    assert one == other


@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_site_steps_as_a_cluster_of_its_own_would(inner: str) -> None:
    """A round of two steps takes as long as two steps of one site, and what the average adds.

    That is the average and the outer step; DDP also has to gather what each rank updated.
    """
    site = tiny.cluster(2, 2, **LATENT)
    on = cluster((4, 2, 2), wan=Link(1e30))
    twice = window(run(inner, site, 4), tiny.schedule(inner), 1).round_time * 2
    text = f"local_sgd(tau=2,worker=site,inner={inner})"
    made = schedule(text, (4, 2, 2))
    trace = tiny.by_op(execute(made, on, precision="bf16", rounds=4))
    added = ("average", "outer", *(["publish"] if inner == "ddp" else []))
    outside = sum(trace[3, name].end - trace[3, name].start for name in added)
    found = window(run(text, on, 4), made, 1).round_time
    assert found - outside == pytest.approx(twice, rel=1e-6)


# --- what crosses the links between sites ------------------------------------------------------


@given(shapes, st.sampled_from(["local_sgd(tau=3,worker=site)", "co2(tau=3,worker=site)"]))
def test_a_site_sends_the_model_once_around_its_peers(
    shape: tuple[int, int, int], strategy: str
) -> None:
    """2 (S-1)/S x 4 bytes x parameters a round and site, however many GPUs share them.

    Each of the m GPUs of a site averages a share of P / m parameters, rounded up, in a ring of S;
    nothing that a local step does leaves the site.
    """
    nodes, gpus, sites = shape
    m = nodes * gpus // sites
    sent = traffic(schedule(strategy, shape), cluster(shape))
    assert sent.wan == pytest.approx(2 * (sites - 1) / sites * 4 * m * -(-2000 // m))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_fewer_bytes_per_parameter_cross(dtype: str) -> None:
    """bf16: a half. int8: an all-to-all and an all-gather of (S-1)/S each, scales included."""
    text = f"diloco(tau=4,worker=site,dtype={dtype})"
    sent = traffic(schedule(text, (4, 2, 2)), cluster((4, 2, 2))).wan
    share = 2000 // 4
    expected = 4 * share * 2 if dtype == "bf16" else 4 * (share + 4)  # one scale a share
    assert sent == pytest.approx(expected)


def test_a_burst_passes_an_uplink_at_once() -> None:
    """Of 15 kB that each site sends 5 kB pass at once, the others at 1 MB/s: 10 ms."""
    work = Collective(Kind.ALL_GATHER, "x", 15_000, DType.BF16, SITE_PEERS)
    on = cluster((2, 1, 2), wan=Link(1e6, burst=5e3), backend="gloo")
    trace = execute(
        Schedule("one", (Op("x", work, "comm"),)), on, precision="bf16", rounds=1, fold=False
    )
    assert tiny.makespan(trace) == pytest.approx(10e-3)


@given(variants)
def test_only_averages_leave_a_site(strategy: str) -> None:
    """All other collectives are over the site, and put nothing on its uplink."""
    made, on = schedule(strategy, (4, 2, 2)), cluster((4, 2, 2))
    inside = [
        op
        for op in made.body
        if isinstance(op.work, Collective) and op.work.group != SITE_PEERS and op.stream != "outer"
    ]
    assert inside
    assert {op.work.group for op in inside if isinstance(op.work, Collective)} == {SITE}
    assert (
        traffic(Schedule("inside", tuple(Op(o.name, o.work, o.stream) for o in inside)), on).wan
        == 0
    )


@given(shapes, st.integers(1, 6), st.floats(1e3, 1e9), st.sampled_from(["co2", "local_sgd"]))
def test_an_average_exposes_what_its_steps_do_not_hide(
    shape: tuple[int, int, int], tau: int, bandwidth: float, name: str
) -> None:
    """local_sgd waits for all of it; co2 for what is longer than a round.

    Inside of a site communication is free here. An average takes 2 (S-1) latencies and the bytes
    of all GPUs of a site through its uplink.
    """
    free = {"intra": Link(1e40), "inter": Link(1e40), "wan": Link(bandwidth, 1e-6)}
    on = cluster(shape, **free)
    text = f"{name}(tau={tau},worker=site,inner=ddp)"
    made = schedule(text, shape)
    m, sites = on.layout.ranks_per_site, shape[2]
    sent = 2 * (sites - 1) / sites * 4 * m * -(-2000 // m)
    average = 2 * (sites - 1) * 1e-6 + sent / bandwidth
    outer = next(op.work for op in made.body if op.name == "outer")
    kernel = max(outer.flops, outer.memory_bytes) / 1e12  # type: ignore[union-attr]
    steps = tau * tiny.local_step() + kernel
    found = window(run(text, on, 12), made, 6).round_time
    # co2 launches the next average once the outer step has read the one before
    expected = steps + average if name == "local_sgd" else max(steps, average + kernel)
    assert found == pytest.approx(expected, rel=1e-6)


@given(st.sampled_from([2, 4]), st.sampled_from([1, 2, 4, 8]))
def test_peers_of_sites_are_no_more_in_a_pod_than_in_its_sites(sites: int, pod: int) -> None:
    """Bytes that leave a pod of consecutive nodes are counted message by message."""
    on = cluster((8, 2, sites), inter=Link(1e9, 1e-6, rail=Tier(pod)))
    work = Collective(Kind.ALL_REDUCE, "x", 500_000, DType.BF16, SITE_PEERS)
    sent = dict.fromkeys(range(8 // pod), 0.0)
    for rank in range(on.layout.ranks_per_site):
        for sender, receiver, size in messages(work, on, rank):
            here, there = (one // on.gpus_per_node // pod for one in (sender, receiver))
            if here != there:
                sent[here] += size
    crossed = footprint(work, on).tiers
    found = sum(one.bytes * one.groups(on) for one in crossed)
    assert found == pytest.approx(max(sent.values()))


# --- memory ------------------------------------------------------------------------------------


def test_memory_is_shared_among_all_gpus_of_a_site() -> None:
    """7.5 billion parameters on two sites of 4 nodes of 8 GPUs, by hand.

    zero2 shards gradients and optimizer over 32: 2 + 14/32 bytes per parameter. CO2 keeps anchor,
    momentum and one buffer in fp32, with a delay one copy more; so does DiLoCo, without. fsdp
    shards 16 bytes per parameter over 32.
    """
    layout = Layout(8, 8, 2)

    def items(text: str) -> Mapping[str, float]:
        return strategies.parse(text).memory(big(), layout)

    for text, copies in (("co2(worker=site)", 3), ("diloco(worker=site)", 3)):
        found = items(text)
        states = sum(found[name] for name in ("parameters", "gradients", "optimizer"))
        assert states == pytest.approx((2 + 14 / 32) * PARAMETERS)
        assert found["outer"] == pytest.approx(copies * 4 * PARAMETERS / 32, rel=1e-6)
    assert items("co2(worker=site,delay=3)")["outer"] / GB == pytest.approx(3.75)
    sharded = items("co2(worker=site,inner=fsdp)")
    states = sum(sharded[name] for name in ("parameters", "gradients", "optimizer"))
    assert states == pytest.approx(16 * PARAMETERS / 32)


# --- folding and simulation --------------------------------------------------------------------


@given(variants, st.sampled_from([1, 2]))
def test_schedules_run_by_the_rules(strategy: str, accumulation: int) -> None:
    """Unfolded, with jitter: collectives end together, in order, for all members."""
    made = schedule(strategy, (4, 2, 2), accumulation=accumulation)
    noise = Noise(jitter=0.1)
    trace = execute(made, cluster((4, 2, 2)), precision="bf16", rounds=3, noise=noise)
    assert trace.violations(made) == []
    assert len(trace.ranks) == 8


@given(
    variants,
    shapes,
    st.floats(1e5, 1e10),
    st.sampled_from([0.0, 1e-5]),
    st.sampled_from(["nccl", "gloo"]),
)
def test_no_more_is_exposed_than_sent(
    strategy: str, shape: tuple[int, int, int], bandwidth: float, latency: float, backend: str
) -> None:
    """Whatever the uplink: exposed communication is part of busy communication."""
    made = schedule(strategy, shape)
    on = cluster(shape, wan=Link(bandwidth, latency), backend=backend)
    paid, free = (
        execute(made, on, precision="bf16", rounds=10, free_communication=free)
        for free in (False, True)
    )
    during = window(paid, made, 5)
    exposed = during.round_time - window(free, made, 5).round_time
    assert -1e-15 <= exposed <= communication(paid, made, during).busy * (1 + 1e-9) + 1e-15


def test_a_trace_keeps_its_sites(tmp_path: Any) -> None:
    """They are written where there are several, and read back."""
    path = tmp_path / "trace.jsonl"
    for shape in ((4, 2, 2), (4, 2, 1)):
        on = cluster(shape, **({} if shape[2] > 1 else {"wan": None}))
        trace = run("zero2", on, 1)
        path.write_text("\n".join(trace.to_json_lines()))
        assert read_json_lines(path).layout == on.layout
        assert ('"sites"' in path.read_text()) == (shape[2] > 1)


# --- as a user asks ----------------------------------------------------------------------------

SMALL: dict[str, Any] = {"cluster": "two-sites-wan", "model": "gpt2-small", "gpus": 32}


@pytest.mark.slow
def test_the_round_is_chosen_for_the_link_between_sites() -> None:
    """tau=auto: as many steps as hide 2 (S-1)/S x 4 P bytes at the wan's speed, and no more."""
    found = simulate(strategy="co2(tau=auto,delay=auto,worker=site,fragments=1)", **SMALL)
    chosen = strategies.parse(found.strategy)
    assert isinstance(chosen, CO2)
    prepared = Case(strategy=found.strategy, **SMALL).prepare()
    assert prepared.cluster.wan is not None
    average = 4 * prepared.job.parameters / prepared.cluster.wan.payload_bandwidth
    assert found.exposed_comm_s < 0.5 * found.round_time_s
    assert chosen.tau * found.step_time_s == pytest.approx(average, rel=0.05)


@given(st.sampled_from(["co2", "diloco", "local_sgd", "slowmo", "overlap_local_sgd"]))
def test_a_cluster_of_one_site_is_refused(name: str) -> None:
    """One line says what is there; parts of two sites are no reason."""
    case = Case(cluster="a100-tcp80", model="gpt2-small", strategy=f"{name}:worker=site")
    with pytest.raises(OptionError, match="2 sites") as caught:
        case.prepare()
    assert "\n" not in str(caught.value)
    found = simulate(strategy=f"{name}:tau=2,worker=site", **SMALL | {"gpus": 8})
    assert found.wan_bytes_per_site_per_step == 0
