"""Published training runs: their configuration, the rows of `papers/*/runs.csv`, their one reader.

A paper with runs has a table `[runs]` in its `paper.toml`: `file` names the rows, `read_off` says
that numbers were read off a chart, `site` is the key of another paper whose machine the runs used,
and `note` says what the source does not state. Models and clusters are names of the catalog, or
files beside the rows.
"""

import csv
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from co2sim.catalog import load_stack
from co2sim.common.errors import CatalogError, OptionError, given, visible
from co2sim.common.files import is_below, text_of
from co2sim.common.validation import first_problem
from co2sim.hardware.cluster import Cluster
from co2sim.models.operators import NARROW, Model
from co2sim.prediction.published import Simulation, Use, read_paper, recomputed
from co2sim.prediction.question import Question
from co2sim.schedule.pipeline import PipelineSchedule
from co2sim.strategies import Strategy, parse
from co2sim.training.framework import AttentionKernel, Checkpointing, Loss

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


Row: TypeAlias = Mapping[str, str]

_BETWEEN = "; "
"""Overrides of a row."""

_DIGITS = 9
"""Maximum digits of a whole number in a table."""

_SMALLEST = 1e-9
"""Of a published number; its inverse is the largest."""

_MAX_LOADED = 512
"""Clusters and models that are kept once they are read."""


def whole(text: str | int, digits: int = _DIGITS) -> int:
    """The whole number above 0 that a field holds. Raises ValueError with the rule."""
    text = str(text)
    if not (text.isascii() and text.isdigit() and len(text) <= digits and int(text)):
        raise ValueError(f"must be a whole number from 1 to {10**digits - 1}")
    return int(text)


def _positive(text: str) -> float | None:
    if not text:
        return None
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not _SMALLEST <= value <= 1 / _SMALLEST:
        raise ValueError(f"must be a number above 0, from {_SMALLEST:g} to {1 / _SMALLEST:g}")
    return value


def _truth(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError("must be true or false")
    return text == "true"


def _overrides(text: str | Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(text, str):
        return text
    changes: dict[str, str] = {}
    for part in text.split(_BETWEEN) if text else ():
        path, equals, value = (piece.strip() for piece in part.partition("="))
        if not (path and equals and value) or path in changes:
            raise ValueError("must be PATH=VALUE, each path once, with a semicolon between two")
        changes[path] = value
    return changes


def _recomputation(text: str) -> str:
    return text if text == "auto" else recomputed(text)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


Count: TypeAlias = Annotated[int, BeforeValidator(whole)]
Published: TypeAlias = Annotated[float | None, BeforeValidator(_positive)]
"""A published number; None where the field is empty."""
Added: TypeAlias = Annotated[str, Field(pattern=r"^(20\d\d-[01]\d)?$")]
"""A month, such as 2026-11; empty: before that."""
Name: TypeAlias = Annotated[str, Field(min_length=1)]
Truth: TypeAlias = Annotated[bool, BeforeValidator(_truth)]
Overrides: TypeAlias = Annotated[Mapping[str, str], BeforeValidator(_overrides)]
Recomputation: TypeAlias = Annotated[str, BeforeValidator(_recomputation)]
Parts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_parts)]


class RunsTable(BaseModel):
    """`[runs]` of a `paper.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: Name
    read_off: bool = False
    site: str = ""
    note: str = ""


class RunSetup(BaseModel):
    """The configuration of a published run, as the options of `co2sim run`.

    `cluster`, `model` and `stack` are names of the catalog; without a stack it is that of the
    cluster. `strategy` is written as on the command line, and `overrides` as `--set` takes them.
    `recompute` is auto where the source is silent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stack: str = ""
    model: Name
    cluster: str
    gpus: Count
    strategy: Name
    micro_batch: Count = 1
    accumulation: Count = 1
    tp: Count = 1
    ep: Count = 1
    cp: Count = 1
    pp: Count = 1
    interleave: Count = 1
    schedule: PipelineSchedule = "1f1b"
    sequence_parallel: Truth = False
    precision: Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"]
    recompute: Recomputation = "none"
    attention: AttentionKernel = "flash"
    loss: Loss = "fused"
    checkpointing: Checkpointing = "non_reentrant"
    optimizer: Name = "adamw"
    overrides: Overrides = {}

    def __hash__(self) -> int:
        """Of what differs most; equal runs have equal hashes."""
        return hash((self.cluster, self.gpus, self.micro_batch, *self.overrides.items()))

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """From values of all kinds. Raises CatalogError for what a run cannot have."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise CatalogError(first_problem(error)) from error

    def changed(self, **changes: Any) -> Self:
        """With other values of fields, which are not checked again."""
        return self.model_copy(update=changes)

    def case(self, extra: Mapping[str, str] = {}, **changes: Any) -> Question:
        """The run as a case, with `changes` of its fields.

        `extra` are further overrides; where the row has one of the same path, that of the row
        counts. Raises OptionError for values that `Question` does not allow.
        """
        columns = type(self).model_fields
        said = {
            field.name: getattr(self, field.name)
            for field in fields(Question)
            if field.name in columns
        }
        overrides = {**extra, **self.overrides}
        return Question(**{**said, "overrides": overrides, **changes})

    def whole_cluster(self) -> Cluster:
        """The cluster with its stack's kernels, of which the run may use a part."""
        return _loaded(self)[0]

    def used_cluster(self) -> Cluster:
        """The part of the cluster that the run uses. Raises OptionError if it fills no nodes."""
        return self.whole_cluster().resized(self.gpus)

    def trained(self) -> Model:
        """The model."""
        return _loaded(self)[1]

    def parsed(self) -> Strategy:
        """The strategy."""
        return _parsed(self.strategy)


@lru_cache(_MAX_LOADED)
def _loaded(run: RunSetup) -> tuple[Cluster, Model]:
    cluster, model = run.case().load()
    return cluster.value, model.value


_parsed = lru_cache(_MAX_LOADED)(parse)

_EXPRESSED = {"torch.compile", "selective activation checkpointing"}
"""Of what runs need, what a stack does."""


class TrainingRun(RunSetup):
    """One published training run, made of texts.

    `id` is unique within its paper. `cluster` is empty, and `model` may be any text, where the
    catalog has nothing like it. `recompute` is auto, too, where the source recomputed a part that
    cannot be expressed. `tokens_per_s_per_gpu` is None for runs of which only the memory is
    published, or the time of a step (`iteration_ms`). `memory_gib` is the published peak: of the
    allocated or reserved memory by PyTorch's counters, or the total by nvidia-smi (`memory_kind`).
    `needs` names what cannot be expressed yet, and `headline` says whether the run counts in
    figures of errors. `added` is the month when it came, empty before November 2026: runs that came
    after the last fit are a test of it. `site` is whose machine it used. A run with a
    `use` is one of the cells of `co2analysis validate`. `read_off` says that its numbers were read
    off a chart.
    """

    paper: Name
    site: Name
    read_off: bool
    id: Count
    added: Added = ""
    stack: Name
    iteration_ms: Published = None
    tokens_per_s_per_gpu: Published = None
    memory_gib: Published = None
    memory_kind: Literal["", "allocated", "reserved", "total"] = ""
    out_of_memory: Truth = False
    needs: Parts = ()
    headline: Truth = False
    use: Use | Literal[""] = ""
    url: Name
    note: str

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Groups divide the GPUs, a peak says what it counts, and a run that counts has all."""
        comparable = self.tokens_per_s_per_gpu is not None and self.cluster and not self._special
        wrong = {
            f"gpus {self.gpus} is not a multiple of tp {self.tp} x pp {self.pp}": self.gpus
            % (self.tp * self.cp * self.pp),
            "memory_gib and memory_kind go together": (self.memory_gib is None)
            != (not self.memory_kind),
            "headline is true; it must be false without tokens_per_s_per_gpu or cluster, and for"
            " fp8, ep and cp": self.headline and not comparable,
            "use needs iteration_ms": self.use and self.iteration_ms is None,
        }
        for words, holds in wrong.items():
            if holds:
                raise ValueError(words)
        return self

    @property
    def _special(self) -> bool:
        """Whether the run is in fp8, of divided experts, or of divided sequences."""
        return self.precision in NARROW or self.ep > 1 or self.cp > 1

    @property
    def is_counted(self) -> bool:
        """Whether it enters fits and errors: a headline, or one of a special kind."""
        predictable = self.tokens_per_s_per_gpu is not None and bool(self.cluster)
        expressed = set(self.needs) <= _EXPRESSED and not self.out_of_memory
        return self.headline or (predictable and self._special and expressed)

    def case(self, extra: Mapping[str, str] = {}, **changes: Any) -> Question:
        """The run as a case, with `changes` of its fields; see `RunSetup.case`.

        Where the row says auto, recomputation is selective if the stack repeats products then, else
        none. Raises OptionError for a run without a cluster, unless `changes` has one.
        """
        if not self.cluster and "cluster" not in changes:
            raise OptionError(
                f"run {self.id} of {self.paper} has no cluster in the catalog; it needs"
                f" {', '.join(self.needs)}"
            )
        if self.recompute == "auto":
            products = load_stack(self.stack).value.selective == "products"
            changes = {"recompute": "selective" if products else "none", **changes}
        return super().case(extra, **changes)


def training_runs(folder: Path = PAPERS) -> list[TrainingRun]:
    """The runs of all papers in `folder` with a table `[runs]`, by paper and as their files say.

    Raises CatalogError for a file that cannot be read, and for a bad row with file, line, column
    and rule.
    """
    return [run for path in sorted(folder.glob("*/paper.toml")) for run in _of_paper(path)]


def _of_paper(path: Path) -> list[TrainingRun]:
    """The runs of the paper whose `paper.toml` this is; none without `[runs]`."""
    about, _ = read_paper(path)
    if "runs" not in about:
        return []
    try:
        table = RunsTable.model_validate(about["runs"])
    except ValidationError as error:
        problem = first_problem(error, lambda _: RunsTable.model_fields)
        raise CatalogError(f"{path}: [runs]: {problem}") from error
    key = path.parent.name
    of_all = {"paper": key, "site": table.site or key, "read_off": table.read_off}
    rows = file_beside(path, "[runs] file", table.file)
    return _runs(rows, of_all, str(about.get("url", "")))


def file_beside(path: Path, what: str, name: object) -> Path:
    """A file that a `paper.toml` names, in its folder. Raises CatalogError for another."""
    if not isinstance(name, str) or not is_below(path.parent / name, path.parent):
        raise CatalogError(f"{path}: {what} is {given(name)}; it must be a file in this folder")
    return path.parent / name


def _runs(path: Path, of_all: Mapping[str, Any], url: str) -> list[TrainingRun]:
    """The runs of a file, with what holds for all of them; a row without a url has the paper's."""
    runs: dict[int, TrainingRun] = {}
    for line, row in csv_rows(path)[1]:
        try:
            named = {name: _beside(path, row[name]) for name in ("model", "cluster") if name in row}
            more = {**named, **of_all, "url": row.get("url") or url}
            run = TrainingRun.model_validate({**row, **more})
        except ValidationError as error:
            problem = first_problem(error, lambda _: TrainingRun.model_fields)
            raise CatalogError(f"{path}, line {line}: {problem}") from error
        if run.id in runs:
            raise CatalogError(f"{path}, line {line}: id {run.id} stands there twice")
        runs[run.id] = run
    if not runs:
        raise CatalogError(f"{path}: no rows")
    return [*runs.values()]


def _beside(rows: Path, name: str) -> str:
    """A model or a cluster: a name of the catalog, or a file beside the rows."""
    return str(file_beside(rows, "a file", name)) if name.endswith(".toml") else name


def csv_rows(path: Path) -> tuple[list[str], list[tuple[int, Row]]]:
    """The columns of a table, and its rows with their line; lines with # are comments.

    Raises CatalogError.
    """
    try:
        lines = visible(text_of(path)).splitlines()
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"cannot read {path}: it is not a text in UTF-8") from error
    columns: list[str] = []
    rows: list[tuple[int, Row]] = []
    for count, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            texts = [text.strip() for text in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise CatalogError(f"{path}, line {count}: {error}") from error
        if not columns:
            columns = texts
            twice = next((name for name in columns if name and columns.count(name) > 1), None)
            if twice:
                raise CatalogError(f"{path} has the column {twice} twice")
        elif len(texts) != len(columns):
            raise CatalogError(
                f"{path}, line {count}: {len(texts)} fields under {len(columns)} columns"
            )
        else:
            rows.append((count, dict(zip(columns, texts, strict=True))))
    if not columns:
        raise CatalogError(f"{path}: no rows")
    return columns, rows
