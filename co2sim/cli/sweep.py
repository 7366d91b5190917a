"""`co2sim sweep`: its options, and what goes together."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common.errors import OptionError
from co2sim.prediction.case import Case
from co2sim.report.bundle import check
from co2sim.report.text import totals
from co2sim.studies import grid
from co2sim.studies.grid import LazyGrid, Shard


def _refuse_varied(context: typer.Context, paths: Iterable[str]) -> None:
    """Refuse an option that is given together with a --vary of the same name.

    Of the cluster, the model and the strategy, each has to be given or varied.
    """
    varied = set(paths)
    for path in (*paths, *options.MAY_VARY):
        source, flag = context.get_parameter_source(path), f"--{path.replace('_', '-')}"
        given = source is not None and source.name == "COMMANDLINE"
        if given and path in varied:
            raise OptionError(f"{flag} is given, and --vary {path}, too; leave one of them out")
        if not given and path not in varied:
            raise OptionError(f"{flag} is missing; give it, or --vary {path}=...")


@options.sweep_options
def sweep(  # noqa: PLR0913, PLR0917 - one argument per option
    context: typer.Context,
    case: Case,
    over: Annotated[
        list[str],
        typer.Option(
            "--vary",
            help='What to vary, and its values: --vary inter.bandwidth="25 Gbit/s, 100 Gbit/s",'
            " --vary strategy.tau=1,12,48, --vary gpus=8,64, --vary model.seq_len=1024,2048,"
            ' --vary strategy="ddp, co2:tau=48,worker=node".'
            " Repeatable: all combinations. What varies is not given as an option, too.",
        ),
    ],
    csv: Annotated[Path | None, typer.Option(help="Write all figures to this CSV file.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write all figures to Parquet files in this folder, as they come, and print no"
            " table: for up to 10 million cases. What it has already is not computed again.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="N/COUNT",
            help="With --out: only every COUNT-th case, from the N-th on, such as 3/16.",
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Sort by a column of the table or of the CSV file, such as step; by falling"
            " values: -tokens_per_s. A --vary name keeps the order that it was given in.",
        ),
    ] = None,
    jobs: options.Jobs = -1,
    engine: options.Name = "loky",
    scheduler: options.Scheduler = None,
    to_loss_steps: options.ToLossSteps = None,
    steps_factor: options.StepsFactor = None,
    tokens: totals.Tokens = None,
    report: options.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Vary any parameter over values, in parallel."""
    varied = options.pairs(over, "--vary")
    _refuse_varied(context, varied)
    who = options.engine(context, engine, scheduler, jobs)
    goal = options.goal(to_loss_steps, steps_factor)
    if out is not None:
        from co2sim.cli import sweep_answer  # noqa: PLC0415 - only then

        _refuse_beside_out({"--csv": csv, "--sort": sort, "--report": report})
        part = Shard() if shard is None else Shard.read(shard)
        points = LazyGrid.of(case, varied)
        sweep_answer.keep(
            sweep_answer.SweepTable(points, out, part, goal, tokens), who, as_json=json_
        )
        return
    if shard is not None:
        raise OptionError("--shard needs a folder: give --out, too")
    from co2sim.cli import sweep_answer  # noqa: PLC0415 - pandas

    settings = grid.settings(varied)
    cases = grid.cases_of(case, settings)
    check("--report", report)
    wishes = sweep_answer.SweepOutput(
        csv=csv, report=report, sort=sort, goal=goal, tokens=tokens, as_json=json_
    )
    sweep_answer.sweep(cases, settings, who, wishes)


def _refuse_beside_out(given: dict[str, object]) -> None:
    """What would need all cases in memory."""
    for flag, value in given.items():
        if value is not None:
            raise OptionError(
                f"{flag} and --out are both given; --out writes a folder of Parquet files, in the"
                " order of the grid, and nothing else: leave one of them out"
            )
