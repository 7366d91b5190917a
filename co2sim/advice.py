"""What a result must not be read without: an option that holds the strategy back, and its price."""

from collections.abc import Callable
from itertools import pairwise

from co2sim.prepared import Prepared
from co2sim.schedule import Layout
from co2sim.strategies import LocalSteps, Strategy, with_options
from co2sim.strategies.local import Replica
from co2sim.strategies.zero3 import Zero3
from co2sim.strategies.zeropp import ZeroPP
from co2sim.units import Seconds, counted
from co2sim.workload import Workload


def warnings(
    prepared: Prepared, step_time: Seconds, tried: Callable[[Strategy], Seconds]
) -> tuple[str, ...]:
    """A line on a prefetch budget that is smaller than some blocks, whose gathers are then exposed.

    `tried` is the step time of another strategy, by simulation.
    """
    job, layout = prepared.job.share, prepared.layout
    found = _ahead(prepared.strategy, job, layout)
    if not found:
        return ()
    given_as, budget, better, options = found
    blocks = job.model.blocks
    largest = max(blocks, key=lambda block: block.parameters)
    over = sum(block.parameters > budget for block in blocks)
    samples = layout.world_size * job.samples_per_gpu * job.model.tokens
    given, instead = (f"{samples / time:,.0f}" for time in (step_time, tried(better)))
    speed = f"{job.model.unit}s/s"
    gain = f"gives {instead} {speed} instead of {given}"
    if instead == given:
        gain = f"gives no more than these {given} {speed}"
    line = (
        f"{given_as}{budget}: that prefetch budget is less than {over} of"
        f" {counted(len(blocks), 'block')} need ({largest.name} has"
        f" {counted(largest.parameters, 'parameter')}), so these are gathered only when they are"
        f" needed; {options} {gain}"
    )
    return (line,)


def _ahead(
    strategy: Strategy, job: Workload, layout: Layout
) -> tuple[str, int, Strategy, str] | None:
    """The budget that is too small, a strategy that gathers every block ahead, and its options."""
    sizes = [block.parameters for block in job.model.blocks]
    largest = max(sizes)
    if isinstance(strategy, Zero3 | ZeroPP):
        if layout.world_size == 1 or largest <= strategy.prefetch:
            return None
        both = max((one + other for one, other in pairwise(sizes)), default=largest)
        options = {"prefetch": str(largest)}
        if both > strategy.max_live:
            options["max_live"] = str(both)
        text = ",".join(f"{name}={value}" for name, value in options.items())
        return "prefetch=", strategy.prefetch, with_options(strategy, options), text
    if not isinstance(strategy, LocalSteps):
        return None
    budget, ranks = Zero3().prefetch, Replica.of(strategy).ranks(layout)
    if ranks == 1 or strategy.inner != "zero3" or largest <= budget:
        return None
    better = with_options(strategy, {"inner": "fsdp"})
    return "inner=zero3 has prefetch=", budget, better, "inner=fsdp"
