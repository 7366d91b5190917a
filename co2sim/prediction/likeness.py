"""How alike two runs are: what differs, how much that counts, and what to say of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from co2sim.common.units import scaled
from co2sim.hardware.cluster import Cluster
from co2sim.models.operators import Model
from co2sim.prediction.result import Result
from co2sim.strategies import STRATEGIES
from co2sim.training.stack import Shares, plain_name


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the speed of a run depends on.

    `gpu` is the generation, `divided` tp x pp, `sequence` the tokens of a sample and `batch` those
    of a step on all GPUs, `watts` the power limit of a GPU and `memory_bandwidth` that of its
    memory in byte/s (both 0 where not known), and `shares` what replicas share: nothing, optimizer
    states, or parameters.
    """

    stack: str
    gpu: str
    parameters: int
    gpus: int
    shares: Shares
    divided: int
    micro_batch: int
    sequence: float
    batch: float
    recompute: str
    precision: str
    watts: float
    memory_bandwidth: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One of two runs, `here` and `there`; a `size` of 1 is that of twice as many parameters."""

    trait: str
    size: float
    here: Any
    there: Any

    def __str__(self) -> str:
        """What is here instead of there."""
        words = _COUNTED[self.trait]
        return f"{words.of}{words.text(self.here)} instead of {words.text(self.there)}"


@dataclass(frozen=True, slots=True)
class _Counted:
    """How a trait counts: for twice as much of a number, or for another text; and its words."""

    size: float
    of: str = ""
    text: Callable[[Any], str] = str


_COUNTED = {
    "stack": _Counted(2.0, text=lambda name: name.partition(",")[0]),
    "gpu": _Counted(2.0),
    "shares": _Counted(2.0, "replicas share "),
    "parameters": _Counted(1.0, text=lambda count: f"{count / 1e9:.3g}B parameters"),
    "gpus": _Counted(0.5, text=lambda count: f"{count:,} GPUs"),
    "divided": _Counted(0.5, "layers on ", lambda count: f"{count:,} GPUs"),
    "micro_batch": _Counted(0.5, "micro-batch "),
    "sequence": _Counted(0.5, "sequences of ", lambda count: f"{count:,.0f}"),
    "batch": _Counted(0.25, "steps of ", lambda count: f"{count / 1e6:.3g}M tokens"),
    "recompute": _Counted(1.0, "recompute "),
    "precision": _Counted(1.0),
    "watts": _Counted(2.0, text=lambda watts: f"{watts:,.0f} W"),
    "memory_bandwidth": _Counted(1.0, "memory of ", lambda rate: scaled(rate, "B/s")),
}
"""Assumed. Another stack, GPU or way of sharing counts as much as four times the parameters, and
500 W instead of 700 W as much as twice; the batch of a step counts little, as it changes only how
often GPUs exchange."""

_OF_A_GPU = ("watts", "memory_bandwidth")
"""What another generation has in any case."""


def differences(here: Traits, there: Traits) -> list[Difference]:
    """The differences of two runs, the largest first; none of what is not known of one of them."""
    found = [
        Difference(trait, size, getattr(here, trait), getattr(there, trait))
        for trait, size in _sizes(here, there).items()
        if size
    ]
    return sorted(found, key=lambda difference: -difference.size)


def unlikeness(here: Traits, there: Traits) -> float:
    """The sum of their differences: 0 for runs that are alike in all of this."""
    return math.fsum(_sizes(here, there).values())


def _sizes(here: Traits, there: Traits) -> dict[str, float]:
    sizes = {}
    for trait, counted in _COUNTED.items():
        first, second = getattr(here, trait), getattr(there, trait)
        if isinstance(first, str):
            sizes[trait] = counted.size * (first != second)
        elif first and second and not (trait in _OF_A_GPU and here.gpu != there.gpu):
            sizes[trait] = counted.size * abs(math.log2(first / second))
    return sizes


def shares(strategy: str) -> Shares:
    """What the replicas of a strategy share, by its name; "other" of what is not built in."""
    kind = STRATEGIES.get(strategy.partition("(")[0].partition(":")[0])
    return getattr(kind, "shares", "other")


def traits_of(cluster: Cluster, model: Model, result: Result) -> Traits:
    """Those of a result on a cluster."""
    batch = result.tokens_per_gpu_per_step * result.gpus
    return Traits(
        stack=plain_name(result.stack),
        gpu=cluster.gpu.generation or cluster.gpu.name,
        parameters=model.parameters,
        gpus=result.gpus,
        shares=shares(result.strategy),
        divided=result.layer_gpus,
        micro_batch=result.micro_batch,
        sequence=batch / result.global_batch if result.global_batch else 0.0,
        batch=batch,
        recompute=result.recompute,
        precision=result.precision,
        watts=cluster.gpu.power_cap or cluster.gpu.tdp or 0.0,
        memory_bandwidth=cluster.gpu.memory_bandwidth,
    )
