"""Layers without attention: a state goes along the sequence, and products work on chunks of it.

What a kind of them has to say is a `Scan`: the operators of a layer on some tokens, without norms
and sums around them. Each kind is a file: `ssd`, `delta_rule`. FLOP are those of the chunked
products that run, forward; a kernel skips a part of those above the diagonal, which counts, too, as
it does for causal attention. They grow with the tokens of a sample, as these fill whole chunks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from co2sim.common.errors import OptionError
from co2sim.models.operators import Along, AnyOperator, Operator, Product
from co2sim.schedule.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan(ABC):
    """What stands in place of attention; `readers` are the products that read a layer's input."""

    readers: ClassVar[int]

    @abstractmethod
    def operators(self, tokens: int, hidden: int) -> tuple[AnyOperator, ...]:
        """Those of a layer of width `hidden`, on samples of some tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProduct(Product):
    """Products without weights, equally many of each of `heads`, of all chunks of a sample.

    Tensor-parallel ranks divide `heads`, which are `what`. Raises OptionError where ranks divide a
    sequence: how they pass the state on is not modelled.
    """

    kind: Literal["chunk product"] = "chunk product"  # type: ignore[assignment]  # as in operators
    along: Along = "heads"
    heads: int

    def counts(self, mesh: Mesh) -> dict[str, int]:
        """What tensor-parallel ranks have to divide, by name."""
        if mesh.cp > 1:
            raise OptionError(
                f"cp={mesh.cp} does not apply to layers with a scan: how ranks pass its state on is"
                " not modelled"
            )
        return {self.what: self.heads}

    def divided(self, mesh: Mesh) -> "ChunkProduct":
        """Those of some heads."""
        return replace(self, heads=self.heads // mesh.tp, count=self.count // mesh.tp)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a sample, of `size` tokens, with `products` of each kind.

    Ranks divide `heads`, which are `what`.
    """

    tokens: int
    size: int
    products: int
    heads: int
    what: str

    @property
    def rows(self) -> int:
        """Tokens of one."""
        return min(self.size, self.tokens)

    def product(
        self, name: str, rows: int, inner: int, columns: int, *, calls: int = 1, remade: bool
    ) -> ChunkProduct:
        """Those of a kind of all chunks; a backward pass makes `remade` ones again."""
        return ChunkProduct(
            name=name,
            rows=rows,
            inner=inner,
            columns=columns,
            heads=self.heads,
            count=self.products * -(-self.tokens // self.size),
            what=self.what,
            wide=True,
            remade=remade,
            calls=calls,
            moved=0.0,
        )


def input_product(name: str, tokens: int, hidden: int, columns: int, kept: float) -> Product:
    """From the hidden state to all that a scan works on."""
    return Product(
        name=name,
        rows=tokens,
        inner=hidden,
        columns=columns,
        tensors=(hidden * columns,),
        calls=1,
        kept=kept,
        moved=0.0,
        cut="width",
        along="columns",
    )


def output_product(tokens: int, inner: int, hidden: int, kept: float) -> tuple[Operator, Product]:
    """Back to the hidden state, and what is kept of its operand."""
    operand = Operator(name="operand", rows=tokens, kept=kept, moved=0.0, cut="width")
    return operand, Product(
        name="output",
        rows=tokens,
        inner=inner,
        columns=hidden,
        tensors=(inner * hidden,),
        calls=1,
        along="inner",
    )


def convolution(tokens: int, width: int, kernel: int, *, bias: bool, kept: float) -> Operator:
    """A causal convolution of each column of `width` over `kernel` tokens, with SiLU.

    One kernel reads and writes a row; back it reads two and writes one, from the input that it
    keeps. With no input kept, that of a product is there, and the kernel runs once more to make its
    output again. Source: Dao-AILab/causal-conv1d, csrc/causal_conv1d_fwd.cu and _bwd.cu.
    """
    back = 3.0 if kept else 5.0
    moved = min(2.0, back / 2) * width  # that of a backward pass counts as twice as much
    return Operator(
        name="convolution",
        rows=tokens,
        tensors=(width * kernel, *([width] if bias else [])),
        work=2.0 * kernel * width,
        calls=1,
        kept=kept,
        moved=moved,
        exact=(2.0 * width - moved, back * width - 2 * moved),
        cut="width",
    )
