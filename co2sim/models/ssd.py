"""State-space duality: the layers of Mamba 2.

Source: Dao and Gu 2024, arXiv 2405.21060, section 6 (the algorithm) and figure 6 (the layer).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from co2sim.common.errors import OptionError
from co2sim.common.validation import Count, check
from co2sim.models.operators import AnyOperator, Operator
from co2sim.models.scan import Chunks, Scan, convolution, input_product, output_product

_STATE_MOVES = 4
"""Elements of 16 bits that passing states on moves for one of a state, beside the product that
writes it, and the one that reads it: its sum is in fp32 where it is written (1 more) and read (2),
and then in 16 bits (1). Source: state-spaces/mamba, mamba_ssm/ops/triton/ssd_state_passing.py and
ssd_combined.py (states_in_fp32, out_dtype)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SSD(Scan):
    """Mamba 2: `heads` of `head_dim`, each with a state of `head_dim` x `state`.

    Equal numbers of heads share the input and the output of a state, in `groups`, which
    tensor-parallel ranks divide. A depthwise convolution sees `conv` tokens, and has a `bias`.
    Products work on chunks of `chunk` tokens: 256 in mamba_ssm (mamba_ssm/modules/mamba2.py).

    Source: Dao and Gu 2024, arXiv 2405.21060.
    """

    kind: Literal["ssd"] = "ssd"
    heads: Count
    head_dim: Count = 64
    state: Count = 128
    groups: Count = 1
    conv: Count = 4
    bias: bool = True
    chunk: Count = 256

    readers: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Refuse what no scan can be."""
        check(self, "scan")
        if self.heads % self.groups:
            raise OptionError(
                f"scan: heads is {self.heads}; it must be a multiple of the {self.groups} groups"
            )

    def operators(self, tokens: int, hidden: int) -> tuple[AnyOperator, ...]:
        """Those of one kernel of mamba_ssm with its products, `mamba_split_conv1d_scan_combined`.

        It keeps what the input product gave, the output of the scan, and the scale of each norm in
        fp32, and makes all else again: `MambaSplitConv1dScanCombinedFn` in ops/triton/
        ssd_combined.py, save_for_backward. All heads of a group work on the same scores.
        """
        width, shared = self.heads * self.head_dim, self.groups * self.state
        columns = 2 * width + 2 * shared + self.heads
        chunks = Chunks(tokens, self.chunk, self.groups, self.groups, "groups of a scan")
        rows, each = chunks.rows, width // self.groups
        states = width * self.state / rows
        return (
            input_product("gate, input, state, steps", tokens, hidden, columns, float(columns)),
            convolution(tokens, width + 2 * shared, self.conv, bias=self.bias, kept=0.0),
            Operator(
                name="steps",  # read, then in fp32: they, and their sums
                rows=tokens,
                tensors=(self.heads,) * 3,
                calls=1,
                moved=5.0 * self.heads,
                cut="width",
            ),
            chunks.product("states", self.state, rows, each, remade=True),
            Operator(
                name="passing", rows=tokens, calls=1, moved=_STATE_MOVES * states, cut="width"
            ),
            chunks.product("scores", rows, self.state, rows, remade=True),
            chunks.product("from states", rows, self.state, each, calls=0, remade=False),
            chunks.product("in chunks", rows, rows, each, remade=False),
            Operator(
                name="gate and norm",
                rows=tokens,
                tensors=(width,),
                calls=1,
                kept=width + 2.0 * self.groups,
                moved=3.0 * width,
                cut="width",
            ),
            *output_product(tokens, width, hidden, kept=0.0),
        )
