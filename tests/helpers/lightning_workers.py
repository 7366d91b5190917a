"""What ranks of the tests of Lightning do."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from adapter_problem import BATCH, EPOCHS, Network, adam, check_bad_batch, numbers, own_loop, rows
from lightning.pytorch.callbacks import ModelCheckpoint
from local_problem import co2_of, said
from ranks import everywhere
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


def trains_as_a_loop_of_ones_own(world: World, folder: Path, options: dict[str, Any]) -> None:
    """Three epochs, bit for bit; all ranks end alike, and validate what a checkpoint holds."""
    module, trainer = Module(), _trainer(folder, options)
    end = _fit(world, trainer, module, 0)
    assert everywhere(end) == [end] * 2
    assert end == own_loop(module.network.seen, options)
    assert everywhere(module.validated) == [module.validated] * 2
    plain = Module(seed=3)
    plain.load_state_dict(torch.load(folder / "step=6.ckpt", weights_only=True)["state_dict"])
    assert numbers(plain.network) in module.validated
    first, second = everywhere([each.tolist() for each in module.network.seen[0]])
    assert first != second
    names = [f"step={step}.ckpt{end}" for step in (12, 18, 6) for end in ("", ".ranks")]
    assert sorted(each.name for each in folder.iterdir()) == ["last.ckpt", *names]


def resumes_bit_for_bit(world: World, folder: Path, options: dict[str, Any]) -> None:
    """From the middle of two rounds, and from the end, by a link."""
    end = _fit(world, _trainer(folder, options), Module(), 0)
    for name in ("step=6.ckpt", "step=12.ckpt", "last.ckpt"):
        again = _trainer(folder / "again" / name, options)
        assert _fit(world, again, Module(seed=1), 50, folder / name) == end


def reads_other_checkpoints(world: World, folder: Path) -> None:
    """Of DDP; removed ones leave nothing; a damaged and a missing file end in one line."""
    options = {"tau": 4}
    ddp = _trainer(folder / "ddp", options, strategy="ddp", max_epochs=1)
    ended = _fit(world, ddp, Module(), 0)
    module, trainer = Module(seed=1), _trainer(folder / "from", options, max_epochs=2)
    _fit(world, trainer, module, 0, folder / "ddp/step=6.ckpt")
    assert module.validated[0] == ended
    few = ModelCheckpoint(folder / "few", "{step}", save_top_k=1, every_n_epochs=1)
    _fit(world, _trainer(folder / "few", options, callbacks=[few]), Module(), 0)
    left = sorted(each.name for each in (folder / "few").iterdir())
    assert left == ["step=18.ckpt", "step=18.ckpt.ranks"]
    source = folder / "few/step=18.ckpt"
    ranks = Path(f"{source}.ranks")
    for harm, words in (
        (lambda: (ranks / "step18/rank1.safetensors").write_bytes(b"no"), "rank1.safetensors"),
        (lambda: ranks.rename(folder / "gone"), "state.json"),
    ):
        dist.barrier()
        if not world.rank:
            harm()
        dist.barrier()
        trainer = _trainer(folder / "bad", options, max_epochs=4)
        assert words in said(lambda: _fit(world, trainer, Module(), 0, source))  # noqa: B023


def ends_all_by_an_exception_on_one(world: World, folder: Path) -> None:
    """Long before the deadline; the other one names the rank and its exception."""
    module, trainer = Module(breaks=7 if world.rank else -1), _trainer(folder, {"tau": 4})
    check_bad_batch(world, said(lambda: _fit(world, trainer, module, 0)))


class Stop(pl.Callback):
    """The second rank stops early."""

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        """After five steps."""
        del others
        trainer.should_stop = trainer.global_rank == 1 and trainer.global_step == 5


def ends_all_by_an_early_stop_on_one(world: World, folder: Path) -> None:
    """Long before the deadline: both sides name rank 1, and the numbers of steps of both."""
    trainer = _trainer(folder, {"tau": 4}, callbacks=[Stop()])
    heard = said(lambda: _fit(world, trainer, Module(), 0))
    if world.rank:
        assert "rank 1 has taken 5" in heard
    else:
        assert heard.startswith("RankFailure: ")
        assert "rank 1 is at " in heard
