"""The order of passes in the stages of a pipeline (1F1B), and when each stage has ended its own.

A stage with several chunks has every `pp`-th of all chunks (Narayanan et al. 2021, arXiv
2104.04473, section 2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds

_NOT_YET: Seconds = -1.0
MAX_PASSES = 2_000_000
"""Of all stages in a step: seconds of computing."""


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
        if passes > MAX_PASSES:
            raise OptionError(
                f"pp={self.stages}, interleave={self.chunks} and {self.micros:,} micro-steps are"
                f" {passes:,} passes in a step; at most {MAX_PASSES:,} are simulated"
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

    def microbatches_in_flight(self, stage: int) -> int:
        """Passes whose activations a stage holds at its peak."""
        return min(self.warm_up(stage) + 1, self.chunks * self.micros)

    def held(self, stage: int, counts: Sequence[int]) -> float:
        """The most of a stage's activations, in micro-batches; its chunks have `counts` layers."""
        if len(set(counts)) == 1:
            return self.microbatches_in_flight(stage) / self.chunks
        most = now = 0
        for number in self.order(stage):
            backward, part = divmod(number // self.micros, self.stages * self.chunks)
            now += counts[part // self.stages] * (1 - 2 * backward)
            most = max(most, now)
        return most / sum(counts)

    def order(self, stage: int) -> list[int]:
        """The numbers of the passes of a stage in turn.

        Parts of the layers are numbered in turn, all first chunks first: `part` is that of a chunk
        of a stage. A forward pass has the number part x micros + micro-batch, and a backward pass
        as many more as there are forward passes.
        """
        forward, backward = (self._of(stage, way) for way in (False, True))
        before = self.warm_up(stage)
        found = forward[:before]
        for pair in zip(forward[before:], backward, strict=False):
            found += pair
        return found + backward[len(forward) - before :]

    def _of(self, stage: int, backward: bool) -> list[int]:  # noqa: FBT001
        """All passes in one direction: as many micro-batches as stages on each chunk in turn."""
        group = min(self.stages, self.micros) if self.chunks > 1 else self.micros
        parts = range(stage, self.stages * self.chunks, self.stages)
        before = len(parts) * self.stages * self.micros if backward else 0
        return [
            before + part * self.micros + micro
            for first in range(0, self.micros, group)
            for part in (reversed(parts) if backward else parts)
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
    stages, micros = pipeline.stages, pipeline.micros
    parts = stages * pipeline.chunks
    took = [way[n % stages][n // stages] for way in (forward, backward) for n in range(parts)]
    # a pass waits for that of the part before or behind, the first backward pass for the forward
    away = [0, *[-micros] * (parts - 1), *[micros] * (parts - 1), -parts * micros]
    sent = [between if stages > 1 and abs(n) == micros else 0.0 for n in away[:-1]] + [0.0]
    ended = [_NOT_YET] * (2 * parts * micros)
    orders = [pipeline.order(stage) for stage in range(stages)]
    place, free = [0] * stages, [0.0] * stages
    there_and_back = [*range(stages), *range(stages - 2, 0, -1)]
    while any(at < len(order) for at, order in zip(place, orders, strict=True)):
        for stage in there_and_back:
            order, at, now = orders[stage], place[stage], free[stage]
            while at < len(order):
                number = order[at]
                part = number // micros
                if away[part]:
                    come = ended[number + away[part]]
                    if come < 0:
                        break
                    now = max(now, come + sent[part])
                now = ended[number] = now + took[part]
                at += 1
            place[stage], free[stage] = at, now
    return free
