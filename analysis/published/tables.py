"""Tables of published numbers in the forms of four sources: what a row holds, and its cells.

The columns of a table are the fields of its model; further columns are ignored.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from analysis.published.cells import Cell, cell_of, check_runs, from_papers
from analysis.published.runs import (
    PAPERS,
    TABLES_ELSEWHERE,
    Count,
    Paper,
    Published,
    RunSetup,
    csv_rows,
    file_beside,
    papers,
    tables_elsewhere,
    whole,
)
from co2sim.common.errors import CatalogError, Co2simError
from co2sim.common.validation import first_problem
from co2sim.prediction.published import OtherRun, RunCell, Use, add_options

RATIOS = "llm_foundry-ratios"
"""The source of cells that pairs of rows make up."""

_RATIO = (16, 128)
"""GPUs between which CO2's table states a ratio."""

_UNSTATED = 0.01
"""Of the parameters: what the shape of a row may leave out."""

_DIGITS = 15
"""Maximum digits of a number of parameters."""

Parameters: TypeAlias = Annotated[int, BeforeValidator(partial(whole, digits=_DIGITS))]
Switch: TypeAlias = Annotated[Literal["true", "false"], BeforeValidator(str.lower)]
Tau: TypeAlias = Annotated[int | None, BeforeValidator(lambda text: whole(text) if text else None)]


class TableRow(BaseModel):
    """A row, made of texts."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    source: ClassVar[str]
    """The paper that the table is of."""

    @abstractmethod
    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """The published numbers of the row. Raises Co2simError where it cannot be simulated."""


class ZeroppRow(TableRow):
    """Throughput of ZeRO-3 and of ZeRO++ for one model, micro-batch and number of links."""

    source = "zeropp"

    model_params_b: Literal["18", "49", "91", "138"]
    tokens_per_gpu: Count
    ib_links_100gbps_per_node: Count
    zero3_tflops_per_gpu: Published
    zeropp_tflops_per_gpu: Published

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """One for each of the two strategies that has a number."""
        published = {"zero3": self.zero3_tflops_per_gpu, "zeropp": self.zeropp_tflops_per_gpu}
        for strategy, value in published.items():
            if value is not None:
                row = RunCell(
                    where="",
                    quantity="tflops_per_gpu",
                    value=value,
                    rounding=1.0,
                    use=use,
                    cluster=f"dgx2-ib{self.ib_links_100gbps_per_node}",
                    model=f"gpt-{self.model_params_b}b",
                    strategy=strategy,
                    gpus=paper.setting("gpus"),
                    tokens_per_gpu=self.tokens_per_gpu,
                )
                yield cell_of(paper, row)


class CO2Row(TableRow):
    """Throughput, and its ratio from 16 to 128 GPUs, of a method on a network."""

    source = "co2"

    method: str
    network: str
    tau: Tau
    gpus: Count
    words_per_s: Published
    scalability_16_to_128: Published

    @model_validator(mode="after")
    def _ratio_of_its_sizes(self) -> Self:
        """A ratio stands in the row of its larger size."""
        if self.scalability_16_to_128 is not None and self.gpus != _RATIO[1]:
            raise ValueError(
                f"scalability_16_to_128 on {self.gpus} GPUs; it belongs to {_RATIO[1]}"
            )
        return self

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """A throughput, a ratio, or both."""
        strategy = paper.chosen("method", self.method, "methods")
        if "TAU" in strategy:
            if self.tau is None:
                raise CatalogError(f"tau is ''; {self.method} needs a whole number, at least 1")
            strategy = strategy.replace("TAU", str(self.tau))
        elif self.tau is not None:
            raise CatalogError(f"tau is '{self.tau}', but {self.method} has none")
        of_both: dict[str, Any] = {
            "where": "",
            "quantity": "tokens_per_s",
            "use": use,
            "cluster": paper.chosen("network", self.network, "networks"),
            "model": paper.setting("model"),
            "strategy": strategy,
            "gpus": self.gpus,
        }
        if self.words_per_s is not None:
            yield cell_of(paper, RunCell(**of_both, value=self.words_per_s))
        if (ratio := self.scalability_16_to_128) is not None:
            over = OtherRun(gpus=_RATIO[0])
            yield cell_of(paper, RunCell(**of_both, value=ratio, over=over, rounding=0.01))


class GPTRow(TableRow):
    """A run of a GPT of some shape, with an MLP of 4 hidden."""

    gpus: Count
    global_batch: Count
    micro_batch: Count
    hidden: Count
    heads: Count
    layers: Count
    seq_len: Count

    def _run(self, paper: Paper, vocab: int, shape: Mapping[str, str], **said: Any) -> RunSetup:
        """The run, with what else is said of it; `shape` has further numbers of the model."""
        sizes = {name: getattr(self, name) for name in ("hidden", "heads", "layers", "seq_len")}
        sizes |= {"vocab": vocab, "ffn": 4 * self.hidden, "positions": self.seq_len, **shape}
        of_all = {"model": paper.setting("model"), **paper.training}
        return RunSetup.checked(
            overrides={f"model.{name}": str(value) for name, value in sizes.items()},
            gpus=self.gpus,
            micro_batch=self.micro_batch,
            **of_all | said,
        )


class IterationRow(GPTRow):
    """Time of an iteration of data-parallel training inside one node."""

    source = "vtrain"

    iteration_ms: Published

    @model_validator(mode="after")
    def _batch_of_whole_steps(self) -> Self:
        """Every GPU runs equally many micro-batches."""
        per_step = self.gpus * self.micro_batch
        if self.global_batch % per_step:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of {self.gpus} x"
                f" {self.micro_batch}"
            )
        return self

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """The time, if it is there. Raises CatalogError for more GPUs than a node has."""
        if self.iteration_ms is None:
            return
        (cluster,) = paper.setting("clusters").values()
        run = self._run(
            paper,
            paper.setting("vocab"),
            {},
            cluster=cluster,
            strategy=paper.simulation.strategy("ddp"),
            accumulation=self.global_batch // (self.gpus * self.micro_batch),
            precision=paper.setting("precision"),
        )
        most = run.whole_cluster().layout.gpus_per_node
        if self.gpus > most:
            raise CatalogError(f"{self.gpus} GPUs; these runs are of one node, which has {most}")
        yield Cell(
            source=self.source,
            use=use,
            runs=(run,),
            name=(
                f"{self.gpus} GPUs, batch {self.global_batch}, micro-batch {self.micro_batch},"
                f" hidden {self.hidden}, {self.layers} layers"
            ),
            strategy="ddp",
            published=self.iteration_ms,
            quantity="iteration_ms",
            labels={
                name: str(getattr(self, name))
                for name in ("gpus", "micro_batch", "hidden", "layers")
            },
        )


class FsdpRow(GPTRow):
    """Throughput of training an MPT with FSDP."""

    source = "llm_foundry"

    model: str
    vocab: Count
    gpu: str
    accumulation: Count
    precision: str
    mp_mode: str
    sharding: str
    activation_checkpointing: Switch
    parameters: Parameters
    tokens_per_s: Published

    @model_validator(mode="after")
    def _whole_heads_and_batch(self) -> Self:
        """The global batch is that of all micro-batches, and heads divide the hidden size."""
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        made = self.gpus * self.micro_batch * self.accumulation
        if self.global_batch != made:
            raise ValueError(
                f"global_batch {self.global_batch} is not {self.gpus} GPUs x micro_batch"
                f" {self.micro_batch} x accumulation {self.accumulation} = {made}"
            )
        return self

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """The throughput, if it is there."""
        if self.tokens_per_s is None:
            return
        run = self._checked_run(paper)
        yield Cell(
            source=self.source,
            use=use,
            runs=(run,),
            name=(
                f"{self.model}, {self.gpus} {self.gpu}, sequence {self.seq_len}, micro-batch"
                f" {self.micro_batch} x {self.accumulation}"
                + (", checkpointed" if run.recompute == "full" else "")
            ),
            strategy="fsdp",
            published=self.tokens_per_s,
            quantity="tokens_per_s",
            rounding=1.0,
            labels={
                "gpu": self.gpu,
                "nodes": "one node" if run.used_cluster().nodes == 1 else "several nodes",
                "gpus": str(self.gpus),
                "model": self.model,
            },
        )

    def _checked_run(self, paper: Paper) -> RunSetup:
        """The run behind the row. Raises CatalogError where shape and parameters disagree."""
        sharding = paper.chosen("sharding", self.sharding, "methods")
        mode = paper.chosen("mp_mode", self.mp_mode, "modes")
        run = self._run(
            paper,
            self.vocab,
            {"name": self.model},
            cluster=paper.chosen("gpu", self.gpu, "clusters"),
            strategy=add_options(sharding, {"fsdp": mode}),
            accumulation=self.accumulation,
            precision=paper.chosen("precision", self.precision, "precisions"),
            recompute="full" if self.activation_checkpointing == "true" else "none",
        )
        made = run.trained().parameters
        if abs(made - self.parameters) > _UNSTATED * self.parameters:
            raise CatalogError(f"parameters is {self.parameters}; a model of this shape has {made}")
        return run


TABLES: tuple[type[TableRow], ...] = (ZeroppRow, CO2Row, IterationRow, FsdpRow)
"""The tables that can be read."""


def known_cells(folder: Path = PAPERS, data: Path | None = None) -> list[Cell]:
    """All cells of `papers/`, and of the tables that are only referred to, where at hand.

    Of those tables the cells of configurations that constants were fitted on are marked fit.

    Raises CatalogError where `data` is given, but the folder of papers says nothing of its table.
    """
    cells, sources = from_papers(folder), papers(folder)
    for path in tables_elsewhere(data):
        if data is None and not any(TABLES_ELSEWHERE.get(key) == path.name for key in sources):
            continue
        rows = from_csv(path, "check", folder, tuple(TABLES_ELSEWHERE))
        fitted = _fitted(sources[rows[0].source], folder)
        rows = [replace(row, use="fit") if row.setup in fitted else row for row in rows]
        cells += [*rows, *ratios(rows)]
    return cells


def _fitted(paper: Paper, folder: Path) -> set[RunSetup]:
    """The configurations that constants were fitted on, which the `[data]` of a paper may name."""
    data = paper.about.get("data", {})
    name = data.get("fitted") if isinstance(data, dict) else data
    if name is None:
        return set()
    path = file_beside(folder / paper.key / "paper.toml", "[data] fitted", name)
    columns, rows = csv_rows(path)
    table = next(table for table in TABLES if table.source == paper.key)
    runs = set()
    for line, row in rows:
        try:
            numbers = dict.fromkeys(set(table.model_fields) - set(columns), "1")
            runs |= {c.setup for c in _parsed(table, {**row, **numbers}).cells(paper, "fit")}
        except Co2simError as error:
            raise CatalogError(f"{path}, line {line}: {error}") from error
    return runs


def further_cells(
    paths: Sequence[Path], published: Sequence[Cell], folder: Path, say: Callable[[str], None]
) -> list[Cell]:
    """The cells of further tables; those of configurations that were fitted on are marked fit.

    Ratios that rows of one table state are added, also with rows that are published already. Raises
    CatalogError as `from_csv` does, and for a number that stands in two tables.
    """
    places: dict[Cell, Path] = {}
    for path in paths:
        for cell in from_csv(path, "check", folder, say=say):
            if cell in places:
                raise CatalogError(
                    f"{path}: {cell.name} stands in {places[cell]}, too; each number counts once"
                )
            places[cell] = path
    cells = _marked(places, published)
    runs = {cell.setup for cell in cells}
    before = [cell for cell in published if not cell.over and cell.setup not in runs]
    return [*cells, *(c for c in ratios([*cells, *before]) if runs & {c.setup, c.over[0]})]


def from_csv(
    path: Path,
    use: Use,
    folder: Path = PAPERS,
    sources: Collection[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Cell]:
    """The cells of a table in one of the formats of the published data, or in those of `sources`.

    `say` gets rows without a published number, which are left out.

    Raises CatalogError for another table, for a row that cannot be read, and for one that stands
    there twice, with file and line.
    """
    papers_by_key = papers(folder)
    columns, rows = csv_rows(path)
    table = _table(path, columns, sources)
    if table.source not in papers_by_key:
        raise CatalogError(f"{path} is a table of {table.source}, which {folder} does not hold")
    lines: dict[Cell, int] = {}
    for line, row in rows:
        try:
            cells = list(_parsed(table, row).cells(papers_by_key[table.source], use))
            for cell in cells:
                check_runs(cell)
        except Co2simError as error:
            raise CatalogError(f"{path}, line {line}: {error}") from error
        if not cells:
            say(f"{path}, line {line}: no published number, left out")
        before = next((lines[cell] for cell in cells if cell in lines), None)
        if before is not None:
            raise CatalogError(
                f"{path}, line {line}: it says the same as line {before}; each number counts once"
            )
        lines |= dict.fromkeys(cells, line)
    if not lines:
        raise CatalogError(f"{path} holds no published number" if rows else f"{path}: no rows")
    return [*lines]


def _marked(cells: Iterable[Cell], others: Iterable[Cell]) -> list[Cell]:
    """The cells, with those marked fit whose configuration the constants were fitted on."""

    def configuration(cell: Cell) -> tuple[object, ...]:
        return cell.quantity, cell.runs, cell.over, cell.pick

    fitted = {configuration(cell) for cell in others if cell.use == "fit"}
    return [replace(cell, use="fit") if configuration(cell) in fitted else cell for cell in cells]


def ratios(cells: Sequence[Cell]) -> Iterator[Cell]:
    """What rows of LLM Foundry's table state of scaling.

    Throughput per GPU over that on the fewest GPUs of several nodes, where all else is equal. A
    ratio is marked fit if both of its rows are.
    """
    families: dict[RunSetup, list[Cell]] = {}
    for cell in cells:
        if cell.source == FsdpRow.source and cell.labels["nodes"] == "several nodes":
            families.setdefault(cell.setup.changed(gpus=1), []).append(cell)
    for family in families.values():
        first, *rest = sorted(family, key=lambda cell: cell.setup.gpus)
        for cell in (cell for cell in rest if cell.setup.gpus > first.setup.gpus):
            few, many = first.setup.gpus, cell.setup.gpus
            yield replace(
                cell,
                source=RATIOS,
                name=cell.name.replace(f"{many} ", f"{few} to {many} ", 1) + ", ratio",
                published=cell.published / many / (first.published / few),
                use="fit" if {cell.use, first.use} == {"fit"} else "check",
                over=first.runs,
                rounding=0.0,
            )


def _table(path: Path, columns: Sequence[str], sources: Collection[str] | None) -> type[TableRow]:
    """The table whose columns these are, or nearly are."""
    tables = [table for table in TABLES if sources is None or table.source in sources]

    def missing(table: type[TableRow]) -> list[str]:
        return [name for name in table.model_fields if name not in columns]

    table = min(tables, key=lambda table: len(missing(table)) / len(table.model_fields))
    lacking = missing(table)
    if not lacking:
        return table
    if sources is None and 2 * len(lacking) > len(table.model_fields):
        forms = "; or ".join(", ".join(table.model_fields) for table in tables)
        raise CatalogError(f"{path} holds no known table; expected the columns {forms}")
    raise CatalogError(
        f"{path} is not a table of {table.source}: it has no column {', '.join(lacking)}"
    )


def _parsed(table: type[TableRow], row: Mapping[str, str]) -> TableRow:
    """The row by its model. Raises CatalogError with the column, what is given and the rule."""
    try:
        return table.model_validate(row)
    except ValidationError as error:
        raise CatalogError(first_problem(error)) from error
