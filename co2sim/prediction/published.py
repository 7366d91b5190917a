"""Published results (`papers/*/results.toml`): the models of their cells, and their one reader."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError

from co2sim.common import files
from co2sim.common.errors import CatalogError, Co2simError
from co2sim.common.errors import given as shown
from co2sim.common.files import text_of
from co2sim.common.validation import first_problem
from co2sim.prediction.case import Case
from co2sim.prediction.result import Result
from co2sim.simulation.metrics import scalability_ratio
from co2sim.strategies import parse
from co2sim.strategies.step import title

Use: TypeAlias = Literal["fit", "check"]
"""Whether constants may be fitted on a cell, or it may only be compared with."""

_Positive: TypeAlias = Annotated[FiniteFloat, Field(gt=0)]


class PublishedCell(BaseModel):
    """What every `[[cell]]` says: where it stands, its value and unit, and its use.

    `rounding` is the step of the printed number, `spread` the published plus-minus.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    where: str
    unit: str = ""
    value: _Positive
    use: Use
    rounding: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    spread: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    note: str = ""


class ThroughputCell(PublishedCell):
    """Tokens per second of all GPUs."""

    quantity: Literal["tokens_per_s"]
    cluster: str
    model: str
    strategy: str
    gpus: PositiveInt

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPU counts that the cell is about."""
        return (self.gpus,)


class ScalabilityCell(PublishedCell):
    """Throughput per GPU on `to_gpus` over that on `from_gpus`."""

    quantity: Literal["scalability_ratio"]
    cluster: str
    model: str
    strategy: str
    from_gpus: PositiveInt
    to_gpus: PositiveInt

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPU counts that the cell is about: from, to."""
        return self.from_gpus, self.to_gpus


class TflopsCell(PublishedCell):
    """TFLOP/s per GPU."""

    quantity: Literal["tflops_per_gpu"]
    cluster: str
    model: str
    strategy: str
    gpus: PositiveInt
    tokens_per_gpu: PositiveInt


class IterationCell(PublishedCell):
    """Time of an optimizer step of a GPT: `tp` GPUs share every layer, in `pp` stages.

    `run` names what is alike in several cells, such as "22B".
    """

    quantity: Literal["iteration_ms"]
    cluster: str
    strategy: str
    run: str
    gpus: PositiveInt
    tp: PositiveInt
    pp: PositiveInt = 1
    global_batch: PositiveInt
    micro_batch: PositiveInt
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    seq_len: PositiveInt
    recompute: Literal["none", "selective", "full"]
    sequence_parallel: bool = False


class SpeedupCell(PublishedCell):
    """The largest or smallest speed-up of a strategy over a baseline, over several models."""

    quantity: Literal["max_speedup", "min_speedup"]
    strategy: str
    baseline: str
    gpus: PositiveInt
    cluster: str | None = None
    tokens_per_gpu: PositiveInt | None = None


class ThroughputRatioCell(PublishedCell):
    """Throughput of a strategy over that of a baseline on another cluster."""

    quantity: Literal["throughput_ratio"]
    cluster: str
    model: str
    strategy: str
    baseline: str
    baseline_cluster: str
    gpus: PositiveInt


class VolumeCell(PublishedCell):
    """Bytes that a node sends in a step, as a multiple of the model's bytes."""

    quantity: Literal["inter_node_volume_ratio"]
    value: Annotated[FiniteFloat, Field(ge=0)]
    part: Literal["forward_all_gather", "backward_all_gather", "gradient_reduce_scatter", "total"]
    strategy: str


class QualityCell(PublishedCell):
    """Quality of a trained model, which no simulation predicts. `strategy` need not be ours."""

    quantity: Literal["top1_accuracy_percent", "perplexity"]
    model: str
    strategy: str


SpeedCell: TypeAlias = ThroughputCell | ScalabilityCell
AnyCell: TypeAlias = Annotated[
    SpeedCell
    | TflopsCell
    | IterationCell
    | SpeedupCell
    | ThroughputRatioCell
    | VolumeCell
    | QualityCell,
    Field(discriminator="quantity"),
]


class _ResultsFile(BaseModel):
    """A whole results file."""

    model_config = ConfigDict(extra="forbid")

    cell: list[AnyCell]


def read_cells(path: Path) -> list[AnyCell]:
    """Every `[[cell]]` of a results file.

    Raises CatalogError, with file, cell and key, when the file is no results file.
    """
    try:
        tree = files.toml(text_of(path))
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no text
        raise CatalogError(f"{path} holds no published cells: {error}") from error
    try:
        return _ResultsFile.model_validate(tree).cell
    except ValidationError as error:
        raise CatalogError(f"{path}{_problem(error, tree)}") from error


def _problem(error: ValidationError, tree: dict[str, Any]) -> str:
    """The same for a results file, behind the number of the cell, counted from 1."""
    place = error.errors(include_url=False)[0]["loc"]
    if place[:1] != ("cell",) or len(place) == 1:
        return " holds no published cells: it has no list of tables [[cell]]"
    number = place[1]
    assert isinstance(number, int)
    given = tree["cell"][number]
    if not isinstance(given, dict):
        return f", cell {number + 1}: {shown(given)} is no table of names and values"
    names = next((kind.model_fields for kind in _KINDS if given.get("quantity") in _of(kind)), ())
    return f", cell {number + 1}: {first_problem(error, lambda _: names)}"


_KINDS: tuple[type[PublishedCell], ...] = (
    *(ThroughputCell, ScalabilityCell, TflopsCell, IterationCell, SpeedupCell),
    *(ThroughputRatioCell, VolumeCell, QualityCell),
)


def _of(kind: type[PublishedCell]) -> tuple[str, ...]:
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
    """A published throughput or scalability ratio, and its prediction.

    `strategy` is the cell's, as results name it.
    """

    cell: SpeedCell
    strategy: str
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
            "strategy": self.strategy,
            "quantity": cell.quantity,
            "sizes": cell.sizes,
            "value": cell.value,
            "use": cell.use,
            "note": cell.note,
            "predicted": self.predicted,
            "error": self.error,
        }


def read_speeds(path: Path) -> list[SpeedCell]:
    """The throughputs and scalability ratios of a results file, of strategies that are ours.

    Where a `paper.toml` beside the file says on which `clusters` its runs are simulated, or with
    which options of strategies, such cells are there twice: as published, and as simulated.
    """
    speeds = [one for one in read_cells(path) if isinstance(one, ThroughputCell | ScalabilityCell)]
    plan = _simulation(path.with_name("paper.toml"))
    found = []
    for cell in speeds:
        run = add_options(cell.strategy, plan.get("options", {}))
        if _title(cell.strategy):
            found.append(cell)
        cluster = plan.get("clusters", {}).get(cell.cluster, cell.cluster)
        simulated = cell.model_copy(update={"cluster": cluster, "strategy": run})
        if simulated != cell and _title(run):
            found.append(simulated)
    return found


def _simulation(path: Path) -> dict[str, Any]:
    """The `[simulation]` table of a paper; empty where there is none."""
    if not path.exists():
        return {}
    try:
        plan = files.toml(text_of(path)).get("simulation", {})
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CatalogError(f"{path} names no paper: {error}") from error
    tables = (plan, *(plan.get(name, {}) for name in _TEXTS)) if isinstance(plan, dict) else (plan,)
    if not all(isinstance(table, dict) for table in tables) or not all(
        isinstance(text, str) for table in tables[1:] for text in table.values()
    ):
        raise CatalogError(
            f"{path}: [simulation] must be a table, and {' and '.join(_TEXTS)} in it must be tables"
            " of texts"
        )
    found: dict[str, Any] = plan
    return found


_TEXTS = "options", "clusters"


def cases_of(cells: Sequence[SpeedCell], cases: Sequence[Case]) -> list[Case]:
    """Further cases to simulate, so that every cell of the clusters of `cases` has a prediction."""
    like = {(case.cluster, case.model): case for case in cases}
    found = {}
    for cell, strategy in _named(cells):
        case = like.get((cell.cluster, cell.model))
        for size in cell.sizes if case else ():
            assert case is not None
            found[cell.cluster, cell.model, strategy, size] = replace(
                case, strategy=strategy, gpus=size
            )
    return list(found.values())


def compare(
    cells: Sequence[SpeedCell], cases: Sequence[Case], results: Sequence[Result]
) -> list[SpeedComparison]:
    """The cells that the cases predict."""
    predicted: dict[object, Result] = {
        (case.cluster, case.model, result.strategy, result.gpus): result
        for case, result in zip(cases, results, strict=True)
    }
    found = []
    for cell, strategy in _named(cells):
        at = [predicted.get((cell.cluster, cell.model, strategy, size)) for size in cell.sizes]
        known = [result for result in at if result]
        if len(known) < len(at):
            continue
        first, last = known[0], known[-1]
        value = last.tokens_per_s
        if isinstance(cell, ScalabilityCell):
            value = scalability_ratio(last.tokens_per_s_per_gpu, first.tokens_per_s_per_gpu)
        found.append(SpeedComparison(cell, strategy, value))
    return found


def _named(cells: Sequence[SpeedCell]) -> Iterator[tuple[SpeedCell, str]]:
    """The cells whose strategy is ours, with its name in results."""
    for cell in cells:
        strategy = _title(cell.strategy)
        if strategy:
            yield cell, strategy


def _title(text: str) -> str | None:
    """The strategy as results name it; None for one that is not ours."""
    try:
        return title(parse(text))
    except Co2simError:
        return None
