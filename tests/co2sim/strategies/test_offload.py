"""Optimizer states, or activations, on the host: what crosses the link, memory, and step times."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from moments import line
from one_sample import simulate

from co2sim import strategies
from co2sim.catalog import load_optimizer
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import Compute, DType, Kind, Layout, Schedule
from co2sim.simulation.costs import traffic
from co2sim.simulation.run import execute
from co2sim.training.memory import host_memory, moved_to_host
from co2sim.training.workload import Workload

M = 2000
"""Parameters of the tiny model."""

SHARES = {"ddp": 1, "zero1": 4, "zero1(shard=node)": 2, "zero2": 4, "zero3": 4, "fsdp": 4}
"""GPUs that divide optimizer states on two nodes of two."""

GRADIENT = {"fsdp": 4}
"""Bytes of one that goes to the host, if not 2: fsdp reduces in fp32."""


def cluster(**changes: Any) -> Cluster:
    """Two nodes of two GPUs: 4 GB/s to a host whose optimizer moves 0.5 GB/s for each."""
    known = {
        "gpu": tiny.gpu(host_link=5e9),
        "host_link_efficiency": 0.8,
        "host_memory_bandwidth": 2e9,
        "host_optimizer_efficiency": 0.25,
    }
    return tiny.cluster(2, 2, **known | changes)


def on_host(schedule: Schedule) -> dict[str, tuple[str, float]]:
    """Place and bytes of what is not on the GPU, by op."""
    return {
        op.name: (op.work.place, op.work.memory_bytes)
        for op in schedule.body
        if isinstance(op.work, Compute) and op.work.place != "gpu"
    }


@pytest.mark.parametrize("strategy", SHARES)
@given(st.integers(1, 3))
def test_a_share_goes_to_the_host_once_a_step_and_comes_back(
    strategy: str, accumulation: int
) -> None:
    """Gradients of 2 bytes (fsdp: 4), 28 of optimizer traffic, parameters of 2, for each."""
    made = tiny.schedule(strategy, offload="optimizer", accumulation=accumulation)
    share, width = M // SHARES[strategy], GRADIENT.get(strategy, 2)
    assert on_host(made) == {
        "to_host": ("link", width * share),
        "optimizer": ("host", 28 * share),
        "from_host": ("link", 2 * share),
    }


@pytest.mark.parametrize("strategy", SHARES)
def test_nothing_else_changes_but_where_the_optimizer_runs(strategy: str) -> None:
    """The same collectives; and the next step begins behind the parameters that come back."""
    plain, offloaded = (tiny.schedule(strategy, offload=one) for one in ("none", "optimizer"))
    assert traffic(plain, cluster()) == traffic(offloaded, cluster())
    trace = execute(offloaded, cluster(), precision="bf16", rounds=2)
    assert trace.violations(offloaded) == []
    spans = tiny.by_op(trace)
    back = spans[0, "from_host"].end
    assert all(span.start >= back for (turn, _), span in spans.items() if turn == 1)
    order = [spans[0, name] for name in ("to_host", "optimizer", "from_host")]
    assert all(one.end == other.start for one, other in pairwise(order))


@pytest.mark.parametrize("strategy", SHARES)
def test_a_step_takes_transfers_and_the_host_longer_and_its_own_optimizer_less(
    strategy: str,
) -> None:
    """4 GB/s over the link, 0.5 GB/s on the host, and 1 TB/s on the GPU that no longer does it."""
    plain, offloaded = (
        simulate(cluster(), tiny.model(), strategy, offload=one) for one in ("none", "optimizer")
    )
    share, width = M / SHARES[strategy], GRADIENT.get(strategy, 2)
    more = (width + 2) * share / 4e9 + 28 * share / 0.5e9 - 28 * share / 1e12
    assert offloaded.step_time_s - plain.step_time_s == pytest.approx(more, rel=1e-6)
    assert offloaded.exposed_comm_s == pytest.approx(plain.exposed_comm_s, rel=1e-6, abs=1e-12)
    parts = offloaded.breakdown_s
    assert parts["to_host"] == pytest.approx(width * share / 4e9)
    assert parts["host_optimizer"] == pytest.approx(28 * share / 0.5e9)
    assert parts["from_host"] == pytest.approx(2 * share / 4e9)


@pytest.mark.parametrize("strategy", SHARES)
def test_states_and_master_copies_leave_the_gpu_for_the_host(strategy: str) -> None:
    """12 bytes a parameter and its gradient on the host, at every moment; fsdp keeps 2 bytes."""
    made = strategies.parse(strategy)
    jobs = [tiny.job(offload=one) for one in ("none", "optimizer")]
    plain, offloaded = (line(job, strategy, Layout(2, 2)) for job in jobs)
    share, width = M / SHARES[strategy], GRADIENT.get(strategy, 2)
    gone = 12 if strategy != "fsdp" else 8 + 2  # moments, and 2 of the 4 bytes of a parameter
    assert plain.total - offloaded.total == pytest.approx(gone * share)
    assert "optimizer" not in offloaded.items
    schedule = made.schedule(jobs[1], Layout(2, 2))
    assert host_memory(jobs[1], schedule) == pytest.approx((12 + width) * share)
    assert host_memory(jobs[0], made.schedule(jobs[0], Layout(2, 2))) == 0


@pytest.mark.parametrize(
    ("changes", "there", "moved", "held"),
    [
        ({"precision": DType.FP32}, 4, 24, 12 + 4),
        ({"optimizer": load_optimizer("sgd").value}, 2, 20, 8 + 2),
        ({"main_gradients": True}, 4, 28, 12 + 4),
    ],
)
def test_other_types_and_optimizers(
    changes: dict[str, Any], there: int, moved: int, held: int
) -> None:
    """fp32: a master copy on the host, too. sgd: one moment. Gradients as the GPU has them."""
    job = tiny.job(offload="optimizer", **changes)
    made = strategies.parse("zero1").schedule(job, Layout(2, 2))
    sizes = {name: size * 4 / M for name, (_, size) in on_host(made).items()}
    assert sizes == {"to_host": there, "optimizer": moved, "from_host": job.precision.bytes}
    assert host_memory(job, made) == held * M / 4


LOADED = {"zero3": 2, "zero3(gathers=2)": 2, "fsdp": 4, "fsdp(shard=node)": 4}
"""Bytes of a parameter that come over the link before a gather: fsdp casts behind it."""


@pytest.mark.parametrize("strategy", LOADED)
def test_parameters_on_the_host_come_before_each_gather(strategy: str) -> None:
    """A share of all that is gathered by all; gradients go once, and nothing comes back."""
    made, plain = (tiny.schedule(strategy, offload=one) for one in ("parameters", "none"))
    ranks = 2 if "node" in strategy else 4
    gathered = sum(work.elements for work in tiny.collectives(plain, Kind.ALL_GATHER))
    places = on_host(made)
    loaded = sum(size for name, (_, size) in places.items() if name.startswith("load"))
    gone = sum(size for name, (_, size) in places.items() if name.startswith(("store", "to_host")))
    assert loaded == LOADED[strategy] * gathered / ranks
    assert gone == GRADIENT.get(strategy.partition("(")[0], 2) * M / ranks
    assert places["optimizer"] == ("host", 28 * M / ranks)
    assert "from_host" not in places
    assert traffic(plain, cluster()) == traffic(made, cluster())


@pytest.mark.parametrize("strategy", LOADED)
def test_a_block_is_loaded_then_gathered_then_used(strategy: str) -> None:
    """The trace keeps the rules; the next step's first load waits for the host."""
    made = tiny.schedule(strategy, offload="parameters", accumulation=2)
    trace = execute(made, cluster(), precision="bf16", rounds=2)
    assert trace.violations(made) == []
    spans = tiny.by_op(trace)
    host = spans[0, "optimizer"].end
    assert all(s.start >= host for (turn, _), s in spans.items() if turn == 1)
    loads = [name for turn, name in spans if turn == 0 and "load" in name and "layer1" in name]
    for name in loads:
        gather = spans[0, name.replace("load", "gather")]
        assert spans[0, name].end <= gather.start


@pytest.mark.parametrize("strategy", LOADED)
def test_nothing_of_a_parameter_stays_but_what_is_gathered(strategy: str) -> None:
    """Of 16 bytes a parameter none are on the GPU, and all on the host."""
    plain, there = (
        line(tiny.job(offload=one), strategy, Layout(2, 2)) for one in ("none", "parameters")
    )
    ranks = 2 if "node" in strategy else 4
    assert not there.items.keys() & {"parameters", "gradients", "optimizer"}
    assert moved_to_host(plain, there) == pytest.approx(16 * M / ranks)
    assert (there.items["gathered"] == plain.items["gathered"]).all()


def test_micro_steps_add_up_gradients_on_the_host() -> None:
    """Of fsdp each reduces: from the second on two are read and their sum is written, 4 bytes."""
    made = tiny.schedule("fsdp", offload="parameters", accumulation=3)
    added = {k: size for k, (_, size) in on_host(made).items() if ".add" in k}
    assert sum(added.values()) == 2 * 12 * M / 4


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zeropp", "co2", "fsdp(version=1)"])
def test_strategies_that_share_no_parameters_refuse(strategy: str) -> None:
    """In one line."""
    with pytest.raises(OptionError, match="offload=parameters"):
        simulate(cluster(), tiny.model(), strategy, offload="parameters")


def test_a_host_multiplies_no_matrices() -> None:
    """Muon's products on a host have no known speed."""
    with pytest.raises(OptionError, match="optimizer=muon"):
        tiny.job(offload="optimizer", optimizer=load_optimizer("muon").value)


# --- activations ----------------------------------------------------------------------------------


LAYERS = 5
KEPT = 2 * 2000 + 4 * 2 * 16
"""Bytes of a layer: 2,000 elements, and a statistic of each of 2 heads of 16 tokens."""


def deep(**options: Any) -> Workload:
    """The tiny model with five layers, and a head that cannot run again."""
    model = tiny.model()
    first, layer, *_, head = model.blocks
    layers = [replace(layer, name=f"layer{number}") for number in range(LAYERS)]
    blocks = first, *layers, replace(head, boundary=0.0)
    return tiny.job(model=replace(model, blocks=blocks), **options)


def test_all_but_the_last_two_layers_go_and_come() -> None:
    """Each behind its forward pass, and before its backward pass, in both micro-steps."""
    job = deep(offload="activations", accumulation=2)
    made = strategies.parse("ddp").schedule(job, Layout(1, 1))
    names = [f"m{micro}.{way}.layer{n}" for micro in (0, 1) for way, n in MOVES]
    assert on_host(made) == dict.fromkeys(names, ("link", KEPT))
    assert host_memory(job, made) == 0


MOVES = [("offload", 0), ("offload", 1), ("offload", 2), ("fetch", 2), ("fetch", 1), ("fetch", 0)]


def seconds(job: Workload, link: float) -> float:
    """Of a step on one GPU whose link moves so many bytes a second."""
    made = strategies.parse("ddp").schedule(job, Layout(1, 1))
    alone = cluster(gpu=tiny.gpu(host_link=link), host_link_efficiency=1.0).resized(1)
    return tiny.makespan(execute(made, alone, precision="bf16", rounds=1))


def test_a_fast_link_costs_nothing_and_a_slow_one_what_passes_do_not_hide() -> None:
    """By hand: of 5 layers 3 copies of c each way hide 3 passes of f, and 3 of b."""
    work = deep().works()[1]
    f, b = (max(one.flops, one.memory_bytes) / 1e12 for one in (work.forward, work.backward))
    plain = seconds(deep(), 1e9)
    job = deep(offload="activations")
    assert seconds(job, KEPT / f) == pytest.approx(plain)
    c = 10 * b
    longer = (LAYERS - 2) * (2 * c - f - b)
    assert seconds(job, KEPT / c) == pytest.approx(plain + longer)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_layers_are_on_the_gpu(recompute: str) -> None:
    """In full recomputation their inputs: 200 elements of two bytes."""
    plain, job = (deep(offload=o, recompute=recompute) for o in ("none", "activations"))
    name, size = {"none": ("activations", KEPT), "full": ("checkpoints", 400)}[recompute]
    there, whole = (line(one, "ddp", Layout(1, 1)).items[name] for one in (job, plain))
    gone = whole - there
    loss, last = LAYERS + 2, 2 * (LAYERS + 2)
    assert list(gone[:loss] / size) == [0, 0, 0, 1, 2, 3, 3]
    assert list(gone[loss : last + 2] / size) == [3, 3, 3, 3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "strategy",
    [
        *("zero1", "zero2(bucket=700)", "zero3", "zero3(max_reuse=1)", "zero3(reduce_bucket=300)"),
        *("zeropp", "fsdp", "fsdp(version=1)", "co2(tau=2,delay=1)", "diloco(tau=2,worker=node)"),
    ],
)
def test_every_strategy_waits_for_what_comes_back(strategy: str) -> None:
    """The trace keeps the rules, and no pass of a layer goes back before its activations come."""
    for recompute in ("none", "full"):
        job = deep(offload="activations", accumulation=2, recompute=recompute)
        made = strategies.parse(strategy).schedule(job, Layout(2, 2))
        trace = execute(made, cluster(gpu=tiny.gpu(host_link=1e6)), precision="bf16", rounds=2)
        assert trace.violations(made) == []
        spans = tiny.by_op(trace)
        fetches = [(turn, name) for turn, name in spans if "fetch." in name]
        assert len(fetches) == 2 * 2 * (LAYERS - 2) * made.steps
        for turn, name in fetches:
            before, _, layer = name.partition("fetch.")
            uses = [
                span
                for (other, used), span in spans.items()
                if other == turn and used.startswith((f"{before}backward.{layer}",))
            ]
            assert uses
            assert min(span.start for span in uses) >= spans[turn, name].end
