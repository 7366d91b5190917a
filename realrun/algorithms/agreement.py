"""What must stay equal while workers train, and what is said where it does not."""

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from realrun.algorithms.links import Links
from realrun.algorithms.optimizers import rates
from realrun.algorithms.outer_loop import OuterLoop, mark_of
from realrun.errors import MismatchError


def refuse_different_inside(outer: OuterLoop, links: Links) -> None:
    """Raise MismatchError where ranks of a worker hold different replicas: each sends a share."""
    parts = list(outer.flat.replicas())
    if parts and not links.same_inside(mark_of(*parts)):
        raise MismatchError(
            f"after round {outer.counters.round} the ranks of a worker,"
            f" {links.workers.inner_ranks}, hold different parameters: wrap the model in"
            " DDP or FSDP2 over Workers.per_node().inner, or take worker='gpu'"
        )


def refuse_drift(outer: OuterLoop, links: Links) -> None:
    """Raise MismatchError that names the ranks whose anchor differs from that of most."""
    drifted = links.drifted(mark_of(outer.state.anchor))
    (count,) = links.total([len(drifted)])
    if count:
        who = f"ranks {drifted}" if drifted else "ranks of other shards"
        last = outer.counters.round - 1
        raise MismatchError(f"after round {last} the anchor of {who} is not that of the others")


def say_different_rates(optimizers: Sequence[Optimizer], links: Links) -> None:
    """Warn where workers begin with different learning rates. All ranks call this."""
    own = rates(optimizers)
    for rank, other in zip(links.workers.peer_ranks, links.of_peers(own), strict=True):
        if other != own:
            warnings.warn(
                f"rank {rank} begins with the learning rates {other}, this rank with {own}: the"
                " average weights workers alike, so those with larger ones count for more",
                stacklevel=4,
            )
            return
