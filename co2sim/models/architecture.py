"""From the shape of a network to its blocks: parameters, FLOP and activations of each.

Activations in a 2-byte type follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4): a GPT
layer keeps 34 s h bytes and 5 a s^2 of attention scores; other widths change the terms they enter.
Without dropout, which keeps masks and the scores it masked, that is 32 s h and 2 a s^2.

Tensor-parallel ranks divide heads, the width of the MLP, and the vocabulary, as Megatron-LM does
(Shoeybi et al. 2019, arXiv 1909.08053): 10 s h of a layer's activations stay whole on every rank,
unless the ranks divide the sequence, too (Korthikanti et al., eq. 2 and 4). Norms, positions, and
what an output adds stay whole.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from co2sim.common.errors import OptionError
from co2sim.common.resources import remembered
from co2sim.common.units import Flops
from co2sim.common.validation import Count, Natural, Quantity, check, whole
from co2sim.models.blocks import (
    AttentionScores,
    Block,
    ContextExchange,
    MatMul,
    Model,
    Operators,
    Routing,
    TensorParallelCommunication,
    product_flops,
)
from co2sim.schedule.mesh import MESH, Mesh
from co2sim.schedule.token_routing import TokenRouting, most_load

LAYER_CALLS = 26
"""Operations of one layer's forward pass in an eager framework with the fusions of Megatron-LM:

2 norms, 4 matrix products with weights, 2 of attention, scaled masked softmax, 3 times bias,
dropout and residual, GELU, and 13 views, splits, transpositions and copies between them.
"""

MLP_CALLS = 3
"""Of these, those of an MLP: two products and GELU."""

HEAD_CALLS = 10
"""Norm, matrix product, and the cross entropy in eight."""

START_CALLS = 20
"""Batch, masks, positions, two look-ups, their sum and dropout, scaling and averaging the loss."""

EXPERT_CALLS = 42
"""Operations that a layer with experts issues beside one with an MLP, in Megatron-Core 0.16:

5 of the router's product in fp32, 9 of scores and top-k, 16 of the auxiliary loss, 2 of counts, 2
of the fused permutation and 2 back, and 6 views. PyTorch's dispatcher counts the 9, and 12 of the
16, in megatron/core/transformer/moe/moe_utils.py; the others are read off that code.
"""

ROUTING_CALLS = 29
"""More of them where ranks divide the experts: 12 of the counts of all ranks, 5 copies of them to
the host, 6 of three all-to-alls, of tokens, their weights and results, 4 of two fused sorts, and 2
views. Read off token_dispatcher.py, MoEAlltoAllTokenDispatcher.
"""

_COPIES = 3
"""Of tokens that an all-to-all brings, beside the sorted inputs: before they leave, sorted by the
experts of all ranks; the results as they go back; and as they are summed up. Source:
megatron/core/transformer/moe/token_dispatcher.py, 2025, MoEAlltoAllTokenDispatcher."""

Attention = Literal["softmax", "linear"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Bias = bool | Literal["attention", "qkv", "mlp", "not_qkv"]
"""Which matrices have a bias: all or none, or those of attention, of its inputs, of the MLP, or all
but those of attention's inputs."""
Load = Annotated[float, Quantity(least=1, most=1000)]
QKNorm = Literal["none", "head", "whole"]
"""Norms of queries and keys: none, one for all heads, or one over all heads together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP of a layer.

    A router chooses `active` of `count` experts for every token, each an MLP of `width` columns.
    All tokens pass `shared` columns besides, weighed by one more column with `shared_gate`. The
    first `dense` layers keep their MLP, and so do all but one of `every` layers. With `bias`
    experts and router have biases. Where ranks divide the experts, the busiest one gets `load`
    times as many tokens as the mean. The experts of a token come from `active_groups` of `groups`
    equal groups of experts in a row.

    Source: Fedus et al. 2022, arXiv 2101.03961; shared experts: DeepSeekMoE, arXiv 2401.06066;
    groups: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """

    count: Count
    active: Count
    width: Count
    shared: Natural = 0
    shared_gate: bool = False
    dense: Natural = 0
    every: Count = 1
    bias: bool = False
    load: Load = 1.0
    groups: Count = 1
    active_groups: Count = 1

    def __post_init__(self) -> None:
        """Refuse what no router can do."""
        check(self, "experts")
        whole("experts: active", self.active, 1, self.count)
        whole("experts: active_groups", self.active_groups, 1, self.groups)
        if self.count % self.groups:
            raise OptionError(
                f"experts: groups is {self.groups}; it must divide the {self.count} experts"
            )
        allowed = self.active_groups * (self.count // self.groups)
        if self.active > allowed:
            raise OptionError(
                f"experts: active is {self.active}; {self.active_groups} of {self.groups} groups"
                f" have {allowed} experts"
            )

    def of(self, layer: int) -> bool:
        """Whether a layer has experts; the first one is 0."""
        return layer >= self.dense and (layer + 1) % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values come from a vector of `kv_rank` numbers a token.

    Queries come from `q_rank` numbers (0: from the hidden state). `nope` columns of each query and
    key have no position, `rope` have one, which all keys share; a value has `value` columns.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    kv_rank: Count
    q_rank: Natural = 0
    nope: Count
    rope: Natural
    value: Count

    def __post_init__(self) -> None:
        """Refuse what no attention can be."""
        check(self, "latent")


def _tokens(part: Mesh, tokens: int) -> int:
    """The tokens of a sample that a rank has between products."""
    return tokens // part.tp if part.sequence_parallel else tokens


def _division(
    part: Mesh, elements: int, inputs: int, outputs: int, rows: int = 0
) -> TensorParallelCommunication | None:
    """Of a block; None where nothing is divided."""
    if part.tp == 1:
        return None
    return TensorParallelCommunication(
        part.tp, part.sequence_parallel, elements, inputs, outputs, rows
    )


WHOLE = Mesh()


@dataclass(frozen=True, slots=True)
class _Part:
    """Attention, or what follows it in a layer: its tensors, work, and what it keeps.

    `kept` and `passing` are bytes of a sample in a 2-byte type, `flops` those of a sample but for
    `mixing`, `activated` the elements behind an activation function, and `idle` the parameters that
    a token does not pass.
    """

    tensors: list[int]
    products: tuple[MatMul, ...]
    kept: int
    flops: Flops
    activated: int = 0
    mixing: Flops = 0.0
    scores: AttentionScores | None = None
    idle: int = 0
    calls: int = 0
    passing: int = 0
    experts: tuple[int, ...] = ()
    routing: Routing | None = None
    context: ContextExchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Attention and MLP layers of width `hidden`.

    `gated` MLPs have three matrices, `attention_gate` is one more matrix in attention; `attention`
    "linear" keeps no scores. `kv_heads` and `head_dim` of 0 mean `heads` and hidden / heads.
    A token of a `causal` one sees those before it only; with `dropout` masks are kept, too. Layers
    in turn see as many tokens as `windows` say (0: all of them). A layer has `norms` norms over its
    width, and a `qk_norm`; with `sinks` every head has one number more. `latent` attention and
    `experts` stand in place of the plain ones.
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
    norms: int = 2
    qk_norm: QKNorm = "none"
    sinks: bool = False
    causal: bool = True
    dropout: bool = False
    windows: tuple[int, ...] = ()
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self._norm(self.hidden)

    def _norm(self, width: int) -> int:
        return {"layernorm": 2, "rmsnorm": 1, "none": 0}[self.norm] * width

    def blocks(self, tokens: int, part: Mesh = WHOLE) -> tuple[Block, ...]:
        """The layers on samples of `tokens` tokens, or the part of them that a rank has."""
        made: dict[tuple[bool, int], Block] = {}
        blocks = []
        for index in range(self.layers):
            window = self.windows[index % len(self.windows)] if self.windows else 0
            kind = self._routes(index), 0 if window >= tokens * part.cp else window
            if kind not in made:
                made[kind] = self._layer(tokens, part, *kind)
            blocks.append(replace(made[kind], name=f"layer{index}"))
        return tuple(blocks)

    def _routes(self, layer: int) -> bool:
        return self.experts is not None and self.experts.of(layer)

    def check(self, name: str, tokens: int, part: Mesh) -> None:
        """Raise OptionError for a number of ranks that does not divide the model `name`."""
        counts = {"heads": self.heads, "heads of keys": self.kv_heads or self.heads}
        if self.latent:
            del counts["heads of keys"]
        if not all(map(self._routes, range(self.layers))):
            counts["columns of the MLP"] = self.ffn
        if self.experts:
            counts["columns of the shared experts"] = self.experts.shared
            if part.ep == 1:
                counts["columns of an expert"] = self.experts.width
        if part.sequence_parallel:
            counts["positions of a sequence"] = tokens // part.cp
        if tokens % (2 * part.cp) and part.cp > 1:
            raise OptionError(
                f"cp={part.cp} does not divide the {tokens} positions of {name} into two"
                " parts for each"
            )
        for what, count in counts.items():
            if count % part.tp:
                raise OptionError(f"tp={part.tp} does not divide the {count} {what} of {name}")
        if part.ep > 1:
            self._check_experts(name, part)

    def _check_experts(self, name: str, part: Mesh) -> None:
        if self.experts is None:
            raise OptionError(f"ep={part.ep} needs a model with experts, and {name} has none")
        if self.experts.count % part.ep:
            raise OptionError(
                f"ep={part.ep} does not divide the {self.experts.count} experts of {name}"
            )
        to = self.experts
        most = most_load(to.active, to.count, part.ep)
        if to.load > most:
            raise OptionError(
                f"experts.load is {to.load:g}; with ep={part.ep} one GPU gets at most {most:g}"
                f" times the mean of {name}'s tokens"
            )
        if part.tp > 1 and not part.sequence_parallel:
            raise OptionError(
                f"ep={part.ep} with tp={part.tp} needs sequence_parallel=true: each GPU"
                " sends its own tokens"
            )

    def _layer(self, tokens: int, part: Mesh, routed: bool, window: int) -> Block:  # noqa: FBT001
        h, s = self.hidden, tokens
        attend = self._latent if self.latent else self._attention
        first = attend(tokens, part, window)
        then = self._experts(tokens, part) if routed else self._mlp(tokens, part.tp)
        norms = [self.norm_parameters] * self.norms
        # inputs of norms, of attention and MLP, two masks of a byte
        inputs = min(self.norms, 2)
        # tokens go to whole experts as they are; a shared one is divided
        exchanged = 2 if then.routing is None or (self.experts and self.experts.shared) else 1
        around = _tokens(part, s) * (2 * h * (self.norms + inputs) + (2 * h if self.dropout else 0))
        return Block(
            name="layer",
            tensors=tuple(size for size in (*first.tensors, *then.tensors, *norms) if size),
            flops=first.flops + then.flops + first.mixing,
            activation_bytes=float(first.kept + then.kept + around),
            scores=first.scores,
            boundary_bytes=2.0 * _tokens(part, s) * h,
            products=(*first.products, *then.products),
            calls=LAYER_CALLS + then.calls,
            idle=then.idle,
            passing_bytes=float(then.passing),
            division=_division(part, s * h, inputs=exchanged, outputs=exchanged),
            experts=then.experts,
            routing=then.routing,
            context=first.context,
            operators=self._operators(then, _tokens(part, s)),
        )

    def _operators(self, then: _Part, tokens: int) -> Operators:
        """Of a layer whose norms see `tokens` tokens, and `then` is what follows attention."""
        before = min(self.norms, 2)
        return Operators(
            norms=2.0 * before * tokens * self.hidden,
            norm_calls=before,
            activation=2.0 * then.activated,
            activation_moved=float((3 if self.gated else 2) * then.activated),
            mlp=float(then.kept),
            products=len(then.products),
            mlp_calls=MLP_CALLS + then.calls,
        )

    def _attention(self, tokens: int, part: Mesh, window: int) -> _Part:
        ranks, seen = part.tp, tokens * part.cp
        h, s, heads = self.hidden, tokens, self.heads // ranks
        head_dim = self.head_dim or h // self.heads
        q, kv = heads * head_dim, (self.kv_heads or self.heads) // ranks * head_dim
        gates = [(h, q)] if self.attention_gate else []
        matrices = [(h, q), (h, kv), (h, kv), *gates, (q, h)]
        biased = {True: slice(None), "attention": slice(None), "qkv": slice(3)}
        biased["not_qkv"] = slice(3, None)
        biases = [width for _, width in matrices[biased.get(self.bias, slice(0))]]
        sizes = {"none": (0, 0), "head": (head_dim, head_dim), "whole": (q, kv)}[self.qk_norm]
        norms = [*map(self._norm, sizes), heads if self.sinks else 0]
        softmax = self.attention == "softmax"
        across = seen if softmax else head_dim
        inputs = tuple(width for _, width in matrices[:-1])
        products = (
            MatMul(s, h, sum(inputs), widths=inputs),
            MatMul(s, head_dim, across, heads),
            MatMul(s, across, head_dim, heads),
            MatMul(s, q, h),
        )
        kept = 2 * q + 4 * kv + 2 * q + 2 * len(gates) * q
        kept += 2 * (q + kv) if self.qk_norm != "none" else 0
        mixing = 4.0 * q * (_pairs(seen, window) / part.cp if softmax else s * head_dim)
        return _Part(
            tensors=[rows * columns for rows, columns in matrices] + biases + norms,
            products=products,
            kept=s * kept,
            flops=2.0 * s * sum(rows * columns for rows, columns in matrices),
            mixing=mixing,
            scores=self._scores(s, part, mixing, window, (heads, head_dim, head_dim))
            if softmax
            else None,
            context=_context(part, 2 * kv * seen, s * q),
        )

    def _latent(self, tokens: int, part: Mesh, window: int) -> _Part:
        """Ranks divide the heads, and all have the latent vectors (Megatron-Core, MLA)."""
        assert self.latent is not None
        seen, heads = tokens * part.cp, self.heads // part.tp
        h, s, to = self.hidden, tokens, self.latent
        wide = to.nope + to.rope
        q, kv, out = heads * wide, heads * (to.nope + to.value), heads * to.value
        queries = [(h, to.q_rank), (to.q_rank, q)] if to.q_rank else [(h, q)]
        matrices = [*queries, (h, to.kv_rank + to.rope), (to.kv_rank, kv), (out, h)]
        weighted = [MatMul(s, rows, columns) for rows, columns in matrices]
        mixing = 2.0 * heads * (wide + to.value) * _pairs(seen, window) / part.cp
        products = (
            *weighted[:-1],
            MatMul(s, wide, seen, heads),
            MatMul(s, seen, to.value, heads),
            weighted[-1],
        )
        ranks_kept = 4 * (to.q_rank + to.kv_rank)  # before and behind their norms
        return _Part(
            tensors=[rows * columns for rows, columns in matrices]
            + [self._norm(to.q_rank), self._norm(to.kv_rank)],
            products=products,
            kept=s * (ranks_kept + 2 * (q + q + out) + 2 * out),
            flops=product_flops(products),
            mixing=mixing,
            scores=self._scores(s, part, mixing, window, (heads, wide, to.value)),
            context=_context(part, heads * (wide + to.value) * seen, s * q),
        )

    def _mlp(self, tokens: int, ranks: int) -> _Part:
        h, s, f = self.hidden, tokens, self.ffn // ranks
        up = 2 if self.gated else 1
        matrices = [*[(h, f)] * up, (f, h)]
        biases = [width for _, width in matrices] if self.bias in (True, "mlp", "not_qkv") else []
        products = (MatMul(s, h, up * f, widths=(f,) * up), MatMul(s, f, h))
        tensors = [rows * columns for rows, columns in matrices] + biases
        kept = s * (2 + 2 * up) * f
        return _Part(tensors, products, kept, product_flops(products), activated=s * f)

    def _experts(self, tokens: int, part: Mesh) -> _Part:
        """Tokens are sorted by their experts, which keep the sorted ones; weights are fp32.

        Results are weighed before the last product, so that they need not be kept: Megatron-Core
        0.12, "memory-efficient permutation". Tensor-parallel ranks divide the experts' columns, or
        those of the shared ones only, where each has some of the experts.
        """
        assert self.experts is not None
        to, h, s, many = self.experts, self.hidden, tokens, part.ep
        up, n, k = 2 if self.gated else 1, to.count, to.active
        f, shared = to.width // (part.tp if many == 1 else 1), to.shared // part.tp
        local = s if many == 1 else _tokens(part, s)
        routed = math.ceil(local * k * (to.load if many > 1 else 1.0))
        biases = up * f + h if to.bias else 0
        each = (up + 1) * h * f + biases
        of_shared = [up * h * shared, shared * h, h if to.shared_gate else 0]
        products = (
            MatMul(local, h, n, exact=True),
            *(
                [MatMul(s, h, up * shared, widths=(shared,) * up), MatMul(s, shared, h)]
                if shared
                else []
            ),
            MatMul(routed, h, up * f, groups=n // many, widths=(f,) * up),
            MatMul(routed, f, h, groups=n // many),
        )
        tensors = [h * n, n if to.bias else 0, *of_shared]
        choice = TokenRouting(k, n, h, to.groups, to.active_groups, to.load)
        experts = (n // many * up * h * f, n // many * (each - up * h * f))
        return _Part(
            tensors=tensors if many > 1 else [*tensors, *experts],
            products=products,
            kept=(2 + 2 * up) * (routed * f + s * shared) + 2 * routed * h + 4 * local * n,
            flops=product_flops(products),
            activated=routed * f + s * shared,
            idle=(n - k) * each // many,
            calls=EXPERT_CALLS + (ROUTING_CALLS if many > 1 else 0),
            passing=2 * routed * h * (1 if many == 1 else _COPIES),
            experts=experts if many > 1 else (),
            routing=Routing(many, math.ceil(local * k * h * to.load), choice) if many > 1 else None,
        )

    def _scores(
        self,
        tokens: int,
        part: Mesh,
        flops: float,
        window: int,
        shape: tuple[int, int, int],
    ) -> AttentionScores:
        """Those of `shape`: heads, and the widths of a query and of a value."""
        heads, wide, value = shape
        seen = tokens * part.cp
        kept = (5.0 if self.dropout else 2.0) * heads * tokens * seen
        output = tokens * heads * value
        operands = (tokens + seen) * heads * wide + seen * heads * value + output
        rows = tokens if part.cp > 1 else 0
        return AttentionScores(
            flops, kept, heads, seen, self.causal, window, operands, output, rows
        )


def _context(part: Mesh, keys: int, queries: int) -> ContextExchange | None:
    return ContextExchange(part.cp, keys, queries) if part.cp > 1 else None


def _pairs(tokens: int, window: int) -> float:
    """Scores of a head as figures count them: those above the diagonal, too, as many as below."""
    return float(tokens**2 if not window else window * (2 * tokens - window))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a network is made of, as plain values."""
    return {**values, "body": asdict(values["body"])} if values.pop("part") == WHOLE else {}


def _embedding(lookups: list[int], rows: int, hidden: int, part: Mesh) -> Block:
    """What is looked up for each of some rows."""
    return Block(
        "embedding",
        tuple(size for size in lookups if size),
        0.0,
        float(_tokens(part, rows) * hidden),
        calls=START_CALLS,
        division=_division(part, rows * hidden, inputs=0, outputs=1),
    )


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
    head_bias: bool = False,
    final_norm: bool = True,
    pooler: bool = False,
    labels: int | None = None,
    part: Mesh = WHOLE,
) -> Model:
    """A decoder or an encoder: embedding, layers, and a head over the vocabulary or some labels.

    `head_transform` is BERT's dense layer and norm before a vocabulary with biases; it stands for
    the final norm. A tied head shares the embedding: its parameters count there, its FLOP here.
    A `part` of the vocabulary is rounded up. With `labels` the head has as many outputs in place
    of the vocabulary, for every token, and with 0 there is none. `pooler` is a dense layer for the
    first token, and then only this token has a head.
    """
    shape = _plain(locals())
    body.check(name, tokens, part)
    vocab = -(-vocab // part.tp)
    h, s = body.hidden, tokens // part.cp
    norm = body.norm_parameters
    lookups = [vocab * h, positions * h, token_types * h, norm if embedding_norm else 0]
    outputs, rows = vocab if labels is None else labels, 1 if pooler else s
    dense, shared = pooler or head_transform, tied and labels is None
    plain = [norm if final_norm else 0, *([h * h, h] if pooler else [])]
    head = [h * h, h, norm, vocab] if head_transform else plain
    head += [0 if shared else outputs * h, outputs if head_bias else 0]
    return Model(
        name=name,
        blocks=(
            _embedding(lookups, s, h, part),
            *body.blocks(s, part),
            Block(
                "head",
                tuple(size for size in head if size),
                flops=2.0 * rows * h * (outputs + (h if dense else 0)),
                activation_bytes=4.0 * _tokens(part, s) * h,  # input and norm
                boundary_bytes=2.0 * _tokens(part, s) * h if outputs else 0.0,
                products=(
                    *([MatMul(rows, h, h)] if dense else []),
                    *([MatMul(rows, h, outputs)] if outputs else []),
                ),
                calls=HEAD_CALLS,
                logits=rows * outputs,
                tied=vocab * h if shared else 0,
                division=_division(part, s * h, 1, 0, s if labels is None else 0),
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
    part: Mesh = WHOLE,
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


def shard_model(model: Model, mesh: Mesh) -> Model:
    """What one GPU of a stage has of a model: of its layers, its experts, and of sequences.

    Of the experts it has as many as any other of `ep` GPUs, each of them whole; of every sequence
    equal parts of its begin and of its end, so that all of `cp` GPUs see equally many tokens.
    Raises OptionError for a model that cannot be divided so, or whose shape is not known.
    """
    return _sharded(model, mesh.inside)


@remembered(objects=1, most=64)
def _sharded(model: Model, mesh: Mesh) -> Model:
    make = _network(model)
    if make is None:
        named = next(f"{name}={n}" for name in MESH if (n := getattr(mesh, name)) > 1)
        raise OptionError(f"{named} does not apply to {model.name}: only transformers divide")
    if mesh.sequence_parallel and model.unit == "image":
        raise OptionError(f"sequence_parallel=true does not apply to {model.name}, of images")
    if mesh.cp > 1 and model.unit == "image":
        raise OptionError(f"cp={mesh.cp} does not apply to {model.name}, of images")
    return make(part=mesh)


def _body(values: dict[str, Any]) -> Transformer:
    """From plain values."""
    nested = {"latent": LatentAttention, "experts": Experts}
    made = {name: values.get(name) and kind(**values[name]) for name, kind in nested.items()}
    return Transformer(**values | made | {"windows": tuple(values.get("windows", ()))})


def _network(model: Model) -> Callable[..., Model] | None:
    """What makes the model of its shape; None where it has none, or another one than its blocks."""
    shape = dict(model.shape or {})
    make = language_model if "vocab" in shape else vision_transformer
    try:
        body = _body(shape.pop("body"))
        if body.layers + 2 != len(model.blocks):  # before as many are made
            return None
        network = partial(make, body=body, **shape)
        return network if network() == model else None
    except (AttributeError, ArithmeticError, KeyError, TypeError):  # a file may say anything
        return None
