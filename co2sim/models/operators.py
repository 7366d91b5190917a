"""A network as a list of operators: what each computes, moves, keeps, exchanges and has to train.

A model is a chain of blocks, the units of communication and of the schedule; a block is a tuple of
operators in the order of a forward pass. Sizes are those of a sample: an operator works on `rows`,
which are tokens, pixels or samples, and its other sizes are elements of a row in the type that the
model is trained in. Recomputation, adapters, narrow types and attention kernels are functions from
operators to operators, and so is a division among ranks: `divided`.

FLOP count a multiply-add as two. The model FLOP of a token follow PaLM (Chowdhery et al. 2022,
appendix B): 6 for every parameter that multiplies, plus 12 x layers x heads x head_dim x seq_len
for softmax attention, without a discount for causal masks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, Self, TypeAlias, TypeVar

from co2sim.common.errors import OptionError
from co2sim.common.resources import remembered
from co2sim.common.units import Bytes, Flops
from co2sim.schedule.mesh import MESH, Mesh
from co2sim.schedule.schedule import FusedAttention, Gemm
from co2sim.schedule.token_routing import TokenRouting, most_load

Part = Literal["norms", "attention", "activation", "mlp"]
"""What of a layer an operator belongs to, for recomputation by operators."""

Cut = Literal["", "tokens", "width", "router", "experts", "routed"]
"""What tensor-parallel ranks divide of what an operator works on. tokens: the rows, where they
divide the sequence between products. width: the elements of each row. router: as tokens where
experts are divided, else nothing. experts: the rows where ranks have whole experts, else the width.
routed: the rows where ranks have whole experts, else nothing."""

Unfused = Literal["activations", "norms", "keys", "copies", "casts", "masks", "experts", "code"]
"""What a framework keeps besides where it does not fuse it. activations: of gated MLPs the function
of one half, before it multiplies the other. norms: of RMSNorm a copy of its input in fp32, and that
divided by its size. keys: keys and values of fewer heads, as often as there are queries for them.
copies: the output of attention in the order of the next product, and, of as many heads as queries
have, keys and values as one product gave them, beside those with positions. casts: under autocast a
residual stream in fp32, and a copy in 16 bits for each product that reads. masks: where a window
hides tokens of a sequence, a mask of each sample, and keys and values as often as there are queries
(where nothing is hidden, kernels take fewer heads of keys). experts: their results before they are
weighed. code: what only the code of this model type in transformers keeps (`transformer.Code`).
"""

Along = Literal["", "columns", "inner", "heads"]
"""Which dimension of the weights of a product tensor-parallel ranks divide; of products without
weights, of which each head has one, heads."""

FLASH_BACKWARD = 2.5
"""FLOP of FlashAttention's backward pass for one of its forward pass: it has five products instead
of two, as it computes the scores again. Source: Dao 2023, arXiv 2307.08691, section 4.1."""


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


@dataclass(frozen=True, slots=True)
class Again:
    """How an operator runs again at the begin of a backward pass.

    `flops` is the part of its FLOP that published figures count, `kernels` that of its products,
    attention and exchanges which run, `moved` the elements of a row that its other kernels read and
    write, and `calls` how many operations are issued.
    """

    flops: float = 0.0
    kernels: float = 0.0
    moved: float = 0.0
    calls: float = 0


NOT_AGAIN = Again()


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler makes of operators: `exact`, `kept` and `calls` of an `Operator` in it."""

    exact: tuple[float, float]
    kept: float
    calls: float

    def divided(self, ranks: int) -> "Compiled":
        """Of a part of the width."""
        forward, backward = self.exact
        return Compiled((forward / ranks, backward / ranks), self.kept / ranks, self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Any operator, such as a norm; other kinds are special in their kernels or exchanges.

    `tensors` are the elements of its parameters, and those of experts belong to `chosen` of a count
    of experts. `work` are FLOP of a row, `calls` the operations that a framework issues. It keeps
    `kept` elements of a row for its backward pass, of which `made` (None: all) come back when it
    runs again, and `unfused` ones where a framework does not fuse it; it writes and reads `passing`
    more. Its kernels move `moved` elements (None: those
    that are kept and pass, once written and once read), and `alone` when it alone runs again (None:
    those that it makes); a backward pass moves twice as many. `exact` are further elements that
    they move in a forward and in a backward pass, whatever the stack; `compiled` is what a
    framework that compiles has in place of these, where that is known.

    A `frozen` one is not trained. `parts`, `cut` and `again` say what recomputes it, how
    tensor-parallel ranks divide it, and how it runs again; `apart` are the ranks among which its
    experts are divided; the busiest of these gets `load` times the rows of the mean.

    Of its tensors those at the places `keyed` are of keys and values, of `key_heads` heads; of one
    with such heads and no tensors all is. More ranks than heads have copies, each head `copied`
    times.
    """

    kind: Literal["operator"] = "operator"
    name: str = ""
    rows: int = 1
    tensors: tuple[int, ...] = ()
    chosen: tuple[int, int] | None = None
    work: Flops = 0.0
    calls: float = 0
    kept: float = 0.0
    made: float | None = None
    unfused: tuple[tuple[Unfused, float], ...] = ()
    passing: float = 0.0
    moved: float | None = None
    alone: float | None = None
    exact: tuple[float, float] = (0.0, 0.0)
    compiled: Compiled | None = None
    parts: tuple[Part, ...] = ()
    cut: Cut = ""
    frozen: bool = False
    apart: int = 1
    load: float = 1.0
    again: Again = NOT_AGAIN
    key_heads: int = 0
    keyed: tuple[int, ...] = ()
    copied: int = 1

    @property
    def flops(self) -> Flops:
        """Model FLOP of a forward pass over a sample."""
        return self.rows * self.work

    @property
    def elements(self) -> int:
        """Those of its parameters."""
        return sum(self.tensors)

    @property
    def idle(self) -> int:
        """Those of the experts that a token does not pass."""
        if self.chosen is None:
            return 0
        active, count = self.chosen
        return self.elements * (count - active) // count

    @property
    def traffic(self) -> float:
        """Elements of a row that kernels other than products read and write in a forward pass."""
        return 2 * (self.kept + self.passing) if self.moved is None else self.moved

    @property
    def traffic_alone(self) -> float:
        """Those that they move when it alone runs again."""
        if self.alone is not None:
            return self.alone
        return 2 * (self.kept if self.made is None else self.made)

    @property
    def summed(self) -> int:
        """Elements of tensors that several ranks have, and whose gradients they sum up."""
        if self.copied == 1 or self.frozen:
            return 0
        return sum(self.tensors[index] for index in self.keyed)

    def counts(self, mesh: Mesh) -> dict[str, int]:  # noqa: ARG002
        """What tensor-parallel ranks have to divide, by name."""
        return {}

    def with_keys(self, ranks: int, *, gathered: bool = False) -> Self:
        """With a head of keys and values for each of `ranks`, if these are more than the heads.

        Each has a copy of its weights, or all gather what equal parts of the weights make.
        """
        times = ranks // self.key_heads if self.key_heads else 1
        if times <= 1:
            return self
        return self._with_gathered(times) if gathered else self._with_copies(times)

    def _with_gathered(self, times: int) -> Self:
        """With keys and values `times`, but for its tensors."""
        return self if self.tensors else self._with_copies(times)

    def _with_copies(self, times: int) -> Self:
        """With keys and values `times`."""
        tensors = self._copied(self.tensors, times)
        often = 1 if self.tensors else times
        unfused = tuple((what, elements * often) for what, elements in self.unfused)
        return replace(self, tensors=tensors, kept=self.kept * often, unfused=unfused, copied=times)

    def _copied(self, sizes: tuple[int, ...], times: int) -> tuple[int, ...]:
        return tuple(
            size * (times if index in self.keyed else 1) for index, size in enumerate(sizes)
        )

    def divided(self, mesh: Mesh) -> "Operator | None":
        """The part of one rank; None where it has none."""
        _, width = self._ranks(mesh)
        scaled = {
            name: getattr(self, name) / width
            for name in ("work", "kept", "made", "passing", "moved", "alone")
            if getattr(self, name) is not None
        }
        experts = mesh.ep if self.chosen else 1
        return replace(
            self,
            rows=self._rows(mesh),
            tensors=tuple(size // (width * experts) for size in self.tensors),
            apart=experts,
            unfused=tuple((what, elements / width) for what, elements in self.unfused),
            exact=(self.exact[0] / width, self.exact[1] / width),
            compiled=self.compiled and self.compiled.divided(width),
            **scaled,
        )

    def _ranks(self, mesh: Mesh) -> tuple[int, int]:
        """Among how many tensor-parallel ranks its rows are divided, and the elements of each."""
        rows = mesh.tp if mesh.sequence_parallel else 1
        whole = mesh.experts_whole
        return {
            "": (1, 1),
            "tokens": (rows, 1),
            "width": (1, mesh.tp),
            "router": (rows, 1) if mesh.ep > 1 else (1, 1),
            "experts": (mesh.tp, 1) if whole else (1, mesh.tp),
            "routed": (mesh.tp, 1) if whole else (1, 1),
        }[self.cut]

    def _rows(self, mesh: Mesh) -> int:
        """Those of a rank: context-parallel ones have as much of a sequence."""
        even = -(-self.rows // (self._ranks(mesh)[0] * mesh.cp))
        return math.ceil(even * self.load) if mesh.ep > 1 else even


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Operator):
    """Matrix products with weights: rows x `inner` times `inner` x `columns`.

    All samples of a micro-batch are one product. `widths` are the columns of each matrix where
    several are one product. With `groups` the rows divide among as many weights, those of experts,
    in one call. One of a `wide` type is never of a narrow one: those of routers. Tensor-parallel
    ranks divide what lies `along`; a `padded` number of columns is rounded up, others are `what`
    these have to divide, or the inner dimension or the `count` is, if that lies `along`. A `tied`
    one has the weights of another block. Of every sample there are `count` products without weights
    (0: one with weights); a backward pass makes a `remade` one once more, as its kernel does not
    keep the result. All ranks get the `gathered` elements of a row of its results. `narrow` is the
    type of its operands, if any, and weights stay cast for `cast_steps` micro-steps. Weights that
    are stored in fewer bits count as elements of the type of the model, `packed` less than there
    are; each use makes them whole.
    """

    kind: Literal["product"] = "product"  # type: ignore[assignment]  # tells kinds in files apart
    inner: int
    columns: int
    widths: tuple[int, ...] = ()
    groups: int = 0
    wide: bool = False
    along: Along = ""
    padded: bool = False
    what: str = ""
    tied: bool = False
    adapter: bool = False
    count: int = 0
    remade: bool = False
    gathered: int = 0
    narrow: NarrowType | None = None
    cast_steps: int = 1
    packed: int = 0

    @property
    def whole(self) -> int:
        """Elements of its weights, however they are stored."""
        return self.elements + self.packed

    @property
    def idle(self) -> int:
        """Those of the experts that a token does not pass."""
        active, count = self.chosen or (1, 1)
        return self.whole * (count - active) // count

    @property
    def flops(self) -> Flops:
        """Model FLOP of a forward pass over a sample."""
        return 2.0 * self.rows * self.inner * self.columns * (self.count or 1)

    @property
    def shared(self) -> int:
        """Elements of weights that are another block's."""
        return self.inner * self.columns if self.tied else 0

    def gemm(self, samples: int, width: Bytes) -> Gemm:
        """The product over `samples`, for elements of `width` bytes.

        The two products of a backward pass have the same cost: they permute the three dimensions.
        """
        if self.count:
            return Gemm(self.rows, self.inner, self.columns, width, self.count * samples)
        rows, batch = self.rows * samples, 1
        if self.groups:
            batch = min(self.groups, rows)
            rows = -(-rows // batch)
        made = Gemm(rows, self.inner, self.columns, width, batch, grouped=bool(self.groups))
        if self.narrow is None:
            return made
        return replace(made, width=self.narrow.bytes, narrow=self.narrow.peak, result=width)

    def counts(self, mesh: Mesh) -> dict[str, int]:
        """What tensor-parallel ranks have to divide, by name."""
        if not self.what or (self.chosen and mesh.experts_whole):
            return {}
        columns = self.widths[0] if self.widths else self.columns
        return {self.what: {"inner": self.inner, "heads": self.count}.get(self.along, columns)}

    def _with_copies(self, times: int) -> Self:
        whole = super(Product, self)._with_copies(times)
        widths = self._copied(self.widths or (self.columns,), times)
        return replace(
            whole,
            columns=sum(widths),
            widths=widths if self.widths else (),
            kept=self.kept * sum(widths) / self.columns,
        )

    def _with_gathered(self, times: int) -> Self:
        if self.adapter:
            return self
        return replace(self, kept=self._with_copies(times).kept, gathered=self.columns)

    def divided(self, mesh: Mesh) -> "Product | None":
        """The part of one rank: of the columns or of the inner dimension, or of the experts."""
        part = super(Product, self).divided(mesh)
        assert isinstance(part, Product)
        whole = bool(self.chosen) and mesh.experts_whole
        ranks = mesh.tp if self.along and not whole else 1
        inner, columns, count = self.inner, self.columns, self.count
        if self.along == "inner":
            inner //= ranks
        elif self.along == "heads":
            count //= ranks
        else:
            columns = -(-columns // ranks)
        tensors = tuple(size // (ranks * part.apart) for size in self.tensors)
        return replace(
            part,
            inner=inner,
            columns=columns,
            widths=tuple(-(-w // ranks) for w in self.widths) if inner == self.inner else (),
            groups=self.groups // part.apart,
            count=count,
            exact=(part.exact[0] / ranks, part.exact[1] / ranks),
            tensors=(inner * columns,) if self.padded and tensors else tensors,
            packed=self.packed // (ranks * part.apart),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Operator):
    """Parameters of `entries` x `width`, such as a vocabulary. Ranks divide entries, rounded up."""

    kind: Literal["table"] = "table"  # type: ignore[assignment]  # as above
    entries: int
    width: int

    def __post_init__(self) -> None:
        """Its tensor follows from its size."""
        object.__setattr__(self, "tensors", (self.entries * self.width,))

    def divided(self, mesh: Mesh) -> "Table | None":
        """The entries of one rank."""
        return replace(self, entries=-(-self.entries // mesh.tp))


_KEYS = "heads of keys"
"""Of attention: what ranks divide, or have copies of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Operator):
    """Products of queries with keys, and of their scores with values, of every head.

    Queries and keys are `wide` and values `value` elements, and `keys` heads have keys and values.
    Rows see a sequence of `length`; with a `window` (0: none) no more tokens than that. Of a
    `causal` one only half of the scores is needed: eager attention computes the whole, flash
    attention the half (Dao 2023, arXiv 2307.08691, section 3.1). A `fused` one is one kernel, which
    keeps the log-sum-exp of every row in fp32 in place of scores; with `dropout` a mask and the
    scores that it masked are kept, too. Without `softmax` attention is linear: the state of a head
    is `wide` x `value`, and there are no scores. `ranks` divide the sequence. One packed of
    documents of `document` tokens (0: one document) has scores within these alone, by a kernel for
    variable lengths; eager attention computes all, and masks most.

    Source: Krell et al. 2021, arXiv 2107.02027, section 3.2; Dao-AILab/flash-attention,
    flash_attn_varlen_func.
    """

    kind: Literal["attention"] = "attention"  # type: ignore[assignment]  # as above
    heads: int
    keys: int
    wide: int
    value: int
    length: int
    softmax: bool = True
    causal: bool = True
    window: int = 0
    dropout: bool = False
    latent: bool = False
    fused: bool = False
    ranks: int = 1
    document: int = 0

    @property
    def flops(self) -> Flops:
        """Model FLOP of a forward pass over a sample: scores above the diagonal count, too."""
        within = self.within
        pairs = float(self.rows * (within if self.softmax else self.wide))
        if self.softmax and self.window:
            documents = self.length / within
            pairs = self.seen * (2 * within - self.seen) * documents / self.ranks
        return 2.0 * self.heads * (self.wide + self.value) * pairs

    @property
    def within(self) -> int:
        """Tokens of a document: of the whole sequence, unless it is packed of shorter ones."""
        return min(self.document or self.length, self.length)

    @property
    def seen(self) -> int:
        """Tokens that a token sees at most."""
        return min(self.window or self.within, self.within)

    @property
    def scores(self) -> float:
        """Elements that eager attention keeps for a sample: scores, and what dropout adds."""
        often = 2.5 if self.dropout else 1.0
        return often * self.heads * self.rows * self.length if self.softmax else 0.0

    @property
    def traffic(self) -> float:
        """Elements of a row that kernels other than products read and write in a forward pass."""
        written = 2 * (self.kept + self.passing) if self.moved is None else self.moved
        return written if self.fused else written + 2 * self.scores / self.rows

    @property
    def statistics_bytes(self) -> Bytes:
        """What a fused one keeps of a sample instead."""
        return 4.0 * self.heads * self.rows

    def gemms(self, samples: int, width: Bytes) -> tuple[Gemm, Gemm]:
        """Its two products of every head of `samples`, where it is no single kernel."""
        across, heads = self.length if self.softmax else self.wide, self.heads * samples
        return (
            Gemm(self.rows, self.wide, across, width, heads),
            Gemm(self.rows, across, self.value, width, heads),
        )

    def kernel(self, samples: int, width: Bytes, passes: int, again: float) -> FusedAttention:
        """Those of a forward (1), a backward (2) or no pass (0), as one kernel each.

        A forward pass reads queries, keys and values, and writes its output. A backward pass reads
        the gradient of its output, too, and writes three: twice as much.
        """
        flops = self.flops * samples * (0.5 if self.causal else 1.0)
        operands = (self.rows + self.length) * self.heads * self.wide
        operands += (self.rows + self.length) * self.heads * self.value
        back = passes > 1
        return FusedAttention(
            flops * (again + (not back) * passes),
            operands * samples * width * (passes + again),
            self.seen,
            flops * FLASH_BACKWARD * back,
        )

    @property
    def exchanged(self) -> tuple[int, int]:
        """Elements of keys and values of a whole sequence, and of queries of a rank."""
        keys = self.keys * (self.wide + self.value) * self.length
        return keys, self.rows * self.heads * self.wide

    def counts(self, mesh: Mesh) -> dict[str, int]:  # noqa: ARG002
        """What tensor-parallel ranks have to divide, by name."""
        keys = {} if self.latent else {_KEYS: self.keys}
        return {"heads": self.heads, **keys} if self.cut else {}

    def _with_copies(self, times: int) -> Self:
        more = (times - 1) * self.keys * (self.wide + self.value)
        unfused = tuple(
            (what, elements - (more if what in {"keys", "masks"} else 0.0))
            for what, elements in self.unfused
        )
        return replace(self, keys=self.keys * times, unfused=unfused)

    def divided(self, mesh: Mesh) -> "Attention | None":
        """Some of the heads, on a part of the sequence."""
        part = super(Attention, self).divided(mesh)
        assert isinstance(part, Attention)
        _, ranks = self._ranks(mesh)
        return replace(part, heads=self.heads // ranks, keys=self.keys // ranks, ranks=mesh.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorExchange(Operator):
    """Where tensor-parallel ranks exchange activations of `width` elements a row; else nothing.

    At the `input` of products a rank needs the whole of them, and at the `output` the ranks sum up
    their results; a backward pass does so the other way round. With `sequence` every rank holds a
    part of the sequence between the two. One `of_experts` is not there where experts are divided.
    One that `gathers` has of each rank some columns, which all get; backward it sends nothing.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3 (the operators f and g);
    with `sequence` Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2; `gathers`: PyTorch
    2.13, torch/distributed/tensor/parallel/style.py, ColwiseParallel(output_layouts=Replicate()).
    """

    kind: Literal["tensor exchange"] = "tensor exchange"  # type: ignore[assignment]  # as above
    side: Literal["input", "output"]
    width: int
    of_experts: bool = False
    gathers: bool = False
    sequence: bool = False
    ranks: int = 1

    def divided(self, mesh: Mesh) -> "TensorExchange | None":
        """With the ranks; None where there is nothing to exchange."""
        if mesh.tp == 1 or (self.of_experts and mesh.ep > 1):
            return None
        rows = self._rows(mesh)
        return replace(self, rows=rows, ranks=mesh.tp, sequence=mesh.sequence_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange(Operator):
    """Where tokens are sorted by their experts, and go to the ranks that have these; or come back.

    Each has `width` elements. What ranks that divide experts do besides are `more_calls`, and
    `more_passing` elements a row. Those that send are `stride` apart. Tensor-parallel ranks may
    exchange tokens, too, of `elements_joined`. gathered: each has sent some, all work on all of
    them, and a part of the sums of their results goes back. summed: all have sent the same, and sum
    up their results. dropped: each has sent some of what all have, and all get the results.

    Sources: Lepikhin et al. 2020, GShard, arXiv 2006.16668, section 3.1; gathered: Megatron-Core,
    megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher; summed, dropped:
    DeepSpeed, deepspeed/moe/sharded_moe.py, MOELayer (drop_tokens, gather_tokens).
    """

    kind: Literal["expert exchange"] = "expert exchange"  # type: ignore[assignment]  # as above
    width: int
    tokens: TokenRouting
    back: bool = False
    more_calls: int = 0
    more_passing: float = 0.0
    elements_sent: int = 0
    elements_joined: int = 0
    joined: Literal["", "gathered", "summed", "dropped"] = ""
    ranks: int = 1
    stride: int = 1

    def divided(self, mesh: Mesh) -> "ExpertExchange | None":
        """Of the tokens of one rank."""
        part = super(ExpertExchange, self).divided(mesh)
        assert isinstance(part, ExpertExchange)
        if mesh.ep == 1:
            return part
        senders = mesh.tp if mesh.sequence_parallel or mesh.experts_whole else 1
        even = -(-self.rows // (senders * mesh.cp))
        joined: Literal["", "gathered", "summed", "dropped"] = ""
        elements = part.rows * self.width
        if not mesh.experts_whole:
            joined = "gathered" if mesh.sequence_parallel else "summed"
        elif mesh.tp > 1 and not mesh.sequence_parallel:
            joined, elements = "dropped", -(-self.rows // mesh.cp) * self.width
        return replace(
            part,
            ranks=mesh.ep,
            stride=mesh.etp,
            joined=joined,
            elements_joined=elements if joined else 0,
            calls=self.calls + self.more_calls,
            passing=self.passing + self.more_passing,
            elements_sent=math.ceil(even * self.width * self.load),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(Operator):
    """The cross entropy of rows over `columns`: a vocabulary that ranks divide, or labels.

    `eager` is PyTorch's, in fp32; else it is one kernel. Tensor-parallel ranks compare their parts
    of a vocabulary.
    """

    kind: Literal["cross entropy"] = "cross entropy"  # type: ignore[assignment]  # as above
    columns: int
    vocabulary: bool = True
    eager: bool = False
    ranks: int = 1

    @property
    def logits(self) -> int:
        """Those of a sample."""
        return self.rows * self.columns

    @property
    def traffic(self) -> float:
        """Elements of a row that kernels read and write in a forward pass; twice in a backward one.

        fused: the logits are read, then read again and overwritten by their gradient (flash-attn 2,
        `flash_attn/ops/triton/cross_entropy.py`). eager: in fp32, as the calibrated runs have it.
        """
        return (4.0 if self.eager else 1.0) * self.columns

    def divided(self, mesh: Mesh) -> "CrossEntropy | None":
        """Over a part of the vocabulary."""
        part = super(CrossEntropy, self).divided(mesh)
        assert isinstance(part, CrossEntropy)
        ranks = mesh.tp if self.vocabulary else 1
        return replace(part, columns=-(-self.columns // ranks), ranks=ranks)


AnyOperator: TypeAlias = (
    Operator | Product | Table | Attention | TensorExchange | ExpertExchange | CrossEntropy
)


_Kind = TypeVar("_Kind", bound=Operator)


@dataclass(frozen=True, slots=True)
class Block:
    """The unit of communication and of the schedule: an embedding, a layer, a head.

    `boundary` are the elements of a sample's input (0: not known, or there is none).
    """

    name: str
    operators: tuple[AnyOperator, ...]
    boundary: float = 0.0

    def __hash__(self) -> int:
        """Of little of it: equal blocks of a model share their operators, which takes no time."""
        return hash((self.name, len(self.operators), self.boundary))

    def of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """Its operators of a kind."""
        return tuple(op for op in self.operators if isinstance(op, kind))

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of each parameter tensor in forward order, but for experts of some ranks."""
        return self._tensors(frozen=True, apart=False)

    @property
    def experts(self) -> tuple[int, ...]:
        """Those of experts that ranks divide."""
        return self._tensors(frozen=True, apart=True)

    @property
    def trained_tensors(self) -> tuple[int, ...]:
        """Those of `tensors` that are trained."""
        return self._tensors(frozen=False, apart=False)

    @property
    def trained_experts(self) -> tuple[int, ...]:
        """Those of `experts` that are trained."""
        return self._tensors(frozen=False, apart=True)

    def _tensors(self, *, frozen: bool, apart: bool) -> tuple[int, ...]:
        return tuple(
            size
            for op in self.operators
            if (op.apart > 1) == apart and (frozen or not op.frozen)
            for size in op.tensors
        )

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(op.elements for op in self.operators)

    @property
    def trained(self) -> int:
        """Elements of all tensors that are trained."""
        return sum(op.elements for op in self.operators if not op.frozen)

    @property
    def idle(self) -> int:
        """Those of the experts that a token does not pass."""
        return sum(op.idle for op in self.operators)

    @property
    def packed(self) -> int:
        """By how many elements weights that are stored in fewer bits count less."""
        return sum(op.packed for op in self.of(Product))

    @property
    def tied(self) -> int:
        """Elements of another block's parameters that it uses."""
        return sum(op.shared for op in self.of(Product))

    @property
    def trained_tied(self) -> int:
        """Those of `tied` that it has a gradient for."""
        return sum(op.shared for op in self.of(Product) if not op.frozen)

    @property
    def flops(self) -> Flops:
        """Model FLOP of a forward pass over a sample."""
        return sum(op.flops for op in self.operators)

    @property
    def logits(self) -> int:
        """Elements of the output over a vocabulary, or labels, of a sample."""
        return sum(op.logits for op in self.of(CrossEntropy))

    @property
    def is_layer(self) -> bool:
        """Whether it can run again from its input, and is not the head."""
        return bool(self.boundary) and not self.logits

    def untied(self) -> "Block":
        """The same with its own weights."""
        return replace(
            self,
            operators=tuple(
                replace(op, tied=False, tensors=(*op.tensors, op.shared))
                if isinstance(op, Product) and op.tied
                else op
                for op in self.operators
            ),
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a chain of blocks. A sample holds `tokens` tokens, or is an image or a latent: 1.

    A `divisible` one says of each operator how ranks divide it; with "tp" tensor-parallel ones
    alone do. `undivided` says why its module's plan does not divide it. `assumed` is what was not
    known as a module was traced.
    """

    name: str
    blocks: tuple[Block, ...]
    tokens: int
    unit: str = "token"
    divisible: bool | Literal["tp"] = False
    assumed: tuple[str, ...] = ()
    undivided: str = ""

    @property
    def parameters(self) -> int:
        """All parameters, however they are stored; a tied embedding counts once."""
        return sum(block.parameters + block.packed for block in self.blocks)

    @property
    def stored(self) -> int:
        """Elements of the type of the model that they are stored as."""
        return sum(block.parameters for block in self.blocks)

    @property
    def trained_parameters(self) -> int:
        """Those that are trained: all, or adapters."""
        return sum(block.trained for block in self.blocks)

    @property
    def trained_experts(self) -> int:
        """Those of experts that ranks divide."""
        return sum(sum(block.trained_experts) for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Those that a token passes: all, but for experts that it does not."""
        return self.parameters - sum(block.idle for block in self.blocks)

    @property
    def first_trained(self) -> int:
        """The first block of which something is trained: those before have no backward pass."""
        trained = (i for i, block in enumerate(self.blocks) if block.trained or block.trained_tied)
        return next(trained, 0)

    @property
    def flops_per_sample(self) -> Flops:
        """Model FLOP of a training step on one sample: three forward passes, if all is trained."""
        return sum(
            block.flops + (backward_flops(block) if index >= self.first_trained else 0.0)
            for index, block in enumerate(self.blocks)
        )


def backward_flops(block: Block) -> Flops:
    """Model FLOP of a backward pass over a sample: of a frozen product one of two is needed."""
    return sum(
        op.flops * (1 if op.frozen and not isinstance(op, Attention) else 2)
        for op in block.operators
    )


def plain_block(
    name: str, tensors: Iterable[int], flops: Flops, kept: Bytes, boundary: Bytes = 0.0
) -> Block:
    """A block of which no more is known, on a sample in a 2-byte type."""
    whole = Operator(tensors=tuple(tensors), work=flops, kept=kept / 2)
    return Block(name, (whole,), boundary / 2)


def kinds(model: Model) -> tuple[int, ...]:
    """For every block the place of the first one that is equal but for its name."""
    return _kinds(model)


@remembered(objects=1, most=64)
def _kinds(model: Model) -> tuple[int, ...]:
    different: list[tuple[int, Block]] = []
    firsts: list[int] = []
    for index, block in enumerate(model.blocks):
        alike = (
            first
            for first, other in different
            if (other.boundary, other.operators) == (block.boundary, block.operators)
        )
        first = next(alike, None)
        if first is None:
            different.append((index, block))
        firsts.append(index if first is None else first)
    return tuple(firsts)


def shard_model(model: Model, mesh: Mesh, *, gathers_keys: bool = False) -> Model:
    """What one GPU of a stage has of a model: of its layers, its experts, and of sequences.

    Of the experts it has as many as any other of `ep` GPUs, each whole or one of `etp` parts; of
    every sequence equal parts of its begin and of its end, so that all of `cp` GPUs see equally
    many tokens. Of fewer heads of keys than GPUs of a layer these have copies, unless it
    `gathers_keys`.

    Raises OptionError for a model that cannot be divided so.
    """
    return _sharded(model, mesh.inside, gathers_keys)


@remembered(objects=1, most=64)
def _sharded(model: Model, mesh: Mesh, gathered: bool) -> Model:  # noqa: FBT001
    _check_divides(model, mesh)
    parts: dict[int, tuple[AnyOperator, ...]] = {}
    for block in model.blocks:
        key = id(block.operators)
        if key not in parts:
            keyed = (op.with_keys(mesh.tp, gathered=gathered) for op in block.operators)
            made = (op.divided(mesh) for op in keyed)
            parts[key] = tuple(op for op in made if op is not None)
    ranks = mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)
    blocks = (
        Block(block.name, parts[id(block.operators)], block.boundary / ranks)
        for block in model.blocks
    )
    return replace(model, blocks=tuple(blocks))


def _check_divides(model: Model, mesh: Mesh) -> None:
    allowed = MESH if model.divisible is True else (model.divisible or "",)
    usual = Mesh()
    used = {n: size for n in MESH if (size := getattr(mesh, n)) != getattr(usual, n)}
    for name in (name for name in used if name not in allowed):
        why = model.undivided or (
            "of a traced module tp alone divides"
            if model.divisible
            else "only transformers of the catalog divide, and by tp modules with a tp_plan"
        )
        raise OptionError(f"{name}={str(used[name]).lower()} does not apply to {model.name}: {why}")
    tokens = model.tokens
    for option, is_used in (
        ("sequence_parallel=true", mesh.sequence_parallel),
        (f"cp={mesh.cp}", mesh.cp > 1),
    ):
        if is_used and model.unit != "token":
            raise OptionError(f"{option} does not apply to {model.name}, of {model.unit}s")
    different = {id(block.operators): block.operators for block in model.blocks}.values()
    counts: dict[str, int] = {}
    for op in chain.from_iterable(different):
        counts |= op.counts(mesh)
    if mesh.sequence_parallel:
        counts["positions of a sequence"] = tokens // mesh.cp
    if tokens % (2 * mesh.cp) and mesh.cp > 1:
        raise OptionError(
            f"cp={mesh.cp} does not divide the {tokens} positions of {model.name} into two"
            " parts for each"
        )
    for what, count in counts.items():
        copied = what == _KEYS and model.divisible is True and mesh.tp > count
        if mesh.tp % count if copied else count % mesh.tp:
            also = ", nor is it a multiple of them" if copied else ""
            raise OptionError(
                f"tp={mesh.tp} does not divide the {count} {what} of {model.name}{also}"
            )
    if mesh.ep > 1 or mesh.etp > 1:
        _check_experts(model, mesh)


def _check_experts(model: Model, mesh: Mesh) -> None:
    routing = next((op.tokens for block in model.blocks for op in block.of(ExpertExchange)), None)
    if routing is None:
        raise OptionError(
            f"{mesh.expert_words} needs a model with experts, and {model.name} has none"
        )
    if mesh.ep == 1:
        return
    if routing.count % mesh.ep:
        raise OptionError(
            f"ep={mesh.ep} does not divide the {routing.count} experts of {model.name}"
        )
    most = most_load(routing.active, routing.count, mesh.ep)
    if routing.load > most:
        raise OptionError(
            f"experts.load is {routing.load:g}; with ep={mesh.ep} one GPU gets at most {most:g}"
            f" times the mean of {model.name}'s tokens"
        )
