"""Published mean times to failure and shares of useful time, beside predictions."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from analysis.published.runs import PAPERS
from co2sim.catalog import load_cluster
from co2sim.common import files
from co2sim.common.errors import CatalogError, UnitError
from co2sim.common.units import Seconds, parse, timespan
from co2sim.common.validation import first_problem
from co2sim.prediction.goodput import (
    Restart,
    Saving,
    Trained,
    goodput_where,
    independent_worker_shares,
    whole_job_shares,
)

_PER_NODE = 8
"""GPUs: of the A100 of Meta, its H100, and ByteDance's Hopper machines."""

_INSTANT: Seconds = 1e-6
"""A round, or the work between two checkpoints, that costs nothing."""


class _Published(BaseModel):
    """What every `[[cell]]` says. `value` is a text with its unit; `assumed` is not published."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source: str
    address: Annotated[str, Field(pattern="^https://")]
    where: str
    value: str
    at_least: bool = False
    use: Literal["check", "input"]
    gpus: PositiveInt
    assumed: list[str]


class MeanTime(_Published):
    """Time between failures of a job on some GPUs, with the rates of a catalog entry."""

    quantity: Literal["mean_time_to_failure"]
    failures: str


class Useful(_Published):
    """Share of useful time; `set` changes numbers of the entry, `every` is the interval."""

    quantity: Literal["useful"]
    failures: str
    parameters: PositiveInt
    set: dict[str, str] = {}
    every: str | None = None


class Learners(_Published):
    """Share of useful time of independent learners with chips that fail once in `chip`."""

    quantity: Literal["learners"]
    workers: PositiveInt
    chip: str


GoodputCell: TypeAlias = MeanTime | Useful | Learners


class _Sheet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cell: list[Annotated[GoodputCell, Field(discriminator="quantity")]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A cell with its published value and the prediction, and the range of that.

    `error` is prediction minus publication for shares, and relative for times. Of what is published
    as a lower limit it is 0 where the prediction is above.
    """

    cell: GoodputCell
    published: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Signed."""
        difference = self.predicted - self.published
        if self.cell.at_least:
            difference = min(0.0, difference)
        return difference / self.published if self.cell.quantity == _TIME else difference

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        names = ("published", "predicted", "low", "high", "error")
        return self.cell.model_dump() | {name: getattr(self, name) for name in names}

    def shown(self, value: float) -> str:
        """A value with its unit."""
        return timespan(value) if self.cell.quantity == _TIME else f"{100 * value:.1f} %"


_TIME = "mean_time_to_failure"


def read(folder: Path = PAPERS) -> list[GoodputCell]:
    """The cells of `goodput.toml`. Raises CatalogError, with one line."""
    path = folder / "goodput.toml"
    try:
        return list(_Sheet.model_validate(files.toml_file(path)).cell)
    except ValidationError as error:
        raise CatalogError(f"{path}: {first_problem(error)}") from error


def compared(cells: list[GoodputCell]) -> list[Compared]:
    """Every cell beside its prediction."""
    return [_compared(cell, cells) for cell in cells]


def _compared(cell: GoodputCell, cells: list[GoodputCell]) -> Compared:
    if isinstance(cell, Learners):
        predicted = _learners(cell, _pause(cells))
        return Compared(cell, _number(cell, ""), predicted, predicted, predicted)
    changes = {f"failures.{name}": text for name, text in getattr(cell, "set", {}).items()}
    cluster = load_cluster("dgx-h100", {"failures": cell.failures, **changes}).value
    assert cluster.failures is not None
    trained = Trained(
        gpus=cell.gpus,
        nodes=-(-cell.gpus // _PER_NODE),
        parameters=getattr(cell, "parameters", 1),
        round_time=_INSTANT,
    )
    if isinstance(cell, MeanTime):
        time = 1 / goodput_where(cluster.failures, trained).failures_per_second
        of_job = cluster.failures.of_job(trained.gpus, trained.nodes)
        ends = [time / factor for factor in (of_job.rate_high, of_job.rate_low)]
        return Compared(cell, _number(cell, "s"), time, min(ends), max(ends))
    every = None if cell.every is None else parse(cell.every, "s")
    answer = goodput_where(cluster.failures, trained, every)
    useful = answer.useful, answer.low, answer.high
    return Compared(cell, _number(cell, ""), *useful)


def _number(cell: GoodputCell, unit: Literal["s", ""]) -> float:
    try:
        return parse(cell.value, unit)
    except UnitError as error:
        raise CatalogError(f"goodput.toml: {cell.where}: {error}") from error


def _pause(cells: list[GoodputCell]) -> Seconds:
    """How long one learner stops for a failure, from the cell that is an input.

    With nothing but pauses, which begin again where something fails meanwhile, exp(-rate pause) of
    the time is useful.
    """
    inputs = [cell for cell in cells if isinstance(cell, Learners) and cell.use == "input"]
    if len(inputs) != 1 or inputs[0].workers != 1:
        raise CatalogError("goodput.toml: of cells of learners one, of 1 worker, must be an input")
    (single,) = inputs
    return -math.log(_number(single, "")) * parse(single.chip, "s") / single.gpus


def _learners(cell: Learners, pause: Seconds) -> float:
    """One learner stops as a whole; several stop one at a time."""
    rate = cell.gpus / cell.workers / parse(cell.chip, "s")
    after = Restart(restart=pause)
    if cell.workers == 1:
        return whole_job_shares(rate, _INSTANT, Saving(blocking=0.0), after).useful
    return independent_worker_shares(rate, cell.workers, _INSTANT, after).useful
