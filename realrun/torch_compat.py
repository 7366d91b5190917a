"""Names of torch that differ between the versions that are supported: 2.9 and later."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def all_gather_single(
    output: Tensor,
    given: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,  # noqa: FBT001, FBT002 - as torch has it
) -> dist.Work | None:
    """`dist.all_gather_single`, which was `all_gather_into_tensor`."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, given, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: Tensor,
    given: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    **options: Any,
) -> dist.Work | None:
    """`dist.reduce_scatter_single`, which was `reduce_scatter_tensor`."""
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(output, given, group=group, async_op=async_op, **options)
    return work


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together; there was one at most."""
    state: Any = module._get_fsdp_state()  # noqa: SLF001 - no public way
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group  # noqa: SLF001
        return [] if group is None else [group]
    return list(groups)
