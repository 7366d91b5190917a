"""What a forked rank of a test does: call functions as a rank, or be a rank of `realrun`."""

import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import TracebackException
from typing import Any


def be_rank(environment: Mapping[str, str], folder: str) -> None:
    """Become the rank that `environment` says; what it prints goes into a file in the folder."""
    import torch  # noqa: PLC0415 - the process that ranks are forked from has loaded it

    os.setsid()  # so that all of it can be killed at once
    gc.freeze()  # all that was loaded is there to stay: a look through it takes 0.3 s
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        path = Path(folder) / f"{name}{environment['RANK']}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def serve(
    environment: Mapping[str, str], folder: str, backend: Any, calls: Sequence[Connection]
) -> None:
    """Join the others; answer calls of MODULE.FUNCTION(world, **arguments) until one fails.

    A function that `ranked` made for pytest is called as it was written.
    """
    be_rank(environment, folder)
    import torch  # noqa: PLC0415 - as above

    from co2sim.schedule.schedule import Layout  # noqa: PLC0415 - torch
    from realrun.execute.world import end, join  # noqa: PLC0415 - torch

    world, connection = join(backend, 60.0), calls[int(environment["RANK"])]
    while True:
        try:
            module, function, per_node, arguments = connection.recv()
        except EOFError:
            end()
        nodes, local = divmod(world.layout.world_size, per_node)
        assert not local
        world.place(Layout(nodes, per_node))
        os.environ.clear()
        os.environ.update(environment)
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
        os.environ["LOCAL_RANK"] = str(world.rank % per_node)
        torch.manual_seed(0)
        gc.collect()  # what the call before left, such as process groups, goes on all ranks alike
        try:
            called = getattr(import_module(module), function)
            answer = getattr(called, "__wrapped__", called)(world, **arguments)
            connection.send((True, json.dumps(answer)))
        except BaseException as error:  # noqa: BLE001 - the test shows it
            stack = error.__traceback__ and error.__traceback__.tb_next
            shown = TracebackException(type(error), error, stack, limit=-3, capture_locals=True)
            connection.send((False, "".join(shown.format())))
            end(1)


def command(environment: Mapping[str, str], folder: str, arguments: Sequence[str]) -> None:
    """Be a rank of `realrun ARGUMENTS`, in the folder; FAULT may say how it fails."""
    be_rank(environment, folder)
    os.chdir(folder)
    sys.argv = ["realrun", *arguments]
    if "FAULT" in environment:
        import faulty_rank  # noqa: PLC0415 - not before the environment says how

        faulty_rank.main()
        return
    from realrun.cli import main  # noqa: PLC0415 - as above

    main()
