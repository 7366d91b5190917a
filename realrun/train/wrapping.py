"""A model that ranks share in every step: DDP, the stages of ZeRO, ZeRO++ and FSDP, by torch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from co2sim.errors import OptionError
from co2sim.schedule import WORLD, DType
from co2sim.strategies import Strategy
from co2sim.strategies.ddp import DDP
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.zeropp import ZeroPP
from realrun import algorithms
from realrun.execute.world import World
from realrun.train.settings import IN_EVERY_STEP

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
    mesh = DeviceMesh.from_group(among, world.device.type)
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


def _fully_sharded(
    strategy: FSDP, model: nn.Module, world: World, among: dist.ProcessGroup
) -> nn.Module:
    """Every layer a unit, and the rest of the model the root, which stays gathered."""
    ranks = dist.get_process_group_ranks(among)
    mesh = DeviceMesh.from_group(among, world.device.type)
    if (groups := strategy.sharding(world.layout, WORLD)).replicas:
        inside, between = (world.group("training", g) for g in (groups.among, groups.replicas))
        mesh = DeviceMesh.from_group(
            [between, inside],
            world.device.type,
            mesh=torch.tensor(ranks).view(-1, inside.size()),
            mesh_dim_names=("replicate", "shard"),
        )
    policy = MixedPrecisionPolicy(reduce_dtype=_TYPES[strategy.reduce])
    for layer in getattr(model, "layers", ()):
        kept = strategy.reshard_after_forward
        fully_shard(layer, mesh=mesh, reshard_after_forward=kept, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
