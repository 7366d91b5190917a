"""ZeRO++: ZeRO-3 with quantized weight gathers, a secondary shard, and quantized gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from co2sim.common.errors import OptionError
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
    Portion,
    Row,
    Sharers,
    check_budget,
    consecutive,
    fetched,
    renamed,
    scattered,
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

    Experts that ranks divide are gathered and reduced among those with the same, in the node and
    among nodes; where a node has each of its experts once, the secondary shard has them whole.
    """

    name: ClassVar[str] = "zeropp"
    shares: ClassVar[str] = "parameters"
    divides_experts: ClassVar[bool] = True

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
        secondary, sharers = self._secondary(layout), Sharers.of(job, layout, group)
        among = {False: secondary, True: job.same_experts(secondary, layout)}

        def fetch(direction: str, name: str, portion: Portion) -> list[Row]:
            if direction == "backward" and self.hpz:
                name = f"{name}.secondary"
                portion = replace(portion, group=among[portion.of_experts])
            quantized = direction != "backward" and self.qwz
            return self._gathered(job, name, portion, quantized=quantized)

        hops = {of_experts: _hops(job, layout, group, of_experts) for of_experts in (False, True)}
        scatter = scattered(job)

        def reduce(name: str, portion: Portion) -> list[Row]:
            if self.qgz and (on := hops[portion.of_experts]):
                return self._quantized_reduce(name, portion.elements, job, on)
            return scatter(name, portion)

        budget = Budget(self.prefetch, self.max_live, self.max_reuse, self.reduce_bucket)
        refresh = None
        if self.hpz:
            share = math.ceil(job.owned(group_size(secondary, layout)))
            refresh = Compute("copy", 0.0, 2 * share * job.precision.bytes)
        return sharded_step(job, sharers, budget, fetch, reduce, refresh)

    def _gathered(
        self, job: Workload, name: str, portion: Portion, *, quantized: bool
    ) -> list[Row]:
        """A portion gathered in parts: quantize, gather and dequantize; none for a rank alone."""
        rows: list[Row] = []
        group, blocks = portion.group, self.scale_block if quantized else 0
        dtype = DType.INT8 if quantized else job.precision
        before, behind = (_STAGES[0], "dequantize") if self.chunks > 1 else (GATHER, GATHER)
        for part, elements in fetched(portion.elements, self.gathers) if group else ():
            assert group is not None
            work = Collective(Kind.ALL_GATHER, name, elements, dtype, group, blocks)
            row: Row = [("gather", work, GATHER)]
            if quantized:
                share = -(-elements // portion.ranks)
                narrow = recode("quantize", share, job.precision, dtype, blocks)
                wide = recode("dequantize", elements, dtype, job.precision, blocks)
                row = [("quantize", narrow, before), *row, ("dequantize", wide, behind)]
            rows += renamed([row], "", part)
        return rows

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
        sharers = again = Sharers.of(job, layout, WORLD)
        if self.hpz:
            again = Sharers.of(job, layout, self._secondary(layout))
            states["secondary"] = job.owned(again.ranks) * job.precision.bytes
        return states | transient(job, sharers, self.prefetch, self.max_live, again)


def _hops(
    job: Workload,
    layout: Layout,
    group: Group,
    of_experts: bool,  # noqa: FBT001
) -> list[Hop]:
    """The exchanges of a gradient: inside the node, then among peers; of experts those with them.

    None for experts of which each rank has its own.
    """
    g, ranks = layout.gpus_per_node, group_size(group, layout)
    hops: list[Hop] = [(NODE, g, "node"), (PEERS, ranks // g, "peers")]
    if of_experts:
        within, every = job.same_experts(NODE, layout), job.expert_replicas(ranks)
        same = job.expert_replicas(g) if within else 1
        between = job.expert_peers(NODE, PEERS, layout)
        hops = [(within or NODE, same, "node"), (between or PEERS, every // same, "peers")]
        return [hop for hop in hops if hop[1] > 1]
    return [hop for hop in hops if hop[1] > 1] or hops[:1]
