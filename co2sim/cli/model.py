"""`co2sim model`: what a model is made of, and the file of one."""

import json
from pathlib import Path
from typing import Annotated

import typer

from co2sim.catalog import Entry, load_model, load_stack
from co2sim.catalog.model_files import model_to_json
from co2sim.common.files import write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted, scaled
from co2sim.models.operators import Block, Model, kinds
from co2sim.training.memory import kept_bytes
from co2sim.training.workload import Workload


def model(
    name: Annotated[
        str,
        typer.Argument(
            help="Catalog name, TOML file, Hugging Face config.json, or a torch module:"
            " my_model.py:build."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write all operators to this JSON file, which -m reads."),
    ] = None,
) -> None:
    """Show the blocks of a model: parameters, FLOP, kept activations and operations."""
    entry: Entry[Model] = load_model(name)
    if out is not None:
        write_atomically({out: f"{json.dumps(model_to_json(entry.value))}\n".encode()})
    _print(entry.value)
    for fact in entry.assumed:
        print_lines(console(), f"assumed: {fact.path} = {fact.value}", "")


_STACKS = ("huggingface", "torchtitan")
"""One that fuses nothing, and one that compiles."""


def _print(shown: Model) -> None:
    """A line for each kind of block."""
    places = kinds(shown)
    eager, fused = (Workload(model=shown, **load_stack(name).value.habits()) for name in _STACKS)
    rows = [
        _row(shown.blocks[place], places.count(place), place, eager, fused)
        for place in dict.fromkeys(places)
    ]
    size, work = f"{shown.parameters:,}", scaled(shown.flops_per_sample, "FLOP")
    title = (
        f"{shown.name}: {size} parameters, {work} for a training step on a sample of"
        f" {counted(shown.tokens, shown.unit)}"
    )
    columns = (
        "block",
        "times",
        "parameters",
        "FLOP forward",
        *(f"kept, {name}" for name in _STACKS),
        "operations",
    )
    print_table(console(), title, columns, rows)


def _row(block: Block, times: int, place: int, eager: Workload, fused: Workload) -> tuple[str, ...]:
    kept = [kept_bytes(job, job.executed[place][1]) for job in (eager, fused)]
    calls = sum(op.calls for op in eager.executed[place][1].operators)
    return (
        block.name,
        str(times),
        f"{block.parameters:,}",
        scaled(block.flops, "FLOP"),
        *(scaled(size, "B") for size in kept),
        str(calls),
    )
