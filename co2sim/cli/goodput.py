"""The command `co2sim goodput` with its options."""

from dataclasses import replace
from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common.cli import refuse_twice
from co2sim.prediction.case import Case
from co2sim.strategies import parse
from co2sim.strategies.step import title

Every = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help='Work between two checkpoints, such as "30 min"; default: what leaves most useful'
        " time.",
    ),
]


@options.job_options
def goodput(
    job: Case,
    cluster: options.Cluster,
    strategy: options.Strategies,
    gpus: Annotated[int | None, options.flag("gpus")] = None,
    every: Every = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Say what part of the time is useful where parts fail: --set failures=meta-rsc-1."""
    from co2sim.cli import goodput_answer  # noqa: PLC0415 - scipy and rich

    refuse_twice("strategy", (title(parse(text)) for text in strategy))
    cases = [replace(job, cluster=cluster, strategy=how, gpus=gpus) for how in strategy]
    interval = None if every is None else options.seconds("--every", every)
    goodput_answer.answer(cases, interval, as_json=json_)
