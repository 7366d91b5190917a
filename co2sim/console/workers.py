"""The options that say who runs the cases of a study."""

from typing import Annotated

import typer

from co2sim.engines.engine import LOKY, Engine

Name = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Who runs the cases: loky (processes of this machine) or dask (workers of a"
        " scheduler, or some that are started here).",
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Of Dask (tcp://HOST:8786, or the .json file that it wrote); default: workers are"
        " started here, as many as --jobs says.",
    ),
]


def engine(context: typer.Context, name: str, scheduler: str | None, jobs: int) -> Engine:
    """Who runs the cases; without --jobs an engine of several machines takes all cores of this."""
    source = context.get_parameter_source("jobs")
    if name != LOKY.name and (source is None or source.name != "COMMANDLINE"):
        jobs = -1 if scheduler is None else 1
    return Engine(name, scheduler, jobs)
