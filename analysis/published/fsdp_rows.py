"""Rows of LLM Foundry's table of training speeds with FSDP, and the ratios that they state."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, model_validator

from analysis.published.cells import Cell, RunSetup, Term
from analysis.published.csv_rows import Count, Published, TableRow, chosen, whole
from analysis.published.papers import Paper
from analysis.published.parameters import model_of
from co2sim.common.errors import CatalogError
from co2sim.prediction.published import Use, add_options
from co2sim.strategies import parse

GROUP = "mpt-fsdp"
"""The constants that these rows depend on."""

RATIOS = "llm_foundry-ratios"
"""The source of cells that pairs of rows make up."""

_PRECISIONS = {"amp_bf16": "bf16", "bf16": "bf16"}

_UNSTATED = 0.01
"""Of the parameters: what the shape of a row may leave out."""

_DIGITS = 15
"""Maximum digits of a number of parameters."""

Parameters: TypeAlias = Annotated[int, BeforeValidator(partial(whole, digits=_DIGITS))]
Switch: TypeAlias = Annotated[Literal["true", "false"], BeforeValidator(str.lower)]


class FsdpRow(TableRow):
    """Throughput of training an MPT with FSDP."""

    source = "llm_foundry"

    model: str
    layers: Count
    hidden: Count
    heads: Count
    vocab: Count
    seq_len: Count
    gpus: Count
    gpu: str
    micro_batch: Count
    accumulation: Count
    global_batch: Count
    precision: str
    mp_mode: str
    sharding: str
    activation_checkpointing: Switch
    parameters: Parameters
    tokens_per_s: Published

    @model_validator(mode="after")
    def _whole_heads_and_batch(self) -> Self:
        """The global batch is that of all micro-batches, and heads divide the hidden size."""
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        made = self.gpus * self.micro_batch * self.accumulation
        if self.global_batch != made:
            raise ValueError(
                f"global_batch {self.global_batch} is not {self.gpus} GPUs x micro_batch"
                f" {self.micro_batch} x accumulation {self.accumulation} = {made}"
            )
        return self

    def cells(self, paper: Paper, use: Use) -> Iterator[Cell]:
        """The throughput, if it is there."""
        if self.tokens_per_s is None:
            return
        setup = self._setup(paper)
        nodes = setup.used_cluster().nodes
        yield Cell(
            source=self.source,
            name=(
                f"{self.model}, {self.gpus} {self.gpu}, sequence {self.seq_len}, micro-batch"
                f" {self.micro_batch} x {self.accumulation}"
                + (", checkpointed" if setup.recompute == "full" else "")
            ),
            strategy="fsdp",
            group=GROUP,
            published=self.tokens_per_s,
            use=use,
            terms=(Term(setup=setup, quantity="tokens_per_s"),),
            rounding=1.0,
            labels={
                "gpu": self.gpu,
                "nodes": "one node" if nodes == 1 else "several nodes",
                "gpus": str(self.gpus),
                "model": self.model,
            },
        )

    def _setup(self, paper: Paper) -> RunSetup:
        """The run behind the row. Raises CatalogError where shape and parameters disagree."""
        shape = {
            "name": self.model,
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "ffn": 4 * self.hidden,
            "vocab": self.vocab,
            "seq_len": self.seq_len,
            "positions": self.seq_len,
        }
        overrides = tuple((name, str(value)) for name, value in shape.items())
        made = model_of(paper.setting("model"), overrides).parameters
        if abs(made - self.parameters) > _UNSTATED * self.parameters:
            raise CatalogError(f"parameters is {self.parameters}; a model of this shape has {made}")
        sharding = chosen("sharding", self.sharding, paper.setting("methods"))
        mode = chosen("mp_mode", self.mp_mode, paper.setting("modes"))
        return RunSetup(
            cluster=chosen("gpu", self.gpu, paper.setting("clusters")),
            model=paper.setting("model"),
            model_overrides=overrides,
            strategy=parse(add_options(sharding, {"fsdp": mode})),
            gpus=self.gpus,
            stack=paper.setting("stack"),
            precision=chosen("precision", self.precision, _PRECISIONS),
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            **paper.training
            | {"recompute": "full" if self.activation_checkpointing == "true" else "none"},
        )


def ratios(cells: Sequence[Cell]) -> Iterator[Cell]:
    """What rows of this table state of scaling.

    Throughput per GPU over that on the fewest GPUs of several nodes, where all else is equal. A
    ratio is marked fit if both of its rows are.
    """
    families: dict[RunSetup, list[Cell]] = {}
    for cell in cells:
        if cell.source == FsdpRow.source and cell.setup.used_cluster().nodes > 1:
            families.setdefault(replace(cell.setup, gpus=1), []).append(cell)
    for family in families.values():
        first, *rest = sorted(family, key=lambda cell: cell.setup.gpus)
        for cell in (one for one in rest if one.setup.gpus > first.setup.gpus):
            few, many = first.setup.gpus, cell.setup.gpus
            yield replace(
                cell,
                source=RATIOS,
                name=cell.name.replace(f"{many} ", f"{few} to {many} ", 1) + ", ratio",
                published=cell.published / many / (first.published / few),
                use="fit" if {cell.use, first.use} == {"fit"} else "check",
                over=first.terms,
                per_gpu=True,
                rounding=0.0,
            )
