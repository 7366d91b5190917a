"""A report in Markdown on the terminal: its tables as `print_table` shows tables."""

import re
from itertools import groupby

from rich.console import Console

from co2sim.common.tables import print_lines, print_table

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
    names, *rows = ([row[place] for place in order] for row in (names, *rows))
    print_table(out, title, names, rows, left=figures.count(False))


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "")
