"""Which of two strategies is faster: where the measured order is not the predicted one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from scipy.special import stdtrit

from analysis.measured.comparison import RunComparison
from co2sim.common.units import percent
from co2sim.simulation.metrics import round_times

_TIE = 0.006
"""Predicted speeds that differ by less are equal: the median error of a round in a lab with kernels
that sleep (`benchmarks/results/fidelity-sleep.md`)."""


@dataclass(frozen=True, slots=True)
class OrderError:
    """Two runs of which the one that was predicted to be faster took longer for a step.

    `predicted` is by which part of the speed of `second` the run `first` was predicted to be
    faster, `measured` the same as measured, below 0. `low` and `high` are the ends of its 95 %
    interval, from how rounds of one run differ; None where a run has a single round.
    """

    first: str
    second: str
    predicted: float
    measured: float
    low: float | None
    high: float | None

    @property
    def certain(self) -> bool:
        """Whether the noise of rounds alone does not explain the measured order."""
        return self.high is not None and self.high < 0

    @property
    def sentence(self) -> str:
        """It in words."""
        if self.low is None or self.high is None:
            noise = "one round does not say how much is noise"
        else:
            ends = f"95 % interval of the rounds: {percent(self.low, 1)} to {percent(self.high, 1)}"
            noise = ends if self.certain else f"within the noise of the rounds, {ends}"
        return (
            f"{'order reversed' if self.certain else 'order not certain'}: a step of {self.first}"
            f" was predicted {self.predicted:.1%} faster than one of {self.second}, and measured"
            f" {-self.measured:.1%} slower ({noise})"
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {**asdict(self), "certain": self.certain}


def order_errors(named: Sequence[tuple[str, RunComparison]]) -> list[OrderError]:
    """All pairs of runs of one question whose order is not as predicted, the certain ones first."""
    found: list[OrderError] = []
    for one, other in combinations(named, 2):
        if _question(one[1]) != _question(other[1]):
            continue
        first, second = sorted((one, other), key=lambda pair: pair[1].step_times[0])
        found += _reversed(first, second)
    return sorted(found, key=lambda error: (not error.certain, error.measured))


def _question(run: RunComparison) -> tuple[object, ...]:
    """What two runs must share, or the time of a step says nothing of their strategies."""
    case, figures = run.record.case, run.predicted
    batch = figures.tokens_per_gpu_per_step, figures.precision
    return case.load()[1].value, run.record.trace.layout, *batch, run.record.kernels


def _reversed(
    first: tuple[str, RunComparison], second: tuple[str, RunComparison]
) -> Iterator[OrderError]:
    """The error of a pair, if it is one: `first` is predicted to be the faster."""
    (here, measured), (here_second, measured_second) = first[1].step_times, second[1].step_times
    predicted, ratio = here_second / here - 1, measured_second / measured
    if predicted < _TIE or ratio >= 1:
        return
    low, high = None, None
    if (reach := _reach(first[1], second[1])) is not None:
        low, high = (ratio * math.exp(sign * reach) - 1 for sign in (-1, 1))
    yield OrderError(first[0], second[0], predicted, ratio - 1, low, high)


def _reach(*runs: RunComparison) -> float | None:
    """Of a 95 % interval of the logarithm of the ratio of two means (Welch); None for one round."""
    parts, freedom = [], []
    for run in runs:
        times = round_times(run.record.trace, run.schedule, run.record.rounds)
        if len(times) == 1:
            return None
        parts.append(times.var(ddof=1) / len(times) / times.mean() ** 2)
        freedom.append(len(times) - 1)
    whole = sum(parts)
    if not whole:
        return 0.0
    shares = sum(part**2 / free for part, free in zip(parts, freedom, strict=True))
    return float(stdtrit(whole**2 / shares, 0.975) * math.sqrt(whole))
