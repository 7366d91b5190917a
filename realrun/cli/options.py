"""The options that several commands share: how ranks are started, and how they talk."""

from typing import Annotated, get_args

import typer

from co2sim.cli.options import seconds, whole
from co2sim.common import validation
from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Backend
from realrun.lab.time_dilation import DILATION, dilation

_LONGEST: Seconds = 7 * 86400.0
"""Of a deadline. Far below what the clocks of PyTorch can count."""

Nproc = Annotated[
    int | None,
    typer.Option(
        parser=whole("--nproc"),
        metavar="N",
        help="Start N ranks on this machine; default: be one of the ranks that torchrun, Slurm or"
        " `realrun lab` started.",
    ),
]
BackendName = Annotated[
    str, typer.Option("--backend", help="gloo (CPU, works anywhere) or nccl (GPUs).")
]
Deadline = Annotated[
    str,
    typer.Option(help="The longest that a rank waits for another before all give up."),
]


def known_backend(text: str) -> Backend:
    """A backend by its name. Raises OptionError for others, and for GPUs in a slower lab."""
    if text not in get_args(Backend):
        raise OptionError(f"--backend is {text!r}; {nearest(text, get_args(Backend))}")
    if text == "nccl" and dilation() > 1:
        raise OptionError(
            f"--backend is nccl, and {DILATION} is {dilation()}: GPUs keep their own time; build"
            " the lab with --dilation 1"
        )
    return text  # type: ignore[return-value]


def checked_deadline(text: str) -> Seconds:
    """A deadline in seconds, 1 s to 7 days. Raises OptionError for others."""
    deadline = seconds("--deadline", text, least=1.0)
    if deadline > _LONGEST:
        raise OptionError(f"--deadline is {text!r}; it must be at most 7 days")
    return deadline


def checked_nproc(nproc: int | None) -> int | None:
    """A number of ranks. Raises OptionError below 1."""
    return None if nproc is None else validation.whole("--nproc", nproc, 1)
