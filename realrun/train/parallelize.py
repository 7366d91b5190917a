"""Every strategy as torch trains it: how the model is wrapped, who steps, and what averages."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.schedule.schedule import WORLD, DType, Group
from co2sim.strategies import Strategy
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.local import LocalSteps, Replica
from co2sim.strategies.zero import DDP, Zero1, Zero2
from co2sim.strategies.zeropp import ZeroPP
from realrun import algorithms
from realrun.algorithms.flat_parameters import local_part
from realrun.algorithms.process_groups import Workers
from realrun.execute.world import World
from realrun.train import algorithm_registry
from realrun.train.settings import IN_EVERY_STEP, TrainSettings

_TYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def shared(
    strategy: Strategy, name: str, model: nn.Module, world: World, among: dist.ProcessGroup
) -> nn.Module:
    """The model shared by the ranks of a group, by DDP or one of the stages of ZeRO.

    Raises OptionError for a strategy that is neither.
    """
    if name not in IN_EVERY_STEP:
        raise OptionError(f"{name} has no training algorithm")
    if name in {"ddp", "zero1"}:
        device = [world.device] if world.device.type == "cuda" else None
        mib = (strategy if isinstance(strategy, DDP) else DDP()).bucket_mib
        return DistributedDataParallel(
            model,
            device_ids=device,
            process_group=among,
            bucket_cap_mb=mib,
            gradient_as_bucket_view=True,
        )
    if name == "fsdp":
        return _fully_sharded(
            strategy if isinstance(strategy, FSDP) else FSDP(), model, world, among
        )
    sharing = strategy.sharing(world.layout, WORLD) if isinstance(strategy, Zero2) else (None, None)
    mesh = _mesh(world, among, *sharing)
    # Whole layers stay on a rank between its forward and its backward pass in stage 2, not in 3.
    for layer in (*getattr(model, "layers", ()), model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=name != "zero2")
    if name == "zeropp":
        chosen = strategy if isinstance(strategy, ZeroPP) else ZeroPP()
        algorithms.apply_zeropp(
            model,
            ranks_per_node=world.layout.gpus_per_node,
            qwz=chosen.qwz,
            hpz=chosen.hpz,
            qgz=chosen.qgz,
            block=chosen.scale_block,
        )
    return model


def _mesh(
    world: World, among: dist.ProcessGroup, shared: Group | None, replicas: Group | None
) -> DeviceMesh:
    """That of the ranks that share a model, with a dimension of `replicas` where there are some."""
    if shared is None or replicas is None:
        return DeviceMesh.from_group(among, world.device.type)
    ranks = dist.get_process_group_ranks(among)
    inside, between = (world.group("training", group) for group in (shared, replicas))
    return DeviceMesh.from_group(
        [between, inside],
        world.device.type,
        mesh=torch.tensor(ranks).view(-1, inside.size()),
        mesh_dim_names=("replicate", "shard"),
    )


def _fully_sharded(
    strategy: FSDP, model: nn.Module, world: World, among: dist.ProcessGroup
) -> nn.Module:
    """Every layer a unit, and the rest of the model the root, which stays gathered."""
    groups = strategy.sharding(world.layout, WORLD)
    mesh = _mesh(world, among, groups.among, groups.replicas)
    policy = MixedPrecisionPolicy(reduce_dtype=_TYPES[strategy.reduce])
    for layer in getattr(model, "layers", ()):
        kept = strategy.reshard_after_forward
        fully_shard(layer, mesh=mesh, reshard_after_forward=kept, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


_BETA2 = 0.95
"""Of AdamW; lower than torch's, as is usual for language models."""


class OuterStep(Protocol):
    """An algorithm of `realrun.algorithms`, attached to a model and an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def take_state(self, state: dict[str, Any]) -> None: ...  # noqa: D102
    def agree_on_state(self) -> None: ...  # noqa: D102
    def stats(self) -> algorithms.Stats: ...  # noqa: D102
    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...


@dataclass(frozen=True, slots=True)
class WrappedModel:
    """A model that trains by a strategy.

    `model` is what is called, `bare` the same without its wrapper. `stepper` holds this rank's part
    of the optimizer's state. `workers` ranks, one of each worker, meet in `peers` to average what
    this rank holds; None where all workers are always alike.
    """

    model: nn.Module
    bare: nn.Module
    optimizer: Optimizer
    stepper: Optimizer
    outer: OuterStep | None
    peers: dist.ProcessGroup | None
    workers: int

    @property
    def held(self) -> list[Tensor]:
        """The parameters that this rank holds: its shards where they are sharded."""
        return [local_part(parameter) for parameter in self.bare.parameters()]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state(self) -> dict[str, Any]:
        """What this rank needs to continue from here."""
        return {
            "model": self.held,
            "optimizer": _local(self.stepper.state_dict()),
            "outer": self.outer.state_dict() if self.outer else {},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from there, on this rank alone; `agree` comes once all have done it."""
        self.put(state["model"])
        self._load_optimizer(state["optimizer"])
        if self.outer:
            self.outer.take_state(state["outer"])

    def agree(self) -> None:
        """Compare what was loaded with the other ranks. All call it. Raises MismatchError."""
        if self.outer:
            self.outer.agree_on_state()

    def copy(self) -> list[Tensor]:
        """A copy of what this rank holds."""
        return [part.clone() for part in self.held]

    def put(self, parts: Iterable[Tensor]) -> None:
        """Write parameters."""
        self._forget()
        for target, part in zip(self.held, parts, strict=True):
            target.copy_(part)

    @contextmanager
    def mean(self, parts: Sequence[Tensor] | None = None) -> Iterator[nn.Module]:
        """The model with the mean of all workers' parameters, or of these; then as it was."""
        if parts is None and self.peers is None:
            yield self.bare
            self._forget()
            return
        kept = self.copy()
        flat = torch.cat([part.flatten() for part in (parts or kept)])
        if self.peers is not None:
            dist.all_reduce(flat, group=self.peers)
            flat /= self.workers
        sizes = [part.numel() for part in kept]
        self.put(p.view_as(o) for p, o in zip(torch.split(flat, sizes), kept, strict=True))
        try:
            yield self.bare
        finally:
            self.put(kept)

    def whole(self) -> dict[str, Tensor]:
        """The parameters of the whole model by name. All ranks call it."""
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p.detach()).cpu().clone()
            for name, p in self.bare.named_parameters()
        }

    def _forget(self) -> None:
        """Let FSDP gather parameters again: what it holds gathered may be of others by now."""
        for module in self.bare.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """As optimizers do it, but shards become what the parameters are."""
        parameters = [p for group in self.stepper.param_groups for p in group["params"]]
        states = {
            index: {name: _like(value, parameters[int(index)]) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        self.stepper.load_state_dict({**state, "state": states})


def _local(value: Any) -> Any:
    """This rank's part of the tensors in the state of an optimizer."""
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return local_part(value) if isinstance(value, Tensor) else value


def _like(value: Any, parameter: Tensor) -> Any:
    """A shard of an optimizer's state as a DTensor, if its parameter is one."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim():
        return DTensor.from_local(
            value.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return value


def build(settings: TrainSettings, model: nn.Module, world: World) -> WrappedModel:
    """Wrap a model, which is equal on all ranks, as the strategy wants it. All ranks call it."""
    strategy = settings.parsed
    if not isinstance(strategy, LocalSteps):
        among = world.group("training", WORLD)
        wrapped = shared(strategy, strategy.name, model, world, among)
        shared_by = None
        if isinstance(strategy, Zero1):
            shared_by = world.group("training", strategy.sharing(world.layout, WORLD)[0])
        optimizer = _optimizer(settings, model, shared_by)
        stepper = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        return WrappedModel(wrapped, model, optimizer, stepper, None, None, 1)
    replica = Replica.of(strategy)
    several = replica.ranks(world.layout) > 1
    peers = world.group("training", replica.peers if several else WORLD)
    inner = world.group("training", replica.inside) if several else None
    wrapped = shared(strategy, strategy.inner or "zero2", model, world, inner) if inner else model
    optimizer = _optimizer(settings, model)
    return WrappedModel(
        wrapped,
        model,
        optimizer,
        optimizer,
        _outer(settings, strategy, wrapped, optimizer, Workers(peers, inner), world.deadline),
        peers,
        peers.size(),
    )


def _optimizer(
    settings: TrainSettings, model: nn.Module, shared_by: dist.ProcessGroup | None = None
) -> Optimizer:
    """The optimizer of a step, whose states some ranks may share; only matrices decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    kind: type[Optimizer] = AdamW if settings.optimizer == "adamw" else SGD
    options: dict[str, Any] = {"lr": settings.lr}
    if settings.optimizer == "adamw":
        options["betas"] = (settings.momentum, _BETA2)
    else:
        options["momentum"] = settings.momentum
    if shared_by is not None:
        return ZeroRedundancyOptimizer(
            groups, optimizer_class=kind, process_group=shared_by, **options
        )
    return kind(groups, **options)


def _outer(
    settings: TrainSettings,
    strategy: LocalSteps,
    model: nn.Module,
    optimizer: Optimizer,
    workers: Workers,
    deadline: Seconds,
) -> OuterStep:
    """The algorithm of a local-update strategy."""
    update = algorithm_registry.LOCAL_UPDATES[strategy.name]
    options = algorithm_registry.arguments(strategy.name, settings.outer)
    options |= {"tau": strategy.tau, "dtype": str(strategy.dtype)}
    options |= {name: getattr(strategy, of) for name, of in update.passed.items()}
    if "residual_decay" in options:
        limit, decay = options.pop("clip", None), options.pop("residual_decay")
        if limit is None:
            raise OptionError("outer: residual_decay is of what a clip takes off: give clip, too")
        options["clip"] = algorithms.Clipping(limit=limit, residual_decay=decay)
    kind = attrgetter(update.algorithm)(algorithms)
    made: OuterStep = kind(model, optimizer, worker=workers, timeout=deadline, **options)
    return made
