"""The options that several commands share: how ranks are started, and how they talk."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, get_args

import typer

from co2sim.cli.options import seconds, whole
from co2sim.common import validation
from co2sim.common.errors import OptionError, nearest
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Backend
from co2sim.strategies import parse
from co2sim.strategies.co2 import has_auto_options
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
        names = {one.partition("=")[0] for one in taken}
        for given, default in _BATCH.items():
            if names.isdisjoint(given):
                taken += default
        open_ = [name for name in ("tau", "delay") if getattr(parsed, name) == "auto"]
        raise OptionError(
            f"{strategy}: realrun run executes a schedule, which needs numbers for"
            f" {' and '.join(open_)}: {lab}`{shlex.join(['co2sim', 'run', *taken])}` names them"
        )


def strategies_in(words: Sequence[str]) -> Iterator[str]:
    """The strategies among the options of a `realrun run`."""
    for place, word in enumerate(words):
        if word in {"-s", "--strategy"}:
            yield from words[place + 1 : place + 2]
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
