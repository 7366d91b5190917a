"""Tables on the terminal."""

import os
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WIDTH = 132
"""Columns of output that goes to a file or a pipe."""


def console() -> Console:
    """The standard output, wide enough for the tables."""
    found = Console()
    fixed = found.is_terminal or "COLUMNS" in os.environ
    return found if fixed else Console(width=_WIDTH)


def print_table(
    out: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
) -> None:
    """Print a plain table; the first `left` columns are texts, the others figures."""
    found = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number < left else "right"
        found.add_column(column, justify=justify, overflow="fold", no_wrap=number >= left)
    for row in rows:
        found.add_row(*(escape(cell) for cell in row))
    out.print(escape(title), style="bold", highlight=False)
    out.print(found)
    out.print()
