"""The record of a run: a folder with the case, the figures and the timeline.

`run.json` holds the case (cluster and model in full) and the figures, `trace.jsonl` the spans of
all ranks, `trace.json` the same for Perfetto. Reading needs no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from co2sim.case import Case
from co2sim.cluster import Cluster
from co2sim.errors import CatalogError
from co2sim.files import write_atomically
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.trace import Trace, read_json_lines
from co2sim.units import Seconds
from co2sim.workload import Model

_IN_FULL = ("cluster", "model", "strategy")
_NOT_OF_A_RUN = ("gpus", "overrides", "noise", "rounds", "fold")
"""Fields of `Case` that are applied to cluster and model before a run, or that only simulate."""
_PLAIN = tuple(field for field in fields(Case) if field.name not in {*_IN_FULL, *_NOT_OF_A_RUN})
"""The other fields of `Case`, kept as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run. The last `rounds` rounds of `trace` were measured; those before warmed up.

    `case` holds cluster and model as objects, sized as they ran, not as names. `kernels` is flops
    or sleep. `clock_error` is the most by which the clocks of two ranks may differ in the trace.
    `figures` are those of `co2sim.Result`, as measured. `environment` describes the hardware, and
    the versions of what ran on it.
    """

    case: Case
    kernels: str
    rounds: int
    trace: Trace
    clock_error: Seconds
    figures: Mapping[str, Any]
    environment: Mapping[str, str]


def folder_name(strategy: str) -> str:
    """A strategy as the name of a folder: `co2-tau=8-worker=node`."""
    return title(parse(strategy)).replace("(", "-").replace(", ", "-").replace(")", "")


def write(folder: Path, record: Record) -> list[Path]:
    """Write a run's files, all or none. Raises OptionError when they cannot be written."""
    case = record.case
    strategy = case.strategy if isinstance(case.strategy, str) else title(case.strategy)
    schedule = case.prepare().schedule
    run = {
        "cluster": TypeAdapter(Cluster).dump_python(case.cluster, mode="json"),  # type: ignore[arg-type]
        "model": TypeAdapter(Model).dump_python(case.model, mode="json"),  # type: ignore[arg-type]
        "strategy": strategy,
        **{field.name: getattr(case, field.name) for field in _PLAIN},
        "kernels": record.kernels,
        "rounds": record.rounds,
        "clock_error": record.clock_error,
        "environment": dict(record.environment),
        "figures": dict(record.figures),
    }
    lines = "".join(f"{line}\n" for line in record.trace.to_json_lines())
    files = {
        folder / "run.json": json.dumps(run, indent=2).encode(),
        folder / "trace.jsonl": lines.encode(),
        folder / "trace.json": json.dumps(record.trace.to_chrome(schedule)).encode(),
    }
    write_atomically(files)
    return list(files)


def read(folder: Path) -> Record:
    """Read a run's folder. Raises CatalogError when it is not one."""
    try:
        run = json.loads((folder / "run.json").read_text())
        plain = {field.name: _plain(run, field) for field in _PLAIN}
        return Record(
            case=Case(
                cluster=TypeAdapter(Cluster).validate_python(run["cluster"]),
                model=TypeAdapter(Model).validate_python(run["model"]),
                strategy=run["strategy"],
                **plain,
            ),
            kernels=run["kernels"],
            rounds=run["rounds"],
            trace=read_json_lines(folder / "trace.jsonl"),
            clock_error=run["clock_error"],
            figures=run["figures"],
            environment=run["environment"],
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError):
            reason = f"run.json has no {error.args[0]!r}"
        elif isinstance(error, OSError):
            reason = f"{error.filename}: {(error.strerror or '').lower()}"
        elif isinstance(error, json.JSONDecodeError):
            reason = f"run.json is not JSON ({reason})"
        raise CatalogError(f"{folder} is not the folder of a run: {reason}") from error


def _plain(run: Mapping[str, Any], field: Field[Any]) -> Any:
    """What run.json holds of a field; older ones lack what can be None."""
    return run.get(field.name) if field.default is None else run[field.name]
