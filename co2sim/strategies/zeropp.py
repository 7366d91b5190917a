"""ZeRO++: ZeRO-3 with quantized weight gathers, a secondary shard, and quantized gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.models.operators import Block
from co2sim.schedule.schedule import (
    NODE,
    PEERS,
    WORLD,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Schedule,
)
from co2sim.strategies.chaining import chain
from co2sim.strategies.sharded import (
    GATHER,
    KEPT,
    REDUCE,
    Budget,
    Row,
    check_budget,
    consecutive,
    fetched,
    renamed,
    sharded_step,
    transient,
)
from co2sim.strategies.step import Step, cut, group_size, recode, sum_received, title, whole_options
from co2sim.strategies.whole_matrices import refuse_whole
from co2sim.training.memory import Items, model_states
from co2sim.training.workload import Workload

_SCALE_BLOCK = 2048
_MAX_CHUNKS = 100
"""A schedule holds every one."""
Hop: TypeAlias = tuple[Group, int, str]
"""An exchange of gradients: among whom, how many they are, and where."""

_STAGES = ("quantize", REDUCE, "peers")
"""Streams of the stages that a chunk of a gradient goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPP:
    """`zero3` with int8 forward gathers, backward gathers inside nodes, and int4 gradients.

    Three switches. qwz: forward gathers in int8, one fp32 scale for every `scale_block` elements.
    hpz: backward gathers inside groups of `hpz_group` ranks (0: one node) from a secondary
    half-precision shard, refreshed once per optimizer step. qgz: int4 gradients by all-to-all
    inside the node, sum, and all-to-all among peers.
    With `chunks` 1 the works of a gather, and of a reduction, follow each other, as in DeepSpeed's
    release. With more they are a pipeline, as in section 4.1 of the paper: the weights of a block
    are quantized beside the gather of the one before, and a gradient goes in several chunks, one
    of which is exchanged among peers while the next one is exchanged inside the node.
    `prefetch`, `max_live`, `max_reuse`, `reduce_bucket` and `gathers` are those of `zero3`; the
    gather for a recomputation is that of a forward pass. Source: Wang et al. 2023, arXiv
    2306.10209.
    """

    name: ClassVar[str] = "zeropp"
    shares: ClassVar[str] = "parameters"

    qwz: bool = True
    hpz: bool = True
    qgz: bool = True
    hpz_group: int = 0
    scale_block: int = _SCALE_BLOCK
    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse: int = KEPT
    reduce_bucket: int = KEPT
    gathers: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        """Refuse options that hold nothing, or that belong to a switch that is off."""
        check_budget(self)
        whole_options(self, "scale_block")
        whole_options(self, "hpz_group", least=0)
        if self.hpz_group and not self.hpz:
            raise OptionError(f"hpz_group={self.hpz_group} does not apply to hpz=false")
        if self.scale_block != _SCALE_BLOCK and not (self.qwz or self.qgz):
            raise OptionError(f"scale_block={self.scale_block} needs qwz or qgz")
        whole_options(self, "chunks", most=_MAX_CHUNKS)
        if self.chunks > 1 and not (self.qwz or self.qgz):
            raise OptionError(f"chunks={self.chunks} needs qwz or qgz")

    def step(self, job: Workload, layout: Layout, group: Group = WORLD) -> Step:
        """One optimizer step over `group`: all ranks, or those of a node."""
        refuse_whole(job, "zeropp")
        if job.quantize_base != "none":
            raise OptionError(
                f"zeropp does not combine with quantize_base={job.quantize_base}: it would quantize"
                " weights that are in 4 bits already"
            )
        secondary, size = self._secondary(layout), group_size(group, layout)

        def gather(direction: str, name: str, elements: int) -> Row:
            if direction == "backward" and self.hpz:
                name, dtype, among, blocks = f"{name}.secondary", job.precision, secondary, 0
            elif direction == "backward" or not self.qwz:
                dtype, among, blocks = job.precision, group, 0
            else:
                dtype, among, blocks = DType.INT8, group, self.scale_block
            work = Collective(Kind.ALL_GATHER, name, elements, dtype, among, blocks)
            if not blocks:
                return [("gather", work, GATHER)]
            share = -(-elements // size)
            before, behind = (_STAGES[0], "dequantize") if self.chunks > 1 else (GATHER, GATHER)
            return [
                ("quantize", recode("quantize", share, job.precision, dtype, blocks), before),
                ("gather", work, GATHER),
                (
                    "dequantize",
                    recode("dequantize", elements, dtype, job.precision, blocks),
                    behind,
                ),
            ]

        def fetch(direction: str, block: Block) -> list[Row]:
            parts = fetched(block, self.gathers)
            rows = [(part, gather(direction, block.name, elements)) for part, elements in parts]
            return [row for part, gathered in rows for row in renamed([gathered], "", part)]

        def reduce(name: str, elements: int) -> list[Row]:
            if self.qgz:
                return self._quantized_reduce(name, elements, job, hops)
            work = Collective(Kind.REDUCE_SCATTER, name, elements, job.precision, group)
            return [[("reduce", work, REDUCE)]]

        nodes = layout.nodes if group == WORLD else 1
        hops = [(NODE, layout.gpus_per_node, "node"), (PEERS, nodes, "peers")]
        hops = [hop for hop in hops if hop[1] > 1] or hops[:1]
        budget = Budget(self.prefetch, self.max_live, self.max_reuse, self.reduce_bucket)
        refresh = None
        if self.hpz:
            share = -(-job.parameters // len(secondary.members(0, layout)))
            refresh = Compute("copy", 0.0, 2 * share * job.precision.bytes)
        return sharded_step(job, size, budget, fetch, reduce, refresh)

    def _quantized_reduce(
        self, name: str, elements: int, job: Workload, hops: Sequence[Hop]
    ) -> list[Row]:
        """Quantize, exchange and sum inside the node, requantize, exchange and sum among peers."""
        count = min(self.chunks, elements)
        on = _STAGES if count > 1 else (REDUCE, REDUCE, REDUCE)
        rows = [self._reduce_chunk(name, size, job, hops, on) for size in cut(elements, count)]
        if count == 1:
            return rows
        return [row for n, chunk in enumerate(rows, 1) for row in renamed([chunk], "", f"{n}")]

    def _reduce_chunk(
        self,
        name: str,
        elements: int,
        job: Workload,
        hops: Sequence[Hop],
        on: tuple[str, str, str],
    ) -> Row:
        blocks = self.scale_block
        work = recode("quantize", elements, job.precision, DType.INT4, blocks)
        works: list[tuple[str, Compute | Collective, str]] = [("quantize", work, on[0])]
        for hop, (group, ranks, where) in enumerate(hops, start=1):
            target = job.precision if hop == len(hops) else DType.INT4
            exchange = Collective(Kind.ALL_TO_ALL, name, elements, DType.INT4, group, blocks)
            total = sum_received(elements, ranks, DType.INT4, target, blocks)
            stage = on[hop]
            works += [(f"exchange_{where}", exchange, stage), (f"sum_{where}", total, stage)]
            elements = -(-elements // ranks)
        return works

    def _secondary(self, layout: Layout) -> Group:
        """The group that holds a whole secondary copy."""
        return consecutive(self.hpz_group or layout.gpus_per_node, layout, "hpz_group")

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout)))

    def memory(self, job: Workload, layout: Layout) -> Items:
        """ZeRO-3's (4 + K)/n bytes per parameter, and the secondary shard if there is one."""
        n = layout.world_size
        states = model_states(job, parameter_shards=n, gradient_shards=n, optimizer_shards=n)
        if self.hpz:
            ranks = len(self._secondary(layout).members(0, layout))
            states["secondary"] = job.parameters * job.precision.bytes / ranks
        return states | transient(job, n, self.prefetch, self.max_live)
