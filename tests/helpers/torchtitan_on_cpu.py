"""Lets torchtitan 0.3, which knows accelerators only, run on CPUs; import it before torchtitan.

What is other than on a GPU: the device and what is asked of its memory; attention, as FlexAttention
has no backward pass on a CPU; sums of FSDP2, as Gloo has no sums with a factor; and two things that
torch has from 2.14 on. `python torchtitan_on_cpu.py` is `python -m torchtitan.train`.
"""

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake", before torch 2.14
import torchtitan.tools.utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, create_mask


class _Cpu(ModuleType):
    """torch.cpu, with what torchtitan asks torch.cuda besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _device() -> ModuleType:
    found = _Cpu("torch.cpu")
    found.__dict__.update(
        current_device=lambda: 0,
        empty_cache=lambda: None,
        get_device_name=lambda _=None: "cpu",
        get_device_properties=lambda _=None: SimpleNamespace(total_memory=2**34),
        memory_stats=lambda _=None: {},
        reset_peak_memory_stats=lambda: None,
    )
    return found


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[Tensor, AuxOutput]:
    """The same with a dense mask."""
    rows, columns = query.shape[2], key.shape[2]
    mask = create_mask(block_mask.mask_mod, len(query), 1, rows, columns, device="cpu")
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return found, AuxOutput()


torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = _device()
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

import torchtitan.distributed.fsdp  # noqa: E402 - what it imports takes the device
import torchtitan.trainer  # noqa: E402 - as above
from torchtitan.models.common import attention  # noqa: E402 - as above

attention.FlexAttention._compiled_flex_attn = _attention
attention._compiled_create_block_mask = create_block_mask
torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
_divide = torchtitan.distributed.fsdp.disable_fsdp_gradient_division


def _sum(model: torch.nn.Module) -> None:
    _divide(model)
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.set_force_sum_reduction_for_comms(True)


torchtitan.distributed.fsdp.disable_fsdp_gradient_division = _sum

BACKEND = "partial_dtensor" if torch.__version__ < "2.14" else "spmd_types"
"""Of torchtitan's parallelism: before torch 2.14 its default shards nothing."""

if __name__ == "__main__":
    from torchtitan.train import main

    sys.path.insert(0, "")
    main()
