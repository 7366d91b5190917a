"""The effect of penalty and clipping, for steps up to and beyond the edge of stability."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.setting import RunSize, Variants, variants
from analysis.convergence.simulate import run

_SIGMA2 = 1.0
_CLIPS = (8.0, 2.0, 0.5)
_PENALTIES = (1.0, 2.0, 4.0)
_LOADS = (0.2, 0.4, 0.8, 1.2, 1.6)
"""gamma L tau of the runs that penalty and clipping may rescue."""
_STEPS = 16
_CEILING = 1e300
"""Stands for every larger value, and for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueTask:
    """To measure A with several penalties and clips."""

    family: str
    delay: int
    seeds: int
    rounds: int

    @property
    def work(self) -> float:
        """About how many local steps it takes."""
        return self.rounds * _STEPS

    def measure(self) -> "RescueCell":
        """Measure it for every step and rule."""
        problem = FAMILIES[self.family](8)
        rules = _rules(self.delay)
        cases = [(load, *rule) for load in _LOADS for rule in rules]
        load, penalty, clip, aware = (np.array(part) for part in zip(*cases, strict=True))
        which = variants(
            load / _STEPS / problem.smoothness,
            outer_step=1.0,
            momentum=0.5,
            penalty=penalty,
            clip=clip,
            noise=_SIGMA2,
            gap_aware=aware,
        )
        size = RunSize(
            workers=8,
            rounds=self.rounds,
            local_steps=_STEPS,
            seeds=self.seeds,
            delay=self.delay,
        )
        outcome = run(problem, which, size, seed=9)
        first = float((problem.gradient(problem.start) ** 2).sum())
        with np.errstate(invalid="ignore"):
            measured = np.nan_to_num(outcome.gradient.mean(axis=1), nan=np.inf, posinf=np.inf)
        lines = [
            RescueLine(
                load=case[0],
                rule=_rule(which, place),
                measured=min(float(measured[place]), _CEILING),
                clipped=float(outcome.clipped[place]),
                lost=bool(measured[place] > first),
            )
            for place, case in enumerate(cases)
        ]
        return RescueCell(self, first, tuple(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueLine:
    """A at one gamma L tau under a rule, the share of clipped elements, whether A grew."""

    load: float
    rule: str
    measured: float
    clipped: float
    lost: bool


@dataclass(frozen=True, slots=True)
class RescueCell:
    """All rules and steps; `first` is the squared gradient at the start."""

    task: RescueTask
    first: float
    lines: tuple[RescueLine, ...]
    kind: Literal["rescue"] = "rescue"


def _rules(delay: int) -> list[tuple[float, float, bool]]:
    """Penalty, clip, and whether the penalty is gap-aware."""
    rules = [(penalty, np.inf, False) for penalty in _PENALTIES]
    rules += [(1.0, clip, False) for clip in _CLIPS]
    return [*rules, (1.0, np.inf, True)] if delay else rules


def _rule(which: Variants, place: int) -> str:
    if which.gap_aware[place]:
        return "gap-aware penalty"
    if np.isfinite(which.clip[place]):
        return f"clip {which.clip[place]:g}"
    penalty = which.penalty[place]
    return "neither" if penalty == 1 else f"penalty {penalty:g}"
