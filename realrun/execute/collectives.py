"""Carry out a collective of a schedule, with the bytes that the schedule states."""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from co2sim.errors import OptionError
from co2sim.schedule import Collective, DType, Kind
from co2sim.units import Seconds
from realrun.execute import rings
from realrun.execute.world import RankCommunicator

_SUMMED = {DType.FP32: torch.float32, DType.FP16: torch.float16, DType.BF16: torch.bfloat16}
"""Types that can be added up on the way. int8 and int4 travel as bytes, with their scales."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a member gives, and what it takes: flat tensors; the same one if it works in place.

    Sums are of the schedule's type. What is only moved is bytes (uint8): int4 two to a byte, then
    the fp32 scales of its blocks. Sizes are rounded up so that all parts are equal:

    all_reduce: (elements) in place. reduce_scatter: (members x part) -> (part).
    all_gather: (part) -> (members x part). all_to_all: (members x part) both. broadcast and
    reduce: in place, from and to the root.
    """

    given: Tensor
    taken: Tensor


def allocate(work: Collective, members: int, device: torch.device) -> Buffers:
    """Buffers of a collective among `members` ranks.

    Raises OptionError for sums of quantized values: they would overflow, so they travel by
    all_to_all and are summed after dequantization.
    """
    if work.kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE}:
        if work.dtype not in _SUMMED:
            raise OptionError(
                f"{work.kind}({work.buffer}) of {work.dtype}: sums are of"
                f" {', '.join(_SUMMED)}; quantized values travel by all_to_all"
            )
        size, dtype = work.elements, _SUMMED[work.dtype]
    else:
        size, dtype = math.ceil(work.bytes), torch.uint8
    part = -(-size // members)
    match work.kind:
        case Kind.ALL_REDUCE | Kind.BROADCAST | Kind.REDUCE:
            given = torch.zeros(size, dtype=dtype, device=device)
            return Buffers(given, given)
        case Kind.REDUCE_SCATTER:
            sizes = (members * part, part)
        case Kind.ALL_GATHER:
            sizes = (part, members * part)
        case Kind.ALL_TO_ALL:
            sizes = (members * part, members * part)
    given, taken = (torch.zeros(count, dtype=dtype, device=device) for count in sizes)
    return Buffers(given, taken)


def carry_out(work: Collective, buffers: Buffers, at: RankCommunicator, deadline: Seconds) -> None:
    """Run a collective over Gloo and wait for its end, at most `deadline` seconds."""
    given, taken, root = buffers.given, buffers.taken, work.root % len(at.members)
    match work.kind:
        case Kind.ALL_REDUCE:
            found = dist.all_reduce(given, group=at.group, async_op=True)
            found.wait(timedelta(seconds=deadline))
        case Kind.REDUCE_SCATTER:
            rings.reduce_scatter(given, taken, at, deadline)
        case Kind.ALL_GATHER:
            rings.all_gather(given, taken, at, deadline)
        case Kind.ALL_TO_ALL:
            rings.all_to_all(given, taken, at, deadline)
        case Kind.BROADCAST:
            rings.broadcast(given, root, at, deadline)
        case Kind.REDUCE:
            rings.reduce(given, root, at, deadline)


def launch(work: Collective, buffers: Buffers, at: RankCommunicator) -> dist.Work:
    """Launch a collective over NCCL on the current stream."""
    given, taken, group = buffers.given, buffers.taken, at.group
    root = work.root % len(at.members)
    match work.kind:
        case Kind.ALL_REDUCE:
            found = dist.all_reduce(given, group=group, async_op=True)
        case Kind.REDUCE_SCATTER:
            found = dist.reduce_scatter_single(taken, given, group=group, async_op=True)
        case Kind.ALL_GATHER:
            found = dist.all_gather_single(taken, given, group=group, async_op=True)
        case Kind.ALL_TO_ALL:
            found = dist.all_to_all_single(taken, given, group=group, async_op=True)
        case Kind.BROADCAST:
            found = dist.broadcast(given, group_src=root, group=group, async_op=True)
        case Kind.REDUCE:
            found = dist.reduce(given, group_dst=root, group=group, async_op=True)
    assert isinstance(found, dist.Work)
    return found


def alone(buffers: Buffers) -> None:
    """What a collective does for a rank that is its only member."""
    if buffers.taken is not buffers.given:
        buffers.taken.copy_(buffers.given)
