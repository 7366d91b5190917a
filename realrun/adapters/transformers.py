"""Local updates in the Trainer of Hugging Face Transformers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer

from co2sim.common.errors import OptionError
from realrun.adapters import rank_files
from realrun.adapters.accelerate import refuse
from realrun.adapters.rank_files import mean_where_different
from realrun.algorithms import LocalUpdate

_OVERRIDDEN = (
    "_inner_training_loop",
    "_prepare_for_training",
    "_finalize_training",
    "_save_optimizer_and_scheduler",
)
"""Of the Trainer, what is not public: another version may not call it."""


class LocalUpdateTrainer(Trainer):
    """A Trainer whose ranks train copies of the model that an algorithm averages in rounds.

    `algorithm` is a class, such as CO2, and `algorithm_options` are its own, such as
    {"tau": 12}; the other arguments are those of Trainer. Every rank is a worker.

    Evaluation, and the model in a checkpoint, are the point that all ranks agree on (the
    consensus), with the mean of the buffers. Training ends with it on all ranks; where a callback
    puts other weights into the model then, such as an EMA, with their mean. In a checkpoint, the
    folder `local_updates` holds what each rank trains, from which `resume_from_checkpoint` goes
    on. A checkpoint without it, of DDP, starts an algorithm at its model.

    Sets args.average_tokens_across_devices to False: each worker's loss is its own mean
    tokens, since gradients are not averaged. Raises OptionError for what is sharded, for fp16,
    for auto_find_batch_size, and for what the algorithm refuses.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: Callable[..., LocalUpdate],
        algorithm_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        missing = [name for name in _OVERRIDDEN if not hasattr(Trainer, name)]
        if missing:
            raise OptionError(
                f"this version of transformers has no Trainer.{missing[0]}; install the extra"
                " '.[transformers]'"
            )
        self._algorithm, self._options = algorithm, algorithm_options or {}
        self._running: LocalUpdate | None = None
        super().__init__(*args, **others)
        if self.args.auto_find_batch_size:
            raise OptionError(
                "auto_find_batch_size is True, which begins again on one rank and not on another;"
                " give per_device_train_batch_size"
            )
        self.args.average_tokens_across_devices = False

    @property
    def algorithm(self) -> LocalUpdate:
        """What averages: its `stats()`, for example. Raises OptionError before training."""
        if self._running is None:
            raise OptionError("the algorithm is made by train()")
        return self._running

    def create_accelerator_and_postprocess(self) -> None:
        """Without DDP: Accelerate wraps no model that it takes for one to evaluate."""
        super().create_accelerator_and_postprocess()
        refuse(self.accelerator)
        self.accelerator.prepare_model = partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        ready = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        assert self.model is not None
        assert self.optimizer is not None
        self._running = self._algorithm(self.model, self.optimizer, **self._options)
        folder = Path(resume_from_checkpoint or "") / rank_files.FOLDER
        if resume_from_checkpoint and folder.is_dir():
            rank_files.load(folder, self._running)
        return ready

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **options)
        except BaseException as error:
            if self._running:
                self._running.__exit__(type(error), error, error.__traceback__)
            raise

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self.algorithm.finish(buffers=True)
        ended = super()._finalize_training(*args, **options)
        assert self.model is not None
        mean_where_different(self.model)
        return ended

    def _consensus(self) -> AbstractContextManager[None]:
        if self._running is None or self._running.closed or self._running.evaluating:
            return nullcontext()
        return self._running.consensus(buffers=True)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """As that of Trainer, of the consensus."""
        with self._consensus():
            return super().evaluation_loop(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the consensus. All ranks call this, until training has ended."""
        with self._consensus():
            super().save_model(*args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        rank_files.save(Path(output_dir) / rank_files.FOLDER, self.algorithm)
