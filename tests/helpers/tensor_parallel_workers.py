"""What ranks of tests do that share layers or experts: run schedules, say what they saw."""

from collections.abc import Callable
from typing import Any

from small_gpt import job, planned, routed_job
from workers import sleeping

from co2sim.schedule.exchanges import TENSOR
from co2sim.schedule.schedule import Compute, Op, Schedule
from realrun.execute.executor import execute
from realrun.execute.world import World


def executed(
    world: World, schedule: Schedule, key: Callable[[Op], Any]
) -> tuple[list[str], dict[Any, set[int]]]:
    """Three rounds: the rules that this rank's trace breaks, and whom it met, by keys of ops."""
    seconds = {op.work: 1e-4 for op in schedule.body if isinstance(op.work, Compute)}
    trace = execute(schedule, sleeping(world, seconds), 3, world, check=True)
    met: dict[Any, set[int]] = {}
    for op in schedule.body:
        if not isinstance(op.work, Compute):
            at = world.communicator(op.stream, op.work.group)
            met.setdefault(key(op), set()).update(at.members if at else ())
    return list(trace.violations(schedule, skew=float("inf"))), met


def strategies_with_shared_layers(world: World, variants: list[str]) -> list[list[Any]]:
    """Run strategies: broken rules, members of exchanges that share layers, and of all others."""
    found = []
    for number, text in enumerate(variants):
        schedule = planned(text, job(2, sequence=bool(number % 2)), world.layout)
        broken, met = executed(world, schedule, lambda op: op.stream == TENSOR)
        found.append([text, broken, *(sorted(met.get(shares, ())) for shares in (True, False))])
    return found


def strategies_with_exchanges(
    world: World, variants: list[str], options: dict[str, Any]
) -> list[list[Any]]:
    """Run strategies: broken rules, and whom this rank met, by the name of the group."""
    found = []
    for text in variants:
        schedule = planned(text, routed_job(**options), world.layout)
        broken, met = executed(world, schedule, lambda op: op.work.group.name)  # type: ignore[union-attr]
        found.append([text, broken, {name: sorted(ranks) for name, ranks in met.items()}])
    return found
