"""Published collectives over congested networks, beside predictions of them: nothing is fitted."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from analysis.published.runs import PAPERS
from co2sim.common import files
from co2sim.common.errors import CatalogError
from co2sim.common.units import Bytes, Seconds, parse
from co2sim.common.validation import first_problem
from co2sim.hardware.cluster import GPU, Cluster, Link
from co2sim.hardware.fabric import Fabric, Placement, Tier
from co2sim.schedule.schedule import PEERS, WORLD, Collective, DType, Kind, Op, Schedule
from co2sim.simulation.beside import Meeting, Sharer
from co2sim.simulation.costs import cost_of

_GPU = GPU("any", 80e9, 1e12, {"bf16": 1e15}, ((1.0, 1.0),))
"""Collectives alone depend on no GPU."""
_RATE: Seconds = 20e-6
"""Of a hop between nodes. Messages are large: it hardly matters."""
_DRAWS = 32
"""Of paths and of the moments at which jobs begin."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class System(_Part):
    """Nodes of a job, and leaves of `leaf` such nodes; see `papers/fabric.toml`."""

    name: str
    nodes: PositiveInt
    gpus_per_node: PositiveInt = 1
    bandwidth: str
    intra: str = "100 GB/s"
    nics: PositiveInt = 1
    rails: bool = False
    leaf: PositiveInt
    uplinks: str
    uplink: str
    paths: Literal["hashed", "spread"] = "hashed"
    flows: PositiveInt | None = None
    best: PositiveFloat
    inverse: bool = False
    assumed: list[str]


class Job(_Part):
    """A collective, again and again, on a system; what is left out is that of the row."""

    system: str
    nodes: PositiveInt | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    placement: Placement = "packed"
    op: Literal["all_reduce", "all_gather", "all_to_all", ""] = ""
    group: Literal["world", "peers"] = "world"
    bytes: PositiveInt | None = None


class Case(Job):
    """A job, those beside it, and the rows that measured it."""

    rows: list[PositiveInt]
    best: PositiveFloat | None = None
    others: list[Job] = []


@dataclass(frozen=True, slots=True)
class Compared:
    """A row and its prediction: parts of what network cards attain without congestion."""

    row: int
    source: str
    what: str
    measured: float
    predicted: float
    jobs: int
    assumed: tuple[str, ...]

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def compared(papers: Path = PAPERS, draws: int = _DRAWS) -> list[Compared]:
    """All rows that say enough, over draws of paths and of moments.

    Raises CatalogError for files that do not fit each other.
    """
    path = papers / "fabric.toml"
    tree = files.toml_file(path)
    try:
        systems = {each["name"]: System(**each) for each in tree["system"]}
        cases = [Case(**each) for each in tree["case"]]
    except (ValidationError, KeyError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise CatalogError(f"{path}: {problem}") from error
    rows = dict(_rows(papers / "fabric" / "collectives.csv"))
    return [
        _compared(rows[row], case, systems, draws) for case in cases for row in sorted(case.rows)
    ]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        yield int(row["id"]), row


def _compared(
    row: Mapping[str, str], case: Case, systems: Mapping[str, System], draws: int
) -> Compared:
    system = systems[case.system]
    part = _predicted(row, case, systems, draws)
    measured = _of_mean_time(row) / (case.best or system.best)
    return Compared(
        row=int(row["id"]),
        source=row["source"],
        what=f"{row['op']}, {row['placement']}",
        measured=measured,
        predicted=1 / part if system.inverse else part,
        jobs=1 + len(case.others),
        assumed=tuple(system.assumed),
    )


def _of_mean_time(row: Mapping[str, str]) -> float:
    """The bandwidth of the mean time over runs, such as `6.06 x15; 10.30 x5`; else that of all."""
    runs = [part.split(" x") for part in row["distribution"].split("; ") if " x" in part]
    if not runs:
        return float(row["value"])
    total = sum(int(count) for _, count in runs)
    return total / sum(int(count) / float(speed) for speed, count in runs)


def _predicted(
    row: Mapping[str, str], case: Case, systems: Mapping[str, System], draws: int
) -> float:
    """The part of its speed without congestion that is left to a job."""
    free = cost_of(_work(row, case), _cluster(case, systems, blocks=False))
    without = free.duration_alone(_cluster(case, systems, blocks=False))
    cluster = _cluster(case, systems)
    if not case.others:
        return without / cost_of(_work(row, case), cluster).duration_alone(cluster)
    jobs = [_sharer(row, job, systems) for job in (case, *case.others)]
    first = Meeting(jobs, draws=draws).run()[0]
    return without / fmean(first.rounds)


def _sharer(row: Mapping[str, str], job: Job, systems: Mapping[str, System]) -> Sharer:
    body = (Op("collective", _work(row, job), "communication"),)
    return Sharer(Schedule(job.system, body, 1), _cluster(job, systems), "bf16")


def _work(row: Mapping[str, str], job: Job) -> Collective:
    size: Bytes = job.bytes or float(row["bytes"])
    group = PEERS if job.group == "peers" else WORLD
    return Collective(Kind(job.op or row["op"]), "buffer", int(size), DType.INT8, group)


def _cluster(job: Job, systems: Mapping[str, System], *, blocks: bool = True) -> Cluster:
    system = systems[job.system]
    bandwidth = parse(system.bandwidth, "B/s")
    over = system.leaf * bandwidth / parse(system.uplinks, "B/s")
    leaf = Tier(system.leaf, over, speed=parse(system.uplink, "B/s"))
    fabric = Fabric(
        leaf,
        nics=system.nics,
        rails=system.rails,
        paths=system.paths,
        flows=system.flows,
        placement=job.placement,
        share=job.share,
    )
    return Cluster(
        name=system.name,
        gpu=_GPU,
        nodes=job.nodes or system.nodes,
        gpus_per_node=system.gpus_per_node,
        intra=Link(parse(system.intra, "B/s"), 1e-6),
        inter=Link(bandwidth, _RATE),
        channels=max(2, 2 * system.nics),
        fabric=fabric if blocks else None,
    )


def summary(rows: Sequence[Compared]) -> list[str]:
    """One line a source, and one for all: mean absolute error, the mean of signed ones, rows."""
    lines = []
    for name in (*dict.fromkeys(row.source for row in rows), ""):
        of = [row for row in rows if name in {"", row.source}]
        size = sum(abs(row.error) for row in of) / len(of)
        bias = sum(row.error for row in of) / len(of)
        what = f"{name or 'all'}: {len(of)} rows, {size:.1%} off in the mean, bias {bias:+.1%}"
        lines.append(what)
    return lines
