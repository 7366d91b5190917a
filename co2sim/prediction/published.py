"""Published results (`papers/*/results.toml`): the models of their cells, and their one reader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveInt,
    ValidationError,
)

from co2sim.common import files
from co2sim.common.errors import CatalogError, Co2simError, OptionError, given
from co2sim.common.validation import first_problem
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.simulation.metrics import scalability_ratio
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.training.framework import AttentionKernel, Checkpointing, Loss, recomputation

Use: TypeAlias = Literal["fit", "check"]
"""Whether constants may be fitted on a cell, or it may only be compared with."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def recomputed(text: str) -> str:
    """A recomputation, in one way. Raises ValueError for what is none, as pydantic wants it."""
    try:
        return str(recomputation(text))
    except OptionError as error:
        raise ValueError(str(error).partition("; ")[2]) from error


class Simulation(_Table):
    """How the runs of a source are simulated: `[simulation]` of its `paper.toml`.

    `clusters` names the cluster that is simulated for one of the source, with `overrides` of it,
    and `options` what its framework adds to a strategy. `tokens_per_gpu` make up `micro_batch`
    sequences, or sequences of `seq_len`. `names` is how tables call models and clusters.
    `networks`, `methods`, `modes` and `precisions` are for texts of its tables. `source` says why.
    """

    source: str = ""
    clusters: dict[str, str] = {}
    overrides: dict[str, dict[str, str]] = {}
    stack: str = ""
    model: str = ""
    names: dict[str, str] = {}
    options: dict[str, str] = {}
    networks: dict[str, str] = {}
    methods: dict[str, str] = {}
    modes: dict[str, str] = {}
    precisions: dict[str, str] = {}
    gpus: PositiveInt | None = None
    tokens_per_gpu: PositiveInt | None = None
    micro_batch: PositiveInt = 1
    seq_len: PositiveInt | None = None
    vocab: PositiveInt | None = None
    precision: str = ""
    attention: AttentionKernel = "flash"
    recompute: Annotated[str, AfterValidator(recomputed)] = "none"
    checkpointing: Checkpointing = "non_reentrant"
    loss: Loss = "fused"

    def strategy(self, text: str) -> str:
        """A strategy, as published, with the options that the source's framework gives it."""
        return add_options(text, self.options)


class PublishedCell(_Table):
    """What every `[[cell]]` says: where it stands, its value and unit, and its use.

    `rounding` is the step of the printed number, `spread` the published plus-minus.
    """

    where: str
    unit: str = ""
    value: Annotated[FiniteFloat, Field(gt=0)]
    use: Use
    rounding: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    spread: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    note: str = ""


class OtherRun(_Table):
    """What differs in the run below the fraction of a ratio."""

    cluster: str | None = None
    strategy: str | None = None
    gpus: PositiveInt | None = None


class RunCell(PublishedCell):
    """A number of a training run: tokens per second of all GPUs, or TFLOP/s per GPU.

    With `over` it is a ratio of throughputs per GPU of two runs. Where `model` or `tokens_per_gpu`
    (per step) are lists it is the largest or the smallest (`pick`) over all combinations. `cluster`
    is empty where the source does not say it.
    """

    quantity: Literal["tokens_per_s", "tflops_per_gpu"]
    cluster: str
    model: str | list[str]
    strategy: str
    gpus: PositiveInt
    tokens_per_gpu: PositiveInt | list[PositiveInt] | None = None
    over: OtherRun | None = None
    pick: Literal["max", "min"] = "max"

    @property
    def models(self) -> list[str]:
        """All models that it is about."""
        return [self.model] if isinstance(self.model, str) else self.model

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPU counts that it is about; of a ratio: from, to."""
        return (self.gpus,) if self.over is None else (self.over.gpus or self.gpus, self.gpus)

    @property
    def kind(self) -> str:
        """Its quantity, or that it is a ratio."""
        return "scalability_ratio" if self.over else self.quantity

    @property
    def is_speed(self) -> bool:
        """Whether it is about the tokens per second of one model, strategy and cluster."""
        differs = self.over is not None and (self.over.cluster or self.over.strategy)
        return self.quantity == "tokens_per_s" and isinstance(self.model, str) and not differs


class VolumeCell(RunCell):
    """Bytes that a node sends in a step of a run, as a multiple of the model's bytes."""

    quantity: Literal["inter_node_volume"]  # type: ignore[assignment]
    value: Annotated[FiniteFloat, Field(ge=0)]
    part: Literal["forward_all_gather", "backward_all_gather", "gradient_reduce_scatter", "total"]


class QualityCell(PublishedCell):
    """Quality of a trained model, which no simulation predicts. `strategy` need not be ours."""

    quantity: Literal["top1_accuracy_percent", "perplexity"]
    model: str
    strategy: str


AnyCell: TypeAlias = Annotated[RunCell | VolumeCell | QualityCell, Field(discriminator="quantity")]


class _ResultsFile(BaseModel):
    """A whole results file."""

    model_config = ConfigDict(extra="forbid")

    cell: list[AnyCell]


def read_cells(path: Path) -> list[AnyCell]:
    """Every `[[cell]]` of a results file.

    Raises CatalogError, with file, cell and key, when the file is no results file.
    """
    tree = files.toml_file(path)
    try:
        return _ResultsFile.model_validate(tree).cell
    except ValidationError as error:
        raise CatalogError(f"{path}{_problem(error, tree)}") from error


def _problem(error: ValidationError, tree: dict[str, Any]) -> str:
    """The same for a results file, behind the number of the cell, counted from 1."""
    first, *rest = error.errors(include_url=False)[0]["loc"] or ("",)
    if first != "cell" or not rest:
        return " holds no published cells: it has no list of tables [[cell]]"
    index = rest[0]
    assert isinstance(index, int)
    cell = tree["cell"][index]
    if not isinstance(cell, dict):
        return f", cell {index + 1}: {given(cell)} is no table of names and values"
    kinds = (
        kind for kind in (RunCell, VolumeCell, QualityCell) if cell.get("quantity") in _of(kind)
    )
    names = next((kind.model_fields for kind in kinds), ())
    return f", cell {index + 1}: {first_problem(error, lambda _: names)}"


def _of(kind: type[BaseModel]) -> tuple[str, ...]:
    """The quantities of a kind of cell."""
    return get_args(kind.model_fields["quantity"].annotation)


def add_options(strategy: str, options: Mapping[str, str]) -> str:
    """A strategy, as published, with the options that its framework gives it."""
    extra = options.get(strategy.partition(":")[0].partition("(")[0])
    if not extra:
        return strategy
    return f"{strategy},{extra}" if ":" in strategy else f"{strategy}:{extra}"


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """A published throughput or scalability ratio, and its prediction."""

    cell: RunCell
    predicted: float

    @property
    def error(self) -> float:
        """Signed and relative: positive where the prediction is too high."""
        return self.predicted / self.cell.value - 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the cell, its prediction and the error."""
        cell = self.cell
        return {
            "cluster": cell.cluster,
            "model": cell.model,
            "strategy": cell.strategy,
            "quantity": cell.kind,
            "sizes": cell.sizes,
            "value": cell.value,
            "use": cell.use,
            "note": cell.note,
            "predicted": self.predicted,
            "error": self.error,
        }


def read_speeds(path: Path) -> list[RunCell]:
    """The throughputs and scalability ratios of a results file, of strategies that are ours.

    Strategies are written as results name them. Where a `paper.toml` beside the file says on which
    `clusters` its runs are simulated, or with which options of strategies, such cells are there
    twice: as published, and as simulated.
    """
    speeds = [row for row in read_cells(path) if isinstance(row, RunCell) and row.is_speed]
    about = path.with_name("paper.toml")
    simulation = (read_paper(about)[1] if about.exists() else None) or Simulation()
    cells = []
    for cell in speeds:
        simulated = simulation.clusters.get(cell.cluster, cell.cluster)
        ways = (cell.cluster, cell.strategy), (simulated, simulation.strategy(cell.strategy))
        for cluster, strategy in dict.fromkeys(ways):
            try:
                named = title(parse(strategy))
            except Co2simError:  # of others
                continue
            cells.append(cell.model_copy(update={"cluster": cluster, "strategy": named}))
    return cells


def read_paper(path: Path) -> tuple[dict[str, Any], Simulation | None]:
    """All that a `paper.toml` says, and its `[simulation]`, if it has one. Raises CatalogError."""
    about = files.toml_file(path)
    if "simulation" not in about:
        return about, None
    try:
        return about, Simulation.model_validate(about["simulation"])
    except ValidationError as error:
        problem = first_problem(error, lambda _: Simulation.model_fields)
        raise CatalogError(f"{path}: [simulation]: {problem}") from error


def cases_of(cells: Sequence[RunCell], cases: Sequence[Question]) -> list[Question]:
    """Further cases to simulate, so that every cell of the clusters of `cases` has a prediction."""
    like = {(case.cluster, case.model): case for case in cases}
    further = {}
    for cell in cells:
        if case := like.get((cell.cluster, cell.models[0])):
            for size in cell.sizes:
                key = cell.cluster, cell.models[0], cell.strategy, size
                further[key] = replace(case, strategy=cell.strategy, gpus=size)
    return list(further.values())


def compare(
    cells: Sequence[RunCell], cases: Sequence[Question], results: Sequence[Result]
) -> list[SpeedComparison]:
    """The cells that the cases predict."""
    predicted: dict[object, Result] = {
        (case.cluster, case.model, result.strategy, result.gpus): result
        for case, result in zip(cases, results, strict=True)
    }
    comparisons = []
    for cell in cells:
        keys = ((cell.cluster, cell.model, cell.strategy, size) for size in cell.sizes)
        at_sizes = [predicted.get(key) for key in keys]
        first, last = at_sizes[0], at_sizes[-1]
        if first is None or last is None:
            continue
        value = last.tokens_per_s
        if cell.over:
            value = scalability_ratio(last.tokens_per_s_per_gpu, first.tokens_per_s_per_gpu)
        comparisons.append(SpeedComparison(cell, value))
    return comparisons
