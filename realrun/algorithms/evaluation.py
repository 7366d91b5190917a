"""What workers hold besides averaged parameters, averaged too: buffers, copies, other modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from co2sim.errors import OptionError
from realrun.algorithms.flat import memory
from realrun.algorithms.links import Links


def others_of(model: nn.Module, also: Sequence[nn.Module], *, buffers: bool) -> list[Tensor]:
    """Tensors to average: the model's buffers if asked for, and all that other modules hold.

    Raises OptionError for what is no module.
    """
    for one in also:
        if not isinstance(one, nn.Module):
            raise OptionError(
                f"what is averaged besides is a {type(one).__name__}; it must be a torch.nn.Module,"
                " such as torch.optim.swa_utils.AveragedModel: put tensors into its buffers"
            )
    own = list(model.buffers()) if buffers else []
    more = [one for module in also for one in (*module.parameters(), *module.buffers())]
    return list({id(one): one for one in (*own, *more)}.values())


@torch.no_grad()
def average_now(tensors: Sequence[Tensor], links: Links, *, counts: bool = True) -> None:
    """Every tensor <- its mean over all ranks that hold the same part; integers: the first's.

    A rank that does not count only gets the mean, unless none does. All ranks call it with tensors
    of the same shapes, and wait for each other.
    """
    members = links.of_peers(counts) if tensors else [counts]
    weight = counts * len(members) / sum(members) if any(members) else 1.0
    for tensor in tensors:
        links.mean(memory(tensor), sharded=isinstance(tensor, DTensor), weight=weight)


@contextmanager
def averaged(tensors: Sequence[Tensor], links: Links) -> Iterator[None]:
    """Within, they hold their means; afterwards, what they held."""
    kept = [memory(one).detach().clone() for one in tensors]
    average_now(tensors, links)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, kept, strict=True):
                memory(tensor).copy_(before)
