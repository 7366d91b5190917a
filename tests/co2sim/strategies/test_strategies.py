"""Every strategy: its golden schedule, its options, and that it runs on every layout."""

import re
from collections.abc import Callable

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim import strategies
from co2sim.hardware.cluster import Link
from co2sim.models.operators import Attention, Block, Model, Operator, Product, plain_block
from co2sim.schedule.schedule import After, Collective, Compute, DType, Kind, Layout, Op
from co2sim.simulation.costs import traffic
from co2sim.simulation.run import execute
from co2sim.strategies.sharded import prefetch_waits
from co2sim.strategies.step import Bucket, buckets, pieces
from co2sim.training.workload import Workload

GOLDEN = [
    ("ddp(bucket_mib=0.001)", {}),
    ("ddp", {"accumulation": 2}),
    ("zero1(bucket=700)", {"accumulation": 2}),
    ("zero2(bucket=700)", {"accumulation": 2}),
    ("zero2(bucket=700,owners=true)", {}),
    ("zero2(bucket=700,shard=node)", {"accumulation": 2}),
    ("zero3", {}),
    ("zero3(prefetch=900)", {"accumulation": 2}),
    ("zeropp", {}),
    ("zeropp(qwz=false,hpz=false)", {}),
    ("zeropp(chunks=2)", {}),
    ("fsdp", {}),
    ("fsdp(version=1,shard=node)", {}),
    ("fsdp(reshard_after_forward=false,sync=last)", {"accumulation": 2}),
    ("local_sgd(tau=2)", {}),
    ("overlap_local_sgd(tau=2)", {}),
    ("slowmo(tau=2)", {}),
    ("diloco(tau=2)", {}),
    ("diloco(tau=2,fragments=2,delay=1,dtype=int4)", {}),
    ("co2.published(tau=2)", {}),
    ("co2.published(tau=2,worker=node)", {}),
    ("co2.published(tau=1,staleness=2,worker=node,inner=zero3)", {}),
    ("co2(tau=3,delay=2)", {}),
    ("co2(tau=2,delay=1,worker=node)", {}),
    ("co2(tau=2,delay=2,worker=node,average=leader)", {}),
    ("co2(tau=2,delay=1,dtype=int8)", {}),
]


@pytest.mark.parametrize(("strategy", "changes"), GOLDEN, ids=[f"{s} {c}" for s, c in GOLDEN])
def test_the_schedule_is_the_golden_one(
    strategy: str, changes: dict[str, int], golden: Callable[[str, str], None]
) -> None:
    """On 2 nodes of 2 GPUs a strategy does for the tiny model what its golden file says."""
    words = re.findall(r"[a-z0-9_.]+", strategy) + [f"{k}{v}" for k, v in changes.items()]
    golden("-".join(words), f"{tiny.schedule(strategy, **changes)}\n")


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_strategy_runs(strategy: str, accumulation: int) -> None:
    """On three nodes of two GPUs by the rules, with the passes of all micro-steps' blocks."""
    schedule = tiny.schedule(strategy, (3, 2), accumulation=accumulation)
    trace = execute(schedule, tiny.cluster(3, 2), precision="bf16", rounds=2)
    assert trace.violations(schedule) == []
    assert len(trace.spans) == 2 * len(schedule.body) * len(trace.ranks)
    kernels = [op.work.kernel for op in schedule.body if isinstance(op.work, Compute)]
    assert kernels.count("forward") == 4 * accumulation * schedule.steps


def test_one_gpu_sends_nothing() -> None:
    """Alone, every strategy takes as long as with free communication."""
    alone = tiny.cluster(1, 1)
    for strategy in tiny.VARIANTS:
        schedule = tiny.schedule(strategy, (1, 1))
        paid, free = (
            execute(schedule, alone, precision="bf16", rounds=2, free_communication=free)
            for free in (False, True)
        )
        assert tiny.makespan(paid) == tiny.makespan(free), strategy


@given(st.integers(1, 4))
def test_each_parameter_is_communicated_once_per_pass(accumulation: int) -> None:
    """Gradients: once a step, or every micro-step. Parameters: once a step, or before each pass."""
    for strategy, kind, reduced, gathered in (
        ("ddp", Kind.ALL_REDUCE, 1, 0),
        ("zero1", Kind.REDUCE_SCATTER, 1, 1),
        ("zero2", Kind.REDUCE_SCATTER, accumulation, 1),
        ("zero3", Kind.REDUCE_SCATTER, accumulation, 2 * accumulation),
    ):
        schedule = tiny.schedule(strategy, accumulation=accumulation)
        for one, times in ((kind, reduced), (Kind.ALL_GATHER, gathered)):
            assert sum(w.elements for w in tiny.collectives(schedule, one)) == 2000 * times, (
                strategy
            )


@pytest.mark.parametrize(
    "strategy", ["zero3", "zeropp", "zeropp(chunks=2)", "fsdp", "ddp", "zero2"]
)
def test_parameters_are_read_only_after_the_last_update(strategy: str) -> None:
    """No gather or forward starts before the optimizer of the round before has ended.

    The model starts with a block that has no parameters, such as a resize or a patchify.
    """
    first = plain_block("first", (), 1e6, 0.0)
    blocks = (first, *(plain_block(name, (500,), 2e6, 0.0) for name in "abc"))
    job = Workload(Model("headless", blocks, tokens=1))
    schedule = strategies.parse(strategy).schedule(job, Layout(2, 2))
    trace = execute(schedule, tiny.cluster(), precision="bf16", rounds=3)
    updated = {s.round: s.end for s in trace.spans if s.op == "optimizer"}
    early = [
        span.op
        for span in trace.spans
        if ("gather.forward" in span.op or span.op.startswith("forward"))
        and span.round > 0
        and span.start < updated[span.round - 1]
    ]
    assert early == []


# --- building blocks ---------------------------------------------------------------------------

tensor_lists = st.lists(st.lists(st.integers(1, 50), max_size=4).map(tuple), min_size=1, max_size=6)


@given(tensor_lists, st.floats(0.0, 120.0))
def test_buckets_hold_every_gradient_once_and_close_when_full(
    tensors: list[tuple[int, ...]], capacity: float
) -> None:
    """Walking tensors from the last to the first, a bucket closes with the tensor that fills it."""
    blocks = [plain_block(f"b{n}", sizes, 0.0, 0.0) for n, sizes in enumerate(tensors)]
    flat = [(size, n) for n, sizes in enumerate(tensors) for size in sizes][::-1]
    expected: list[Bucket] = []
    rest = flat
    while rest:
        count = next(
            (i for i in range(1, len(rest)) if sum(size for size, _ in rest[:i]) >= capacity),
            len(rest),
        )
        taken, rest = rest[:count], rest[count:]
        expected.append(Bucket(sum(size for size, _ in taken), taken[-1][1]))
    assert buckets(blocks, capacity) == expected


@given(st.integers(1, 10_000), st.integers(1, 3000))
def test_pieces_are_few_nearly_equal_and_complete(elements: int, capacity: int) -> None:
    """As few pieces as possible, none above the capacity, all within one element of each other."""
    found = pieces(elements, capacity)
    assert sum(found) == elements
    assert max(found) <= capacity
    assert (len(found) - 1) * capacity < elements
    assert max(found) - min(found) <= 1


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 60), st.integers(0, 90)
)
def test_prefetch_keeps_its_budgets_and_uses_them(
    sizes: list[int], prefetch: int, max_live: int
) -> None:
    """What is fetched while use k computes keeps both budgets; nothing could be fetched earlier.

    A fetch that waits for the compute just before its own use is always allowed.
    """
    waits = prefetch_waits(sizes, prefetch, max_live)
    for i, wait in enumerate(waits):
        assert -1 <= wait < i
        for k in range(wait + 1, i):  # while use k computes, k+1 .. i are present or under way
            ahead = sum(sizes[k + 1 : i + 1])
            assert ahead <= prefetch
            assert ahead + sizes[k] <= max_live
        if wait >= 0:
            ahead = sum(sizes[wait + 1 : i + 1])
            assert ahead > prefetch or ahead + sizes[wait] > max_live


# --- CO2 and its relatives ---------------------------------------------------------------------


@given(
    st.sampled_from(
        [
            *(("diloco", fragments, delay) for fragments in (1, 2, 3, 8) for delay in (0, 1, 4, 7)),
            *(("co2", 1, delay) for delay in (1, 4, 7, 8)),
            *(("co2", fragments, delay) for fragments in (2, 4, 8) for delay in (1, 3)),
        ]
    )
)
def test_an_average_is_used_delay_steps_after_its_launch(case: tuple[str, int, int]) -> None:
    """An outer step comes exactly `delay` local steps after the kernel that fills the buffer."""
    name, fragments, delay = case
    schedule = tiny.schedule(f"{name}(tau=8,fragments={fragments},delay={delay})")
    step, launched, found = 0, {}, set()
    for instance in schedule.instances(4):
        name = instance.op.name
        step += name.endswith("optimizer")
        if name.startswith(("delta", "displacement")):
            launched[name.removeprefix("delta").removeprefix("displacement"), instance.round] = step
        if name.startswith("outer"):
            wait = instance.op.after[0].rounds_ago
            source = (name.removeprefix("outer"), instance.round - wait)
            if instance.round >= wait:
                found.add(step - launched[source])
    assert found == {delay}
    shares = [w.elements for w in tiny.collectives(schedule, Kind.ALL_REDUCE)]
    assert len(shares) == fragments
    assert sum(shares) == 2000


@given(
    st.sampled_from(["co2.published", "slowmo", "local_sgd", "overlap_local_sgd", "diloco"]),
    st.sampled_from(["ddp", "zero1", "zero2", "zero3", "zeropp", "fsdp"]),
)
def test_a_node_as_worker_averages_shares_among_peers(strategy: str, inner: str) -> None:
    """Each rank averages its share with its peers; nothing else leaves the node."""
    schedule = tiny.schedule(f"{strategy}(tau=2,worker=node,inner={inner})", (3, 2))
    outside = [w for w in tiny.collectives(schedule) if w.group.name != "node"]
    assert [(w.kind, w.group.name, w.elements, w.dtype) for w in outside] == [
        (Kind.ALL_REDUCE, "peers", 1000, DType.FP32)
    ]


def test_a_leader_averages_everything_and_broadcasts_it_inside_its_node() -> None:
    """As the authors' code does: one rank of each node, then a broadcast, awaited a round later."""
    schedule = tiny.schedule("co2.published(tau=2,worker=node,average=leader)", (3, 2))
    outer = [op for op in schedule.body if op.stream == "outer"]
    works = [op.work for op in outer if isinstance(op.work, Collective)]
    assert [(w.kind, str(w.group), w.elements) for w in works] == [
        (Kind.ALL_REDUCE, "leaders", 2000),
        (Kind.BROADCAST, "node", 2000),
    ]
    waits = {op.name: op.after for op in schedule.body}
    assert After("spread", 1) in waits["outer"]
    shares = traffic(tiny.schedule("co2.published(tau=2,worker=node)", (3, 2)), tiny.cluster(3, 2))
    assert traffic(schedule, tiny.cluster(3, 2)).nic == pytest.approx(shares.nic)
    for shape in ((3, 1), (1, 2)):  # nobody to broadcast to, or nothing to average
        alone = tiny.schedule("co2.published(tau=2,worker=node,average=leader)", shape)
        assert all(op.name != "spread" for op in alone.body)


@pytest.mark.parametrize(("max_reuse", "fetches"), [(1000, 2), (999, 3)])
def test_a_block_is_fetched_a_third_time_beyond_the_reuse_distance(
    max_reuse: int, fetches: int
) -> None:
    """Recomputation and gradients of a block of 500 use it 1000 elements apart."""
    strategy = f"zero3(max_reuse={max_reuse},prefetch=0)"
    schedule = tiny.schedule(strategy, recompute="full")
    gathers = [w for w in tiny.collectives(schedule, Kind.ALL_GATHER) if w.buffer == "layer1"]
    assert len(gathers) == fetches


def test_the_parts_of_a_backward_pass_add_up_to_the_whole() -> None:
    """FLOP, bytes, and calls of the framework: a gradient reduced in parts costs no more compute.

    The block's tensors of 3000, 1000 and 1000 are reduced as 1000, 1000 and 3000.
    """
    block = Block(
        "x",
        (
            Operator(tensors=(3000, 1000, 1000), work=5e6, kept=50.0, calls=30),
            Product(rows=16, inner=10, columns=10),
            Attention(rows=16, heads=2, keys=2, wide=250, value=250, length=16),
        ),
    )
    job = Workload(Model("m", (block,), tokens=1))
    works = {}
    for bucket in (10_000, 1000):
        strategy = strategies.parse(f"zero3(reduce_bucket={bucket})")
        body = strategy.schedule(job, Layout(2, 2)).body
        works[bucket] = [
            op.work for op in body if isinstance(op.work, Compute) and "backward" in op.name
        ]
    (whole,), parts = works[10_000], works[1000]
    assert [part.flops / whole.flops for part in parts] == pytest.approx([0.2, 0.2, 0.6])
    assert sum(part.memory_bytes for part in parts) == pytest.approx(whole.memory_bytes)
    for amount in (
        lambda kernels: kernels.calls,
        lambda kernels: kernels.elementwise_bytes,
        lambda kernels: kernels.products[0].flops,
        lambda kernels: kernels.products[0].bytes,
        lambda kernels: kernels.attention.flops + kernels.attention.backward,
        lambda kernels: kernels.attention.bytes,
    ):
        assert sum(amount(part.kernels) for part in parts) == pytest.approx(amount(whole.kernels))


# --- ceilings ----------------------------------------------------------------------------------


# --- ZeRO++ in chunks ----------------------------------------------------------------------------


def reduction(chunks: int) -> list[Op]:
    """What reduces the gradient of a layer, in the order of issue."""
    body = tiny.schedule(f"zeropp(chunks={chunks})").body
    kept = ("quantize", "exchange", "sum")
    return [op for op in body if op.name.endswith(".layer0") and op.name.startswith(kept)][3:]


@given(st.integers(2, 30))
def test_chunks_send_the_same_gradient(chunks: int) -> None:
    """Every element goes through both exchanges once, in parts within an element of each other."""
    whole, parts = (
        [work for op in reduction(n) if isinstance(work := op.work, Collective)]
        for n in (1, chunks)
    )
    for one in whole:
        sizes = [work.elements for work in parts if work.group == one.group]
        assert len(sizes) == chunks
        assert one.elements <= sum(sizes) <= one.elements + chunks  # halves are rounded up
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_are_a_pipeline_through_node_and_peers(chunks: int) -> None:
    """Long exchanges: the longer one of all chunks, and the shorter one of a single chunk.

    1000 MB of int4 gradients: s in the node, t among peers, one after the other s + t; in n chunks
    s + t / n or t + s / n, whichever is longer.
    """
    blocks = (plain_block("layer", (10**9,), 0.0, 0.0),)
    job = Workload(Model("one", blocks, tokens=1))
    strategy = f"zeropp(qwz=false,hpz=false,prefetch=0,chunks={chunks},scale_block=1000000)"
    fast = tiny.gpu(memory_bandwidth=1e18, peak={"bf16": 1e18})
    for inter in (5e8, 5e9):
        cluster = tiny.cluster(intra=Link(1e9), inter=Link(inter), gpu=fast)
        schedule = strategies.parse(strategy).schedule(job, Layout(2, 2))
        spans = tiny.by_op(execute(schedule, cluster, precision="bf16", rounds=1))
        start = spans[0, "exchange_node1.layer"].start
        found = spans[0, f"sum_peers{chunks}.layer"].end - start
        inside = 5e8 / 2 / 1e9
        between = 5e8 / 2 / inter  # two ranks send half of a half each
        expected = max(inside, between) + min(inside, between) / chunks
        assert found == pytest.approx(expected, rel=1e-4)
