"""What must hold for every strategy: each of these was broken by some existing tool."""

from dataclasses import replace
from itertools import pairwise

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

from co2sim import strategies
from co2sim.catalog import load_model
from co2sim.hardware.cluster import Cluster, Link
from co2sim.schedule.schedule import Collective, Schedule
from co2sim.simulation.costs import Traffic, traffic
from co2sim.simulation.metrics import communication, window
from co2sim.simulation.noise import Noise
from co2sim.simulation.run import execute
from co2sim.training.workload import Workload

variants = st.sampled_from(tiny.VARIANTS)
shapes = st.sampled_from(tiny.LAYOUTS)
bandwidths = st.floats(1e7, 1e11)
latencies = st.sampled_from([0.0, 1e-7, 1e-5])
backends = st.sampled_from(["nccl", "gloo"])


def links(inter: float, latency: float = 0.0) -> dict[str, Link]:
    """Links inside nodes ten times as fast as between them."""
    return {"intra": Link(10 * inter, latency / 10), "inter": Link(inter, latency)}


def took(schedule: Schedule, cluster: Cluster, rounds: int = 4) -> float:
    """Seconds until the last op of these rounds ends."""
    return tiny.makespan(execute(schedule, cluster, precision="bf16", rounds=rounds))


def step_time(schedule: Schedule, cluster: Cluster) -> float:
    """Seconds of an optimizer step, averaged over late rounds."""
    trace = execute(schedule, cluster, precision="bf16", rounds=12)
    return window(trace, schedule, 6).round_time / schedule.steps


@given(variants, shapes, bandwidths, latencies, backends, st.sampled_from([0.5, 1.0, 3.0]))
def test_exposed_communication_is_part_of_busy_communication(
    strategy: str,
    shape: tuple[int, int],
    bandwidth: float,
    latency: float,
    backend: str,
    speed: float,
) -> None:
    """A round takes at most as much longer than with free communication as it communicates."""
    noise = Noise(node_speed={0: speed})
    schedule = tiny.schedule(strategy, shape)
    cluster = tiny.cluster(*shape, **links(bandwidth, latency), backend=backend)
    paid = execute(schedule, cluster, precision="bf16", rounds=12, noise=noise)
    free = execute(
        schedule, cluster, precision="bf16", rounds=12, noise=noise, free_communication=True
    )
    during = window(paid, schedule, 6)
    exposed = during.round_time - window(free, schedule, 6).round_time
    busy = communication(paid, schedule, during).busy
    assert -1e-15 <= exposed <= busy * (1 + 1e-9) + 1e-15


@given(variants, shapes, bandwidths, latencies, backends)
def test_overlap_is_never_slower_than_no_overlap(
    strategy: str, shape: tuple[int, int], bandwidth: float, latency: float, backend: str
) -> None:
    """Without interference, streams side by side never end later than one stream for all."""
    schedule = tiny.schedule(strategy, shape)
    serial = Schedule("serial", tuple(replace(op, stream="one") for op in schedule.body))
    cluster = tiny.cluster(*shape, **links(bandwidth, latency), backend=backend)
    assert took(schedule, cluster) <= took(serial, cluster) * (1 + 1e-9)


@given(variants, shapes, bandwidths, st.floats(1.0, 100.0), st.sampled_from(["intra", "inter"]))
def test_more_bandwidth_is_never_slower(
    strategy: str, shape: tuple[int, int], bandwidth: float, factor: float, which: str
) -> None:
    """A faster link of either kind never makes rounds longer."""
    schedule = tiny.schedule(strategy, shape)
    slow = tiny.cluster(*shape, **links(bandwidth))
    link = getattr(slow, which)
    fast = replace(slow, **{which: replace(link, bandwidth=link.bandwidth * factor)})
    assert took(schedule, fast) <= took(schedule, slow) * (1 + 1e-9)


@given(variants, shapes, latencies, st.floats(1.0, 100.0))
def test_more_latency_is_never_faster(
    strategy: str, shape: tuple[int, int], latency: float, factor: float
) -> None:
    """Slower steps never make rounds shorter."""
    schedule = tiny.schedule(strategy, shape)
    quick = tiny.cluster(*shape, **links(1e9, latency))
    late = tiny.cluster(*shape, **links(1e9, latency * factor))
    assert took(schedule, quick) <= took(schedule, late) * (1 + 1e-9)


@given(
    st.sampled_from(["gpu", "node", "node,inner=ddp", "node,inner=zero3", "node,average=leader"]),
    st.sampled_from(["fp32", "bf16", "int8"]),
    shapes,
    st.floats(1e7, 1e11),
    st.integers(2, 6),
)
def test_a_longer_delay_never_exposes_more(
    worker: str, dtype: str, shape: tuple[int, int], bandwidth: float, tau: int
) -> None:
    """Whoever the workers are, a round does not grow with the delay; as published it is shortest.

    As published: the average has a whole round, and no kernel of its own copies the parameters.
    """
    if "leader" in worker and dtype == "int8":
        return
    cluster = tiny.cluster(*shape, **links(bandwidth))
    options = f"tau={tau},worker={worker},dtype={dtype}"
    rounds = [f"co2({options},delay={delay})" for delay in range(1, tau + 1)]
    published = f"co2.published({options})"
    times = [step_time(tiny.schedule(how, shape), cluster) for how in [*rounds, published]]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


SIZES = [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (8, 4)]


@given(variants, st.floats(1e8, 1e10))
def test_throughput_per_gpu_never_rises_with_the_size(strategy: str, bandwidth: float) -> None:
    """More GPUs of the same kind never make each one faster.

    Memory traffic is free here: sharding it makes optimizers faster, which is the exception. The
    average of leaders is spread inside nodes beside the gathers of steps: a later one may miss
    them, so links inside nodes are fast there.
    """
    free = tiny.gpu(memory_bandwidth=1e40)
    times = []
    for shape in SIZES if "node" not in strategy else SIZES[2:]:
        cluster = tiny.cluster(*shape, **links(bandwidth, 1e-7), gpu=free)
        if "leader" in strategy:
            cluster = replace(cluster, intra=Link(1e15, 0.0))
        schedule = strategies.parse(strategy).schedule(tiny.job(), cluster.layout)
        flopless = tuple(
            op
            if isinstance(op.work, Collective) or op.work.kernel in {"forward", "backward"}
            else replace(op, work=replace(op.work, flops=0.0))
            for op in schedule.body
        )
        times.append(step_time(replace(schedule, body=flopless), cluster))
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times))


# --- traffic -----------------------------------------------------------------------------------


def sent(strategy: str, shape: tuple[int, int], job: Workload | None = None) -> Traffic:
    """Bytes of an optimizer step."""
    cluster = tiny.cluster(*shape)
    schedule = strategies.parse(strategy).schedule(job or tiny.job(), cluster.layout)
    found = traffic(schedule, cluster)
    gpu, nic, wan = (x / schedule.steps for x in (found.gpu, found.nic, found.wan))
    parts = {name: size / schedule.steps for name, size in found.by_collective.items()}
    return Traffic(gpu, nic, wan, parts)


@given(st.sampled_from([(1, 4), (2, 2), (4, 1), (8, 8), (3, 5)]))
def test_zero3_sends_one_and_a_half_times_what_ddp_sends(shape: tuple[int, int]) -> None:
    """Two gathers and a reduce-scatter against an all-reduce, at equal type; zero1 and 2 as ddp."""
    ddp, zero3 = sent("ddp", shape), sent("zero3", shape)
    assert zero3.gpu == pytest.approx(1.5 * ddp.gpu)
    assert zero3.nic == pytest.approx(1.5 * ddp.nic)
    for strategy in ("zero1", "zero2"):
        assert sent(strategy, shape).gpu == pytest.approx(ddp.gpu)


def test_zero3_hides_reductions_behind_the_backward() -> None:
    """With slow enough compute, only the gathers that are not prefetched are exposed.

    They are two thirds of the traffic. Of the reductions, the last third, that of the first layer
    has only the look-up of the embedding to hide behind, and that of the embedding nothing.
    """
    cluster, model = tiny.cluster(2, 2, **links(1e10)), tiny.model()
    exposed = simulate(cluster, model, "zero3(prefetch=0)")
    third = exposed.comm_busy_s / 3
    late = sum(block.parameters for block in model.blocks[:2]) / model.parameters
    lookup = tiny.job().works()[0].backward.memory_bytes / cluster.gpu.memory_bandwidth
    assert exposed.exposed_comm_s == pytest.approx(third * (2 + late) - lookup, rel=1e-6)
    ahead = simulate(cluster, model, "zero3(prefetch=1000000)")
    assert ahead.exposed_comm_s < exposed.exposed_comm_s / 2


def test_co2_sends_a_tau_th_of_one_all_reduce() -> None:
    """Per step: 2 (n-1)/n x 4 bytes x parameters / tau, on every GPU and NIC."""
    found = sent("co2.published(tau=4)", (2, 2))
    assert found.nic == pytest.approx(2 * 3 / 4 * 8000 / 4)
    assert found.gpu == pytest.approx(2 * 3 / 4 * 8000 / 4)
    shared = sent("co2.published(tau=4,worker=node)", (4, 2))
    assert shared.nic == pytest.approx(2 * 3 / 4 * 8000 / 4)  # two halves, each among four peers


PARTS = [
    ("zero3", 1.0, 1.0, 1.0),
    ("zeropp(hpz=false,qgz=false)", 0.5, 1.0, 1.0),
    ("zeropp(qwz=false,qgz=false)", 1.0, 0.0, 1.0),
    ("zeropp(qwz=false,hpz=false)", 1.0, 1.0, 0.25),
    ("zeropp", 0.5, 0.0, 0.25),
]


@given(
    st.sampled_from(PARTS), st.sampled_from([(2, 8), (16, 8), (24, 16)]), st.sampled_from([1, 2])
)
def test_each_part_of_zeropp_saves_its_published_share(
    part: tuple[str, float, float, float], shape: tuple[int, int], accumulation: int
) -> None:
    """Per node and micro-step: M -> M/2, M -> 0, M -> M/4 (arXiv 2306.10209, table 1).

    Rings carry (n-1)/n of the buffer, the all-to-all among N peers (N-1)/N; scales of blocks of
    2048 add 4 / 2048 bytes to each quantized element.
    """
    strategy, forward, backward, gradients = part
    job = Workload(load_model("gpt2-small").value, accumulation=accumulation)
    m, n = 2.0 * job.parameters, shape[0] * shape[1]
    ring, peers = (n - 1) / n, (shape[0] - 1) / shape[0]
    int8, int4 = 1 + 4 / 2048, 1 + 8 / 2048
    expected = (
        forward * m * ring * (int8 if forward < 1 else 1)
        + backward * m * ring
        + gradients * m * (peers * int4 if gradients < 1 else ring)
    )
    found = sent(strategy, shape, job).nic / accumulation
    assert found == pytest.approx(expected, rel=1e-3)  # buffers are rounded up to whole scales
