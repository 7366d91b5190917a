"""What every rank adds to the checkpoint of another library: workers hold different models.

A folder as `realrun train` writes it: tensors as safetensors, and all else as JSON, which holds the
checksums of all files. Nothing that is read can run code.
"""

import warnings
from pathlib import Path

import torch.distributed as dist
from torch import nn

from co2sim.common.units import counted
from realrun.algorithms import LocalUpdate
from realrun.algorithms.buffers import ExtraState
from realrun.algorithms.process_groups import DEADLINE, WorkerGroups, Workers
from realrun.errors import CheckpointError, DamagedError
from realrun.train import checkpoint
from realrun.train.checkpoint import run_on_all_ranks
from realrun.train.folder import STATE, Saved, shown

FOLDER = "local_updates"
"""In a checkpoint that is a folder."""


def save(folder: Path, algorithm: LocalUpdate) -> None:
    """Write what this rank holds: model, optimizers and algorithm. All ranks call it.

    Raises CheckpointError, the same on all ranks, when one cannot write.
    """
    rank, ranks = _me()
    state = {
        "model": dict(algorithm.model.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in algorithm.optimizers],
        "algorithm": next(iter(algorithm.state_dict().values())),
    }
    checkpoint.write(folder, state, {"ranks": ranks}, rank)


def load(folder: Path, algorithm: LocalUpdate) -> None:
    """Continue from what `save` wrote. All ranks call it.

    With another number of ranks they continue from the anchor, which a warning says. Raises
    CheckpointError, the same on all ranks, when a file is not as it was written or of another
    number of optimizers, and OptionError when it is of another run.
    """
    (rank, ranks), loaded = _me(), []

    def read() -> None:
        saved = Saved.of(folder)
        before = len(saved.states)
        state = checkpoint.read(folder, saved, rank if before == ranks else 0)
        try:
            model, optimizers, algorithm_state = (
                state[name] for name in ("model", "optimizers", "algorithm")
            )
            count = len(optimizers)
        except (LookupError, TypeError) as error:
            raise DamagedError(f"{STATE}: it is not that of an algorithm") from error
        if count != len(algorithm.optimizers):
            raise CheckpointError(
                f"it is of {counted(count, 'optimizer')}, and here are {len(algorithm.optimizers)}"
            )
        loaded.append((before, model, optimizers, algorithm_state))

    run_on_all_ranks(f"cannot read {shown(folder)}", read)
    ((before, model, optimizers, algorithm_state),) = loaded
    for optimizer, part in zip(algorithm.optimizers, optimizers, strict=True):
        optimizer.load_state_dict(part)
    if before != ranks:
        algorithm.load_anchor({"rank0": algorithm_state})
        if rank == 0:
            warnings.warn(
                f"{shown(folder)} is of {before} ranks, and here are {ranks}: all begin at the"
                " anchor, with the optimizer of rank 0; what the others had learned since their"
                " last averages is lost",
                stacklevel=2,
            )
        return
    algorithm.model.load_state_dict(model)
    algorithm.load_state_dict({f"rank{rank}": algorithm_state})


def _me() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mean_where_different(model: nn.Module) -> None:
    """Where ranks hold different models, give all their mean. All ranks call this.

    After an algorithm has finished, only callbacks can have made them different: one may put
    other weights into the model, such as an EMA. See `ExtraState`.
    """
    links = WorkerGroups(Workers.per_gpu(), DEADLINE, owns=False)
    ExtraState(model, set(), links).average([model], buffers=False)
    links.notices.leave()
    links.notices.end()
    links.close()
