"""Tables for terminals of any width: no digit, unit, mark or column name is cut off."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import IO, TypeAlias, cast

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from co2sim.common.errors import visible

_WIDTH = 132
"""Columns of output that goes to a file or a pipe."""
_GAPS = (2, 1)
"""Columns between columns: two, or one where two do not fit."""
_INDENT = 2

Rows: TypeAlias = Sequence[Sequence[str]]


class _Stripped:
    """The standard output, without the blanks that fill lines up."""

    encoding = property(lambda _: sys.stdout.encoding)

    def write(self, text: str) -> int:
        """Write whole lines."""
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        """Write what is left of them."""
        sys.stdout.flush()


class _Terminal(Console):
    """A console that leaves it to the command to end when the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Rich would end the process with exit code 1."""
        raise BrokenPipeError


def console() -> Console:
    """The standard output, wide enough for the tables; lines end with no blanks in a file."""
    terminal = _Terminal()
    if terminal.is_terminal:
        return terminal
    width = None if "COLUMNS" in os.environ else _WIDTH
    return _Terminal(file=cast("IO[str]", _Stripped()), width=width)


def print_table(
    out: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    *,
    after: bool = True,
) -> None:
    """Print a plain table; the first `left` columns are texts, the others figures.

    An empty title is no line, and without `after` there is no empty line at the end.

    Where the table is wider than the terminal, names of columns and texts are wrapped between
    words, never figures. Where that is not enough it becomes several tables that repeat the texts,
    or, if these take too much room, every row becomes a paragraph with a line for each column.
    Characters that the terminal cannot show are escaped.
    """
    names = [_shown(out, column) for column in columns]
    cells = [[_shown(out, cell) for cell in row] for row in rows]
    if title:
        out.print(Text(_shown(out, title), style="bold"))
    for gap in _GAPS:
        widths = _widths(names, cells, left, out.width - gap * (len(names) - 1))
        if widths:
            out.print(_side_by_side(names, cells, left, widths, gap))
            break
    else:
        parts = _parts(names, cells, left, out.width)
        for index, part in enumerate(parts):
            print_lines(out, *([""] if index else []))
            out.print(part)
        for row in [] if parts else cells:
            _print_stacked(out, names, row)
    if after:
        out.print()


def print_lines(out: Console, *lines: str | Text) -> None:
    """Lines as they are: nothing in them is markup."""
    for line in lines:
        out.print(line if isinstance(line, Text) else Text(visible(line)))


def _shown(out: Console, text: str) -> str:
    """The text on one line, in characters that the terminal has: others as escapes."""
    words = visible(" ".join(text.split()))
    return words.encode(out.encoding, "backslashreplace").decode(out.encoding)


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _widths(names: Sequence[str], cells: Rows, left: int, room: int) -> list[int]:
    """The width of every column, in all at most `room`; empty where they do not fit.

    A column needs the longest word of a text, or the whole of a figure. What is left goes to the
    narrowest of those that could use more, until all are equal or as wide as they would like.
    """
    least, most = [], []
    for index, column in enumerate(zip(names, *cells, strict=True)):
        size = _longest_word if index < left else cell_len
        least.append(max(_longest_word(column[0]), *map(size, column[1:]), 1))
        most.append(max(map(cell_len, (*column, " "))))
    spare = room - sum(least)
    if spare < 0:
        return []
    widths = least
    while spare and widths != most:
        narrowest = min((w, index) for index, w in enumerate(widths) if w < most[index])[1]
        widths[narrowest] += 1
        spare -= 1
    return widths


def _side_by_side(
    names: Sequence[str], cells: Rows, left: int, widths: Sequence[int], gap: int
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for index, (name, width) in enumerate(zip(names, widths, strict=True)):
        table.add_column(
            Text(name), justify="left" if index < left else "right", width=width, overflow="fold"
        )
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _parts(names: Sequence[str], cells: Rows, left: int, width: int) -> list[Table]:
    """Tables of some figures each, behind all texts; none where that is more than half of them."""
    gap = _GAPS[0]

    def table(columns: Sequence[int]) -> Table | None:
        chosen = [[row[column] for column in columns] for row in [names, *cells]]
        widths = _widths(chosen[0], chosen[1:], left, width - gap * (len(columns) - 1))
        return _side_by_side(chosen[0], chosen[1:], left, widths, gap) if widths else None

    tables: list[Table] = []
    texts, rest = list(range(left)), list(range(left, len(names)))
    most = len(rest) // 2
    while rest:
        sizes = range(len(rest), 0, -1)
        fitting = ((size, table([*texts, *rest[:size]])) for size in sizes)
        size, part = next(((size, part) for size, part in fitting if part), (0, None))
        if part is None or len(tables) == most:
            return []
        tables.append(part)
        rest = rest[size:]
    return tables


def _print_stacked(out: Console, names: Sequence[str], row: Sequence[str]) -> None:
    """The first cell, and under it a line for every other cell that is not empty."""
    out.print(Text(f"{names[0]}  {row[0]}", overflow="fold"))
    pairs = [pair for pair in zip(names[1:], row[1:], strict=True) if pair[1]]
    room = out.width - _INDENT - _GAPS[0]
    for left in (1, 2):  # values whole, or wrapped between words
        widths = _widths(("", ""), pairs, left, room)
        if widths:
            table = _side_by_side(("", ""), pairs, 2, widths, _GAPS[0])
            table.show_header = False
            out.print(Padding(table, (0, 0, 0, _INDENT)))
            return
    for name, value in pairs:  # a word as long as a line
        out.print(Padding(Text(f"{name} {value}".strip(), overflow="fold"), (0, 0, 0, _INDENT)))


_LINES = {"#": "heading", "|": "table", "-": "list"}
"""Kinds of lines by their first character; all others are of paragraphs, but for empty ones."""


def print_markdown(out: Console, text: str) -> None:
    """Print what the templates of reports use: headings, paragraphs, lists of one level, tables.

    A heading right above a table, or a line that ends with a colon, becomes its title. Columns of
    texts come before those of figures, which are aligned right. Marks of bold and of code go.
    """
    title = ""
    for kind, group in groupby(text.splitlines(), key=_kind):
        lines = list(group)
        if not kind:
            continue
        if title and kind != "table":
            print_lines(out, title, "")
            title = ""
        if kind == "heading":
            title = _plain(lines[0].lstrip("# "))
        elif kind == "table":
            _print_table(out, title, lines)
            title = ""
        elif kind == "list":
            print_lines(out, *map(_plain, lines), "")
        else:
            title = _plain(" ".join(lines))
            if not title.endswith(":"):
                print_lines(out, title, "")
                title = ""
    print_lines(out, *([title] if title else []))


def _kind(line: str) -> str:
    return _LINES.get(line[:1], "paragraph") if line.strip() else ""


def _print_table(out: Console, title: str, lines: list[str]) -> None:
    names, aligned, *rows = (
        [_plain(cell.strip()).replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    )
    figures = [cell.endswith(":") for cell in aligned]
    order = sorted(range(len(names)), key=figures.__getitem__)
    names, *rows = ([row[column] for column in order] for row in (names, *rows))
    print_table(out, title, names, rows, left=figures.count(False))


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "")
