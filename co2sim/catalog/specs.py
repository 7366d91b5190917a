"""What the TOML files of clusters and GPUs, and a user's own, may say; pydantic checks them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from importlib import resources
from inspect import signature
from operator import attrgetter
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
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from co2sim.catalog.facts import Tree
from co2sim.common.errors import OptionError, UnitError
from co2sim.common.errors import given as shown
from co2sim.common.units import Unit, counted, parse, parse_price
from co2sim.common.validation import Quantity
from co2sim.hardware.cluster import (
    GPU,
    AttentionSpeed,
    Calls,
    Cluster,
    HostEffects,
    KernelTimes,
    Link,
    ProductSpeed,
    Scatter,
    TokenBucket,
)
from co2sim.hardware.contract import Contract
from co2sim.hardware.fabric import MOST_CARDS, Fabric, Tier
from co2sim.hardware.failures import Failures, SizedFailures
from co2sim.models.delta_rule import DeltaRule
from co2sim.models.operators import Model, plain_block
from co2sim.models.scan import Scan
from co2sim.models.ssd import SSD
from co2sim.models.transformer import (
    LETTERS,
    Bias,
    Code,
    Experts,
    LatentAttention,
    Transformer,
    language_model,
)
from co2sim.models.vision import diffusion_transformer, vision_transformer
from co2sim.training.optimizer import Optimizer
from co2sim.training.stack import Runs, Setting, Stack


def number(quantity: Quantity) -> BeforeValidator:
    """A text with a unit, as a number in the unit and the range of the quantity."""

    def read(value: Any) -> float:
        try:
            amount = parse(value, quantity.unit)
        except UnitError as error:
            raise ValueError(str(error)) from error
        try:
            return quantity.checked("", amount)
        except OptionError as error:
            raise ValueError(f"must be {quantity.allowed_for(amount)}") from error

    return BeforeValidator(read)


def no_truth(value: Any) -> Any:
    """Refuse `true` and `false`, which Python would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number")  # noqa: TRY004 - pydantic's
    return value


Count = Annotated[int, BeforeValidator(no_truth), Field(ge=1, le=10**12)]
Natural = Annotated[int, BeforeValidator(no_truth), Field(ge=0, le=10**15)]
Depth = Annotated[int, BeforeValidator(no_truth), Field(ge=1, le=10_000)]
"""Blocks of a model: the schedule holds every one of them."""


class Spec(BaseModel):
    """A table in which any name that is not a field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _built(value: Any) -> Any:
    """What a specification, or each of a list or a table, stands for."""
    if isinstance(value, _Built):
        return value.build()
    if isinstance(value, dict):
        return {name: _built(inner) for name, inner in value.items()}
    return tuple(map(_built, value)) if isinstance(value, list) else value


class _Built(Spec):
    """The specification of a dataclass of numbers; `make` is the dataclass."""

    make: ClassVar[Any]

    def build(self) -> Any:
        """The dataclass, in SI units."""
        return self.make(**{name: _built(value) for name, value in self})


T = TypeVar("T", bound=_Built)

_SPECS: dict[Any, type[_Built]] = {}
"""Specifications by dataclass, for those that hold others."""


def _read(hint: Any) -> Any:
    """How a file gives a value of an annotated type."""
    if get_origin(hint) is Annotated:
        kind, quantity = get_args(hint)
        if kind is int:
            return Annotated[
                int, BeforeValidator(no_truth), Field(ge=quantity.least, le=quantity.most)
            ]
        return Annotated[kind, number(quantity)]
    if get_origin(hint) in {Union, UnionType}:
        options = [_read(option) for option in get_args(hint)]
        return Union[tuple(options)]  # noqa: UP007 - of a list
    return _SPECS.get(hint, hint)


def _spec(kind: Any, base: type[T], **replaced: Any) -> type[T]:
    """The specification of a dataclass: its fields, but for those `replaced`."""
    hints = get_type_hints(kind, include_extras=True)
    described = {
        field.name: (
            _read(hints[field.name]),
            ... if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    }
    made: type[T] = create_model(kind.__name__, __base__=base, **(described | replaced))
    made.make = kind
    _SPECS[kind] = made
    return made


_Work: TypeAlias = Annotated[float, number(Quantity(unit="FLOP", least=1))]
_Fraction: TypeAlias = Annotated[float, number(Quantity(most=1))]
_Speed: TypeAlias = Annotated[float, number(Quantity(unit="FLOP/s", least=1))]
_Time: TypeAlias = Annotated[float, number(Quantity(unit="s", least=0))]
_Price: TypeAlias = Annotated[float, number(Quantity(unit="USD/s", least=0))]


class Attained(_Built):
    """Attained fraction of peak of an op of this many FLOP."""

    make: ClassVar[Any] = staticmethod(lambda flops, value: (flops, value))
    flops: _Work
    value: _Fraction


def _points(value: Any) -> Any:
    """A single number is the efficiency at every size."""
    ends = ("1 FLOP", "1e12 PFLOP")
    return value if isinstance(value, list) else [{"flops": f, "value": value} for f in ends]


class AttainedAttention(_Built):
    """Attained fraction of peak of flash attention over sequences of this length."""

    make: ClassVar[Any] = staticmethod(lambda length, value: (length, value))
    length: Annotated[int, BeforeValidator(no_truth), Field(ge=1)]
    value: _Fraction


def _rising(name: str) -> AfterValidator:
    """A list by rising values of a field."""
    return AfterValidator(lambda rows: sorted(rows, key=attrgetter(name)))


_OneOrTable: TypeAlias = Annotated[
    Annotated[_Fraction, Tag("[number]")]
    | Annotated[list[AttainedAttention], Field(min_length=1), _rising("length"), Tag("[table]")],
    Discriminator(lambda value: "[table]" if isinstance(value, list) else "[number]"),
]


def _in_usd(contract: Mapping[str, Any], read: Callable[..., str]) -> dict[str, Any]:
    """A contract with its prices as `read` writes them, whatever their currency."""
    values = dict(contract)
    for name, unit in (("storage_price", "USD/B/s"), ("egress_price", "USD/B")):
        if name in values:
            values[name] = read(f"contract.{name}", values[name], unit)
    if isinstance(reserved := values.get("reserved"), Mapping):
        values["reserved"] = {
            term: read(f"contract.reserved.{term}", price) for term, price in reserved.items()
        }
    return values


class _Cluster(_Built):
    @model_validator(mode="before")
    @classmethod
    def _a_price_names_its_currency(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if "currency" in values:
            raise ValueError("currency: it stands with the price, as in price_per_gpu = '2 EUR/h'")
        prices: dict[str, Any] = {}
        currencies: set[str] = set()

        def read(path: str, text: Any, unit: Unit = "USD/s") -> str:
            try:
                value, currency = parse_price(text, unit)
            except UnitError as error:
                raise ValueError(f"{path}: {error}") from error
            currencies.add(currency)
            return f"{value!r} {unit}"

        for name in ("price_per_gpu", "price_low", "price_high"):
            if values.get(name) is not None:
                prices[name] = read(name, values[name])
        if isinstance(contract := values.get("contract"), Mapping):
            prices["contract"] = _in_usd(contract, read)
        if len(currencies) > 1:
            raise ValueError(
                f"price_per_gpu, its range and the contract are in"
                f" {' and '.join(sorted(currencies))}"
            )
        return {**values, **prices, **({"currency": currencies.pop()} if currencies else {})}

    @model_validator(mode="after")
    def _sites_need_a_wan(self) -> "_Cluster":
        values = dict(self)
        if (values["sites"] > 1) != (values["wan"] is not None):
            raise ValueError("sites above 1 and [wan] go together: one is given without the other")
        return self

    @model_validator(mode="after")
    def _a_node_holds_its_cards(self) -> "_Cluster":
        values = dict(self)
        gpus, fabric = values["gpus_per_node"], values["fabric"]
        most = MOST_CARDS * gpus
        if fabric and fabric.nics and fabric.nics > most:
            raise ValueError(
                f"fabric.nics is {fabric.nics}; it must be at most {most} on nodes of"
                f" {counted(gpus, 'GPU')}"
            )
        return self


KernelsSpec = _spec(
    KernelTimes,
    _Built,
    attention_efficiency=(_OneOrTable | None, None),
)
"""`kernels` of a GPU: constants that were fitted to published runs."""

for _plain in (ProductSpeed, Calls, TokenBucket, HostEffects, Experts, LatentAttention, Code):
    _spec(_plain, _Built)  # after those that it holds

AttentionSpec = _spec(AttentionSpeed, _Built)
"""`attention.NAME` of a GPU: an implementation of flash attention."""

GPUSpec = _spec(
    GPU,
    _Built,
    attention=(dict[str, AttentionSpec], {}),  # type: ignore[valid-type]
    peak=(
        dict[Literal["fp32", "fp16", "bf16", "fp8", "fp4", "mxfp4"], _Speed],
        Field(min_length=1),
    ),
    efficiency=(Annotated[list[Attained], BeforeValidator(_points), _rising("flops")], []),
    memory_efficiency=(_Fraction, ...),
    launch_overhead=(_Time, ...),
)
"""`gpus/*.toml`: what no kernel attains for sure, a file must say."""

TierSpec = _spec(Tier, _Built)
"""`leaf` and `spine` of a fabric."""

FabricSpec = _spec(Fabric, _Built)
"""`fabric` of a cluster."""

LinkSpec = _spec(Link, _Built, latency=(_Time, ...))
"""`intra`, `inter` and `wan` of a cluster."""

ScatterSpec = _spec(Scatter, _Built)
"""`scatter` of a cluster that was probed."""

SizedFailuresSpec = _spec(SizedFailures, _Built)
"""`by_size` of failures."""


FailuresSpec = _spec(
    Failures,
    _Built,
    by_size=(Annotated[list[SizedFailuresSpec], _rising("gpus")], []),  # type: ignore[valid-type]
)
"""`failures/*.toml`, and `failures` of a cluster."""

ContractSpec = _spec(Contract, _Built, reserved=(dict[str, _Price], {}))
"""`contract` of a cluster."""

ClusterSpec = _spec(Cluster, _Cluster)
"""`clusters/*.toml`; `gpu` is the table of a GPU."""


SettingSpec = _spec(Setting, _Built)
"""`measured` of a stack: a run that it was calibrated by."""

RunsSpec = _spec(Runs, _Built)
"""`runs` of a stack: a strategy that it can run."""


StackSpec = _spec(
    Stack,
    _Built,
    kernels=(dict[str, KernelsSpec], {}),  # type: ignore[valid-type]
    measured=(list[SettingSpec], []),  # type: ignore[valid-type]
    runs=(list[RunsSpec], []),  # type: ignore[valid-type]
)
"""`stacks/*.toml`."""

OptimizerSpec = _spec(Optimizer, _Built, others=(None, None))
"""`optimizers/*.toml`; what `others` names or says is made apart."""


SCANS: Mapping[str, type[Scan]] = {"ssd": SSD, "delta_rule": DeltaRule}
"""Kinds of layers without attention, of which each has a file: `scan` of a model."""

_Scan: Any = Annotated[
    Union[tuple(_spec(kind, _Built) for kind in SCANS.values())],  # noqa: UP007 - of a list
    Discriminator("kind"),
]


class _Layers(_Built):
    name: str
    parameters: Natural = 0

    @model_validator(mode="after")
    def _parts_are_there(self: Any) -> Any:
        if (wrong := set(self.pattern) - set(LETTERS)) or len(self.pattern) not in {0, self.layers}:
            raise ValueError(
                f"pattern is {shown(self.pattern)}; it must have a letter for each of"
                f" {self.layers} layers, of {', '.join(LETTERS)}"
                + (f" and not {min(wrong)}" if wrong else "")
            )
        scans = "M" in self.pattern or not self.pattern
        if scans and self.scan is None and (self.pattern or self.full_every):
            raise ValueError("scan: it is missing, and pattern or full_every need one")
        attends = "*" in self.pattern if self.pattern else self.full_every or self.scan is None
        if attends and not self.heads:
            raise ValueError("heads: it must be at least 1 where layers have attention")
        if ("-" in self.pattern or self.scan is None) and not (self.ffn or self.experts):
            raise ValueError(
                "ffn: it must be at least 1 where layers have neither scan nor experts"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self: Any) -> Any:
        if not self.heads:
            return self
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}; give head_dim"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self

    def body(self) -> Transformer:
        """The stack of layers."""
        values = {field.name: getattr(self, field.name) for field in fields(Transformer)}
        return Transformer(**_built(values))


_LayersSpec: Any = _spec(
    Transformer,
    _Layers,
    **dict.fromkeys(
        ("heads", "ffn", "kv_heads", "head_dim", "full_every", "document"), (Natural, 0)
    ),
    hidden=(Count, ...),
    layers=(Depth, ...),
    scan=(_Scan | None, None),
    bias=(Bias, False),
    norms=(Annotated[int, BeforeValidator(no_truth), Field(ge=1, le=8)], 2),
    windows=(Annotated[list[Natural], Field(max_length=10_000)], []),
)
"""The layers of a model."""


def _given(spec: BaseModel, make: Callable[..., Model]) -> dict[str, Any]:
    """What a specification says of the keywords of a function."""
    wanted = {name for name, p in signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY}
    return {name: value for name, value in dict(spec).items() if name in wanted}


class TransformerSpec(_LayersSpec):  # type: ignore[misc]  # made above
    """`kind = "transformer"`: a language model."""

    kind: Literal["transformer"]
    vocab: Count
    seq_len: Count
    tied: bool = False
    positions: Natural = 0
    token_types: Natural = 0
    embedding_norm: bool = False
    head_transform: bool = False
    head_bias: bool = False
    final_norm: bool = True
    pooler: bool = False
    labels: Natural | None = None

    @model_validator(mode="after")
    def _positions_suffice(self) -> "TransformerSpec":
        if 0 < self.positions < self.seq_len:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds the {self.positions} learned positions; give it"
                f" as many (positions in its file, or --set model.positions={self.seq_len})"
            )
        return self

    @model_validator(mode="after")
    def _has_a_head(self) -> "TransformerSpec":
        if self.head_transform and (self.labels is not None or self.pooler):
            raise ValueError("head_transform is of a vocabulary; leave labels and pooler out")
        if self.labels is None and self.pooler:
            raise ValueError("a pooler needs labels, 0 for a model without a head")
        if self.labels == 0 and not (self.final_norm or self.pooler):
            raise ValueError("labels is 0; give final_norm or pooler, or there is nothing to train")
        return self

    def build(self) -> Model:
        """The model's blocks."""
        options = _given(self, language_model)
        packed = 0 < self.document < self.seq_len
        documents = f" on documents of {self.document:,} tokens" if packed else ""
        name = f"{self.name}{documents}"
        return language_model(name, self.body(), tokens=self.seq_len, **options)


class _ImageSpec(_LayersSpec):  # type: ignore[misc]  # made above
    causal: bool = False
    document: Literal[0] = 0
    image: Count
    patch: Count
    channels: Count = 3
    classes: Count

    @model_validator(mode="after")
    def _patches_fit(self) -> "ViTSpec":
        if self.image % self.patch:
            raise ValueError(f"image {self.image} is not a multiple of patch {self.patch}")
        return self


class ViTSpec(_ImageSpec):
    """`kind = "vit"`: a vision transformer."""

    kind: Literal["vit"]

    def build(self) -> Model:
        """The model's blocks."""
        return vision_transformer(self.name, self.body(), **_given(self, vision_transformer))


class DiTSpec(_ImageSpec):
    """`kind = "dit"`: a diffusion transformer, on the latents of images."""

    kind: Literal["dit"]
    outputs: Count

    def build(self) -> Model:
        """The model's blocks."""
        return diffusion_transformer(self.name, self.body(), **_given(self, diffusion_transformer))


class BlockSpec(Spec):
    """One block of `kind = "blocks"`, `repeat` times; `flops` and `activation` are per sample."""

    name: str
    repeat: Depth = 1
    tensors: list[Count] = Field(min_length=1)
    flops: Annotated[float, number(Quantity(unit="FLOP", least=0))]
    activation: Annotated[float, number(Quantity(unit="B", least=0))]


class BlocksSpec(Spec):
    """`kind = "blocks"`: any chain of blocks, such as a convolutional network."""

    name: str
    kind: Literal["blocks"]
    blocks: list[BlockSpec] = Field(min_length=1)
    image: Natural = 0
    parameters: Natural = 0

    def build(self) -> Model:
        """The model's blocks; repeated ones are numbered."""
        blocks = tuple(
            plain_block(
                f"{spec.name}.{index}" if spec.repeat > 1 else spec.name,
                spec.tensors,
                spec.flops,
                spec.activation,
            )
            for spec in self.blocks
            for index in range(spec.repeat)
        )
        return Model(self.name, blocks, tokens=1, unit="image")


class TracedSpec(Spec):
    """`kind = "traced"`: operators that a trace of a PyTorch module gave, by their file."""

    name: str
    kind: Literal["traced"]
    operators: str = Field(pattern=r"[a-z0-9.-]+\.json")
    image: Natural = 0
    parameters: Natural = 0

    def build(self) -> Model:
        """The model of the file beside the catalog's models."""
        from co2sim.catalog.model_files import model_from_json  # noqa: PLC0415 - of few models

        path = resources.files("co2sim.catalog") / "models" / self.operators
        if not path.is_file():
            raise OptionError(
                f"operators is {shown(self.operators)}, which the catalog does not have; a file of"
                " your own is a model by itself: -m FILE.json"
            )
        text = path.read_text("utf-8")
        return replace(model_from_json(json.loads(text)), name=self.name)


class ModelSpec(Spec):
    """`models/*.toml`, by kind."""

    model: Annotated[
        TransformerSpec | ViTSpec | DiTSpec | BlocksSpec | TracedSpec, Field(discriminator="kind")
    ]

    def build(self) -> Model:
        """Its blocks."""
        return self.model.build()


def as_file(thing: Any) -> Tree:
    """What a file would say of a dataclass of numbers, with units; nothing of what is None."""
    hints = get_type_hints(type(thing), include_extras=True)
    values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    tree = {
        name: _stated(value, hints[name]) for name, value in values.items() if value is not None
    }
    for name, key in (("efficiency", "flops"), ("attention_efficiency", "length")):
        if isinstance(table := values.get(name), tuple):
            unit = " FLOP" if key == "flops" else ""
            tree[name] = [
                {key: f"{size!r}{unit}" if unit else size, "value": value} for size, value in table
            ]
    return tree


def _stated(value: Any, hint: Any) -> Any:
    if is_dataclass(value):
        return as_file(value)
    if isinstance(value, Mapping):
        return {name: _stated(inner, get_args(hint)[-1]) for name, inner in value.items()}
    unit = _unit(hint)
    return f"{value!r} {unit}" if unit else value


def _unit(hint: Any) -> str:
    """The unit of a number by its type; empty where it has none."""
    options = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    quantities = [get_args(option)[1] for option in options if get_origin(option) is Annotated]
    return quantities[0].unit if quantities else ""


UNITS: Mapping[str, str] = {
    name: unit
    for kind in _SPECS
    for name, hint in get_type_hints(kind, include_extras=True).items()
    if (unit := _unit(hint)) and "price" not in name
}
"""Units of the numbers of clusters, GPUs and stacks that have one, by name."""
