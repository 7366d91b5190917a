"""What ranks of the tests of the Trainer of Transformers do."""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from adapter_problem import BATCH, Network, adam, check_bad_batch, numbers, own_loop, rows
from local_problem import co2_of, said
from ranks import everywhere
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

from realrun.adapters.transformers import LocalUpdateTrainer
from realrun.execute.world import World

STEPS = 15


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

    data: Any = [{"given": inputs, "wanted": targets} for inputs, targets in rows()]
    made = LocalUpdateTrainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        optimizers=(adam(model), None),
        compute_metrics=metrics,
        algorithm=co2_of,
        algorithm_options=options,
    )
    made.evaluated = evaluated  # type: ignore[attr-defined]
    return made


def trains_as_a_loop_of_ones_own(_: World, folder: Path, options: dict[str, Any]) -> None:
    """15 steps, bit for bit; on from checkpoints within rounds, too.

    All ranks end alike; evaluated and saved is the consensus.
    """
    trainer = _trainer(folder, options)
    model: Any = trainer.model
    trainer.train()
    trainer.save_model(str(folder / "end"))
    end, evaluated = numbers(model), list(trainer.evaluated)
    assert everywhere((end, evaluated)) == [(end, evaluated)] * 2
    assert end == own_loop(
        model.seen, options, [0.02 * (1 - step / STEPS) for step in range(STEPS)]
    )
    assert len(evaluated) == 3
    assert _loaded(folder / "checkpoint-5") == evaluated[0]
    assert _loaded(folder / "end") == end
    for name in ("checkpoint-5", "checkpoint-10"):
        other = _trainer(folder / "again", options, seed=1)
        other.train(resume_from_checkpoint=str(folder / name))
        assert numbers(other.model) == end


def _loaded(folder: Path) -> list[float]:
    plain = Network(seed=3)
    plain.load_state_dict(load_file(folder / "model.safetensors"))
    return numbers(plain)


def begins_at_a_checkpoint_of_ddp(world: World, folder: Path) -> None:
    """Which has no files of ranks: it begins at its model, and ends elsewhere, alike on all."""
    whole = _trainer(folder, {"tau": 4})
    whole.train()
    plain = folder / "of ddp" / "checkpoint-10"
    if not world.rank:
        ranks = shutil.ignore_patterns("local_updates")
        shutil.copytree(folder / plain.name, plain, ignore=ranks)
    dist.barrier()
    trainer = _trainer(folder / "from ddp", {"tau": 4}, seed=1)
    trainer.train(resume_from_checkpoint=str(plain))
    assert trainer.algorithm.stats().steps == STEPS - 10
    end = numbers(trainer.model)
    assert everywhere(end) == [end] * 2
    assert end != numbers(whole.model)


class Break(TrainerCallback):
    """An exception in a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raise it."""
        del args, control, others
        if state.global_step == 6:
            raise ValueError("a bad batch")


class Stop(TrainerCallback):
    """An early stop."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """After five steps."""
        del args, others
        control.should_training_stop = state.global_step == 5


def _heard(world: World, folder: Path, callback: TrainerCallback) -> str:
    """What is said where the second rank has a callback of its own."""
    trainer = _trainer(folder, {"tau": 4}, eval_strategy="no", save_strategy="no")
    if world.rank:
        trainer.add_callback(callback)
    return said(trainer.train)


def ends_all_by_an_exception_on_one(world: World, folder: Path) -> None:
    """Long before the deadline; the other one names the rank and its exception."""
    check_bad_batch(world, _heard(world, folder, Break()))


def ends_all_by_an_early_stop_on_one(world: World, folder: Path) -> None:
    """Ranks do nothing together but averages: the rank takes part in them, and both end well."""
    assert _heard(world, folder, Stop()) == ""
