"""Names of torch that differ between the versions that are supported: 2.9 and later."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

_NEW = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"
"""What torch.distributed calls them."""

_Collective: TypeAlias = Callable[..., dist.Work | None]
all_gather_single: _Collective = getattr(dist, ALL_GATHER)
reduce_scatter_single: _Collective = getattr(dist, REDUCE_SCATTER)


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
