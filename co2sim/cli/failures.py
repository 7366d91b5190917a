"""How a study of many cases ends when some of them gave no result."""

import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import typer

from co2sim.batch import Failure, Outcome


def end_with_failures(names: Iterable[str], outcomes: Sequence[Outcome], kept: str) -> NoReturn:
    """Name the cases that failed in one line on stderr, say what was kept, exit with 1."""
    failed = [
        f"{name}: {outcome.reason}"
        for name, outcome in zip(names, outcomes, strict=True)
        if isinstance(outcome, Failure)
    ]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    count = f"{len(failed)} of {len(outcomes)} cases failed"
    print(f"error: {count}: {failed[0]}{more}; {kept}", file=sys.stderr)
    raise typer.Exit(1)
