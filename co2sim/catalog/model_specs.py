"""What the TOML files of models, and a user's own, may say; pydantic checks every value."""

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from co2sim.architecture import (
    Attention,
    Bias,
    Norm,
    Transformer,
    language_model,
    vision_transformer,
)
from co2sim.catalog.fields import Count, Depth, Natural, Spec, number
from co2sim.quantities import Quantity
from co2sim.workload import Block, Model


class _LayersSpec(Spec):
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
    causal: bool = True
    dropout: bool = False
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
    sliding_window: Natural = 0

    @model_validator(mode="after")
    def _positions_suffice(self) -> "TransformerSpec":
        if 0 < self.positions < self.seq_len:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds the {self.positions} learned positions; give it"
                f" as many (positions in its file, or --set model.positions={self.seq_len})"
            )
        if 0 < self.sliding_window < self.seq_len:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds the sliding window of {self.sliding_window}"
                " tokens; attention that sees less than the whole sequence is not modelled"
            )
        return self

    def build(self) -> Model:
        """The model's blocks."""
        given = _given(self, language_model)
        return language_model(self.name, self.body(), tokens=self.seq_len, **given)


class ViTSpec(_LayersSpec):
    """`kind = "vit"`: a vision transformer."""

    kind: Literal["vit"]
    causal: bool = False
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


class ModelSpec(Spec):
    """`models/*.toml`, by kind."""

    model: Annotated[TransformerSpec | ViTSpec | BlocksSpec, Field(discriminator="kind")]
