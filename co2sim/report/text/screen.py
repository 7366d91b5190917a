"""The first screen of a command: the answer, in at most 15 lines of 100 columns.

Every command says the same things in the same order: take this, days and money with the range;
whether it fits; what is counted and what is not; what would turn the answer; how far off such
predictions were; and how to see more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from co2sim.common.errors import visible
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted

LINES = 15
WIDTH = 100
_LABEL = 8
"""Columns of the names of lines, so that those of all commands are aligned."""


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What a command answers.

    `answer` are sentences, `columns` and `table` compare cases, `legend` says what is written short
    there. `rows` are named lines: the most important first, as the last are left to `--full` where
    there is no room; `least` of them stay as long as there is more than one case. Of the cases the
    last are left to it, but for the one that the answer names: its place is `stays`.
    """

    answer: Sequence[str]
    columns: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    stays: int = 0
    left: int = 1
    legend: Sequence[str] = ()
    rows: Sequence[tuple[str, str]] = ()
    least: int = 6


def print_screen(screen: Screen, more: str = "--full, --json", *, whole: bool = False) -> None:
    """Print as much as there is room for, or the `whole`; the last line says how to see more."""
    _print(console(), *((screen, more) if whole else _fitting(screen, more)))


def _fitting(screen: Screen, more: str) -> tuple[Screen, str]:
    """The screen without what has no room, and its last line: rows give way before cases."""
    cases, rows = len(screen.table), len(screen.rows)
    while True:
        part = Screen(
            answer=screen.answer,
            columns=screen.columns,
            table=_cases(screen, cases),
            left=screen.left,
            legend=screen.legend,
            rows=screen.rows[:rows],
            least=screen.least,
        )
        left = [(len(screen.table) - cases, "case"), (len(screen.rows) - rows, "line")]
        hidden = ", ".join(counted(count, what) for count, what in left if count)
        last = f"{f'{hidden} more' if hidden else 'all figures'}: {more}"
        if rows <= 0 and cases <= 1:
            return part, last
        sheet = Console(file=StringIO(), width=WIDTH)
        _print(sheet, part, last)
        if sheet.file.getvalue().count("\n") <= LINES:  # type: ignore[attr-defined]
            return part, last
        if rows > screen.least or cases <= 1:
            rows -= 1
        else:
            cases -= 1


def _cases(screen: Screen, count: int) -> Sequence[Sequence[str]]:
    """The first cases, with the one that stays."""
    if screen.stays < count or not count:
        return screen.table[:count]
    return [*screen.table[: count - 1], screen.table[screen.stays]]


def _print(out: Console, screen: Screen, more: str) -> None:
    width = min(out.width, WIDTH)
    sheet = Console(file=out.file, width=width, color_system=None) if out.width > width else out
    print_lines(sheet, *screen.answer)
    if screen.table:
        print_table(sheet, "", screen.columns, screen.table, left=screen.left, after=False)
        print_lines(sheet, *screen.legend)
    named = Table.grid(padding=(0, 1, 0, 0))
    named.add_column(min_width=_LABEL)
    named.add_column(overflow="fold")
    for name, text in (*screen.rows, ("more", more)):
        named.add_row(Text(name), Text(visible(text)))
    sheet.print(named)
