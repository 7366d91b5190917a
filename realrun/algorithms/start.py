"""What is averaged, and what must be equal on all ranks before round 0."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from co2sim.errors import OptionError
from realrun.algorithms.flat import memory
from realrun.algorithms.rule import Rule
from realrun.algorithms.workers import Workers


def refuse_wider(model: nn.Module, optimizers: Sequence[Optimizer], workers: Workers) -> None:
    """Raise OptionError for what several workers share: a DDP in the model, or a ZeRO-1."""
    own = set(workers.inner_ranks)
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        ranks = dist.get_process_group_ranks(module.process_group)
        if set(ranks) - own:
            raise OptionError(
                f"the model is DDP over ranks {ranks}, but a worker is ranks {workers.inner_ranks}:"
                " pass the bare module, or make it DDP over the worker's ranks (worker='node',"
                " process_group=Workers.per_node().inner)"
            )
    zero = sys.modules.get("torch.distributed.optim")  # whose import takes long, and warns
    for one in optimizers:
        if zero is None or not isinstance(one, zero.ZeroRedundancyOptimizer):
            continue
        ranks = dist.get_process_group_ranks(one.process_group)
        if set(ranks) - own:
            raise OptionError(
                f"the optimizer is a ZeroRedundancyOptimizer over ranks {ranks}, but a worker is"
                f" ranks {workers.inner_ranks}: it would send every rank's parameters to all; take"
                " the optimizer inside it, or give it the worker's ranks (worker='node',"
                " process_group=Workers.per_node().inner)"
            )


def describe(parameters: list[tuple[str, Tensor]], workers: Workers, rule: Rule, tau: int) -> str:
    """What a saved state must have in common with the run that loads it."""
    lines = [
        f"algorithm = {type(rule).__name__.removesuffix('Rule')}",
        f"staleness = {rule.staleness}",
        f"tau = {tau}",
        f"averages used late = {_late(rule)}",
        f"workers = {len(workers.peer_ranks)} of {len(workers.inner_ranks)} ranks",
    ]
    return "\n".join([*lines, *(_line(name, one) for name, one in parameters)])


def _late(rule: Rule) -> str:
    """What must not change while averages are under way."""
    if rule.late is None:
        return "no"
    late = rule.late
    preview = ", preview" if late.preview else ""
    return f"{late.fragments} fragments, keeps {late.keeps}{preview}"


def describe_others(model: nn.Module, parameters: list[tuple[str, Tensor]]) -> list[str]:
    """What is sent at the start but not averaged: frozen parameters and buffers."""
    known = {id(one) for _, one in parameters}
    others = [*model.named_parameters(), *model.named_buffers()]
    return [f"not averaged: {_line(*pair)}" for pair in others if id(pair[1]) not in known]


def describe_settings(
    optimizers: Sequence[Optimizer], rule: Rule, settings: Mapping[str, object]
) -> list[str]:
    """Settings that must be equal on all ranks; they may change when a run is resumed."""
    known = {
        "optimizer": ", ".join(type(one).__name__ for one in optimizers),
        **{one.name: getattr(rule, one.name) for one in fields(rule)},
        **settings,
    }
    return [f"{name} = {value}" for name, value in known.items()]


def _line(name: str, one: Tensor) -> str:
    """Name, shape, type and order in memory; where a dimension is 1 its stride means nothing."""
    dtype = str(one.dtype).removeprefix("torch.")
    placed = f" {one.placements}" if isinstance(one, DTensor) else ""
    strides = tuple(
        stride for stride, size in zip(one.stride(), one.shape, strict=True) if size > 1
    )
    return f"{name}: {tuple(one.shape)} {dtype}, strides {strides}{placed}"


def first_tensors(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """What all workers start with: tensors that are equal on ranks of a worker, and shards."""
    tensors = [*model.parameters(), *model.buffers()]
    replicated = [one for one in tensors if not isinstance(one, DTensor)]
    return replicated, [memory(one) for one in tensors if isinstance(one, DTensor)]
