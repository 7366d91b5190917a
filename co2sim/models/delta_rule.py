"""The gated delta rule: linear attention that overwrites what its state has for a key.

Source: Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, section 3.3 (the chunked
algorithm); the layer is that of Qwen3-Next (transformers, models/qwen3_next, GatedDeltaNet).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from co2sim.common.errors import OptionError
from co2sim.common.validation import Count, check
from co2sim.models.operators import AnyOperator, Operator
from co2sim.models.scan import Chunks, Scan, convolution, input_product, output_product


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(Scan):
    """Gated delta rule: `value_heads` of `value_dim`, each with a state of `key_dim` x `value_dim`.

    Equal numbers of them share queries and keys, of `key_heads`, which tensor-parallel ranks
    divide. A depthwise convolution sees `conv` tokens. Products work on chunks of `chunk` tokens:
    64 in flash-linear-attention (fla/ops/gated_delta_rule/chunk.py).

    Source: Yang et al. 2024, arXiv 2412.06464.
    """

    kind: Literal["delta_rule"] = "delta_rule"
    key_heads: Count
    value_heads: Count
    key_dim: Count = 128
    value_dim: Count = 128
    conv: Count = 4
    chunk: Count = 64

    readers: ClassVar[int] = 2

    def __post_init__(self) -> None:
        """Refuse what no scan can be."""
        check(self, "scan")
        if self.value_heads % self.key_heads:
            raise OptionError(
                f"scan: value_heads is {self.value_heads}; it must be a multiple of the"
                f" {self.key_heads} key_heads"
            )

    def operators(self, tokens: int, hidden: int) -> tuple[AnyOperator, ...]:
        """Those of flash-linear-attention's kernels, and of a gated norm over each head.

        Kept are the inputs of the convolution and of the gated norm, its output, and what
        `ChunkGatedDeltaRuleFunction` (fla/ops/gated_delta_rule/chunk.py) saves for its backward
        pass: queries, keys, values, gates and, for every token, a row of an inverse matrix. States
        and new values are made again.
        """
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        mixed, heads = 2 * keys + values, self.value_heads
        inverse = heads * min(self.chunk, tokens)
        return (
            input_product("queries, keys, values, gate", tokens, hidden, mixed + values, values),
            input_product("decay, rate", tokens, hidden, 2 * heads, 2.0 * heads),
            Operator(
                name="copies", rows=tokens, calls=2, moved=2.0 * (mixed + values), cut="width"
            ),
            convolution(tokens, mixed, self.conv, bias=False, kept=float(mixed)),
            Operator(
                name="norms of heads",  # of queries and keys, and their scales in fp32
                rows=tokens,
                calls=2,
                kept=2.0 * keys + 4.0 * self.key_heads,
                moved=4.0 * keys,
                cut="width",
            ),
            Operator(
                name="decays",  # exponential, softplus, product, sums along a chunk: in fp32
                rows=tokens,
                tensors=(heads,) * 2,
                calls=5,
                kept=values + 5.0 * heads + inverse,
                moved=16.0 * heads,
                cut="width",
            ),
            *self._products(tokens),
            Operator(
                name="gate and norm",
                rows=tokens,
                calls=1,
                kept=values + 2.0 * heads,
                moved=3.0 * values,
                cut="width",
            ),
            Operator(tensors=(self.value_dim,)),
            *output_product(tokens, values, hidden, kept=float(values)),
        )

    def _products(self, tokens: int) -> tuple[AnyOperator, ...]:
        """Products of every value head and chunk, in the order of `chunk_gated_delta_rule_fwd`.

        The inverse of a triangular matrix has none that counts: 16 of 16 x 16 x 16.
        """
        chunks = Chunks(
            tokens, self.chunk, self.value_heads, self.key_heads, "heads of keys of a scan"
        )
        rows, k, v = chunks.rows, self.key_dim, self.value_dim
        return (
            chunks.product("keys by keys", rows, k, rows, calls=2, remade=False),
            chunks.product("new keys", rows, rows, k, remade=True),
            chunks.product("new values", rows, rows, v, calls=0, remade=True),
            chunks.product("values of states", rows, k, v, remade=True),
            chunks.product("states", k, rows, v, calls=0, remade=True),
            chunks.product("from states", rows, k, v, remade=False),
            chunks.product("scores", rows, k, rows, calls=0, remade=False),
            chunks.product("in chunks", rows, rows, v, calls=0, remade=False),
        )
