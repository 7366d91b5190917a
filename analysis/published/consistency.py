"""What CO2's published cells say of each other, without a simulator.

First: a ratio of two sizes, and the throughput at the larger, imply the throughput at the smaller.
If all communication between nodes is hidden, the throughput per GPU is the same at both sizes, and
in a single node.

Second: a lower bound of the scalability ratio. Assume that

- all runs have equal tokens per GPU and step;
- no GPU is faster than the fastest published;
- the average of a round takes at most as long as a whole step of data parallelism on as many GPUs
  (which also moves the model's bytes twice, and computes);
- the average is hidden behind the local steps.

Then a round of tau steps takes at most the longer of one such step and of tau local steps. A
published ratio below the bound contradicts one of the assumptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.published.cells import Cell
from analysis.published.sensitivity import GROUP
from co2sim.strategies.local import LocalSteps, round_steps


@dataclass(frozen=True, slots=True)
class RatioLowerBound:
    """The lower bound of a ratio, from published throughputs, and what a lower ratio implies.

    `stretch` is the least fraction by which a round takes longer than a whole step of data
    parallelism, if the published ratio is right; its rounding is taken into account.
    """

    cell: Cell
    bound: float
    stretch: float


@dataclass(frozen=True, slots=True)
class ImpliedSpeeds:
    """Tokens per second and GPU at both sizes of a ratio cell, and in a single node.

    `large` and `single` are published, `small` follows from the ratio.
    """

    cell: Cell
    single: float
    small: float
    large: float

    @property
    def small_gpus(self) -> int:
        """GPUs of the smaller run."""
        return self.cell.over[0].setup.gpus

    @property
    def large_gpus(self) -> int:
        """GPUs of the larger run."""
        return self.cell.setup.gpus


def implied_speeds(cells: Sequence[Cell]) -> list[ImpliedSpeeds]:
    """Of CO2's ratios whose throughput at the larger size is published too."""
    here = [cell for cell in cells if cell.group == GROUP]
    speeds = {cell.terms: cell.published / _gpus(cell) for cell in here if not cell.over}
    single = [cell for cell in here if not cell.over and _nodes(cell) == 1]
    return [
        ImpliedSpeeds(
            cell,
            speeds[single[0].terms],
            speeds[cell.terms] / cell.published,
            speeds[cell.terms],
        )
        for cell in here
        if cell.over and _tau(cell) and cell.terms in speeds and single
    ]


def ratio_lower_bounds(cells: Sequence[Cell]) -> list[RatioLowerBound]:
    """Those of CO2's published scalability ratios that lie below their lower bound."""
    here = [cell for cell in cells if cell.group == GROUP]
    speeds = [cell for cell in here if not cell.over]
    fastest = max((cell.published / _gpus(cell) for cell in speeds), default=0.0)
    found = []
    for cell in here:
        tau = _tau(cell)
        same = [one for one in speeds if _gpus(one) == _gpus(cell)]
        steps = [one.published / _gpus(one) for one in same if _tau(one)]
        whole = [one.published / _gpus(one) for one in same if not _tau(one)]
        if cell.over and tau and steps and whole:
            bound = min(tau * whole[0], *steps) / fastest
            most = cell.published + cell.rounding / 2
            if most < bound:
                stretch = tau * whole[0] / (most * fastest) - 1
                found.append(RatioLowerBound(cell, bound, stretch))
    return found


def _gpus(cell: Cell) -> int:
    return cell.setup.gpus


def _nodes(cell: Cell) -> int:
    return cell.setup.used_cluster().nodes


def _tau(cell: Cell) -> int:
    """Local steps of a round; 0 of data parallelism."""
    strategy = cell.setup.strategy
    return round_steps(strategy) if isinstance(strategy, LocalSteps) else 0
