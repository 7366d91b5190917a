"""What ranks of the tests of Lightning do."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from adapter_problem import BATCH, EPOCHS, Network, adam, numbers, own_loop, rows
from lightning.pytorch.callbacks import ModelCheckpoint
from local_problem import co2_of, said
from torch.utils.data import DataLoader

from realrun.adapters.lightning import LocalUpdateStrategy
from realrun.execute.world import World


class Module(pl.LightningModule):
    """A module as users write it."""

    def __init__(self, seed: int = 0, breaks: int = -1) -> None:
        super().__init__()
        self.network, self.breaks = Network(seed), breaks
        self.validated: list[list[float]] = []

    def training_step(self, batch: Any) -> Any:
        """The loss; or an exception."""
        if self.trainer.global_step == self.breaks:
            raise ValueError("a bad batch")
        return self.network(*batch)["loss"]

    def validation_step(self, batch: Any) -> None:
        """Keep what is validated."""
        del batch
        self.validated.append(numbers(self.network))

    def configure_optimizers(self) -> Any:
        """With a schedule that changes nothing."""
        optim = adam(self)
        return [optim], [torch.optim.lr_scheduler.ConstantLR(optim, 1.0)]


def _trainer(folder: Path, options: dict[str, Any], **others: Any) -> pl.Trainer:
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_epochs=1, save_last="link")
    chosen: dict[str, Any] = {"max_epochs": EPOCHS, "callbacks": [keep]}
    chosen |= {"strategy": LocalUpdateStrategy(co2_of, **options)} | others
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **chosen,
    )


def _fit(
    world: World, trainer: pl.Trainer, module: Module, seed: int, source: Path | None = None
) -> list[float]:
    torch.manual_seed(seed + world.rank)
    train, valid = DataLoader(rows(), BATCH), DataLoader(rows(), 24)
    trainer.fit(module, train, valid, ckpt_path=source)
    return numbers(module.network)


def trained(world: World, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three epochs; the same batches in a loop of our own; what validation saw and files hold."""
    return [_trained(world, Path(folder) / str(options), options) for options in cases]


def _trained(world: World, place: Path, options: dict[str, Any]) -> dict[str, Any]:
    module, trainer = Module(), _trainer(place, options)
    end = _fit(world, trainer, module, 0)
    saved = torch.load(place / "step=6.ckpt", weights_only=True)["state_dict"]
    plain = Module(seed=3)
    plain.load_state_dict(saved)
    return {
        "end": end,
        "own": own_loop(module.network.seen, options),
        "validated": module.validated,
        "saved": numbers(plain.network),
        "files": sorted(one.name for one in place.iterdir()),
        "seen": [one.tolist() for one in module.network.seen[0]],
    }


def resumed(world: World, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, bool]]:
    """Without a stop, and from each checkpoint."""
    return [_resumed(world, Path(folder) / f"resumed {options}", options) for options in cases]


def _resumed(world: World, place: Path, options: dict[str, Any]) -> dict[str, bool]:
    end = _fit(world, _trainer(place, options), Module(), 0)
    again = {}
    for name in ("step=6.ckpt", "step=12.ckpt", "last.ckpt"):
        module = Module(seed=1)
        other = place / "again" / name
        again[name] = _fit(world, _trainer(other, options), module, 50, place / name) == end
    return again


def other_checkpoints(world: World, folder: str) -> dict[str, Any]:
    """Of DDP; without the ranks' files; with one that is damaged; removed ones."""
    place, options = Path(folder) / "other", {"tau": 4}
    ddp = _trainer(place / "ddp", options, strategy="ddp", max_epochs=1)
    ended = _fit(world, ddp, Module(), 0)
    module = Module(seed=1)
    _fit(
        world, _trainer(place / "from", options, max_epochs=2), module, 0, place / "ddp/step=6.ckpt"
    )
    few = ModelCheckpoint(place / "few", "{step}", save_top_k=1, every_n_epochs=1)
    _fit(world, _trainer(place / "few", options, callbacks=[few]), Module(), 0)
    left = sorted(one.name for one in (place / "few").iterdir())
    dist.barrier()
    told = []
    source = place / "few/step=18.ckpt"
    ranks = Path(f"{source}.ranks")
    for harm in (
        lambda: (ranks / "step18/rank1.safetensors").write_bytes(b"no"),
        lambda: ranks.rename(place / "gone"),
    ):
        dist.barrier()
        if not world.rank:
            harm()
        dist.barrier()
        trainer = _trainer(place / "bad", options, max_epochs=4)
        told.append(said(lambda: _fit(world, trainer, Module(), 0, source)))  # noqa: B023
    return {"began": module.validated[0] == ended, "left": left, "told": told}


def broken(world: World, folder: str) -> dict[str, Any]:
    """An exception on the second rank."""
    module, trainer = Module(breaks=7 if world.rank else -1), _trainer(Path(folder), {"tau": 4})
    return {"told": said(lambda: _fit(world, trainer, module, 0))}


class Stop(pl.Callback):
    """The second rank stops early."""

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        """After five steps."""
        del others
        trainer.should_stop = trainer.global_rank == 1 and trainer.global_step == 5


def stopped(world: World, folder: str) -> dict[str, Any]:
    """What is said where one rank stops."""
    trainer = _trainer(Path(folder), {"tau": 4}, callbacks=[Stop()])
    return {"told": said(lambda: _fit(world, trainer, Module(), 0))}
