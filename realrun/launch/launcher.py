"""Start the ranks of a run, alone or under a launcher."""

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from co2sim.common.units import Seconds
from realrun.errors import LaunchError
from realrun.launch.monitor import STOPPED, supervise
from realrun.launch.processes import (
    RankProcess,
    Stopped,
    guard_process,
    ranks_killed_at_end,
    start,
    stoppable,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


GRACE: Seconds = 5.0
"""How long other ranks may take to stop after one failed, unless said otherwise."""

PATIENCE: Seconds = 30.0
"""How long a launcher may be stopped until its ranks are killed, unless said otherwise."""

MAX_RANKS = 256
"""More than any machine can run at a useful speed."""


def run_local(
    command: Sequence[str],
    nproc: int,
    *,
    grace: Seconds = GRACE,
    patience: Seconds = PATIENCE,
    environment: Mapping[str, str] | None = None,
    ask_first: bool = False,
    own_terminal: bool = False,
) -> int:
    """Run `command` as `nproc` ranks on this machine, and give the exit code of `supervise`.

    `environment` is added to this process's own. Killing this process kills all ranks and what they
    started, and so does stopping it (SIGSTOP, control-Z) for longer than `patience`, on Linux.
    Control-C gives 130 and SIGTERM 143. `ask_first`: the first of them only tells the ranks to end,
    the second kills. `own_terminal`: rank 0 may draw on this process's terminal, if there is one.
    Call it from the main thread. Raises LaunchError when the ranks cannot be started.
    """
    if not 1 <= nproc <= MAX_RANKS:
        raise LaunchError(f"cannot start {nproc} ranks; it must be 1 to {MAX_RANKS}")
    program = resolved(command)
    ranks: list[RankProcess] = []
    asked_by = 0
    """The signal for which the ranks shall end; 0: none yet."""

    def tell(signum: int) -> None:
        nonlocal asked_by
        if not ranks:
            raise Stopped(signum)
        asked_by = signum
        for rank in ranks:
            rank.process.terminate()

    draws = own_terminal and sys.stderr.isatty()
    try:
        with (
            stoppable(tell if ask_first else None),
            guard_process(patience) as guard,
            ranks_killed_at_end(ranks),
        ):
            store = host_store("127.0.0.1")
            for rank in range(nproc):
                variables = rank_environment(
                    rank, nproc, local_world_size=nproc, address="127.0.0.1", port=store.port
                )
                values = {**variables, **(environment or {})}
                ranks.append(start(rank, program, values, errors=rank > 0 or not draws))
                guard.put(ranks[-1].process.pid)
            code = supervise(ranks, store, grace, lambda: asked_by, guard.cut)
            return 128 + asked_by if asked_by and not code else code
    except Stopped as stopped:
        print(STOPPED, file=sys.stderr)  # noqa: T201
        return stopped.exit_code


def resolved(command: Sequence[str]) -> list[str]:
    """The command to run; `realrun` itself needs no PATH. Raises LaunchError if there is none."""
    if not command:
        raise LaunchError("no command is given; write it behind --, as in: -- python train.py")
    if command[0] == "realrun":
        return [sys.executable, "-m", "realrun", *command[1:]]
    if shutil.which(command[0]) is None:
        raise LaunchError(f"command not found: {command[0]}")
    return list(command)


def rank_environment(
    rank: int, world_size: int, *, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """What torchrun would set for this rank. The store at `address` is the launcher's."""
    threads = max(1, cores() // world_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "GROUP_WORLD_SIZE": str(world_size // local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # Else torch warns in every rank that it cannot find the name of a host.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # The last words of a rank that is killed are worth having.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }


def host_store(address: str) -> "TCPStore":
    """Serve a store on a free port of this address only, as long as the object lives."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as for the ranks
    from torch.distributed import (  # type: ignore[attr-defined] # noqa: PLC0415 - takes a second
        TCPStore,
    )

    listener = socket.create_server((address, 0), backlog=2 * MAX_RANKS)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def cores() -> int:
    """How many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
