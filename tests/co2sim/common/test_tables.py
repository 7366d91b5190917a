"""Tables on the terminal: at any width, nothing is cut off."""

import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from co2sim.common.tables import console, print_lines, print_markdown, print_table


def printed(
    title: str,
    columns: list[str],
    rows: list[list[str]],
    *,
    width: int,
    left: int = 1,
    encoding: str = "utf-8",
) -> str:
    """What `print_table` writes on a terminal of this width and encoding."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    print_table(Console(file=file, width=width), title, columns, rows, left=left)
    return raw.getvalue().decode(encoding)


WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=14)
TEXTS = st.lists(WORDS, max_size=8).map(" ".join)
FIGURES = st.from_regex(r"\A[0-9]{1,3},[0-9]{3}\*?( [GM]B)?\Z") | st.just("")


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]], int]:
    """Names of columns, rows, and how many columns are texts."""
    left = draw(st.integers(1, 3))
    columns = draw(st.lists(TEXTS.filter(bool), min_size=left, max_size=left + 9))
    row = st.tuples(*(TEXTS if place < left else FIGURES for place in range(len(columns))))
    return columns, [list(cells) for cells in draw(st.lists(row, max_size=4))], left


@given(tables(), st.integers(40, 140))
def test_no_width_cuts_a_word_or_a_figure(
    table: tuple[list[str], list[list[str]], int], width: int
) -> None:
    """From 40 columns on, every figure stands on one line, every word and name is whole."""
    columns, rows, left = table
    shown = printed("title", columns, rows, width=width, left=left)
    assert all(cell_len(line) <= width for line in shown.splitlines())
    assert Counter(" ".join(cell for row in rows for cell in row).split()) <= Counter(shown.split())
    for row in rows:
        for name, figure in list(zip(columns, row, strict=True))[left:]:
            assert any(figure in line for line in shown.splitlines())
            assert not figure or set(name.split()) <= set(shown.split())


def test_lines_in_a_file_end_with_no_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither texts that are shorter than their column, nor those that are wrapped."""
    out = console()
    print_table(out, "title", ["a", "b"], [["long text", "1"], ["x", ""]], left=2)
    print_lines(out, "words " * 40)
    shown = capsys.readouterr().out
    assert "long text" in shown
    assert all(line == line.rstrip() for line in shown.splitlines())


def test_words_longer_than_the_terminal_are_folded() -> None:
    """A path of 100 characters is continued on the next line, not shortened."""
    path = "/".join("abcdefghi" for _ in range(10))
    shown = printed("title", ["file", "size"], [[path, "1 GB"], ["b", path]], width=40)
    assert shown.replace(" ", "").replace("\n", "").count(path) == 2


def test_texts_are_shown_as_they_are() -> None:
    """Markup and emoji codes mean nothing in a cell, and a cell has one line."""
    for text in ("µs", "名前", "[bold]x[/]", ":smile:", "a\nb", "\\[x]"):
        shown = printed(text, [text], [[text]], width=40)
        assert shown.count(" ".join(text.split())) == 3


REPORT = r"""## Errors

| source | cells | largest | MAPE |
| --- | ---: | --- | ---: |
| `co2` | 7 | 5.9%: 7B, 128 GPUs, zero2 | 4.6% |
| a \| b | 120 | 1%: 4 GPUs | **1.4%** |

Errors are relative to the published
value, and `positive` where it is too high.

The largest:

| cell | error |
| --- | ---: |
| x | -1.0% |

## Analysis

- a round takes 10.8 s
- no more
"""


@pytest.mark.parametrize("width", [40, 80])
def test_a_report_in_markdown_fits_the_terminal(width: int) -> None:
    """Tables have titles, texts come first and figures stay whole; paragraphs are filled anew."""
    out = Console(file=io.StringIO(), width=width)
    print_markdown(out, REPORT)
    assert isinstance(out.file, io.StringIO)
    lines = [line.rstrip() for line in out.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert not set("*`#\\") & set("".join(lines))
    assert lines[0] == "Errors"
    header = lines[1].split()
    assert header == ["source", "largest", "cells", "MAPE"]
    assert any(line.startswith("a | b") and line.split()[-2:] == ["120", "1.4%"] for line in lines)
    assert lines[lines.index("The largest:") + 1].split() == ["cell", "error"]
    assert lines[lines.index("Analysis") + 2 :][:2] == ["- a round takes 10.8 s", "- no more"]
    paragraph = " ".join(line for line in lines if line).partition("Errors are ")[2]
    assert paragraph.startswith("relative to the published value, and positive where it is too h")
