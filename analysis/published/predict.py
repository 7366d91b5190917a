"""Published cells, and their prediction by simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from analysis.published.parameters import GROUPS, cluster_of, model_of, with_constants
from co2sim import metrics, study
from co2sim.case import Case, Prepared
from co2sim.cluster import Cluster
from co2sim.cost import compute_time, footprint
from co2sim.schedule import Collective, Compute, Kind, Schedule
from co2sim.simulator import execute
from co2sim.units import Seconds
from co2sim.workload import Recompute

Use = Literal["fit", "check"]

Quantity = Literal["tflops_per_gpu", "tokens_per_s", "iteration_ms", "inter_node_volume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One configuration of a published run, all of it by name."""

    cluster: str
    model: str
    strategy: str
    gpus: int
    precision: str
    micro_batch: int = 1
    accumulation: int = 1
    recompute: Recompute = "selective"
    overrides: tuple[tuple[str, str], ...] = ()
    model_overrides: tuple[tuple[str, str], ...] = ()

    def case(self, group: str, values: Mapping[str, float] | None) -> Case:
        """As a question to the simulator; `values` replace fitted constants."""
        cluster: Cluster = cluster_of(self.cluster, self.overrides)
        if values:
            cluster = with_constants(cluster, GROUPS[group], values)
        return Case(
            cluster=cluster,
            model=model_of(self.model, self.model_overrides),
            strategy=self.strategy,
            gpus=self.gpus,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            precision=self.precision,
            recompute=self.recompute,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A quantity of one configuration, or the `part` of it that some collectives make up."""

    setup: Setup
    quantity: Quantity
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One published number: a term, or with `over` the ratio of pairs of terms.

    Of several ratios the largest or the smallest counts (`pick`). `rounding` is the step of the
    printed number. `per_gpu` divides each term by its GPUs.
    """

    source: str
    name: str
    strategy: str
    group: str
    published: float
    use: Use
    terms: tuple[Term, ...]
    over: tuple[Term, ...] = ()
    pick: Literal["max", "min"] = "max"
    per_gpu: bool = False
    rounding: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


def changed(cell: Cell, change: Callable[[Setup], Setup]) -> Cell:
    """The cell with all its configurations changed."""

    def of(term: Term) -> Term:
        return replace(term, setup=change(term.setup))

    return replace(
        cell, terms=tuple(of(term) for term in cell.terms), over=tuple(of(t) for t in cell.over)
    )


def with_override(cell: Cell, path: str, text: str) -> Cell:
    """The cell with one number of its clusters changed."""
    return changed(cell, lambda setup: replace(setup, overrides=(*setup.overrides, (path, text))))


def predict(cell: Cell, values: Mapping[str, float] | None = None, *, fast: bool = False) -> float:
    """What the simulator gives for a cell; `fast` is for fits and derivatives.

    It sums a serial schedule, and extrapolates from few layers to many: both agree with the whole
    simulation to a hundredth of a percent, which tests hold.

    `values` replace constants of the cell's group.
    """
    fixed = tuple(sorted(values.items())) if values else ()

    def of(term: Term) -> float:
        found = evaluate(term, cell.group, fixed, fast=fast)
        return found / term.setup.gpus if cell.per_gpu else found

    if not cell.over:
        return of(cell.terms[0])
    ratios = [of(a) / of(b) for a, b in zip(cell.terms, cell.over, strict=True)]
    return max(ratios) if cell.pick == "max" else min(ratios)


@cache
def evaluate(term: Term, group: str, values: tuple[tuple[str, float], ...], *, fast: bool) -> float:
    """The value of a term."""
    setup = term.setup
    if term.quantity == "inter_node_volume":
        return _volume(setup, group, term.part)
    case = setup.case(group, dict(values))
    if fast and _is_serial(setup):
        step = _serial_step(setup, case)
    elif fast and setup.strategy.startswith(("zero3", "zeropp")):
        step = _extrapolated(setup, group, values)
    else:
        step = step_time(case)
    if term.quantity == "iteration_ms":
        return step * 1e3
    job = _prepared(setup, group).job
    samples = job.samples_per_gpu / step
    if term.quantity == "tokens_per_s":
        return samples * job.model.tokens * setup.gpus
    return samples * job.hardware_flops_per_sample / 1e12


def _volume(setup: Setup, group: str, part: str) -> float:
    """What a node sends to others in a step, as a multiple of the model in its training type.

    `part` is `total`, or one of those that `_part` names. Scales are not counted.
    """
    prepared = _prepared(setup, group)
    cluster: Cluster = cluster_of(setup.cluster, setup.overrides).resized(setup.gpus)
    sent = sum(
        footprint(replace(op.work, scale_block=0), cluster).loads(cluster)[1]
        for op in prepared.schedule.body
        if isinstance(op.work, Collective) and part in {"total", _part(op.name, op.work)}
    )
    return sent / (prepared.job.parameters * prepared.job.precision.bytes)


def _part(name: str, work: Collective) -> str:
    """The part of a step of ZeRO-3 that a collective belongs to."""
    if work.kind != Kind.ALL_GATHER:
        return "gradient_reduce_scatter"
    return "forward_all_gather" if ".forward." in name else "backward_all_gather"


def step_time(case: Case) -> Seconds:
    """Simulated time of an optimizer step, in the steady state."""
    schedule, trace = study.trace(case)
    return metrics.window(trace, schedule, 1).round_time / schedule.steps


_FEW, _MORE = 2, 3
"""Layers that are simulated for `fast`."""


def _extrapolated(setup: Setup, group: str, values: tuple[tuple[str, float], ...]) -> Seconds:
    """From two shorter models: a step of equal layers grows by the same time with each."""
    layers = len(_prepared(setup, group).job.model.blocks) - 2

    case = setup.case(group, dict(values))
    assert isinstance(case.cluster, Cluster)
    cluster = case.cluster.resized(setup.gpus)

    def of(count: int) -> Seconds:
        schedule = _shorter(setup, group, count)
        trace = execute(schedule, cluster, precision=setup.precision, rounds=2)
        return metrics.window(trace, schedule, 1).round_time

    few = of(_FEW)
    return few + (of(_MORE) - few) * (layers - _FEW) / (_MORE - _FEW)


@cache
def _shorter(setup: Setup, group: str, layers: int) -> Schedule:
    """The schedule of a model with fewer layers: it does not depend on the fitted constants."""
    changed = (*setup.model_overrides, ("layers", str(layers)))
    return replace(setup, model_overrides=changed).case(group, None).prepare().schedule


@cache
def _prepared(setup: Setup, group: str) -> Prepared:
    return setup.case(group, None).prepare()


def _is_serial(setup: Setup) -> bool:
    """Whether nothing overlaps: one bucket, which closes when the backward pass has ended."""
    return setup.strategy == ONE_BUCKET


ONE_BUCKET = "ddp:bucket_mib=1000000"
"""Gradients in one buffer, reduced after the last backward pass, as Megatron-LM does it."""


@cache
def _works(setup: Setup) -> list[tuple[Compute | Collective, int]]:
    """Different works of a schedule, and how often each runs."""
    body = setup.case("", None).prepare().schedule.body
    counted: dict[Compute | Collective, int] = {}
    for op in body:
        counted[op.work] = counted.get(op.work, 0) + 1
    return list(counted.items())


def _serial_step(setup: Setup, case: Case) -> Seconds:
    """The sum of all works, each alone."""
    assert isinstance(case.cluster, Cluster)
    cluster = case.cluster.resized(setup.gpus)
    return sum(count * _alone(work, cluster, setup.precision) for work, count in _works(setup))


def _alone(work: Compute | Collective, cluster: Cluster, precision: str) -> Seconds:
    if isinstance(work, Compute):
        return compute_time(work, cluster.gpu, precision)
    return footprint(work, cluster).alone(cluster)


def phases(cell: Cell) -> dict[str, Seconds]:
    """Seconds of a serial step by kernel or collective: forward, backward, optimizer, all_reduce.

    Empty for cells whose steps overlap, or that are no single term.
    """
    setup = cell.terms[0].setup
    if cell.over or not _is_serial(setup):
        return {}
    case = setup.case(cell.group, None)
    assert isinstance(case.cluster, Cluster)
    found: dict[str, Seconds] = {}
    for work, count in _works(setup):
        name = work.kernel if isinstance(work, Compute) else str(work.kind)
        time = count * _alone(work, case.cluster.resized(setup.gpus), setup.precision)
        found[name] = found.get(name, 0.0) + time
    return found
