"""What CO2's published cells say of each other, without a simulator.

If the average of a round takes at most as long as a whole step of data parallelism on as many GPUs,
which moves as many bytes and computes, too, and hides behind the steps, then a round of tau steps
takes at most the longer of that step and of tau steps. A scalability ratio below what follows from
this says that the average took longer, or that not all of it was hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.published import Cell
from co2sim.strategies import parse

GROUP = "a100-co2"


@dataclass(frozen=True, slots=True)
class Least:
    """The least ratio that the cells of throughput leave room for, and what a lower one implies.

    `stretch` is by how much, as a fraction, a round has to take longer than a whole step of data
    parallelism for the published ratio.
    """

    cell: Cell
    least: float
    stretch: float


def least_ratios(cells: Sequence[Cell]) -> list[Least]:
    """The published scalability ratios of CO2 that its published throughputs contradict."""
    here = [cell for cell in cells if cell.group == GROUP]
    speeds = [cell for cell in here if not cell.over]
    fastest = max(cell.published / _gpus(cell) for cell in speeds)
    found = []
    for cell in here:
        tau = _tau(cell)
        same = [one for one in speeds if _gpus(one) == _gpus(cell)]
        steps = [one.published / _gpus(one) for one in same if _tau(one)]
        whole = [one.published / _gpus(one) for one in same if not _tau(one)]
        if cell.over and tau and steps and whole:
            slowest = min(tau * whole[0], *steps)
            least = slowest / fastest
            if cell.published < least:
                found.append(Least(cell, least, tau * whole[0] / (cell.published * fastest) - 1))
    return found


def _gpus(cell: Cell) -> int:
    return cell.terms[0].setup.gpus


def _tau(cell: Cell) -> int:
    """Local steps of a round; 0 of data parallelism."""
    return int(getattr(parse(cell.terms[0].setup.strategy), "tau", 0))
