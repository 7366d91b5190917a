"""FSDP: its timeline, its traffic and its memory, against recurrences and formulas of their own."""

from collections.abc import Iterator

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from moments import line, most
from one_sample import simulate

from co2sim.hardware.cluster import Cluster, Link
from co2sim.models.operators import Model, plain_block
from co2sim.schedule.schedule import Collective, Compute, Kind, Layout
from co2sim.simulation.costs import traffic
from co2sim.strategies import parse
from co2sim.training.workload import Workload

SIZE = 1000
"""Parameters of a layer."""
RANKS = 4


def chain(layers: int, flops: float = 1e6, ends: int = 0) -> Model:
    """Equal layers between two blocks that take no time, with `ends` parameters each."""
    first, last = (
        plain_block(name, (ends,) if ends else (), 0.0, 0.0) for name in ("first", "last")
    )
    body = [plain_block(f"layer{n}", (SIZE,), flops, 0.0) for n in range(layers)]
    return Model("chain", (first, *body, last), tokens=1)


def step_time(strategy: str, model: Model, cluster: Cluster) -> float:
    """Seconds of an optimizer step, by simulation."""
    return simulate(cluster, model, strategy).step_time_s


# --- time --------------------------------------------------------------------------------------

Issued = tuple[str, str, float, list[str]]
"""Name, stream, seconds, and what it waits for."""


def issued(layers: int, times: dict[str, float], *, copies: bool) -> Iterator[Issued]:
    """What the hooks of torch issue in a step, in their order; one communicator takes all in turn.

    fully_shard (with copies): a gather of a forward pass waits for the copy before the last, one
    of a backward pass for the last; gradients are packed behind the last reduction.
    FullyShardedDataParallel: a gather waits until the layer before the last is released.
    """
    used: list[str] = []  # what releases the buffer of each gather

    def gather(turn: str, ahead: int) -> Issued:
        return (
            f"gather {turn}",
            "comm",
            times["gather"],
            used[-ahead:][:1] if len(used) >= ahead else [],
        )

    def copied(turn: str) -> Iterator[Issued]:
        used.append(f"copy {turn}" if copies else turn)
        yield f"copy {turn}", "compute", times["copy"], [f"gather {turn}"]

    for layer in range(layers):
        yield gather(f"forward {layer}", 2)
        yield from copied(f"forward {layer}")
        yield f"forward {layer}", "compute", times["forward"], []
    yield gather(f"backward {layers - 1}", 1 if copies else 2)
    for layer in reversed(range(layers)):
        yield from copied(f"backward {layer}")
        if layer:
            yield gather(f"backward {layer - 1}", 1 if copies else 2)
        yield f"backward {layer}", "compute", times["backward"], []
        last = [f"reduce {layer + 1}"] if copies and layer + 1 < layers else []
        yield f"pack {layer}", "compute", times["pack"], last
        yield f"reduce {layer}", "comm", times["reduce"], [f"pack {layer}"]


@given(
    st.integers(1, 6), st.floats(1e3, 1e8), st.floats(1e7, 1e11), st.sampled_from([1, 2]), st.data()
)
def test_a_step_takes_as_long_as_what_torch_issues_in_its_order(
    layers: int, flops: float, bandwidth: float, version: int, data: st.DataObject
) -> None:
    """Equal layers, any speed of compute and network: the same end as a queue per stream."""
    reduce = data.draw(st.sampled_from(["fp32", "bf16"]) if version == 2 else st.just("bf16"))
    job = Workload(chain(layers, flops))
    work = job.works()[1]
    sent = (RANKS - 1) / RANKS / bandwidth * SIZE
    width = 4 if reduce == "fp32" else 2
    times = {
        "forward": max(work.forward.flops, work.forward.memory_bytes) / 1e12,
        "backward": max(work.backward.flops, work.backward.memory_bytes) / 1e12,
        "gather": 2 * sent,
        "reduce": width * sent,
        "copy": 4 * SIZE / 1e12 if version == 2 else 0.0,
        # FullyShardedDataParallel joins the gradients of a flat parameter, and divides them
        "pack": (2 + width if version == 2 else 4 + 4) * SIZE / 1e12,
    }
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name, stream, seconds, waits in issued(layers, times, copies=version == 2):
        start = max([free.get(stream, 0.0), *(ends[wait] for wait in waits)])
        free[stream] = ends[name] = start + seconds
    optimizer = job.update.by_elements(-(-job.parameters // RANKS)).memory_bytes / 1e12
    found = step_time(
        f"fsdp(version={version},reduce={reduce},clip=false)",
        chain(layers, flops),
        tiny.cluster(RANKS, 1, inter=Link(bandwidth)),
    )
    assert found == pytest.approx(ends["reduce 0"] + optimizer, rel=1e-9)


# --- what is sent ------------------------------------------------------------------------------


def collectives(
    strategy: str, layout: tuple[int, int] = (2, 2), **changes: int
) -> list[Collective]:
    """In the order of issue, without the norm of gradients."""
    works = tiny.collectives(tiny.schedule(strategy, layout, **changes))
    return [work for work in works if work.buffer != "norm"]


def test_units_are_gathered_twice_and_the_root_once() -> None:
    """Of 2000 parameters 640 + 360 are the root; kept units are gathered once, with or without."""
    for accumulation in [1, 3]:
        for strategy, gathered, reduced in [
            ("fsdp", (1000 + 2 * 1000, "every"), "every"),
            ("fsdp(sync=last)", (1000 + 2 * 1000, "every"), "once"),
            ("fsdp(reshard_after_forward=false)", (2000, "every"), "every"),
            ("fsdp(reshard_after_forward=false,sync=last)", (2000, "once"), "once"),
        ]:
            times = {"every": accumulation, "once": 1}
            found = collectives(strategy, accumulation=accumulation)
            by_kind = {
                kind: sum(work.elements for work in found if work.kind == kind)
                for kind in ("all_gather", "reduce_scatter")
            }
            assert by_kind["all_gather"] == gathered[0] * times[gathered[1]]
            assert by_kind["reduce_scatter"] == 2000 * times[reduced]
            types = {work.kind: work.dtype for work in found}
            assert types == {"all_gather": "bf16", "reduce_scatter": "fp32"}


def test_hsdp_gathers_inside_nodes_and_reduces_shards_between_them() -> None:
    """NICs carry only an all-reduce of fp32 shards: 2 (N-1)/N of 4 bytes per parameter."""
    found = traffic(tiny.schedule("fsdp(shard=node,clip=false)", (3, 2)), tiny.cluster(3, 2))
    assert found.nic == pytest.approx(2 * 2 / 3 * 4 * 2000)
    gathers = 2 * 3000 + 4 * 2000  # both passes and the root, in bf16, and gradients in fp32
    assert found.gpu == pytest.approx(gathers / 2 + found.nic / 2)


def test_the_clip_waits_for_all_gradients_and_the_optimizer_for_the_clip() -> None:
    """One number is all-reduced between the norm and the scaling; it costs its latency."""
    model, slow = chain(4), tiny.cluster(RANKS, 1, inter=Link(1e10, 1e-5))
    with_clip, without = (step_time(f"fsdp(clip={on})", model, slow) for on in ("true", "false"))
    moved = (4 + 8) * SIZE * 4 / RANKS / 1e12
    ring = 2 * (RANKS - 1) * 1e-5 + 2 * (RANKS - 1) / RANKS * 4 / 1e10
    assert with_clip - without == pytest.approx(moved + ring)


def test_what_is_copied_is_what_is_gathered_and_reduced() -> None:
    """fully_shard reads and writes every gathered element, and packs every gradient in fp32."""
    for accumulation in [1, 2]:
        body = tiny.schedule("fsdp", accumulation=accumulation).body
        moved = {
            kernel: sum(
                op.work.memory_bytes
                for op in body
                if isinstance(op.work, Compute) and op.work.kernel == kernel
            )
            for kernel in ("copy", "pack")
        }
        assert moved == {"copy": accumulation * 3000 * 4, "pack": accumulation * 2000 * 6}


def large() -> Workload:
    """Seven layers of 300 million parameters, in two micro-steps."""
    layers = [plain_block(f"layer{n}", (300_000_000,), 1e6, 0.0) for n in range(7)]
    ends = [plain_block(name, (1000,), 0.0, 0.0) for name in ("first", "last")]
    return Workload(Model("large", (ends[0], *layers, ends[1]), tokens=1), accumulation=2)


def test_megatron_fsdp_gathers_layers_ahead_until_these_are_500_million() -> None:
    """Beside a layer of 300 million two others: the gather begins two passes before its own."""
    made = parse("fsdp(version=megatron)").schedule(large(), Layout(2, 2))
    waits = {op.name: [wait.op for wait in op.after] for op in made.body}
    assert waits["m0.gather.forward.layer5"] == ["m0.forward.layer2"]
    assert waits["m1.gather.forward.layer5"] == ["m1.forward.layer2"]
    assert waits["m0.gather.backward.layer1"] == ["m0.backward.layer4"]
    assert waits["m0.gather.backward.layer6"] == ["m0.forward.last"]
    held = parse("fsdp(version=megatron)").memory(large(), Layout(2, 2))["gathered"]
    assert held.forward[2] == 2 * (2000 + 3 * 300_000_000)  # type: ignore[union-attr, index]


def test_megatron_fsdp_waits_where_more_than_a_billion_gradients_are_under_way() -> None:
    """Of 300 million each four are more; at the end of a micro-step it waits for all."""
    made = parse("fsdp(version=megatron,reduce=bf16)").schedule(large(), Layout(2, 2))
    waits = {op.name: [wait.op for wait in op.after] for op in made.body}
    assert waits["m0.backward.layer2"] == ["m0.reduce.layer6", "m0.gather.backward.layer2"]
    assert "m0.reduce.first" in waits["m1.forward.first"]
    held = parse("fsdp(version=megatron,reduce=bf16)").memory(large(), Layout(2, 2))["bucket"]
    assert held.backward[1] == 2 * 4 * 300_000_000  # type: ignore[union-attr, index]


def test_megatron_fsdp_all_reduces_shards_between_nodes_once_a_step() -> None:
    """Inside a node gradients are reduced in every micro-step, between nodes in the last one."""
    found = collectives("fsdp(version=megatron,shard=node)", (3, 2), accumulation=3)
    sums = {kind: sum(w.elements for w in found if w.kind == kind) for kind in Kind}
    assert (sums[Kind.REDUCE_SCATTER], sums[Kind.ALL_REDUCE]) == (3 * 2000, 1000)
    assert sums[Kind.ALL_GATHER] == 1000 + 3 * 2 * 1000


# --- memory ------------------------------------------------------------------------------------


def memory(strategy: str, **changes: int) -> dict[str, float]:
    """The most of each item, of the tiny model: blocks of 640, 500, 500 and 360 parameters."""
    return most(tiny.job(**changes), strategy, Layout(4, 2))


def test_what_is_whole_is_the_root_and_two_units() -> None:
    """Gathered in bf16; a gradient of a layer in the type of the reduction, one in bf16.

    The gradient of the root, of both ends, waits in bf16 for its reduction at the end.
    """
    assert memory("fsdp")["gathered"] == 2 * (1000 + 500 + 500)
    assert memory("fsdp")["bucket"] == (2 + 4) * 1000
    assert memory("fsdp(reduce=bf16)")["bucket"] == (2 + 2) * 1000
    found = line(Workload(chain(3, ends=100)), "fsdp", Layout(4, 2))
    back = found.moments.index("backward of layer1")
    for name, size in (("gathered", 2 * 2200), ("bucket", 4 * 1000), ("unreduced", 2 * 1100)):
        assert found.items[name][back] == size
    assert memory("fsdp(reshard_after_forward=false)")["gathered"] == 2 * 2000
    assert memory("fsdp(reshard_after_forward=2)")["resharded"] == 2 * 1000 / 2
