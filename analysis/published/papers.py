"""The published sources in `papers/`: what each says of itself, and how its runs are simulated.

Everything that a source leaves open is stated in the `[simulation]` table of its `paper.toml`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from co2sim.common import files
from co2sim.common.errors import CatalogError, OptionError
from co2sim.common.files import text_of
from co2sim.common.validation import first_problem
from co2sim.models.framework import AttentionKernel, Checkpointing, Loss
from co2sim.models.recompute import recomputation
from co2sim.prediction.published import add_options

_PACKAGE = Path(__file__).parents[1]

PAPERS = next(
    (folder for folder in (_PACKAGE / "papers", _PACKAGE.parent / "papers") if folder.is_dir()),
    Path("papers"),
)
"""The folder of the published results: part of the installed package, or of a clone."""

TABLES_ELSEWHERE = {
    "vtrain": "a100_dp_iteration_times.csv",
    "llm_foundry": "llm_foundry_fsdp.csv",
}
"""The files of the sources whose tables are only referred to: no numbers of theirs are in here."""

DATA_VARIABLE = "CO2SIM_DATA"
"""The environment variable that may name the folder of the tables that are only referred to."""

_NEAR_CHECKOUT = _PACKAGE.parents[1] / "shared" / "data"
"""Where the tables are looked for if nothing names their folder."""


def recomputed(text: str) -> str:
    """A recomputation, in one way. Raises ValueError for what is none, as pydantic wants it."""
    try:
        return str(recomputation(text))
    except OptionError as error:
        raise ValueError(str(error).partition("; ")[2]) from error


Recomputed: TypeAlias = Annotated[str, AfterValidator(recomputed)]


class Simulation(BaseModel):
    """What `[simulation]` of a source may say; each kind of cell needs some of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source: str = ""
    cluster: str | None = None
    clusters: dict[str, str] = Field(default={})
    stack: str | None = None
    model: str | None = None
    names: dict[str, str] = Field(default={})
    options: dict[str, str] = Field(default={})
    networks: dict[str, str] = Field(default={})
    methods: dict[str, str] = Field(default={})
    modes: dict[str, str] = Field(default={})
    gpus: PositiveInt | None = None
    tokens_per_gpu: PositiveInt | None = None
    micro_batch: PositiveInt = 1
    seq_len: PositiveInt | None = None
    vocab: PositiveInt | None = None
    precision: str | None = None
    attention: AttentionKernel | None = None
    recompute: Recomputed | None = None
    checkpointing: Checkpointing | None = None
    loss: Loss | None = None
    tflops: str | None = None


@dataclass(frozen=True, slots=True)
class Paper:
    """One source: its key, what it says of itself, and how its runs are simulated."""

    key: str
    about: Mapping[str, Any]
    simulation: Simulation

    def setting(self, name: str) -> Any:
        """A value of the `[simulation]` table. Raises CatalogError when it is not there."""
        value = getattr(self.simulation, name)
        if not value:
            raise CatalogError(f"papers/{self.key}/paper.toml: [simulation] has no {name!r}")
        return value

    @property
    def training(self) -> dict[str, Any]:
        """What `[simulation]` says of attention, recomputation and loss, as `RunSetup` takes it."""
        names = ("attention", "recompute", "checkpointing", "loss")
        given = {name: getattr(self.simulation, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    def strategy(self, text: str) -> str:
        """A strategy with the options that the source's framework gives it."""
        return add_options(text, self.simulation.options)

    def cluster(self, name: str) -> str:
        """The cluster on which runs on the cluster of a cell are simulated: the same, or another.

        Raises CatalogError where one cluster is stated for all.
        """
        if self.simulation.cluster is not None:
            raise CatalogError(
                f"papers/{self.key}/paper.toml: [simulation] has 'cluster'; speeds are simulated on"
                " the cluster of their cell, or on the one that 'clusters' names for it"
            )
        return self.simulation.clusters.get(name, name)

    def model_name(self, model: str) -> str:
        """A model of the catalog, as tables name it."""
        return self.simulation.names.get(model, model)


def papers(folder: Path = PAPERS) -> dict[str, Paper]:
    """All sources that say how to simulate their runs, by key."""
    found = {}
    for path in sorted(folder.glob("*/paper.toml")):
        try:
            about = files.toml(text_of(path))
        except OSError as error:
            raise CatalogError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise CatalogError(f"cannot read {path}: {error}") from error
        if "simulation" in about:
            found[path.parent.name] = Paper(path.parent.name, about, _simulation(path, about))
    if not found:
        raise OptionError(f"{folder} holds no papers; give their folder with --papers")
    return found


def _simulation(path: Path, about: Mapping[str, Any]) -> Simulation:
    try:
        return Simulation.model_validate(about["simulation"])
    except ValidationError as error:
        problem = first_problem(error, lambda _: Simulation.model_fields)
        raise CatalogError(f"{path}: [simulation]: {problem}") from error


def tables_elsewhere(data: Path | None = None) -> list[Path]:
    """The paths of the tables that are only referred to, as far as they are at hand.

    They are looked for in `data` (their folder, or one of the files), else in the folder that
    CO2SIM_DATA names, else in `shared/data` next to a checkout. Raises CatalogError where `data` or
    CO2SIM_DATA is given and holds none of them.
    """
    named = os.environ.get(DATA_VARIABLE)
    given, what = (data, "--data") if data else (Path(named) if named else None, DATA_VARIABLE)
    if given is not None and given.is_file():
        return [given]
    folder = given or _NEAR_CHECKOUT
    found = [folder / name for name in TABLES_ELSEWHERE.values() if (folder / name).is_file()]
    if given is not None and not found:
        raise CatalogError(
            f"{what} {given}: it must be a folder with {' or '.join(TABLES_ELSEWHERE.values())}, or"
            " one of these files"
        )
    return found
