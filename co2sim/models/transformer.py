"""Transformers: from the shape of a network to the operators of its blocks.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4): in a 2-byte type a GPT
layer keeps 34 s h bytes and 5 a s^2 of attention scores; other widths change the terms they enter.
Without dropout, which keeps masks and the scores it masked, that is 32 s h and 2 a s^2.

Tensor-parallel ranks divide heads, the width of the MLP, and the vocabulary, as Megatron-LM does
(Shoeybi et al. 2019, arXiv 1909.08053): 10 s h of a layer's activations stay whole on every rank,
unless the ranks divide the sequence, too (Korthikanti et al., eq. 2 and 4). Norms, positions, and
what an output adds stay whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.common.validation import Count, Natural, Quantity, check, whole
from co2sim.models.operators import (
    AnyOperator,
    Attention,
    Block,
    CrossEntropy,
    Cut,
    ExpertExchange,
    Model,
    Operator,
    Part,
    Product,
    Table,
    TensorExchange,
    Unfused,
)
from co2sim.models.scan import Scan
from co2sim.schedule.token_routing import TokenRouting

LAYER_CALLS = 26
"""Operations of one layer's forward pass in an eager framework with the fusions of Megatron-LM:

2 norms, 4 matrix products with weights, 2 of attention, scaled masked softmax, 3 times bias,
dropout and residual, GELU, and 13 views, splits, transpositions and copies between them.
"""

_NORM_CALLS = 2
_MLP_CALLS = 3
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

_COPIES = 2
"""Of tokens that an all-to-all brings, beside the sorted inputs, and more than one GPU makes:
before they leave, sorted by the experts of all ranks; and the results as they go back. Source:
megatron/core/transformer/moe/token_dispatcher.py, 2025, MoEAlltoAllTokenDispatcher."""

AttentionKind = Literal["softmax", "linear"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Bias = bool | Literal["attention", "qkv", "mlp", "not_qkv"]
"""Which matrices have a bias: all or none, or those of attention, of its inputs, of the MLP, or all
but those of attention's inputs."""
Load = Annotated[float, Quantity(least=1, most=1000)]
Few = Annotated[float, Quantity(least=0, most=100)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What eager code of a model type keeps beside what Llama's does, in elements.

    `norms` are those of an element that a norm reads, beside its input and its output (Llama's: a
    copy in fp32 and the normalized input, in place of the input: 2). `function` are those of a
    column between the products of an MLP, negative where one of them is not needed. Where one
    product has made all of queries, keys and values it stays `merged` as long as one of them;
    `copies` are those of an element of the queries, such as the output of attention in another
    order behind rotary embeddings of some columns. With `wide_router` its input is copied to fp32.
    `scores` are those of a score of a type that has no fused attention (0: it has).

    Source: transformers 5.23, models/*/modeling_*.py; `benchmarks/formulas.py` traces them.
    """

    norms: Few = 0.0
    function: Annotated[float, Quantity(least=-1, most=100)] = 0.0
    merged: bool = False
    copies: Few = 0.0
    wide_router: bool = False
    scores: Few = 0.0

    def __post_init__(self) -> None:
        """Refuse what no code can be."""
        check(self, "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Attention and MLP layers of width `hidden`.

    `gated` MLPs have three matrices, `attention_gate` is one more matrix in attention; `attention`
    "linear" keeps no scores. `kv_heads` and `head_dim` of 0 mean `heads` and hidden / heads.
    A token of a `causal` one sees those before it only; with `dropout` masks are kept, too. Layers
    in turn see as many tokens as `windows` say (0: all of them). A layer has `norms` norms over its
    width, and a `qk_norm`; with `sinks` every head has one number more. `latent` attention and
    `experts` stand in place of the plain ones, and a `scan` in place of attention in all but one of
    `full_every` layers (0: in all). An `ffn` of 0 means no MLP. With a `pattern` each layer is one
    of them alone, by a letter: M is a scan, * attention, - an MLP (as Megatron-LM writes hybrids).
    With `parallel` norms have one input. `code` says what its eager code keeps, where that is not
    Llama's. Sequences are packed of documents of `document` tokens (0: of one), between which there
    is no attention.
    """

    layers: int
    hidden: int
    heads: int = 0
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    attention: AttentionKind = "softmax"
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
    scan: Scan | None = None
    full_every: int = 0
    pattern: str = ""
    parallel: bool = False
    code: Code | None = None
    document: int = 0

    @property
    def unfused_norm(self) -> float:
        """Elements that eager norms keep of one that they read, beside input and output."""
        if self.code and self.code.norms:
            return self.code.norms
        return 2.0 if self.norm == "rmsnorm" else 0.0

    def norm_tensors(self, *widths: int) -> tuple[int, ...]:
        """Parameters of norms over some widths."""
        each = {"layernorm": 2, "rmsnorm": 1, "none": 0}[self.norm]
        return tuple(each * width for width in widths if each * width)

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """The layers on samples of `tokens` tokens; equal ones share their operators."""
        made: dict[tuple[_Mixer, bool, bool, int], tuple[AnyOperator, ...]] = {}
        blocks = []
        for index in range(self.layers):
            window = self.windows[index % len(self.windows)] if self.windows else 0
            mixer, mixes = self.parts(index)
            routed = mixes and self.experts is not None and self.experts.of(index)
            seen = window if mixer == "attention" and window < tokens else 0
            kind = mixer, mixes and bool(self.ffn or routed), routed, seen
            if kind not in made:
                made[kind] = _layer(self, tokens, *kind)
            blocks.append(Block(f"layer{index}", made[kind], float(tokens * self.hidden)))
        return tuple(blocks)

    def parts(self, layer: int) -> tuple["_Mixer", bool]:
        """What mixes the tokens of a layer, and whether it may have an MLP or experts."""
        if self.pattern:
            letter = self.pattern[layer]
            return LETTERS[letter], letter == "-"
        attends = not self.scan or bool(self.full_every and (layer + 1) % self.full_every == 0)
        return "attention" if attends else "scan", True


_Mixer: TypeAlias = Literal["attention", "scan", ""]
LETTERS: Mapping[str, _Mixer] = {"M": "scan", "*": "attention", "-": ""}
"""Of layers that are one part alone: what mixes tokens."""


def _layer(
    body: Transformer,
    tokens: int,
    mixer: _Mixer,
    mixed: bool,  # noqa: FBT001
    routed: bool,  # noqa: FBT001
    window: int,
) -> tuple[AnyOperator, ...]:
    """Attention or a scan, then an MLP or experts; norms and sums come last, as tensors do."""
    attend = _latent if body.latent else _attention
    operators: list[AnyOperator] = []
    readers = []  # products with weights of their own that read the input of a part
    if mixer == "attention":
        operators += attend(body, tokens, window)
        readers.append(3 + body.attention_gate if body.gated else 1)
    elif mixer:
        assert body.scan is not None
        h = body.hidden
        operators += [_exchange(tokens, h, "input"), *body.scan.operators(tokens, h)]
        operators.append(_exchange(tokens, h, "output"))
        readers.append(body.scan.readers)
    if mixed:
        operators += _experts(body, tokens) if routed else _mlp(body, tokens)
        readers.append(2 if body.gated else 1)
    more = len(readers)
    if mixer == "attention":
        more = LAYER_CALLS - _MLP_CALLS - min(body.norms, _NORM_CALLS) - sum((1, 3, 1))
    return (*operators, *_around(body, tokens, readers, more))


def _around(
    body: Transformer, tokens: int, readers: Sequence[int], calls: int
) -> tuple[Operator, ...]:
    """The norms of a layer, of which some give its parts their inputs, and its sums."""
    h, before = body.hidden, min(body.norms, len(readers))
    wide = _unfused("norms", body.unfused_norm * h)
    norms = [
        Operator(
            name="norm",
            rows=tokens,
            tensors=body.norm_tensors(h),
            calls=int(index < before),
            kept=h * (1 + (index < before - body.parallel)),  # its input, and that of products
            moved=4.0 * h if index < before else 2.0 * h,
            made=float(h) if index < before else 0.0,
            unfused=(*wide, *((("casts", float(readers[index] * h)),) if index < before else ())),
            parts=("norms",) if index < before else (),
            cut="tokens",
        )
        for index in range(body.norms)
    ]
    masks = float(h) if body.dropout else 0.0  # two of a byte
    return (*norms, Operator(name="sums", rows=tokens, calls=calls, kept=masks, cut="tokens"))


def _unfused(what: Unfused, elements: float) -> tuple[tuple[Unfused, float], ...]:
    return ((what, elements),) if elements else ()


def _biases(
    rows: int, widths: Sequence[int], parts: tuple[Part, ...] = (), keys: int = 0
) -> list[Operator]:
    """Those of products whose columns ranks divide; of queries, keys and values with `keys`."""
    bias = Operator(name="bias", rows=rows, tensors=tuple(widths), parts=parts, cut="width")
    return [replace(bias, key_heads=keys, keyed=(1, 2)) if keys else bias]


def whole_bias(rows: int, width: int, parts: tuple[Part, ...] = ()) -> list[Operator]:
    """That of a product, whole on every rank."""
    return [Operator(name="bias", rows=rows, tensors=(width,), parts=parts)]


def _exchange(rows: int, width: int, side: Literal["input", "output"]) -> TensorExchange:
    return TensorExchange(rows=rows, width=width, side=side, cut="")


def _attention(body: Transformer, tokens: int, window: int) -> tuple[AnyOperator, ...]:
    h, s, heads = body.hidden, tokens, body.heads
    size, keys = body.head_dim or h // heads, body.kv_heads or heads
    q, kv = heads * size, keys * size
    widths = (q, kv, kv, *([q] if body.attention_gate else []))
    biased = {True: (widths, True), "attention": (widths, True), "qkv": (widths[:3], False)}
    biased["not_qkv"] = widths[3:], True
    inputs, output = biased.get(body.bias, ((), False))
    normed = {"none": (), "head": (size, size), "whole": (q, kv)}[body.qk_norm]
    norms = body.norm_tensors(*normed)
    whole = body.qk_norm == "whole"
    product = Product(
        name="queries, keys, values",
        rows=s,
        inner=h,
        columns=sum(widths),
        widths=widths,
        tensors=tuple(h * width for width in widths),
        calls=1,
        kept=float(sum(widths)),
        cut="width",
        along="columns",
        key_heads=keys,
        keyed=(1, 2),
    )
    scores = Attention(
        rows=s,
        heads=heads,
        keys=keys,
        key_heads=keys,
        wide=size,
        value=size,
        length=s,
        softmax=body.attention == "softmax",
        causal=body.causal,
        window=window,
        document=body.document,
        dropout=body.dropout,
        calls=3,
        kept=float(q),
        made=0.0,
        unfused=_unfused_attention(body, tokens, window, q, kv),
        parts=("attention",),
        cut="width",
    )
    last = Product(
        name="output", rows=s, inner=q, columns=h, tensors=(q * h,), calls=1, along="inner"
    )
    return (
        _exchange(s, h, "input"),
        product,
        scores,
        last,
        _exchange(s, h, "output"),
        *(_biases(s, inputs, keys=0 if inputs == widths[3:] else keys) if inputs else []),
        *(whole_bias(s, h) if output else []),
        *(_norms_of_heads(body, s, q, kv, keys) if normed else ()),
        *([_tensors_of_norms(norms, keys if whole else 0)] if norms else []),
        *([Operator(name="sinks", tensors=(heads,), cut="width")] if body.sinks else []),
    )


def _unfused_attention(
    body: Transformer, tokens: int, window: int, q: int, kv: int
) -> tuple[tuple[Unfused, float], ...]:
    code, more = body.code or Code(), 2.0 * (q - kv)
    alone = code.copies * q + (q + kv if code.merged and code.copies else 0.0)
    if code.scores:  # those of eager attention count one already
        alone = code.copies * q + (code.scores - 1) * body.heads * tokens + more
    elif window:
        alone = 0.0
    return (
        *_unfused("keys", more),
        *_unfused("copies", float(q) if kv < q else 3.0 * q),
        *(_unfused("masks", more + tokens) if window and not code.scores else ()),
        *_unfused("code", alone),
    )


def _norms_of_heads(
    body: Transformer, rows: int, queries: int, keyed: int, keys: int
) -> tuple[Operator, Operator]:
    """Of queries, and of keys, which are in `keys` heads."""
    of_queries, of_keys = (
        Operator(
            name="norms of heads",
            rows=rows,
            kept=width,
            unfused=_unfused("norms", body.unfused_norm * width),
            cut="width",
        )
        for width in (queries, keyed)
    )
    return of_queries, replace(of_keys, key_heads=keys)


def _tensors_of_norms(tensors: tuple[int, ...], keys: int) -> Operator:
    """Those of norms of heads, which all ranks have; or, of `keys` heads, of whole vectors."""
    if not keys:
        return Operator(tensors=tensors)
    return Operator(tensors=tensors, cut="width", key_heads=keys, keyed=(1,))


def _latent(body: Transformer, tokens: int, window: int) -> tuple[AnyOperator, ...]:
    """Ranks divide the heads, and all have the latent vectors (Megatron-Core, MLA)."""
    assert body.latent is not None
    h, s, heads, to = body.hidden, tokens, body.heads, body.latent
    wide = to.nope + to.rope
    q, kv, out = heads * wide, heads * (to.nope + to.value), heads * to.value

    def product(inner: int, columns: int, kept: int = 0) -> Product:
        return Product(
            rows=s,
            inner=inner,
            columns=columns,
            tensors=(inner * columns,),
            kept=float(kept),
            cut="width" if kept else "",
            along="columns" if kept else "",
        )

    queries = [product(h, to.q_rank), product(to.q_rank, q, q)] if to.q_rank else [product(h, q, q)]
    scores = Attention(
        rows=s,
        heads=heads,
        keys=heads,
        wide=wide,
        value=to.value,
        length=s,
        causal=body.causal,
        window=window,
        document=body.document,
        dropout=body.dropout,
        latent=True,
        calls=3,
        kept=float(out),
        made=0.0,
        unfused=_unfused("code", heads * to.nope),  # beside values in the product's result
        parts=("attention",),
        cut="width",
    )
    norms = body.norm_tensors(*(rank for rank in (to.q_rank, to.kv_rank) if rank))
    ranks = to.q_rank + to.kv_rank  # before and behind their norms
    more = _unfused("norms", body.unfused_norm * ranks)
    return (
        _exchange(s, h, "input"),
        *queries,
        product(h, to.kv_rank + to.rope),
        product(to.kv_rank, kv, q + out),
        scores,
        replace(product(out, h), along="inner", calls=2),
        _exchange(s, h, "output"),
        Operator(
            name="norms of latent vectors", rows=s, tensors=norms, kept=2.0 * ranks, unfused=more
        ),
    )


def _two_products(  # noqa: PLR0913 - one keyword per number of an MLP
    body: Transformer,
    rows: int,
    width: int,
    *,
    what: str,
    calls: int = 1,
    cut: Cut = "width",
    groups: int = 0,
    merged: bool = False,
    chosen: tuple[int, int] | None = None,
    load: float = 1.0,
) -> tuple[AnyOperator, ...]:
    """To `width` columns, an activation function, and back; of `groups` experts, or one."""
    h, up, many = body.hidden, 2 if body.gated else 1, groups or 1
    first = (many * up * h * width,) if merged else (h * width,) * up
    mlp: tuple[Part, ...] = ("mlp",)
    experts = partial(Product, groups=groups, chosen=chosen, load=load)
    make = partial(experts, rows=rows, calls=calls, parts=mlp)
    return (
        make(
            name="up",
            inner=h,
            columns=up * width,
            widths=(width,) * up,
            tensors=first,
            kept=float(up * width),
            cut=cut,
            along="columns",
            what=what,
        ),
        Operator(
            name="activation",
            rows=rows,
            load=load,
            calls=calls,
            kept=float(width),
            made=float(width),
            alone=float((up + 1) * width),
            unfused=(
                *(_unfused("activations", width) if body.gated else ()),
                *_unfused("code", width * body.code.function if body.code else 0.0),
            ),
            parts=("activation", "mlp"),
            cut=cut,
        ),
        make(
            name="down",
            inner=width,
            columns=h,
            tensors=(many * width * h,),
            unfused=_unfused("experts", h) if groups else (),
            cut="routed" if groups else "",
            along="inner",
        ),
    )


def _mlp(body: Transformer, tokens: int) -> tuple[AnyOperator, ...]:
    s, h = tokens, body.hidden
    mlp: tuple[Part, ...] = ("mlp",)
    biased = body.bias in (True, "mlp", "not_qkv")
    widths = [body.ffn] * (2 if body.gated else 1)
    return (
        replace(_exchange(s, h, "input"), parts=mlp),
        *_two_products(body, s, body.ffn, what="columns of the MLP"),
        replace(_exchange(s, h, "output"), parts=mlp),
        *([*_biases(s, widths, mlp), *whole_bias(s, h, mlp)] if biased else []),
    )


def _router(body: Transformer, to: Experts, tokens: int) -> Product:
    """The scores of all experts for every token."""
    h, n = body.hidden, to.count
    return Product(
        name="router",
        rows=tokens,
        inner=h,
        columns=n,
        tensors=(h * n,),
        wide=True,
        kept=2.0 * n,
        unfused=(
            *(_unfused("experts", h) if to.shared_gate else ()),
            *_unfused("code", 2.0 * h * bool(body.code and body.code.wide_router)),
        ),
        parts=("mlp",),
        cut="router",
    )


def _experts(body: Transformer, tokens: int) -> tuple[AnyOperator, ...]:
    """Tokens are sorted by their experts, which keep the sorted ones; weights are fp32.

    Results are weighed before the last product, so that they need not be kept: Megatron-Core
    0.12, "memory-efficient permutation". Tensor-parallel ranks divide the experts' columns, or
    those of the shared ones only, where each has some of the experts, whole.
    """
    assert body.experts is not None
    to, h, s = body.experts, body.hidden, tokens
    n, k, up = to.count, to.active, 2 if body.gated else 1
    mlp: tuple[Part, ...] = ("mlp",)
    rows, chosen = s * k, (k, n)
    choice = TokenRouting(k, n, h, to.groups, to.active_groups, to.load)

    def exchange(side: Literal["input", "output"]) -> TensorExchange:
        return replace(_exchange(s, h, side), of_experts=not to.shared, parts=mlp)

    there = ExpertExchange(
        rows=rows,
        width=h,
        tokens=choice,
        load=to.load,
        calls=EXPERT_CALLS,
        more_calls=ROUTING_CALLS,
        kept=float(h),
        passing=float(h),
        more_passing=float(_COPIES * h),
        parts=mlp,
        cut="routed",
    )
    back = replace(there, back=True, calls=0, more_calls=0, kept=0.0, passing=0.0, more_passing=0.0)
    shared = _two_products(
        body, s, to.shared, what="columns of the shared experts", calls=0, merged=True
    )
    of_experts = partial(_two_products, cut="experts", groups=n, chosen=chosen, load=to.load)
    routed = of_experts(body, rows, to.width, what="columns of an expert", merged=True)
    biases = [
        Operator(name="bias", tensors=(n * up * to.width,), chosen=chosen, cut="experts"),
        Operator(name="bias", tensors=(n * h,), chosen=chosen, cut="routed"),
    ]
    return (
        exchange("input"),
        _router(body, to, s),
        *(whole_bias(s, n, mlp) if to.bias else []),
        *(shared if to.shared else ()),
        *(whole_bias(s, h, mlp) if to.shared_gate else []),
        there,
        *routed,
        *(biases if to.bias else []),
        back,
        exchange("output"),
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
) -> Model:
    """A decoder or an encoder: embedding, layers, and a head over the vocabulary or some labels.

    `head_transform` is BERT's dense layer and norm before a vocabulary with biases; it stands for
    the final norm. A tied head shares the embedding: its parameters count there, its FLOP here.
    A rank's part of the vocabulary is rounded up. With `labels` the head has as many outputs in
    place of the vocabulary, for every token, and with 0 there is none. `pooler` is a dense layer
    for the first token, and then only this token has a head.
    """
    h, s = body.hidden, tokens
    norm = body.norm_tensors(h)
    others = tuple(size for size in (positions * h, token_types * h) if size)
    embedding = _embedding(body, s, vocab, others, norm=embedding_norm)
    outputs, words = vocab if labels is None else labels, labels is None
    dense, rows = pooler or head_transform, 1 if pooler else s
    tied_to = {"of_vocabulary": words, "tied": tied and words}
    head = _head(body, rows, outputs, dense=dense, biases=head_bias, **tied_to)
    first = Operator(
        name="norm",
        rows=s,
        tensors=norm if final_norm and not head_transform else (),
        calls=HEAD_CALLS,
        kept=2.0 * h * (1 + head_transform),  # with the result of a dense layer, and its function's
        unfused=_unfused("norms", body.unfused_norm * h * final_norm),
        moved=4.0 * h,
        cut="tokens",
    )
    if head_transform:  # its norm and its biases come before the table
        after = (Operator(name="norm", tensors=norm), Table(entries=vocab, width=1))
        head = (*head[:2], *after, *head[2:])
    return Model(
        name,
        (
            Block("embedding", embedding),
            *body.blocks(s),
            Block(
                "head", (_exchange(s, h, "input"), first, *head), float(s * h) if outputs else 0.0
            ),
        ),
        tokens,
        divisible=True,
    )


def _embedding(
    body: Transformer, rows: int, vocab: int, others: tuple[int, ...], *, norm: bool
) -> tuple[AnyOperator, ...]:
    """Look-ups in a vocabulary and in `others`, their sum, and a norm, if any."""
    h = body.hidden
    return (
        Table(entries=vocab, width=h),
        Operator(
            name="embedding",
            rows=rows,
            tensors=(*others, *(body.norm_tensors(h) if norm else ())),
            calls=START_CALLS,
            kept=h * (0.5 * body.dropout + norm),  # a mask of a byte, the norm's input
            unfused=_unfused("norms", body.unfused_norm * h * norm),
            moved=float(h),
            cut="tokens",
        ),
        _exchange(rows, h, "output"),
    )


def _head(
    body: Transformer,
    rows: int,
    outputs: int,
    *,
    of_vocabulary: bool,
    dense: bool,
    tied: bool,
    biases: bool,
) -> tuple[AnyOperator, ...]:
    """A dense layer of two operators, if any, then the product with the outputs, and the loss."""
    h = body.hidden
    made: list[AnyOperator] = []
    if dense:
        made += [Product(rows=rows, inner=h, columns=h, tensors=(h * h,)), *whole_bias(rows, h)]
    if outputs:
        made += [
            Product(
                name="head",
                rows=rows,
                inner=h,
                columns=outputs,
                tensors=() if tied else (h * outputs,),
                along="columns" if of_vocabulary else "",
                padded=of_vocabulary,
                tied=tied,
            ),
            CrossEntropy(rows=rows, columns=outputs, vocabulary=of_vocabulary),
        ]
    if biases:
        made.append(
            Table(entries=outputs, width=1) if of_vocabulary else whole_bias(rows, outputs)[0]
        )
    return tuple(made)
