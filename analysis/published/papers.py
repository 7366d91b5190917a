"""The published sources in `papers/`: what each says of itself, and how its runs are simulated.

Everything that a source leaves open is stated in the `[simulation]` table of its `paper.toml`.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2sim.errors import CatalogError, OptionError
from co2sim.published_cells import with_options

_PACKAGE = Path(__file__).parents[1]

PAPERS = next(
    (folder for folder in (_PACKAGE / "papers", _PACKAGE.parent / "papers") if folder.is_dir()),
    Path("papers"),
)
"""The folder of the published results: part of the installed package, or of a clone."""

ITERATION_TIMES = "a100_dp_iteration_times.csv"

DATA_VARIABLE = "CO2SIM_DATA"
"""The environment variable that may name the folder of the tables that are only referred to."""

_NEAR_CHECKOUT = _PACKAGE.parents[1] / "shared" / "data"
"""Where the tables are looked for if nothing names their folder."""


@dataclass(frozen=True, slots=True)
class Paper:
    """One source: its key, what it says of itself, and how its runs are simulated."""

    key: str
    about: Mapping[str, Any]

    def setting(self, name: str) -> Any:
        """A value of the `[simulation]` table. Raises CatalogError when it is not there."""
        simulation = self.about["simulation"]
        if name not in simulation:
            raise CatalogError(f"papers/{self.key}/paper.toml: [simulation] has no {name!r}")
        return simulation[name]

    def strategy(self, text: str) -> str:
        """A strategy with the options that the source's framework gives it."""
        return with_options(text, self.about["simulation"].get("options", {}))

    def cluster(self, name: str) -> str:
        """The cluster on which runs on the cluster of a cell are simulated: the same, or another.

        Raises CatalogError where one cluster is stated for all.
        """
        simulation = self.about["simulation"]
        if "cluster" in simulation:
            raise CatalogError(
                f"papers/{self.key}/paper.toml: [simulation] has 'cluster'; speeds are simulated on"
                " the cluster of their cell, or on the one that 'clusters' names for it"
            )
        return str(simulation.get("clusters", {}).get(name, name))

    def model_name(self, model: str) -> str:
        """A model of the catalog, as tables name it."""
        return str(self.about["simulation"].get("names", {}).get(model, model))

    @property
    def micro_batch(self) -> int:
        """Sequences per GPU and step, of a source that states its tokens per GPU."""
        return int(self.about["simulation"].get("micro_batch", 1))

    @property
    def fitted_model(self) -> str | None:
        """The model on whose runs constants were fitted, if one is stated."""
        model: str | None = self.about["simulation"].get("model")
        return model


def papers(folder: Path = PAPERS) -> dict[str, Paper]:
    """All sources that say how to simulate their runs, by key."""
    found = {}
    for path in sorted(folder.glob("*/paper.toml")):
        try:
            about = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CatalogError(f"cannot read {path}: {error}") from error
        if "simulation" in about:
            found[path.parent.name] = Paper(path.parent.name, about)
    if not found:
        raise OptionError(f"{folder} holds no papers; give their folder with --papers")
    return found


def iteration_times(data: Path | None = None) -> Path | None:
    """The path of the table that is only referred to; None where it is not at hand.

    It is looked for in `data` (its folder, or the file), else in the folder that CO2SIM_DATA names,
    else in `shared/data` next to a checkout. Raises CatalogError where `data` or CO2SIM_DATA is
    given and holds no such table.
    """
    named = os.environ.get(DATA_VARIABLE)
    given, what = (data, "--data") if data else (Path(named) if named else None, DATA_VARIABLE)
    if given is None:
        path = _NEAR_CHECKOUT / ITERATION_TIMES
        return path if path.is_file() else None
    path = given / ITERATION_TIMES if given.is_dir() else given
    if not path.is_file():
        raise CatalogError(f"{what} {given}: {path} does not exist")
    return path
