"""ZeRO++: ZeRO-3 with quantized weight gathers, a secondary shard, and quantized gradients."""

from dataclasses import dataclass
from typing import ClassVar

from co2sim.errors import OptionError
from co2sim.memory import model_states
from co2sim.schedule import (
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
from co2sim.schedule import block as block_group
from co2sim.strategies.quantized import recode, sum_received
from co2sim.strategies.sharded import (
    KEPT,
    Budget,
    Works,
    check_budget,
    fetched,
    sharded_step,
    transient,
)
from co2sim.strategies.step import Step, chain, title, whole_options
from co2sim.units import Bytes
from co2sim.workload import Block, Workload

_SCALE_BLOCK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPP:
    """`zero3` with int8 forward gathers, backward gathers inside nodes, and int4 gradients.

    Three switches. qwz: forward gathers in int8, one fp32 scale for every `scale_block` elements.
    hpz: backward gathers inside groups of `hpz_group` ranks (0: one node) from a secondary
    half-precision shard, refreshed once per optimizer step. qgz: int4 gradients by all-to-all
    inside the node, sum, and all-to-all among peers.
    `prefetch`, `max_live`, `max_reuse`, `reduce_bucket` and `gathers` are those of `zero3`; the
    gather for a recomputation is that of a forward pass. Source: Wang et al. 2023, arXiv
    2306.10209.
    """

    name: ClassVar[str] = "zeropp"

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

    def __post_init__(self) -> None:
        """Refuse options that hold nothing, or that belong to a switch that is off."""
        check_budget(self)
        whole_options(self, "scale_block")
        whole_options(self, "hpz_group", least=0)
        if self.hpz_group and not self.hpz:
            raise OptionError(f"hpz_group={self.hpz_group} does not apply to hpz=false")
        if self.scale_block != _SCALE_BLOCK and not (self.qwz or self.qgz):
            raise OptionError(f"scale_block={self.scale_block} needs qwz or qgz")

    def step(self, job: Workload, layout: Layout) -> Step:
        """One optimizer step over all ranks."""
        secondary = self._secondary(layout)

        def gather(direction: str, name: str, elements: int) -> Works:
            if direction == "backward" and self.hpz:
                work = Collective(
                    Kind.ALL_GATHER, f"{name}.secondary", elements, job.precision, secondary
                )
                return [("gather", work)]
            if direction == "backward" or not self.qwz:
                work = Collective(Kind.ALL_GATHER, name, elements, job.precision, WORLD)
                return [("gather", work)]
            share, blocks = -(-elements // layout.world_size), self.scale_block
            return [
                ("quantize", recode("quantize", share, job.precision, DType.INT8, blocks)),
                ("gather", Collective(Kind.ALL_GATHER, name, elements, DType.INT8, WORLD, blocks)),
                ("dequantize", recode("dequantize", elements, DType.INT8, job.precision, blocks)),
            ]

        def fetch(direction: str, block: Block) -> Works:
            return [
                (f"{name}{part}", work)
                for part, elements in fetched(block, self.gathers)
                for name, work in gather(direction, block.name, elements)
            ]

        def reduce(name: str, elements: int) -> Works:
            if not self.qgz:
                work = Collective(Kind.REDUCE_SCATTER, name, elements, job.precision, WORLD)
                return [("reduce", work)]
            return self._quantized_reduce(name, elements, job, layout)

        budget = Budget(self.prefetch, self.max_live, self.max_reuse, self.reduce_bucket)
        refresh = None
        if self.hpz:
            share = -(-job.parameters // len(secondary.members(0, layout)))
            refresh = Compute("copy", 0.0, 2 * share * job.precision.bytes)
        return sharded_step(job, layout.world_size, budget, fetch, reduce, refresh)

    def _quantized_reduce(self, name: str, elements: int, job: Workload, layout: Layout) -> Works:
        """Quantize, exchange and sum inside the node, requantize, exchange and sum among peers."""
        blocks = self.scale_block
        works: list[tuple[str, Compute | Collective]] = [
            ("quantize", recode("quantize", elements, job.precision, DType.INT4, blocks))
        ]
        hops = [(NODE, layout.gpus_per_node, "node"), (PEERS, layout.nodes, "peers")]
        hops = [hop for hop in hops if hop[1] > 1] or hops[:1]
        for number, (group, ranks, where) in enumerate(hops, start=1):
            target = job.precision if number == len(hops) else DType.INT4
            exchange = Collective(Kind.ALL_TO_ALL, name, elements, DType.INT4, group, blocks)
            total = sum_received(elements, ranks, DType.INT4, target, blocks)
            works += [(f"exchange_{where}", exchange), (f"sum_{where}", total)]
            elements = -(-elements // ranks)
        return works

    def _secondary(self, layout: Layout) -> Group:
        """The group that holds a whole secondary copy."""
        g, ranks = layout.gpus_per_node, self.hpz_group
        if not ranks or ranks == g:
            return NODE
        if (g % ranks and ranks % g) or layout.world_size % ranks:
            raise OptionError(
                f"hpz_group={ranks} must divide the {g} GPUs of a node, or be full nodes that"
                f" divide {layout.world_size} GPUs"
            )
        return block_group(ranks)

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """One optimizer step over all ranks."""
        return Schedule(title(self), chain(self.step(job, layout)))

    def memory(self, job: Workload, layout: Layout) -> dict[str, Bytes]:
        """ZeRO-3's (4 + K)/n bytes per parameter, and the secondary shard if there is one."""
        n = layout.world_size
        states = model_states(job, parameter_shards=n, gradient_shards=n, optimizer_shards=n)
        if self.hpz:
            ranks = len(self._secondary(layout).members(0, layout))
            states["secondary"] = job.parameters * job.precision.bytes / ranks
        return states | transient(job, n, self.prefetch, self.max_live)
