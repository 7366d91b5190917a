"""What ranks send in the algorithms, to compare the study of block sizes with."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from co2sim.schedule.schedule import WORLD
from realrun.algorithms.averaging import Average
from realrun.algorithms.process_groups import Wire
from realrun.algorithms.zeropp import Places, Reduce, ZeroPP
from realrun.execute.world import World

ELEMENTS = 4 * 130


def drawn(rank: int) -> Tensor:
    """A vector of a rank."""
    return torch.randn(ELEMENTS, generator=Generator().manual_seed(rank))


def gradient(world: World, block: int) -> dict[str, Any]:
    """This rank's gradient, and its part of the mean by qgZ, two ranks in each of two nodes."""
    node, place = divmod(world.rank, 2)
    nodes = [dist.new_group([2 * n, 2 * n + 1]) for n in range(2)]
    peers = [dist.new_group([p, p + 2]) for p in range(2)]
    assert isinstance(nodes[node], dist.ProcessGroup)
    places = Places(2, 2, world.rank, nodes[node], peers[place])
    given = drawn(world.rank)
    got = torch.empty(ELEMENTS // 4)
    everyone = dist.group.WORLD
    assert everyone is not None
    Reduce(ZeroPP(places), block, "nearest")(got, given.clone(), everyone, dist.ReduceOp.AVG)
    return {"given": given.tolist(), "got": got.tolist()}


def outer(world: World, wire: Wire) -> dict[str, Any]:
    """This rank's displacement, and the mean."""
    given = drawn(world.rank)
    average = Average(world.group("average", WORLD), wire, 10.0, 25 << 20)
    got = given.clone()
    average.launch(got, 1).wait()
    average.close()
    return {"given": given.tolist(), "got": got.tolist()}
