"""Published training runs: the rows of `papers/*/runs.csv`, and the case that each is.

A paper with runs has a table `[runs]` in its `paper.toml`: `file` names the rows, `read_off` says
that numbers were read off a chart, and `note` what the source does not state.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from analysis.published.csv_rows import Count, Published
from analysis.published.papers import PAPERS, recomputed
from co2sim.catalog import load_stack
from co2sim.common import files
from co2sim.common.errors import CatalogError, OptionError, given, visible
from co2sim.common.files import is_below, text_of
from co2sim.common.validation import first_problem
from co2sim.models.framework import AttentionKernel, Checkpointing, Loss
from co2sim.models.workload import NARROW, Optimizer
from co2sim.prediction.case import Case

Row: TypeAlias = Mapping[str, str]

_BETWEEN = "; "
"""Overrides of a row."""


def _truth(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError("must be true or false")
    return text == "true"


def _overrides(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(_BETWEEN) if text else ():
        path, equals, value = (piece.strip() for piece in part.partition("="))
        if not (path and equals and value) or path in found:
            raise ValueError("must be PATH=VALUE, each path once, with a semicolon between two")
        found[path] = value
    return found


def _recomputation(text: str) -> str:
    return text if text == "auto" else recomputed(text)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


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
    note: str = ""


_EXPRESSED = {"torch.compile", "selective activation checkpointing"}
"""Of what runs need, what a stack does."""


class TrainingRun(BaseModel):
    """One published training run, made of texts.

    `id` is unique within its paper. `cluster`, `model` and `stack` are names of the catalog;
    `cluster` is empty, and `model` may be any text, where the catalog has nothing like it.
    `strategy` is written as on the command line, and `overrides` as `--set` takes them. `recompute`
    is auto where the source is silent, or recomputed a part that cannot be expressed.
    `tokens_per_s_per_gpu` is None for runs of which only the memory is published. `memory_gib` is
    the published peak: of the allocated or reserved memory by PyTorch's counters, or the total by
    nvidia-smi (`memory_kind`). `needs` names what cannot be expressed yet, and `headline` says
    whether the run counts in figures of errors. `read_off` says that its numbers were read off a
    chart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    paper: Name
    read_off: bool
    id: Count
    stack: Name
    model: Name
    cluster: str
    gpus: Count
    strategy: Name
    micro_batch: Count
    accumulation: Count
    tp: Count
    ep: Count = 1
    cp: Count = 1
    pp: Count
    interleave: Count
    sequence_parallel: Truth
    precision: Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"]
    recompute: Recomputation
    attention: AttentionKernel
    loss: Loss
    checkpointing: Checkpointing
    optimizer: Optimizer
    overrides: Overrides
    tokens_per_s_per_gpu: Published
    memory_gib: Published
    memory_kind: Literal["", "allocated", "reserved", "total"]
    out_of_memory: Truth
    needs: Parts
    headline: Truth
    url: Name
    note: str

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        """Tensor and pipeline parallelism divide the GPUs."""
        if self.gpus % (self.tp * self.cp * self.pp):
            raise ValueError(f"gpus {self.gpus} is not a multiple of tp {self.tp} x pp {self.pp}")
        return self

    @model_validator(mode="after")
    def _memory_of_a_kind(self) -> Self:
        """A peak of memory says what it counts."""
        if (self.memory_gib is None) != (not self.memory_kind):
            raise ValueError("memory_gib and memory_kind go together")
        return self

    @model_validator(mode="after")
    def _headline_can_be_compared(self) -> Self:
        """A run that counts has a speed, a cluster, and a precision of 16 or 32 bits."""
        narrow = self.precision in NARROW or self.ep > 1 or self.cp > 1
        if self.headline and (self.tokens_per_s_per_gpu is None or not self.cluster or narrow):
            raise ValueError(
                "headline is true; it must be false without tokens_per_s_per_gpu or cluster, and"
                " for fp8, ep and cp"
            )
        return self

    @property
    def unfitted(self) -> bool:
        """Whether the run can be predicted, and enters no fit: in fp8, of experts, or with cp."""
        known = self.tokens_per_s_per_gpu is not None and bool(self.cluster)
        kind = self.precision in NARROW or self.ep > 1 or self.cp > 1
        return known and kind and set(self.needs) <= _EXPRESSED and not self.out_of_memory

    def case(self, extra: Mapping[str, str] = {}, **changes: Any) -> Case:
        """The run as a case, with `changes` of its fields.

        `extra` are further overrides; where the row has one of the same path, that of the row
        counts. Where the row says auto, recomputation is selective if the stack repeats products
        then, else none. Raises OptionError for a run without a cluster, unless `changes` has one,
        and for values that `Case` does not allow.
        """
        if not self.cluster and "cluster" not in changes:
            raise OptionError(
                f"run {self.id} of {self.paper} has no cluster in the catalog; it needs"
                f" {', '.join(self.needs)}"
            )
        columns = type(self).model_fields
        said = {
            field.name: getattr(self, field.name) for field in fields(Case) if field.name in columns
        }
        if self.recompute == "auto":
            products = load_stack(self.stack).value.selective == "products"
            said["recompute"] = "selective" if products else "none"
        return Case(**{**said, "overrides": {**extra, **self.overrides}, **changes})


def training_runs(folder: Path = PAPERS) -> list[TrainingRun]:
    """The runs of all papers in `folder` with a table `[runs]`, by paper and as their files say.

    Raises CatalogError for a file that cannot be read, and for a bad row with file, line, column
    and rule.
    """
    return [run for path in sorted(folder.glob("*/paper.toml")) for run in _of_paper(path)]


def _of_paper(path: Path) -> list[TrainingRun]:
    """The runs of the paper whose `paper.toml` this is; none without `[runs]`."""
    try:
        about = files.toml(text_of(path))
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CatalogError(f"cannot read {path}: {error}") from error
    if "runs" not in about:
        return []
    try:
        table = RunsTable.model_validate(about["runs"])
    except ValidationError as error:
        problem = first_problem(error, lambda _: RunsTable.model_fields)
        raise CatalogError(f"{path}: [runs]: {problem}") from error
    rows = path.parent / table.file
    if not is_below(rows, path.parent):
        raise CatalogError(
            f"{path}: [runs] file is {given(table.file)}; it must be a file in this folder"
        )
    of_all = {"paper": path.parent.name, "read_off": table.read_off}
    return _runs(rows, of_all, str(about.get("url", "")))


def _runs(path: Path, of_all: Mapping[str, Any], url: str) -> list[TrainingRun]:
    """The runs of a file, with what holds for all of them; a row without a url has the paper's."""
    found: dict[int, TrainingRun] = {}
    for number, row in _rows(path):
        try:
            run = TrainingRun.model_validate({**row, **of_all, "url": row.get("url") or url})
        except ValidationError as error:
            problem = first_problem(error, lambda _: TrainingRun.model_fields)
            raise CatalogError(f"{path}, line {number}: {problem}") from error
        if run.id in found:
            raise CatalogError(f"{path}, line {number}: id {run.id} stands there twice")
        found[run.id] = run
    if not found:
        raise CatalogError(f"{path}: no rows")
    return [*found.values()]


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows below the line of columns, with their line; lines with # are comments."""
    try:
        lines = visible(text_of(path)).splitlines()
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"cannot read {path}: it is not a text in UTF-8") from error
    columns: list[str] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            texts = [text.strip() for text in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise CatalogError(f"{path}, line {number}: {error}") from error
        if columns is None:
            columns = texts
        elif len(texts) != len(columns):
            raise CatalogError(
                f"{path}, line {number}: {len(texts)} fields under {len(columns)} columns"
            )
        else:
            yield number, dict(zip(columns, texts, strict=True))
