"""A model and how it is trained: parameters, FLOP and bytes of every block.

FLOP count a multiply-add as two. The model FLOP of a token follow PaLM (Chowdhery et al. 2022,
appendix B): 6 for every parameter that multiplies, plus 12 x layers x heads x head_dim x seq_len
for softmax attention, without a discount for causal masks. Norms, biases and activations are left
out. A backward pass is twice a forward pass; `recompute` adds to the hardware FLOP only, as
published figures count them: scores of attention, products of an MLP, or a whole forward pass.
What kernels execute is another matter: `Kernels` of a pass say it, and times follow from them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Literal, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Flops
from co2sim.common.validation import whole
from co2sim.models.adapters import BACKWARD_MOVES, FORWARD_MOVES, with_adapters
from co2sim.models.architecture import shard_model
from co2sim.models.blocks import (
    AttentionScores,
    Block,
    ContextExchange,
    MatMul,
    Model,
    Routing,
    TensorParallelCommunication,
    kinds,
    product_flops,
)
from co2sim.models.framework import Framework, Loss, Recomputation, Recompute, layers, recomputation
from co2sim.models.optimizer import ADAMW, FP32, Matrix, Optimizer, Tensors, trained_tensors
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.schedule import (
    Collective,
    Compute,
    DType,
    FusedAttention,
    Gemm,
    Group,
    Kernels,
    Kind,
    TensorParallelCollectives,
    experts,
    tensor,
)
from co2sim.schedule.token_routing import TokenRouting

Pass: TypeAlias = Literal["forward", "recompute", "products", "attention", "mlp", "backward"]
"""recompute: a forward pass again; products: the part of it that `Selective` says; attention and
mlp: that operator again."""

_SECOND = 0.5
"""Of the products with weights: every second one."""

_BOTH = 2
"""Products of a backward pass for one of a forward pass."""

_LOSS_SUMS = 3
"""All-reduces of a value for every row of logits: their largest, the target's, the sum of their
exponentials. Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py."""


def tensor_parallel_collectives(
    block: TensorParallelCommunication | None,
    passes: Sequence[Pass],
    samples: int,
    dtype: DType,
    stops_early: bool,  # noqa: FBT001
    overlap: bool = False,  # noqa: FBT001, FBT002
    keep: bool = False,  # noqa: FBT001, FBT002
) -> TensorParallelCollectives | None:
    """The exchanges of passes over a block with `samples` samples; None where it is whole.

    A repeated forward pass that `stops_early` needs no result of the block's last product. With
    `overlap` products work on parts of their operands while others are exchanged. With `keep` a
    backward pass finds the operands of products as the forward pass gathered them.
    """
    if block is None:
        return None
    made = [_of_pass(block, direction, samples, dtype, stops_early) for direction in passes]
    if keep:
        made = [replace(exchanges, beside=()) for exchanges in made]
    if overlap:
        made = [_beside(exchanges) for exchanges in made]
    return reduce(TensorParallelCollectives.then, made)


def _beside(exchanges: TensorParallelCollectives) -> TensorParallelCollectives:
    """All exchanges of activations beside the pass; those of the loss stay behind it."""
    loss = tuple(work for work in exchanges.behind if work.buffer == "loss")
    activations = tuple(work for work in exchanges.behind if work.buffer != "loss")
    return TensorParallelCollectives((), (*exchanges.before, *exchanges.beside, *activations), loss)


def _of_pass(
    block: TensorParallelCommunication,
    which: Pass,
    samples: int,
    dtype: DType,
    stops_early: bool,  # noqa: FBT001
) -> TensorParallelCollectives:
    group, elements = tensor(block.ranks), samples * block.elements

    def make(kind: Kind, times: int) -> tuple[Collective, ...]:
        return (Collective(kind, "activations", elements, dtype, group),) * times

    inputs, outputs, rows = block.inputs, block.outputs, block.rows
    if which == "backward":
        inputs, outputs, rows = outputs, inputs, 0
    elif which == "products":  # sums over ranks are kept
        outputs, rows = 0, 0
    elif which == "attention":  # it lies between two products
        inputs, outputs, rows = 0, 0, 0
    elif which == "mlp":  # the first exchange to each side is that of attention
        inputs, outputs, rows = max(0, inputs - 1), max(0, outputs - 1 - stops_early), 0
    elif which == "recompute" and stops_early:
        outputs, rows = max(0, outputs - 1), 0
    loss: tuple[Collective, ...] = ()
    if rows:
        sums = Collective(Kind.ALL_REDUCE, "loss", samples * rows, DType.FP32, group)
        loss = (sums,) * _LOSS_SUMS
    if not block.sequence:
        return TensorParallelCollectives(behind=(*make(Kind.ALL_REDUCE, outputs), *loss))
    again = make(Kind.ALL_GATHER, outputs) if which == "backward" else ()
    before, behind = make(Kind.ALL_GATHER, inputs), make(Kind.REDUCE_SCATTER, outputs)
    return TensorParallelCollectives(before, again, (*behind, *loss))


__all__ = [
    "AttentionScores",
    "Block",
    "BlockWork",
    "MatMul",
    "Model",
    "Offload",
    "Recompute",
    "Workload",
]

Offload = Literal["none", "optimizer", "parameters"]
"""optimizer: its states are in the host's memory, and the host's processors update them (Ren et al.
2021, ZeRO-Offload, arXiv 2101.06840). parameters: these and gradients, too; a block's share comes
over the link before it is gathered (ZeRO-Infinity, arXiv 2104.07857; torch's CPUOffloadPolicy)."""

Narrow = Literal["fp8", "mxfp8", "nvfp4"]
"""Types of matrix products below 16 bits. fp8: one scale for a tensor, from its own maximum. mxfp8:
one for 32 numbers. nvfp4: one in fp8 for 16 numbers, and one for the tensor. Sources: NVIDIA
Transformer Engine 2.0, docs/examples/fp8_primer; Open Compute Project, Microscaling Formats 1.0."""


@dataclass(frozen=True, slots=True)
class NarrowType:
    """A type of operands: its `peak` in files of GPUs, and bytes of an element with its scales.

    An operand is read `reads` times to cast it: for the maximum of the tensor, and for the numbers.
    GPUs that multiply it have a peak of `also`, if any: blocks of 32 came with types of 4 bits,
    which are NVIDIA's (fp4, with MXFP4) or MXFP4 alone.
    """

    peak: str
    bytes: Bytes
    reads: int
    also: tuple[str, ...] = ()


NARROW: Mapping[str, NarrowType] = {
    "fp8": NarrowType("fp8", 1.0, 2),
    "mxfp8": NarrowType("fp8", 1.0 + 1 / 32, 1, ("fp4", "mxfp4")),
    "nvfp4": NarrowType("fp4", 0.5 + 1 / 16, 2),
}

_LAYOUTS = 2
"""Of a cast operand: rows for one product, and columns for another. Source: Transformer Engine,
cast_transpose; Hopper multiplies fp8 of one layout only."""

MAX_SAMPLES = 10_000
"""Of a micro-batch, and micro-steps of a step: the schedule holds every micro-step."""

MAX_RANK = 65_536
"""Of adapters: wider than the layers of any model."""

FLASH_BACKWARD = 2.5
"""FLOP of FlashAttention's backward pass for one of its forward pass: it has five products instead
of two, as it computes the scores again. Source: Dao 2023, arXiv 2307.08691, section 4.1."""

_LOSS_WRITTEN: dict[Loss, Bytes] = {"fused": 1.0, "eager": 4.0}
"""What a forward pass writes and reads for a logit in a 2-byte type; a backward pass twice as much.

fused: the logits are read, then read again and overwritten by their gradient (flash-attn 2,
`flash_attn/ops/triton/cross_entropy.py`). eager: in fp32, as the calibrated runs have it.
"""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What one GPU does for one block and one micro-batch."""

    block: Block
    forward: Compute
    backward: Compute


@dataclass(frozen=True)
class Workload(Mesh, Framework):
    """A model with its batch and precision, how GPUs divide it, and what the framework does."""

    model: Model
    micro_batch: int = 1
    """Samples per GPU and micro-step."""

    accumulation: int = 1
    """Micro-steps per optimizer step."""

    precision: DType = DType.BF16
    """Of weights, activations and results."""

    recompute: Recompute = "none"
    optimizer: Optimizer = ADAMW
    narrow: Narrow | None = None
    """The type that operands of the layers' products with weights are cast to, if any."""

    cast_steps: int = 1
    """The micro-steps for which weights stay cast: those of a step."""

    offload: Offload = "none"
    """What is in the host's memory."""

    divided_already: bool = False
    """Whether this is the share of one GPU."""

    lora: int | None = None
    """The rank of the layers' adapters, if any: only these are trained (`adapters`)."""

    bare: Model | None = field(default=None, compare=False, repr=False)
    """The model without adapters."""

    def __post_init__(self) -> None:
        """Refuse batches that are not positive, and a recomputation that there is not.

        Gives the model adapters.
        """
        object.__setattr__(self, "recompute", str(recomputation(self.recompute)))
        super().__post_init__()
        for name in ("micro_batch", "accumulation"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, MAX_SAMPLES))
        self.check()
        if self.offload != "none" and self.optimizer.needs_whole:
            raise OptionError(
                f"offload={self.offload} does not combine with optimizer={self.optimizer.name}: the"
                " speed of its matrix products on a host is not known"
            )
        if self.lora is None:
            return
        object.__setattr__(self, "lora", whole("lora", self.lora, 1, MAX_RANK))
        if self.narrow:
            raise OptionError(
                f"lora={self.lora} does not combine with precision={self.narrow}: frozen weights"
                " are in bf16, fp16 or fp32"
            )
        if self.bare is None:
            object.__setattr__(self, "bare", self.model)
            object.__setattr__(self, "model", with_adapters(self.model, self.lora))

    @property
    def parameters(self) -> int:
        """Parameters of the model, adapters included."""
        return self.model.parameters

    @property
    def trained(self) -> int:
        """Those that have gradients and optimizer states: all, or adapters."""
        return self.model.trained_parameters

    @cached_property
    def expert_parameters(self) -> int:
        """Those of the experts that a GPU has, where several divide them: of a `share`."""
        return sum(sum(block.experts) for block in self.model.blocks)

    @cached_property
    def trained_experts(self) -> int:
        """Those of `expert_parameters` that are trained."""
        return sum(sum(block.trained_experts) for block in self.model.blocks)

    def owned(self, shards: int) -> float:
        """Parameters that a GPU owns of its share, where `shards` data-parallel ones divide it.

        Experts are divided among those GPUs only that have the same ones.
        """
        return self._divided(self.parameters, self.expert_parameters, shards)

    def owned_trained(self, shards: int) -> float:
        """Those of `owned` that are trained."""
        return self._divided(self.trained, self.trained_experts, shards)

    def _divided(self, parameters: float, experts: float, shards: int) -> float:
        if shards == 1:
            return parameters
        return (parameters - experts) / shards + experts / self.expert_replicas(shards)

    @property
    def samples_per_gpu(self) -> int:
        """Samples that one GPU sees in an optimizer step: of tensor-parallel ones all the same."""
        return self.micro_batch * self.accumulation

    @cached_property
    def share(self) -> "Workload":
        """What one GPU does of it: its part of every block, and the exchanges between them.

        Raises OptionError for a model that cannot be divided so.
        """
        if self.divided_already or self.is_plain:
            return self
        bare = self.bare or self.model
        part = shard_model(bare, self)
        if self.lora is not None:
            part = with_adapters(part, self.lora, bare)
        return replace(self, model=part, divided_already=True)

    def works(self) -> tuple[BlockWork, ...]:
        """Forward and backward work of every block; equal blocks share their works.

        Memory traffic is the least that the pass can do: the weights once, and every activation
        that is kept written once and read once; a backward pass moves twice as much.
        """
        return self._works

    @cached_property
    def _works(self) -> tuple[BlockWork, ...]:
        shared: dict[tuple[int, bool], tuple[Compute, Compute]] = {}
        works = []
        for kind, block in zip(kinds(self.model), self.model.blocks, strict=True):
            key = kind, self.repeats(block)
            if key not in shared:
                shared[key] = self._passes(block)
            works.append(BlockWork(block, *shared[key]))
        return tuple(works)

    @cached_property
    def again(self) -> Recomputation:
        """What `recompute` says."""
        return recomputation(self.recompute)

    @cached_property
    def _every(self) -> frozenset[str]:
        """The names of the layers that full recomputation of a part makes again."""
        every = self.again.every
        return frozenset(block.name for block in layers(self.model.blocks)[every - 1 :: every])

    def repeats(self, block: Block) -> bool:
        """Whether a backward pass begins with the block's forward pass."""
        if self.again.kind != "full" or (block.adapters and block.adapters.first):
            return False
        if self.again.every > 1:
            return block.name in self._every
        return self.checkpointing == "reentrant" or bool(block.boundary_bytes and not block.logits)

    def repeats_attention(self, block: Block) -> bool:
        """Whether a backward pass computes softmax attention again, from its operands."""
        if block.scores is None:
            return False
        eager = self.again.kind == "selective" and self.attention == "eager"
        return self.again.of("attention") or (eager and self.selective == "scores")

    def repeats_mlp(self, block: Block) -> bool:
        """Whether a backward pass computes the block's MLP, or experts, again."""
        return self.again.of("mlp") and block.operators is not None

    def repeats_products(self, block: Block) -> bool:
        """Whether a backward pass begins with all but attention and every second product."""
        wanted = self.again.kind == "selective" and self.selective == "products"
        return wanted and bool(block.boundary_bytes and block.products and not block.logits)

    def fuses(self, block: Block) -> bool:
        """Whether the block's attention is one kernel."""
        return self.attention == "flash" and block.scores is not None

    def _passes(self, block: Block) -> tuple[Compute, Compute]:
        """A backward pass moves twice as much as a forward one, but frozen weights once."""
        flops = block.flops * self.micro_batch
        spared = block.adapters.spared * self.micro_batch if block.adapters else 0.0
        frozen = (block.parameters - block.trained) * self.precision.bytes if flops else 0.0
        repeated = self._repeated_flops(block) * self.micro_batch
        weights = (
            block.parameters * self.precision.bytes if flops else 0.0
        )  # a look-up reads only rows
        traffic = weights + 2 * self._written(block) * self.precision.bytes / 2 * self.micro_batch
        forward = Compute(
            "forward",
            flops,
            traffic,
            self._kernels(block, 1),
            exchanges=self._exchanges(block, "forward"),
        )
        if block.adapters and block.adapters.first:
            return forward, Compute("backward", 0.0, kernels=Kernels((), 0, 0.0))
        return forward, Compute(
            "backward",
            2 * flops - spared + repeated,
            2 * traffic - frozen,
            self._kernels(block, 2, again=self.repeats(block)),
            exchanges=self._exchanges(block, *self._again(block), "backward"),
        )

    def _again(self, block: Block) -> list[Pass]:
        """What a backward pass begins with, in turn."""
        needed: dict[Pass, bool] = {
            "recompute": self.repeats(block),
            "products": self.repeats_products(block),
            "mlp": self.repeats_mlp(block),
            "attention": self.repeats_attention(block),
        }
        return [name for name, holds in needed.items() if holds]

    @property
    def repeats_some(self) -> bool:
        """Whether selective recomputation is other than none."""
        return any(self.repeats_products(b) or self.repeats_attention(b) for b in self.model.blocks)

    def _repeated_flops(self, block: Block) -> Flops:
        """Of a sample: those that a backward pass computes again, as published figures count."""
        if self.again.kind == "full":
            return block.flops if self.again.every == 1 or self.repeats(block) else 0.0
        mixing = block.scores.flops if block.scores else 0.0
        if self.repeats_products(block):
            return _SECOND * (block.flops - mixing)
        repeated = mixing if self.repeats_attention(block) else 0.0
        if block.operators and self.repeats_mlp(block):
            repeated += product_flops(block.products[-block.operators.products :])
            repeated += product_flops(block.adapters.of_mlp) if block.adapters else 0.0
        return repeated

    def _written(self, block: Block) -> Bytes:
        """What a forward pass writes and reads but for scores, in a 2-byte type, of one sample."""
        kept = block.activation_bytes + block.passing_bytes
        return kept + _LOSS_WRITTEN[self.loss] * block.logits

    def _kernels(self, block: Block, passes: int, *, again: bool = False) -> Kernels | None:
        """What a forward (1), a backward (2) or no pass (0) launches, and a repeated one before it.

        Elementwise kernels write every activation that is kept, attention scores included, and
        read it again. Autograd runs one node for every operation of the forward pass, so a
        backward pass issues as many as a forward pass, each twice as much work.
        """
        if not block.calls:
            return None
        often = passes + again
        mixing = passes > 1 and self.repeats_attention(block)
        second = passes > 1 and self.repeats_products(block)
        moved, calls = self._operators(block) if passes > 1 else (0.0, 0)
        times = self._times(block, passes, again=again)
        fused = block.scores if self.fuses(block) else None
        kept = (often + second) * self._written(block) + moved
        if block.scores and not fused:
            kept += (often + mixing) * block.scores.bytes
        width = self.precision.bytes
        products = [
            self._product(block, matmul).times(count)
            for matmul, count in zip(block.products, times, strict=True)
            if count and not (fused and matmul.count)
        ]
        around = 0.0
        if block.adapters:
            more, around = self._of_adapters(block, passes, again + _SECOND * second)
            products += more
        return Kernels(
            tuple(products),
            (bool(passes) + again + second) * block.calls + calls,
            kept * width * self.micro_batch,
            bool(block.logits),
            self._fused(fused, passes, again + mixing) if fused else None,
            self._cast(block, passes, again or second),
            around,
        )

    def _of_adapters(self, block: Block, passes: int, again: float) -> tuple[list[Gemm], Bytes]:
        """Their products, and the traffic of kernels around these, as in `_kernels`.

        The last product of a layer is that of an adapter: one that stops early does not repeat it.
        """
        adapters, width = block.adapters, self.precision.bytes
        assert adapters
        in_mlp = adapters.mlp if passes == _BOTH and self.repeats_mlp(block) else 0
        repeats = [again] * (len(adapters.pairs) - in_mlp) + [again + 1] * in_mlp
        times = [passes + repeated for repeated in repeats for _ in range(2)]
        stops = self.repeats(block) or in_mlp
        if stops and self.checkpointing == "non_reentrant":
            times[-1:] = [float(passes)] * len(times[-1:])
        outputs, inputs = BACKWARD_MOVES if passes == _BOTH else (0, 0)
        moved = sum(
            down.rows
            * (
                (((passes == 1) + math.ceil(repeated)) * FORWARD_MOVES + outputs) * up.columns
                + inputs * down.inner
            )
            for (down, up), repeated in zip(adapters.pairs, repeats, strict=True)
        )
        products = [product for pair in adapters.pairs for product in pair]
        made = [
            product.product(self.micro_batch, width).times(count)
            for product, count in zip(products, times, strict=True)
            if count
        ]
        return made, moved * self.micro_batch * width

    def _times(self, block: Block, passes: int, *, again: bool) -> list[float]:
        """How often a pass computes each product of a block."""
        back = passes > 1
        frozen = passes - 1 if block.adapters and passes else 0  # no gradients of weights
        if back and self.repeats_products(block):
            return [passes if m.count else passes - frozen + _SECOND for m in block.products]
        often = passes + again
        scores = often + (back and self.repeats_attention(block))
        times: list[float] = [
            scores if matmul.count else often - frozen for matmul in block.products
        ]
        if block.operators and back and self.repeats_mlp(block):
            count = block.operators.products
            times[-count:] = [often - frozen + 1] * count
        adapted = block.adapters and block.adapters.pairs  # then its last adapter comes later
        if self.checkpointing == "non_reentrant" and not adapted:
            times[-1:] = [passes - frozen] * len(times[-1:])
        return times

    def _operators(self, block: Block) -> tuple[float, int]:
        """What operators that are made again write and read, as `_written` counts, and calls.

        What attention writes are its scores, and it is no further operation to speak of.
        """
        operators, again = block.operators, self.again
        if operators is None or not again.operators:
            return 0.0, 0
        moved, calls = 0.0, 0
        if again.of("norms"):
            moved, calls = operators.norms, operators.norm_calls
        if again.of("mlp"):
            return moved + operators.mlp + block.passing_bytes, calls + operators.mlp_calls
        if again.of("activation"):
            return moved + operators.activation_moved, calls + 1
        return moved, calls

    def _casts(self, block: Block, matmul: MatMul) -> bool:
        """Whether the operands of a product are of a narrow type: those of weights in layers."""
        return bool(self.narrow) and not (matmul.count or matmul.exact or block.logits)

    def _product(self, block: Block, matmul: MatMul) -> Gemm:
        made = matmul.product(self.micro_batch, self.precision.bytes)
        if self.narrow is None or not self._casts(block, matmul):
            return made
        kind = NARROW[self.narrow]
        return replace(made, width=kind.bytes, narrow=kind.peak, result=self.precision.bytes)

    def _cast(self, block: Block, passes: int, again: bool) -> Bytes:  # noqa: FBT001
        """Traffic of casts: inputs and weights in a forward pass, gradients in a backward one."""
        if self.narrow is None:
            return 0.0
        kind, elements = NARROW[self.narrow], 0.0
        mlp = block.operators.products if block.operators and self.repeats_mlp(block) else 0
        for index, product in enumerate(block.products):
            repeated = again or (passes == _BOTH and index >= len(block.products) - mlp)
            if self._casts(block, product):
                made = product.product(self.micro_batch, 1.0)
                rows = made.rows * made.batch
                weights = made.batch * made.inner * made.columns / self.cast_steps
                elements += ((passes == 1) + repeated) * rows * made.inner
                elements += weights if passes == 1 else 0.0
                elements += rows * made.columns if passes == _BOTH else 0
        return elements * (kind.reads * self.precision.bytes + _LAYOUTS * kind.bytes)

    @property
    def peak(self) -> str:
        """The peak, in files of GPUs, of most of its products."""
        return NARROW[self.narrow].peak if self.narrow else str(self.precision)

    def _fused(self, scores: AttentionScores, passes: int, again: int) -> FusedAttention:
        """Attention as one kernel: it reads queries, keys and values, and writes its output.

        A backward pass reads the gradient of its output, too, and writes three: twice as much.
        """
        flops = scores.flops * self.micro_batch * (0.5 if scores.causal else 1.0)
        moved = scores.moved * self.micro_batch * self.precision.bytes
        back = passes > 1
        return FusedAttention(
            flops * (again + (not back) * passes),
            moved * (passes + again),
            scores.seen,
            flops * FLASH_BACKWARD * back,
        )

    def recomputed(self, work: BlockWork) -> tuple[Compute, Compute]:
        """A backward pass with full recomputation in two: the forward pass again, then the rest."""
        forward, whole = work.forward, work.backward
        return (
            replace(
                forward,
                kernel="recompute",
                kernels=self._kernels(work.block, 0, again=True),
                exchanges=self._exchanges(work.block, "recompute"),
            ),
            Compute(
                "backward",
                whole.flops - forward.flops,
                whole.memory_bytes,
                self._kernels(work.block, 2),
                exchanges=self._exchanges(work.block, "backward"),
            ),
        )

    def _exchanges(self, block: Block, *passes: Pass) -> TensorParallelCollectives | None:
        early = self.checkpointing == "non_reentrant"
        exchanges = tensor_parallel_collectives(
            block.division,
            passes,
            self.micro_batch,
            self.precision,
            early,
            self.overlap_tensor,
            self.keep_gathered,
        )
        if block.context:
            along = self._along(block.context, passes)
            exchanges = (exchanges or TensorParallelCollectives()).then(along)
        if block.adapters and block.adapters.summed and "backward" in passes:
            group, elements = tensor(self.tp), block.adapters.summed
            sums = Collective(Kind.ALL_REDUCE, "adapters", elements, self.precision, group)
            exchanges = (exchanges or TensorParallelCollectives()).then(
                TensorParallelCollectives(behind=(sums,))
            )
        if block.routing is None:
            return exchanges
        tokens = self._to_experts(block.routing, passes, early)
        return (exchanges or TensorParallelCollectives()).then(tokens)

    def _along(self, context: ContextExchange, passes: Sequence[Pass]) -> TensorParallelCollectives:
        """Keys and values to all ranks of a sequence, and the sums of their gradients back.

        A ring sends the same beside the scores. All-to-alls give each rank some heads of all
        tokens instead, before attention and behind it.
        """
        group = Group("context", context.ranks, self.tp)
        keys, queries = (self.micro_batch * n for n in (context.keys, context.queries))

        def make(kind: Kind, elements: int) -> Collective:
            return Collective(kind, "context", elements, self.precision, group)

        made: list[Collective] = []
        for direction in passes:
            if direction in {"products", "mlp"}:  # what attention gave is kept
                continue
            if self.context == "all_to_all":
                elements = keys // context.ranks + queries
                made += [make(Kind.ALL_TO_ALL, elements), make(Kind.ALL_TO_ALL, queries)]
                continue
            made.append(make(Kind.ALL_GATHER, keys))
            if direction == "backward":
                made.append(make(Kind.REDUCE_SCATTER, keys))
        if self.context == "ring":
            return TensorParallelCollectives(beside=tuple(made))
        return TensorParallelCollectives(behind=tuple(made))

    def _to_experts(
        self,
        routing: Routing,
        passes: Sequence[Pass],
        stops_early: bool,  # noqa: FBT001
    ) -> TensorParallelCollectives:
        """Tokens to experts and back: twice in a pass, and in one that is run again.

        One that `stops_early` needs no result of the last product. What a pass repeats by products,
        or of attention, finds the exchanged tokens: all-to-alls are kept.
        """
        repeated = 1 if stops_early else 2
        times = {"forward": 2, "backward": 2, "recompute": repeated, "mlp": repeated}
        elements = self.micro_batch * routing.elements
        by_node = self.experts_all_to_all == "hierarchical"
        there = replace(routing.tokens, by_node=by_node)

        def make(routed: TokenRouting) -> Collective:
            return Collective(
                Kind.ALL_TO_ALL,
                "tokens",
                elements,
                self.precision,
                experts(routing.ranks),
                routed=None if routed.even else routed,
            )

        both = make(there), make(replace(there, back=True))
        made = tuple(exchange for name in passes for exchange in both[: times.get(name, 0)])
        if self.overlap_experts:
            return TensorParallelCollectives(beside=made)
        return TensorParallelCollectives(behind=made)

    @property
    def hardware_flops_per_sample(self) -> Flops:
        """FLOP of a training step on one sample as published figures count them.

        Full recomputation counts as a whole forward pass (8 per parameter and token), even where
        `checkpointing` leaves some of it out; what flash attention repeats is not counted.
        """
        works = self.works()
        return sum(work.forward.flops + work.backward.flops for work in works) / self.micro_batch

    @cached_property
    def tensors(self) -> tuple[Tensors, Tensors]:
        """What is trained: of all ranks, and of experts that ranks divide.

        Raises OptionError for an optimizer that needs matrices, where none is known.
        """
        if not self.optimizer.needs_shapes:
            return Tensors(others=self.trained - self.trained_experts), Tensors(
                others=self.trained_experts
            )
        found = trained_tensors(self.model)
        if self.trained and not any(tensors.matrices for tensors in found):
            raise OptionError(
                f"optimizer={self.optimizer.name} does not apply to {self.model.name}: nothing is"
                " known of its matrices"
            )
        return found

    @property
    def master_bytes(self) -> Bytes:
        """Of a parameter as the optimizer changes it: its master copy, or itself."""
        return self.precision.bytes if self.optimizer.master == "none" else FP32

    def moments(self, shards: int) -> Bytes:
        """Optimizer states but for master copies that a GPU owns, where `shards` divide them."""
        dense, experts = (self.optimizer.states(tensors) for tensors in self.tensors)
        return self._divided(dense + experts, experts, shards)

    def optimizer_states(self, shards: int) -> Bytes:
        """The same with master copies, which parameters in fp32 are themselves."""
        copies = self.master_bytes if self.master_bytes > self.precision.bytes else 0.0
        return self.moments(shards) + self.owned_trained(shards) * copies

    @property
    def gradient_bytes(self) -> Bytes:
        """Gradients per parameter, where all ranks or their owners hold them between passes.

        Source: Megatron-LM, docs/user-guide/features/dist_optimizer.md: 4 in bf16, 2 in fp16.
        """
        summed = self.main_gradients and self.precision is DType.BF16
        return DType.FP32.bytes if summed else self.precision.bytes

    def optimizer_step(self, elements: int) -> Compute:
        """The optimizer over `elements` parameters: memory-bound, but for products of matrices.

        Of those it has that share, as if ranks that divide parameters had whole matrices.
        """
        work = self.optimizer_elements(elements)
        if not self.optimizer.needs_whole:
            return work
        matrices = [matrix for tensors in self.tensors for matrix in tensors.matrices]
        products = self.optimizer_products(matrices, elements / max(1, self.trained))
        sums = work.flops + products.flops, work.memory_bytes + products.memory_bytes
        return Compute("optimizer", *sums, parts=(work, products))

    def optimizer_elements(self, elements: int) -> Compute:
        """What the optimizer does element by element for `elements` parameters."""
        parts, made = self.tensors, self.optimizer
        share = elements / max(1, sum(tensors.elements for tensors in parts))
        moved = sum(made.moved(tensors, self.precision.bytes) for tensors in parts)
        flops = sum(made.flops(tensors) for tensors in parts)
        return Compute("optimizer", flops * share, moved * share)

    def optimizer_products(self, matrices: Sequence[Matrix], share: float = 1.0) -> Compute:
        """The products of a step over whole matrices, or a share of them."""
        products = tuple(
            product.times(share)
            for matrix in matrices
            for product in self.optimizer.products(matrix, self.precision)
        )
        return Compute(
            "orthogonalize" if self.optimizer.newton_schulz else "precondition",
            sum(product.flops for product in products),
            sum(product.bytes for product in products),
            Kernels(products, sum(product.count for product in products), 0.0),
        )
