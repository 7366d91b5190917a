"""A model and how it is trained: parameters, FLOP and bytes of every block.

FLOP count a multiply-add as two. The model FLOP of a token follow PaLM (Chowdhery et al. 2022,
appendix B): 6 for every parameter that multiplies, plus 12 x layers x heads x head_dim x seq_len
for softmax attention, without a discount for causal masks. Norms, biases and activations are left
out. A backward pass is twice a forward pass; `recompute` adds to the hardware FLOP only.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from co2sim.ranges import whole
from co2sim.schedule import Compute, DType, Kernels, Product
from co2sim.units import Bytes, Flops

Recompute = Literal["none", "selective", "full"]
Optimizer = Literal["adamw", "sgd"]

_MOST_SAMPLES = 10_000
"""Of a micro-batch, and micro-steps of a step: the schedule holds every micro-step."""

MASTER_BYTES: Bytes = 4.0
"""fp32 master copy of a parameter in mixed precision."""

OPTIMIZER_BYTES: dict[Optimizer, Bytes] = {"adamw": 12.0, "sgd": 8.0}
"""fp32 master copy and moments per parameter: K of ZeRO (arXiv 1910.02054, section 3.1)."""


@dataclass(frozen=True, slots=True)
class MatMul:
    """Matrix products of a forward pass over a sample: `rows` x `inner` times `inner` x `columns`.

    Those with weights (`count` 0) take all samples of a micro-batch in one product. Others are
    `count` products per sample, such as those of the heads of attention.
    """

    rows: int
    inner: int
    columns: int
    count: int = 0

    def product(self, samples: int, width: Bytes) -> Product:
        """FLOP and bytes over `samples`, for elements of `width` bytes.

        The two products of a backward pass have the same: they permute the three dimensions.
        """
        many = (self.count or 1) * samples
        weights = self.inner * self.columns * (many if self.count else 1)
        elements = many * self.rows * (self.inner + self.columns) + weights
        return Product(2.0 * many * self.rows * self.inner * self.columns, elements * width)


@dataclass(frozen=True, slots=True)
class Block:
    """The unit of communication and of the schedule: an embedding, a layer, a head.

    `tensors` are the elements of each parameter tensor in forward order. `flops` are those of a
    forward pass over one sample, `attention_flops` the part of them that "selective" recomputation
    repeats. `activation_bytes` and `attention_bytes` are what a backward pass needs of one sample
    in a 2-byte type, without and with attention scores; `boundary_bytes` is the block's input.
    `products` are its matrix products and `calls` how many operations a framework issues for a
    forward pass (0: both not known), `vocabulary` marks the output over a vocabulary.
    """

    name: str
    tensors: tuple[int, ...]
    flops: Flops
    activation_bytes: Bytes
    attention_flops: Flops = 0.0
    attention_bytes: Bytes = 0.0
    boundary_bytes: Bytes = 0.0
    products: tuple[MatMul, ...] = ()
    calls: int = 0
    vocabulary: bool = False

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(self.tensors)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a chain of blocks. A sample holds `tokens` units (tokens, or images: 1)."""

    name: str
    blocks: tuple[Block, ...]
    tokens: int
    unit: str = "token"

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops_per_sample(self) -> Flops:
        """Model FLOP of a training step on one sample: three forward passes."""
        return 3 * sum(block.flops for block in self.blocks)


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What one GPU does for one block and one micro-batch."""

    block: Block
    forward: Compute
    backward: Compute


@dataclass(frozen=True)
class Workload:
    """A model with its batch and precision.

    `micro_batch` is samples per GPU and micro-step, `accumulation` micro-steps per optimizer step.
    """

    model: Model
    micro_batch: int = 1
    accumulation: int = 1
    precision: DType = DType.BF16
    recompute: Recompute = "selective"
    optimizer: Optimizer = "adamw"

    def __post_init__(self) -> None:
        """Refuse batches that are not positive."""
        for name in ("micro_batch", "accumulation"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, _MOST_SAMPLES))

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.model.parameters

    @property
    def samples_per_gpu(self) -> int:
        """Samples that one GPU sees in an optimizer step."""
        return self.micro_batch * self.accumulation

    def works(self) -> tuple[BlockWork, ...]:
        """Forward and backward work of every block; equal blocks share their works.

        Memory traffic is the least that the pass can do: the weights once, and every activation
        that is kept written once and read once; a backward pass moves twice as much.
        """
        return self._works

    @cached_property
    def _works(self) -> tuple[BlockWork, ...]:
        shared: dict[Block, tuple[Compute, Compute]] = {}
        works = []
        for block in self.model.blocks:
            key = replace(block, name="")
            if key not in shared:
                shared[key] = self._passes(block)
            works.append(BlockWork(block, *shared[key]))
        return tuple(works)

    def _passes(self, block: Block) -> tuple[Compute, Compute]:
        flops = block.flops * self.micro_batch
        repeated = {
            "none": 0.0,
            "selective": block.attention_flops * self.micro_batch,
            "full": flops,
        }
        weights = (
            block.parameters * self.precision.bytes if flops else 0.0
        )  # a look-up reads only rows
        traffic = weights + 2 * block.activation_bytes * self.precision.bytes / 2 * self.micro_batch
        return (
            Compute("forward", flops, traffic, self._kernels(block, 1, "none")),
            Compute(
                "backward",
                2 * flops + repeated[self.recompute],
                2 * traffic,
                self._kernels(block, 2, self.recompute),
            ),
        )

    def _kernels(self, block: Block, passes: int, recompute: Recompute) -> Kernels | None:
        """What `passes` times the work of a forward pass launches, and what is recomputed before.

        Elementwise kernels write every activation that is kept, attention scores included, and
        read it again. Autograd runs one node for every operation of the forward pass, so a
        backward pass issues as many as a forward pass, each twice as much work.
        """
        if not block.calls:
            return None
        again = int(recompute == "full")
        often = passes + again
        attention = passes + 1 if recompute == "selective" and block.attention_flops else often
        width = self.precision.bytes
        kept = often * block.activation_bytes + attention * block.attention_bytes
        return Kernels(
            tuple(
                matmul.product(self.micro_batch, width).times(attention if matmul.count else often)
                for matmul in block.products
            ),
            (1 + again) * block.calls,
            kept * width * self.micro_batch,
            block.vocabulary,
        )

    def recomputed(self, work: BlockWork) -> tuple[Compute, Compute]:
        """A backward pass with full recomputation in two: the forward pass again, then the rest."""
        forward, whole = work.forward, work.backward
        return (
            replace(forward, kernel="recompute"),
            Compute(
                "backward",
                whole.flops - forward.flops,
                whole.memory_bytes,
                self._kernels(work.block, 2, "none"),
            ),
        )

    @property
    def hardware_flops_per_sample(self) -> Flops:
        """FLOP of a training step on one sample as executed, recomputation included."""
        works = self.works()
        return sum(work.forward.flops + work.backward.flops for work in works) / self.micro_batch

    @property
    def optimizer_bytes(self) -> Bytes:
        """Optimizer state per parameter; in fp32 the parameters are their own master copy."""
        master = MASTER_BYTES if self.precision is DType.FP32 else 0.0
        return OPTIMIZER_BYTES[self.optimizer] - master

    def optimizer_step(self, elements: int) -> Compute:
        """The optimizer over `elements` parameters: memory-bound.

        Traffic: gradient, master copy and moments read; master copy, moments and parameter written.
        """
        state = self.optimizer_bytes
        return Compute(
            "optimizer", 12.0 * elements, elements * (2 * self.precision.bytes + 2 * state)
        )
