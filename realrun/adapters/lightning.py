"""Local updates in Lightning: `Trainer(strategy=LocalUpdateStrategy(CO2, tau=12))`."""

import copy
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from co2sim.common.errors import OptionError
from realrun.adapters import rank_files
from realrun.adapters.rank_files import mean_where_different
from realrun.algorithms import LocalUpdate

_MARK = "local_updates"
"""Of checkpoints that have files of ranks beside them; others are of DDP, or of one process."""


class LocalUpdateStrategy(DDPStrategy):
    """Every rank trains its own copy of the module; in rounds, an algorithm averages the copies.

    `algorithm` is a class, such as CO2; `options` are its own, such as tau=12. `strategy` holds
    arguments of Lightning's DDPStrategy, such as {"process_group_backend": "gloo"}.

    Validation, and the model in a checkpoint, are the point that all ranks agree on (the
    consensus), with the mean of the buffers. Training ends with it on all ranks; where a callback
    puts other weights into the model then, such as an EMA, with their mean. Beside a
    checkpoint `x.ckpt` is a folder `x.ckpt.ranks`, where every rank keeps its own model and
    optimizers, from which `ckpt_path=` continues: keep both, in a place that all ranks reach. A
    checkpoint of DDP starts an algorithm at its model. Random numbers are not kept, as by DDP.

    Raises OptionError for '16-mixed', whose scaler skips steps on one rank only, and for what the
    algorithm refuses.
    """

    def __init__(
        self,
        algorithm: Callable[..., LocalUpdate],
        *,
        strategy: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**(strategy or {}))
        self._algorithm, self._options = algorithm, options
        self._running: LocalUpdate | None = None
        self._evaluation: ExitStack | None = None
        self._source = Path()

    def configure_ddp(self) -> None:
        """Nothing: gradients stay where they are."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the algorithm count the steps of the optimizers that the module has configured."""
        super().setup_optimizers(trainer)
        if trainer.precision == "16-mixed":
            raise OptionError(
                "precision is '16-mixed', whose GradScaler skips steps on one rank and not on"
                " another; use 'bf16-mixed' or '32-true'"
            )
        assert self.lightning_module is not None
        self._running = self._algorithm(self.lightning_module, self.optimizers, **self._options)
        _leave_signals_to_ranks(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set outside
        callbacks[:] = [
            _Finish(self),
            *(callback for callback in callbacks if not isinstance(callback, _Finish)),
        ]

    @property
    def algorithm(self) -> LocalUpdate:
        """What averages: its `stats()`, for example. Raises OptionError before training."""
        if self._running is None:
            raise OptionError("the algorithm is made when fit() has set up the optimizers")
        return self._running

    def on_validation_start(self) -> None:
        """Put the consensus into the model."""
        super().on_validation_start()
        if self._running and not self._running.closed:
            self._evaluation = ExitStack()
            self._evaluation.enter_context(self._running.consensus(buffers=True))

    def on_validation_end(self) -> None:
        """Put back what this rank trains."""
        self._leave()
        super().on_validation_end()

    def _leave(self) -> bool:
        inside, self._evaluation = self._evaluation, None
        if inside:
            inside.close()
        return inside is not None

    def on_train_end(self) -> None:
        """After callbacks: the mean of what these have put into the models, such as an EMA."""
        super().on_train_end()
        assert self.lightning_module is not None
        mean_where_different(self.lightning_module)

    def teardown(self) -> None:
        """Finish where a checkpoint was loaded and no step was left to take, too."""
        self.finish()
        super().teardown()

    def finish(self) -> None:
        """Use all averages: every rank ends with the same model. Before callbacks see the end."""
        if self._running and not self._running.closed:
            self._running.finish(buffers=True)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, which end as well.

        Raises RankFailure where Lightning has waited for a rank that left, which it names.
        """
        super().on_exception(exception)
        self._leave()
        if self._running:
            self._running.__exit__(type(exception), exception, exception.__traceback__)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus."""
        if self._evaluation or not self._running or self._running.closed:
            return super().lightning_module_state_dict()
        with self._running.consensus(buffers=True):
            return copy.deepcopy(super().lightning_module_state_dict())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write the files of the ranks, and when these are there the checkpoint itself."""
        step = None
        if self._running and "optimizer_states" in checkpoint:
            step = self._save_ranks(_ranks_of(filepath), int(checkpoint["global_step"]))
            checkpoint[_MARK] = {"ranks": self.world_size}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if step and self.is_global_zero:
            for other in step.parent.glob("step*"):
                if other != step:
                    shutil.rmtree(other, ignore_errors=True)

    def _save_ranks(self, folder: Path, step: int) -> Path:
        """In a folder of this step: until the checkpoint is written, the one before is whole."""
        target = folder / f"step{step}"
        validating = self._leave()
        rank_files.save(target, self.algorithm)
        if validating:
            self.on_validation_start()
        return target

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the files of the ranks, too."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in str(filepath):
            shutil.rmtree(_ranks_of(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | Path, *more: Any, **options: Any) -> Any:
        """Read the checkpoint; each rank reads its own file when there is an optimizer."""
        self._source = Path(checkpoint_path).resolve()
        return super().load_checkpoint(checkpoint_path, *more, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue where this rank was; from a checkpoint of DDP, with its optimizer."""
        if _MARK not in checkpoint:
            super().load_optimizer_state_dict(checkpoint)
            return
        target = _ranks_of(self._source) / f"step{checkpoint['global_step']}"
        rank_files.load(target, self.algorithm)


def _leave_signals_to_ranks(trainer: Trainer) -> None:
    """Let a rank end by its own SIGTERM, after its batch; the others see it as an exception.

    Lightning (2.6) has all ranks wait for rank 0 before every batch, to ask whether it got one, and
    a rank that got one wait in its handler, until rank 0 asks. It is not public; another version
    may do neither. Comes before the trainer registers its handlers.
    """
    connector = trainer._signal_connector  # noqa: SLF001 - no other way

    def noted(signum: int, frame: object) -> None:
        del frame
        launcher = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(signum)
        connector.received_sigterm = True

    vars(connector)["_sigterm_notifier_fn"] = noted
    trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None


def _ranks_of(path: str | Path) -> Path:
    if "://" in str(path):
        raise OptionError(f"the checkpoint is {path}; local updates need a folder of a file system")
    return Path(f"{path}.ranks")


class _Finish(Callback):
    """The first callback: those after it find the model with which training ends."""

    def __init__(self, strategy: LocalUpdateStrategy) -> None:
        self._strategy = strategy

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish."""
        del trainer, pl_module
        self._strategy.finish()
