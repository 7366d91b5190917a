"""Kinds of runs: what has to be alike for the error of one prediction to tell that of another."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from co2sim.cluster import Cluster
from co2sim.schedule import WORLD, Layout
from co2sim.strategies import LocalSteps, Strategy
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.zeropp import ZeroPP
from co2sim.workload import Model

Exchange: TypeAlias = Literal["gradients", "parameters", "quantized", "averages"]
Extent: TypeAlias = Literal["one node", "several nodes"]

_GENERATIONS = {"A800": "A100", "H800": "H100", "GH200": "H100", "H200": "H100"}
"""GPUs with the multiprocessors of another one, whose generation they are."""

_MODEL_NAME = re.compile(r"\b(V100|A100|A800|H100|H800|H200|GH200|B200)\b")

_EXCHANGED: dict[str, Exchange] = {
    **dict.fromkeys(("ddp", "zero1", "zero2"), "gradients"),
    **dict.fromkeys(("zero3", "zeropp", "fsdp"), "parameters"),
}

_IN_WORDS: dict[Exchange, str] = {
    "gradients": "gradients exchanged every step",
    "parameters": "parameters gathered block by block",
    "quantized": "quantized parameters and gradients, block by block",
    "averages": "averages of local steps",
}


@dataclass(frozen=True, slots=True, order=True)
class RunKind:
    """GPU generation, what is exchanged (the family of the strategy), and one node or several."""

    gpu: str
    exchange: Exchange
    extent: Extent

    def __str__(self) -> str:
        return f"{self.gpu}, {_IN_WORDS[self.exchange]}, {self.extent}"


def generation(gpu: str) -> str | None:
    """The generation of a GPU by its name, such as "A100"; None where it names none that we know.

    >>> generation("NVIDIA A100-SXM4-80GB, as Megatron-DeepSpeed ran on it")
    'A100'
    """
    found = _MODEL_NAME.search(gpu)
    return _GENERATIONS.get(found[1], found[1]) if found else None


def unlike(strategy: Strategy, layout: Layout, known: Collection[str]) -> str:
    """In words, what a strategy gathers otherwise than those of these names; empty if nothing.

    When blocks are gathered is the framework's own: what is known of FSDP, over all ranks, is not
    known of DeepSpeed's ZeRO-3, nor of groups. Gradients and averages are sent as a whole.
    """
    if _EXCHANGED.get(strategy.name) != "parameters":
        return ""
    there = f"there {' and '.join(known)}"
    if strategy.name not in known:
        return f"{strategy.name}, {there}"
    if isinstance(strategy, FSDP) and strategy.sharding(layout, WORLD).replicas:
        return f"{strategy.name} in groups, {there} over all GPUs"
    return ""


def kind_of(cluster: Cluster, strategy: Strategy, model: Model) -> RunKind | None:
    """The kind of a run on all of the cluster; None where nothing that is published is like it.

    That is so for other GPUs, for strategies that are not ours, and for models of images.
    """
    gpu = generation(cluster.gpu.name)
    local = isinstance(strategy, LocalSteps)
    exchange = "averages" if local else _EXCHANGED.get(strategy.name)
    if isinstance(strategy, ZeroPP) and (strategy.qwz or strategy.qgz):
        exchange = "quantized"
    if isinstance(strategy, FSDP) and strategy.shard == 1:
        exchange = "gradients"
    if gpu is None or exchange is None or model.unit != "token":
        return None
    return RunKind(gpu, exchange, "several nodes" if cluster.nodes > 1 else "one node")
