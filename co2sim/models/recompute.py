"""What a backward pass computes again: the values of `--recompute`, and where they apply.

"full/2" makes every second layer again. Names joined by "+" make operators of every layer again:
what they keep is dropped behind a forward pass, and computed again from what is kept of the layer.

Sources: torchtitan, torchtitan/distributed/activation_checkpoint.py (`_apply_layer_sac` counts the
layers of a rank from 1, and checkpoints those that K divides); Megatron-LM,
megatron/core/transformer/transformer_config.py (`recompute_modules`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from co2sim.common.convert import shown
from co2sim.common.errors import OptionError, nearest
from co2sim.models.architecture import Block, Model

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
    for one in _ALONE:
        if text.strip() == one:
            return Recomputation(one)
    parts = [part.strip() for part in text.split("+")]
    for part in parts:
        if part not in OPERATORS:
            raise _unknown(text, part, several=len(parts) > 1)
    if len(set(parts)) < len(parts):
        raise OptionError(f"recompute is {shown(text)}; it names an operator twice")
    return Recomputation("operators", 1, tuple(one for one in OPERATORS if one in parts))


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
    found = {
        "norms": any(block.operators and block.operators.norms for block in blocks),
        "attention": any(block.operators and block.scores for block in blocks),
        "activation": any(block.operators for block in blocks),
        "mlp": any(block.operators for block in blocks),
    }
    for operator in again.operators:
        if not found[operator]:
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
