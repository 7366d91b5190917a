"""`co2sim plan`: what to buy, or how to run what there is, as sentences and tables."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from co2sim.cli import options, output
from co2sim.common import convert
from co2sim.common.cli import command_line, print_json, refuse_twice
from co2sim.common.errors import OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.tables import console, print_lines, print_table
from co2sim.prediction.choose import RECOMPUTES
from co2sim.prediction.question import Question
from co2sim.prediction.step_factors import Goal
from co2sim.report import tables
from co2sim.report.bundle import check
from co2sim.report.text import totals
from co2sim.report.text.launch import aside, launch_text, print_launch
from co2sim.report.text.plan import commands, looked, nothing, plain, screen, turning
from co2sim.report.text.result import print_assumed
from co2sim.report.text.screen import print_screen
from co2sim.schedule.mesh import Mesh
from co2sim.studies import plan as study
from co2sim.studies.candidates import STRATEGIES, Axes, Candidate, Objective, Space, Want
from co2sim.studies.grid import offer_name
from co2sim.studies.plan import Recommendation
from co2sim.studies.sensitivity import BreakEven, Sensitivity, between_offers, break_even, levers

_CHOSEN = ("micro_batch", "accumulation", "recompute", *(one.name for one in fields(Mesh)))
"""Options of a case that have several values here."""


_Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus", "-g", help="Counts, such as 64,128; default: whole nodes, from one up to all."
    ),
]


@options.case_options("job", target="job", but=_CHOSEN)
@options.record_options(Objective, "wanted", dict)
@options.record_options(Axes, "axes")
@options.record_options(Space, "tried", dict, recomputes=",".join(RECOMPUTES), headroom="10%")
@options.factor_options
def plan(  # noqa: PLR0913, PLR0917 - one argument per option
    context: typer.Context,
    job: Question,
    wanted: dict[str, Any],
    axes: Axes,
    tried: dict[str, Any],
    goal: Goal,
    cluster: Annotated[
        list[str],
        typer.Option("--cluster", "-c", help="Catalog name or TOML file: an offer. Repeatable."),
    ],
    to_loss_steps: Annotated[
        int | None,
        typer.Option(
            parser=partial(convert.whole, "--to-loss-steps"),
            metavar="N",
            help="Instead of --tokens: the steps after which ddp has the loss.",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="What to try; repeatable. Default (over several sites also DiLoCo between them):"
            f" {'; '.join(STRATEGIES)}.",
        ),
    ] = None,
    gpus: _Gpus = None,
    jobs: options.Jobs = 1,
    engine: options.Name = "loky",
    scheduler: options.Scheduler = None,
    report: options.Report = None,
    full: options.Full = False,  # noqa: FBT002
    launch: options.Launch = False,  # noqa: FBT002
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Find what to buy, or how to run what there is: the best of all candidates."""
    refuse_twice("cluster", cluster)
    _refuse_one_name(cluster)
    check("--report", report)
    who = options.engine(context, engine, scheduler, jobs)
    tried |= {"clusters": tuple(cluster), "gpus": gpus, "axes": axes}
    space = Space(strategies=tuple(strategy or STRATEGIES), **tried, **_stacks(job))
    wanted["want"] = _want(wanted.get("want"), space, spend_it=_budget_alone(wanted))
    wanted["tokens"] = _tokens(wanted.get("tokens"), to_loss_steps, space)
    objective = Objective(**wanted, goal=goal)
    with progress_bar("looking at candidates") as done:
        answer = study.plan(space, objective, engine=who, done=done)
    trainer = options.trainer_read(context)
    chosen = [(answer.choice.case, answer.choice.result)] if launch and answer.choice else []
    script = {"launch": launch_text(*chosen[0], trainer)} if chosen else {}
    with aside(launch=launch and not json_):
        _answer(space, answer, report, trainer, script, full=full, as_json=json_)
    if not json_:
        print_launch(chosen, trainer)


def _stacks(job: Question) -> dict[str, Any]:
    """The job, and the stacks to try besides where several are named."""
    stacks = [part.strip() for part in job.stack.split(",")] if isinstance(job.stack, str) else []
    if len(stacks) > 1 and not all(stacks):
        raise OptionError(f"--stack is {job.stack!r}, which has an empty name")
    refuse_twice("stack", stacks)
    return {
        "job": replace(job, stack=stacks[0]) if stacks else job,
        "stacks": tuple(stacks) if len(stacks) > 1 else (),
    }


def _refuse_one_name(clusters: list[str]) -> None:
    """Refuse offers that an answer could not tell apart."""
    named: dict[str, str] = {}
    for cluster in clusters:
        other = named.setdefault(offer_name(cluster), cluster)
        if other != cluster:
            raise OptionError(
                f"{other} and {cluster} are both called {offer_name(cluster)!r}; give each offer"
                " another name before the colon"
            )


def _tokens(tokens: float | None, steps: int | None, space: Space) -> float:
    """What ddp would train: given, or a number of steps of the global batch."""
    if (tokens is None) == (steps is None):
        given = "" if tokens is None else "; not both"
        raise OptionError(f"give --tokens 1e12, say, or --to-loss-steps{given}")
    if tokens is not None:
        return tokens
    assert steps is not None
    if steps < 1:
        raise OptionError(f"--to-loss-steps is {steps}; it must be 1 or more")
    model = replace(space.job, cluster=space.clusters[0]).load()[1].value
    return float(steps) * space.global_batch * model.tokens


def _budget_alone(wanted: Mapping[str, Any]) -> bool:
    """Whether there is a budget, and nothing that says until when."""
    return wanted.get("budget") is not None and wanted.get("deadline") is None


def _want(want: str | None, space: Any, *, spend_it: bool) -> Any:
    """What is wanted: by default the cheapest; the fastest without prices or for a budget alone."""
    if want is None:
        loaded = replace(space.job, cluster=space.clusters[0]).load()[0].value
        return "fastest" if spend_it or loaded.price_per_gpu is None else "cheapest"
    if want not in get_args(Want):
        raise OptionError(f"--want is {want!r}; it must be one of {', '.join(get_args(Want))}")
    return want


def _answer(
    space: Space,
    answer: Recommendation,
    report: Path | None,
    trainer: str,
    script: Mapping[str, str],
    *,
    full: bool,
    as_json: bool,
) -> None:
    """Say it, with what would change it; exit code 1 where nothing is within the limits."""
    choice = answer.choice
    if not answer.front:
        if answer.interrupted:
            raise KeyboardInterrupt("no candidate was done")
        raise OptionError(nothing(answer))
    turns: list[BreakEven] = []
    held: list[Sensitivity] = []
    interrupted = answer.interrupted
    if choice and not interrupted:
        try:
            turns = _turns(answer)
            held = levers(choice.case) if full or report or as_json else []
        except KeyboardInterrupt:
            interrupted = True
    if report:
        from co2sim.report.plan_page import Planned, page  # noqa: PLC0415 - Altair

        planned = Planned(
            space=space,
            found=answer,
            turns=turns,
            levers=held,
            interrupted=interrupted,
            command=command_line("co2sim"),
        )
        output.write_page(report, page(planned))
    if as_json:
        print_json({**plain(space, answer, turns, held, trainer), **script})
    else:
        print_screen(
            screen(space, answer, turns, trainer),
            output.more(full=full, files=[report]),
            whole=full,
        )
        if full:
            print_lines(console(), "")
            _print(console(), space, answer, turns, held)
    output.print_where(report, quiet=as_json)
    if interrupted:
        raise KeyboardInterrupt("what was found until then is above")
    if choice is None:
        raise typer.Exit(1)


def _turns(answer: Recommendation) -> list[BreakEven]:
    """Where the runner-up, or another offer, wins."""
    choice, other, wanted = answer.choice, answer.runner_up, answer.wanted
    if choice is None or other is None:
        return []
    turns = break_even(choice, other, wanted)
    if answer.rival and answer.rival is not other:
        turns += between_offers(choice, answer.rival, wanted)
    return turns


_MAX_ROWS = 12
"""Of the table of the best by cluster and strategy."""


def _print(
    out: Console,
    space: Space,
    answer: Recommendation,
    turns: Sequence[BreakEven],
    held: Sequence[Sensitivity],
) -> None:
    print_lines(out, *turning(turns, held), "")
    _print_options(out, "no other is both faster and cheaper", answer.front)
    best = answer.best[:_MAX_ROWS]
    more = f", the first {len(best)} of {len(answer.best)}" if len(answer.best) > len(best) else ""
    _print_options(out, f"the best by cluster and strategy{more}", best)
    print_lines(out, *looked(space, answer))
    totals.print_worth(out, (option.result for option in answer.best), answer.wanted.goal)
    shown = answer.best[:1]
    print_lines(out, *totals.basis_lines([o.case for o in shown], [o.totals for o in shown]))
    print_assumed(out, [option.result for option in shown])
    if answer.choice:
        # to be copied: in one piece, whatever the width
        for line in commands(answer.choice, answer.wanted):
            out.print(Text(line), soft_wrap=True)


def _print_options(out: Console, title: str, candidates: Sequence[Candidate]) -> None:
    if candidates:
        shown = tables.options(candidates, at_length=False)
        print_table(out, title, shown.columns, shown.rows, left=shown.texts)
        print_lines(out, *filter(None, [shown.legend]))
