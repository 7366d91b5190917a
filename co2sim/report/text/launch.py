"""The lines that launch a choice with a trainer."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from rich.text import Text

from co2sim.common.tables import console
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.verdict import python_line
from co2sim.strategies import LocalSteps
from co2sim.trainers.writing import launch


def launch_row(case: Question, r: Result, trainer: str = "") -> list[tuple[str, str]]:
    """The keys of the trainer that say what was chosen, but for those of the model."""
    lines = launch(case, r, trainer)
    if lines is None:
        return []
    keys = ", ".join(f"{key}={value}" for key, value in lines.chosen.items())
    beside = f"; not by its keys: {', '.join(lines.beside)}" if lines.beside else ""
    return [("launch", f"for {lines.trainer}: {keys}{beside}; all: --launch")]


def launch_text(case: Question, result: Result, trainer: str = "") -> str:
    """The script of a shell that launches it, or why there is none, as a comment."""
    if lines := launch(case, result, trainer):
        return str(lines)
    if isinstance(case.parsed, LocalSteps):
        return f"# {result.strategy}: {python_line(case.parsed)[1]}"
    return f"# no keys of a trainer say {result.strategy} with {case.load_stack().value.name}"


def print_launch(choices: Sequence[tuple[Question, Result]], trainer: str = "") -> None:
    """The script of each, one after the other: to be saved or pasted, whatever the width."""
    out = console()
    for case, result in choices:
        if len(choices) > 1:
            out.print(Text(f"# {result.strategy}"), soft_wrap=True)
        out.print(Text(launch_text(case, result, trainer)), soft_wrap=True)


def aside(*, launch: bool) -> AbstractContextManager[Any]:
    """Where the script is printed, it is alone on its stream: the rest goes to the other one."""
    return redirect_stdout(sys.stderr) if launch else nullcontext()
