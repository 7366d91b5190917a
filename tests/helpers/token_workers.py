"""What ranks of tests do with tokens: send them to experts, and back, with a number on each."""

from typing import Any

import torch
from torch import Tensor

from co2sim.schedule.schedule import Collective, DType, Kind, Op, Schedule, experts
from co2sim.schedule.token_routing import TokenRouting
from realrun.execute.collectives import allocate, carry_out
from realrun.execute.world import World


def routed(tokens: int, members: int, options: dict[str, Any], *, back: bool) -> Collective:
    """Tokens of so many ranks to experts, or results back."""
    how = TokenRouting(**options, back=back)
    elements = round(tokens * how.active * how.width * how.load)
    return Collective(Kind.ALL_TO_ALL, "t", elements, DType.FP32, experts(members), routed=how)


def there_and_back(world: World, tokens: int, options: dict[str, Any]) -> list[list[int]]:
    """Rows that this rank sent, got, and got back; experts multiply by the rank plus one.

    A row is a number that no other has: a thousand times the rank and its place in what was sent.
    """
    members = world.layout.world_size
    found: list[Tensor] = []
    for back in (False, True):
        work = routed(tokens, members, options, back=back)
        world.connect(Schedule("one", (Op("c", work, "comm"),)))
        at = world.communicator("comm", work.group)
        assert at is not None
        buffers = allocate(work, len(at.members), world.device, at.me, at.nodes)
        rows = buffers.given.view(-1, options["width"])
        if back:
            rows.copy_(found[1] * (world.rank + 1))
        else:
            rows.copy_((torch.arange(len(rows)) + 1000 * world.rank).unsqueeze(1))
            found.append(rows.clone())
        for _ in range(2):  # a buffer is used again
            carry_out(work, buffers, at, 20.0)
        found.append(buffers.taken.view(-1, options["width"]).clone())
    assert all(torch.equal(one, one[:, :1].expand_as(one)) for one in found)
    return [one[:, 0].to(torch.int64).tolist() for one in found]
