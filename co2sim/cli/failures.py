"""How a study of many cases ends when some of them gave no result, or were not reached."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import typer

from co2sim.prediction.result import Result
from co2sim.studies.batch import Failure, Interrupted, Outcome

_MOST_REASONS = 3
"""In one line."""


def end_with_failures(names: Iterable[str], outcomes: Sequence[Outcome], kept: str) -> NoReturn:
    """Count the reasons of failures in one line on stderr, say what was kept, exit with 1.

    A reason is named with the first case that has it. What differs in its numbers only is one.
    """
    failed = [
        (name, outcome)
        for name, outcome in zip(names, outcomes, strict=True)
        if isinstance(outcome, Failure)
    ]
    end_with(failed, len(failed), len(outcomes), kept)


def end_with(failed: Sequence[tuple[str, Failure]], count: int, cases: int, kept: str) -> NoReturn:
    """As `end_with_failures`; `failed` are the first of those that failed, with their names."""
    first = {_kind(outcome): (name, outcome.reason) for name, outcome in reversed(failed)}
    counts = Counter(_kind(outcome) for _, outcome in failed)
    said = []
    for kind, times in counts.most_common(_MOST_REASONS):
        name, reason = first[kind]
        said.append(f"{name}: {reason}" + (f" (and {times - 1} like it)" if times > 1 else ""))
    rest = count - sum(n for _, n in counts.most_common(_MOST_REASONS))
    said += [f"{rest} more for other reasons"] if rest else []
    head = f"{count} of {cases} cases failed"
    print(f"error: {head}: {'; '.join(said)}; {kept}", file=sys.stderr)
    raise typer.Exit(1)


def end_interrupted(interrupt: Interrupted, keep: Callable[[Sequence[int]], str]) -> NoReturn:
    """After control-C: `keep` writes the cases at these places and says where; exit with 130.

    Where no case gave a result nothing is written.
    """
    found = interrupt.outcomes
    gave = any(isinstance(outcome, Result) for outcome in found.values())
    raise KeyboardInterrupt(f"{interrupt}; {keep(list(found)) if gave else 'nothing was written'}")


def _kind(failure: Failure) -> str:
    """The reason without its numbers and their units, and what it is about."""
    return re.sub(r"[0-9][0-9.,]*( [kMGTP]?B\b)?", "", failure.reason)
