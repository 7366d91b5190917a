"""`co2sim calibrate`: its options."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.prediction.case import Case


@options.calibrate_options
def calibrate(  # noqa: PLR0917 - one argument per option
    job: Case,
    cluster: options.Cluster,
    runs: Annotated[
        Path,
        typer.Option(
            metavar="FILE.csv",
            help="One row a run: tokens_per_s_per_gpu, tokens_per_s, step_time or a trace of"
            " PyTorch's profiler, and any of model, strategy, gpus, micro_batch and the other"
            " options in which runs differ; memory_gib, if known.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE.toml", help="The stack to write, for --stack.")
    ],
    strategy: options.Strategy = "",
    gpus: Annotated[int | None, options.flag("gpus")] = None,
    jobs: options.Jobs = -1,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Fit a software stack of your own to runs that you measured.

    It starts from --stack, and moves what the runs determine: the speed of kernels, the host, and
    what communication and differences between nodes cost. Predictions with it have narrower
    intervals the nearer they are to these runs.
    """
    from co2sim.cli import calibrate_answer  # noqa: PLC0415 - scipy and rich

    job = replace(job, cluster=cluster, strategy=strategy, gpus=gpus)
    calibrate_answer.calibrating(job, runs, out, jobs, as_json=json_)
