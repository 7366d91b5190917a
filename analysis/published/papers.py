"""The published sources in `papers/`: what each says of itself, and how its runs are simulated.

Everything that a source leaves open is stated in the `[simulation]` table of its `paper.toml`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2sim.common.errors import CatalogError, OptionError
from co2sim.prediction.published import Simulation, read_paper

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

    def chosen(self, column: str, text: str, table: str) -> str:
        """What stands for a text in a table of `[simulation]`. Raises CatalogError for others."""
        texts = self.setting(table)
        if text not in texts:
            raise CatalogError(f"{column} is {text!r}; it must be one of {', '.join(texts)}")
        return str(texts[text])

    @property
    def training(self) -> dict[str, Any]:
        """What `[simulation]` says of all runs but their precision, as a `RunSetup` takes it."""
        names = ("attention", "recompute", "checkpointing", "loss", "stack")
        return {name: getattr(self.simulation, name) for name in names}

    def name(self, name: str) -> str:
        """A model or a cluster, as tables name it."""
        return self.simulation.names.get(name, name)


def papers(folder: Path = PAPERS) -> dict[str, Paper]:
    """All sources that say how to simulate their runs, by key."""
    every = {path.parent.name: read_paper(path) for path in sorted(folder.glob("*/paper.toml"))}
    sources = {key: Paper(key, about, how) for key, (about, how) in every.items() if how}
    if not sources:
        raise OptionError(f"{folder} holds no papers; give their folder with --papers")
    return sources


def tables_elsewhere(data: Path | None = None) -> list[Path]:
    """The paths of the tables that are only referred to, as far as they are at hand.

    They are looked for in `data` (their folder, or one of the files), else in the folder that
    CO2SIM_DATA names, else in `shared/data` next to a checkout. Raises CatalogError where `data` or
    CO2SIM_DATA is given and holds none of them.
    """
    named = os.environ.get(DATA_VARIABLE)
    stated, what = (data, "--data") if data else (Path(named) if named else None, DATA_VARIABLE)
    if stated is not None and stated.is_file():
        return [stated]
    folder = stated or _NEAR_CHECKOUT
    tables = [folder / name for name in TABLES_ELSEWHERE.values() if (folder / name).is_file()]
    if stated is not None and not tables:
        raise CatalogError(
            f"{what} {stated}: it must be a folder with {' or '.join(TABLES_ELSEWHERE.values())},"
            " or one of these files"
        )
    return tables
