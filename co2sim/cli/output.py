"""What several commands do with their answers: pages, and the one line of what failed."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from co2sim.common.cli import command_line
from co2sim.common.files import write_atomically
from co2sim.prediction.result import Result
from co2sim.studies.run_all import Failure, Interrupted, Outcome

if TYPE_CHECKING:
    from co2sim.report.html import Page
    from co2sim.report.study_page import Study


def study(**about: Any) -> "Study":
    """What a page of cases is about, with the command line of this process; see `Study`."""
    from co2sim.report.study_page import Study  # noqa: PLC0415 - Altair

    return Study(**about, command=command_line("co2sim"))


def study_page(about: "Study") -> bytes:
    """The page."""
    from co2sim.report import study_page  # noqa: PLC0415 - Altair

    return rendered(study_page.page(about))


def rendered(page: "Page") -> bytes:
    """A page as a file."""
    from co2sim.report import html  # noqa: PLC0415 - Altair

    return html.render(page)


def write_page(path: Path, page: "Page") -> None:
    """Write a page."""
    write_atomically({path: rendered(page)})


def more(
    *, full: bool, files: Iterable[Path | None], report: bool = True, lacking: str = ""
) -> str:
    """How a first screen says what else there is: the rest, the files that were written.

    `report` says whether there may be one, `lacking` what was not written, and why.
    """
    written: list[str] = []
    for path in filter(None, files):  # out/scale.csv, .png
        again = any(other.rpartition(".")[0] == str(path.with_suffix("")) for other in written)
        written.append(path.suffix if again else str(path))
    ways = "below; --json" if full else "--full, --json"
    ways += ", --report FILE.html" if report and not written else ""
    ways += f"; written: {', '.join(written)}" if written else ""
    return f"{ways}; {lacking}" if lacking else ways


def print_where(path: Path | None, *, quiet: bool = False) -> None:
    """Say where the page is, if there is one."""
    if path and not quiet:
        print(f"report  {path}")


_MAX_REASONS = 3
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
    for kind, times in counts.most_common(_MAX_REASONS):
        name, reason = first[kind]
        said.append(f"{name}: {reason}" + (f" (and {times - 1} like it)" if times > 1 else ""))
    rest = count - sum(n for _, n in counts.most_common(_MAX_REASONS))
    said += [f"{rest} more for other reasons"] if rest else []
    head = f"{count} of {cases} cases failed"
    print(f"error: {head}: {'; '.join(said)}; {kept}", file=sys.stderr)
    raise typer.Exit(1)


def end_interrupted(interrupt: Interrupted, keep: Callable[[Sequence[int]], str]) -> NoReturn:
    """After control-C: `keep` writes the cases at these places and says where; exit with 130.

    Where no case gave a result nothing is written.
    """
    outcomes = interrupt.outcomes
    gave = any(isinstance(outcome, Result) for outcome in outcomes.values())
    kept = keep(list(outcomes)) if gave else "nothing was written"
    raise KeyboardInterrupt(f"{interrupt}; {kept}")


def _kind(failure: Failure) -> str:
    """The reason without its numbers and their units, and what it is about."""
    return re.sub(r"[0-9][0-9.,]*( [kMGTP]?B\b)?", "", failure.reason)
