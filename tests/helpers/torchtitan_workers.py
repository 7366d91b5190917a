"""What ranks of the tests of torchtitan do: train its debug model on sentences of numbers."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan_on_cpu
from local_problem import algorithm_of, said
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from realrun import algorithms
from realrun.adapters.torchtitan import LocalUpdateTrainer, with_local_updates
from realrun.algorithms import Workers
from realrun.execute.world import World

LENGTH, BATCH, STEPS, PARTS, WORKERS = 16, 2, 7, 2, 2
"""Tokens of a sentence; sentences of a batch; steps; batches of a step; workers of most cases."""


class Sentences(IterableDataset[Any]):
    """Tokens by the rank that reads them; the second half of a sentence counts on even ranks only.

    So workers have other numbers of tokens.
    """

    def __init__(self, rank: int, breaks: int | None = None) -> None:
        self._rank, self._breaks, self._at = rank, breaks, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            made = torch.Generator().manual_seed(1000 * self._rank + self._at)
            self._at += 1
            if self._at == self._breaks:
                raise ValueError("a bad sentence")
            tokens = torch.randint(0, 64, (LENGTH + 1,), generator=made)
            labels = tokens[1:].clone()
            if self._rank % 2:
                labels[LENGTH // 2 :] = IGNORE_INDEX
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, labels

    def state_dict(self) -> dict[str, int]:
        """How many it has given."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind these."""
        self._at = state["at"]


class Loader(ParallelAwareDataloader):
    """Batches of sentences; on the rank that `breaks`, one of them fails."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """As it says."""

        breaks: int | None = None
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any
    ) -> None:
        breaks = 7 if config.breaks == dp_rank else None
        super().__init__(
            Sentences(dp_rank, breaks), dp_rank, dp_world_size, batch_size=local_batch_size
        )


class NoTokenizer(BaseTokenizer):
    """Sentences are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing."""

    def __init__(self, config: Config, **_: Any) -> None:
        del config
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Not asked."""
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        """Not asked."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Not asked."""
        raise NotImplementedError


def debug_model(
    folder: Path, workers: int, tensor_parallel: int = 1, **training: Any
) -> Trainer.Config:
    """torchtitan's, with small batches, and a checkpoint after every third step."""
    config = llama3_debugmodel()
    config.dump_folder, config.tokenizer = str(folder), NoTokenizer.Config()
    config.dataloader = Loader.Config()
    config.optimizer = default_adamw(lr=8e-4, eps=1e-4)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2, total_steps=STEPS)
    config.training = TrainingConfig(
        **{
            "local_batch_size": BATCH,
            "global_batch_size": BATCH * PARTS * dist.get_world_size() // tensor_parallel,
            "seq_len": LENGTH,
            "steps": STEPS,
            "max_norm": 0.5,
            "mixed_precision_param": "float32",
            "disable_cuda_graphs": True,
            **training,
        }
    )
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=workers,
        tensor_parallel_degree=tensor_parallel,
        spmd_backend=torchtitan_on_cpu.BACKEND,
    )
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=3, last_save_model_only=True, keep_latest_k=0
    )
    config.validator.enable, config.validator.freq, config.validator.steps = True, 3, 1
    config.validator.dataloader = Loader.Config()
    config.debug.seed = 1
    return config


def trainer_of(config: Trainer.Config, algorithm: str, **options: Any) -> LocalUpdateTrainer:
    """Its trainer, which notes what it validates and what it ends with."""
    made = with_local_updates(config, algorithm, **options).build()
    made.validated = []
    inner = made.validator.validate

    def validate(parts: list[torch.nn.Module], step: int) -> None:
        with made.agreed():
            made.validated.append(mark(parts[0].state_dict()))
        inner(parts, step)

    made.validator.validate = validate
    return made


def whole(one: torch.Tensor) -> torch.Tensor:
    """All of a tensor, whatever part of it is here."""
    return (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()


def mark(state: dict[str, Any]) -> str:
    """A hash of all tensors, exactly."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + whole(state[name]).contiguous().numpy().tobytes())
    return found.hexdigest()


def saved_model(folder: Path, like: dict[str, Any]) -> str:
    """The hash of the model in a checkpoint, read without torchtitan."""
    found = {name: torch.empty_like(whole(one)) for name, one in like.items()}
    load(found, storage_reader=FileSystemReader(str(folder)), no_dist=True)
    return mark(found)


def trained(
    _: World,
    folder: str,
    algorithm: str,
    tensor_parallel: int = 1,
    async_mode: str = "disabled",
    step: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """From the start to the end, or on from the checkpoint of a step."""
    config = debug_model(Path(folder), WORKERS, tensor_parallel)
    config.checkpoint.async_mode = async_mode
    if step:
        config.checkpoint.load_step = step
    made = trainer_of(config, algorithm, **options)
    made.train()
    model = made.model_parts[0].state_dict()
    made.close()
    return {
        "end": mark(model),
        "validated": made.validated,
        "saved": [
            saved_model(Path(folder) / "checkpoint" / f"step-{each}", model)
            for each in (3, 6, STEPS)
            if not step
        ],
    }


def compared(
    world: World, folder: str, algorithm: str, tensor_parallel: int = 1, **options: Any
) -> list[float]:
    """How far all that torchtitan learned is from a loop of our own; and how much that was."""
    config = debug_model(Path(folder), WORKERS, tensor_parallel)
    config.checkpoint.enable = config.validator.enable = False
    made = with_local_updates(config, algorithm, **options).build()
    begun = {name: whole(one) for name, one in made.model_parts[0].state_dict().items()}
    factor = made.lr_schedulers.schedulers[0].lr_lambdas[0]
    made.train()
    ended = {name: whole(one) for name, one in made.model_parts[0].state_dict().items()}
    made.close()
    model = made.model_config.build()
    model.init_weights(buffer_device=None)
    model.load_state_dict(begun)
    size = dist.get_world_size() // WORKERS
    shards, worker = size // tensor_parallel, world.rank // size
    options["worker"] = Workers.of_mesh(
        init_device_mesh("cpu", (WORKERS, size), mesh_dim_names=("across", "inside")), "across"
    )
    sources = [iter(DataLoader(Sentences(shards * worker + at), BATCH)) for at in range(shards)]
    own = _own_loop(model, sources, factor, algorithm, options)
    apart = max(float((one - ended[name]).abs().max()) for name, one in own.items())
    moved = max(float((one - begun[name]).abs().max()) for name, one in own.items())
    return [apart, moved]


def _own_loop(
    model: Any, sources: list[Any], factor: Any, algorithm: str, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Every rank of a worker trains with all data of the worker."""
    optim = torch.optim.AdamW(model.parameters(), 8e-4, (0.9, 0.95), 1e-4, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, factor)
    dist_utils.set_spmd_backend("partial_dtensor")
    with algorithm_of(algorithm, model, optim, **options):
        for _ in range(STEPS):
            parts = [next(one) for one in sources for _ in range(PARTS)]
            count = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in parts)
            optim.zero_grad()
            for given, labels in parts:
                masks = model.get_attention_masks(positions=given["positions"])
                output = model(given["input"], positions=given["positions"], attention_masks=masks)
                loss = torch.nn.functional.cross_entropy(
                    output.flatten(0, 1), labels.flatten(), reduction="sum"
                )
                (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optim.step()
            schedule.step()
    return dict(model.state_dict())


def begun_at(_: World, folder: str, workers: int, step: int, without: list[str]) -> str:
    """The model at which a new algorithm begins, from the checkpoint of a step."""
    config = debug_model(Path(folder), workers)
    config.checkpoint.load_step, config.checkpoint.load_only = step, True
    config.checkpoint.exclude_from_loading = ["local_updates", *without]
    made = trainer_of(config, "LocalSGD", tau=2)
    made.checkpointer.load(step)
    assert (made.step, made.algorithm.stats().steps) == (step, 0)
    found = mark(made.model_parts[0].state_dict())
    made.train()
    made.close()
    return found


def broken(_: World, folder: str) -> str:
    """A data loader fails on rank 1, in the middle of the training."""
    config = debug_model(Path(folder), dist.get_world_size())
    config.checkpoint.enable, config.dataloader = False, Loader.Config(breaks=1)
    made = trainer_of(config, "LocalSGD", tau=2, timeout=60)
    return said(made.train)


def refused(_: World, folder: str) -> dict[str, str]:
    """What each mistake says."""
    two = dist.get_world_size()
    told = {}

    def one(
        name: str, config: Trainer.Config, *, plain: bool = False, algorithm: Any = "LocalSGD"
    ) -> None:
        def build() -> None:
            if plain:
                made = config.build()
                algorithms.LocalSGD(made.model_parts[0], list(made.optimizers), tau=2)
            else:
                with_local_updates(config, algorithm, tau=2).build()

        told[name] = said(build)

    one("one worker", debug_model(Path(folder), 1))
    config = debug_model(Path(folder), 1)
    config.parallelism.pipeline_parallel_degree = two
    one("pipeline", config)
    one("batch", debug_model(Path(folder), two, global_batch_size=two + 1))
    one("name", debug_model(Path(folder), two), algorithm="co2")
    one("other trainer", LocalUpdateTrainer.Config(model_spec=config.model_spec))
    one("HSDP", debug_model(Path(folder), two), plain=True)
    return told
