"""Tiny clusters, models and strategies whose figures can be worked out by hand."""

import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from co2sim import Question, strategies
from co2sim.catalog import load_cluster
from co2sim.hardware.cluster import GPU, Cluster, Link
from co2sim.models.operators import Attention, Block, Model, Operator, Product, plain_block
from co2sim.prediction import driver
from co2sim.schedule.schedule import Collective, Kind, Layout, Schedule
from co2sim.simulation.trace import Span, Trace
from co2sim.training.workload import Workload

GIGA = 1e9

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (3, 2), (2, 4), (4, 4)]
"""Nodes and GPUs per node: one GPU, one node, nodes of one GPU, an odd number of nodes."""

VARIANTS = [
    *("ddp", "ddp(bucket_mib=0.001)", "zero1", "zero1(bucket=700)"),
    *("zero2", "zero2(bucket=700)", "zero2(bucket=700,owners=true)"),
    *("zero1(bucket=700,shard=node)", "zero2(bucket=700,shard=node)"),
    *("zero3", "zero3(prefetch=0)", "zero3(prefetch=900,max_live=1300)"),
    *("zeropp", "zeropp(qwz=false)", "zeropp(hpz=false)", "zeropp(qgz=false)"),
    *("zeropp(hpz_group=1)", "zeropp(chunks=3)", "zeropp(chunks=2,gathers=2,hpz=false)"),
    *("fsdp", "fsdp(version=1,clip=false)", "fsdp(reshard_after_forward=false,sync=last)"),
    *("fsdp(version=megatron)", "fsdp(version=megatron,shard=node,reduce=bf16)"),
    *("fsdp(shard=node,reduce=bf16)", "local_sgd(tau=3)", "local_sgd(tau=2,worker=node)"),
    *("overlap_local_sgd(tau=3)", "overlap_local_sgd(tau=2,worker=node,inner=zero1)"),
    *("slowmo(tau=3)", "slowmo(tau=2,worker=node,inner=ddp)"),
    *("diloco(tau=4)", "diloco(tau=4,fragments=2,delay=1,worker=node)"),
    "diloco(tau=4,fragments=4,delay=3,dtype=int4)",
    "diloco(tau=2,dtype=int8,worker=node,inner=zero3)",
    *("co2.published(tau=3)", "co2.published(tau=1)", "co2.published(tau=2,staleness=2)"),
    *("co2.published(tau=2,staleness=3,worker=node,inner=ddp)", "co2.published(tau=2,worker=node)"),
    *(f"co2.published(tau=2,worker=node,inner={inner})" for inner in ("zero1", "zero3", "fsdp")),
    *("co2.published(tau=2,worker=node,average=leader)", "co2.published(tau=2,dtype=int8)"),
    *("co2(tau=3,delay=1,keep=0.5,predict=0.25)", "co2(tau=3,delay=3)"),
    *("co2(tau=3,delay=2,worker=node)", "co2(tau=2,delay=1,worker=node,inner=ddp,dtype=int8)"),
    "co2(tau=2,delay=2,worker=node,inner=zero1,dtype=bf16)",
    "co2(tau=2,delay=1,worker=node,inner=zero3)",
    "co2(tau=2,delay=2,worker=node,average=leader)",
]
"""Every strategy, with the options that change the shape of its schedule."""


BY_SITE = [
    "co2.published(tau=2,worker=site)",
    "co2.published(tau=2,staleness=2,worker=site,inner=ddp)",
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


def gpu(**changes: Any) -> GPU:
    """1 TFLOP/s and 1 TB/s, fully attained, in any precision."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "memory": 1 * GIGA,
        "memory_bandwidth": 1e12,
        "peak": {"bf16": 1e12, "fp16": 1e12, "fp32": 1e12},
        "efficiency": ((1.0, 1.0), (1e30, 1.0)),
    }
    return GPU(**fields | changes)


def slow_gpu() -> GPU:
    """A million times slower, so that all ops take longer than an instant."""
    return gpu(memory_bandwidth=1e6, peak={"bf16": 1e6, "fp32": 1e6})


def cluster(nodes: int = 2, gpus_per_node: int = 2, **changes: Any) -> Cluster:
    """10 GB/s inside a node and 1 GB/s between nodes, without latency."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "gpu": gpu(),
        "intra": Link(10 * GIGA),
        "inter": Link(1 * GIGA),
        "all_reduce": "ring",  # so that closed forms need no choice of algorithm
    }
    return Cluster(nodes=nodes, gpus_per_node=gpus_per_node, **fields | changes)


def model() -> Model:
    """An embedding, two equal layers and a head: 2000 parameters."""
    operators = (
        Operator(tensors=(300, 200), work=2e6 - 2 * 2 * 512 * 16**2, kept=2000.0),
        Attention(rows=16, heads=2, keys=2, wide=256, value=256, length=16),
    )
    layers = [Block(f"layer{number}", operators, 200.0) for number in range(2)]
    return Model(
        "tiny",
        (
            plain_block("embedding", (640,), 0.0, 400.0),
            *layers,
            plain_block("head", (20, 340), 1e6, 2000.0, 400.0),
        ),
        tokens=16,
    )


def job(**changes: Any) -> Workload:
    """The tiny model, one sample at a time."""
    fields: dict[str, Any] = {"model": model()}
    return Workload(**fields | changes)


def local_step() -> float:
    """Seconds of a local step of the tiny job on the tiny GPU: FLOP or bytes, what takes longer."""
    whole = job()
    passes = [work for pair in whole.works() for work in (pair.forward, pair.backward)]
    works = [*passes, whole.update.by_elements(whole.parameters)]
    return sum(max(work.flops, work.memory_bytes) / 1e12 for work in works)


def schedule(strategy: str, layout: tuple[int, int] = (2, 2), **changes: Any) -> Schedule:
    """The schedule of a strategy, given as text, for the tiny job."""
    return strategies.parse(strategy).schedule(job(**changes), Layout(*layout))


def collectives(schedule: Schedule, kind: Kind | None = None, buffer: str = "") -> list[Collective]:
    """The collectives of a schedule in order of issue: all, or those of a kind or of a buffer."""
    works = [op.work for op in schedule.body if isinstance(op.work, Collective)]
    return [work for work in works if kind in {None, work.kind} and buffer in {"", work.buffer}]


def moved(schedule: Schedule) -> Counter[str]:
    """Elements of all collectives by kind and group, but for the norm of gradients."""
    found: Counter[str] = Counter()
    for work in collectives(schedule):
        if work.buffer != "norm":
            found[f"{work.kind} {work.group}"] += work.elements
    return found


def by_op(trace: Trace, rank: int = 0) -> dict[tuple[int, str], Span]:
    """The spans of one rank by round and op."""
    return {(span.round, span.op): span for span in trace.spans if span.rank == rank}


def makespan(trace: Trace) -> float:
    """When the last op ends."""
    return max(span.end for span in trace.spans)


@cache
def recorded_run() -> tuple[bytes, bytes]:
    """`run.json` and `trace.jsonl` of a simulated run, as if it had been measured."""
    from realrun import record  # noqa: PLC0415 - most tests need none of it

    built = load_cluster("dgx-h100", {}).value
    operators = (
        Product(rows=8, inner=8, columns=8, tensors=(64,), calls=2),
        Operator(tensors=(64,), work=1e6, kept=5e3),
    )
    block = Block("layer", operators)
    case = Question(
        cluster=replace(built, nodes=2, gpus_per_node=2),
        model=Model("tiny", (block, replace(block, name="head")), 8),
        strategy="co2.published(tau=2)",
        precision="bf16",
    )
    _, trace = driver.trace(replace(case, fold=False))
    figures = driver.run(case).to_dict()
    found = record.Record(
        case=case, kernels="sleep", rounds=1, trace=trace, clock_error=1e-6, figures=figures,
        environment={"torch": "2"},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        record.write(Path(name), found)
        return (Path(name) / "run.json").read_bytes(), (Path(name) / "trace.jsonl").read_bytes()
