"""A study as one HTML page: `co2sim report`, and --report of other commands."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from co2sim.cli import options
from co2sim.common.cli import command_line, refuse_twice
from co2sim.common.files import write_atomically
from co2sim.prediction.case import Case
from co2sim.prediction.published import SpeedComparison, cases_of, compare, read_speeds
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.verdict import Verdict
from co2sim.report.bundle import check
from co2sim.report.text import totals
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.studies import grid
from co2sim.studies.run_all import Failure, Interrupted, Outcome, run_all

if TYPE_CHECKING:
    from co2sim.report.html import Page
    from co2sim.report.study_page import Study


@options.job_options
def report(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Case,
    cluster: options.Clusters,
    strategy: options.ManyStrategies,
    gpus: options.Counts = None,
    over: options.Varied = None,
    published: options.Published = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.html", help="The page to write.")
    ] = Path("out/report.html"),
    jobs: options.Jobs = 1,
    to_loss_steps: options.ToLossSteps = None,
    steps_factor: options.StepsFactor = None,
    tokens: totals.Tokens = None,
) -> None:
    """Compare strategies over GPU counts: one HTML page to hand on, with all data inside."""
    check("--out", out)
    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    refuse_twice("cluster", cluster)
    goal = options.goal(to_loss_steps, steps_factor)
    varied = options.pairs(over, "--vary")
    named = grid.cases_by_panel(
        job, cluster, strategy, gpus, grid.settings(varied) if varied else [{}]
    )
    cases = [case for _, case in named]
    cells = read_speeds(published) if published else []
    everything = [*cases, *cases_of(cells, cases)]
    outcomes = run_all(everything, jobs)
    found = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    if len(found) < len(outcomes):
        names = [case.title for case in everything]
        end_with_failures(names, outcomes, "nothing was written")
    results, comparisons = found[: len(cases)], compare(cells, everything, found)
    names = [name for name, _ in named]
    study = study_of(cases, results, goal, tokens, comparisons, names)
    write_atomically({out: render(study)})
    for text in (*study.answer(), *study.doubts()):
        print(text)
    print(f"report  {out}")


def page(
    cases: Sequence[Case],
    results: Sequence[Result],
    goal: Goal,
    tokens: float | None,
    comparisons: Sequence[SpeedComparison] = (),
    verdicts: Sequence[Verdict | None] = (),
) -> bytes:
    """The page about these."""
    return render(study_of(cases, results, goal, tokens, comparisons, verdicts=verdicts))


def render(study: "Study") -> bytes:
    """The page."""
    from co2sim.report import html as pages  # noqa: PLC0415 - Altair
    from co2sim.report import study_page  # noqa: PLC0415 - Altair

    return pages.render(study_page.page(study))


def write(path: Path, made: "Page") -> None:
    """Write a page."""
    from co2sim.report import html as pages  # noqa: PLC0415 - Altair

    write_atomically({path: pages.render(made)})


def print_where(path: Path | None, *, quiet: bool = False) -> None:
    """Say where the page is, if there is one."""
    if path and not quiet:
        print(f"report  {path}")


def study_of(
    cases: Sequence[Case],
    results: Sequence[Result],
    goal: Goal,
    tokens: float | None,
    comparisons: Sequence[SpeedComparison] = (),
    panels: Sequence[str] = (),
    verdicts: Sequence[Verdict | None] = (),
) -> "Study":
    """What a page is about, with the command line of this process."""
    from co2sim.report.study_page import Study  # noqa: PLC0415 - rich

    return Study(
        cases=cases,
        results=results,
        goal=goal,
        tokens=tokens,
        comparisons=comparisons,
        panels=panels,
        verdicts=verdicts,
        command=command_line("co2sim"),
    )


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
    found = interrupt.outcomes
    gave = any(isinstance(outcome, Result) for outcome in found.values())
    raise KeyboardInterrupt(f"{interrupt}; {keep(list(found)) if gave else 'nothing was written'}")


def _kind(failure: Failure) -> str:
    """The reason without its numbers and their units, and what it is about."""
    return re.sub(r"[0-9][0-9.,]*( [kMGTP]?B\b)?", "", failure.reason)
