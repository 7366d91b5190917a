"""How ranks that divide parameters update them by an optimizer that needs whole matrices.

Muon's update of a matrix needs all of its momentum. What published implementations exchange for it
is a `Way`; the momentum itself, and the parameters, are changed element by element before and
after. Tensor-parallel ranks work on their parts alone: `--muon-tp-mode blockwise`, the default of
Megatron-LM. A rank without others, and each of those that replicate parameters, does all the work:
torch 2.13, torch/optim/_muon.py, under DistributedDataParallel.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import After, Collective, Compute, DType, Group, Kind, Op
from co2sim.training.optimizer import Matrix
from co2sim.training.workload import Workload


@dataclass(frozen=True, slots=True)
class Way:
    """Exchanges of all matrices, in 16 bits: of a `kind`, `before` the work and `behind` it.

    A rank works on matrices that it takes in turn; with `parts` on all that it has a part of.
    """

    kind: Kind = Kind.ALL_GATHER
    before: int = 0
    behind: int = 0
    parts: bool = False


OWNED = Way()
"""A rank owns whole matrices with their states, so that gradients are reduced to it and parameters
gathered from it as they are without. Source: Megatron-LM, megatron/core/optimizer/
layer_wise_optimizer.py, LayerWiseDistributedOptimizer."""

GATHERED = Way(before=1, parts=True)
"""Ranks own flat shares, and gather the rest of the matrices that they have a part of; each updates
its part. Source: Liu et al. 2025, Muon is scalable for LLM training, arXiv 2502.16982, section 2.3,
Distributed Muon. It gathers what it needs; here all ranks gather all, as one collective."""

DIVIDED = Way(before=2, behind=2)
"""Gradients and momentum are gathered; updates and momentum are, behind the work. Source:
DeepSpeed, deepspeed/runtime/zero/stage3.py, `_muon_update_sub_group` (pull requests 7919, 8600)."""

EXCHANGED = Way(Kind.ALL_TO_ALL, before=1, behind=1)
"""An all-to-all makes one matrix of each batch whole on each rank, and another brings its update
back. Batches are of equal shape, and filled up. Source: microsoft/dion, dion/muon.py,
`muon_update_batch_async`, which overlaps up to three batches: not modelled."""


@dataclass(frozen=True, slots=True)
class Division:
    """Who divides matrices, on which stream they exchange them, and how.

    Experts are divided among `replicas` of them; None: a rank is alone with its own.
    """

    way: Way
    among: Group
    ranks: int
    replicas: Group | None
    stream: str


def check_shapes(job: Workload, who: str, *, owned: bool = False, flat: bool = True) -> None:
    """Refuse an optimizer that cannot work on the shares of a strategy.

    These are `flat`, without rows and columns; or whole tensors, which ranks have `owned`. Raises
    OptionError.
    """
    optimizer = job.optimizer
    if optimizer.owned_whole and not owned:
        raise OptionError(
            f"optimizer={optimizer.name} keeps states of whole matrices, which {who} divides; use"
            " ddp, zero1 or zero2"
        )
    if optimizer.factored and flat and not owned:
        raise OptionError(
            f"optimizer={optimizer.name} keeps factors of rows and columns, which the flat shares"
            f" of {who} do not have; use ddp, or fsdp with version=2"
        )


def refuse_whole(job: Workload, who: str) -> None:
    """Refuse an optimizer that needs whole matrices. Raises OptionError."""
    check_shapes(job, who)
    if job.optimizer.needs_whole:
        raise OptionError(
            f"optimizer={job.optimizer.name} needs whole matrices, for which no exchange is known"
            f" with {who}; use ddp, zero1, zero2, zero3, or fsdp with version=2"
        )


def whole_matrices(job: Workload, division: Division | None, stream: str) -> list[Op]:
    """What follows the optimizer's work on elements: exchanges, and work on `stream` of passes."""
    works: list[Compute] = []
    exchanges: list[Collective] = []
    for name, tensors in (("matrices", job.update.dense), ("experts", job.update.experts)):
        taken = [matrix for matrix in tensors.matrices if job.optimizer.of(matrix)]
        group, ranks = _among(job, division, name)
        work = job.update.products(_alike(taken))
        if not work.flops:
            continue
        if division and group and ranks > 1:
            work = _part(job, division.way, taken, ranks)
            exchanges.append(_exchange(job, division.way, name, taken, group, ranks))
        works.append(work)
    way, on = (division.way, division.stream) if division else (OWNED, stream)
    ops: list[Op] = []
    last, where = "optimizer", stream

    def add(name: str, made: Sequence[Compute | Collective], on: str) -> None:
        nonlocal last, where
        for number, work in enumerate(made):
            waits = (After(last),) if on != where else ()
            last, where = f"{name}{number}", on
            ops.append(Op(last, work, on, waits))

    add("whole", exchanges * way.before, on)
    add("matrices", works, stream)
    add("updates", exchanges * way.behind, on)
    return ops


def _among(job: Workload, division: Division | None, name: str) -> tuple[Group | None, int]:
    if division is None:
        return None, 1
    if name == "experts":
        return division.replicas, job.expert_replicas(division.ranks)
    return division.among, division.ranks


def _alike(matrices: Sequence[Matrix], ranks: int = 1) -> list[Matrix]:
    """Those of a shape together, as many as one of `ranks` takes at most."""
    counts: Counter[tuple[int, int]] = Counter()
    for matrix in matrices:
        counts[matrix.rows, matrix.columns] += matrix.count
    return [Matrix(*shape, -(-count // ranks)) for shape, count in counts.items()]


def _part(job: Workload, way: Way, matrices: Sequence[Matrix], ranks: int) -> Compute:
    """The work of the busiest of `ranks`."""
    if not way.parts:
        return job.update.products(_alike(matrices, ranks))
    return job.update.products(_alike(matrices), _busiest(job, matrices, ranks))


def _busiest(job: Workload, matrices: Sequence[Matrix], ranks: int) -> float:
    """The FLOP of the matrices that a flat share lies in, at most, relative to those of all."""
    counts = [matrix.count for matrix in matrices]
    sizes = [matrix.rows * matrix.columns for matrix in matrices]
    single = [job.update.products([replace(matrix, count=1)]) for matrix in matrices]
    ends = np.cumsum(np.repeat(np.array(sizes, float), counts))
    flops = np.cumsum(np.repeat([work.flops for work in single], counts))
    done = np.concatenate(([0.0], flops))
    cuts = np.rint(np.linspace(0.0, ends[-1], ranks + 1))
    first = np.searchsorted(ends, cuts[:-1], side="right")
    last = np.searchsorted(ends, cuts[1:], side="left")
    return float(max(done[np.minimum(last + 1, len(flops))] - done[first]) / done[-1])


def _exchange(
    job: Workload, way: Way, name: str, matrices: Sequence[Matrix], group: Group, ranks: int
) -> Collective:
    """All matrices; of an all-to-all those that a rank takes, which may be filled up."""
    taken = _alike(matrices, ranks if way.kind is Kind.ALL_TO_ALL else 1)
    dtype = job.precision if job.precision.bytes < DType.FP32.bytes else DType.BF16
    return Collective(way.kind, name, sum(one.elements for one in taken), dtype, group)
