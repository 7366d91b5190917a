"""Published results (`papers/*/results.toml`): the models of their cells, and their one reader."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError

from co2sim.common import files
from co2sim.common.errors import CatalogError
from co2sim.common.errors import given as shown
from co2sim.common.files import text_of
from co2sim.common.validation import first_problem

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


def with_options(strategy: str, options: Mapping[str, str]) -> str:
    """A strategy, as published, with the options that its framework gives it."""
    extra = options.get(strategy.partition(":")[0].partition("(")[0])
    if not extra:
        return strategy
    return f"{strategy},{extra}" if ":" in strategy else f"{strategy}:{extra}"
