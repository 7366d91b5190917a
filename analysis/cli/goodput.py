"""The command `co2analysis goodput`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.published.papers import PAPERS

if TYPE_CHECKING:
    from analysis.published.goodput import Compared

Folder = Annotated[
    Path,
    typer.Option(
        "--papers", help="Folder of the published results.", show_default="that of the package"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print cells as JSON.")]


def goodput(papers: Folder = PAPERS, json_: Json = False) -> None:  # noqa: FBT002
    """Predict published mean times to failure and shares of useful time, with signed errors."""
    from analysis.published.goodput import compared, read  # noqa: PLC0415 - scipy, pydantic

    found = compared(read(papers))
    if json_:
        typer.echo(json.dumps([_plain(one) for one in found], indent=2))
        return
    from co2sim.common.tables import console, print_lines, print_table  # noqa: PLC0415 - rich

    out = console()
    columns = ["source", "what", "published", "predicted", "range", "error"]
    rows = [_row(one) for one in found]
    print_table(out, "published, and predicted; nothing is fitted", columns, rows, left=2)
    print_lines(out, "errors of shares are in points, those of times in per cent", "")
    print_lines(out, *dict.fromkeys(_assumed(one) for one in found if one.cell.assumed))


def _row(one: "Compared") -> list[str]:
    cell = one.cell
    limit = "> " if cell.at_least else ""
    span = "" if one.low == one.high else f"{one.shown(one.low)} to {one.shown(one.high)}"
    error = f"{100 * one.error:+.1f}" if cell.use == "check" else "input"
    published = f"{limit}{one.shown(one.published)}"
    return [cell.source, cell.where, published, one.shown(one.predicted), span, error]


def _assumed(one: "Compared") -> str:
    what = one.cell.source if one.cell.quantity == "learners" else one.cell.where
    return f"assumed of {what}: {'; '.join(one.cell.assumed)}"


def _plain(one: "Compared") -> dict[str, object]:
    return {
        **one.cell.model_dump(),
        "published": one.published,
        "predicted": one.predicted,
        "low": one.low,
        "high": one.high,
        "error": one.error,
    }
