"""The commands of `co2sim`: their options, and what they print."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from co2sim import grid, study
from co2sim.case import Case
from co2sim.cli import deciding, exchanging, exploring, reporting
from co2sim.console import budgets, goals, options, over_sizes
from co2sim.console.repeated import refuse_twice
from co2sim.console.version_option import Version
from co2sim.errors import OptionError
from co2sim.files import write_atomically
from co2sim.report.option import check
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.totals import to_dict

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Predict how CO2, ZeRO++, ZeRO, DDP and the local-update family scale on a cluster.",
)


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


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, _version: Version = False) -> None:  # noqa: FBT002
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="clusters, gpus, models, failures, strategies, prices, grids, or one name from"
            " them."
        ),
    ] = None,
) -> None:
    """List what the catalog holds, or every number of one entry with its source."""
    from co2sim.cli.listing import print_catalog  # noqa: PLC0415 - rich, only when needed

    print_catalog(what)


@app.command()
@options.case_options
def show(case: Case) -> None:
    """Print the schedule: what every rank does in one round."""
    print(study.settle(case).prepare().schedule)


@app.command()
@options.job_options
def run(  # noqa: PLR0917 - one argument per option
    job: Case,
    cluster: options.Cluster,
    strategy: options.Strategies,
    gpus: options.Gpus = None,
    to_loss_steps: goals.ToLossSteps = None,
    steps_factor: goals.StepsFactor = None,
    tokens: budgets.Tokens = None,
    report: over_sizes.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Simulate configurations: times, breakdown, traffic, memory.

    With several strategies --json prints a list.
    """
    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    cases = [replace(job, cluster=cluster, strategy=how, gpus=gpus) for how in strategy]
    goal = goals.goal(to_loss_steps, steps_factor)
    check("--report", report)
    results = [study.run(case, progress=None) for case in cases]
    if report:
        write_atomically({report: reporting.page(cases, results, goal, tokens)})
    pairs = list(zip(cases, results, strict=True))
    if json_:
        found = [to_dict(case, result, goal, tokens) for case, result in pairs]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=2))
        return
    from co2sim.console.result_tables import print_simulated  # noqa: PLC0415 - rich

    for case, result in pairs:
        print_simulated(case, result, study.settle, goal, tokens)
    if report:
        print(f"report  {report}")


@app.command()
@options.case_options
def trace(
    case: Case,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="A .json file for Perfetto, or .jsonl with one span a line."
        ),
    ] = Path("trace.json"),
) -> None:
    """Simulate, and write the timeline of every traced rank."""
    from co2sim.files import write_atomically  # noqa: PLC0415

    if out.suffix not in {".json", ".jsonl"}:
        raise OptionError(f"--out {out}: the file must end in .json (Perfetto) or .jsonl")
    schedule, found = study.trace(case, progress=None)
    if out.suffix == ".jsonl":
        text = "".join(f"{line}\n" for line in found.to_json_lines())
    else:
        text = json.dumps(found.to_chrome(schedule))
    write_atomically({out: text.encode()})
    opens = "" if out.suffix == ".jsonl" else "; open it at https://ui.perfetto.dev"
    print(f"{len(found.spans)} spans of {found.rounds} rounds in {out}{opens}")


@app.command()
@options.job_options
def scale(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Case,
    cluster: over_sizes.Clusters,
    strategy: over_sizes.Strategies,
    gpus: over_sizes.Counts = None,
    published: over_sizes.Published = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for scale.csv, scale.png and scale.svg.")
    ] = Path("out"),
    jobs: options.Jobs = 1,
    to_loss_steps: goals.ToLossSteps = None,
    steps_factor: goals.StepsFactor = None,
    tokens: budgets.Tokens = None,
    report: over_sizes.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Compare strategies over GPU counts: a table, a CSV file and a figure."""
    from co2sim.cli import scaling  # noqa: PLC0415 - pandas and matplotlib

    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    refuse_twice("cluster", cluster)
    cases = grid.over_sizes(job, cluster, strategy, gpus)
    goal = goals.goal(to_loss_steps, steps_factor)
    check("--report", report)
    scaling.scale(cases, published, out, jobs, goal, tokens, report, as_json=json_)


@app.command()
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
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Sort by a column of the table or of the CSV file, such as step; by falling"
            " values: -tokens_per_s. A --vary name keeps the order that it was given in.",
        ),
    ] = None,
    jobs: options.Jobs = -1,
    to_loss_steps: goals.ToLossSteps = None,
    steps_factor: goals.StepsFactor = None,
    tokens: budgets.Tokens = None,
    report: over_sizes.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Vary any parameter over values, in parallel."""
    from co2sim.cli import sweeping  # noqa: PLC0415 - pandas

    varied = options.pairs(over, "--vary")
    _refuse_varied(context, varied)
    settings = grid.settings(varied)
    cases = grid.cases_of(case, settings)
    goal = goals.goal(to_loss_steps, steps_factor)
    check("--report", report)
    wishes = sweeping.Wishes(
        csv=csv, report=report, sort=sort, goal=goal, tokens=tokens, as_json=json_
    )
    sweeping.sweep(cases, settings, jobs, wishes)


deciding.add_to(app)
exchanging.add_to(app)
app.command()(reporting.report)
app.command()(exploring.explore)
