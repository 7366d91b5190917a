"""The collectives that ZeRO++ puts in the place of FSDP2's: gathers in int8, reductions in int4.

FSDP2 calls them on its own streams and takes the result as finished when they return, so all
work here is in the order of the current stream; on CPUs it blocks, as FSDP2's own does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Generator, Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from co2sim.common.errors import OptionError
from realrun.algorithms.quantization import dequantize, quantize, sum_and_quantize, sum_rows
from realrun.algorithms.quantization_kernels import Quantized, Rounding, from_wire, to_wire

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

    def same_node(self, other: int) -> bool:
        """Whether a rank is on this rank's node."""
        return other // self.per_node == self.rank // self.per_node

    def count_ring(self, sent: Sent, members: int, part: int) -> None:
        """Count a ring of `members` consecutive ranks: all but one part to the next."""
        place = self.rank % members
        if self.same_node(self.rank - place + (place + 1) % members):
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


class Gather(AllGather):
    """The gathers of a group of parameters."""

    def __init__(self, params: FSDPParamGroup, zeropp: ZeroPP, block: int) -> None:
        """Keep whose gathers these are; `block` 0 does not quantize."""
        self.params, self.zeropp, self.block = params, zeropp, block

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A fresh buffer, as FSDP2's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        """Fill `output_tensor`, of which `input_tensor` is this rank's part."""
        size, at = group.size(), self.zeropp.places
        backward = self.params._training_state == TrainingState.PRE_BACKWARD  # noqa: SLF001
        backward = backward or size < at.nodes * at.per_node
        sent = self.zeropp.backward if backward else self.zeropp.forward
        if backward or not self.block:
            at.count_ring(sent, size, input_tensor.numel() * input_tensor.element_size())
            found: dist.Work | None = dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return found
        _need_floats(input_tensor, "weights")
        wire = to_wire(quantize(input_tensor, 8, self.block, refuse_non_finite=False))
        at.count_ring(sent, size, wire.numel())
        received = wire.new_empty(size, wire.numel())
        work = dist.all_gather_single(received.view(-1), wire, group=group, async_op=async_op)
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
        codes, scales = from_wire(self.received, 8, self.block, elements)
        self.target.copy_(dequantize(codes, scales, 8, self.block, elements))


class Reduce(ReduceScatter):
    """The reduction of a group's gradients."""

    def __init__(self, zeropp: ZeroPP, block: int, rounding: Rounding) -> None:
        """Keep how to quantize; `block` 0 does not."""
        self.zeropp, self.block, self.rounding = zeropp, block, rounding

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A fresh buffer, as FSDP2's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        """Reduce `input_tensor`, one part for every rank, to this rank's part."""
        if not self.block:
            at = self.zeropp.places
            size = output_tensor.numel() * output_tensor.element_size()
            at.count_ring(self.zeropp.reduce, group.size(), size)
            found: dist.Work | None = dist.reduce_scatter_single(
                output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
            )
            return found
        _need_floats(input_tensor, "gradients")
        output_tensor.copy_(self._sum(input_tensor) * _factor(op, group.size()))
        return None

    def _sum(self, gradient: Tensor) -> Tensor:
        """The fp32 sum over all ranks of this rank's part; one hop where there is one kind."""
        at = self.zeropp.places
        how = (self.block, self.rounding, self.zeropp.generator)
        slices = gradient.view(at.nodes, at.per_node, -1)
        part = slices.shape[-1]
        if at.per_node == 1:
            rows = quantize(slices[:, 0], 4, *how, refuse_non_finite=False)
        else:
            # Rank (node, local) owns slice (node, local). Whoever shares `local` on another node
            # collects the sums of this node for it, so one row holds the slices of one `local`.
            reordered = slices.transpose(0, 1).reshape(at.per_node, -1)
            rows = quantize(reordered, 4, *how, refuse_non_finite=False)
            rows = self._exchange(rows, at.nodes * part, at.node_group)
            if at.nodes == 1:
                return sum_rows(rows, 4, self.block, part)
            rows = sum_and_quantize(rows, 4, self.block, at.nodes * part, at.nodes, *how[1:])
        rows = self._exchange(rows, part, at.peers_group)
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
    factor = getattr(op, "factor", None) if op == dist.ReduceOp.PREMUL_SUM else None
    if factor is None:
        raise OptionError(f"qgz cannot reduce gradients by {op}; it can by SUM, AVG and PREMUL_SUM")
    return float(factor)
