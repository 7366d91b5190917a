"""`co2sim sweep --out`: figures go to a folder, and the terminal hears how many."""

import json

from co2sim.cli.failures import end_with
from co2sim.common.units import counted
from co2sim.studies.grid import label
from co2sim.studies.results_folder import Kept, SweepTable, stream
from co2sim.studies.workers.engine import Engine, opened

__all__ = ["SweepTable", "keep"]


def keep(table: SweepTable, engine: Engine, *, as_json: bool) -> None:
    """Simulate what the folder does not have, and say so; exit code 1 if a case failed."""
    with opened(engine, len(table.shard.places(len(table.points)))) as pool:
        kept = stream(table, pool)
    print(json.dumps(kept.summary(), indent=2) if as_json else _words(kept))
    if kept.failed:
        failed = [
            (", ".join(f"{path}={label(value)}" for path, value in setting.items()), failure)
            for setting, failure in kept.failures
        ]
        end_with(failed, kept.failed, kept.cases, f"the others are in {kept.folder}")


def _words(kept: Kept) -> str:
    reused = f", {kept.reused:,} were there already" if kept.reused else ""
    return (
        f"{counted(kept.computed, 'case')} simulated{reused}: all {kept.cases:,} in {kept.folder}"
    )
