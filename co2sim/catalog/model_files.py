"""A model as a JSON object: all of its operators, so that it is read as it was written.

`operators` are lists, each of one block or of several that are alike, and a block says the place of
its list. An operator says its `kind` and what is other than in its class.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from co2sim.common.errors import CatalogError, Co2simError, ScheduleError, cut, given
from co2sim.common.validation import first_problem
from co2sim.models.operators import AnyOperator, Block, Model, plain_block
from co2sim.models.scan import ChunkProduct
from co2sim.models.transformer import Experts, LatentAttention, Transformer, language_model
from co2sim.models.vision import vision_transformer

FORMAT = 1
"""What is written; objects without a format are of records before there were operators."""

_MOST_BLOCKS = 10_000
"""A schedule holds every one of them."""
_LARGEST = 1e24
"""Of any number: beyond a year of all computers."""
_FROM_ONE = {
    *("rows", "inner", "columns", "tensors", "widths", "heads", "keys", "wide", "value", "length"),
    *("entries", "width", "ranks", "apart", "load", "cast_steps", "chosen", "tokens"),
}
"""Fields whose numbers are 1 or more; those of all others are 0 or more."""
_LONGEST = 200
"""Of a line about what is missing: each block may lack the same."""
_ENOUGH = 1e-9
"""By how much FLOP of a network may differ that was built again."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Block(_Strict):
    name: str
    operators: Annotated[int, Field(ge=0)]
    boundary: float = 0.0


_Operator = Annotated[AnyOperator | ChunkProduct, Field(discriminator="kind")]
_OPERATORS: TypeAdapter[tuple[AnyOperator, ...]] = TypeAdapter(
    tuple[_Operator, ...], config=ConfigDict(extra="forbid")
)


class _Model(_Strict):
    format: int
    name: str
    tokens: int
    unit: str = "token"
    divisible: bool | Literal["tp"] = False
    assumed: tuple[str, ...] = ()
    undivided: str = ""
    operators: list[list[Any]]
    blocks: Annotated[list[_Block], Field(min_length=1, max_length=_MOST_BLOCKS)]


class _OldBlock(BaseModel):
    """A block of a record before there were operators; what else it says is not read."""

    name: str
    tensors: tuple[int, ...]
    flops: float
    activation_bytes: float
    boundary_bytes: float = 0.0
    experts: tuple[int, ...] = ()


class _OldModel(BaseModel):
    """A model of them. Its `shape` are the arguments that made its network, if any."""

    name: str
    tokens: int
    unit: str = "token"
    blocks: Annotated[list[_OldBlock], Field(min_length=1, max_length=_MOST_BLOCKS)]
    shape: dict[str, Any] | None = None


def model_to_json(model: Model) -> dict[str, Any]:
    """A model as a JSON object."""
    places: dict[int, int] = {}
    lists: list[list[dict[str, Any]]] = []
    for block in model.blocks:
        if id(block.operators) not in places:
            places[id(block.operators)] = len(lists)
            lists.append(_written(block.operators))
    return {
        "format": FORMAT,
        "name": model.name,
        "tokens": model.tokens,
        "unit": model.unit,
        "divisible": model.divisible,
        "assumed": list(model.assumed),
        "undivided": model.undivided,
        "operators": lists,
        "blocks": [
            {
                "name": block.name,
                "operators": places[id(block.operators)],
                "boundary": block.boundary,
            }
            for block in model.blocks
        ],
    }


def model_from_json(tree: object) -> Model:
    """The model of a JSON object, or of a record before there were operators.

    Raises CatalogError for what is no model.
    """
    if not isinstance(tree, Mapping):
        raise CatalogError(f"a model is {given(tree)}; it must be an object")
    try:
        model = _read(tree) if "format" in tree else _of_old(tree)
    except ValidationError as error:
        problem = first_problem(error, path=lambda keys: ".".join(map(str, ("model", *keys))))
        raise CatalogError(cut(problem, _LONGEST)) from None
    except ScheduleError as error:  # of a routing
        raise CatalogError(f"a model's tokens: {error}") from None
    for block in model.blocks:
        _check_numbers("boundary", block.boundary)
    for operators in {id(block.operators): block.operators for block in model.blocks}.values():
        for op in operators:
            numbers = asdict(op)
            unfused = numbers.pop("unfused")  # of some code less is kept than what is fused
            _check_numbers(op.kind, numbers)
            _check_numbers("unfused", [abs(size) for _, size in unfused])
            if op.chosen and op.chosen[0] > op.chosen[1]:
                raise CatalogError(f"a model's chosen is {op.chosen}; none is above the other")
    _check_numbers("tokens", model.tokens)
    if not model.parameters:
        raise CatalogError("a model has no parameters; an operator must have tensors")
    return model


def _written(operators: tuple[AnyOperator, ...]) -> list[dict[str, Any]]:
    rest = _OPERATORS.dump_python(operators, mode="json", exclude_defaults=True)
    return [{"kind": op.kind, **tree} for op, tree in zip(operators, rest, strict=True)]


def _read(tree: Mapping[str, Any]) -> Model:
    if tree["format"] != FORMAT:
        raise CatalogError(
            f"a model's format is {given(tree['format'])}; this version reads {FORMAT}"
        )
    parsed = _Model.model_validate(tree)
    lists = [_OPERATORS.validate_python(operators) for operators in parsed.operators]
    for block in parsed.blocks:
        if block.operators >= len(lists):
            raise CatalogError(
                f"operators of block {given(block.name)} is {block.operators}; the model has"
                f" {len(lists)} lists of them, from 0"
            )
    blocks = tuple(Block(b.name, lists[b.operators], b.boundary) for b in parsed.blocks)
    rest = parsed.model_dump(
        include={"name", "tokens", "unit", "divisible", "assumed", "undivided"}
    )
    return Model(blocks=blocks, **rest)


def _check_numbers(name: str, node: object) -> None:
    """Raise CatalogError for numbers that no operator has: a file may say anything."""
    todo = [(name, node)]
    while todo:
        name, node = todo.pop()
        if isinstance(node, Mapping):
            todo += node.items()
        elif isinstance(node, list | tuple):
            todo += [(name, item) for item in node]
        elif isinstance(node, int | float) and not isinstance(node, bool):
            least = int(name in _FROM_ONE)
            if not least <= node <= _LARGEST:
                raise CatalogError(
                    f"a model's {name} is {given(node)}; it must be {least} to {_LARGEST:g}"
                )


def _of_old(tree: Mapping[str, Any]) -> Model:
    """A network of its shape, or plain blocks where there is none, or another one."""
    old = _OldModel.model_validate(tree)
    made = _network(old)
    if made is not None:
        return made
    blocks = (
        plain_block(
            block.name,
            (*block.tensors, *block.experts),
            block.flops,
            block.activation_bytes,
            block.boundary_bytes,
        )
        for block in old.blocks
    )
    return Model(old.name, tuple(blocks), old.tokens, old.unit)


def _network(old: _OldModel) -> Model | None:
    shape = dict(old.shape or {})
    make: Any = language_model if "vocab" in shape else vision_transformer
    try:
        body = _body(shape.pop("body"))
        if body.layers + 2 != len(old.blocks):  # before as many are made
            return None
        model: Model = make(body=body, **shape)
        return model if _alike(model, old) else None
    except (AttributeError, ArithmeticError, KeyError, TypeError, ValueError, Co2simError):
        return None


def _body(values: dict[str, Any]) -> Transformer:
    nested: dict[str, Any] = {"latent": LatentAttention, "experts": Experts}
    made = {name: values.get(name) and kind(**values[name]) for name, kind in nested.items()}
    return Transformer(**values | made | {"windows": tuple(values.get("windows", ()))})


def _alike(model: Model, old: _OldModel) -> bool:
    """Whether the blocks that the record states are those of the network."""
    return (model.name, model.tokens, model.unit) == (old.name, old.tokens, old.unit) and all(
        before.name == block.name
        and sum(before.tensors) + sum(before.experts) == block.parameters
        and math.isclose(before.flops, block.flops, rel_tol=_ENOUGH)
        for before, block in zip(old.blocks, model.blocks, strict=True)
    )
