"""What a forked rank of a test does: call a function as a rank, or be a rank of `realrun`."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def be_rank(environment: Mapping[str, str], folder: str) -> None:
    """Become the rank that `environment` says; what it prints goes into a file in the folder."""
    import torch  # noqa: PLC0415 - the process that ranks are forked from has loaded it

    os.setsid()  # so that all of it can be killed at once
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        path = Path(folder) / f"{name}{environment['RANK']}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def call(
    environment: Mapping[str, str],
    folder: str,
    backend: Any,
    module: str,
    function: str,
    arguments: Mapping[str, Any],
) -> None:
    """Join the others, call MODULE.FUNCTION(world, **arguments), and write the answer as JSON."""
    be_rank(environment, folder)
    from realrun.execute.world import end, join  # noqa: PLC0415 - torch

    world = join(backend, 20.0)
    answer = getattr(import_module(module), function)(world, **arguments)
    (Path(folder) / environment["RANK"]).write_text(json.dumps(answer))
    world.leave()
    end()


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
