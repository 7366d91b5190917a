"""What a model is to a simulation: a chain of blocks, with their products, bytes and exchanges."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from co2sim.common.resources import remembered
from co2sim.common.units import Bytes, Flops
from co2sim.schedule.schedule import Gemm
from co2sim.schedule.token_routing import TokenRouting


@dataclass(frozen=True, slots=True)
class MatMul:
    """Matrix products of a forward pass over a sample: `rows` x `inner` times `inner` x `columns`.

    Those with weights (`count` 0) take all samples of a micro-batch in one product. Others are
    `count` products per sample, such as those of the heads of attention. With `groups` the rows
    divide among as many weights, those of experts, in one call. An `exact` one is never of a narrow
    type: those of routers. `widths` are the columns of each matrix where several are one product.
    """

    rows: int
    inner: int
    columns: int
    count: int = 0
    groups: int = 0
    exact: bool = False
    widths: tuple[int, ...] = field(default=(), compare=False)

    def product(self, samples: int, width: Bytes) -> Gemm:
        """Those over `samples`, for elements of `width` bytes.

        The two products of a backward pass have the same cost: they permute the three dimensions.
        """
        rows, batch = (self.rows, self.count * samples) if self.count else (self.rows * samples, 1)
        if self.groups:
            batch = min(self.groups, rows)
            rows = -(-rows // batch)
        return Gemm(rows, self.inner, self.columns, width, batch)


@dataclass(frozen=True, slots=True)
class AttentionScores:
    """The scores of softmax attention in a sample: `heads` matrices of `length` x `length`.

    `flops` are those of a forward pass that computes all of them, and `bytes` what a backward pass
    needs of them in a 2-byte type. Of a `causal` one only half is needed: eager attention computes
    the whole, flash attention the half (Dao 2023, arXiv 2307.08691, section 3.1). A token sees no
    more than `reach` others (0: all); `flops` then count the scores within. `operands` are the
    elements of queries, keys, values and `output` (0: all are as wide as the heads together), and
    `rows` the tokens whose queries a rank has (0: all).
    """

    flops: Flops
    bytes: Bytes
    heads: int
    length: int
    causal: bool = True
    reach: int = 0
    operands: int = 0
    output: int = 0
    rows: int = 0

    @property
    def seen(self) -> int:
        """Tokens that a token sees at most."""
        return self.reach or self.length

    @property
    def moved(self) -> float:
        """Elements that one kernel reads and writes in a forward pass."""
        return self.operands or self.flops / self.length

    @property
    def mixed(self) -> float:
        """Elements of the output."""
        return self.output or self.moved / 4

    @property
    def statistics_bytes(self) -> Bytes:
        """What flash attention keeps instead: the log-sum-exp of every row, in fp32."""
        return 4.0 * self.heads * (self.rows or self.length)


@dataclass(frozen=True, slots=True)
class TensorParallelCommunication:
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
class Routing:
    """What `ranks` that divide the experts of a block exchange (expert parallelism).

    `elements` of a sample go to the ranks that have the experts of its tokens, and as many come
    back; a backward pass exchanges their gradients. `tokens` says how these choose. Source:
    Lepikhin et al. 2020, GShard, arXiv 2006.16668, section 3.1.
    """

    ranks: int
    elements: int
    tokens: TokenRouting


@dataclass(frozen=True, slots=True)
class ContextExchange:
    """What `ranks` that divide the sequences of a block exchange (context parallelism).

    In a sample keys and values have `keys` elements in all, and queries and outputs of a rank
    `queries`. Sources: Liu et al. 2023, Ring Attention, arXiv 2310.01889; Jacobs et al. 2023,
    DeepSpeed Ulysses, arXiv 2309.14509; all-gathers: Llama 3, arXiv 2407.21783, section 3.3.2.
    """

    ranks: int
    keys: int
    queries: int


@dataclass(frozen=True, slots=True)
class Adapters:
    """What is trained of a block whose own weights are frozen; of an embedding or a head nothing.

    `tensors` and `experts` are its part of those of the block, and `pairs` the two products of each
    adapter, the last `mlp` of them those of the MLP, or of experts. A backward pass over a sample
    leaves out `spared` FLOP: gradients of frozen weights, and all of the `first` block, before
    which nothing is trained. Tensor-parallel ranks hold `summed` elements alike, whose gradients
    they sum up.
    """

    tensors: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    pairs: tuple[tuple[MatMul, MatMul], ...] = ()
    mlp: int = 0
    spared: Flops = 0.0
    first: bool = False
    summed: int = 0

    @property
    def of_mlp(self) -> tuple[MatMul, ...]:
        """The products of those of the MLP, or of experts."""
        return tuple(m for pair in self.pairs[len(self.pairs) - self.mlp :] for m in pair)


@dataclass(frozen=True, slots=True)
class Operators:
    """What operators of a layer keep of a sample in a 2-byte type, and what makes it again.

    `norms` are the outputs of the norms before attention and MLP, as large as their inputs, and
    `norm_calls` how many these are. `activation` is the output of the function between the products
    of an MLP, or of experts; it reads and writes `activation_moved` elements. `mlp` is all that
    these keep besides their input; theirs are the last `products` of the block. `mlp_calls` are the
    operations of their forward pass.
    """

    norms: Bytes
    norm_calls: int
    activation: Bytes
    activation_moved: float
    mlp: Bytes
    products: int
    mlp_calls: int


@dataclass(frozen=True, slots=True)
class Block:
    """The unit of communication and of the schedule: an embedding, a layer, a head.

    `tensors` are the elements of each parameter tensor in forward order. `flops` are those of a
    forward pass over one sample, those of `scores` included, and `activation_bytes` what a backward
    pass needs of one sample in a 2-byte type, but for scores and logits; `boundary_bytes` is the
    block's input. `products` are its matrix products in forward order and `calls` how many
    operations a framework issues for a forward pass (0: both not known). `logits` are the elements
    of an output over a vocabulary, `tied` the parameters of another block that it uses, and `idle`
    those of the experts that a token does not pass. `passing_bytes` are written and read in a
    forward pass, too, but not kept. A block with a `division` is the part of one of several ranks;
    of one with a `routing` these divide the experts, whose tensors are `experts`, and of one with a
    `context` the sequence. Of one with `adapters` only these are trained (None: all); tensors and
    `flops` count them, and `products` do not. `operators` says what of it is what (None: not
    known).
    """

    name: str
    tensors: tuple[int, ...]
    flops: Flops
    activation_bytes: Bytes
    scores: AttentionScores | None = None
    boundary_bytes: Bytes = 0.0
    products: tuple[MatMul, ...] = ()
    calls: int = 0
    logits: int = 0
    tied: int = 0
    idle: int = 0
    passing_bytes: Bytes = 0.0
    division: TensorParallelCommunication | None = None
    experts: tuple[int, ...] = ()
    routing: Routing | None = None
    context: ContextExchange | None = None
    adapters: Adapters | None = None
    operators: Operators | None = None

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(self.tensors) + sum(self.experts)

    @property
    def trained_tensors(self) -> tuple[int, ...]:
        """Those of `tensors` that are trained."""
        return self.tensors if self.adapters is None else self.adapters.tensors

    @property
    def trained_experts(self) -> tuple[int, ...]:
        """Those of `experts` that are trained."""
        return self.experts if self.adapters is None else self.adapters.experts

    @property
    def trained(self) -> int:
        """Elements of all tensors that are trained."""
        return sum(self.trained_tensors) + sum(self.trained_experts)


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
    def trained_parameters(self) -> int:
        """Those that are trained: all, or adapters."""
        return sum(block.trained for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Those that a token passes: all, but for experts that it does not."""
        return self.parameters - sum(block.idle for block in self.blocks)

    @property
    def flops_per_sample(self) -> Flops:
        """Model FLOP of a training step on one sample: three forward passes, if all is trained."""
        spared = sum(block.adapters.spared for block in self.blocks if block.adapters)
        return 3 * sum(block.flops for block in self.blocks) - spared


@remembered(objects=1, most=64)
def kinds(model: Model) -> tuple[int, ...]:
    """For every block the place of the first one that is equal but for its name."""
    first: dict[Block, int] = {}
    return tuple(
        first.setdefault(replace(block, name=""), index) for index, block in enumerate(model.blocks)
    )


def product_flops(products: Iterable[MatMul]) -> Flops:
    """Of the products with weights, over a sample."""
    return sum(2.0 * m.rows * m.inner * m.columns for m in products if not m.count)
