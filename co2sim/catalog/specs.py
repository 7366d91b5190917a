"""What the TOML files of the catalog, and a user's own, may say; pydantic checks every value."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import signature
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from co2sim.architecture import Attention, Norm, Transformer, language_model, vision_transformer
from co2sim.cluster import GPU, Cluster, KernelTimes, Link
from co2sim.errors import OptionError, UnitError
from co2sim.quantities import Quantity
from co2sim.units import parse
from co2sim.workload import Block, Model


def _number(quantity: Quantity) -> BeforeValidator:
    """A text with a unit, as a number in the unit and the range of the quantity."""

    def read(value: Any) -> float:
        try:
            number = parse(value, quantity.unit)
        except UnitError as error:
            raise ValueError(str(error)) from error
        try:
            return quantity.checked("", number)
        except OptionError as error:
            raise ValueError(f"must be {quantity.allowed}") from error

    return BeforeValidator(read)


def _no_truth(value: Any) -> Any:
    """`true` is no number, though Python takes it for 1."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a whole number")  # noqa: TRY004 - pydantic's
    return value


Count = Annotated[int, BeforeValidator(_no_truth), Field(ge=1, le=10**12)]
Natural = Annotated[int, BeforeValidator(_no_truth), Field(ge=0, le=10**15)]
Depth = Annotated[int, BeforeValidator(_no_truth), Field(ge=1, le=10_000)]
"""Blocks of a model: the schedule holds every one of them."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Built(_Spec):
    """The specification of a dataclass of numbers; `make` is the dataclass."""

    make: ClassVar[Any]

    def build(self) -> Any:
        """The dataclass, in SI units."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        built = {k: v.build() if isinstance(v, _Built) else v for k, v in values.items()}
        return self.make(**built)


T = TypeVar("T", bound=_Built)

_SPECS: dict[Any, type[_Built]] = {}
"""Specifications by dataclass, for those that hold others."""


def _read(hint: Any) -> Any:
    """How a file gives a value of an annotated type."""
    if get_origin(hint) is Annotated:
        kind, quantity = get_args(hint)
        if kind is int:
            return Annotated[
                int, BeforeValidator(_no_truth), Field(ge=quantity.least, le=quantity.most)
            ]
        return Annotated[kind, _number(quantity)]
    if get_origin(hint) in {Union, UnionType}:
        options = [_read(option) for option in get_args(hint)]
        return Union[tuple(options)]  # noqa: UP007 - of a list
    return _SPECS.get(hint, hint)


def _spec(kind: Any, base: type[T], **given: Any) -> type[T]:
    """The specification of a dataclass: its fields, but for those `given` otherwise."""
    hints = get_type_hints(kind, include_extras=True)
    described = {
        field.name: (
            _read(hints[field.name]),
            ... if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    }
    made: type[T] = create_model(kind.__name__, __base__=base, **(described | given))
    made.make = kind
    _SPECS[kind] = made
    return made


_Work: TypeAlias = Annotated[float, _number(Quantity(unit="FLOP", least=1))]
_Fraction: TypeAlias = Annotated[float, _number(Quantity(most=1))]
_Speed: TypeAlias = Annotated[float, _number(Quantity(unit="FLOP/s", least=1))]
_Time: TypeAlias = Annotated[float, _number(Quantity(unit="s", least=0))]


class Attained(_Spec):
    """Attained fraction of peak of an op of this many FLOP."""

    flops: _Work
    value: _Fraction


def _points(value: Any) -> Any:
    """A single number is the efficiency at every size."""
    ends = ("1 FLOP", "1e12 PFLOP")
    return value if isinstance(value, list) else [{"flops": f, "value": value} for f in ends]


class _GPU(_Built):
    def build(self) -> GPU:
        """With its table of efficiencies by rising FLOP."""
        values = dict(self)
        points = sorted((point.flops, point.value) for point in values["efficiency"])
        kernels = values["kernels"] and values["kernels"].build()
        return GPU(**values | {"efficiency": tuple(points), "kernels": kernels})


class _Cluster(_Built):
    def build(self) -> Cluster:
        """The cluster, in SI units."""
        made: Cluster = super().build()
        return made

    @model_validator(mode="after")
    def _sites_need_a_wan(self) -> "_Cluster":
        given = dict(self)
        if (given["sites"] > 1) != (given["wan"] is not None):
            raise ValueError("sites above 1 and [wan] go together: one is given without the other")
        return self


KernelsSpec = _spec(KernelTimes, _Built)
"""`kernels` of a GPU: constants that were fitted to published runs."""

GPUSpec = _spec(
    GPU,
    _GPU,
    peak=(dict[Literal["fp32", "fp16", "bf16"], _Speed], Field(min_length=1)),
    efficiency=(
        Annotated[list[Attained], BeforeValidator(_points), Field(min_length=1)],
        ...,
    ),
    memory_efficiency=(_Fraction, ...),
    launch_overhead=(_Time, ...),
)
"""`gpus/*.toml`: what no kernel attains for sure, a file must say."""

LinkSpec = _spec(Link, _Built, latency=(_Time, ...))
"""`intra`, `inter` and `wan` of a cluster."""

ClusterSpec = _spec(Cluster, _Cluster)
"""`clusters/*.toml`; `gpu` is the table of a GPU."""


class _LayersSpec(_Spec):
    name: str
    layers: Depth
    hidden: Count
    heads: Count
    ffn: Count
    kv_heads: Natural = 0
    head_dim: Natural = 0
    gated: bool = False
    attention: Attention = "softmax"
    attention_gate: bool = False
    bias: bool = False
    norm: Norm = "layernorm"
    parameters: Natural = 0

    @model_validator(mode="after")
    def _heads_divide(self) -> "_LayersSpec":
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}; give head_dim"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self

    def body(self) -> Transformer:
        """The stack of layers."""
        return Transformer(
            **{field.name: getattr(self, field.name) for field in fields(Transformer)}
        )


def _given(spec: BaseModel, make: Callable[..., Model]) -> dict[str, Any]:
    """What a specification says of the keywords of a function."""
    wanted = {name for name, p in signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY}
    return {name: value for name, value in dict(spec).items() if name in wanted}


class TransformerSpec(_LayersSpec):
    """`kind = "transformer"`: a language model."""

    kind: Literal["transformer"]
    vocab: Count
    seq_len: Count
    tied: bool = False
    positions: Natural = 0
    token_types: Natural = 0
    embedding_norm: bool = False
    head_transform: bool = False

    @model_validator(mode="after")
    def _positions_suffice(self) -> "TransformerSpec":
        if 0 < self.positions < self.seq_len:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds the {self.positions} learned positions"
            )
        return self

    def build(self) -> Model:
        """The model's blocks."""
        given = _given(self, language_model)
        return language_model(self.name, self.body(), tokens=self.seq_len, **given)


class ViTSpec(_LayersSpec):
    """`kind = "vit"`: a vision transformer."""

    kind: Literal["vit"]
    image: Count
    patch: Count
    channels: Count = 3
    classes: Count

    @model_validator(mode="after")
    def _patches_fit(self) -> "ViTSpec":
        if self.image % self.patch:
            raise ValueError(f"image {self.image} is not a multiple of patch {self.patch}")
        return self

    def build(self) -> Model:
        """The model's blocks."""
        return vision_transformer(self.name, self.body(), **_given(self, vision_transformer))


class BlockSpec(_Spec):
    """One block of `kind = "blocks"`, `repeat` times; `flops` and `activation` are per sample."""

    name: str
    repeat: Depth = 1
    tensors: list[Count] = Field(min_length=1)
    flops: Annotated[float, _number(Quantity(unit="FLOP", least=0))]
    activation: Annotated[float, _number(Quantity(unit="B", least=0))]


class BlocksSpec(_Spec):
    """`kind = "blocks"`: any chain of blocks, such as a convolutional network."""

    name: str
    kind: Literal["blocks"]
    blocks: list[BlockSpec] = Field(min_length=1)
    image: Natural = 0
    parameters: Natural = 0

    def build(self) -> Model:
        """The model's blocks; repeated ones are numbered."""
        blocks = tuple(
            Block(
                f"{spec.name}.{number}" if spec.repeat > 1 else spec.name,
                tuple(spec.tensors),
                spec.flops,
                spec.activation,
            )
            for spec in self.blocks
            for number in range(spec.repeat)
        )
        return Model(self.name, blocks, tokens=1, unit="image")


class ModelSpec(_Spec):
    """`models/*.toml`, by kind."""

    model: Annotated[TransformerSpec | ViTSpec | BlocksSpec, Field(discriminator="kind")]
