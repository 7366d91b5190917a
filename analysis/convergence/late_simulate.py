"""Runs whose averages are used some local steps after their launch, without a restart.

Source: docs/theory.md, the late average.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.lateness import Late
from analysis.convergence.objectives.problems import Array, Problem, Sampler
from analysis.convergence.steps import InnerSteps, OuterUpdate
from analysis.convergence.variants import Outcome, RunSize, Variants


class LateRuns:
    """The state of a run: workers, their anchor, and the average that travels.

    `points` are the workers, [C, S, G, d]; `anchor` and `mean` are [C, S, d].
    """

    def __init__(
        self,
        problem: Problem,
        which: Variants,
        size: RunSize,
        sampler: Sampler,
        seed: int | Sequence[int],
        apart: bool,  # noqa: FBT001
    ) -> None:
        assert size.late_steps is not None
        self.arrival = size.late_steps
        lates = [
            Late(steps=self.arrival, keep=float(keep), predict=float(predict))
            for keep, predict in zip(which.keep, which.predict, strict=True)
        ]
        self.size, self.which = size, which
        self.rng = np.random.default_rng(seed)
        self.local = InnerSteps(problem, sampler, which, size.workers, size.local_steps)
        self.outer = OuterUpdate(which, size.seeds, len(problem.start))
        shape = (len(which), size.seeds, len(problem.start))
        self.anchor: Array = np.broadcast_to(problem.start, shape).copy()
        self.mean = self.anchor
        self.points = np.repeat(self.anchor[:, :, None, :], size.workers, axis=2)
        self.shape = ((len(which),) if apart else ()) + (size.seeds, size.workers)
        self.counted = np.array([late.counted(size.local_steps) for late in lates])
        self.carried = np.array([late.carried(size.local_steps) for late in lates])[:, None, None]
        self.launched: tuple[Array, Array] | None = None
        self.done = 0

    def next_round(self) -> None:
        """Take the local steps of a round, use what arrives between them, launch at the end."""
        steps = self.size.local_steps
        drawn: NDArray[np.float64] = self.local.sampler.draw(self.rng, (steps, *self.shape))
        early = self.which.keep[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(steps):
                if k == self.arrival:
                    self._arrive()
                weight = early if k < self.arrival else 1.0
                self.mean = self.local.step(self.points, self.mean, drawn[k], weight)
            if self.arrival == steps:
                self._arrive()
            self.launched = (self.points.copy(), self.anchor - self.mean)
        self.done += 1

    def _arrive(self) -> None:
        """Move the anchor, and the workers with it: they keep a part of what they did meanwhile."""
        if self.launched is None:
            return
        left, moved = self.launched
        self.anchor = self.outer.step(self.anchor, moved / self.local.size[:, :, 0])
        ahead = self.anchor - self.carried * moved
        kept = self.which.keep[:, None, None, None] * (self.points - left)
        self.points = ahead[:, :, None, :] + kept
        self.mean = np.asarray(self.points.mean(axis=2))

    def outcome(self) -> Outcome:
        """What was measured until here; `final` is the last mean of the workers."""
        local, outer, shape = self.local, self.outer, self.mean.shape[:2]
        counted = (self.done * self.counted)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            value = local.problem.value(self.mean)
        return Outcome(
            gradient=np.broadcast_to(local.gradient / counted, shape).copy(),
            drift=np.broadcast_to(local.drift / counted, shape).copy(),
            value=value,
            spread=local.spread,
            variance=local.variance,
            clipped=outer.clipped / max(1, self.done - 1),
            penalty=outer.penalty,
            final=self.mean,
        )
