"""`co2sim solve`: its options."""

from dataclasses import replace
from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common.cli import refuse_twice
from co2sim.prediction.case import Case
from co2sim.report.bundle import check
from co2sim.strategies import parse
from co2sim.strategies.step import title


@options.job_options
def solve(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Case,
    what: Annotated[
        str,
        typer.Argument(
            metavar="NUMBER",
            help="What to solve for, as in `sweep --vary`: inter.bandwidth, inter.latency,"
            " strategy.tau, gpus, micro_batch, or any other number.",
        ),
    ],
    cluster: options.Cluster,
    strategy: options.Strategies,
    gpus: Annotated[int | None, options.flag("gpus")] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            metavar="TARGET",
            help='What to reach: "efficiency=90%" (of one node\'s throughput per GPU),'
            ' "utilization=90%" (of free communication), "exposed=5%", "tokens_per_s=1e6",'
            ' "step=1.2 s", "days=30" or "cost=50000" (with --tokens), "fits". Repeatable;'
            " default: efficiency at 50, 80, 90, 95 and 99 %.",
        ),
    ] = None,
    low: Annotated[
        str | None, typer.Option("--from", help="The lowest value to look at, with its unit.")
    ] = None,
    high: Annotated[str | None, typer.Option("--to", help="The highest.")] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            parser=options.amount("--tokens"),
            metavar="N",
            help="Tokens that ddp would train, such as 1e12 or 1T; local updates need more.",
        ),
    ] = None,
    steps_factor: options.StepsFactor = None,
    report: options.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Find the value of a number that reaches a target: how much bandwidth, how many GPUs."""
    from co2sim.cli import solve_answer  # noqa: PLC0415 - scipy and rich

    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    cases = [replace(job, cluster=cluster, strategy=how, gpus=gpus) for how in strategy]
    worth = options.goal(None, steps_factor)
    check("--report", report)
    targets = goal or ["efficiency"]
    solve_answer.solving(cases, what, targets, low, high, tokens, worth, report, as_json=json_)
