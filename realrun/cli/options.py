"""The options that several commands share: how ranks are started, and how they talk."""

from dataclasses import dataclass
from typing import Annotated, get_args

from co2sim.cli.options import record_options
from co2sim.common import validation
from co2sim.common.convert import Reader, option, seconds
from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Backend
from realrun.lab.time_dilation import DILATION, dilation

_LONGEST: Seconds = 7 * 86400.0
"""Of a deadline. Far below what the clocks of PyTorch can count."""


def _seconds(_name: str, text: str) -> Seconds:
    """A deadline, 1 s to 7 days. Raises OptionError for others."""
    deadline = seconds("--deadline", text, least=1.0)
    if deadline > _LONGEST:
        raise OptionError(f"--deadline is {text!r}; it must be at most 7 days")
    return deadline


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How ranks meet. `nproc` ranks are started here; None: this process is a rank.

    Raises OptionError for another backend, for GPUs in a slower lab, and for `nproc` below 1.
    """

    nproc: int | None = option(
        None,
        "Start N ranks on this machine; default: be one of the ranks that torchrun, Slurm or"
        " `realrun lab` started.",
        "ranks",
    )
    backend: Backend = option("gloo", "gloo (CPU, works anywhere) or nccl (GPUs).", "ranks")
    deadline: Annotated[Seconds, Reader(_seconds, "TIME")] = option(
        60.0, "The longest that a rank waits for another before all give up.", "ranks"
    )

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise OptionError(
                f"--backend is {self.backend!r}; {nearest(self.backend, get_args(Backend))}"
            )
        if self.backend == "nccl" and dilation() > 1:
            raise OptionError(
                f"--backend is nccl, and {DILATION} is {dilation()}: GPUs keep their own time;"
                " build the lab with --dilation 1"
            )
        if self.nproc is not None:
            validation.whole("--nproc", self.nproc, 1)


rank_options = record_options(RankSettings, "how", deadline="60 s")
"""Give a command the options of how ranks meet; its parameter `how` receives them."""
