"""Published cells, the configurations behind them, and changes to these."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from analysis.published.papers import PAPERS, Paper, papers
from analysis.published.parameters import GROUPS, cluster_of, model_of
from co2sim.common.errors import CatalogError, Co2simError, OptionError, nearest
from co2sim.hardware.cluster import Cluster
from co2sim.models.framework import AttentionKernel, Checkpointing, Loss
from co2sim.models.recompute import Recompute
from co2sim.models.workload import Workload
from co2sim.prediction.calibrations import figures_of, replaced
from co2sim.prediction.case import Case
from co2sim.prediction.intervals import RunKind, kind_of
from co2sim.prediction.published import (
    AnyCell,
    IterationCell,
    QualityCell,
    ScalabilityCell,
    SpeedCell,
    SpeedupCell,
    TflopsCell,
    ThroughputCell,
    ThroughputRatioCell,
    Use,
    VolumeCell,
    read_cells,
)
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
    the value in SI units. `stack` names that whose kernels run; empty where the GPU has its own.
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
    stack: str = ""

    def whole_cluster(self) -> Cluster:
        """The cluster, of which the run may use a part."""
        cluster = cluster_of(self.cluster, self.overrides, self.stack)
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


_ZEROPP = "zeropp"
"""The one source whose models and clusters ZeRO++'s kinds of cells name."""


@dataclass(frozen=True, slots=True)
class Unpredicted:
    """A published cell that no error is stated for, and why, in a few words.

    `cell` is there where it can be simulated nonetheless, so that a figure can show it.
    """

    source: str
    name: str
    row: AnyCell
    reason: str
    cell: Cell | None = None

    @property
    def published(self) -> float:
        """Its value."""
        return self.row.value


def from_papers(folder: Path = PAPERS) -> list[Cell]:
    """Every cell of `papers/` that is predicted."""
    return [found for found in _read(folder) if isinstance(found, Cell)]


def unpredicted(folder: Path = PAPERS) -> list[Unpredicted]:
    """Every other cell of `papers/`."""
    return [found for found in _read(folder) if isinstance(found, Unpredicted)]


def _read(folder: Path) -> Iterator[Cell | Unpredicted]:
    sources = papers(folder)
    for path in sorted(folder.glob("*/results.toml")):
        key = path.parent.name
        for number, row in enumerate(read_cells(path), start=1):
            try:
                found = _converted(sources.get(key), row)
            except Co2simError as error:
                raise CatalogError(f"{path}, cell {number}: {error}") from error
            found = _runnable(found) if isinstance(found, Cell) else found
            cell = replace(found, where=row.where) if isinstance(found, Cell) else None
            reason = _without_error(row) if cell else str(found)
            if cell and not reason:
                yield cell
            else:
                parts = [row.quantity.replace("_", " ")]
                parts += [getattr(row, name, None) or "" for name in ("part", "model", "strategy")]
                yield Unpredicted(key, ", ".join(part for part in parts if part), row, reason, cell)


def _without_error(row: AnyCell) -> str:
    """Why no error is stated for a cell that can be simulated; empty where one is."""
    if not row.value:
        return "an error relative to zero"
    whole_figure = isinstance(row, SpeedupCell) and row.tokens_per_gpu is None
    return "a ratio of cells marked fit" if whole_figure else ""


def _runnable(cell: Cell) -> Cell | str:
    """The cell, or why the simulator cannot run it, such as a model that it does not know."""
    try:
        check_runs(cell)
    except Co2simError as error:
        return str(error)
    return cell


def _converted(paper: Paper | None, row: AnyCell) -> Cell | str:
    """A cell, or why it is not predicted; `paper` is None where none says how to simulate it."""
    found: Cell | str
    match row:
        case QualityCell():
            found = "quality of training"
        case _ if paper is None:
            found = "no [simulation] in its paper.toml"
        case ThroughputCell() | ScalabilityCell():
            found = _speed(paper, row)
        case IterationCell():
            found = iteration_cell(paper, row)
        case _ if paper.key != _ZEROPP:
            found = f"this quantity is predicted for {_ZEROPP} only"
        case TflopsCell():
            found = tflops_cell(paper, row)
        case SpeedupCell():
            found = speedup_cell(paper, row)
        case ThroughputRatioCell():
            found = throughput_ratio_cell(paper, row)
        case VolumeCell():
            found = volume_cell(paper, row)
    return found


def _speed(paper: Paper, row: SpeedCell) -> Cell | str:
    name = row.strategy.partition(":")[0].partition("(")[0]
    if name not in STRATEGIES:
        return f"no strategy is called {name!r}"
    run = PublishedRun(cluster=paper.cluster(row.cluster), model=row.model, strategy=row.strategy)
    if isinstance(row, ThroughputCell):
        cell = throughput_cell(paper, run, row.gpus, row.value, row.use)
    else:
        cell = ratio_cell(paper, run, (row.from_gpus, row.to_gpus), row.value, row.use)
    return replace(cell, rounding=row.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """What a published throughput was measured with; the cluster is the one to simulate."""

    cluster: str
    model: str
    strategy: str

    def term(self, paper: Paper, gpus: int) -> Term:
        """Its throughput on a number of GPUs, with what the paper leaves open."""
        tokens, sequences = paper.setting("tokens_per_gpu"), paper.simulation.micro_batch
        if tokens % sequences:
            raise OptionError(f"{tokens} tokens per GPU are not {sequences} equal sequences")
        setup = RunSetup(
            cluster=self.cluster,
            model=self.model,
            model_overrides=(("seq_len", str(tokens // sequences)),),
            micro_batch=sequences,
            strategy=parse(paper.strategy(self.strategy)),
            gpus=gpus,
            precision=paper.setting("precision"),
            **paper.training,
        )
        return Term(setup=setup, quantity="tokens_per_s")

    def group(self, paper: Paper) -> str:
        """The group of constants that were fitted to such runs; empty where none were."""
        if self.model != paper.simulation.model:
            return ""
        mine = (g for g in GROUPS.values() if g.source == paper.key and self.cluster in g.clusters)
        return next((one.name for one in mine), "")


def throughput_cell(paper: Paper, run: PublishedRun, gpus: int, value: float, use: Use) -> Cell:
    """A published throughput."""
    return Cell(
        source=paper.key,
        name=f"{paper.model_name(run.model)}, {gpus} GPUs, {run.strategy}",
        strategy=run.strategy.partition(",")[0],
        group=run.group(paper),
        published=value,
        use=use,
        terms=(run.term(paper, gpus),),
        labels={"gpus": str(gpus)},
    )


def ratio_cell(
    paper: Paper, run: PublishedRun, sizes: tuple[int, int], value: float, use: Use
) -> Cell:
    """A published scalability ratio."""
    small, large = sizes
    return Cell(
        source=paper.key,
        name=f"{paper.model_name(run.model)}, {small} to {large} GPUs, ratio, {run.strategy}",
        strategy=run.strategy.partition(",")[0],
        group=run.group(paper),
        published=value,
        use=use,
        terms=(run.term(paper, large),),
        over=(run.term(paper, small),),
        per_gpu=True,
    )


SIZES = (18, 49, 91, 138)
"""Of the models of ZeRO++, in billions of parameters."""

_LINK_GBITS = 100

_SHAPE_KNOWN = 18
"""The one model of ZeRO++ whose shape is published."""

_TOKENS = (1024, 2048)
"""Tokens per GPU of the figure that states a ratio over all its bars."""

_RATIO_TOKENS = 2048
"""Tokens per GPU of the figure that states ratios as texts."""

_RATIO_ROUNDING = 0.1
"""What "similar throughput" leaves open."""


def _size(model: str) -> int:
    """Billions of parameters of one of ZeRO++'s models, `gpt-18b` for 18."""
    return _number(model, "gpt-", "b")


def _links(cluster: str) -> int:
    """InfiniBand links of one of ZeRO++'s clusters, `dgx2-ib8` for 8."""
    return _number(cluster, "dgx2-ib", "")


def _number(name: str, before: str, after: str) -> int:
    text = name.removeprefix(before).removesuffix(after)
    if not (text.isascii() and text.isdigit()):
        raise CatalogError(
            f"{name!r} is not a name of ZeRO++'s table: it must be {before}NUMBER{after}"
        )
    return int(text)


def zeropp_term(paper: Paper, size: int, tokens: int, links: int, strategy: str) -> Term:
    """Throughput of a model of `size` billion parameters at some micro-batch and links."""
    length = paper.setting("seq_len")
    micro_batch, left = divmod(tokens, length)
    if left or micro_batch < 1:
        raise OptionError(f"{tokens} tokens are not a multiple of sequences of {length}")
    setup = RunSetup(
        cluster=paper.setting("cluster"),
        overrides=(("inter.bandwidth", f"{_LINK_GBITS * links} Gbit/s"),),
        model=f"gpt-{size}b",
        strategy=parse(paper.strategy(strategy)),
        gpus=paper.setting("gpus"),
        precision=paper.setting("precision"),
        micro_batch=micro_batch,
        **paper.training,
    )
    return Term(setup=setup, quantity="tflops_per_gpu")


def zeropp_cell(
    paper: Paper, size: int, tokens: int, links: int, strategy: str, value: float, use: Use
) -> Cell:
    """A bar of ZeRO++'s figures."""
    return Cell(
        source="zeropp",
        name=f"{size}B, {tokens} tokens, {links} x 100 Gbit/s, {strategy}",
        strategy=strategy,
        group="v100-zeropp",
        published=value,
        use=use,
        terms=(zeropp_term(paper, size, tokens, links, strategy),),
        rounding=1.0,
        labels={"size": f"{size}B", "tokens": str(tokens), "links": str(links)},
    )


def tflops_cell(paper: Paper, row: TflopsCell) -> Cell:
    """A bar of ZeRO++'s figures, by the names that it has in `papers/`."""
    size, links = _size(row.model), _links(row.cluster)
    return zeropp_cell(paper, size, row.tokens_per_gpu, links, row.strategy, row.value, row.use)


def speedup_cell(paper: Paper, row: SpeedupCell) -> Cell | str:
    """A speed-up over the models, or why it is not simulated.

    Where no micro-batch is stated it is one over all bars of a figure. These were fitted on, and so
    the cell counts as fitted, too.
    """
    if row.cluster is None:
        return "network and micro-batch not stated"
    links = _links(row.cluster)
    stated = row.tokens_per_gpu is not None
    micro_batches = (row.tokens_per_gpu,) if row.tokens_per_gpu is not None else _TOKENS
    runs = [(size, tokens) for tokens in micro_batches for size in SIZES]
    pick = "max" if row.quantity == "max_speedup" else "min"
    over = " and ".join(map(str, micro_batches))
    return Cell(
        source="zeropp",
        name=f"{pick} speed-up over sizes, {over} tokens, {links} x 100 Gbit/s",
        strategy="zeropp / zero3",
        group="v100-zeropp",
        published=row.value,
        use=row.use if stated else "fit",
        terms=tuple(zeropp_term(paper, *run, links, row.strategy) for run in runs),
        over=tuple(zeropp_term(paper, *run, links, row.baseline) for run in runs),
        pick="max" if pick == "max" else "min",
        rounding=row.rounding,
    )


def throughput_ratio_cell(paper: Paper, row: ThroughputRatioCell) -> Cell:
    """Stated in a sentence: as fast as the baseline on another cluster."""
    size, tokens = _size(row.model), _RATIO_TOKENS
    here, there = _links(row.cluster), _links(row.baseline_cluster)
    return Cell(
        source="zeropp",
        name=f"{size}B, zeropp at {here} / zero3 at {there} x 100 Gbit/s, {tokens} tokens",
        strategy="zeropp / zero3",
        group="v100-zeropp",
        published=row.value,
        use=row.use,
        terms=(zeropp_term(paper, size, tokens, here, row.strategy),),
        over=(zeropp_term(paper, size, tokens, there, row.baseline),),
        rounding=_RATIO_ROUNDING,
    )


def volume_cell(paper: Paper, row: VolumeCell) -> Cell:
    """What a node sends in a step, of the whole model or of one kind of collective."""
    term = zeropp_term(paper, _SHAPE_KNOWN, paper.setting("seq_len"), 1, row.strategy)
    return Cell(
        source="zeropp-volume",
        name=f"{_SHAPE_KNOWN}B, {row.part.replace('_', ' ')}, {row.strategy}",
        strategy=row.strategy,
        group="zeropp-volume",
        published=row.value,
        use=row.use,
        terms=(replace(term, quantity="inter_node_volume", part=row.part),),
    )


def gpt(paper: Paper, *, layers: int, hidden: int, heads: int, seq_len: int) -> dict[str, Any]:
    """The model of a run, as `RunSetup` takes it: a GPT of a shape, with the paper's vocabulary."""
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "seq_len": seq_len,
        "ffn": 4 * hidden,
        "vocab": paper.setting("vocab"),
        "positions": seq_len,
    }
    overrides = tuple((name, str(value)) for name, value in shape.items())
    return {"model": paper.setting("model"), "model_overrides": overrides}


def iteration_cell(paper: Paper, row: IterationCell) -> Cell:
    """The cell of a time. Raises OptionError for a batch that is not divided evenly."""
    together = row.tp * row.pp
    groups = row.gpus // together
    samples = groups * row.micro_batch
    if row.gpus % together or row.global_batch % samples:
        raise OptionError(
            f"global_batch {row.global_batch} is not a multiple of {groups} groups x micro_batch"
            f" {row.micro_batch}"
        )
    stages = f" pp {row.pp}," if row.pp > 1 else ""
    along = ", sequence parallel" if row.sequence_parallel else ""
    setup = RunSetup(
        cluster=paper.simulation.clusters.get(row.cluster, row.cluster),
        strategy=parse(paper.strategy(row.strategy)),
        gpus=row.gpus,
        precision=paper.setting("precision"),
        micro_batch=row.micro_batch,
        accumulation=row.global_batch // samples,
        tp=row.tp,
        pp=row.pp,
        sequence_parallel=row.sequence_parallel,
        **gpt(paper, layers=row.layers, hidden=row.hidden, heads=row.heads, seq_len=row.seq_len),
        **paper.training | {"recompute": row.recompute},
    )
    return Cell(
        source=paper.key,
        name=(
            f"{row.run}, {row.gpus} GPUs, tp {row.tp},{stages} micro-batch {row.micro_batch}{along}"
        ),
        strategy=row.strategy,
        group="",
        published=row.value,
        use=row.use,
        terms=(Term(setup=setup, quantity="iteration_ms"),),
        rounding=row.rounding,
        labels={name: str(getattr(row, name)) for name in ("gpus", "tp", "pp", "micro_batch")},
    )
