"""A model and how it is trained: parameters, FLOP and bytes of every block.

FLOP count a multiply-add as two. The model FLOP of a token follow PaLM (Chowdhery et al. 2022,
appendix B): 6 for every parameter that multiplies, plus 12 x layers x heads x head_dim x seq_len
for softmax attention, without a discount for causal masks. Norms, biases and activations are left
out. A backward pass is twice a forward pass; `recompute` adds to the hardware FLOP only, as
published figures count them: scores of attention, products of an MLP, or a whole forward pass.
What kernels execute is another matter: `Kernels` of a pass say it, and times follow from them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Literal, NamedTuple, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Flops
from co2sim.common.validation import whole
from co2sim.models.adapters import summed, with_adapters
from co2sim.models.framework import (
    Framework,
    Recomputation,
    Recompute,
    Rerun,
    layers,
    recomputation,
)
from co2sim.models.operators import (
    NARROW,
    AnyOperator,
    Attention,
    Block,
    CrossEntropy,
    ExpertExchange,
    Model,
    Product,
    TensorExchange,
    backward_flops,
    kinds,
    shard_model,
)
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

Pass: TypeAlias = Literal["forward", "recompute", "backward"]
"""recompute: what runs again of a forward pass."""

_LOSS_SUMS = 3
"""All-reduces of a value for every row of logits: their largest, the target's, the sum of their
exponentials. Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py."""

Offload = Literal["none", "optimizer", "parameters"]
"""optimizer: its states are in the host's memory, and the host's processors update them (Ren et al.
2021, ZeRO-Offload, arXiv 2101.06840). parameters: these and gradients, too; a block's share comes
over the link before it is gathered (ZeRO-Infinity, arXiv 2104.07857; torch's CPUOffloadPolicy)."""

Narrow = Literal["fp8", "mxfp8", "nvfp4"]
"""Types of matrix products below 16 bits. fp8: one scale for a tensor, from its own maximum. mxfp8:
one for 32 numbers. nvfp4: one in fp8 for 16 numbers, and one for the tensor. Sources: NVIDIA
Transformer Engine 2.0, docs/examples/fp8_primer; Open Compute Project, Microscaling Formats 1.0."""


_LAYOUTS = 2
"""Of a cast operand: rows for one product, and columns for another. Source: Transformer Engine,
cast_transpose; Hopper multiplies fp8 of one layout only."""

MAX_SAMPLES = 10_000
"""Of a micro-batch, and micro-steps of a step: the schedule holds every micro-step."""

MAX_RANK = 65_536
"""Of adapters: wider than the layers of any model."""


class _Traced(NamedTuple):
    moved: float
    calls: float


_TRACED = {False: _Traced(2.26, 74 / 26), True: _Traced(0.63, 13 / 26)}
"""What kernels of a traced layer move, and their calls, for those of the formula of the same layer.

Stacks' `elementwise` and `call_overhead` were fitted with the formulas, in which every activation
that is kept is written and read once, and backward twice. A layer of Llama 3 8B as transformers
5.23 has it moves 15.49 GB a sample of 8,192 tokens, and 4.30 where chains are fused (True: a stack
that compiles); the formula 6.85 GB. Source: tests/co2sim/models/test_traced.py.
"""

_BOTH = 2
"""Products of a backward pass for one of a forward pass."""


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
        return replace(self, model=shard_model(self.model, self), divided_already=True)

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
        for block, executed, kind in self.executed:
            if kind not in shared:
                shared[kind] = self._passes(executed, trains=kind[0] >= self.model.first_trained)
            works.append(BlockWork(block, *shared[kind]))
        return tuple(works)

    @cached_property
    def executed(self) -> tuple[tuple[Block, Block, tuple[int, bool]], ...]:
        """Every block, its operators as they are executed, and which of them are alike."""
        made: dict[tuple[int, bool], Block] = {}
        rows = []
        for kind, block in zip(kinds(self.model), self.model.blocks, strict=True):
            alike = kind, self.repeats(block)
            if alike not in made:
                made[alike] = self.rerun.marked(self._as_framework_does(block))
            rows.append((block, made[alike], alike))
        return tuple(rows)

    def _as_framework_does(self, block: Block) -> Block:
        """Its operators with the kernels and the types that they run with."""
        narrow = NARROW[self.narrow] if self.narrow and not block.logits else None

        def changed(op: AnyOperator) -> AnyOperator:
            if op.unfused:
                keeps = (*self.keeps, *(["casts"] if self.autocast else []))
                more = sum(size for what, size in op.unfused if what in keeps)
                moved = 2 * (op.kept + op.passing) if op.moved is None else op.moved
                kept = tuple(pair for pair in op.unfused if pair[0] in keeps)
                op = replace(op, moved=moved, kept=op.kept + more, unfused=kept)
            if self.compiled and op.compiled:
                made = op.compiled
                op = replace(op, exact=made.exact, kept=made.kept, calls=made.calls)
            match op:
                case Product(wide=False) if narrow:
                    return replace(op, narrow=narrow, cast_steps=self.cast_steps)
                case Attention(softmax=True):
                    return replace(op, fused=self.attention == "flash")
                case CrossEntropy():
                    return replace(op, eager=self.loss == "eager")
            return op

        return replace(block, operators=tuple(map(changed, block.operators)))

    @cached_property
    def again(self) -> Recomputation:
        """What `recompute` says."""
        return recomputation(self.recompute)

    @cached_property
    def rerun(self) -> Rerun:
        """How blocks run again."""
        every = self.again.every
        names = frozenset(block.name for block in layers(self.model.blocks)[every - 1 :: every])
        stops = self.checkpointing == "non_reentrant"
        return Rerun(self.again, names, stops, self.selective == "products")

    def repeats(self, block: Block) -> bool:
        """Whether a backward pass begins with the block's forward pass."""
        return self.rerun.whole(block) and block.name not in self._untrained

    @cached_property
    def _untrained(self) -> frozenset[str]:
        """The names of the blocks that no gradient reaches."""
        return frozenset(block.name for block in self.model.blocks[: self.model.first_trained])

    @property
    def repeats_some(self) -> bool:
        """Whether selective recomputation is other than none."""
        return any(
            self.rerun.every_second(block) or any(map(self.rerun.of, block.of(Attention)))
            for _, block, _ in self.executed
        )

    def _passes(self, block: Block, *, trains: bool) -> tuple[Compute, Compute]:
        """A backward pass moves twice as much as a forward one, but frozen weights once."""
        flops, width = block.flops * self.micro_batch, self.precision.bytes
        frozen = (block.parameters - block.trained) * width if flops else 0.0
        weights = block.parameters * width if flops else 0.0  # a look-up reads only rows
        traffic = weights + self._written(block) * width * self.micro_batch
        forward = Compute(
            "forward",
            flops,
            traffic,
            self._kernels(block, 1),
            exchanges=self._exchanges(block, "forward"),
        )
        if not trains:
            return forward, Compute("backward", 0.0, kernels=Kernels((), 0, 0.0))
        repeated = sum(op.flops * op.again.flops for op in block.operators)
        runs = any(op.again.kernels for op in _working(block))
        again: tuple[Pass, ...] = ("recompute",) if runs else ()
        return forward, Compute(
            "backward",
            (backward_flops(block) + repeated) * self.micro_batch,
            2 * traffic - frozen,
            self._kernels(block, 2, again=True),
            exchanges=self._exchanges(block, *again, "backward"),
        )

    def _written(self, block: Block) -> float:
        """Elements of a sample that a forward pass moves beside products, but for scores."""
        scores = sum(2 * op.scores for op in block.of(Attention) if not op.fused)
        traced = sum(op.rows * op.exact[0] for op in block.operators if op.compiled)
        return sum(op.rows * op.traffic for op in block.operators) - scores + traced

    def _kernels(self, block: Block, passes: int, *, again: bool = False) -> Kernels | None:
        """What a forward (1), a backward (2) or no pass (0) launches, and what runs `again` before.

        Autograd runs one node for every operation of the forward pass, so a backward pass issues as
        many as a forward pass, each twice as much work.
        """
        if not any(op.calls for op in block.operators):
            return None
        width, samples = self.precision.bytes, self.micro_batch
        products: list[Gemm] = []
        fused: list[FusedAttention] = []
        moved = exact = casts = 0.0
        calls = 0
        for op in block.operators:
            repeated = op.again.kernels if again else 0.0
            runs = again and math.ceil(op.again.flops)
            moved += op.rows * (passes * op.traffic + (op.again.moved if again else 0.0))
            calls += bool(passes) * op.calls + (op.again.calls if again else 0)
            if isinstance(op, Product):
                back = passes == _BOTH
                often = passes - (op.frozen and back) + (op.remade and back) + repeated
                if often:
                    products.append(op.gemm(samples, width).times(often))
                casts += self._cast(op, passes, runs=runs)
            elif isinstance(op, Attention) and op.fused:
                fused.append(op.kernel(samples, width, passes, repeated))
            elif isinstance(op, Attention):
                often = passes + repeated
                products += [gemm.times(often) for gemm in op.gemms(samples, width) if often]
            forward, backward = op.exact
            more = op.rows * (((passes == 1) + runs) * forward + (passes == _BOTH) * backward)
            if op.compiled:
                moved += more / _TRACED[self.compiled].moved
            else:
                exact += more
        traced = any(op.compiled for op in block.operators)
        return Kernels(
            tuple(products),
            calls / _TRACED[self.compiled].calls if traced else calls,
            moved * width * samples,
            bool(block.logits),
            reduce(FusedAttention.then, fused) if fused else None,
            casts,
            exact * width * samples,
        )

    def _cast(self, op: Product, passes: int, *, runs: int) -> Bytes:
        """Traffic of casts: inputs and weights in a forward pass, gradients in a backward one."""
        kind = op.narrow
        if kind is None:
            return 0.0
        made = op.gemm(self.micro_batch, 1.0)
        rows = made.rows * made.batch
        elements = float(((passes == 1) + runs) * rows * made.inner)
        if passes == 1:
            elements += made.batch * made.inner * made.columns / op.cast_steps
        elif passes == _BOTH:
            elements += rows * made.columns
        return elements * (kind.reads * self.precision.bytes + _LAYOUTS * kind.bytes)

    @property
    def peak(self) -> str:
        """The peak, in files of GPUs, of most of its products."""
        return NARROW[self.narrow].peak if self.narrow else str(self.precision)

    def recomputed(self, work: BlockWork) -> tuple[Compute, Compute]:
        """A backward pass with full recomputation in two: the forward pass again, then the rest."""
        forward, whole = work.forward, work.backward
        block = next(made for block, made, _ in self.executed if block is work.block)
        return (
            replace(
                forward,
                kernel="recompute",
                kernels=self._kernels(block, 0, again=True),
                exchanges=self._exchanges(block, "recompute"),
            ),
            Compute(
                "backward",
                whole.flops - forward.flops,
                whole.memory_bytes,
                self._kernels(block, 2),
                exchanges=self._exchanges(block, "backward"),
            ),
        )

    def _exchanges(self, block: Block, *passes: Pass) -> TensorParallelCollectives | None:
        """What tensor-, context- and expert-parallel ranks exchange in passes, one after another.

        All of one kind come before the next kind.
        """
        kinds_made: list[TensorParallelCollectives] = []
        of_tensors = any(op.ranks > 1 for op in block.of(TensorExchange))
        if of_tensors:
            made = [self._of_tensors(block, direction) for direction in passes]
            kinds_made.append(reduce(TensorParallelCollectives.then, made))
        kinds_made += [self._along(op, passes) for op in block.of(Attention) if op.ranks > 1]
        if self.tp > 1 and "backward" in passes and (elements := summed(block)):
            group = tensor(self.tp)
            sums = Collective(Kind.ALL_REDUCE, "adapters", elements, self.precision, group)
            kinds_made.append(TensorParallelCollectives(behind=(sums,)))
        if any(op.ranks > 1 for op in block.of(ExpertExchange)):
            kinds_made.append(self._to_experts(block, passes))
        if not kinds_made:
            return None
        first = kinds_made if of_tensors else [TensorParallelCollectives(), *kinds_made]
        return reduce(TensorParallelCollectives.then, first)

    def _of_tensors(self, block: Block, which: Pass) -> TensorParallelCollectives:
        """Of one pass: inputs gathered and outputs summed; a backward pass the other way round.

        With `overlap_tensor` products work on parts of their operands while others are exchanged.
        With `keep_gathered` a backward pass finds the operands of products as they were gathered.
        """
        wanted = [op for op in block.of(TensorExchange) if which != "recompute" or op.again.kernels]
        inputs, outputs = ([op for op in wanted if op.side == side] for side in ("input", "output"))
        if which == "backward":
            inputs, outputs = outputs, inputs
        loss = () if which == "backward" else self._of_loss(block, again=which == "recompute")
        if not any(op.sequence for op in block.of(TensorExchange)):
            made = TensorParallelCollectives(behind=self._all(Kind.ALL_REDUCE, outputs))
        else:
            gathered = self._all(Kind.ALL_GATHER, outputs) if which == "backward" else ()
            made = TensorParallelCollectives(
                self._all(Kind.ALL_GATHER, inputs),
                () if self.keep_gathered else gathered,
                self._all(Kind.REDUCE_SCATTER, outputs),
            )
        if self.overlap_tensor:
            beside = (*made.before, *made.beside, *made.behind)
            made = TensorParallelCollectives(beside=beside)
        return replace(made, behind=(*made.behind, *loss))

    def _all(self, kind: Kind, ops: Sequence[TensorExchange]) -> tuple[Collective, ...]:
        return tuple(
            Collective(
                kind,
                "activations",
                self.micro_batch * op.rows * op.width,
                self.precision,
                tensor(op.ranks),
            )
            for op in ops
        )

    def _of_loss(self, block: Block, *, again: bool) -> tuple[Collective, ...]:
        """The sums over a divided vocabulary."""
        rows = [
            op.rows
            for op in block.of(CrossEntropy)
            if op.ranks > 1 and (op.again.kernels or not again)
        ]
        return tuple(
            Collective(
                Kind.ALL_REDUCE, "loss", self.micro_batch * count, DType.FP32, tensor(self.tp)
            )
            for count in rows
            for _ in range(_LOSS_SUMS)
        )

    def _along(self, op: Attention, passes: Sequence[Pass]) -> TensorParallelCollectives:
        """Keys and values to all ranks of a sequence, and the sums of their gradients back.

        A ring sends the same beside the scores. All-to-alls give each rank some heads of all
        tokens instead, before attention and behind it.

        Sources: Liu et al. 2023, Ring Attention, arXiv 2310.01889; Jacobs et al. 2023, DeepSpeed
        Ulysses, arXiv 2309.14509; all-gathers: Llama 3, arXiv 2407.21783, section 3.3.2.
        """
        group = Group("context", op.ranks, self.tp)
        keys, queries = (self.micro_batch * n for n in op.exchanged)

        def make(kind: Kind, elements: int) -> Collective:
            return Collective(kind, "context", elements, self.precision, group)

        made: list[Collective] = []
        for direction in passes:
            if direction == "recompute" and not op.again.kernels:  # what it gave is kept
                continue
            if self.context == "all_to_all":
                elements = keys // op.ranks + queries
                made += [make(Kind.ALL_TO_ALL, elements), make(Kind.ALL_TO_ALL, queries)]
                continue
            made.append(make(Kind.ALL_GATHER, keys))
            if direction == "backward":
                made.append(make(Kind.REDUCE_SCATTER, keys))
        if self.context == "ring":
            return TensorParallelCollectives(beside=tuple(made))
        return TensorParallelCollectives(behind=tuple(made))

    def _to_experts(self, block: Block, passes: Sequence[Pass]) -> TensorParallelCollectives:
        """Tokens to experts and back, twice in a pass, and in one that runs again.

        What a pass repeats by products, or of attention, finds the exchanged tokens.
        """
        by_node = self.experts_all_to_all == "hierarchical"
        made: list[Collective] = []
        for direction in passes:
            for op in block.of(ExpertExchange):
                if direction == "recompute" and not op.again.kernels:
                    continue
                routed = replace(op.tokens, by_node=by_node, back=op.back)
                made.append(
                    Collective(
                        Kind.ALL_TO_ALL,
                        "tokens",
                        self.micro_batch * op.elements_sent,
                        self.precision,
                        experts(op.ranks),
                        routed=None if routed.even else routed,
                    )
                )
        if self.overlap_experts:
            return TensorParallelCollectives(beside=tuple(made))
        return TensorParallelCollectives(behind=tuple(made))

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
        shapes = trained_tensors(self.model)
        if self.trained and not any(tensors.matrices for tensors in shapes):
            raise OptionError(
                f"optimizer={self.optimizer.name} does not apply to {self.model.name}: nothing is"
                " known of its matrices"
            )
        return shapes

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


def _working(block: Block) -> Iterator[AnyOperator]:
    """The operators that compute or exchange something, beside those of single rows."""
    return (op for op in block.operators if isinstance(op, Product | Attention | TensorExchange))
