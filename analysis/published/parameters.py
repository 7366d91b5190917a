"""The fitted constants: what each means, where it stands in the catalog, and its bounds."""

from dataclasses import dataclass
from functools import lru_cache

from co2sim.catalog import DEFAULT_STACK, load_cluster, load_stack
from co2sim.common.errors import OptionError
from co2sim.common.units import duration
from co2sim.hardware.cluster import Cluster
from co2sim.prediction.calibrations import value_at

_NEAR = 1e-3
"""Fraction of its range within which a constant counts as being at a bound."""

_MAX_ENTRIES = 512
"""Clusters that are kept once they are read."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One fitted number: `path` in a `Cluster`, `files` of the catalog with it, physical bounds.

    It holds on these `clusters` of its group; on all of them if none is named.
    """

    name: str
    path: str
    files: tuple[str, ...]
    low: float
    high: float
    unit: str
    means: str
    clusters: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Files of the catalog, and the dotted path of the number in each.

        `inside` names the GPUs in whose kernels a stack's file states it.
        """
        name = self.path.rpartition(".")[2]
        if self.inside:
            (file,) = self.files
            return tuple((file, f"kernels.{gpu}.{name}") for gpu in self.inside)
        return tuple((file, self.path.removeprefix("gpu.")) for file in self.files)

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

    `clusters` are those of the catalog that use them, with `stack` on them. `external` are numbers
    that were measured elsewhere and are not fitted. `robust` is the error, as a fraction, from
    which on the loss of a fit grows linearly; none: it is quadratic everywhere. `ratio_weight` is
    how many times as certain a published ratio is as a published speed. `apart` are labels of cells
    whose values have their own constants, so that no value can be left out in cross-validation.
    """

    name: str
    source: str
    generation: str
    clusters: tuple[str, ...]
    constants: tuple[Constant, ...]
    external: tuple[ExternalConstant, ...] = ()
    stack: str = ""
    robust: float | None = None
    ratio_weight: float = 1.0
    apart: tuple[str, ...] = ()

    def on(self, cluster: str) -> tuple[Constant, ...]:
        """The constants that hold on a cluster."""
        return tuple(c for c in self.constants if cluster in (c.clusters or self.clusters))


_OPERANDS = "fraction of the memory bandwidth at which operands move, counted once a product"

_A100 = ("NVIDIA A100-SXM4-80GB",)

_COMPOSER = {
    "H100": ("h100-3200g", "NVIDIA H100-SXM5-80GB"),
    "A100-80": ("a100-80-1600g", "NVIDIA A100-SXM4-80GB"),
    "A100-40": ("a100-40-1600g", "NVIDIA A100-SXM4-40GB"),
}
"""Cluster of the catalog, and name of its GPU."""
_COMPOSER_STACK = "composer-2023"


def _of_kernels(name: str, low: float, means: str, *kinds: str) -> Constant:
    """A fraction that Composer's kernels attain on these kinds of GPU."""
    clusters, gpus = zip(*(_COMPOSER[kind] for kind in kinds), strict=True)
    shared = {1: f", {kinds[0]}", 2: ", A100"}.get(len(kinds), "")
    path, files = f"gpu.kernels.{name}", (f"stacks/{_COMPOSER_STACK}.toml",)
    return Constant(name + shared, path, files, low, 1.0, "", means, clusters, gpus)


def _of_clusters(name: str, high: float, means: str) -> Constant:
    """A constant of all clusters that Composer ran on."""
    return Constant(name, name, (f"stacks/{_COMPOSER_STACK}.toml",), 0.0, high, "", means)


GROUPS = {
    group.name: group
    for group in (
        ConstantGroup(
            "v100-zeropp",
            "zeropp",
            "V100",
            ("dgx2-calibrated",),
            (
                Constant(
                    "operand_efficiency", "gpu.kernels.operand_efficiency",
                    ("stacks/deepspeed-2023.toml",), 0.02, 1.0, "",
                    _OPERANDS, inside=("NVIDIA V100-SXM2-32GB",),
                ),
                Constant(
                    "exchange_efficiency", "inter.exchange_efficiency",
                    ("clusters/dgx2-calibrated.toml",), 0.1, 1.0, "",
                    "fraction of the NICs' bandwidth left to the all-to-all of quantized gradients",
                ),
            ),
        ),
        ConstantGroup(
            "a100-data-parallel",
            "vtrain",
            "A100",
            ("a100-node-calibrated",),
            (
                Constant(
                    "operand_efficiency", "gpu.kernels.operand_efficiency",
                    ("stacks/deepspeed-2023.toml",), 0.02, 1.0, "",
                    _OPERANDS, inside=_A100,
                ),
                Constant(
                    "vocabulary_efficiency", "gpu.kernels.vocabulary_efficiency",
                    ("stacks/deepspeed-2023.toml",), 0.05, 0.9, "",
                    "fraction of the peak that the product over the vocabulary attains",
                    inside=_A100,
                ),
                Constant(
                    "call_overhead", "gpu.kernels.call_overhead",
                    ("stacks/deepspeed-2023.toml",), 1e-6, 2e-4, "s",
                    "time in which the host issues one operation", inside=_A100,
                ),
                Constant(
                    "kernel_gap", "gpu.kernels.kernel_gap",
                    ("stacks/deepspeed-2023.toml",), 0.0, 3e-5, "s",
                    "time that the GPU loses at every operation of the framework, views included",
                    inside=_A100,
                ),
            ),
        ),
        ConstantGroup(
            "a100-co2",
            "co2",
            "A100",
            ("a100-tcp80-calibrated",),
            (
                Constant(
                    "compute_efficiency", "gpu.efficiency",
                    ("stacks/transnormer-2023.toml",), 0.05, 0.9, "",
                    "fraction of the GPU's peak that the passes of TransNormerLLM attain",
                ),
                Constant(
                    "tcp_efficiency", "inter.efficiency",
                    ("clusters/a100-tcp80-calibrated.toml",), 0.05, 1.0, "",
                    "fraction of 80 Gbit/s that the collectives of NCCL attain over TCP",
                ),
            ),
            (
                # 4.7 GB/s of "around 6 GB/s", and "8Gbps" of 10
                ExternalConstant("inter.relay_efficiency", 4.7 / 6.5, 4.7 / 5.5),
                ExternalConstant("inter.busy_efficiency", 0.75, 0.85),
            ),
        ),
        ConstantGroup(
            "mpt-fsdp",
            "llm_foundry",
            "H100, A100",
            tuple(cluster for cluster, _ in _COMPOSER.values()),
            (
                *(
                    _of_kernels("gemm_efficiency", 0.3, "fraction of the peak", kind)
                    for kind in _COMPOSER
                ),
                *(_of_kernels("operand_efficiency", 0.02, _OPERANDS, kind) for kind in _COMPOSER),
                *(
                    _of_kernels("attention_efficiency", 0.05, "fraction of the peak", *kinds)
                    for kinds in (("H100",), ("A100-80", "A100-40"))
                ),
                _of_kernels(
                    "vocabulary_efficiency", 0.05,
                    "fraction of the peak that the product over the vocabulary attains", *_COMPOSER,
                ),
                # Lee et al. 2025, arXiv 2507.03114: 19 % on average, up to 40 %
                _of_clusters(
                    "interference", 0.4, "slowdown of computation while communication is in flight"
                ),
                # Sinha et al., SC22, arXiv 2208.11035: 8 % on average over GPUs of one kind
                _of_clusters("node_spread", 0.08, "sigma of the speed of nodes"),
            ),
            stack=_COMPOSER_STACK,
            robust=0.03,
            # runs that differ in GPUs only: what the model misses of computation cancels, and with
            # it most of the scatter, which is 3 % over all runs and 1 % within such families
            ratio_weight=3.0,
            apart=("gpu",),
        ),
    )
}  # fmt: skip


def stated(group: ConstantGroup) -> dict[str, float]:
    """The constants as the catalog states them."""
    values = {}
    for constant in group.constants:
        cluster = cluster_of((constant.clusters or group.clusters)[0], group.stack)
        value = value_at(cluster, constant.path)
        if value is None:
            raise OptionError(f"{cluster.name} has no {constant.path}")
        values[constant.name] = value
    return values


@lru_cache(_MAX_ENTRIES)
def cluster_of(reference: str, stack: str = "") -> Cluster:
    """A cluster of the catalog, as it is with a stack, or with its own; read once."""
    cluster = load_cluster(reference).value
    return load_stack(stack or cluster.stack or DEFAULT_STACK).value.within(cluster)
