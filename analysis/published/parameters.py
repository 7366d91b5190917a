"""The fitted constants: what each means, where it stands in the catalog, and its bounds."""

from dataclasses import dataclass
from functools import lru_cache

from co2sim.calibrations import value_at
from co2sim.catalog import load_cluster, load_model
from co2sim.cluster import Cluster
from co2sim.errors import OptionError
from co2sim.units import duration
from co2sim.workload import Model

_NEAR = 1e-3
"""Fraction of its range within which a constant counts as being at a bound."""

_MOST_ENTRIES = 512
"""Clusters, and models, that are kept once they are read."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One fitted number: `path` in a `Cluster`, `file` and key of the catalog, physical bounds."""

    name: str
    path: str
    file: str
    low: float
    high: float
    unit: str
    means: str

    def at_bound(self, value: float) -> bool:
        """Whether a value is at a bound, to a thousandth: a bounded fit stays just inside."""
        return min(value - self.low, self.high - value) <= _NEAR * (self.high - self.low)

    def text(self, value: float) -> str:
        """The value as the catalog writes it."""
        return f'"{value * 1e6:.4g} us"' if self.unit == "s" else f"{value:.4g}"

    def shown(self, value: float) -> str:
        """The value for people."""
        return duration(value) if self.unit == "s" else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class ExternalConstant:
    """A number measured elsewhere, on other hardware: `path` in a `Cluster`, and its range.

    The range is what the rounding of the source leaves open.
    """

    path: str
    low: float
    high: float

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class ConstantGroup:
    """Constants that are fitted together on the fit cells of one source.

    `cluster` is the one of the catalog that uses them. `external` are numbers that were measured
    elsewhere and are not fitted.
    """

    name: str
    source: str
    generation: str
    cluster: str
    constants: tuple[Constant, ...]
    external: tuple[ExternalConstant, ...] = ()


_OPERANDS = "fraction of the memory bandwidth at which operands move, counted once a product"

GROUPS = {
    group.name: group
    for group in (
        ConstantGroup(
            "v100-zeropp",
            "zeropp",
            "V100",
            "dgx2-calibrated",
            (
                Constant(
                    "operand_efficiency", "gpu.kernels.operand_efficiency",
                    "gpus/v100-32-megatron.toml", 0.02, 1.0, "",
                    _OPERANDS,
                ),
                Constant(
                    "exchange_efficiency", "inter.exchange_efficiency",
                    "clusters/dgx2-calibrated.toml", 0.1, 1.0, "",
                    "fraction of the NICs' bandwidth left to the all-to-all of quantized gradients",
                ),
            ),
        ),
        ConstantGroup(
            "a100-data-parallel",
            "vtrain",
            "A100",
            "a100-node-calibrated",
            (
                Constant(
                    "operand_efficiency", "gpu.kernels.operand_efficiency",
                    "gpus/a100-80-megatron.toml", 0.02, 1.0, "",
                    _OPERANDS,
                ),
                Constant(
                    "vocabulary_efficiency", "gpu.kernels.vocabulary_efficiency",
                    "gpus/a100-80-megatron.toml", 0.05, 0.9, "",
                    "fraction of the peak that the product over the vocabulary attains",
                ),
                Constant(
                    "call_overhead", "gpu.kernels.call_overhead",
                    "gpus/a100-80-megatron.toml", 1e-6, 2e-4, "s",
                    "time in which the host issues one operation",
                ),
                Constant(
                    "kernel_gap", "gpu.kernels.kernel_gap",
                    "gpus/a100-80-megatron.toml", 0.0, 3e-5, "s",
                    "time that the GPU loses at every operation of the framework, views included",
                ),
            ),
        ),
        ConstantGroup(
            "a100-co2",
            "co2",
            "A100",
            "a100-tcp80-calibrated",
            (
                Constant(
                    "compute_efficiency", "gpu.efficiency",
                    "gpus/a100-80-transnormer.toml", 0.05, 0.9, "",
                    "fraction of the GPU's peak that the passes of TransNormerLLM attain",
                ),
                Constant(
                    "tcp_efficiency", "inter.efficiency",
                    "clusters/a100-tcp80-calibrated.toml", 0.05, 1.0, "",
                    "fraction of 80 Gbit/s that the collectives of NCCL attain over TCP",
                ),
            ),
            (
                # 4.7 GB/s of "around 6 GB/s", and "8Gbps" of 10
                ExternalConstant("inter.relay_efficiency", 4.7 / 6.5, 4.7 / 5.5),
                ExternalConstant("inter.busy_efficiency", 0.75, 0.85),
            ),
        ),
    )
}  # fmt: skip


def stated(group: ConstantGroup, cluster: Cluster) -> dict[str, float]:
    """The constants as the catalog states them."""
    found = {}
    for constant in group.constants:
        value = value_at(cluster, constant.path)
        if value is None:
            raise OptionError(f"{cluster.name} has no {constant.path}")
        found[constant.name] = value
    return found


@lru_cache(_MOST_ENTRIES)
def cluster_of(reference: str, overrides: tuple[tuple[str, str], ...]) -> Cluster:
    """A cluster of the catalog, read once."""
    return load_cluster(reference, dict(overrides)).value


@lru_cache(_MOST_ENTRIES)
def model_of(reference: str, overrides: tuple[tuple[str, str], ...]) -> Model:
    """A model of the catalog, read once."""
    return load_model(reference, dict(overrides)).value
