"""`realrun train --elastic`: what is refused, and what a rank does that may come back."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from co2sim import ranges
from co2sim.cluster import Backend
from co2sim.errors import Co2simError, OptionError
from co2sim.schedule import Layout
from co2sim.visible import error_line
from realrun.cli.train_rank import asked_to_stop, check_out, lines_of_progress, show
from realrun.dilation import DILATION, dilation
from realrun.errors import BAD_INPUT
from realrun.launch.membership import LIFE, ElasticMember, Membership
from realrun.train.lock import alone, among
from realrun.train.settings import TrainSettings
from realrun.train.support import check, check_elastic

_HELD = "REALRUN_FOLDER_HELD"
"""Environment variable of ranks whose launcher has the folder, whoever of them comes and goes."""

_READY = "realrun/folder"
"""Key in the store, once rank 0 has found the folder fit and free."""

RESTARTS = 10
"""Of all ranks together, unless said otherwise."""


def check_launcher(*, elastic: bool, nproc: int | None, restarts: int | None) -> None:
    """Raise OptionError unless the launcher starts ranks anew just where --elastic is given.

    Or where its lab is slower than its clock says: a training goes by that of the machine.
    """
    if dilation() > 1:
        raise OptionError(
            f"{DILATION} is {dilation()}, and training goes by the clock of the machine; build the"
            " lab with --dilation 1"
        )
    if restarts is not None and not elastic:
        raise OptionError("--restarts needs --elastic")
    if restarts is not None:
        ranges.whole("--restarts", restarts, 0)
    if nproc is not None:
        return
    if restarts is not None:
        raise OptionError(
            "--restarts is for what starts the ranks: `realrun train --nproc N`, or `realrun lab"
            " run --restarts N -- realrun train --elastic`"
        )
    if elastic and LIFE not in os.environ:
        raise OptionError(
            "--elastic needs a launcher that starts ranks anew: --nproc N, or `realrun lab run"
            " --restarts N -- realrun train --elastic`"
        )
    if not elastic and LIFE in os.environ:
        raise OptionError("the launcher was given --restarts: `realrun train` needs --elastic then")


def check_alone(backend: Backend, *, resume: bool, estimate: bool) -> None:
    """Raise OptionError for other options that do not go with --elastic."""
    if backend != "gloo":
        raise OptionError(f"--elastic needs --backend gloo; it has not been tried with {backend}")
    if resume or estimate:
        name = "--resume" if resume else "--estimate"
        raise OptionError(f"{name} needs all ranks throughout: not with --elastic")


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Within, what is started trains in a folder that this process, its launcher, has for itself.

    Raises OptionError when another training has it.
    """
    with alone(out):
        os.environ[_HELD] = "1"
        try:
            yield
        finally:
            del os.environ[_HELD]


def run_member(settings: TrainSettings, deadline: float, out: Path, *, as_json: bool) -> None:
    """Train as one member; the first one, at the end, tells how it went."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    from realrun.execute.world import end  # noqa: PLC0415 - torch
    from realrun.train.elastic_loop import train_elastic  # noqa: PLC0415 - torch

    rank, size, per_node, port = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    )
    layout, me = Layout(size // per_node, per_node), ElasticMember(rank, int(os.environ[LIFE]))
    check(settings, layout)
    check_elastic(settings, layout)
    try:
        address, limit = os.environ["MASTER_ADDR"], timedelta(seconds=deadline)
        store = TCPStore(address, port, size, False, limit, False)  # noqa: FBT003
        membership = Membership(store, me, size, deadline)
        with ExitStack() as stack:
            if _HELD not in os.environ:
                if not rank and not store.check([_READY]):
                    check_out(settings, out, size, None)
                    stack.enter_context(alone(out))()
                    store.set(_READY, "")
                else:  # whoever is left last has it
                    store.wait([_READY], limit)
                    stack.enter_context(among(out))
            asked = stack.enter_context(asked_to_stop(rank, ""))
            history = train_elastic(
                settings,
                membership,
                store,
                layout,
                out,
                progress=lines_of_progress(settings),
                stop=lambda: bool(asked),
            )
        if history:
            show(history, out, as_json=as_json)
        end()
    except (Co2simError, RuntimeError) as error:
        print(error_line(str(error)), file=sys.stderr)
        end(2 if isinstance(error, BAD_INPUT) else 1)
