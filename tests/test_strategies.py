"""Every strategy: its golden schedule, its options, and that it runs on every layout."""

import re
import time
from collections.abc import Callable

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim import strategies
from co2sim.cluster import Link
from co2sim.cost import traffic
from co2sim.errors import Co2simError, OptionError
from co2sim.schedule import After, Collective, Compute, DType, Kind, Layout, Op, Schedule
from co2sim.simulator import execute
from co2sim.strategies.chaining import chain
from co2sim.strategies.sharded import prefetch_waits
from co2sim.strategies.step import Bucket, Step, buckets, pieces, title
from co2sim.study import simulate
from co2sim.workload import Block, MatMul, Model, Workload

GOLDEN = [
    ("ddp(bucket_mib=0.001)", {}),
    ("ddp", {"accumulation": 2}),
    ("zero1(bucket=700)", {"accumulation": 2}),
    ("zero2(bucket=700)", {"accumulation": 2}),
    ("zero2(bucket=700,owners=true)", {}),
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
    ("co2(tau=2)", {}),
    ("co2(tau=2,worker=node)", {}),
    ("co2(tau=1,staleness=2,worker=node,inner=zero3)", {}),
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
@pytest.mark.parametrize("layout", tiny.LAYOUTS, ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_strategy_runs_on_every_layout(
    strategy: str, layout: tuple[int, int], accumulation: int
) -> None:
    """From one GPU up, with accumulation, a strategy gives a schedule that runs by the rules."""
    schedule = tiny.schedule(strategy, layout, accumulation=accumulation)
    trace = execute(schedule, tiny.cluster(*layout), precision="bf16", rounds=2)
    assert trace.violations(schedule) == []
    assert len(trace.spans) == 2 * len(schedule.body) * len(trace.ranks)
    micro_steps = sum(
        op.work.kernel == "forward" for op in schedule.body if isinstance(op.work, Compute)
    )
    assert micro_steps == 4 * accumulation * schedule.steps


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_one_gpu_sends_nothing(strategy: str) -> None:
    """Alone, every strategy takes as long as with free communication."""
    schedule, alone = tiny.schedule(strategy, (1, 1)), tiny.cluster(1, 1)
    paid, free = (
        execute(schedule, alone, precision="bf16", rounds=3, free_communication=free)
        for free in (False, True)
    )
    assert tiny.makespan(paid) == tiny.makespan(free)


def collectives(schedule: Schedule, kind: Kind) -> list[Collective]:
    """The collectives of a kind, in body order."""
    works = [op.work for op in schedule.body]
    return [w for w in works if isinstance(w, Collective) and w.kind is kind]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "reduced", "gathered"),
    [
        ("ddp", 1, 0),
        ("zero1", 1, 1),
        ("zero2", "every", 1),
        ("zero3", "every", "every twice"),
    ],
)
def test_each_parameter_is_communicated_once_per_pass(
    strategy: str, reduced: int | str, gathered: int | str, accumulation: int
) -> None:
    """Gradients: once a step, or every micro-step. Parameters: once a step, or before each pass."""
    schedule = tiny.schedule(strategy, accumulation=accumulation)
    times = {0: 0, 1: 1, "every": accumulation, "every twice": 2 * accumulation}
    kind = Kind.ALL_REDUCE if strategy == "ddp" else Kind.REDUCE_SCATTER
    assert sum(w.elements for w in collectives(schedule, kind)) == 2000 * times[reduced]
    assert sum(w.elements for w in collectives(schedule, Kind.ALL_GATHER)) == 2000 * times[gathered]


@pytest.mark.parametrize(
    "strategy", ["zero3", "zeropp", "zeropp(chunks=2)", "fsdp", "ddp", "zero2"]
)
def test_parameters_are_read_only_after_the_last_update(strategy: str) -> None:
    """No gather or forward starts before the optimizer of the round before has ended.

    The model starts with a block that has no parameters, such as a resize or a patchify.
    """
    first = Block("first", (), 1e6, 0.0)
    blocks = (first, *(Block(name, (500,), 2e6, 0.0) for name in "abc"))
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
    blocks = [Block(f"b{n}", sizes, 0.0, 0.0) for n, sizes in enumerate(tensors)]
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


def test_a_chain_waits_step_for_step_and_round_for_round() -> None:
    """Each copy of a step waits for the one before, the first for the last of the round before."""
    work = Compute("w", 1.0)
    step = Step(
        [Op("read", work, "a"), Op("write", work, "b", (After("read"),))], ("read",), ("write",)
    )
    first, _, second, _ = chain(step, 2)
    assert first.after == (After("s1.write", 1),)
    assert second.after == (After("s0.write"),)


# --- CO2 and its relatives ---------------------------------------------------------------------


def most_in_flight(schedule: Schedule, launch: str, use: str) -> int:
    """The most buffers written by `launch*` and not yet consumed by `use*`, run serially."""
    most, held = 0, 0
    rounds = 6
    for instance in schedule.instances(rounds):
        name = instance.op.name
        if re.fullmatch(f"{use}\\d*", name):
            waits = [wait for wait in instance.op.after if wait.rounds_ago <= instance.round]
            held -= len([wait for wait in waits if wait.op.startswith(("average", "dequantize"))])
        if re.fullmatch(f"{launch}\\d*", name):
            held += 1
            most = max(most, held)
    return most


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_co2_keeps_one_buffer_for_every_average_in_flight(staleness: int) -> None:
    """Memory: anchor, momentum, and as many buffers as averages are under way at once."""
    strategy = strategies.parse(f"co2(tau=2,staleness={staleness})")
    schedule = strategy.schedule(tiny.job(), Layout(2, 2))
    buffers = most_in_flight(schedule, "average", "outer")
    assert buffers == staleness
    memory = strategy.memory(tiny.job(), Layout(2, 2))
    assert memory["outer"] == (2 + buffers) * 2000 * 4


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 3), (4, 0), (4, 1), (4, 5), (4, 7)])
def test_diloco_keeps_a_buffer_for_every_fragment_in_flight(fragments: int, delay: int) -> None:
    """Memory: anchor, momentum, and the pseudo-gradient of every fragment that is under way."""
    strategy = strategies.parse(f"diloco(tau=8,fragments={fragments},delay={delay})")
    schedule = strategy.schedule(tiny.job(), Layout(2, 2))
    buffers = most_in_flight(schedule, "delta", "outer")
    memory = strategy.memory(tiny.job(), Layout(2, 2))
    assert memory["outer"] == pytest.approx((2 + buffers / fragments) * 2000 * 4)


@pytest.mark.parametrize(
    ("strategy", "fragments", "delay"),
    [
        *(
            (f"diloco(tau=8,fragments={fragments},delay={delay})", fragments, delay)
            for fragments in (1, 2, 3, 8)
            for delay in (0, 1, 4, 7)
        ),
        *((f"co2(tau=8,delay={delay})", 1, delay) for delay in (1, 4, 7, 8)),
    ],
)
def test_an_average_is_used_delay_steps_after_its_launch(
    strategy: str, fragments: int, delay: int
) -> None:
    """An outer step comes exactly `delay` local steps after the kernel that fills the buffer."""
    schedule = tiny.schedule(strategy)
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
    shares = [w.elements for w in collectives(schedule, Kind.ALL_REDUCE)]
    assert len(shares) == fragments
    assert sum(shares) == 2000


@pytest.mark.parametrize(("dtype", "copies"), [("fp32", 4), ("bf16", 3.5), ("int8", 4)])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_co2_with_a_delay_keeps_one_average_and_the_launched_parameters(
    delay: int, dtype: str, copies: float
) -> None:
    """Memory: anchor, momentum, x at the launch, and one average, even used a round later."""
    strategy = strategies.parse(f"co2(tau=3,delay={delay},dtype={dtype})")
    schedule = strategy.schedule(tiny.job(), Layout(2, 2))
    assert most_in_flight(schedule, "displacement", "outer") == 1
    assert strategy.memory(tiny.job(), Layout(2, 2))["outer"] == copies * 2000 * 4


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.02, 8.0))
def test_the_exposed_time_of_a_delay_is_what_its_steps_do_not_cover(
    tau: int, delay: int, steps: float
) -> None:
    """Of an average as long as `steps` local steps, max(0, steps - delay) are exposed per round.

    So with delay=tau it is hidden exactly when it takes less than the local steps of a round. The
    average of 2000 fp32 numbers over a ring of 4 nodes moves 3/4 of them twice through every link.
    """
    delay = min(delay, tau)
    average = steps * tiny.local_step()
    cluster = tiny.cluster(4, 1, inter=Link(2 * 3 / 4 * 8000 / average))
    found = simulate(cluster, tiny.model(), f"co2(tau={tau},delay={delay})")
    kernels = 2000 * (4 * 4 + 2) / 1e12 + 2000 * (4 * 8 + 2) / 1e12  # displacement, outer
    exposed = max(0.0, average - delay * tiny.local_step())
    assert found.steady
    assert found.exposed_comm_s == pytest.approx(exposed, rel=1e-9, abs=1e-15)
    assert found.round_time_s == pytest.approx(
        tau * tiny.local_step() + kernels + exposed, rel=1e-9
    )


def test_what_is_kept_and_predicted_changes_no_schedule() -> None:
    """`keep` and `predict` are arithmetic: all that is simulated is the same."""
    plain = tiny.schedule("co2(tau=4,delay=2)")
    other = tiny.schedule("co2(tau=4,delay=2,keep=0.5,predict=0.25)")
    assert other.body == plain.body
    assert other.name == "co2(tau=4, delay=2, keep=0.5, predict=0.25)"


@pytest.mark.parametrize("strategy", ["co2", "slowmo", "local_sgd", "overlap_local_sgd", "diloco"])
@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero2", "zero3", "zeropp", "fsdp"])
def test_a_node_as_worker_averages_shares_among_peers(strategy: str, inner: str) -> None:
    """Each rank averages its share with its peers; nothing else leaves the node."""
    schedule = tiny.schedule(f"{strategy}(tau=2,worker=node,inner={inner})", (3, 2))
    outside = [w for w in collectives(schedule, Kind.ALL_REDUCE) if w.group.name != "node"]
    assert [(w.group.name, w.elements, w.dtype) for w in outside] == [("peers", 1000, DType.FP32)]
    assert all(
        op.work.group.name != "world" for op in schedule.body if isinstance(op.work, Collective)
    )


def test_zeropp_inside_a_node_quantizes_there_and_nowhere_else() -> None:
    """Forward gathers are int8, backward ones are not, gradients go by one exchange of int4."""
    schedule = tiny.schedule("co2(tau=1,worker=node,inner=zeropp)", (3, 2))
    inside = [
        op.work
        for op in schedule.body
        if isinstance(op.work, Collective) and op.work.group.name == "node"
    ]
    gathers = [work.dtype for work in inside if work.kind is Kind.ALL_GATHER]
    assert set(gathers) == {DType.INT8, DType.BF16}
    assert gathers.count(DType.INT8) == gathers.count(DType.BF16)
    exchanges = [work for work in inside if work.kind is Kind.ALL_TO_ALL]
    assert {work.dtype for work in exchanges} == {DType.INT4}
    assert sum(work.elements for work in exchanges) == 2000
    with pytest.raises(OptionError, match="inner=zeropp needs worker=node"):
        tiny.schedule("co2(tau=1,worker=site,inner=zeropp)", (3, 2))


def test_a_leader_averages_everything_and_broadcasts_it_inside_its_node() -> None:
    """As the authors' code does: one rank of each node, then a broadcast, awaited a round later."""
    schedule = tiny.schedule("co2(tau=2,worker=node,average=leader)", (3, 2))
    outer = [op for op in schedule.body if op.stream == "outer"]
    works = [op.work for op in outer if isinstance(op.work, Collective)]
    assert [(w.kind, str(w.group), w.elements) for w in works] == [
        (Kind.ALL_REDUCE, "leaders", 2000),
        (Kind.BROADCAST, "node", 2000),
    ]
    waits = {op.name: op.after for op in schedule.body}
    assert After("spread", 1) in waits["outer"]
    shares = traffic(tiny.schedule("co2(tau=2,worker=node)", (3, 2)), tiny.cluster(3, 2))
    assert traffic(schedule, tiny.cluster(3, 2)).nic == pytest.approx(shares.nic)
    for shape in ((3, 1), (1, 2)):  # nobody to broadcast to, or nothing to average
        alone = tiny.schedule("co2(tau=2,worker=node,average=leader)", shape)
        assert all(op.name != "spread" for op in alone.body)


@pytest.mark.parametrize("count", [0, 101])
@pytest.mark.parametrize("name", ["zero3", "zeropp"])
def test_a_block_is_gathered_in_a_hundred_parts_at_most(name: str, count: int) -> None:
    """A schedule holds every one of them."""
    with pytest.raises(OptionError, match=f"{name}: gathers is {count}; it must be 1 to 100"):
        strategies.parse(f"{name}:gathers={count}")


@pytest.mark.parametrize("options", ["average=leader", "worker=node,inner=zero3,average=leader"])
def test_a_leader_needs_whole_parameters_and_a_node(options: str) -> None:
    """Where every GPU is a worker, or parameters are sharded, nobody can average for a node."""
    with pytest.raises(OptionError, match="average=leader needs worker=node"):
        strategies.parse(f"co2:{options}")


def test_local_steps_do_not_wait_for_the_average_of_co2() -> None:
    """Nothing but the outer step waits for the average, and that a round later."""
    schedule = tiny.schedule("co2(tau=4)")
    waiting = {
        op.name: wait.rounds_ago
        for op in schedule.body
        for wait in op.after
        if wait.op == "average"
    }
    assert waiting == {"outer": 1}


def test_zero2_by_owners_reduces_each_bucket_to_another_rank() -> None:
    """Owners take turns from the first block on; a backward pass comes to them in reverse."""
    schedule = tiny.schedule("zero2(bucket=300,owners=true)")
    there = collectives(schedule, Kind.REDUCE)
    assert sum(work.elements for work in there) == 2000
    assert len(there) > 1
    assert [work.root for work in there] == list(range(len(there)))[::-1]
    assert [work.elements for work in collectives(schedule, Kind.BROADCAST)] == [2000]
    assert not collectives(schedule, Kind.REDUCE_SCATTER)
    assert not collectives(schedule, Kind.ALL_GATHER)
    # a node passes everything on once to the next, and once back
    sent = traffic(schedule, tiny.cluster(3, 2))
    assert sent.nic == pytest.approx(2 * 2000 * DType.BF16.bytes)


def test_a_bucket_that_is_exactly_full_closes() -> None:
    """Tensors of 200 and 300 fill a bucket of 500; the next begins with nothing in it."""
    blocks = [Block("a", (10, 20), 1.0, 1.0), Block("b", (300, 200), 1.0, 1.0)]
    assert buckets(blocks, 500) == [Bucket(500, 1), Bucket(30, 0)]


@pytest.mark.parametrize(("max_reuse", "fetches"), [(1000, 2), (999, 3)])
def test_a_block_is_fetched_a_third_time_beyond_the_reuse_distance(
    max_reuse: int, fetches: int
) -> None:
    """Recomputation and gradients of a block of 500 use it 1000 elements apart."""
    strategy = f"zero3(max_reuse={max_reuse},prefetch=0)"
    schedule = tiny.schedule(strategy, recompute="full")
    gathers = [w for w in collectives(schedule, Kind.ALL_GATHER) if w.buffer == "layer1"]
    assert len(gathers) == fetches


def test_the_parts_of_a_backward_pass_add_up_to_the_whole() -> None:
    """FLOP, bytes, and calls of the framework: a gradient reduced in parts costs no more compute.

    The block's tensors of 3000, 1000 and 1000 are reduced as 1000, 1000 and 3000.
    """
    matmul = MatMul(16, 10, 10)
    block = Block("x", (3000, 1000, 1000), 5e6, 100.0, products=(matmul,), calls=30)
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
    assert whole.kernels
    kernels = [part.kernels for part in parts if part.kernels]
    assert sum(k.calls for k in kernels) == pytest.approx(whole.kernels.calls)
    assert sum(k.elementwise_bytes for k in kernels) == pytest.approx(
        whole.kernels.elementwise_bytes
    )
    assert sum(k.products[0].flops for k in kernels) == pytest.approx(
        whole.kernels.products[0].flops
    )


def test_quantized_gradients_of_odd_sizes_are_rounded_up() -> None:
    """7 elements on nodes of 2: ranks exchange 7 inside the node and 4 among peers."""
    job = Workload(Model("odd", (Block("x", (7,), 1.0, 1.0),), tokens=1))
    schedule = strategies.parse("zeropp").schedule(job, Layout(2, 2))
    exchanges = collectives(schedule, Kind.ALL_TO_ALL)
    assert [work.elements for work in exchanges] == [7, 4]


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", tiny.VARIANTS)
def test_a_strategy_reads_back_from_its_title(text: str) -> None:
    """The title of a strategy is a text that gives the strategy, with or without parentheses."""
    strategy = strategies.parse(text)
    assert strategies.parse(title(strategy)) == strategy
    assert strategies.parse(text.replace("(", ":").rstrip(")")) == strategy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ddpp", "did you mean 'ddp'?"),
        ("megatron9000x", "known: co2, ddp"),
        ("", "unknown strategy ''"),
        ("hsdp", "unknown strategy 'hsdp'; write fsdp:shard=node"),
        ("co2(taau=3)", "did you mean 'tau'?"),
        ("co2(tau)", "is not option=value"),
        ("co2(tau=)", "is not option=value"),
        ("co2(tau=0)", "tau is 0; it must be 1 to 10000"),
        ("co2(staleness=101)", "staleness is 101; it must be 1 to 100"),
        ("diloco(fragments=1001)", "fragments is 1001; it must be 1 to 1000"),
        ("co2(tau=1.5)", "must be a whole number"),
        ("co2(tau=-1)", "tau is -1; it must be 1 to 10000"),
        ("ddp(bucket_mib=-1)", "bucket_mib is -1.0; it must be at least 0"),
        ("co2(tau=many)", "tau is 'many'; it must be a whole number"),
        ("co2(tau=1e999)", "must be a whole number"),
        ("co2(staleness=0)", "slowmo is staleness 0"),
        ("co2(inner=zero2)", "use worker=node"),
        ("co2(worker=rack)", "one of gpu, node"),
        ("co2(worker=node,inner=zero9)", "one of ddp, zero1, zero2, zero3"),
        ("co2(dtype=int4)", "one of fp32, fp16, bf16"),
        ("co2(dtype=fp64)", "one of fp32"),
        ("zeropp(qwz=maybe)", "one of true, false"),
        ("diloco(tau=4,fragments=5)", "must be 1 to tau=4"),
        ("diloco(tau=4,delay=4)", "0 to tau-1=3"),
        ("diloco(scale_block=0)", "at least 1"),
        ("co2(delay=0)", "delay is 0; it must be 1 to 12"),
        ("co2(tau=4,delay=5)", "delay is 5; it must be 1 to 4"),
        ("co2(delay=soon)", "it must be a whole number, or auto, or none"),
        ("co2(delay=2.5)", "it must be a whole number, or auto, or none"),
        ("co2(delay=2,staleness=2)", "staleness=2 does not apply with delay"),
        ("co2(delay=2,keep=1.5)", "keep is 1.5; it must be 0 to 1"),
        ("co2(delay=2,predict=-1)", "predict is -1.0; it must be 0 to 1"),
        (
            "co2(tau=4,delay=4,keep=0.25,predict=1)",
            "predict times delay / tau is 1 and must be below",
        ),
        ("co2(delay=2,keep=nan)", "keep is 'nan'; it must be a number"),
        ("co2(keep=0.5)", "give delay"),
        ("co2(predict=0.5)", "give delay"),
        ("co2(tau=auto)", "tau=auto needs a delay"),
        ("slowmo(tau=auto)", "must be a whole number"),
        ("co2(worker=node,average=leader,dtype=int8)", "average=leader does not quantize"),
    ],
)
def test_wrong_options_are_refused_in_one_line(text: str, said: str) -> None:
    """The error says what was given, and what is allowed."""
    with pytest.raises(OptionError) as caught:
        strategies.parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", ["delay=auto", "tau=auto,delay=2", "tau=auto,delay=auto"])
def test_a_number_that_is_still_to_be_chosen_has_no_schedule(options: str) -> None:
    """`auto` reads back, but only a simulation of the cluster makes a number of it."""
    strategy = strategies.parse(f"co2({options})")
    assert strategies.parse(title(strategy)) == strategy
    with pytest.raises(OptionError, match=r"=auto is chosen by simulation .*; give a number"):
        strategy.schedule(tiny.job(), Layout(2, 2))


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("co2", "tau"),
        ("co2", "staleness"),
        ("co2", "delay"),
        ("diloco", "fragments"),
        ("zero1", "bucket"),
        ("zero3", "prefetch"),
        ("zeropp", "scale_block"),
        ("zeropp", "hpz_group"),
    ],
)
def test_counts_given_as_objects_are_whole_numbers(kind: str, option: str) -> None:
    """From Python, too: 4.0 is 4; halves, texts, truth values and NaN are refused."""
    made = strategies.STRATEGIES[kind]
    assert repr(made(**{option: 4.0})) == repr(made(**{option: 4}))
    for wrong in (2.5, "4", True, float("nan"), -1):
        with pytest.raises(OptionError, match=f"{kind}: {option} is .*; it must be"):
            made(**{option: wrong})


@pytest.mark.parametrize(
    ("strategy", "changes", "said"),
    [
        ("ddp", {"accumulation": 10_000, "layers": 200}, "blocks in each of 10000 micro-steps"),
        ("zero3", {"accumulation": 10_000, "layers": 30}, "blocks in each of 10000 micro-steps"),
        ("zeropp(gathers=100)", {"accumulation": 500}, "blocks in each of 500 micro-steps"),
        (
            "co2(tau=10000,worker=node,inner=zero3)",
            {"layers": 30},
            "ops in each of 10000 local steps",
        ),
    ],
)
def test_a_schedule_beyond_memory_is_refused_before_it_is_built(
    strategy: str, changes: dict[str, int], said: str
) -> None:
    """A round has at most a million ops, however many layers, micro-steps and local steps."""
    layers = changes.pop("layers", 10)
    model = Model("deep", tuple(Block(f"b{n}", (500,), 1.0, 1.0) for n in range(layers)), tokens=1)
    job = Workload(model, **changes)  # type: ignore[arg-type]
    began = time.process_time()
    with pytest.raises(OptionError, match=f"a round would have .*{said}.*at most 1000000 are"):
        strategies.parse(strategy).schedule(job, Layout(2, 2))
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_every_type_that_is_listed_is_taken(name: str) -> None:
    """What `co2sim list` says is allowed for dtype is just what the strategy takes."""
    options = strategies.strategy_options(strategies.STRATEGIES[name])
    for listed in (allowed.split(", ") for option, _, allowed in options if option == "dtype"):
        for kind in DType:
            if kind in listed:
                strategies.parse(f"{name}:dtype={kind}")
            else:
                with pytest.raises(OptionError, match="one of fp32, fp16, bf16"):
                    strategies.parse(f"{name}:dtype={kind}")


def test_types_are_read_whatever_their_case() -> None:
    """`dtype=BF16` is `dtype=bf16`, as `worker=NODE` is `worker=node`."""
    assert strategies.parse("co2(dtype=BF16)") == strategies.parse("co2(dtype=bf16)")
    assert strategies.parse("co2(worker=NODE)") == strategies.parse("co2(worker=node)")


@pytest.mark.parametrize(
    "text",
    [
        "co2(tau=1,tau=2)",
        "co2(tau=1",
        "zero1(bucket=0)",
        "zero2(bucket=0)",
        "zeropp(scale_block=0)",
        "zeropp(hpz=false,hpz_group=2)",
    ],
)
def test_options_that_cannot_be_honoured_are_errors(text: str) -> None:
    """Never silently ignored: options given twice, out of range, or without what they belong to."""
    with pytest.raises(OptionError):
        strategies.parse(text).schedule(tiny.job(), Layout(2, 2))


@pytest.mark.parametrize("ranks", [3, 8, 6])
def test_secondary_groups_that_do_not_fit_are_refused(ranks: int) -> None:
    """hpz_group divides a node or is made of full nodes that divide the cluster."""
    strategy = strategies.parse(f"zeropp(hpz_group={ranks})")
    with pytest.raises(OptionError, match="hpz_group"):
        strategy.schedule(tiny.job(), Layout(3, 4))


@given(st.text(max_size=20), st.sampled_from(["", "co2", "zeropp(", "diloco:"]))
def test_any_text_is_a_strategy_or_one_line(text: str, start: str) -> None:
    """Whatever is given, the answer is a strategy or a typed error of one line."""
    try:
        strategy = strategies.parse(start + text)
    except Co2simError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - both outcomes are right
    else:
        assert strategy.name in strategies.STRATEGIES


# --- ZeRO++ in chunks ----------------------------------------------------------------------------


def reduction(chunks: int) -> list[Op]:
    """What reduces the gradient of a layer, in the order of issue."""
    body = tiny.schedule(f"zeropp(chunks={chunks})").body
    kept = ("quantize", "exchange", "sum")
    return [op for op in body if op.name.endswith(".layer0") and op.name.startswith(kept)][3:]


@given(st.integers(2, 100))
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
    blocks = (Block("layer", (10**9,), 0.0, 0.0),)
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


def test_weights_are_quantized_beside_the_gather_before() -> None:
    """With chunks the kernels of qwZ are on streams of their own; without on that of gathers."""
    for chunks, streams in ((1, {"gather"}), (2, {"quantize", "gather", "dequantize"})):
        body = tiny.schedule(f"zeropp(chunks={chunks})").body
        assert {op.stream for op in body if op.name.endswith("forward.layer0")} == {
            *streams,
            "compute",
        }


@pytest.mark.parametrize(
    ("text", "said"),
    [("zeropp(chunks=0)", "1 to 100"), ("zeropp(chunks=101)", "1 to 100")],
)
def test_absurd_numbers_of_chunks_are_refused(text: str, said: str) -> None:
    """A schedule holds every chunk."""
    with pytest.raises(OptionError, match=said):
        strategies.parse(text)
    with pytest.raises(OptionError, match="chunks=2 needs qwz or qgz"):
        strategies.parse("zeropp(chunks=2,qwz=false,qgz=false)")
