"""Kernels of block quantization: memory-bound, costed by the bytes that they read and write."""

from co2sim.schedule import SCALE_BYTES, Compute, DType
from co2sim.units import Bytes

QUANTIZED = frozenset({DType.INT8, DType.INT4})
"""Types that carry one fp32 scale per block."""
SCALE_BLOCK = 2048
"""Elements of a block, unless an option says otherwise."""


def stored_bytes(elements: float, dtype: DType, scale_block: int) -> Bytes:
    """Bytes of a buffer in memory, with its scales if it is quantized."""
    scales = elements / scale_block * SCALE_BYTES if dtype in QUANTIZED else 0.0
    return elements * dtype.bytes + scales


def recode(kernel: str, elements: int, source: DType, target: DType, scale_block: int) -> Compute:
    """Read a buffer in one type and write it in another."""
    read = stored_bytes(elements, source, scale_block)
    return Compute(kernel, 0.0, read + stored_bytes(elements, target, scale_block))


def sum_received(
    elements: int, ranks: int, received: DType, target: DType, scale_block: int
) -> Compute:
    """Sum the parts that an all-to-all brought from `ranks` ranks: one addition per element."""
    kernel = "dequantize_sum_quantize" if target in QUANTIZED else "dequantize_sum"
    written = stored_bytes(elements / ranks, target, scale_block)
    return Compute(kernel, float(elements), stored_bytes(elements, received, scale_block) + written)
