"""`co2sim solve`: which value of a number reaches a target, as sentences and tables."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from co2sim.cli import report_page
from co2sim.common.cli import command_line
from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import number, percent
from co2sim.prediction import driver
from co2sim.prediction.case import Case
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal, remark
from co2sim.prediction.totals import tokens_of
from co2sim.report.text.result import print_assumed, print_warnings, question
from co2sim.report.text.solve import best, checks, plain, remarks, told, trainings, words
from co2sim.studies.grid import strategy_title
from co2sim.studies.sensitivity import MORE, Sensitivity, levers
from co2sim.studies.solve import Solved, check, solve
from co2sim.studies.targets import axis_of, target_of


def solving(  # noqa: PLR0917 - one argument per option
    cases: Sequence[Case],
    path: str,
    targets: Sequence[str],
    low: str | None,
    high: str | None,
    tokens: float | None,
    goal: Goal,
    report: Path | None,
    *,
    as_json: bool,
) -> None:
    """Solve for every case and target, and print; `report` is an HTML page to write besides."""
    wanted = [target_of(text) for text in targets]
    if tokens is not None:
        tokens_of(tokens)
    _check(cases[0], path)
    for case in cases:
        for target in wanted:
            check(case, path, target, tokens)
    found: list[Solved] = []
    for case in cases:
        axis = axis_of(case, path, low, high)
        for target in wanted:
            with progress_bar(f"solving for {path}: {strategy_title(case.strategy)}") as done:
                found.append(solve(case, axis, target, tokens=tokens, goal=goal, done=done))
    titles = [strategy_title(case.strategy) for case in cases]
    results, moved = _as_they_are(titles, cases)
    if report:
        from co2sim.report.solve_page import AllSolved, page  # noqa: PLC0415 - Altair

        answers = AllSolved(
            cases=cases,
            found=found,
            results=results,
            levers=moved,
            tokens=tokens,
            goal=goal,
            command=command_line("co2sim"),
        )
        report_page.write(report, page(answers))
    if as_json:
        print(json.dumps([plain(solved, moved, results) for solved in found], indent=2))
        return
    out = console()
    print_lines(out, *(f"{words(solved)}." for solved in found), *question([*results.values()]), "")
    print_warnings(out, results.items())
    for target in wanted:
        _print_target(out, [solved for solved in found if solved.target == target])
    _print_levers(out, moved)
    if line := remark(trainings(cases, results), goal):
        print_lines(out, line, "")
    print_assumed(out, results.values())
    _print_checks(out, found, tokens, goal)
    report_page.print_where(report)


def _as_they_are(
    titles: Sequence[str], cases: Sequence[Case]
) -> tuple[dict[str, Result], dict[str, list[Sensitivity]]]:
    """The results of the cases, and their levers; a case need not work, only the answer."""
    results: dict[str, Result] = {}
    moved: dict[str, list[Sensitivity]] = {}
    for title, case in zip(titles, cases, strict=True):
        moved[title] = []
        with suppress(Co2simError):
            results[title], moved[title] = driver.run(case), levers(case)
    return results, moved


def _check(case: Case, path: str) -> None:
    """Refuse what is given, and solved for, too."""
    if path in case.overrides:
        raise OptionError(f"--set {path} is given, and solved for, too; leave it out")
    given = getattr(case, path, None) if path in {"gpus", "global_batch"} else None
    if given is not None:
        flag = f"--{path.replace('_', '-')}"
        raise OptionError(f"{flag} is given, and solved for, too; leave it out")


def _print_checks(out: Console, found: Sequence[Solved], tokens: float | None, goal: Goal) -> None:
    """Commands, each in one piece whatever the width: they are to be copied."""
    for line in checks(found, tokens, goal):
        out.print(Text(line), soft_wrap=True)


def _print_target(out: Console, found: Sequence[Solved]) -> None:
    """A row for each strategy, a column for each value."""
    target, axis = found[0].target, found[0].axis
    metric = target.metric
    title = f"{axis.path} for {target.name}: {metric.words}"
    limits = [metric.shown(value, found[0].currency) for value in target.values]
    rows = [
        [
            strategy_title(solved.case.strategy),
            *(told(answer, axis) for answer in solved.answers),
            best(solved),
        ]
        for solved in found
    ]
    print_table(out, title, ["strategy", *limits, "best"], rows, left=1 + len(limits))
    print_lines(out, *remarks(found), "")


def _print_levers(out: Console, found: dict[str, list[Sensitivity]]) -> None:
    """What a tenth more of each number buys."""
    if not any(found.values()):
        return
    title = (
        f"as it is, {MORE - 1:.0%} more bandwidth or speed, or {MORE - 1:.0%} less latency, buys"
    )
    rows = [
        [
            strategy,
            lever.change,
            percent(lever.gain, 2),
            "-" if lever.gpus is None else number(lever.gpus),
            "-"
            if lever.worth_per_hour is None
            else f"{lever.worth_per_hour:,.2f} {lever.currency}",
        ]
        for strategy, each in found.items()
        for lever in each
    ]
    columns = ["strategy", "number", "tokens/s", "as a number of GPUs", "worth per hour"]
    print_table(out, title, columns, rows, left=2)
