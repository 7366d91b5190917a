"""The commands of `realrun`."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common import convert, validation
from co2sim.common.cli import Version
from co2sim.common.errors import OptionError
from co2sim.common.files import check_writable
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import Layout
from co2sim.strategies import parse
from co2sim.strategies.co2 import has_auto_options
from co2sim.strategies.step import title
from realrun.cli import options as launching
from realrun.cli.lab import lab
from realrun.cli.probe import probe
from realrun.cli.train import train
from realrun.errors import one_of
from realrun.lab.lab import CLUSTER
from realrun.record import resolve

_MAX_ROUNDS = 10_000
"""Every rank keeps the spans of all rounds: some 200 bytes for each op of each of them."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Execute the schedules of co2sim on real torch.distributed process groups, and measure.",
)
app.add_typer(lab, name="lab")
app.command()(probe)
app.command()(train)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, _version: Version = False) -> None:  # noqa: FBT002
    if context.invoked_subcommand is None:
        print(context.get_help())


_Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        help="What the prediction is made from: a catalog name, or a TOML file such as `realrun"
        " probe` writes. In the lab, the lab's own if left out.",
    ),
]
_Kernels = Annotated[
    str | None,
    typer.Option(
        help="flops: real matrix products of every op's size. sleep: hold the stream for the time"
        " that the cluster's GPU needs. Default: flops; in the lab, sleep."
    ),
]


@app.command()
@options.model_options
@launching.rank_options
def run(  # noqa: PLR0917 - one argument per option
    job: Question,
    how: launching.RankSettings,
    strategy: Annotated[
        list[str],
        typer.Option(
            "--strategy", "-s", help="As in `co2sim run`. Repeatable: one run after the other."
        ),
    ],
    cluster: _Cluster = None,
    kernels: _Kernels = None,
    rounds: Annotated[
        int,
        typer.Option(
            parser=partial(convert.whole, "--rounds"),
            metavar="N",
            help="Rounds to measure, after warm-up.",
        ),
    ] = 5,
    check: Annotated[  # noqa: FBT002
        bool,
        typer.Option(help="Let ranks compare every collective before they launch it."),
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder; every strategy gets one inside.")
    ] = Path("out"),
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Execute strategies on real processes: times, breakdown, timelines."""
    stated = cluster or os.environ.get(CLUSTER)
    if stated is None:
        raise OptionError(
            "--cluster is missing: the cluster that the prediction is made from (`realrun probe`"
            " writes one)"
        )
    name = kernels or ("sleep" if CLUSTER in os.environ else "flops")
    one_of("--kernels", name, ("flops", "sleep"))
    validation.whole("--rounds", rounds, 1, _MAX_ROUNDS)
    titles = [title(parse(text)) for text in strategy]
    if len(set(titles)) < len(titles):
        raise OptionError("a strategy is given twice")
    cases = [replace(job, cluster=stated, strategy=text) for text in strategy]
    _refuse_auto(strategy)
    for case in cases:  # what is wrong is better said once than by every rank
        if how.nproc is None:
            case.load()
        else:
            resolve(case, Layout(1, how.nproc), how.backend)[0].stage()
    check_writable(out)
    from realrun.cli import ranks  # noqa: PLC0415 - torch

    if how.nproc is not None:
        raise typer.Exit(ranks.start(how, sys.argv[1:]))
    ranks.run(cases, how, name, rounds, out, check=check, as_json=json_)  # type: ignore[arg-type]


def _refuse_auto(strategies: Iterable[str]) -> None:
    """Raise OptionError for a strategy with numbers still to be chosen, before a rank starts."""
    for text in strategies:
        strategy = parse(text)
        if has_auto_options(strategy):
            missing = [name for name in ("tau", "delay") if getattr(strategy, name) == "auto"]
            raise OptionError(
                f"{text}: realrun run executes a schedule, which needs numbers for"
                f" {' and '.join(missing)}: `co2sim run` names them, with the same cluster, model,"
                " strategy and batch"
            )
