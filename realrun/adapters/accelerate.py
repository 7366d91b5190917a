"""Local updates in a loop of Hugging Face Accelerate, and in its checkpoints."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from co2sim.common.errors import OptionError
from realrun.adapters import rank_files
from realrun.algorithms import LocalUpdate

Algorithm = TypeVar("Algorithm", bound=LocalUpdate)

_SHARDED = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}


def prepare(
    accelerator: Accelerator,
    algorithm: Callable[..., Algorithm],
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    *others: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Instead of `accelerator.prepare`: the model is not wrapped in DDP, but averaged in rounds.

    Gives the algorithm, the model, the optimizer (or their list), and `others`: data loaders and
    schedulers, prepared as always. `options` are those of the algorithm, such as tau=12. Every
    rank is a worker. Training is `with algorithm:`; its end finishes.

    `accelerator.save_state` and `load_state` work as always: every rank adds its own file to
    the checkpoint, whose model is the one that all agree on (the consensus). Several models may be
    prepared, each with its own algorithm; a run that continues prepares them in the same order.

    Raises OptionError for what is sharded, and for fp16, whose scaler skips steps on one rank only.
    """
    refuse(accelerator)
    ready = accelerator.prepare_model(model, evaluation_mode=True)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    prepared = [accelerator.prepare_optimizer(each) for each in optimizers]
    made = algorithm(ready, prepared, **options)
    files = _Files(made, sum(isinstance(each, _Files) for each in accelerator._custom_objects))  # noqa: SLF001 - what is registered for checkpoints
    accelerator.register_save_state_pre_hook(files.save)
    accelerator.register_load_state_pre_hook(files.find)
    accelerator.register_for_checkpointing(files)
    rest = accelerator.prepare(*others) if others else ()
    rest = rest if len(others) > 1 else (rest,) * len(others)
    return made, ready, prepared if isinstance(optimizer, list) else prepared[0], *rest


def refuse(accelerator: Accelerator) -> None:
    """Raise OptionError for what local updates cannot be combined with."""
    if accelerator.distributed_type in _SHARDED:
        raise OptionError(
            f"Accelerate is set up for {accelerator.distributed_type}; local updates need a whole"
            " model on every rank: launch with --multi_gpu, or without a plugin"
        )
    if accelerator.mixed_precision == "fp16":
        raise OptionError(
            "mixed_precision is 'fp16', whose GradScaler skips steps on one rank and not on"
            " another; use 'bf16' or 'no'"
        )


class _Files:
    """What the checkpoints of an accelerator hold besides: a file of every rank."""

    def __init__(self, algorithm: LocalUpdate, index: int) -> None:
        """The folder of the first is `local_updates`; of the next ones, by number, another."""
        self._algorithm = algorithm
        self._name = f"{rank_files.FOLDER}_{index}" if index else rank_files.FOLDER
        self._folder = Path()

    def save(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """The hook of `save_state`: this rank's file; and the consensus, for Accelerate to write.

        After `finish` the model is the consensus.
        """
        rank_files.save(Path(folder) / self._name, self._algorithm)
        if self._algorithm.closed:
            return
        with self._algorithm.consensus(buffers=True):
            index = models.index(self._algorithm.model)
            weights[index] = copy.deepcopy(self._algorithm.model.state_dict())

    def find(self, models: list[nn.Module], folder: str) -> None:
        """The hook of `load_state`, before Accelerate reads its own files."""
        del models
        self._folder = Path(folder) / self._name

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Accelerate keeps one copy of it, of the first rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After Accelerate has read its own files."""
        del state
        rank_files.load(self._folder, self._algorithm)
