"""What a training framework does with a model: its habits, and the activations that it recomputes.

"full/2" makes every second layer again. Names joined by "+" make operators of every layer again:
what they keep is dropped behind a forward pass, and computed again from what is kept of the layer.

Sources: torchtitan, torchtitan/distributed/activation_checkpoint.py (`_apply_layer_sac` counts the
layers of a rank from 1, and checkpoints those that K divides); Megatron-LM,
megatron/core/transformer/transformer_config.py (`recompute_modules`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, get_args

from co2sim.common.convert import shown
from co2sim.common.errors import OptionError, nearest
from co2sim.common.validation import Quantity
from co2sim.models.blocks import Block, Model

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
"""How ranks that divide sequences attend to all of them; see `ContextExchange`."""

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
    go back. `context` is how ranks that divide sequences exchange keys and values. With
    `main_gradients` it sums gradients of bf16 up in fp32; a layer keeps `kept` times the
    activations that its backward pass needs at least.
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
    main_gradients: bool = False
    kept: Factor = 1.0

    def habits(self, **values: Any) -> dict[str, Any]:
        """These fields by name, with the `values` that are not None in their place."""
        chosen = {name: value for name, value in values.items() if value is not None}
        return {field.name: getattr(self, field.name) for field in fields(Framework)} | chosen


Recompute: TypeAlias = str
"""none, selective (what `Selective` says), full (every layer, from its input), full/K (every K-th
layer), or operators joined by "+"."""

Operator = Literal["norms", "attention", "activation", "mlp"]
"""norms: the outputs of those before attention and MLP. attention: scores and their product with
the values, from queries, keys and values. activation: the output of the function between the
products of an MLP. mlp: a whole MLP, or router, exchanges and experts."""

Kind = Literal["none", "selective", "full", "operators"]

OPERATORS: tuple[Operator, ...] = get_args(Operator)

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
    operators: tuple[Operator, ...] = ()

    def __str__(self) -> str:
        """In one way, however it was written."""
        if self.operators:
            return "+".join(self.operators)
        return self.kind if self.every == 1 else f"{self.kind}/{self.every}"

    def of(self, operator: Operator) -> bool:
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
    return [block for block in blocks if block.boundary_bytes and not block.logits]


def check_applies(text: str, model: Model, stages: int = 1, *, gathered: bool = False) -> None:
    """Raise OptionError for a recomputation that makes nothing again.

    `stages` of a pipeline divide the layers. Where products keep their inputs as ranks `gathered`
    them, the outputs of norms are kept with them.
    """
    again, blocks = recomputation(text), model.blocks
    if again.kind == "full" and not any(block.boundary_bytes for block in blocks):
        raise OptionError(
            f"recompute={text} does not apply to {model.name}: its blocks have no input sizes"
        )
    most = -(-len(layers(blocks)) // stages)
    if again.every > max(1, most):
        where = f"{model.name} has {most}" if stages == 1 else f"a stage of {model.name} has {most}"
        raise OptionError(f"recompute={text} makes nothing again: {where} layers")
    present = {
        "norms": any(block.operators and block.operators.norms for block in blocks),
        "attention": any(block.operators and block.scores for block in blocks),
        "activation": any(block.operators for block in blocks),
        "mlp": any(block.operators for block in blocks),
    }
    for operator in again.operators:
        if not present[operator]:
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
