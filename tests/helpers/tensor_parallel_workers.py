"""What ranks of tests do that share layers or experts: run schedules, say what they saw."""

from typing import Any

from small_gpt import job, planned, routed_job
from workers import sleeping

from co2sim.schedule.exchanges import TENSOR
from co2sim.schedule.schedule import Compute
from realrun.execute.executor import execute
from realrun.execute.world import World


def strategies_with_shared_layers(world: World, variants: list[str]) -> list[list[Any]]:
    """Run strategies for three rounds: the rules that this rank's trace breaks, and whom it met.

    Members of exchanges among ranks that share layers, and of all other collectives.
    """
    found = []
    for number, text in enumerate(variants):
        schedule = planned(text, job(2, sequence=bool(number % 2)), world.layout)
        seconds = {op.work: 1e-4 for op in schedule.body if isinstance(op.work, Compute)}
        trace = execute(schedule, sleeping(world, seconds), 3, world, check=True)
        met: dict[bool, set[int]] = {True: set(), False: set()}
        for op in schedule.body:
            if not isinstance(op.work, Compute):
                at = world.communicator(op.stream, op.work.group)
                met[op.stream == TENSOR] |= set(at.members if at else ())
        broken = list(trace.violations(schedule, skew=float("inf")))
        found.append([text, broken, sorted(met[True]), sorted(met[False])])
    return found


def strategies_with_exchanges(
    world: World, variants: list[str], options: dict[str, Any]
) -> list[list[Any]]:
    """Run strategies for three rounds: the rules that this rank's trace breaks, and whom it met.

    By the name of the group.
    """
    found = []
    for text in variants:
        schedule = planned(text, routed_job(**options), world.layout)
        seconds = {op.work: 1e-4 for op in schedule.body if isinstance(op.work, Compute)}
        trace = execute(schedule, sleeping(world, seconds), 3, world, check=True)
        met: dict[str, list[int]] = {}
        for op in schedule.body:
            if not isinstance(op.work, Compute):
                at = world.communicator(op.stream, op.work.group)
                met[op.work.group.name] = list(at.members) if at else []
        broken = list(trace.violations(schedule, skew=float("inf")))
        found.append([text, broken, met])
    return found
