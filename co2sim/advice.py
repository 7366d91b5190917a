"""What a result must not be read without: an option that holds the strategy back, and its price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from co2sim.result import Result
from co2sim.schedule import Layout
from co2sim.strategies import LocalSteps, Strategy, with_options
from co2sim.strategies.local import Replica
from co2sim.strategies.zero3 import Zero3
from co2sim.strategies.zeropp import ZeroPP
from co2sim.units import Seconds, counted
from co2sim.workload import Block

_LEAST_GAIN = 1e-3
"""Of the speed: what a warning must be worth."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """What keeps blocks from being gathered ahead, in words, and a strategy without it."""

    words: str
    better: Strategy
    options: str


def warnings(
    strategy: Strategy,
    parts: Sequence[Sequence[Block]],
    layout: Layout,
    result: Result,
    tried: Callable[[Strategy], Seconds],
) -> tuple[str, ...]:
    """A line on a budget that is smaller than some blocks, whose gathers are then exposed.

    `parts` are the blocks of each stage of a pipeline, or all of them; `layout` is that of data
    parallelism. `tried` is the step time of another strategy, by simulation. Where that gains
    nothing there is no line.
    """
    limit = _limit(strategy, parts, layout)
    if limit is None:
        return ()
    gain = result.step_time_s / tried(limit.better)
    if gain < 1 + _LEAST_GAIN:
        return ()
    given, instead = (f"{result.tokens_per_s * times:,.0f}" for times in (1, gain))
    line = (
        f"{limit.words}, so these are gathered only when they are needed; {limit.options} gives"
        f" {instead} {result.unit}s/s instead of {given}"
    )
    return (line,)


def _limit(strategy: Strategy, parts: Sequence[Sequence[Block]], layout: Layout) -> _Limit | None:
    """The limit that is too small, if there is one."""
    if isinstance(strategy, Zero3 | ZeroPP):
        return None if layout.world_size == 1 else _of_options(strategy, parts)
    if not isinstance(strategy, LocalSteps) or strategy.inner != "zero3":
        return None
    budget = Zero3().prefetch
    if Replica.of(strategy).ranks(layout) == 1 or _largest(parts).parameters <= budget:
        return None
    words = _prefetch_words(f"inner=zero3 has prefetch={budget}", budget, parts)
    return _Limit(words, with_options(strategy, {"inner": "fsdp"}), "inner=fsdp")


def _of_options(strategy: Zero3 | ZeroPP, parts: Sequence[Sequence[Block]]) -> _Limit | None:
    """The smaller of its two budgets: for what is ahead, and for all that is present."""
    largest = _largest(parts).parameters
    pairs = [pair for blocks in parts for pair in pairwise(blocks)]
    most = max(map(_together, pairs), default=largest)
    options = {"prefetch": largest} if largest > strategy.prefetch else {}
    options |= {"max_live": most} if most > strategy.max_live else {}
    if not options:
        return None
    if "prefetch" in options:
        words = _prefetch_words(f"prefetch={strategy.prefetch}", strategy.prefetch, parts)
    else:
        words = _live_words(strategy.max_live, pairs)
    better = with_options(strategy, {name: str(value) for name, value in options.items()})
    return _Limit(words, better, ",".join(f"{name}={value}" for name, value in options.items()))


def _prefetch_words(given: str, budget: int, parts: Sequence[Sequence[Block]]) -> str:
    sizes = [block.parameters for blocks in parts for block in blocks]
    largest = _largest(parts)
    return (
        f"{given}: that prefetch budget is less than {sum(size > budget for size in sizes)} of"
        f" {counted(len(sizes), 'block')} need ({largest.name} has"
        f" {counted(largest.parameters, 'parameter')})"
    )


def _live_words(limit: int, pairs: Sequence[tuple[Block, Block]]) -> str:
    one, other = max(pairs, key=_together)
    over = sum(_together(pair) > limit for pair in pairs)
    return (
        f"max_live={limit}: that limit is less than {over} of {counted(len(pairs), 'block')} need"
        f" beside the one before ({one.name} and {other.name} have"
        f" {counted(_together((one, other)), 'parameter')})"
    )


def _largest(parts: Sequence[Sequence[Block]]) -> Block:
    return max((block for blocks in parts for block in blocks), key=lambda one: one.parameters)


def _together(pair: tuple[Block, Block]) -> int:
    return pair[0].parameters + pair[1].parameters
