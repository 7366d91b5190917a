"""The lines that launch a choice with a trainer."""

from collections.abc import Iterable

from rich.text import Text

from co2sim.common.tables import console
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.trainers.writing import launch


def launch_row(case: Question, r: Result) -> list[tuple[str, str]]:
    """The keys of the trainer that say what was chosen, but for those of the model."""
    lines = launch(case, r)
    if lines is None:
        return []
    keys = ", ".join(f"{key}={value}" for key, value in lines.chosen.items())
    beside = f"; not by its keys: {', '.join(lines.beside)}" if lines.beside else ""
    return [("launch", f"{keys}{beside} ({lines.trainer}; all: --launch)")]


def launch_text(case: Question, result: Result) -> str:
    """The whole command, or why there is none."""
    if lines := launch(case, result):
        return str(lines)
    return f"no keys of a trainer say {result.strategy} with {case.load_stack().value.name}"


def print_launch(choices: Iterable[tuple[Question, Result]]) -> None:
    """The whole command of each, to be copied: in one piece, whatever the width."""
    out = console()
    for case, result in choices:
        out.print(Text(f"\n{launch_text(case, result)}"), soft_wrap=True)
