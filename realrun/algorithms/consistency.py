"""What must be equal on all workers, also while they train, and what is said where it is not."""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from types import FrameType
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from co2sim.common.errors import OptionError
from realrun.algorithms.buffers import tensor_line
from realrun.algorithms.optimizers import rates
from realrun.algorithms.outer_loop import OuterLoop, mark_of
from realrun.algorithms.pacing import Tau
from realrun.algorithms.process_groups import WorkerGroups, Workers
from realrun.algorithms.rules import Rule
from realrun.errors import MismatchError, warn_user


def refuse_different_inside(outer: OuterLoop, links: WorkerGroups) -> None:
    """Raise MismatchError where ranks of a worker hold different replicas: each sends a share."""
    marks = {ranks: mark_of(*parts) for ranks, parts in outer.flat.replicas().items()}
    seen = [ranks for ranks, _ in {pair for row in links.of_worker(marks) for pair in row.items()}]
    if ranks := min((ranks for ranks in seen if seen.count(ranks) > 1), default=()):
        raise MismatchError(
            f"after round {outer.counters.round} ranks {list(ranks)} of a worker hold different"
            " values of the same parameters: keep them equal with DDP, FSDP2 or tensor parallelism"
            " over the worker's ranks, from equal first values, or take worker='gpu'; a layer that"
            " changes its weights in forward, as max_norm does, makes them differ, too"
        )


def say_mixed_models(parameters: Sequence[Tensor], algorithm: str) -> None:
    """Warn if torch.distributed.checkpoint saves this rank's model beside the algorithm.

    It keeps one rank's copy of a plain tensor. It has no public sign of a save: the frame that
    collects the states holds all that is saved.
    """
    plain = {
        param.untyped_storage().data_ptr() for param in parameters if not isinstance(param, DTensor)
    }
    if not plain or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    saved: object = None
    while frame and saved is None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            saved = frame.f_locals.get("state_dict")
        frame = frame.f_back
    for key, value in saved.items() if isinstance(saved, Mapping) else ():
        tensors = value.state_dict() if isinstance(value, nn.Module) else value
        if str(dist.get_rank()) in str(key) or not isinstance(tensors, Mapping):
            continue
        values = [tensor for tensor in tensors.values() if type(tensor) in {Tensor, nn.Parameter}]
        if plain & {tensor.untyped_storage().data_ptr() for tensor in values}:
            warn_user(
                f"torch.distributed.checkpoint saves {key!r} of one rank only, and within a round"
                f" every rank has another model: save it by a key of each rank,"
                f" {{f'{key}{{rank}}': ...}}, and the optimizer, too; or load {algorithm} alone,"
                " with load_anchor()"
            )
            return


def refuse_wider(model: nn.Module, optimizers: Sequence[Optimizer], workers: Workers) -> None:
    """Raise OptionError for what several workers share: a DDP in the model, or a ZeRO-1."""
    inside, shared = workers.inner_ranks, "worker='node', process_group=Workers.per_node().inner"
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            if set(ranks) - set(inside):
                raise OptionError(
                    f"the model is DDP over ranks {ranks}, but a worker is ranks {inside}: pass the"
                    f" bare module, or make it DDP over the worker's ranks ({shared})"
                )
    zero = sys.modules.get("torch.distributed.optim")  # whose import takes long, and warns
    for optimizer in optimizers if zero else ():
        if isinstance(optimizer, zero.ZeroRedundancyOptimizer):  # type: ignore[union-attr]
            ranks = dist.get_process_group_ranks(optimizer.process_group)
            if set(ranks) - set(inside):
                raise OptionError(
                    f"the optimizer is a ZeroRedundancyOptimizer over ranks {ranks}, but a worker"
                    f" is ranks {inside}: it would send every rank's parameters to all; take the"
                    f" optimizer inside it, or give it the worker's ranks ({shared})"
                )


def describe(
    algorithm: str, parameters: list[tuple[str, Tensor]], workers: Workers, rule: Rule, tau: Tau
) -> str:
    """What a saved state must have in common with the run that loads it."""
    lines = [
        f"algorithm = {algorithm}",
        f"staleness = {rule.staleness}",
        f"tau = {tau}",
        f"averages used late = {_late(rule)}",
        f"workers = {len(workers.peer_ranks)} of {len(workers.inner_ranks)} ranks",
    ]
    return "\n".join([*lines, *(tensor_line(*pair) for pair in parameters)])


def _late(rule: Rule) -> str:
    """What must not change while averages are under way."""
    if rule.late is None:
        return "no"
    late = rule.late
    preview = ", preview" if late.preview else ""
    return f"{late.fragments or 'automatic'} fragments, keeps {late.keeps}{preview}"


def describe_others(model: nn.Module, parameters: list[tuple[str, Tensor]]) -> list[str]:
    """What is sent at the start but not averaged: frozen parameters and buffers."""
    averaged = {id(param) for _, param in parameters}
    others = [*model.named_parameters(), *model.named_buffers()]
    return [f"not averaged: {tensor_line(*pair)}" for pair in others if id(pair[1]) not in averaged]


def describe_settings(
    optimizers: Sequence[Optimizer], rule: Rule, settings: Mapping[str, object]
) -> list[str]:
    """Settings that must be equal on all ranks; they may change when a run is resumed."""
    values = {
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
        **{field.name: getattr(rule, field.name) for field in fields(rule)},
        **settings,
    }
    return [f"{name} = {value}" for name, value in values.items()]


_ROW = 8
"""Numbers that a rank tells of its learning rates: a checksum, and the first of them."""


class RateWatch:
    """Says once where workers have different learning rates.

    They are compared before the first step, and told at the end of every round: what has come from
    all by the end of a later one is looked at there, so that nothing is waited for.
    """

    def __init__(self, optimizers: Sequence[Optimizer], links: WorkerGroups) -> None:
        self._optimizers, self._links, self._said = optimizers, links, False
        self._under_way: deque[tuple[dist.Work, list[Tensor], Tensor]] = deque()

    def begin(self) -> None:
        """Compare. All ranks call this."""
        self.end_round()
        with self._links.together("comparison of learning rates"):
            while self._under_way:
                self._look("begins with")

    def end_round(self) -> None:
        """Tell the others, and look at what they told in rounds before. All ranks call this."""
        group = self._links.counting
        if group is None:
            return
        while self._under_way and self._under_way[0][0].is_completed():
            with suppress(RuntimeError):  # what is lost is found where it is needed
                self._look("goes on with")
        mine = rates(self._optimizers)
        row = torch.full((_ROW,), torch.nan, dtype=torch.float64, device="cpu")
        first = [float(crc32(repr(mine).encode())), *mine][:_ROW]
        row[: len(first)] = torch.tensor(first, dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(row) for _ in range(group.size())]
        work = dist.all_gather(rows, row, group, async_op=True)
        assert work is not None
        self._under_way.append((work, rows, row))

    def close(self) -> None:
        """Wait for what is under way."""
        with self._links.together("comparison of learning rates"):
            for work, _, _ in self._under_way:
                work.wait()
        self._under_way.clear()

    def _look(self, verb: str) -> None:
        work, rows, row_here = self._under_way.popleft()
        work.wait()
        mine, *others = (
            [float(rate) for rate in row[1:] if rate.isfinite()] for row in (row_here, *rows)
        )
        for rank, row, other in zip(self._links.workers.peer_ranks, rows, others, strict=True):
            if row[0] != row_here[0] and not self._said:
                self._said = True
                warn_user(
                    f"rank {rank} {verb} the learning rates {other}, this rank with {mine}: the"
                    " average weights workers alike, so those with larger ones count for more"
                )
