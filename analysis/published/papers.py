"""The published sources in `papers/`: what each says of itself, and how its runs are simulated.

Everything that a source leaves open is stated in the `[simulation]` table of its `paper.toml`.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from co2sim.errors import CatalogError, OptionError

_PACKAGE = Path(__file__).parents[1]

PAPERS = next(
    (folder for folder in (_PACKAGE / "papers", _PACKAGE.parent / "papers") if folder.is_dir()),
    Path("papers"),
)
"""Inside the package where it is installed, beside it in a clone."""

ITERATION_TIMES = "a100_dp_iteration_times.csv"

DATA_VARIABLE = "CO2SIM_DATA"
"""The environment variable that may name the folder of the tables that are only referred to."""

_BESIDE = _PACKAGE.parents[1] / "shared" / "data"


@dataclass(frozen=True, slots=True)
class Paper:
    """One source: its key, what it says of itself, and how its runs are simulated."""

    key: str
    about: Mapping[str, Any]

    @property
    def simulation(self) -> Mapping[str, Any]:
        """The `[simulation]` table."""
        found: Mapping[str, Any] = self.about["simulation"]
        return found

    def strategy(self, text: str) -> str:
        """A strategy with the options that the source's framework gives it."""
        options = self.simulation.get("options", {})
        name = text.partition(":")[0].partition("(")[0]
        extra = options.get(name)
        if not extra:
            return text
        return f"{text},{extra}" if ":" in text else f"{text}:{extra}"

    def on(self, cluster: str) -> "Paper":
        """The same source, simulated on another cluster."""
        return replace(
            self, about={**self.about, "simulation": {**self.simulation, "cluster": cluster}}
        )


def papers(folder: Path = PAPERS) -> dict[str, Paper]:
    """All sources that say how to simulate their runs, by key."""
    found = {}
    for path in sorted(folder.glob("*/paper.toml")):
        about = tomllib.loads(path.read_text())
        if "simulation" in about:
            found[path.parent.name] = Paper(path.parent.name, about)
    if not found:
        raise OptionError(f"{folder} holds no papers; give their folder with --papers")
    return found


def iteration_times(data: Path | None = None) -> Path | None:
    """The table that is only referred to: in the folder given, else where it may be by itself.

    That is the folder named by CO2SIM_DATA, or `shared/data` beside a checkout. None where nothing
    is given and nothing is there; CatalogError where what is given holds no such table.
    """
    named = os.environ.get(DATA_VARIABLE)
    given, what = (data, "--data") if data else (Path(named) if named else None, DATA_VARIABLE)
    if given is None:
        path = _BESIDE / ITERATION_TIMES
        return path if path.is_file() else None
    path = given / ITERATION_TIMES if given.is_dir() else given
    if not path.is_file():
        raise CatalogError(f"{what} {given}: {path} does not exist")
    return path
