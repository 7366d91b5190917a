"""Published numbers (cells): of a run, or ratios of pairs of runs; how they are read.

Most stand in `papers/*/results.toml`, times of steps in `papers/*/runs.csv`. Tables in other forms
are read by `tables`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from analysis.published.runs import PAPERS, Paper, RunSetup, TrainingRun, papers, training_runs
from co2sim.common.errors import CatalogError, Co2simError, OptionError
from co2sim.prediction.published import (
    AnyCell,
    QualityCell,
    RunCell,
    Simulation,
    Use,
    VolumeCell,
    read_cells,
)
from co2sim.strategies import STRATEGIES
from co2sim.training.workload import Workload

RunQuantity: TypeAlias = Literal["iteration_ms", "tokens_per_s_per_gpu", "memory_gib"]
Quantity: TypeAlias = RunQuantity | Literal["tflops_per_gpu", "tokens_per_s", "inter_node_volume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One published number: a quantity of a run, or with `over` the ratio of pairs of runs.

    Of several ratios the largest or the smallest counts (`pick`); throughputs of a ratio are per
    GPU. `part` is what some collectives make up of a volume. `rounding` is the step of the printed
    number. `labels` tell cells of a source apart, such as their micro-batch. `where` is the place
    in the source, such as a figure; it is empty for rows of tables.
    """

    source: str
    name: str
    strategy: str
    published: float
    use: Use
    quantity: Quantity
    runs: tuple[RunSetup, ...]
    over: tuple[RunSetup, ...] = ()
    pick: Literal["max", "min"] = "max"
    part: str = ""
    rounding: float = 0.0
    where: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def setup(self) -> RunSetup:
        """The configuration of the first run."""
        return self.runs[0]

    @property
    def setups(self) -> tuple[RunSetup, ...]:
        """The configurations of all runs."""
        return *self.runs, *self.over


def check_runs(cell: Cell) -> None:
    """Refuse what the simulator cannot run: GPUs that fill no nodes, an unknown model, its batch.

    Raises Co2simError.
    """
    for run in cell.setups:
        run.used_cluster()
        Workload(run.trained(), run.micro_batch, run.accumulation)


# --- the cells of `papers/` ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unpredicted:
    """A published cell that no error is stated for, or that no figure shows, and why, in few words.

    `cell` is there where it can be simulated nonetheless, so that a figure can show it, and
    `quality` where it is the quality of a trained model.
    """

    source: str
    name: str
    where: str
    published: float
    reason: str
    cell: Cell | None = None
    quality: QualityCell | None = None


def from_papers(folder: Path = PAPERS) -> list[Cell]:
    """Every cell of `papers/` that is predicted."""
    cells = [cell for cell in _of_results(folder) if isinstance(cell, Cell)]
    cells += [cell_of_run(run, "iteration_ms") for run in training_runs(folder) if run.use]
    return sorted(cells, key=lambda cell: cell.source)


def unpredicted(folder: Path = PAPERS) -> list[Unpredicted]:
    """Every cell of `results.toml` in `papers/` that is not."""
    return [cell for cell in _of_results(folder) if isinstance(cell, Unpredicted)]


def _of_results(folder: Path) -> Iterator[Cell | Unpredicted]:
    sources = papers(folder)
    for path in sorted(folder.glob("*/results.toml")):
        key = path.parent.name
        for count, row in enumerate(read_cells(path), start=1):
            paper = sources.get(key)
            cell, reason = None, _not_simulated(paper, row)
            if not reason and paper and isinstance(row, RunCell):
                try:
                    cell = cell_of(paper, row)
                except Co2simError as error:
                    raise CatalogError(f"{path}, cell {count}: {error}") from error
                try:
                    check_runs(cell)
                    reason = _without_error(cell)
                except Co2simError as error:
                    cell, reason = None, str(error)
            if cell and not reason:
                yield cell
            else:
                name = _name(paper or Paper(key, {}, Simulation()), row)
                quality = row if isinstance(row, QualityCell) else None
                yield Unpredicted(key, name, row.where, row.value, reason, cell, quality)


def _not_simulated(paper: Paper | None, row: AnyCell) -> str:
    """Why a cell is not simulated; empty where it is. `paper` is None without `[simulation]`."""
    if isinstance(row, QualityCell):
        return "quality of training"
    if paper is None:
        return "no [simulation] in its paper.toml"
    if not row.cluster:
        return "network and micro-batch not stated"
    name = row.strategy.partition(":")[0].partition("(")[0]
    return "" if name in STRATEGIES else f"no strategy is called {name!r}"


def _without_error(cell: Cell) -> str:
    """Why no error is stated for a cell that can be simulated; empty where one is."""
    if not cell.published:
        return "an error relative to zero"
    return "a ratio of cells marked fit" if cell.over and cell.use == "fit" else ""


def cell_of(paper: Paper, row: RunCell) -> Cell:
    """A cell of `results.toml`. Raises Co2simError where its paper does not say how it ran."""
    stated = row.tokens_per_gpu or paper.setting("tokens_per_gpu")
    tokens = stated if isinstance(stated, list) else [stated]
    mixes = [(model, count) for count in tokens for model in row.models]
    runs = tuple(run_of(paper, row, *mix) for mix in mixes)
    over: tuple[RunSetup, ...] = ()
    strategy = row.strategy.partition(",")[0]
    if row.over:
        below = row.model_copy(update=row.over.model_dump(exclude_none=True))
        over = tuple(run_of(paper, below, *mix) for mix in mixes)
        strategy += f" / {below.strategy}" if row.over.strategy else ""
    volume = isinstance(row, VolumeCell)
    labels = {
        "model": paper.name(row.models[0]),
        "tokens": str(tokens[0]),
        "cluster": row.cluster,
        "gpus": str(row.gpus),
    }
    return Cell(
        source=f"{paper.key}-volume" if volume else paper.key,
        name=_name(paper, row),
        strategy=strategy,
        published=row.value,
        use=row.use,
        quantity=row.quantity,
        runs=runs,
        over=over,
        pick=row.pick,
        part=row.part if isinstance(row, VolumeCell) else "",
        rounding=row.rounding,
        where=row.where,
        labels={} if over or volume else labels,
    )


def _name(paper: Paper, row: AnyCell) -> str:
    """Models, part of a volume, GPUs, tokens, network and strategy, as far as they are stated."""
    if isinstance(row, QualityCell):
        return f"{row.quantity.replace('_', ' ')}, {row.model}, {row.strategy}"
    several = len(row.models) > 1
    parts = [f"{row.pick} of {len(row.models)} models" if several else paper.name(row.models[0])]
    if isinstance(row, VolumeCell):
        return ", ".join([*parts, row.part.replace("_", " "), row.strategy])
    over = row.over
    if row.gpus != paper.simulation.gpus:
        first, last = row.sizes[0], row.sizes[-1]
        parts.append(f"{last} GPUs" if first == last else f"{first} to {last} GPUs, ratio")
    if row.tokens_per_gpu:
        counts = (
            row.tokens_per_gpu if isinstance(row.tokens_per_gpu, list) else [row.tokens_per_gpu]
        )
        parts.append(f"{' and '.join(map(str, counts))} tokens")
    if row.cluster in paper.simulation.names:
        below = f" / {paper.name(over.cluster)}" if over and over.cluster else ""
        parts.append(paper.name(row.cluster) + below)
    parts.append(row.strategy + (f" / {over.strategy}" if over and over.strategy else ""))
    return ", ".join(parts)


def run_of(paper: Paper, row: RunCell, model: str, tokens: int) -> RunSetup:
    """The run behind a cell, of one model, with what the paper leaves open."""
    simulation = paper.simulation
    changes = dict(simulation.overrides.get(row.cluster, {}))
    if length := simulation.seq_len:
        micro_batch, left = divmod(tokens, length)
        if left or micro_batch < 1:
            raise OptionError(f"{tokens} tokens are not a multiple of sequences of {length}")
    else:
        micro_batch = simulation.micro_batch
        if tokens % micro_batch:
            raise OptionError(f"{tokens} tokens per GPU are not {micro_batch} equal sequences")
        changes["model.seq_len"] = str(tokens // micro_batch)
    run = RunSetup.checked(
        cluster=simulation.clusters.get(row.cluster, row.cluster),
        model=model,
        strategy=simulation.strategy(row.strategy),
        gpus=row.gpus,
        micro_batch=micro_batch,
        precision=paper.setting("precision"),
        overrides=changes,
        **paper.training,
    )
    run.parsed()
    return run


def cell_of_run(run: TrainingRun, quantity: RunQuantity) -> Cell:
    """A number of `runs.csv`, which must be there."""
    published = getattr(run, quantity)
    assert published is not None
    ways = {name: getattr(run, name) for name in ("tp", "pp")}
    parts = [f"{name} {count}" for name, count in ways.items() if name == "tp" or count > 1]
    parts.append(f"micro-batch {run.micro_batch}")
    parts += ["sequence parallel"] if run.sequence_parallel else []
    return Cell(
        source=run.paper,
        name=", ".join([run.note, f"{run.gpus} GPUs", *parts]),
        strategy=run.parsed().name,
        published=published,
        use=run.use or "check",
        quantity=quantity,
        runs=(run,),
        labels={name: str(getattr(run, name)) for name in ("gpus", "tp", "pp", "micro_batch")},
    )
