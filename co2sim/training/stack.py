"""Software stacks: what a training framework of a year does with a GPU and with a model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from co2sim.common.resources import remembered
from co2sim.common.validation import Count, Fraction, Multiple, Quantity, Slowdown, Spread, check
from co2sim.hardware.cluster import GPU, Cluster, KernelTimes, one_efficiency
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.pipeline import PipelineSchedule
from co2sim.training.framework import Factor, Framework, recomputation

Flash = Literal["flash1", "flash2", "cudnn", "triton", ""]
"""An implementation of flash attention; files of GPUs say how fast each is."""

Shares = Literal["nothing", "states", "parameters", "steps", "other"]
"""What replicas share: nothing, optimizer states, parameters too, the outcome of steps, or what is
not known of a strategy of a user's own."""

Overhead = Annotated[float, Quantity(unit="s", least=0, most=0.1)]
Sustained = Annotated[float, Quantity(least=0.01, most=1)]
Misfit = Annotated[float, Quantity(least=0, most=10)]
Waiting = Annotated[float, Quantity(least=0, most=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run is like, so that others can be more or less like it.

    `gpu` is the generation, `divided` tp x pp, and `tokens` those of a pass on a GPU. `network` is
    the speed between nodes in bit/s a GPU, 0 on one node. `kernels` names precision, attention and
    recomputation, empty for a published run. `exposed` is the share of a round that waits for
    communication, `host` what the host needs to issue passes over what the GPU needs for them.
    `experts`, `context` and `narrow` say whether its model has experts, whether ranks divide
    sequences, and whether products are in fp8 or below; `strange` that nothing is published of its
    GPU. `spread` is that of the stack. `misfit` is by how much the logarithm of its throughput is
    off with the stack that it calibrated.
    """

    gpu: str
    gpus: Count
    parameters: Multiple
    shares: Shares
    divided: Count
    tokens: Multiple
    network: float = 0.0
    kernels: str = ""
    nodes: Count = 1
    exposed: Waiting = 0.0
    host: Waiting = 0.0
    experts: bool = False
    context: bool = False
    narrow: bool = False
    strange: bool = False
    spread: Misfit = 0.0
    misfit: Misfit = 0.0

    def __post_init__(self) -> None:
        """Refuse what no run can be."""
        check(self, "measured")


CALIBRATED = ", calibrated by "
"""What follows in the name of a stack, once it was calibrated."""


CHANGED = ", with "
"""What follows in the name of a thing of the catalog, once numbers of it were changed."""


def plain_name(name: str) -> str:
    """The name of a stack before it was calibrated, and before numbers of it were changed."""
    return name.partition(CALIBRATED)[0].partition(CHANGED)[0]


Division = Literal["tp", "sequence_parallel", "cp", "ep", "etp", "pp", "interleave"]
"""A field of a mesh that may be larger than 1."""


Ordering = Literal["zb_h1", "zb_h1+interleave", "zbv", "dualpipe"]
"""A schedule of a pipeline other than 1F1B; what is interleaved is named apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Strategies that a stack can run, and how GPUs may divide the model with them.

    `schedules` are those of its pipelines besides 1F1B.

    `strategies` are written as users write them, with the options that they have to have, and "|"
    between values of which they may have any: "fsdp:version=2,reduce=fp32|bf16".
    """

    strategies: tuple[str, ...]
    divides: tuple[Division, ...] = ()
    schedules: tuple[Ordering, ...] = ()

    def orders(self, mesh: Mesh) -> bool:
        """Whether it has the schedule of a mesh."""
        more = "+interleave" * (mesh.interleave > 1)
        return mesh.schedule == "1f1b" or mesh.schedule + more in self.schedules


def needs_of(text: str) -> dict[str, list[str]]:
    """The values that options may have, of a text of `Runs`."""
    pairs = (part.partition("=") for part in text.partition(":")[2].split(",") if part)
    return {option: values.split("|") for option, _, values in pairs}


def _nearest_way(texts: Sequence[str], options: Mapping[str, str]) -> str:
    """The options of these that are missing from the nearest of some texts of `Runs`."""
    ways = [
        [
            f"{name}={' or '.join(values)} (not {options.get(name)})"
            for name, values in needs_of(text).items()
            if options.get(name) not in values
        ]
        for text in texts
    ]
    nearest = min(ways, key=len)
    return " and ".join(nearest)


CONTEXT_TOKENS = 4096
"""Of a sequence that a GPU keeps at least.

NeMo's Llama 3 70B and 405B divide 8,192 between 2 (NVIDIA/dgxc-benchmarking at commit 143b90d,
llama3.1/README_405b.md). Llama 3 itself had 8,192 of 131,072 (arXiv 2407.21783, table 4).
"""


@dataclass(frozen=True, kw_only=True)
class Stack(Framework):
    """A training framework with its libraries and settings.

    `flash` names its implementation of flash attention, as files of GPUs do. Its elementwise
    kernels move `elementwise` times the least memory traffic, and its host needs `call_overhead`
    to issue an operation, but for the fraction `graphs` of them that CUDA graphs repeat. Products
    of experts run at the fraction `grouped` of the speed of others.
    `kernels` are fitted constants by the generation or the name of a GPU,
    where there are some: they stand for all of these; so does `efficiency`, the fraction of peak
    that all passes attain, where no more was published. `plan` leaves each of the ranks that divide
    sequences `context_tokens` of one at least, unless it is asked for other numbers.

    `runs` are the strategies that it can run, with what `precisions`, `recomputes` ("full/K" stands
    for every K) and `offloads`; what is empty, of `offloads` None, is not known, and counts as all.
    `always_divides_sequence`: GPUs that share layers divide the sequence, too;
    `experts_divide_sequence`: they do in models with experts. `spread` is the standard deviation of
    the logarithm of throughput between trainers that it stands for, where it stands for several
    that are not known apart.

    A stack that was calibrated on a cluster also has numbers of that: the fraction of the speed of
    products that is `sustained`, `network_efficiency` and `ring_loss` of the links between nodes,
    `interference` and `node_spread`. None: that of the cluster. `measured` are the runs that it was
    calibrated by.
    """

    name: str
    flash: Flash
    elementwise: Factor
    call_overhead: Overhead
    graphs: Waiting = 0.0
    grouped: Fraction = 1.0
    context_tokens: Count = CONTEXT_TOKENS
    runs: tuple[Runs, ...] = ()
    precisions: tuple[str, ...] = ()
    recomputes: tuple[str, ...] = ()
    offloads: tuple[str, ...] | None = None
    always_divides_sequence: bool = False
    experts_divide_sequence: bool = False
    spread: Misfit = 0.0
    efficiency: Fraction | None = None
    kernels: Mapping[str, KernelTimes] = field(default_factory=dict)
    sustained: Sustained | None = None
    network_efficiency: Fraction | None = None
    ring_loss: Slowdown | None = None
    interference: Slowdown | None = None
    node_spread: Spread | None = None
    measured: tuple[Setting, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no stack can be."""
        check(self, self.name)

    def lacks(self, strategy: str, options: Mapping[str, str], mesh: Mesh) -> str:
        """What it lacks of a strategy with these options on a mesh; empty: nothing."""
        if not self.runs:
            return ""
        texts = [text for run in self.runs for text in run.strategies]
        of_name = [text for text in texts if text.partition(":")[0] == strategy]
        if not of_name:
            names = dict.fromkeys(text.partition(":")[0] for text in texts)
            return f"no {strategy}; it has {', '.join(names)}"
        allowed = {
            text
            for text in of_name
            if all(options.get(name) in values for name, values in needs_of(text).items())
        }
        fitting = [run for run in self.runs if allowed.intersection(run.strategies)]
        if not fitting:
            return f"{strategy} only with {_nearest_way(of_name, options)}"
        used = [name for name in get_args(Division) if getattr(mesh, name) not in {1, False}]
        missing = [name for name in used if not any(name in run.divides for run in fitting)]
        if not (missing or any(run.orders(mesh) for run in fitting)):
            interleaved = f" and interleave={mesh.interleave}" * (mesh.interleave > 1)
            missing = [f"schedule={mesh.schedule}{interleaved}"]
        if self.always_divides_sequence and mesh.tp > 1 and not (mesh.sequence_parallel or missing):
            return f"tp={mesh.tp} only with sequence_parallel"
        if not missing:
            return ""
        others = [
            text
            for run in self.runs
            for text in run.strategies
            if text in of_name and {*missing} <= {*run.divides}
        ]
        as_other = f", but as {others[0]}" if others else ""
        return f"no {' and no '.join(missing)} with {strategy}{as_other}"

    def schedules_of(self, strategy: str, mesh: Mesh) -> Iterator[PipelineSchedule]:
        """Those that it has for the stages of a mesh with a strategy; 1F1B comes first."""
        of_name = [
            run
            for run in self.runs
            if any(text.partition(":")[0] == strategy for text in run.strategies)
        ]
        for kind in get_args(PipelineSchedule):
            if kind == "1f1b" or any(run.orders(replace(mesh, schedule=kind)) for run in of_name):
                yield kind

    def needs(self, strategy: str) -> list[dict[str, list[str]]]:
        """What options of a strategy may be, in each of the ways that the stack has it."""
        texts = (text for run in self.runs for text in run.strategies)
        return [needs_of(text) for text in texts if text.partition(":")[0] == strategy]

    def recomputes_by(self, recompute: str) -> bool:
        """Whether it can compute activations again so."""
        again = recomputation(recompute)
        ways = again.operators or (again.kind if again.every == 1 else "full/K",)
        return not self.recomputes or all(way in self.recomputes for way in ways)

    def within(self, cluster: Cluster, fixed: Collection[str] = ()) -> Cluster:
        """The cluster as it is when the stack runs on it; the paths in `fixed` stay."""
        return self._within(cluster, frozenset(fixed))

    @remembered(objects=2, most=64)
    def _within(self, cluster: Cluster, fixed: frozenset[str]) -> Cluster:
        gpu, inter = cluster.gpu, cluster.inter
        if gpu.products and self.sustained is not None and "gpu.products.sustained" not in fixed:
            gpu = replace(gpu, products=replace(gpu.products, sustained=self.sustained))
        if self.network_efficiency is not None and "inter.efficiency" not in fixed:
            inter = replace(inter, efficiency=self.network_efficiency)
        if self.ring_loss is not None and "inter.ring_loss" not in fixed:
            inter = replace(inter, ring_loss=self.ring_loss)
        names = "interference", "node_spread"
        effects = {name: getattr(self, name) for name in names if name not in fixed}
        effects = {name: value for name, value in effects.items() if value is not None}
        return replace(cluster, gpu=self.on(gpu), inter=inter, **effects)

    def on(self, gpu: GPU) -> GPU:
        """The GPU with the times of the kernels that the stack runs on it.

        A GPU whose kernels are known keeps them. One of whose products nothing is known has none.
        """
        if gpu.kernels is not None or gpu.stack:
            return gpu
        if self.efficiency is not None:
            return replace(gpu, efficiency=one_efficiency(self.efficiency), stack=self.name)
        fitted = self.kernels.get(gpu.name) or self.kernels.get(gpu.generation or "")
        if fitted is not None:
            return replace(gpu, kernels=fitted, stack=self.name)
        if gpu.products is None:
            return gpu
        speed, products = gpu.attention.get(self.flash), gpu.products
        times = KernelTimes(
            gemm_efficiency=products.efficiency * products.sustained,
            operand_efficiency=products.operand_efficiency,
            product_start=products.start,
            elementwise=self.elementwise,
            attention_efficiency=speed.forward if speed else None,
            attention_half_length=speed.half_length if speed else 0,
            attention_backward=speed.backward / speed.forward if speed else 1.0,
            call_overhead=self.call_overhead * (1 - self.graphs),
            narrow_efficiency=(products.narrow or products.efficiency) * products.sustained,
            grouped=self.grouped,
        )
        return replace(gpu, kernels=times, stack=self.name)


UNNAMED = Stack(name="", flash="", elementwise=1.0, call_overhead=0.0)
"""What is taken of a framework where the file of a GPU, or nothing, says how fast kernels are."""
