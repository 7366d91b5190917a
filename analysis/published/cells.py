"""Published cells, the configurations behind them, and changes to these."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from analysis.published.parameters import GROUPS, cluster_of, model_of
from co2sim.common.errors import OptionError, nearest
from co2sim.hardware.cluster import Cluster
from co2sim.models.workload import AttentionKernel, Checkpointing, Loss, Recompute, Workload
from co2sim.prediction.calibrations import figures_of, replaced
from co2sim.prediction.case import Case
from co2sim.prediction.intervals import RunKind, kind_of
from co2sim.prediction.published import Use
from co2sim.strategies import STRATEGIES, Strategy, parse, with_options
from co2sim.strategies.step import title

Quantity = Literal["tflops_per_gpu", "tokens_per_s", "iteration_ms", "inter_node_volume"]

ONE_BUCKET = parse("ddp:bucket_mib=1000000")
"""Gradients in one buffer, reduced after the last backward pass, as Megatron-LM does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The configuration of a published run.

    `overrides` and `model_overrides` are dotted paths with texts, as the catalog takes them.
    `constants` are fitted constants that replace those of the catalog: the path in a `Cluster`, and
    the value in SI units.
    """

    cluster: str
    model: str
    strategy: Strategy
    gpus: int
    precision: str
    micro_batch: int = 1
    accumulation: int = 1
    attention: AttentionKernel = "flash"
    recompute: Recompute = "none"
    checkpointing: Checkpointing = "non_reentrant"
    loss: Loss = "fused"
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    overrides: tuple[tuple[str, str], ...] = ()
    model_overrides: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, float], ...] = ()

    def whole_cluster(self) -> Cluster:
        """The cluster, of which the run may use a part."""
        cluster = cluster_of(self.cluster, self.overrides)
        for path, value in self.constants:
            cluster = replaced(cluster, path, value)
        return cluster

    def used_cluster(self) -> Cluster:
        """The part of the cluster that the run uses. Raises OptionError if it fills no nodes."""
        return self.whole_cluster().resized(self.gpus)

    def case(self) -> Case:
        """As a question to the simulator."""
        return Case(
            cluster=self.whole_cluster(),
            model=model_of(self.model, self.model_overrides),
            strategy=self.strategy,
            gpus=self.gpus,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            precision=self.precision,
            attention=self.attention,
            recompute=self.recompute,
            checkpointing=self.checkpointing,
            loss=self.loss,
            tp=self.tp,
            pp=self.pp,
            sequence_parallel=self.sequence_parallel,
        )

    def as_stated(self) -> "RunSetup":
        """With the constants of the catalog."""
        return replace(self, constants=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A quantity of one configuration, or the `part` of it that some collectives make up."""

    setup: RunSetup
    quantity: Quantity
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One published number: a term, or with `over` the ratio of pairs of terms.

    Of several ratios the largest or the smallest counts (`pick`). `per_gpu` divides both terms of
    a ratio by their GPUs. `group` names the constants that it depends on, and is empty where none
    were fitted. `rounding` is the step of the printed number. `labels` tell cells of a group apart,
    such as their micro-batch. `where` is the place in the source, such as a figure; it is empty for
    rows of further tables.
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
    where: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def setup(self) -> RunSetup:
        """The configuration of the first term."""
        return self.terms[0].setup

    @property
    def setups(self) -> tuple[RunSetup, ...]:
        """The configurations of all terms."""
        return tuple(term.setup for term in (*self.terms, *self.over))


def run_kind(setup: RunSetup) -> RunKind | None:
    """The kind of a run; see `co2sim.kinds`. Runs with tensor or pipeline parallelism have none."""
    if setup.tp * setup.pp > 1:
        return None
    model = model_of(setup.model, setup.model_overrides)
    return kind_of(setup.used_cluster(), setup.strategy, model)


def run_figures(setup: RunSetup) -> dict[str, float]:
    """Where a run lies; see `co2sim.near`."""
    model = model_of(setup.model, setup.model_overrides)
    return figures_of(setup.used_cluster(), model, setup.precision)


def check_runs(cell: Cell) -> None:
    """Refuse what the simulator cannot run: GPUs that fill no nodes, an unknown model, its batch.

    Raises Co2simError.
    """
    for term in (*cell.terms, *cell.over):
        setup = term.setup
        setup.used_cluster()
        model = model_of(setup.model, setup.model_overrides)
        Workload(model, setup.micro_batch, setup.accumulation)


def changed(cell: Cell, change: Callable[[RunSetup], RunSetup]) -> Cell:
    """The cell with all its configurations changed."""

    def of(term: Term) -> Term:
        return replace(term, setup=change(term.setup))

    return replace(
        cell, terms=tuple(of(term) for term in cell.terms), over=tuple(of(t) for t in cell.over)
    )


def with_override(cell: Cell, path: str, text: str) -> Cell:
    """The cell with one number of its clusters changed."""
    return changed(cell, lambda setup: replace(setup, overrides=(*setup.overrides, (path, text))))


def with_constants(cell: Cell, values: Mapping[str, float]) -> Cell:
    """The cell with other values of constants of its group, by their names."""

    def change(setup: RunSetup) -> RunSetup:
        mine = GROUPS[cell.group].on(setup.cluster)
        return _replaced(setup, {one.path: values[one.name] for one in mine if one.name in values})

    return changed(cell, change)


def with_values(cell: Cell, values: Mapping[str, float]) -> Cell:
    """The cell with other numbers of its clusters, by their paths, in SI units."""
    return changed(cell, lambda setup: _replaced(setup, values))


def _replaced(setup: RunSetup, values: Mapping[str, float]) -> RunSetup:
    return replace(setup, constants=tuple({**dict(setup.constants), **values}.items()))


def with_strategy_options(cell: Cell, strategy: str, options: Mapping[str, str]) -> Cell:
    """The cell with other options, as texts, wherever it runs the strategy of that name.

    Raises OptionError for an unknown strategy or option, and where nothing would change because a
    strategy has these options already.
    """
    if strategy not in STRATEGIES:
        raise OptionError(f"unknown strategy {strategy!r}; {nearest(strategy, STRATEGIES)}")

    def change(setup: RunSetup) -> RunSetup:
        if setup.strategy.name != strategy:
            return setup
        new = with_options(setup.strategy, options)
        if new == setup.strategy:
            shown = ", ".join(f"{name}={text}" for name, text in options.items())
            raise OptionError(f"{cell.name}: {shown} changes nothing in {title(setup.strategy)}")
        return replace(setup, strategy=new)

    return changed(cell, change)
