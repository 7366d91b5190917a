"""`co2sim fabric`: how cheap a network may be, for each strategy."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from co2sim.cli import options, output
from co2sim.common.cli import print_json
from co2sim.common.errors import OptionError
from co2sim.common.files import check_writable, write_atomically
from co2sim.common.tables import console, print_lines
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.report.bundle import check_installed
from co2sim.report.text import totals
from co2sim.report.text.fabric import plain, print_details, screen
from co2sim.report.text.screen import print_screen
from co2sim.studies.fabric import Bench, Tried, bench
from co2sim.studies.grid import strategy_title
from co2sim.studies.run_all import Failure, Interrupted, Outcome

_KINDS = (".png", ".svg")


@options.open_cases
@options.record_options(Tried, "tried", oversubscription="1,2,4,8", loses="5%", utilization="70%")
@options.goal_options
def fabric(  # noqa: PLR0917 - one argument per option
    cases: list[Question],
    tried: Tried,
    goal: Goal,
    tokens: totals.Tokens = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png|svg", help="Draw what a network costs against the time to the loss."
        ),
    ] = None,
    jobs: options.Jobs = -1,
    full: options.Full = False,  # noqa: FBT002
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Find the cheapest network on which each strategy is nearly as fast as on the best."""
    if tokens is not None and goal.steps is not None:
        raise OptionError("give --tokens or --to-loss-steps; not both")
    _check(figure)
    made = bench(cases, tried)

    def show(outcomes: Mapping[int, Outcome]) -> None:
        _show(made, outcomes, tokens, goal, figure, full=full, as_json=json_)

    try:
        outcomes = made.simulate(jobs)
    except Interrupted as interrupt:
        done = interrupt.outcomes
        if not made.complete(done):
            raise

        def keep(_: object) -> str:
            show(done)
            return "networks with all strategies are above"

        output.end_interrupted(interrupt, keep)
    every = dict(enumerate(outcomes))
    shown = made.complete(every)
    if shown:
        show(every)
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        _end_with_failures(made, every, "the others are above" if shown else "nothing is answered")


def _end_with_failures(made: Bench, outcomes: Mapping[int, Outcome], kept: str) -> NoReturn:
    """In one line: a strategy that runs on no network is no failure of each of them."""
    refused = {made.questions[n].strategy: why for n, why in made.refused(outcomes).items()}
    others = [n for n, case in enumerate(made.cases) if case.strategy not in refused]
    if all(isinstance(outcomes[n], Result) for n in others):
        words = "; ".join(f"{strategy_title(name)}: {why}" for name, why in refused.items())
        print(f"error: runs on no network: {words}; {kept}", file=sys.stderr)
        raise typer.Exit(1)
    titles = [made.cases[n].title for n in others]
    output.end_with_failures(titles, [outcomes[n] for n in others], kept)


def _check(figure: Path | None) -> None:
    """Refuse, before long work begins, what is no picture, or cannot be written or drawn."""
    if figure is None:
        return
    if figure.suffix not in _KINDS:
        raise OptionError(f"--figure {figure}: the file must end in .png or .svg")
    check_writable(figure.parent)
    check_installed()


def _show(
    made: Bench,
    outcomes: Mapping[int, Outcome],
    tokens: float | None,
    goal: Goal,
    figure: Path | None,
    *,
    full: bool,
    as_json: bool,
) -> None:
    """Print, then write the picture, which may end the process where memory is short."""
    answer = made.answer(outcomes, tokens, goal)
    if as_json:
        print_json(plain(answer))
    else:
        more = output.more(full=full, files=[], report=False)
        print_screen(screen(answer, goal), more, whole=full)
        if full:
            print_lines(console(), "")
            print_details(console(), answer)
    if figure:
        sys.stdout.flush()
        from co2sim.report.chart_style import picture  # noqa: PLC0415 - of an extra
        from co2sim.report.fabric_chart import chart  # noqa: PLC0415 - as above

        write_atomically({figure: picture(chart(answer, goal), figure.suffix[1:], columns=3)})
        if not as_json:
            print(f"figure   {figure}")
