"""A model as a chain of blocks, each with its parameters, FLOP, products and activations."""

from dataclasses import dataclass, field
from typing import Any

from co2sim.common.units import Bytes, Flops
from co2sim.schedule.schedule import Product


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
class Scores:
    """The scores of softmax attention in a sample: `heads` matrices of `length` x `length`.

    `flops` are those of a forward pass that computes all of them, and `bytes` what a backward pass
    needs of them in a 2-byte type. Of a `causal` one only half is needed: eager attention computes
    the whole, flash attention the half (Dao 2023, arXiv 2307.08691, section 3.1).
    """

    flops: Flops
    bytes: Bytes
    heads: int
    length: int
    causal: bool = True

    @property
    def statistics_bytes(self) -> Bytes:
        """What flash attention keeps instead: the log-sum-exp of every row, in fp32."""
        return 4.0 * self.heads * self.length


@dataclass(frozen=True, slots=True)
class Division:
    """What `ranks` that divide a block exchange in a pass over it (tensor parallelism).

    `elements` are those of the block's input in a sample. A forward pass needs the whole of it for
    `inputs` products and sums up the results of `outputs` products; a backward pass does so the
    other way round. `rows` of logits are compared over the whole vocabulary by a loss. With
    `sequence` every rank holds a part of the sequence between the products.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3 (the operators f and g);
    with `sequence` Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
    """

    ranks: int
    sequence: bool
    elements: int
    inputs: int
    outputs: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """The unit of communication and of the schedule: an embedding, a layer, a head.

    `tensors` are the elements of each parameter tensor in forward order. `flops` are those of a
    forward pass over one sample, those of `scores` included, and `activation_bytes` what a backward
    pass needs of one sample in a 2-byte type, but for scores and logits; `boundary_bytes` is the
    block's input. `products` are its matrix products in forward order and `calls` how many
    operations a framework issues for a forward pass (0: both not known). `logits` are the elements
    of an output over a vocabulary, `tied` the parameters of another block that it uses. A block
    with a `division` is the part of one of several ranks.
    """

    name: str
    tensors: tuple[int, ...]
    flops: Flops
    activation_bytes: Bytes
    scores: Scores | None = None
    boundary_bytes: Bytes = 0.0
    products: tuple[MatMul, ...] = ()
    calls: int = 0
    logits: int = 0
    tied: int = 0
    division: Division | None = None

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(self.tensors)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a chain of blocks. A sample holds `tokens` units (tokens, or images: 1).

    `shape` is what `architecture` made the blocks of, as plain values: a network can be divided
    among tensor-parallel ranks where it is known.
    """

    name: str
    blocks: tuple[Block, ...]
    tokens: int
    unit: str = "token"
    shape: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops_per_sample(self) -> Flops:
        """Model FLOP of a training step on one sample: three forward passes."""
        return 3 * sum(block.flops for block in self.blocks)
