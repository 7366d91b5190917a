"""What a training framework does with a model: its habits, and the activations that it recomputes.

"full/2" makes every second layer again. Names joined by "+" make operators of every layer again:
what they keep is dropped behind a forward pass, and computed again from what is kept of the layer.

Sources: torchtitan, torchtitan/distributed/activation_checkpoint.py (`_apply_layer_sac` counts the
layers of a rank from 1, and checkpoints those that K divides); Megatron-LM,
megatron/core/transformer/transformer_config.py (`recompute_modules`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, get_args

from co2sim.common.convert import shown
from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import Bytes
from co2sim.common.validation import Quantity
from co2sim.models.operators import (
    Again,
    AnyOperator,
    Attention,
    Block,
    CrossEntropy,
    ExpertExchange,
    Model,
    Part,
    Product,
    TensorExchange,
    Unfused,
)

Factor = Annotated[float, Quantity(least=1, most=100)]

AttentionKernel = Literal["flash", "eager"]
"""flash: one kernel that never writes the scores. eager: products and softmax, scores kept."""

Selective = Literal["scores", "products"]
"""What a framework repeats selectively. scores: those of eager attention (Megatron-LM). products:
all of a layer but attention and every second product with weights, whose results are kept
(torchtitan, torchtitan/distributed/activation_checkpoint.py, op)."""

Checkpointing = Literal["non_reentrant", "reentrant"]
"""How "full" runs a layer again, and "mlp" an MLP. non_reentrant: until the last tensor that the
backward pass needs is there, so not the last product, and not the head (PyTorch,
torch.utils.checkpoint, `set_checkpoint_early_stop`). reentrant: every block, or MLP, as a whole
(Megatron-LM, DeepSpeed)."""

Loss = Literal["fused", "eager"]
"""fused: the cross entropy in one kernel on 16-bit logits. eager: PyTorch's, in fp32."""

ContextKind = Literal["all_gather", "ring", "all_to_all"]
"""How ranks that divide sequences attend to all of them; see `Workload._along`."""

TokenExchange = Literal["flat", "hierarchical"]
"""How tokens travel to experts. flat: to each expert apart. hierarchical: over the network once for
every node with some of their experts, and inside it to these; see `TokenRouting`."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a training framework does with a model: all of a stack that a schedule depends on.

    `attention`, `loss` and `checkpointing` are what it does unless a job says another, `selective`
    what it repeats of a layer on request. `overlap` says whether it reduces gradients while the
    backward pass continues, `overlap_tensor` whether tensor-parallel GPUs exchange activations
    beside the products that need them, `overlap_experts` whether tokens travel to experts beside
    other passes, `experts_all_to_all` whether they cross the network for every expert or for every
    node of experts, and `keep_gathered` whether GPUs keep what they gathered, or gather it again to
    go back. `context` is how ranks that divide sequences exchange keys and values. Where more ranks
    share a layer than it has heads of keys, it `gathers_keys`, with all queries and values, or has
    copies of them. With `main_gradients` it sums gradients of bf16 up in fp32.

    The loss holds `loss_bytes` for each logit on the way forward and back (None: as `loss` says). A
    loop that `keeps_outputs` holds what the model gave until the next step: logits in fp32, keys
    and values. Whole gradients are reduced by way of copies of `reduce_bytes` for a parameter, and
    the optimizer takes `update_bytes` for one while it updates it. With `eager_loading` the context
    of the driver has all kernels. With `stages_by_cost` the memory of a pipeline is that of stages
    of equal work, where the head counts as products do; times are of stages of equal layers. It
    `keeps` activations that others fuse
    away, and `kept` times what then is needed. With `autocast` whole parameters and their gradients
    are in fp32, and products cast them. A `compiled` one fuses chains of elementwise kernels of
    models that were traced.
    """

    attention: AttentionKernel = "flash"
    loss: Loss = "fused"
    checkpointing: Checkpointing = "non_reentrant"
    selective: Selective = "scores"
    overlap: bool = True
    overlap_tensor: bool = False
    overlap_experts: bool = False
    experts_all_to_all: TokenExchange = "flat"
    keep_gathered: bool = False
    context: ContextKind = "all_gather"
    gathers_keys: bool = False
    main_gradients: bool = False
    loss_bytes: tuple[float, float] | None = None
    stages_by_cost: bool = False
    keeps_outputs: bool = False
    reduce_bytes: Bytes = 0.0
    update_bytes: Bytes = 0.0
    eager_loading: bool = False
    keeps: tuple[Unfused, ...] = ()
    kept: Factor = 1.0
    compiled: bool = False
    autocast: bool = False

    def habits(self, **values: Any) -> dict[str, Any]:
        """These fields by name, with the `values` that are not None in their place."""
        chosen = {name: value for name, value in values.items() if value is not None}
        return {field.name: getattr(self, field.name) for field in fields(Framework)} | chosen


Recompute: TypeAlias = str
"""none, selective (what `Selective` says), full (every layer, from its input), full/K (every K-th
layer), or operators joined by "+"."""

OPERATORS: tuple[Part, ...] = get_args(Part)
"""norms: the outputs of those before attention and MLP. attention: scores and their product with
the values, from queries, keys and values. activation: the output of the function between the
products of an MLP. mlp: a whole MLP, or router, exchanges and experts."""

Kind = Literal["none", "selective", "full", "operators"]

_ALONE: tuple[Kind, ...] = ("none", "selective", "full")

_ELSEWHERE = {
    "core_attn": "attention",
    "layernorm": "norms",
    "moe": "mlp",
    "moe_act": "activation",
}
"""What Megatron-LM calls them."""

_ALLOWED = (
    "none, selective, full, full/K for every K-th layer, or operators joined by +:"
    f" {', '.join(OPERATORS)}"
)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What is computed again: a kind, of `full` every how many layers, or which `operators`."""

    kind: Kind
    every: int = 1
    operators: tuple[Part, ...] = ()

    def __str__(self) -> str:
        """In one way, however it was written."""
        if self.operators:
            return "+".join(self.operators)
        return self.kind if self.every == 1 else f"{self.kind}/{self.every}"

    def of(self, operator: Part) -> bool:
        """Whether the operator is made again by its name."""
        return operator in self.operators


@lru_cache(256)
def recomputation(text: str) -> Recomputation:
    """Read "full/2", or "norms+mlp". Raises OptionError for what is no recomputation."""
    kind, divided, every = (part.strip() for part in text.partition("/"))
    if divided:
        return _part_of(text, kind, every)
    for word in _ALONE:
        if text.strip() == word:
            return Recomputation(word)
    parts = [part.strip() for part in text.split("+")]
    for part in parts:
        if part not in OPERATORS:
            raise _unknown(text, part, several=len(parts) > 1)
    if len(set(parts)) < len(parts):
        raise OptionError(f"recompute is {shown(text)}; it names an operator twice")
    return Recomputation("operators", 1, tuple(name for name in OPERATORS if name in parts))


def _part_of(text: str, kind: str, every: str) -> Recomputation:
    """A part of the layers."""
    if kind != "full":
        raise OptionError(
            f"recompute is {shown(text)}; only full is made of a part of the layers: full/2 makes"
            " every second one again"
        )
    if not (every.isascii() and every.isdecimal() and 0 < len(every.lstrip("0")) < len("1000000")):
        raise OptionError(f"recompute is {shown(text)}; full/K needs a whole number of 1 or more")
    return Recomputation("full", int(every))


def _unknown(text: str, part: str, *, several: bool) -> OptionError:
    if several and part in _ALONE:
        return OptionError(f"recompute is {shown(text)}; {part} stands alone")
    close = nearest(_ELSEWHERE.get(part, part), (*OPERATORS, *_ALONE))
    hint = f"; {close}" if close.startswith("did") else ""
    what = f", and {shown(part)} is unknown" if several else ""
    return OptionError(f"recompute is {shown(text)}{what}; it is one of {_ALLOWED}{hint}")


def layers(blocks: Iterable[Block]) -> list[Block]:
    """The blocks that count for full/K: those with an input, but for the head."""
    return [block for block in blocks if block.is_layer]


def check_applies(text: str, model: Model, stages: int = 1, *, gathered: bool = False) -> None:
    """Raise OptionError for a recomputation that makes nothing again.

    `stages` of a pipeline divide the layers. Where products keep their inputs as ranks `gathered`
    them, the outputs of norms are kept with them.
    """
    again, blocks = recomputation(text), model.blocks
    if again.kind == "full" and not any(block.boundary for block in blocks):
        raise OptionError(
            f"recompute={text} does not apply to {model.name}: its blocks have no input sizes"
        )
    most = -(-len(layers(blocks)) // stages)
    if again.every > max(1, most):
        where = f"{model.name} has {most}" if stages == 1 else f"a stage of {model.name} has {most}"
        raise OptionError(f"recompute={text} makes nothing again: {where} layers")
    present = {part for block in blocks for op in block.operators for part in op.parts}
    softmax = any(op.softmax for block in blocks for op in block.of(Attention))
    present -= set() if softmax else {"attention"}
    for operator in again.operators:
        if operator not in present:
            what = "softmax attention" if operator == "attention" else operator
            raise OptionError(
                f"recompute={text} does not apply to {model.name}: its blocks do not say what of"
                f" them is {what}"
            )
    if again.of("norms") and gathered:
        raise OptionError(
            f"recompute={text} saves nothing of norms where products keep what they gathered:"
            " this stack has keep_gathered, which --set stack.keep_gathered=false changes"
        )


@dataclass(frozen=True, slots=True)
class Rerun:
    """How blocks run again: `again`, and what the framework makes of it.

    `every` are the names of the layers that full/K makes again, `stops` says whether a framework
    ends behind the last tensor that the backward pass needs, and `products` whether selective means
    every second product, or the scores of eager attention.
    """

    again: Recomputation
    every: frozenset[str]
    stops: bool
    products: bool

    def whole(self, block: Block) -> bool:
        """Whether a backward pass begins with the block's forward pass."""
        if self.again.kind != "full":
            return False
        if self.again.every > 1:
            return block.name in self.every
        return not self.stops or block.is_layer

    def every_second(self, block: Block) -> bool:
        """Whether a backward pass begins with all but attention and every second product."""
        wanted = self.again.kind == "selective" and self.products
        return wanted and block.is_layer and bool(block.of(Product))

    def of(self, op: Attention) -> bool:
        """Whether a backward pass computes softmax attention alone again, from its operands."""
        scores = self.again.kind == "selective" and not self.products and not op.fused
        return op.softmax and (self.again.of("attention") or scores)

    def marked(self, block: Block) -> Block:
        """The block, whose operators say how they run again."""
        if self.again.kind == "none":
            return block
        if self.again.kind == "full":
            return self._full(block)
        made = [
            _second(op)
            if self.every_second(block)
            else replace(op, again=_scores(op))
            if isinstance(op, Attention) and self.of(op)
            else self._by_part(op)
            for op in block.operators
        ]
        return replace(block, operators=self._stopped(made))

    def _full(self, block: Block) -> Block:
        """Published figures count 8 FLOP for every parameter, those of the head included."""
        if not self.whole(block):
            counted = self.again.every == 1
            return replace(
                block,
                operators=tuple(
                    replace(op, again=Again(flops=1.0)) if counted and op.flops else op
                    for op in block.operators
                ),
            )
        return replace(block, operators=self._stopped([_all(op) for op in block.operators]))

    def _by_part(self, op: AnyOperator) -> AnyOperator:
        if "mlp" in op.parts and self.again.of("mlp"):
            return _all(op)
        if any(self.again.of(part) for part in op.parts if part != "attention"):
            return replace(op, again=Again(1.0, 1.0, op.traffic_alone, op.calls))
        return op

    def _stopped(self, operators: list[AnyOperator]) -> tuple[AnyOperator, ...]:
        """Of those that run again neither the last product nor an exchange behind it has to."""
        products = [i for i, op in enumerate(operators) if isinstance(op, Product)]
        if not (self.stops and products) or operators[products[-1]].again.kernels < 1:
            return tuple(operators)
        for index in range(products[-1], len(operators)):
            op = operators[index]
            if isinstance(op, Product | TensorExchange | ExpertExchange | CrossEntropy):
                operators[index] = replace(op, again=replace(op.again, kernels=0.0))
        return tuple(operators)


def _all(op: AnyOperator) -> AnyOperator:
    return replace(op, again=Again(1.0, 1.0, op.traffic, op.calls))


def _second(op: AnyOperator) -> AnyOperator:
    """Of a layer of which every second product runs again; sums over ranks are kept."""
    products = 0.0 if isinstance(op, Product) and op.count else 0.5
    repeated = {Product: products, TensorExchange: float(getattr(op, "side", "") == "input")}
    part = repeated.get(type(op), 0.0)
    kept = op.traffic if not isinstance(op, Attention) else 2 * (op.kept + op.passing)
    flops = 0.0 if isinstance(op, Attention) and op.softmax else 0.5
    return replace(op, again=Again(flops, part, kept, op.calls))


def _scores(op: Attention) -> Again:
    """Attention again, from queries, keys and values: its output is there."""
    return Again(1.0, 1.0, 2 * op.scores / op.rows if not op.fused else 0.0)
