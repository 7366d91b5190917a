"""Memory of a strategy at the moments of a step."""

from co2sim.schedule.schedule import Layout
from co2sim.strategies import parse
from co2sim.training.memory import Timeline, timeline
from co2sim.training.workload import Workload

ALONE = Layout(1, 1)


def line(
    job: Workload, strategy: str = "ddp", layout: Layout = ALONE, micro_batches: float = 1.0
) -> Timeline:
    """What a GPU holds while it trains so."""
    share = job.share
    return timeline(share, parse(strategy).memory(share, layout), micro_batches)


def most(job: Workload, strategy: str = "ddp", layout: Layout = ALONE) -> dict[str, float]:
    """The most of each item, in bytes, whenever that is."""
    found = line(job, strategy, layout)
    return {name: found.most(name) for name in found.items}


def passing(job: Workload, micro_batches: float = 1.0) -> Timeline:
    """What passes alone need: nothing that a strategy holds."""
    return timeline(job.share, {}, micro_batches)


def peak(job: Workload, strategy: str = "ddp", layout: Layout = ALONE) -> float:
    """Bytes of the fullest moment."""
    return float(line(job, strategy, layout).total.max())
