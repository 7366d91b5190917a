"""FSDP: torch's own fully_shard, on four ranks, asks for the collectives of the schedule."""

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from ranks import ranked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from workers import listening

from co2sim.models.operators import Model, plain_block
from co2sim.schedule.schedule import Collective
from co2sim.strategies import FSDP, checked
from co2sim.strategies.step import group_size
from co2sim.training.workload import Workload
from realrun.execute.world import World
from realrun.torch_compat import ALL_GATHER, REDUCE_SCATTER

WIDTH, LAYERS = 16, 3
KINDS = {ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter", "all_reduce": "all_reduce"}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def stack() -> nn.Sequential:
    """An embedding, layers of WIDTH x WIDTH and a head twice as wide; ranks divide all evenly."""
    widths = [8, *[WIDTH] * (LAYERS + 1), 2 * WIDTH]
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(widths)))


def asked(world: World, strategy: FSDP, micro_steps: int) -> list[list[Any]]:
    """The collectives of a step of torch: kind, number of ranks, type and elements."""
    ranks, shard = world.layout.world_size, strategy.shard or world.layout.world_size
    mesh = init_device_mesh("cpu", (ranks,))
    if shard != ranks:
        size = world.layout.gpus_per_node if shard == "node" else shard
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=names)
    reduce = {name: dtype for dtype, name in TYPES.items()}[strategy.reduce]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model = stack()
    for layer in model[1:-1]:
        kept = strategy.reshard_after_forward
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=kept)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with listening(*((dist, name) for name in KINDS)) as heard:
        for micro in range(micro_steps):
            if strategy.sync == "last":
                last = micro == micro_steps - 1
                model.set_requires_gradient_sync(last)
                if strategy.reshard_after_forward is False:
                    model.set_reshard_after_backward(last)
            model(torch.ones(2, 8)).sum().backward()
    return [
        [KINDS[name], group.size(), TYPES[large.dtype], large.numel()]
        for name, group, large in heard
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduce": "bf16"},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"shard": "node"},
        {"sync": "last"},
        {"sync": "last", "reshard_after_forward": False},
    ],
)
@pytest.mark.parametrize("micro_steps", [pytest.param(1, marks=pytest.mark.nightly), 3])
@ranked(4, gpus_per_node=2)
def test_torch_issues_the_collectives_of_the_schedule_in_its_order(
    world: World, options: dict[str, Any], micro_steps: int
) -> None:
    """Kind, number of ranks, type and elements, one by one, on every rank: two nodes of two."""
    sizes = {"embedding": 8 * WIDTH, **{f"layer{n}": WIDTH * WIDTH for n in range(LAYERS)}}
    blocks = [plain_block(name, (size,), 1.0, 0.0) for name, size in {**sizes, "head": 512}.items()]
    job = Workload(Model("stack", tuple(blocks), tokens=1), accumulation=micro_steps)
    body = checked(FSDP(**options, clip=False)).schedule(job, world.layout).body
    works = [op.work for op in body if isinstance(op.work, Collective)]
    assert asked(world, FSDP(**options), micro_steps) == [
        [str(work.kind), group_size(work.group, world.layout), str(work.dtype), work.elements]
        for work in works
    ]
