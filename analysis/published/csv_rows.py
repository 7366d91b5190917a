"""What a row of each published table holds, and the cells that it states.

The columns of a table are the fields of its model.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from analysis.published.cells import (
    ONE_BUCKET,
    SIZES,
    Cell,
    PublishedRun,
    RunSetup,
    Term,
    gpt,
    ratio_cell,
    throughput_cell,
    zeropp_cell,
)
from analysis.published.papers import Paper
from analysis.published.parameters import cluster_of
from co2sim.common.errors import CatalogError
from co2sim.prediction.published import Use

_DIGITS = 9
"""Maximum digits of a whole number in a table."""

_SMALLEST = 1e-9
"""Of a published number; its inverse is the largest."""

_MAX_LINKS = 8
"""InfiniBand links of a DGX-2."""

_RATIO = (16, 128)
"""GPUs between which CO2's table states a ratio."""

_RATIO_ROUNDING = 0.01
"""It is printed with two decimals."""


def whole(text: str, digits: int = _DIGITS) -> int:
    """The whole number above 0 that a field holds. Raises ValueError with the rule."""
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


def _size(value: int) -> int:
    if value not in SIZES:
        raise ValueError(f"must be one of {', '.join(map(str, SIZES))}")
    return value


def _links(value: int) -> int:
    if value > _MAX_LINKS:
        raise ValueError(f"must be at most {_MAX_LINKS}, the links of a DGX-2")
    return value


Count: TypeAlias = Annotated[int, BeforeValidator(whole)]
Published: TypeAlias = Annotated[float | None, BeforeValidator(_positive)]
"""A published number; None where the field is empty."""


class TableRow(BaseModel):
    """A row, made of texts. Further columns are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    source: ClassVar[str]
    """The paper that the table is of."""

    @abstractmethod
    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """The published numbers of the row. Raises Co2simError where it cannot be simulated."""


class ZeroppRow(TableRow):
    """Throughput of ZeRO-3 and of ZeRO++ for one model, micro-batch and number of links."""

    source = "zeropp"

    model_params_b: Annotated[Count, AfterValidator(_size)]
    tokens_per_gpu: Count
    ib_links_100gbps_per_node: Annotated[Count, AfterValidator(_links)]
    zero3_tflops_per_gpu: Published
    zeropp_tflops_per_gpu: Published

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """One for each of the two strategies that has a number."""
        for strategy, value in (
            ("zero3", self.zero3_tflops_per_gpu),
            ("zeropp", self.zeropp_tflops_per_gpu),
        ):
            if value is not None:
                links = self.ib_links_100gbps_per_node
                yield zeropp_cell(
                    paper, self.model_params_b, self.tokens_per_gpu, links, strategy, value, use
                )


class CO2Row(TableRow):
    """Throughput, and its ratio from 16 to 128 GPUs, of a method on a network."""

    source = "co2"

    method: str
    network: str
    tau: Annotated[int | None, BeforeValidator(lambda text: whole(text) if text else None)]
    gpus: Count
    words_per_s: Published
    scalability_16_to_128: Published

    @model_validator(mode="after")
    def _ratio_of_its_sizes(self) -> Self:
        """A ratio stands in the row of its larger size."""
        if self.scalability_16_to_128 is not None and self.gpus != _RATIO[1]:
            raise ValueError(
                f"scalability_16_to_128 on {self.gpus} GPUs; it belongs to {_RATIO[1]}"
            )
        return self

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """A throughput, a ratio, or both."""
        strategy = chosen("method", self.method, paper.setting("methods"))
        cluster = chosen("network", self.network, paper.setting("networks"))
        if "TAU" in strategy:
            if self.tau is None:
                raise CatalogError(f"tau is ''; {self.method} needs a whole number, at least 1")
            strategy = strategy.replace("TAU", str(self.tau))
        elif self.tau is not None:
            raise CatalogError(f"tau is '{self.tau}', but {self.method} has none")
        run = PublishedRun(cluster=cluster, model=paper.setting("model"), strategy=strategy)
        if self.words_per_s is not None:
            yield throughput_cell(paper, run, self.gpus, self.words_per_s, use)
        if self.scalability_16_to_128 is not None:
            cell = ratio_cell(paper, run, _RATIO, self.scalability_16_to_128, use)
            yield replace(cell, rounding=_RATIO_ROUNDING)


class IterationRow(TableRow):
    """Time of an iteration of data-parallel training inside one node."""

    source = "vtrain"

    gpus: Count
    global_batch: Count
    micro_batch: Count
    hidden: Count
    heads: Count
    layers: Count
    seq_len: Count
    iteration_ms: Published

    @model_validator(mode="after")
    def _batch_of_whole_steps(self) -> Self:
        """Every GPU runs equally many micro-batches."""
        per_step = self.gpus * self.micro_batch
        if self.global_batch % per_step:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of {self.gpus} x"
                f" {self.micro_batch}"
            )
        return self

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """The time, if it is there."""
        if self.iteration_ms is None:
            return
        yield Cell(
            source="vtrain",
            name=(
                f"{self.gpus} GPUs, batch {self.global_batch}, micro-batch {self.micro_batch},"
                f" hidden {self.hidden}, {self.layers} layers"
            ),
            strategy="ddp",
            group="a100-data-parallel",
            published=self.iteration_ms,
            use=use,
            terms=(Term(setup=self.setup(paper), quantity="iteration_ms"),),
            labels={
                "gpus": str(self.gpus),
                "micro_batch": str(self.micro_batch),
                "hidden": str(self.hidden),
                "layers": str(self.layers),
            },
        )

    def setup(self, paper: Paper) -> RunSetup:
        """The run behind the row. Raises CatalogError for more GPUs than a node has."""
        most = cluster_of(paper.setting("cluster"), ()).layout.gpus_per_node
        if self.gpus > most:
            raise CatalogError(f"{self.gpus} GPUs; these runs are of one node, which has {most}")
        shape = gpt(
            paper, layers=self.layers, hidden=self.hidden, heads=self.heads, seq_len=self.seq_len
        )
        return RunSetup(
            cluster=paper.setting("cluster"),
            **shape,
            strategy=ONE_BUCKET,
            gpus=self.gpus,
            precision=paper.setting("precision"),
            micro_batch=self.micro_batch,
            accumulation=self.global_batch // (self.gpus * self.micro_batch),
            **paper.training,
        )


def chosen(column: str, text: str, known: Mapping[str, str]) -> str:
    """What stands for a text in a table of the paper's `[simulation]`."""
    if text not in known:
        raise CatalogError(f"{column} is {text!r}; it must be one of {', '.join(known)}")
    return known[text]
