"""ZeRO++ for FSDP2: int8 weight gathers, backward gathers inside nodes, int4 gradients.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    apply_zeropp(model)                    # ranks_per_node from LOCAL_WORLD_SIZE

Three switches, the same as those of co2sim's `zeropp`, with the same bytes on the wire:

qwz: forward gathers send int8 codes and scales. Every rank computes with the decoded weights, its
own shard's included, so that all have the same; the optimizer keeps the exact shards.
hpz: backward gathers stay inside the node: FSDP2 reshards a module after its forward over the
ranks of the node only. What they send is not quantized (again).
qgz: gradients are quantized to int4, exchanged inside the node, summed, quantized again, exchanged
among the ranks with the same place in every node, and summed. Slices are reordered before the
first exchange, so that each rank ends with its own shard. The result is what FSDP2 asked for: the
mean over all ranks, unless a divide factor was set.

Source: Wang et al. 2023, arXiv 2306.10209.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from co2sim.common.errors import OptionError
from co2sim.common.validation import whole
from realrun.algorithms.quantization import dequantize, quantize, sum_and_quantize, sum_rows
from realrun.algorithms.quantization_format import Quantized, Rounding, from_wire, to_wire
from realrun.errors import one_of, refuse_different
from realrun.torch_compat import (
    all_gather_single,
    fsdp_param_groups,
    premul_factor,
)

_SENDABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Sent:
    """Bytes that this rank has sent: inside its node, and between nodes.

    Gathers and reduce-scatters count as rings over consecutive ranks, exchanges as pairs. Gloo's
    own reduce-scatter (without qgz) sends more than that.
    """

    inside: int = 0
    between: int = 0


@dataclass(frozen=True, slots=True)
class Places:
    """Where this rank is: `local` of `per_node` ranks of node `node` of `nodes`; its groups."""

    nodes: int
    per_node: int
    rank: int
    node_group: dist.ProcessGroup
    peers_group: dist.ProcessGroup

    def count_ring(self, sent: Sent, members: int, part: int) -> None:
        """Count a ring of `members` consecutive ranks: all but one part to the next."""
        index = self.rank % members
        following = self.rank - index + (index + 1) % members
        if following // self.per_node == self.rank // self.per_node:
            sent.inside += (members - 1) * part
        else:
            sent.between += (members - 1) * part


@dataclass(frozen=True, slots=True)
class ZeroPP:
    """What `apply_zeropp` has set up: bytes sent so far, and the source of stochastic rounding.

    A checkpoint that shall resume bit for bit with stochastic rounding keeps `generator.get_state`.
    """

    places: Places
    forward: Sent = field(default_factory=Sent)
    backward: Sent = field(default_factory=Sent)
    reduce: Sent = field(default_factory=Sent)
    generator: Generator | None = None


class Gather(DefaultAllGather):
    """The gathers of a group of parameters."""

    def __init__(self, params: FSDPParamGroup, zeropp: ZeroPP, block: int) -> None:
        """Keep whose gathers these are; `block` 0 does not quantize."""
        self.params, self.zeropp, self.block = params, zeropp, block

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        """Fill `output_tensor`, of which `input_tensor` is this rank's part."""
        size, places = group.size(), self.zeropp.places
        backward = self.params._training_state == TrainingState.PRE_BACKWARD  # noqa: SLF001
        backward = backward or size < places.nodes * places.per_node
        sent = self.zeropp.backward if backward else self.zeropp.forward
        if backward or not self.block:
            places.count_ring(sent, size, input_tensor.numel() * input_tensor.element_size())
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        _need_floats(input_tensor, "weights")
        wire = to_wire(quantize(input_tensor, 8, self.block))
        places.count_ring(sent, size, wire.numel())
        received = wire.new_empty(size, wire.numel())
        work = all_gather_single(received.view(-1), wire, group=group, async_op=async_op)
        arrival = _Arrival(work, received, wire, output_tensor.view(size, -1), self.block)
        if async_op:
            return arrival
        arrival.decode()
        return None


class _Arrival(dist.Work):
    """A quantized gather under way. Waiting for it also decodes it."""

    def __init__(
        self, work: dist.Work | None, received: Tensor, wire: Tensor, target: Tensor, block: int
    ) -> None:
        """Keep the buffers alive until they have arrived."""
        super().__init__()
        self.work, self.received, self.wire = work, received, wire
        self.target, self.block = target, block

    def wait(self, *_timeout: object) -> bool:
        """Wait for the codes, and decode them into the buffer of FSDP2."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.decode()
        return True

    def decode(self) -> None:
        """Codes and scales of all ranks, this one's too, to weights."""
        elements = self.target.shape[-1]
        if self.received.is_cuda:  # gathered on another stream, whose memory may be reused
            self.received.record_stream(torch.cuda.current_stream(self.received.device))
        codes, scales = from_wire(self.received, 8, self.block, elements)
        self.target.copy_(dequantize(codes, scales, 8, self.block, elements))


class Reduce(DefaultReduceScatter):
    """The reduction of a group's gradients."""

    def __init__(self, zeropp: ZeroPP, block: int, rounding: Rounding) -> None:
        """Keep how to quantize; `block` 0 does not."""
        self.zeropp, self.block, self.rounding = zeropp, block, rounding

    def __call__(  # type: ignore[override] # None where nothing is left to wait for
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        """Reduce `input_tensor`, one part for every rank, to this rank's part."""
        if not self.block:
            places = self.zeropp.places
            size = output_tensor.numel() * output_tensor.element_size()
            places.count_ring(self.zeropp.reduce, group.size(), size)
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        _need_floats(input_tensor, "gradients")
        output_tensor.copy_(self._sum(input_tensor) * _factor(op, group.size()))
        return None

    def _sum(self, gradient: Tensor) -> Tensor:
        """The fp32 sum over all ranks of this rank's part; one hop where there is one kind."""
        places = self.zeropp.places
        how = (self.block, self.rounding, self.zeropp.generator)
        slices = gradient.view(places.nodes, places.per_node, -1)
        part = slices.shape[-1]
        if places.per_node == 1:
            rows = quantize(slices[:, 0], 4, *how)
        else:
            # Rank (node, local) owns slice (node, local). A rank with the same `local` on another
            # node collects the sums of this node for it: one row holds the slices of one `local`.
            reordered = slices.transpose(0, 1).reshape(places.per_node, -1)
            rows = quantize(reordered, 4, *how)
            rows = self._exchange(rows, places.nodes * part, places.node_group)
            if places.nodes == 1:
                return sum_rows(rows, 4, self.block, part)
            rows = sum_and_quantize(
                rows, 4, self.block, places.nodes * part, places.nodes, *how[1:]
            )
        rows = self._exchange(rows, part, places.peers_group)
        return sum_rows(rows, 4, self.block, part)

    def _exchange(self, rows: Quantized, elements: int, group: dist.ProcessGroup) -> Quantized:
        """Send row k to member k; gives the rows that came from every member."""
        wire = to_wire(rows)
        assert len(wire) == group.size()  # else Gloo gives garbage, without an error
        received = torch.empty_like(wire)
        dist.all_to_all_single(received.view(-1), wire.view(-1), group=group)
        count = (len(wire) - 1) * wire.shape[1]
        if group is self.zeropp.places.node_group:
            self.zeropp.reduce.inside += count
        else:
            self.zeropp.reduce.between += count
        return from_wire(received, 4, self.block, elements)


def _need_floats(x: Tensor, what: str) -> None:
    if x.dtype not in _SENDABLE:
        raise OptionError(
            f"{what} of {x.dtype} cannot be quantized; the parameters of a module must all be fp32,"
            " bf16 or fp16, or MixedPrecisionPolicy must make them so"
        )


def _factor(op: dist.ReduceOp | dist.ReduceOp.RedOpType, ranks: int) -> float:
    """What the sum has to be multiplied by; other divisions are FSDP2's, before and after."""
    if op == dist.ReduceOp.AVG:
        return 1 / ranks
    if op == dist.ReduceOp.SUM:
        return 1.0
    factor = premul_factor(op) if op == dist.ReduceOp.PREMUL_SUM else None
    if factor is None:
        raise OptionError(f"qgz cannot reduce gradients by {op}; it can by SUM, AVG and PREMUL_SUM")
    return float(factor)


_BLOCK = 2048

_APPLIED: WeakSet[FSDPModule] = WeakSet()
"""Modules that were switched."""


def apply_zeropp(
    model: nn.Module,
    *,
    ranks_per_node: int | None = None,
    qwz: bool = True,
    hpz: bool = True,
    qgz: bool = True,
    block: int = _BLOCK,
    rounding: Rounding = "nearest",
    seed: int = 0,
) -> ZeroPP:
    """Switch the modules of `model` that went through `fully_shard` to ZeRO++. All ranks call it.

    The mesh is of all ranks, or of those of one or more nodes, such as a worker of local updates.
    A node is `ranks_per_node` consecutive ranks (default: LOCAL_WORLD_SIZE). `block` elements share
    a scale. `rounding` is that of gradients: `nearest` has the smaller error, but two hops
    in int4 can shift the mean by about 1 % (slopes of 0.987 to 1.011 on normal gradients of 2 x 2
    ranks); `stochastic` is right on average, from a generator seeded with `seed` and the rank.
    hpz leaves modules alone that keep their weights after the forward
    (`reshard_after_forward=False`, and the root by default) or have their own group size.
    With a switch off FSDP2 does what it did. An inf or a NaN in weights or gradients spreads to
    its whole block, on all ranks.

    Mixed precision, gradient accumulation (`set_requires_gradient_sync`) and divide factors work
    as before. Raises OptionError for what does not, and MismatchError when ranks disagree.
    """
    whole("block", block, 1)
    if block != _BLOCK and not (qwz or qgz):
        raise OptionError(f"block={block} needs qwz or qgz")
    one_of("rounding", rounding, get_args(Rounding))
    if rounding != "nearest" and not qgz:
        raise OptionError(f"rounding={rounding!r} needs qgz; weights are rounded to nearest")
    groups = _param_groups(model)
    if any(module in _APPLIED for module, _ in groups):
        raise OptionError(f"apply_zeropp was called on this {type(model).__name__} before: once")
    mesh = _mesh(groups)
    per_node = _ranks_per_node(ranks_per_node, mesh)
    settings = {"ranks_per_node": per_node, "qwz": qwz, "hpz": hpz, "qgz": qgz, "block": block}
    text = "\n".join(f"{name} = {value}" for name, value in settings.items())
    texts = [""] * mesh.size()  # other ranks would exchange buffers of other sizes, and hang
    dist.all_gather_object(texts, text, group=mesh.get_group())
    refuse_different(
        "setting of apply_zeropp", texts, dist.get_process_group_ranks(mesh.get_group())
    )
    grid = _grid(mesh, per_node)
    rank = mesh.get_local_rank()
    zeropp = ZeroPP(
        Places(mesh.size() // per_node, per_node, rank, grid.get_group(1), grid.get_group(0)),
        generator=_generator(seed, rank) if rounding == "stochastic" else None,
    )
    for module, params in groups:
        module.set_custom_all_gather(Gather(params, zeropp, block if qwz else 0))
        module.set_custom_reduce_scatter(Reduce(zeropp, block if qgz else 0, rounding))
        if hpz:
            _keep_secondary(module, params, grid)
        _APPLIED.add(module)
    return zeropp


def _generator(seed: int, rank: int) -> Generator:
    """Random numbers of a rank, unlike those of any small seed, such as that of its data."""
    digest = sha256(f"zeropp {seed} {rank}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _param_groups(model: nn.Module) -> list[tuple[FSDPModule, FSDPParamGroup]]:
    """Every group of parameters that communicates together, with one of its modules."""
    by_id: dict[int, tuple[FSDPModule, FSDPParamGroup]] = {}
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise OptionError(
            f"{type(model).__name__} has no FSDP2 modules; call fully_shard on its layers and on"
            " itself before apply_zeropp"
        )
    for module in modules:
        groups = fsdp_param_groups(module)
        if len(groups) > 1:
            raise OptionError(
                f"{type(module).__name__} shards its parameters over several meshes"
                " (shard_placement_fn); ZeRO++ needs one"
            )
        for group in groups:
            by_id.setdefault(id(group), (module, group))
    return list(by_id.values())


def _mesh(groups: Sequence[tuple[FSDPModule, FSDPParamGroup]]) -> DeviceMesh:
    """The one mesh of all groups: 1-D, consecutive ranks in order."""
    meshes = [group.mesh_info for _, group in groups]
    for info in meshes:
        ranks = info.mesh.mesh.flatten().tolist()
        row = list(range(ranks[0], ranks[0] + len(ranks)))
        if info.mesh.ndim != 1 or getattr(info, "is_spmd_mesh", False) or ranks != row:
            raise OptionError(
                f"ZeRO++ needs a 1-D mesh of all ranks, or of whole nodes, in order, not"
                f" {info.mesh}: call fully_shard without a mesh or with one of such ranks, not with"
                " replication (HSDP) or other parallelism"
            )
        if info.mesh != meshes[0].mesh:
            raise OptionError("ZeRO++ needs one mesh for all modules that it is applied to")
    return meshes[0].mesh


def _grid(mesh: DeviceMesh, per_node: int) -> DeviceMesh:
    """Nodes by ranks of a node. Only the ranks of the mesh make its groups."""
    ranks = mesh.mesh.view(-1, per_node)
    node, local = divmod(mesh.get_local_rank(), per_node)
    mine = (ranks[:, local].tolist(), ranks[node].tolist())
    groups = [dist.new_group(members, use_local_synchronization=True) for members in mine]
    names = ("between", "inside")
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _ranks_per_node(count: int | None, mesh: DeviceMesh) -> int:
    if count is None:
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdecimal():
            raise OptionError(
                f"ranks_per_node is not given and LOCAL_WORLD_SIZE is {text!r}: start ranks with"
                " torchrun, or give it"
            )
        count = int(text)
    first, size = int(mesh.mesh[0]), mesh.size()
    if count < 1 or size % count:
        raise OptionError(f"ranks_per_node is {count}; it must divide the {size} ranks")
    if first % count:
        raise OptionError(f"ranks_per_node is {count}; the mesh begins with rank {first} of a node")
    return count


def _keep_secondary(module: FSDPModule, params: FSDPParamGroup, grid: DeviceMesh) -> None:
    """Do what `fully_shard(reshard_after_forward=ranks of a node)` does, on one mesh for all.

    FSDP2 itself would make new process groups for every module.
    """
    if params.post_forward_mesh_info != params.mesh_info or grid.size(0) == 1:
        return  # the weights stay whole, another group was asked for, or the node is the world
    if grid.size(1) == 1:
        module.set_reshard_after_forward(False, recurse=False)
        return
    info = HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)
    params.post_forward_mesh_info = info
    for param in params.fsdp_params:
        param.post_forward_mesh_info = info
        whole = torch.empty(param._orig_size, device="meta")  # noqa: SLF001
        param._init_sharded_post_forward_param_metadata(whole)  # noqa: SLF001
