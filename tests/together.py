"""Several functions of a module in one start of the ranks, which takes longer than most of them."""

from importlib import import_module
from typing import Any

from ranks import on_ranks

from realrun.execute.world import World


def together(
    workers: str, nproc: int, calls: dict[str, dict[str, Any]], *, gpus_per_node: int = 0
) -> dict[str, list[Any]]:
    """What functions of a module give on every rank, by name; they are called in this order."""
    answers = on_ranks(
        "several",
        nproc,
        module="together",
        gpus_per_node=gpus_per_node,
        limit=300.0,
        workers=workers,
        calls=calls,
    )
    return {name: [answer[name] for answer in answers] for name in calls}


def several(world: World, workers: str, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Be one of the ranks: the answers by name."""
    module = import_module(workers)
    return {name: getattr(module, name)(world, **arguments) for name, arguments in calls.items()}
