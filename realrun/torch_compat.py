"""Names of torch that differ between the versions that are supported: 2.9 and later."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

_NEW = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"
"""What torch.distributed calls them."""


def all_gather_single(
    output: Tensor,
    source: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,  # noqa: FBT001, FBT002 - as torch has it
) -> dist.Work | None:
    """As `ALL_GATHER`."""
    gather: Any = getattr(dist, ALL_GATHER)
    work: dist.Work | None = gather(output, source, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: Tensor,
    source: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    **options: Any,
) -> dist.Work | None:
    """As `REDUCE_SCATTER`."""
    scatter: Any = getattr(dist, REDUCE_SCATTER)
    work: dist.Work | None = scatter(output, source, group=group, async_op=async_op, **options)
    return work


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together; there was one at most."""
    state: Any = module._get_fsdp_state()  # noqa: SLF001 - no public way
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group  # noqa: SLF001
        return [] if group is None else [group]
    return list(groups)


def premul_factor(op: Any) -> float | None:
    """The factor of a `PREMUL_SUM`, which has no name before torch 2.11."""
    factor = getattr(op, "factor", None)
    if factor is None and hasattr(op, "__getstate__"):
        _, factor = op.__getstate__()
    return factor
