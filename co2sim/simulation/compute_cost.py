"""What compute costs on a GPU: a roofline or its kernels, and its pace beside communication."""

import math
from dataclasses import dataclass

import numpy as np

from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import BytesPerSecond, FlopsPerSecond, Seconds
from co2sim.hardware.cluster import GPU, Cluster, KernelTimes
from co2sim.hardware.offloading import speed
from co2sim.schedule.schedule import Compute, FusedAttention, Gemm, Kernels


def peak_flops(gpu: GPU, precision: str) -> FlopsPerSecond:
    """Dense peak speed. Raises OptionError when the GPU has no such precision."""
    if precision not in gpu.peak:
        raise OptionError(
            f"{gpu.name} has no {precision} in our catalog; {nearest(precision, gpu.peak)}"
        )
    return gpu.peak[precision]


def efficiency(gpu: GPU, flops: float) -> float:
    """Fraction of peak that an op of `flops` FLOP attains: the GPU's table over log FLOP."""
    table = gpu.known_efficiency
    sizes = [math.log(size) for size, _ in table]
    return float(np.interp(math.log(flops), sizes, [fraction for _, fraction in table]))


@dataclass(frozen=True, slots=True)
class KernelParts:
    """What a GPU spends on the kernels of a pass."""

    products: Seconds
    attention: Seconds
    elementwise: Seconds


def kernel_time(
    kernels: Kernels, gpu: GPU, times: KernelTimes, precision: str, exchanged: Seconds = 0.0
) -> Seconds:
    """A pass over a block: the slower of the GPU and of the host that issues its operations.

    The host continues issuing while the GPU exchanges something for `exchanged` seconds. The GPU
    loses a gap after each operation.
    """
    parts = kernel_parts(kernels, gpu, times, precision)
    device = parts.products + parts.attention + parts.elementwise
    device += kernels.calls * times.kernel_gap
    return max(device, kernels.calls * times.call_overhead - exchanged)


def kernel_parts(kernels: Kernels, gpu: GPU, times: KernelTimes, precision: str) -> KernelParts:
    """Times of the matrix products, of flash attention, and of elementwise kernels of a pass.

    The latter move memory and hardly compute. A product whose arithmetic takes as long as its
    memory traffic overlaps them in part: the two add like the sides of a right angle.
    """
    peak = peak_flops(gpu, precision)
    memory = gpu.memory_bandwidth * times.operand_efficiency
    if kernels.vocabulary and times.vocabulary_efficiency is not None:
        flops = sum([product.flops for product in kernels.products])
        products = flops / (peak * times.vocabulary_efficiency)
    else:
        wide = peak * times.gemm_efficiency
        products = sum(
            [
                math.hypot(
                    product.flops / (_narrow(product, gpu, times) if product.narrow else wide),
                    product.bytes / memory,
                )
                for product in kernels.products
            ]
        )
    products += times.product_start * sum([product.count for product in kernels.products])
    fused = kernels.attention
    attention = _attention_time(fused, peak, memory, times) if fused else 0.0
    moved = kernels.elementwise_bytes * times.elementwise
    moved += kernels.cast_bytes + kernels.adapter_bytes
    elementwise = moved / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return KernelParts(products, attention, elementwise)


def _narrow(product: Gemm, gpu: GPU, times: KernelTimes) -> FlopsPerSecond:
    """The speed of a product's arithmetic in a type below 16 bits."""
    return peak_flops(gpu, product.narrow) * (times.narrow_efficiency or times.gemm_efficiency)


def _attention_time(
    work: FusedAttention, peak: FlopsPerSecond, memory: BytesPerSecond, times: KernelTimes
) -> Seconds:
    """Flash attention at its own efficiency; where none is known, as any other product."""
    forward, backward = work.flops / peak, work.backward / peak
    if times.attention_efficiency is not None:
        return (forward + backward / times.attention_backward) / times.attention(work.length)
    return math.hypot((forward + backward) / times.gemm_efficiency, work.bytes / memory)


def compute_time(work: Compute, gpu: GPU, precision: str, exchanged: Seconds = 0.0) -> Seconds:
    """Roofline: the slower of arithmetic and memory traffic, plus the launch overhead.

    Where both say what kernels a pass consists of, `kernel_time` instead, which takes `exchanged`;
    parts take their sum.
    """
    if work.parts:
        return sum(compute_time(part, gpu, precision) for part in work.parts)
    if work.kernels and gpu.kernels:
        return kernel_time(work.kernels, gpu, gpu.kernels, precision, exchanged)
    arithmetic = 0.0
    if work.flops:
        arithmetic = work.flops / (peak_flops(gpu, precision) * efficiency(gpu, work.flops))
    memory = work.memory_bytes / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return max(arithmetic, memory) + gpu.launch_overhead


def work_time(work: Compute, cluster: Cluster, precision: str, exchanged: Seconds = 0.0) -> Seconds:
    """That of `compute_time` on the GPU; of its host, or of the link to it, that of the bytes."""
    if work.place == "gpu":
        return compute_time(work, cluster.gpu, precision, exchanged)
    return work.memory_bytes / speed(cluster, work.place)


@dataclass(eq=False, slots=True)
class Processor:
    """That of one rank. `interference` is that of the cluster, `in_flight` counts collectives."""

    interference: float
    in_flight: int = 0

    def communicate(self, change: int) -> bool:
        """Count a collective that begins (1) or ends (-1); whether the pace of computes changes."""
        before = self.in_flight > 0
        self.in_flight += change
        return before != (self.in_flight > 0)

    @property
    def pace(self) -> float:
        """Seconds of work that a compute gets done in a second."""
        return 1.0 / (1.0 + self.interference) if self.in_flight else 1.0
