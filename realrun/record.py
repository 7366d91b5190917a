"""The record of a run: a folder with the case, the figures and the timeline.

`run.json` holds the case (cluster and model in full) and the figures, `trace.jsonl` the spans of
all ranks, `trace.json` the same for Perfetto. Reading needs no torch.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import (
    BaseModel,
    Field,
    FiniteFloat,
    PlainValidator,
    StrictInt,
    TypeAdapter,
    ValidationError,
)

from co2sim.catalog import Fact
from co2sim.catalog.model_files import model_from_json, model_to_json
from co2sim.common import files
from co2sim.common.errors import CatalogError, Co2simError, given
from co2sim.common.files import text_of, write_atomically
from co2sim.common.units import FlopsPerSecond, Seconds
from co2sim.common.validation import first_problem
from co2sim.hardware.cluster import Backend, Cluster
from co2sim.models.operators import Model
from co2sim.prediction.question import Question, assumed
from co2sim.schedule.mesh import MESH
from co2sim.schedule.schedule import Layout
from co2sim.simulation.trace import Trace, read_json_lines
from co2sim.strategies import parse
from co2sim.strategies.step import title

_IN_FULL = ("cluster", "model", "strategy")
_NOT_OF_A_RUN = ("gpus", "overrides", "noise", "rounds", "fold")
"""Fields of `Question` that are applied to cluster and model before a run, or that only simulate.
Of `overrides` those of the stack are kept: it stays a name."""
_PLAIN = tuple(field for field in fields(Question) if field.name not in {*_IN_FULL, *_NOT_OF_A_RUN})
"""The other fields of `Question`, kept as they are."""
_LATER = (*MESH, "stack", "offload", "quantize_base")
_NEW = ("product_speed", "overrides")
"""What older records lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run. The last `rounds` rounds of `trace` were measured; those before warmed up.

    `case` holds cluster and model as objects, sized as they ran, not as names. `kernels` is flops
    or sleep. `clock_error` is the most by which the clocks of two ranks may differ in the trace.
    `figures` are those of `co2sim.Result`, as measured. `environment` describes the hardware, and
    the versions of what ran on it. `product_speed` is what products of large matrices attained in
    the measured rounds, on the ranks that others waited for (`matmul_speed`); None where none were
    timed: kernels slept, ran on a GPU, or an older program.
    """

    case: Question
    kernels: str
    rounds: int
    trace: Trace
    clock_error: Seconds
    figures: Mapping[str, Any]
    environment: Mapping[str, str]
    product_speed: FlopsPerSecond | None = None


def folder_name(strategy: str) -> str:
    """A strategy as the name of a folder: `co2-tau=8-worker=node`."""
    return title(parse(strategy)).replace("(", "-").replace(", ", "-").replace(")", "")


def write(folder: Path, record: Record) -> list[Path]:
    """Write a run's files, all or none. Raises OptionError when they cannot be written."""
    case = record.case
    strategy = case.strategy if isinstance(case.strategy, str) else title(case.strategy)
    schedule = case.stage().schedule
    run = {
        "cluster": TypeAdapter(Cluster).dump_python(case.cluster, mode="json"),  # type: ignore[arg-type]
        "model": model_to_json(case.model),  # type: ignore[arg-type]
        "strategy": strategy,
        **{field.name: getattr(case, field.name) for field in _PLAIN},
        "overrides": dict(case.overrides),
        "kernels": record.kernels,
        "rounds": record.rounds,
        "clock_error": record.clock_error,
        "environment": dict(record.environment),
        "figures": dict(record.figures),
        "product_speed": record.product_speed,
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
        return _read(folder)
    except OSError as error:
        reason = f"{error.filename}: {(error.strerror or '').lower()}"
    except KeyError as error:
        reason = f"run.json has no {error.args[0]!r}"
    except ValidationError as error:
        problem = first_problem(error, path=lambda keys: ".".join(map(str, keys)))
        reason = f"run.json: {problem}"
    except ValueError as error:
        reason = f"run.json is not JSON ({error})"
    except Co2simError as error:
        reason = str(error)
    raise CatalogError(f"{folder} is not the folder of a run: {reason}")


def _read(folder: Path) -> Record:
    run = files.json_tree(text_of(folder / "run.json"))
    if not isinstance(run, dict):
        raise CatalogError(f"run.json is {given(run)}; it must be an object")
    plain = {field.name: _plain(run, field) for field in _PLAIN}
    of_run = _OfRun.model_validate(
        {name: run[name] for name in _OfRun.model_fields if name in run or name not in _NEW}
    )
    values = dict(of_run) | {"figures": of_run.figures.model_dump(exclude_unset=True)}
    named = {name: values.pop(name) for name in (*_IN_FULL, "overrides")}
    trace = read_json_lines(folder / "trace.jsonl")
    return Record(case=Question(**named, **plain), trace=trace, **values)


def _plain(run: Mapping[str, Any], field: dataclasses.Field[Any]) -> Any:
    """What run.json holds of a field; older ones lack what can be None, and `_LATER`."""
    if field.default is None or field.name in _LATER:
        return run.get(field.name, field.default)
    return run[field.name]


_LARGEST = 1e24
"""Of a number of a run: beyond a year of all computers."""
_SHORTEST: Seconds = 1e-9
"""Of a round."""
_Figure: TypeAlias = Annotated[FiniteFloat, Field(ge=0, le=_LARGEST, strict=True)]


class _Figures(BaseModel, extra="allow"):
    """Of those of a run what is compared with a prediction."""

    round_time_s: Annotated[_Figure, Field(ge=_SHORTEST)] | None = None
    step_time_s: _Figure | None = None
    comm_busy_s: _Figure | None = None
    exposed_comm_s: _Figure | None = None
    waiting_s: _Figure | None = None
    overlap_ratio: _Figure | None = None


class _OfRun(BaseModel):
    """What `run.json` says of a run, beside the plain fields of its case."""

    cluster: Cluster
    model: Annotated[Model, PlainValidator(model_from_json)]
    strategy: str
    kernels: str
    rounds: Annotated[StrictInt, Field(ge=1)]
    clock_error: Annotated[FiniteFloat, Field(ge=0)]
    figures: _Figures
    environment: dict[str, str]
    product_speed: Annotated[FiniteFloat, Field(ge=1, le=_LARGEST)] | None = None
    overrides: dict[str, str] = {}


def resolve(case: Question, layout: Layout, backend: Backend) -> tuple[Question, tuple[Fact, ...]]:
    """The case with its cluster and model as objects, and those of their numbers without a source.

    The cluster gets these nodes and backend, keeps its sites, and has a communicator for every
    stream and group, as the executor makes them.
    """
    cluster, model = case.load()
    here = replace(
        cluster.value,
        nodes=layout.nodes,
        gpus_per_node=layout.gpus_per_node,
        backend=backend,
        communicators="stream",
    )
    of_stack = {k: text for k, text in case.overrides.items() if k.startswith("stack.")}
    ready = replace(case, cluster=here, model=model.value, overrides=of_stack)
    return ready, assumed(cluster, model)
