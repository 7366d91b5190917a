"""`co2sim solve`: which value of a number reaches a target, as sentences and tables."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from co2sim.cli import options, output
from co2sim.common.cli import command_line, print_json
from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.tables import console, print_lines, print_table
from co2sim.prediction import driver
from co2sim.prediction.question import AUTO, Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal, remark
from co2sim.prediction.totals import tokens_of
from co2sim.report import tables
from co2sim.report.bundle import check
from co2sim.report.text.result import print_assumed, print_warnings, question
from co2sim.report.text.screen import print_screen
from co2sim.report.text.solve import checks, plain, remarks, screen, trainings
from co2sim.studies import solve as study
from co2sim.studies.grid import strategy_title
from co2sim.studies.sensitivity import MORE, Sensitivity, levers
from co2sim.studies.solve import Solved
from co2sim.studies.targets import Target, axis_of, target_of

_Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--for",
        metavar="TARGET",
        help='What to reach: "efficiency=90%" (of one node\'s throughput per GPU),'
        ' "utilization=90%" (of free communication), "exposed=5%", "tokens_per_s=1e6",'
        ' "step=1.2 s", "days=30" or "cost=50000" (with --tokens), "fits". Repeatable;'
        " default: efficiency=90%, and with --full at 50, 80, 90, 95 and 99 %.",
    ),
]


@options.solved_cases
@options.factor_options
def solve(  # noqa: PLR0913, PLR0917 - one argument per option
    cases: list[Question],
    goal: Goal,
    what: Annotated[
        str,
        typer.Argument(
            metavar="NUMBER",
            help="What to solve for, as in `sweep --vary`: inter.bandwidth, inter.latency,"
            " strategy.tau, gpus, micro_batch, or any other number.",
        ),
    ],
    targets: _Targets = None,
    low: Annotated[
        str | None, typer.Option("--from", help="The lowest value to look at, with its unit.")
    ] = None,
    high: Annotated[str | None, typer.Option("--to", help="The highest.")] = None,
    tokens: options.ToTrain = None,
    full: options.Full = False,  # noqa: FBT002
    report: options.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Find the value of a number that reaches a target: how much bandwidth, how many GPUs."""
    check("--report", report)
    brief = not (full or report or json_)
    wanted = _targets(targets, brief=brief)
    solved = _solved(cases, what, wanted, (low, high), tokens, goal, fine=report is not None)
    titles = [strategy_title(case.strategy) for case in cases]
    results = _as_they_are(titles, cases)
    moved = {
        title: [] if brief else _levers(case) for title, case in zip(titles, cases, strict=True)
    }
    if report:
        from co2sim.report.solve_page import AllSolved, page  # noqa: PLC0415 - Altair

        answers = AllSolved(
            cases=cases,
            found=solved,
            results=results,
            levers=moved,
            tokens=tokens,
            goal=goal,
            command=command_line("co2sim"),
        )
        output.write_page(report, page(answers))
    if json_:
        print_json([plain(answer, moved, results) for answer in solved])
        return
    more = output.more(full=full, files=[], report=False)
    print_screen(screen(solved, results), more, whole=full)
    if full:
        _print_all(solved, results, moved, remark(trainings(cases, results), goal))
        for line in checks(solved, tokens, goal):  # to be copied: in one piece, whatever the width
            console().print(Text(line), soft_wrap=True)
    output.print_where(report)


def _targets(texts: Sequence[str] | None, *, brief: bool) -> list[Target]:
    """What to reach, each once; where nothing is said, efficiency: one value on a first screen."""
    if not texts:
        return [target_of("efficiency=90%" if brief else "efficiency")]
    wanted = [target_of(text) for text in texts]
    for text, target in zip(texts, wanted, strict=True):
        if wanted.count(target) > 1:
            raise OptionError(f"--for {text!r} is given twice")
    return wanted


def _print_all(
    solved: Sequence[Solved],
    results: dict[str, Result],
    moved: dict[str, list[Sensitivity]],
    worth: str,
) -> None:
    """All tables."""
    out = console()
    print_lines(out, "", *question([*results.values()]), "")
    print_warnings(out, results.items())
    for target in dict.fromkeys(answer.target for answer in solved):
        _print_target(out, [answer for answer in solved if answer.target == target])
    _print_levers(out, moved)
    if worth:
        print_lines(out, worth, "")
    print_assumed(out, results.values())


def _solved(
    cases: Sequence[Question],
    path: str,
    targets: Sequence[Target],
    ends: tuple[str | None, str | None],
    tokens: float | None,
    goal: Goal,
    *,
    fine: bool,
) -> list[Solved]:
    """The answer of every case and target, between these ends of the number."""
    if tokens is not None:
        tokens_of(tokens)
    _check(cases[0], path)
    for case, target in product(cases, targets):
        study.check(case, path, target, tokens)
    solved: list[Solved] = []
    for case in cases:
        axis = axis_of(case, path, *ends)
        for target in targets:
            with progress_bar(f"solving for {path}: {strategy_title(case.strategy)}") as done:
                answer = study.solve(
                    case, axis, target, tokens=tokens, goal=goal, done=done, fine=fine
                )
                solved.append(answer)
    return solved


def _as_they_are(titles: Sequence[str], cases: Sequence[Question]) -> dict[str, Result]:
    """The results of the cases; a case need not work, only the answer."""
    results: dict[str, Result] = {}
    for title, case in zip(titles, cases, strict=True):
        with suppress(Co2simError):
            results[title] = driver.run(case)
    return results


def _levers(case: Question) -> list[Sensitivity]:
    with suppress(Co2simError):
        return levers(case)
    return []


def _check(case: Question, path: str) -> None:
    """Refuse what is given, and solved for, too."""
    if path in case.overrides:
        raise OptionError(f"--set {path} is given, and solved for, too; leave it out")
    value = getattr(case, path, None) if path in {"gpus", "global_batch"} else None
    if value not in {None, AUTO}:
        flag = f"--{path.replace('_', '-')}"
        raise OptionError(f"{flag} is given, and solved for, too; leave it out")


def _print_target(out: Console, solved: Sequence[Solved]) -> None:
    """A row for each strategy, a column for each value."""
    target, axis = solved[0].target, solved[0].axis
    title = f"{axis.path} for {target.name}: {target.metric.words}"
    shown = tables.reached(solved)
    print_table(out, title, shown.columns, shown.rows, left=shown.texts)
    print_lines(out, *remarks(solved), "")


def _print_levers(out: Console, moved: dict[str, list[Sensitivity]]) -> None:
    """What a tenth more of each number buys."""
    if not any(moved.values()):
        return
    title = (
        f"as it is, {MORE - 1:.0%} more bandwidth or speed, or {MORE - 1:.0%} less latency, buys"
    )
    shown = {strategy: tables.gains(levers) for strategy, levers in moved.items()}
    rows = [[strategy, *row] for strategy, table in shown.items() for row in table.rows]
    columns = ["strategy", *next(iter(shown.values())).columns]
    print_table(out, title, columns, rows, left=2)
