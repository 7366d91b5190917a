"""`co2sim plan`: what to buy, or how to run what there is, as sentences and tables."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from co2sim.cli import report_page
from co2sim.common.cli import command_line
from co2sim.common.errors import OptionError
from co2sim.common.progress import progress_bar
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import number
from co2sim.prediction.step_factors import remark, scale_of
from co2sim.report.text import totals
from co2sim.report.text.plan import commands, looked, nothing, plain, words
from co2sim.report.text.result import print_assumed, question
from co2sim.studies.candidates import Candidate, Objective, Space
from co2sim.studies.grid import offer_name
from co2sim.studies.plan import Recommendation, plan
from co2sim.studies.pools import Engine
from co2sim.studies.sensitivity import BreakEven, Sensitivity, between_offers, break_even, levers


def print_options(out: Console, title: str, options: Sequence[Candidate]) -> None:
    """A row for each, with days, GPU-hours, and money and energy where they are known."""
    if not options:
        return
    money = options[0].totals.currency
    stacks = len({one.case.stack for one in options if isinstance(one.case.stack, str)}) > 1
    energy = any(option.totals.energy_kwh is not None for option in options)
    columns = [
        "cluster",
        "strategy",
        "divided by",
        "recompute",
        "GPUs",
        "micro-batch",
        "days",
        "90 %",
        "GPU-hours",
    ]
    columns[2:2] = ["stack"] * stacks
    columns += [money] if money else []
    columns += ["MWh"] if energy else []
    rows = []
    for option in options:
        total, case = option.totals, option.case
        ends = (total.days_low, total.days_high)
        row = [
            *(offer_name(case.cluster), option.result.strategy),
            *(case.mesh_words() or "-", case.recompute),
            *(f"{option.result.gpus:,}", f"{case.micro_batch} x {option.result.accumulation}"),
            f"{total.days:,.3g}",
            "-" if None in ends else " to ".join(f"{end:,.3g}" for end in ends),
            f"{total.gpu_hours:,.0f}",
        ]
        row[2:2] = [str(case.stack)] * stacks
        row += [f"{total.cost:,.0f}"] if money else []
        row += ["-" if total.energy_kwh is None else number(total.energy_kwh / 1000)] * energy
        rows.append(row)
    print_table(out, title, columns, rows, left=4)


_MAX_ROWS = 12
"""Of the table of the best by cluster and strategy."""


def planning(
    space: Space, wanted: Objective, engine: Engine, report: Path | None, *, as_json: bool
) -> None:
    """Plan, and print; `report` is an HTML page to write besides."""
    with progress_bar("looking at candidates") as done:
        found = plan(space, wanted, engine=engine, done=done)
    choice, other = found.choice, found.runner_up
    if not found.front:
        if found.interrupted:
            raise KeyboardInterrupt("no candidate was done")
        raise OptionError(nothing(found))
    turns: list[BreakEven] = []
    held: list[Sensitivity] = []
    interrupted = found.interrupted
    if choice and not interrupted:
        try:
            turns = break_even(choice, other, wanted) if other else []
            if found.rival and found.rival is not other:
                turns += between_offers(choice, found.rival, wanted)
            held = levers(choice.case)
        except KeyboardInterrupt:
            interrupted = True
    if report:
        from co2sim.report.plan_page import Planned, page  # noqa: PLC0415 - Altair

        planned = Planned(
            space=space,
            found=found,
            turns=turns,
            levers=held,
            interrupted=interrupted,
            command=command_line("co2sim"),
        )
        report_page.write(report, page(planned))
    if as_json:
        print(json.dumps(plain(found, turns, held), indent=2))
    else:
        _print(console(), space, found, turns, held)
    report_page.print_where(report, quiet=as_json)
    if interrupted:
        raise KeyboardInterrupt("what was found until then is above")
    if choice is None:
        raise typer.Exit(1)


def _print(
    out: Console,
    space: Space,
    found: Recommendation,
    turns: Sequence[BreakEven],
    held: Sequence[Sensitivity],
) -> None:
    first = [option.result for option in found.best[:1]]
    print_lines(out, *words(found, turns, held), *question(first), "")
    print_options(out, "no other is both faster and cheaper", found.front)
    best = found.best[:_MAX_ROWS]
    more = f", the first {len(best)} of {len(found.best)}" if len(found.best) > len(best) else ""
    print_options(out, f"the best by cluster and strategy{more}", best)
    print_lines(out, *looked(space, found))
    shown_best = ((one.result.strategy, scale_of(one.result)) for one in found.best)
    if line := remark(shown_best, found.wanted.goal):
        print_lines(out, line)
    shown = found.best[:1]
    totals.print_basis(out, [option.case for option in shown], [o.totals for o in shown])
    print_assumed(out, [option.result for option in shown])
    if found.choice:
        # to be copied: in one piece, whatever the width
        for line in commands(found.choice, found.wanted):
            out.print(Text(line), soft_wrap=True)
