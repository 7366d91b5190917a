"""What one GPU computes and exchanges in passes over a block, whose operators are as executed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, NamedTuple, TypeAlias

from co2sim.common.units import Bytes
from co2sim.models.adapters import summed
from co2sim.models.operators import (
    NARROW,
    AnyOperator,
    Attention,
    Block,
    CrossEntropy,
    ExpertExchange,
    Product,
    TensorExchange,
    backward_flops,
)
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
from co2sim.training.framework import Framework

Pass: TypeAlias = Literal["forward", "recompute", "backward"]
"""recompute: what runs again of a forward pass."""

_LOSS_SUMS = 3
"""All-reduces of a value for every row of logits: their largest, the target's, the sum of their
exponentials. Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py."""

_LAYOUTS = 2
"""Of a cast operand: rows for one product, and columns for another. Source: Transformer Engine,
cast_transpose; Hopper multiplies fp8 of one layout only."""


class _Traced(NamedTuple):
    moved: float
    calls: float


_TRACED = {False: _Traced(2.26, 74 / 26), True: _Traced(0.63, 13 / 26)}
"""What kernels of a traced layer move, and their calls, for those of the formula of the same layer.

Stacks' `elementwise` and `call_overhead` were fitted with the formulas, in which every activation
that is kept is written and read once, and backward twice. A layer of Llama 3 8B as transformers
5.23 has it moves 15.49 GB a sample of 8,192 tokens, and 4.30 where chains are fused (True: a stack
that compiles); the formula 6.85 GB. Source: tests/co2sim/catalog/test_own_models.py.
"""


def _compiled(operators: tuple[AnyOperator, ...]) -> tuple[AnyOperator, ...]:
    """As a compiler makes them: with the scales of both, no slower than what eager code issues."""
    traced = [(op, op.compiled) for op in operators if op.compiled]

    eager, scaled = _TRACED[False], _TRACED[True]
    issued = sum(op.rows * sum(op.exact) for op, _ in traced) / eager.moved
    made = sum(op.rows * sum(compiled.exact) for op, compiled in traced) / scaled.moved
    moved = min(1.0, issued / made) if made else 1.0
    issued = sum(op.calls for op, _ in traced) / eager.calls
    made = sum(compiled.calls for _, compiled in traced) / scaled.calls
    calls = min(1.0, issued / made) if made else 1.0
    return tuple(
        op
        if op.compiled is None
        else replace(
            op,
            exact=(op.compiled.exact[0] * moved, op.compiled.exact[1] * moved),
            kept=op.compiled.kept,
            calls=op.compiled.calls * calls,
        )
        for op in operators
    )


_BOTH = 2
"""Products of a backward pass for one of a forward pass."""


@dataclass(frozen=True, kw_only=True)
class Passes(Framework):
    """Passes over blocks by a framework, on a micro-batch of a type, of `tp` ranks of a layer.

    `etp` of these share each of the experts that a rank has.
    """

    micro_batch: int
    precision: DType
    tp: int
    etp: int = 1

    def executed(self, block: Block, narrow: str | None, cast_steps: int) -> Block:
        """Its operators with the kernels and the types that they run with."""
        kind = NARROW[narrow] if narrow and not block.logits else None

        def changed(op: AnyOperator) -> AnyOperator:
            if op.unfused:
                keeps = (*self.keeps, *(["casts"] if self.autocast else []))
                more = sum(size for what, size in op.unfused if what in keeps)
                moved = 2 * (op.kept + op.passing) if op.moved is None else op.moved
                kept = tuple(pair for pair in op.unfused if pair[0] in keeps)
                op = replace(op, moved=moved, kept=op.kept + more, unfused=kept)
            match op:
                case Product(wide=False, adapter=False) if kind:
                    return replace(op, narrow=kind, cast_steps=cast_steps)
                case Attention(softmax=True):
                    return replace(op, fused=self.attention == "flash")
                case CrossEntropy():
                    return replace(op, eager=self.loss == "eager")
            return op

        operators = tuple(map(changed, block.operators))
        return replace(block, operators=_compiled(operators) if self.compiled else operators)

    def of(self, block: Block, *, trains: bool) -> tuple[Compute, Compute, Compute]:
        """Forward, backward, and what of the latter makes gradients of weights.

        A backward pass moves twice as much as a forward one, but frozen weights once.
        """
        flops, width = block.flops * self.micro_batch, self.precision.bytes
        made = 2.0 * sum(op.whole for op in block.of(Product) if op.packed)  # and read
        frozen = (block.parameters - block.trained + made) * width if flops else 0.0
        weights = (block.parameters + made) * width if flops else 0.0  # a look-up reads only rows
        traffic = weights + self._written(block) * width * self.micro_batch
        there = self.exchanges(block, "forward")
        forward = Compute("forward", flops, traffic, self.kernels(block, 1), exchanges=there)
        if not trains:
            nothing = Compute("backward", 0.0, kernels=Kernels((), 0, 0.0))
            return forward, nothing, nothing
        repeated = sum(op.flops * op.again.flops for op in block.operators)
        runs = any(op.again.kernels for op in _working(block))
        again: tuple[Pass, ...] = ("recompute",) if runs else ()
        backward = Compute(
            "backward",
            (backward_flops(block) + repeated) * self.micro_batch,
            2 * traffic - frozen,
            self.kernels(block, 2, again=True),
            exchanges=self.exchanges(block, *again, "backward"),
        )
        return forward, backward, self._of_weights(block)

    def _of_weights(self, block: Block) -> Compute:
        """One of the two products that a backward pass has for one with weights."""
        trained = [op for op in block.of(Product) if not (op.frozen or op.count)]
        products = tuple(op.gemm(self.micro_batch, self.precision.bytes) for op in trained)
        flops = sum(op.flops for op in trained) * self.micro_batch
        return Compute("weights", flops, kernels=Kernels(products, 0, 0.0, bool(block.logits)))

    def _written(self, block: Block) -> float:
        """Elements of a sample that a forward pass moves beside products, but for scores."""
        scores = sum(2 * op.scores for op in block.of(Attention) if not op.fused)
        traced = sum(op.rows * op.exact[0] for op in block.operators if op.compiled)
        return sum(op.rows * op.traffic for op in block.operators) - scores + traced

    def kernels(self, block: Block, passes: int, *, again: bool = False) -> Kernels | None:
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
        calls = 0.0
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
                if op.packed:  # read as they are stored, and written whole
                    casts += (bool(passes) + repeated) * (op.elements + op.whole) * width
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
        weights = made.batch * made.inner * made.columns / op.cast_steps * (passes == 1)
        others = float(((passes == 1) + runs) * rows * made.inner)
        if passes == _BOTH:
            others += rows * made.columns
        read = kind.reads * self.precision.bytes
        layouts = 1 if op.frozen else _LAYOUTS  # no gradient of a frozen weight needs the second
        return weights * (read + _LAYOUTS * kind.bytes) + others * (read + layouts * kind.bytes)

    def exchanges(self, block: Block, *passes: Pass) -> TensorParallelCollectives | None:
        """What tensor-, context- and expert-parallel ranks exchange in passes, one after another.

        All of one kind come before the next kind.
        """
        kinds_made: list[TensorParallelCollectives] = []
        of_tensors = any(op.ranks > 1 for op in block.of(TensorExchange))
        if of_tensors:
            made = [self._of_tensors(block, direction) for direction in passes]
            kinds_made.append(reduce(TensorParallelCollectives.then, made))
        kinds_made += [self._of_keys(op, passes) for op in block.of(Product) if op.gathered]
        kinds_made += [self._along(op, passes) for op in block.of(Attention) if op.ranks > 1]
        if "backward" in passes and (sums := tuple(self._of_copies(block))):
            kinds_made.append(TensorParallelCollectives(behind=sums))
        if any(op.ranks > 1 for op in block.of(ExpertExchange)):
            kinds_made.append(self._to_experts(block, passes))
        if not kinds_made:
            return None
        first = kinds_made if of_tensors else [TensorParallelCollectives(), *kinds_made]
        return reduce(TensorParallelCollectives.then, first)

    def _of_tensors(self, block: Block, which: Pass) -> TensorParallelCollectives:
        """Of one pass: inputs gathered and outputs summed; a backward pass the other way round.

        With `overlap_tensor` products work on parts of their operands while others are exchanged,
        where ranks divide the sequence between them (Megatron-LM, arguments.py, tp_comm_overlap).
        With `keep_gathered` a backward pass finds the operands of products as they were gathered.
        """
        wanted = [op for op in block.of(TensorExchange) if which != "recompute" or op.again.kernels]
        inputs, outputs = ([op for op in wanted if op.side == side] for side in ("input", "output"))
        if which == "backward":
            inputs, outputs = outputs, inputs
        loss = () if which == "backward" else self._of_loss(block, again=which == "recompute")
        divided = any(op.sequence for op in block.of(TensorExchange))
        if not divided:
            sums = self._all(Kind.ALL_REDUCE, [op for op in outputs if not op.gathers])
            parts = self._all(Kind.ALL_GATHER, [op for op in outputs if op.gathers])
            made = TensorParallelCollectives(behind=(*sums, *parts))
        else:
            gathered = self._all(Kind.ALL_GATHER, outputs) if which == "backward" else ()
            made = TensorParallelCollectives(
                self._all(Kind.ALL_GATHER, inputs),
                () if self.keep_gathered else gathered,
                self._all(Kind.REDUCE_SCATTER, outputs),
            )
        if self.overlap_tensor and divided:
            beside = (*made.before, *made.beside, *made.behind)
            made = TensorParallelCollectives(beside=beside)
        return replace(made, behind=(*made.behind, *loss))

    def _of_keys(self, op: Product, passes: Sequence[Pass]) -> TensorParallelCollectives:
        """Queries, keys and values that all ranks get, and the sums of their gradients back.

        Source: Megatron-LM, megatron/core/transformer/attention.py, get_query_key_value_tensors,
        where num_query_groups < world_size; mappings.py, _AllGatherFromTensorParallelRegion.
        """
        elements = self.micro_batch * op.rows * op.gathered
        kinds = {"backward": Kind.REDUCE_SCATTER}
        return TensorParallelCollectives(
            behind=tuple(
                Collective(
                    kinds.get(direction, Kind.ALL_GATHER),
                    "keys",
                    elements,
                    self.precision,
                    tensor(self.tp),
                )
                for direction in passes
                if direction != "recompute" or op.again.kernels
            )
        )

    def _of_copies(self, block: Block) -> Iterator[Collective]:
        """Sums of gradients of what several tensor-parallel ranks have: adapters, and keys.

        Ranks with a copy of a head of keys and values have different queries. Source of the copies:
        NxD Training, neuronx_distributed/modules/qkv_linear.py, `kv_size_multiplier`.
        """
        if self.tp > 1 and (elements := summed(block, self.etp)):
            yield Collective(Kind.ALL_REDUCE, "adapters", elements, self.precision, tensor(self.tp))
        elements = sum(op.summed for op in block.operators)
        if elements:
            times = max(op.copied for op in block.operators)
            yield Collective(Kind.ALL_REDUCE, "keys", elements, self.precision, tensor(times))

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

    def _of_joined(self, op: ExpertExchange) -> tuple[list[Collective], list[Collective]]:
        """What tensor-parallel ranks exchange of tokens before these are sent, and behind it."""
        kinds = {
            ("gathered", False): (None, Kind.ALL_GATHER),
            ("gathered", True): (Kind.REDUCE_SCATTER, None),
            ("summed", True): (Kind.ALL_REDUCE, None),
            ("dropped", True): (None, Kind.ALL_GATHER),
        }
        before, behind = (
            [
                Collective(
                    kind,
                    "tokens",
                    self.micro_batch * op.elements_joined,
                    self.precision,
                    tensor(self.tp),
                )
            ]
            if kind
            else []
            for kind in kinds.get((op.joined, op.back), (None, None))
        )
        return before, behind

    def _to_experts(self, block: Block, passes: Sequence[Pass]) -> TensorParallelCollectives:
        """Tokens to experts and back, twice in a pass, and in one that runs again.

        What a pass repeats by products, or of attention, finds the exchanged tokens. A backward
        pass exchanges gradients as a forward pass does tokens.
        """
        by_node = self.experts_all_to_all == "hierarchical"
        made: list[Collective] = []
        for direction in passes:
            for op in block.of(ExpertExchange):
                if direction == "recompute" and not op.again.kernels:
                    continue
                routed = replace(op.tokens, by_node=by_node, back=op.back)
                sent = Collective(
                    Kind.ALL_TO_ALL,
                    "tokens",
                    self.micro_batch * op.elements_sent,
                    self.precision,
                    experts(op.ranks, op.stride),
                    routed=None if routed.even else routed,
                )
                before, behind = self._of_joined(op)
                made += [*before, sent, *behind]
        if self.overlap_experts:
            return TensorParallelCollectives(beside=tuple(made))
        return TensorParallelCollectives(behind=tuple(made))


def _working(block: Block) -> Iterator[AnyOperator]:
    """The operators that compute or exchange something, beside those of single rows."""
    return (op for op in block.operators if isinstance(op, Product | Attention | TensorExchange))
