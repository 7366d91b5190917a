"""From the shape of a network to its blocks: parameters, FLOP and activations of each.

Activations in a 2-byte type follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4): a GPT
layer keeps 34 s h bytes and 5 a s^2 of attention scores; other widths change the terms they enter.
Without dropout, which keeps masks and the scores it masked, that is 32 s h and 2 a s^2.

Tensor-parallel ranks divide heads, the width of the MLP, and the vocabulary, as Megatron-LM does
(Shoeybi et al. 2019, arXiv 1909.08053): 10 s h of a layer's activations stay whole on every rank,
unless the ranks divide the sequence, too (Korthikanti et al., eq. 2 and 4). Norms, positions, and
what an output adds stay whole.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Flops
from co2sim.schedule.schedule import Gemm


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

    def product(self, samples: int, width: Bytes) -> Gemm:
        """Those over `samples`, for elements of `width` bytes.

        The two products of a backward pass have the same cost: they permute the three dimensions.
        """
        rows, batch = (self.rows, self.count * samples) if self.count else (self.rows * samples, 1)
        return Gemm(rows, self.inner, self.columns, width, batch)


@dataclass(frozen=True, slots=True)
class AttentionScores:
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
    scores: AttentionScores | None = None
    boundary_bytes: Bytes = 0.0
    products: tuple[MatMul, ...] = ()
    calls: int = 0
    logits: int = 0
    tied: int = 0
    division: TensorParallelCommunication | None = None

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


LAYER_CALLS = 26
"""Operations of one layer's forward pass in an eager framework with the fusions of Megatron-LM:

2 norms, 4 matrix products with weights, 2 of attention, scaled masked softmax, 3 times bias,
dropout and residual, GELU, and 13 views, splits, transpositions and copies between them.
"""

HEAD_CALLS = 10
"""Norm, matrix product, and the cross entropy in eight."""

START_CALLS = 20
"""Batch, masks, positions, two look-ups, their sum and dropout, scaling and averaging the loss."""

Attention = Literal["softmax", "linear"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Bias = bool | Literal["attention", "qkv", "mlp"]
"""Which matrices have a bias: all or none, or those of attention, of its inputs, of the MLP."""


@dataclass(frozen=True, slots=True)
class TensorParallelShard:
    """What one of `ranks` tensor-parallel ranks has of a model, or of the `sequence`, too."""

    ranks: int = 1
    sequence: bool = False

    def of(self, tokens: int) -> int:
        """The tokens of a sample that a rank has between products."""
        return tokens // self.ranks if self.sequence else tokens

    def division(
        self, elements: int, inputs: int, outputs: int, rows: int = 0
    ) -> TensorParallelCommunication | None:
        """Of a block; None where nothing is divided."""
        if self.ranks == 1:
            return None
        return TensorParallelCommunication(
            self.ranks, self.sequence, elements, inputs, outputs, rows
        )


WHOLE = TensorParallelShard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A stack of equal attention and MLP layers of width `hidden`.

    `gated` MLPs have three matrices, `attention_gate` is one more matrix in attention; `attention`
    "linear" keeps no scores. `kv_heads` and `head_dim` of 0 mean `heads` and hidden / heads.
    A token of a `causal` one sees those before it only; with `dropout` masks are kept, too.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    attention: Attention = "softmax"
    attention_gate: bool = False
    bias: Bias = True
    norm: Norm = "layernorm"
    causal: bool = True
    dropout: bool = False

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return {"layernorm": 2, "rmsnorm": 1, "none": 0}[self.norm] * self.hidden

    def blocks(self, tokens: int, part: TensorParallelShard = WHOLE) -> tuple[Block, ...]:
        """The layers on samples of `tokens` tokens, or the part of them that a rank has."""
        layer = self._layer(tokens, part)
        return tuple(replace(layer, name=f"layer{number}") for number in range(self.layers))

    def check(self, name: str, tokens: int, part: TensorParallelShard) -> None:
        """Raise OptionError for a number of ranks that does not divide the model `name`."""
        counts = {"heads": self.heads, "heads of keys": self.kv_heads or self.heads}
        counts["columns of the MLP"] = self.ffn
        if part.sequence:
            counts["positions of a sequence"] = tokens
        for what, count in counts.items():
            if count % part.ranks:
                raise OptionError(f"tp={part.ranks} does not divide the {count} {what} of {name}")

    def _layer(self, tokens: int, part: TensorParallelShard) -> Block:
        h, s, ranks = self.hidden, tokens, part.ranks
        heads, f = self.heads // ranks, self.ffn // ranks
        head_dim = self.head_dim or h // self.heads
        q, kv = heads * head_dim, (self.kv_heads or self.heads) // ranks * head_dim
        gates = [(h, q)] if self.attention_gate else []
        matrices = [
            (h, q),
            (h, kv),
            (h, kv),
            *gates,
            (q, h),
            (h, f),
            *([(h, f)] if self.gated else []),
            (f, h),
        ]
        attention = 4 + len(gates)
        biased = {True: slice(None), False: slice(0), "qkv": slice(3)} | {
            "attention": slice(attention),
            "mlp": slice(attention, None),
        }
        biases = [width for _, width in matrices[biased[self.bias]]]
        tensors = (
            [rows * columns for rows, columns in matrices] + biases + [self.norm_parameters] * 2
        )
        softmax = self.attention == "softmax"
        mixing = 4.0 * s * q * (s if softmax else head_dim)
        across = s if softmax else head_dim
        products = (
            MatMul(s, h, sum(width for _, width in matrices[:3]) + len(gates) * q),
            MatMul(s, head_dim, across, heads),
            MatMul(s, across, head_dim, heads),
            MatMul(s, q, h),
            MatMul(s, h, (2 if self.gated else 1) * f),
            MatMul(s, f, h),
        )
        kept = 2 * q + 4 * kv + 2 * q + 2 * len(gates) * q  # inside attention
        kept += (6 if self.gated else 4) * f  # inside the MLP
        # norms, the inputs of attention and MLP, two masks of a byte
        around = part.of(s) * (4 * h + 2 * h + 2 * h + (2 * h if self.dropout else 0))
        return Block(
            name="layer",
            tensors=tuple(size for size in tensors if size),
            flops=2.0 * s * sum(rows * columns for rows, columns in matrices) + mixing,
            activation_bytes=float(s * kept + around),
            scores=self._scores(s, mixing, heads) if softmax else None,
            boundary_bytes=2.0 * part.of(s) * h,
            products=products,
            calls=LAYER_CALLS,
            division=part.division(s * h, inputs=2, outputs=2),
        )

    def _scores(self, tokens: int, flops: float, heads: int) -> AttentionScores:
        kept = (5.0 if self.dropout else 2.0) * heads * tokens**2
        return AttentionScores(flops, kept, heads, tokens, self.causal)


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a network is made of, as plain values."""
    return {**given, "body": asdict(given["body"])} if given.pop("part") == WHOLE else {}


def language_model(  # noqa: PLR0913 - one keyword per number of a model
    name: str,
    body: Transformer,
    *,
    vocab: int,
    tokens: int,
    tied: bool,
    positions: int = 0,
    token_types: int = 0,
    embedding_norm: bool = False,
    head_transform: bool = False,
    part: TensorParallelShard = WHOLE,
) -> Model:
    """A decoder, or an encoder with a masked-language head: embedding, layers, vocabulary.

    `head_transform` is BERT's dense layer and norm before a vocabulary with biases; it stands for
    the final norm. A tied head shares the embedding: its parameters count there, its FLOP here.
    A `part` of the vocabulary is rounded up.
    """
    shape = _plain(locals())
    body.check(name, tokens, part)
    vocab = -(-vocab // part.ranks)
    h, s = body.hidden, tokens
    norm = body.norm_parameters
    lookups = [vocab * h, positions * h, token_types * h, norm if embedding_norm else 0]
    head = [h * h, h, norm, vocab] if head_transform else [norm]
    head.append(0 if tied else vocab * h)
    return Model(
        name=name,
        blocks=(
            Block(
                "embedding",
                tuple(size for size in lookups if size),
                0.0,
                float(part.of(s) * h),
                calls=START_CALLS,
                division=part.division(s * h, inputs=0, outputs=1),
            ),
            *body.blocks(s, part),
            Block(
                "head",
                tuple(size for size in head if size),
                flops=2.0 * s * h * (vocab + (h if head_transform else 0)),
                activation_bytes=4.0 * part.of(s) * h,  # input and norm
                boundary_bytes=2.0 * part.of(s) * h,
                products=(
                    *([MatMul(s, h, h)] if head_transform else []),
                    MatMul(s, h, vocab),
                ),
                calls=HEAD_CALLS,
                logits=s * vocab,
                tied=vocab * h if tied else 0,
                division=part.division(s * h, inputs=1, outputs=0, rows=s),
            ),
        ),
        tokens=tokens,
        shape=shape if part == WHOLE else None,
    )


def vision_transformer(
    name: str,
    body: Transformer,
    *,
    image: int,
    patch: int,
    channels: int,
    classes: int,
    part: TensorParallelShard = WHOLE,
) -> Model:
    """ViT (Dosovitskiy et al. 2021, arXiv 2010.11929): patches, class token, layers, head.

    Of a `part` only the layers are divided.
    """
    shape = _plain(locals())
    h = body.hidden
    patches = (image // patch) ** 2
    tokens, inputs = patches + 1, channels * patch * patch
    body.check(name, tokens, part)
    return Model(
        name=name,
        blocks=(
            Block(
                "embedding",
                (h * inputs, h, h, tokens * h),
                2.0 * patches * inputs * h,
                2.0 * patches * inputs + tokens * h,
            ),
            *body.blocks(tokens, part),
            Block(
                "head",
                (body.norm_parameters, h * classes, classes),
                2.0 * h * classes,
                4.0 * tokens * h + 4 * classes,
            ),
        ),
        tokens=1,
        unit="image",
        shape=shape if part == WHOLE else None,
    )


def shard_model(model: Model, ranks: int, *, sequence: bool) -> Model:
    """What one of some tensor-parallel ranks has of a model.

    Raises OptionError for a model that cannot be divided so, or whose shape is not known.
    """
    found = _network(model)
    if found is None:
        raise OptionError(f"tp={ranks} does not apply to {model.name}: only transformers divide")
    if sequence and model.unit == "image":
        raise OptionError(f"sequence_parallel=true does not apply to {model.name}, of images")
    return found(part=TensorParallelShard(ranks, sequence))


def _network(model: Model) -> Callable[..., Model] | None:
    """What makes the model of its shape; None where it has none, or another one than its blocks."""
    shape = dict(model.shape or {})
    make = language_model if "vocab" in shape else vision_transformer
    try:
        body = Transformer(**shape.pop("body"))
        if body.layers + 2 != len(model.blocks):  # before as many are made
            return None
        found = partial(make, body=body, **shape)
        return found if found() == model else None
    except (AttributeError, ArithmeticError, KeyError, TypeError):  # a file may say anything
        return None
