"""Pipeline parallelism: the order in which stages run micro-batches, and how long that takes.

1F1B: after a warm-up a stage runs a forward and a backward pass in turn, so that it holds few
micro-batches (Narayanan et al. 2019, PipeDream; Narayanan et al. 2021, arXiv 2104.04473, section
2.2). Interleaved: a stage has several chunks of layers, and passes are as much shorter while the
pipeline fills. The order is that of Megatron-LM (megatron/core/pipeline_parallel/schedules.py).

Times are the longest path through all passes: a pass starts when the one before it on its stage
has ended, and what it needs has come from another stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from co2sim.errors import OptionError
from co2sim.units import Seconds

MOST_PASSES = 2_000_000
"""Of all stages in a step: seconds of computing."""


class StagePass(NamedTuple):
    """A forward or a backward pass of a micro-batch over a chunk of a stage's layers."""

    backward: bool
    chunk: int
    micro: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` with `chunks` of layers each, and the micro-batches of a step.

    Raises OptionError for what the order does not allow, and for too many passes.
    """

    stages: int
    chunks: int
    micros: int

    def __post_init__(self) -> None:
        """Refuse micro-batches that interleaved stages cannot take in turn."""
        passes = 2 * self.stages * self.chunks * self.micros
        if passes > MOST_PASSES:
            raise OptionError(
                f"pp={self.stages}, interleave={self.chunks} and {self.micros:,} micro-steps are"
                f" {passes:,} passes in a step; at most {MOST_PASSES:,} are simulated"
            )
        if self.chunks > 1 and self.micros % self.stages:
            raise OptionError(
                f"interleave={self.chunks} needs micro-steps in multiples of pp={self.stages}, and"
                f" a step has {self.micros}; give accumulation or global_batch"
            )

    def warm_up(self, stage: int) -> int:
        """Forward passes before the first backward pass of a stage."""
        later = self.stages - 1 - stage
        if self.chunks > 1:
            later = 2 * later + (self.chunks - 1) * self.stages
        return min(later, self.chunks * self.micros)

    def held(self, stage: int) -> int:
        """Passes whose activations a stage holds at its peak."""
        return min(self.warm_up(stage) + 1, self.chunks * self.micros)

    def order(self, stage: int) -> list[StagePass]:
        """The passes of a stage in turn."""
        forward, backward = (self._of(way) for way in (False, True))
        before = self.warm_up(stage)
        found = forward[:before]
        for one, other in zip(forward[before:], backward, strict=False):
            found += [one, other]
        return found + backward[len(forward) - before :]

    def _of(self, backward: bool) -> list[StagePass]:  # noqa: FBT001
        """All passes in one direction: as many micro-batches as stages on each chunk in turn."""
        group = min(self.stages, self.micros) if self.chunks > 1 else self.micros
        chunks = range(self.chunks)
        return [
            StagePass(backward, chunk, micro)
            for first in range(0, self.micros, group)
            for chunk in (reversed(chunks) if backward else chunks)
            for micro in range(first, first + group)
        ]


def ends(
    pipeline: Pipeline,
    forward: Sequence[Sequence[Seconds]],
    backward: Sequence[Sequence[Seconds]],
    between: Seconds,
) -> list[Seconds]:
    """When each stage ends its last pass; passes take `forward[stage][chunk]`, and `backward`.

    `between` passes from the end of a pass until another stage has what it made.
    """
    last = pipeline.stages - 1, pipeline.chunks - 1
    done: dict[tuple[int, StagePass], Seconds] = {}
    orders = [pipeline.order(stage) for stage in range(pipeline.stages)]
    place, free = [0] * pipeline.stages, [0.0] * pipeline.stages
    waiting: dict[tuple[int, StagePass], int] = {}
    ready = list(range(pipeline.stages))
    while ready:
        stage = ready.pop()
        while place[stage] < len(orders[stage]):
            one = orders[stage][place[stage]]
            needed = _needed(stage, one, last)
            start = free[stage]
            if needed:
                if needed not in done:
                    waiting[needed] = stage
                    break
                start = max(start, done[needed] + between * (needed[0] != stage))
            took = (backward if one.backward else forward)[stage][one.chunk]
            free[stage] = done[stage, one] = start + took
            place[stage] += 1
            if (stage, one) in waiting:
                ready.append(waiting.pop((stage, one)))
    assert all(at == len(order) for at, order in zip(place, orders, strict=True))
    return free


def _needed(stage: int, one: StagePass, last: tuple[int, int]) -> tuple[int, StagePass] | None:
    """The pass of another stage, or of the other direction, that a pass needs."""
    stages, _ = last
    if not one.backward:
        if stage:
            return stage - 1, one
        return (stages, one._replace(chunk=one.chunk - 1)) if one.chunk else None
    if (stage, one.chunk) == last:
        return stage, one._replace(backward=False)
    if stage < stages:
        return stage + 1, one
    return 0, one._replace(chunk=one.chunk + 1)
