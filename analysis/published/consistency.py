"""What CO2's published cells say of each other, without a simulator.

First: a ratio of two sizes, and the throughput at the larger, imply that at the smaller. Where all
communication between nodes is hidden, a GPU is as fast at both, and in a single node.

Second: assume that runs have equal tokens per GPU and step, that the average of a round takes at
most as long as a whole step of data parallelism on as many GPUs, which computes and moves a model's
worth of bytes twice, too, that it hides behind the steps, and that no GPU is faster than the
fastest published. Then a round of tau steps takes at most the longer of that step and of tau steps,
and a scalability ratio has a least value. A published one below it says that an assumption is
wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.published.parameters import cluster_of
from analysis.published.predict import Cell
from analysis.published.sensitivity import GROUP
from co2sim.strategies import parse


@dataclass(frozen=True, slots=True)
class Least:
    """The least ratio that the cells of throughput leave room for, and what a lower one implies.

    `stretch` is by how much, as a fraction, a round has to take longer than a whole step of data
    parallelism for the published ratio, rounded down as far as it may have been.
    """

    cell: Cell
    least: float
    stretch: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second and GPU that a ratio cell and its throughput say, beside a single node's.

    `large` is published, `small` follows from the ratio.
    """

    cell: Cell
    single: float
    small: float
    large: float


def hidden_speeds(cells: Sequence[Cell]) -> list[Speeds]:
    """Of CO2's ratios of which the throughput at the larger size is published, too."""
    here = [cell for cell in cells if cell.group == GROUP]
    speeds = {cell.terms: cell.published / _gpus(cell) for cell in here if not cell.over}
    single = [cell for cell in here if not cell.over and _nodes(cell) == 1]
    return [
        Speeds(
            cell,
            speeds[single[0].terms],
            speeds[cell.terms] / cell.published,
            speeds[cell.terms],
        )
        for cell in here
        if cell.over and _tau(cell) and cell.terms in speeds and single
    ]


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
            most = cell.published + cell.rounding / 2
            if most < least:
                found.append(Least(cell, least, tau * whole[0] / (most * fastest) - 1))
    return found


def _gpus(cell: Cell) -> int:
    return cell.terms[0].setup.gpus


def _nodes(cell: Cell) -> int:
    setup = cell.terms[0].setup
    return cluster_of(setup.cluster, setup.overrides).resized(setup.gpus).nodes


def _tau(cell: Cell) -> int:
    """Local steps of a round; 0 of data parallelism."""
    return int(getattr(parse(cell.terms[0].setup.strategy), "tau", 0))
