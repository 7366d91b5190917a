"""The model with which training ends, on all ranks."""

import torch.distributed as dist
from torch import nn

from realrun.algorithms.outer_loop import mark_of


def mean_where_different(model: nn.Module) -> None:
    """Where ranks hold different models, give all their mean. All ranks call this.

    After an algorithm has finished, only callbacks can have made them different: one may put
    weights of its own into the model, such as an EMA. What is not floating point becomes that of
    rank 0.
    """
    if not dist.is_initialized() or (size := dist.get_world_size()) == 1:
        return
    tensors = [one.detach() for one in (*model.parameters(), *model.buffers())]
    marks = [""] * size
    dist.all_gather_object(marks, mark_of(*(one.cpu().contiguous().view(-1) for one in tensors)))
    if len(set(marks)) == 1:
        return
    for one in tensors:
        if one.is_floating_point():
            mean = one.double()
            dist.all_reduce(mean)
            one.copy_(mean / size)
        else:
            sent = one.contiguous()
            dist.broadcast(sent, 0)
            one.copy_(sent)
