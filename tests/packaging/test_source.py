"""Rules about source text: functions stay short."""

import ast
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

FOLDERS = ("co2sim", "realrun", "analysis", "benchmarks", "examples", "docs")

LONGEST = 60

COMMAND_LINES = {
    ("analysis/cli/convergence.py", "bound"),
    ("analysis/cli/convergence.py", "tau"),
    ("analysis/cli/published.py", "validate_command"),
    ("analysis/cli/measured.py", "lab"),
}
"""Functions that may be longer: an argument for every option, with its help."""


def sources(*folders: str) -> Iterator[Path]:
    """The Python files below some folders."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods of a file, at every depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.stmt) -> int:
    """Lines of a statement, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_longer_than_60_lines_but_declared_command_lines() -> None:
    """The list holds no name that does not need it."""
    long = {
        (str(path.relative_to(ROOT)), node.name)
        for path in sources(*FOLDERS)
        for node in functions(path)
        if length(node) > LONGEST
    }
    assert long == COMMAND_LINES
