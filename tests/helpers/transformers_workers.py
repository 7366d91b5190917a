"""What ranks of the tests of the Trainer of Transformers do."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapter_problem import BATCH, Network, adam, numbers, own_loop, rows
from local_problem import co2_of, said
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from realrun.adapters.transformers import LocalUpdateTrainer
from realrun.execute.world import World

STEPS = 15


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows by the names of the arguments of the model."""

    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        given, wanted = rows()[index]
        return {"given": given, "wanted": wanted}


class Break(TrainerCallback):
    """An exception in a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raise it."""
        del args, control, others
        if state.global_step == 6:
            raise ValueError("a bad batch")


def _trainer(
    folder: Path, options: dict[str, Any], seed: int = 0, **others: Any
) -> LocalUpdateTrainer:
    model = Network(seed)
    chosen: dict[str, Any] = {
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
        "max_grad_norm": 0.0,
    }
    chosen |= others
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        remove_unused_columns=False,
        label_names=["wanted"],
        report_to=[],
        disable_tqdm=True,
        **chosen,
    )
    evaluated: list[list[float]] = []

    def metrics(outputs: Any) -> dict[str, float]:
        del outputs
        evaluated.append(numbers(model))
        return {}

    made = LocalUpdateTrainer(
        model,
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        optimizers=(adam(model), None),
        compute_metrics=metrics,
        algorithm=co2_of,
        algorithm_options=options,
    )
    made.evaluated = evaluated  # type: ignore[attr-defined]
    return made


def trained(_: World, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """15 steps; the same batches in a loop of our own; on from checkpoints within rounds."""
    return [_trained(Path(folder) / str(options), options) for options in cases]


def _trained(place: Path, options: dict[str, Any]) -> dict[str, Any]:
    trainer = _trainer(place, options)
    model: Any = trainer.model
    trainer.train()
    trainer.save_model(str(place / "end"))
    end = numbers(model)
    rates = [0.02 * (1 - step / STEPS) for step in range(STEPS)]
    again = {}
    for name in ("checkpoint-5", "checkpoint-10"):
        other = _trainer(place / "again", options, seed=1)
        other.train(resume_from_checkpoint=str(place / name))
        again[name] = numbers(other.model) == end  # type: ignore[arg-type]
    return {
        "end": end,
        "own": own_loop(model.seen, options, rates),
        "again": again,
        "evaluated": list(trainer.evaluated),  # type: ignore[attr-defined]
        "saved": _loaded(place / "end") == end,
        "kept": _loaded(place / "checkpoint-5"),
    }


def _loaded(folder: Path) -> list[float]:
    plain = Network(seed=3)
    plain.load_state_dict(load_file(folder / "model.safetensors"))
    return numbers(plain)


def without_files(world: World, folder: str) -> list[float]:
    """From a checkpoint without files of ranks, as DDP leaves it."""
    options: dict[str, Any] = {"tau": 4}
    source = Path(folder) / str(options) / "checkpoint-10"
    plain = Path(folder) / "of ddp" / source.name
    if not world.rank:
        shutil.copytree(source, plain, ignore=shutil.ignore_patterns("local_updates"))
    dist.barrier()
    trainer = _trainer(Path(folder) / "from ddp", options, seed=1)
    trainer.train(resume_from_checkpoint=str(plain))
    assert trainer.algorithm.stats().steps == STEPS - 10
    return numbers(trainer.model)  # type: ignore[arg-type]


def broken(world: World, folder: str) -> dict[str, Any]:
    """An exception on the second rank."""
    return _with_callback(world, folder, Break())


def _with_callback(world: World, folder: str, callback: TrainerCallback) -> dict[str, Any]:
    """What is said where the second rank has a callback of its own."""
    trainer = _trainer(Path(folder), {"tau": 4}, eval_strategy="no", save_strategy="no")
    if world.rank:
        trainer.add_callback(callback)
    return {"told": said(trainer.train)}


class Stop(TrainerCallback):
    """The second rank stops early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """After five steps."""
        del args, others
        control.should_training_stop = state.global_step == 5


def stopped(world: World, folder: str) -> dict[str, Any]:
    """What is said where one rank stops."""
    return _with_callback(world, folder, Stop())
