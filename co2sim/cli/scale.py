"""`co2sim scale`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common.cli import refuse_twice
from co2sim.prediction.case import Case
from co2sim.report.bundle import check
from co2sim.report.text import totals
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.studies import grid


@options.job_options
def scale(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Case,
    cluster: options.Clusters,
    strategy: options.ManyStrategies,
    gpus: options.Counts = None,
    published: options.Published = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for scale.csv, scale.png and scale.svg.")
    ] = Path("out"),
    jobs: options.Jobs = 1,
    to_loss_steps: options.ToLossSteps = None,
    steps_factor: options.StepsFactor = None,
    tokens: totals.Tokens = None,
    report: options.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Compare strategies over GPU counts: a table, a CSV file and a figure."""
    from co2sim.cli import scale_answer  # noqa: PLC0415 - pandas and matplotlib

    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    refuse_twice("cluster", cluster)
    cases = grid.over_sizes(job, cluster, strategy, gpus)
    goal = options.goal(to_loss_steps, steps_factor)
    check("--report", report)
    scale_answer.scale(cases, published, out, jobs, goal, tokens, report, as_json=json_)
