"""The options that several commands share: how ranks are started, and how they talk."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

from co2sim.cli.options import record_options
from co2sim.common import validation
from co2sim.common.convert import Reader, option, seconds
from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Backend
from co2sim.strategies import parse
from co2sim.strategies.co2 import has_auto_options
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
        """Refuse what cannot be started."""
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

_NOT_SIMULATED = ("--kernels", "--rounds", "--nproc", "--backend", "--deadline", "--out", "-o")
"""Options of `realrun run` that `co2sim run` does not have, or means otherwise; with a value."""
_FLAGS = ("--check", "--no-check", "--json")
"""Those without a value."""
_BATCH = {
    ("--micro-batch",): ("--micro-batch", "1"),
    ("--accumulation", "--global-batch"): ("--accumulation", "1"),
    ("--recompute",): ("--recompute", "none"),
}
"""What `realrun run` takes where none of these options is given, and `co2sim run` leaves open."""


def refuse_auto(
    words: Sequence[str], strategies: Sequence[str], *, cluster: str | None, ranks: int | None
) -> None:
    """Raise OptionError for a strategy with numbers still to be chosen, before a rank starts.

    It says which command names them: that of `words`, the options of a `realrun run`. `cluster` is
    None where that is a lab's own. `ranks` is their number, None where the cluster says it.
    """
    for strategy in strategies:
        parsed = parse(strategy)
        if not has_auto_options(parsed):
            continue
        taken = list(_simulated(words))
        lab = ""
        if cluster is None:
            lab = "`realrun lab cluster > lab.toml` with the options of the lab, then "
            taken += ["-c", "lab.toml"]
        if ranks is not None:
            taken += ["-g", str(ranks)]
        names = {word.partition("=")[0] for word in taken}
        for flags, default in _BATCH.items():
            if names.isdisjoint(flags):
                taken += default
        open_ = [name for name in ("tau", "delay") if getattr(parsed, name) == "auto"]
        raise OptionError(
            f"{strategy}: realrun run executes a schedule, which needs numbers for"
            f" {' and '.join(open_)}: {lab}`{shlex.join(['co2sim', 'run', *taken])}` names them"
        )


def strategies_in(words: Sequence[str]) -> Iterator[str]:
    """The strategies among the options of a `realrun run`."""
    for index, word in enumerate(words):
        if word in {"-s", "--strategy"}:
            yield from words[index + 1 : index + 2]
        elif word.startswith("--strategy="):
            yield word.partition("=")[2]
        elif word.startswith("-s"):
            yield word[2:]


def _simulated(words: Sequence[str]) -> Iterator[str]:
    """Those of the options that `co2sim run` has, too."""
    rest = iter(words)
    for word in rest:
        if word in _NOT_SIMULATED:
            next(rest, None)
        elif word.partition("=")[0] not in {*_NOT_SIMULATED, *_FLAGS} and word[:2] != "-o":
            yield word
