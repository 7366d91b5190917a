"""What the TOML files of the catalog, and a user's own, may say; pydantic checks every value."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from co2sim.architecture import (
    Attention,
    Bias,
    Norm,
    Transformer,
    language_model,
    vision_transformer,
)
from co2sim.cluster import GPU, AllReduce, Backend, Cluster, Communicators, Hops, KernelTimes, Link
from co2sim.errors import UnitError
from co2sim.units import Unit, parse, parse_price
from co2sim.workload import Block, Model


def _parsed(read: Callable[[Any], Any]) -> BeforeValidator:
    def checked(value: Any) -> Any:
        try:
            return read(value)
        except UnitError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(checked)


def _quantity(unit: Unit) -> BeforeValidator:
    return _parsed(partial(parse, unit=unit))


Size = Annotated[float, _quantity("B"), Field(gt=0)]
Bandwidth = Annotated[float, _quantity("B/s"), Field(gt=0)]
Time = Annotated[float, _quantity("s"), Field(ge=0)]
Speed = Annotated[float, _quantity("FLOP/s"), Field(gt=0)]
Work = Annotated[float, _quantity("FLOP"), Field(gt=0)]
Fraction = Annotated[float, _quantity(""), Field(gt=0, le=1)]


def _no_truth(value: Any) -> Any:
    """`true` is no number, though Python takes it for 1."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a whole number")  # noqa: TRY004 - pydantic's
    return value


Price = Annotated[tuple[float, str], _parsed(parse_price)]
"""Per second, and its currency."""

Count = Annotated[int, BeforeValidator(_no_truth), Field(ge=1, le=10**12)]
Natural = Annotated[int, BeforeValidator(_no_truth), Field(ge=0, le=10**15)]
Depth = Annotated[int, BeforeValidator(_no_truth), Field(ge=1, le=10_000)]
"""Blocks of a model: the schedule holds every one of them."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(_Spec):
    """Attained fraction of peak of an op of this many FLOP."""

    flops: Work
    value: Fraction


def _points(value: Any) -> Any:
    """A single number is the efficiency at every size."""
    ends = ("1 FLOP", "1e12 PFLOP")
    return value if isinstance(value, list) else [{"flops": f, "value": value} for f in ends]


class KernelsSpec(_Spec):
    """`kernels` of a GPU: constants that were fitted to published runs."""

    gemm_efficiency: Fraction
    operand_efficiency: Fraction = 1.0
    vocabulary_efficiency: Fraction | None = None
    call_overhead: Time = 0.0
    kernel_gap: Time = 0.0

    def build(self) -> KernelTimes:
        """The constants in SI units."""
        return KernelTimes(**self.model_dump())


class GPUSpec(_Spec):
    """`gpus/*.toml`."""

    name: str
    memory: Size
    memory_bandwidth: Bandwidth
    peak: dict[Literal["fp32", "fp16", "bf16"], Speed] = Field(min_length=1)
    efficiency: Annotated[list[Point], BeforeValidator(_points), Field(min_length=1)]
    memory_efficiency: Fraction
    launch_overhead: Time
    kernels: KernelsSpec | None = None

    def build(self) -> GPU:
        """The GPU in SI units."""
        points = sorted((point.flops, point.value) for point in self.efficiency)
        return GPU(
            self.name,
            self.memory,
            self.memory_bandwidth,
            {str(precision): speed for precision, speed in self.peak.items()},
            tuple(points),
            self.memory_efficiency,
            self.launch_overhead,
            self.kernels.build() if self.kernels else None,
        )


class LinkSpec(_Spec):
    """`intra`, `inter` and `wan` of a cluster."""

    bandwidth: Bandwidth
    latency: Time
    efficiency: Fraction = 1.0
    exchange_efficiency: Fraction = 1.0
    relay_efficiency: Fraction = 1.0
    busy_efficiency: Fraction = 1.0

    def build(self) -> Link:
        """The link in SI units."""
        return Link(
            self.bandwidth,
            self.latency,
            self.efficiency,
            self.exchange_efficiency,
            self.relay_efficiency,
            self.busy_efficiency,
        )


class ClusterSpec(_Spec):
    """`clusters/*.toml`; `gpu` is the table of a GPU."""

    name: str
    gpu: GPUSpec
    nodes: Count
    gpus_per_node: Count
    intra: LinkSpec
    inter: LinkSpec
    backend: Backend = "nccl"
    communicators: Communicators = "group"
    channels: Count = 2
    all_reduce: AllReduce = "auto"
    hops: Hops = "pipelined"
    interference: Annotated[float, _quantity(""), Field(ge=0)] = 0.0
    sites: Count = 1
    wan: LinkSpec | None = None
    price_per_gpu: Price | None = None

    @model_validator(mode="after")
    def _sites_need_a_wan(self) -> "ClusterSpec":
        if (self.sites > 1) != (self.wan is not None):
            raise ValueError("sites above 1 and [wan] go together: one is given without the other")
        return self

    def build(self) -> Cluster:
        """The cluster in SI units."""
        return Cluster(
            name=self.name,
            gpu=self.gpu.build(),
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            intra=self.intra.build(),
            inter=self.inter.build(),
            backend=self.backend,
            communicators=self.communicators,
            channels=self.channels,
            all_reduce=self.all_reduce,
            hops=self.hops,
            interference=self.interference,
            sites=self.sites,
            wan=self.wan.build() if self.wan else None,
            price_per_gpu=self.price_per_gpu[0] if self.price_per_gpu else None,
            currency=self.price_per_gpu[1] if self.price_per_gpu else "USD",
        )


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
    bias: Bias = False
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
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            ffn=self.ffn,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            gated=self.gated,
            attention=self.attention,
            attention_gate=self.attention_gate,
            bias=self.bias,
            norm=self.norm,
        )


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
    sliding_window: Natural = 0

    @model_validator(mode="after")
    def _positions_suffice(self) -> "TransformerSpec":
        if 0 < self.positions < self.seq_len:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds the {self.positions} learned positions"
            )
        if 0 < self.sliding_window < self.seq_len:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds the sliding window of {self.sliding_window}"
                " tokens; attention that sees less than the whole sequence is not modelled"
            )
        return self

    def build(self) -> Model:
        """The model's blocks."""
        return language_model(
            self.name,
            self.body(),
            vocab=self.vocab,
            tokens=self.seq_len,
            tied=self.tied,
            positions=self.positions,
            token_types=self.token_types,
            embedding_norm=self.embedding_norm,
            head_transform=self.head_transform,
        )


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
        return vision_transformer(
            self.name,
            self.body(),
            image=self.image,
            patch=self.patch,
            channels=self.channels,
            classes=self.classes,
        )


class BlockSpec(_Spec):
    """One block of `kind = "blocks"`, `repeat` times; `flops` and `activation` are per sample."""

    name: str
    repeat: Depth = 1
    tensors: list[Count] = Field(min_length=1)
    flops: Annotated[float, _quantity("FLOP"), Field(ge=0)]
    activation: Annotated[float, _quantity("B"), Field(ge=0)]


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
