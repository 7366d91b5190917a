"""Published cells of `papers/` as configurations to simulate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.published import zeropp_cells
from analysis.published.cells import Cell, RunSetup, Term, check_runs
from analysis.published.iteration_cells import iteration_cell
from analysis.published.papers import PAPERS, Paper, papers
from analysis.published.parameters import GROUPS
from co2sim.errors import CatalogError, Co2simError, OptionError
from co2sim.published_cells import (
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
from co2sim.strategies import STRATEGIES, parse

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
            found = zeropp_cells.tflops_cell(paper, row)
        case SpeedupCell():
            found = zeropp_cells.speedup_cell(paper, row)
        case ThroughputRatioCell():
            found = zeropp_cells.throughput_ratio_cell(paper, row)
        case VolumeCell():
            found = zeropp_cells.volume_cell(paper, row)
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
        """Its throughput on so many GPUs, with what the paper leaves open."""
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
