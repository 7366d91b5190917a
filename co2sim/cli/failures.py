"""How a study of many cases ends when some of them gave no result."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from co2sim.batch import Failure
from co2sim.result import Result


def end_with_failures(outcomes: Sequence[Result | Failure], kept: str) -> NoReturn:
    """Name the cases that failed in one line on stderr, say what was kept, exit with 1."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    first = failures[0]
    count = f"{len(failures)} of {len(outcomes)} cases failed"
    print(f"error: {count}: {first.case}: {first.reason}{more}; {kept}", file=sys.stderr)
    raise typer.Exit(1)
