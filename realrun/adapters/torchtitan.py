"""Local updates in torchtitan: its trainer, its config and its checkpoints (DCP)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, get_args

import tyro
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.components.checkpointer import MODEL, OPTIMIZER
from torchtitan.config import Configurable, ParallelismConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from co2sim.common.errors import OptionError
from realrun import algorithms
from realrun.algorithms import Workers
from realrun.errors import one_of

STATE = "local_updates"
"""The key, in checkpoints, of what the algorithm keeps and of every worker's own model."""


Name: TypeAlias = Literal["CO2", "CO2.published", "DiLoCo", "LocalSGD", "OverlapLocalSGD", "SlowMo"]


@dataclass(kw_only=True, slots=True)
class LocalUpdates:
    """The section `local_updates` of the config."""

    algorithm: Name = "CO2"
    tau: int | None = None
    """Local steps of a round; None: the default of the algorithm."""
    options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Other options of the algorithm, by name; not on the command line."""


def with_local_updates(
    config: Trainer.Config, algorithm: Name = "CO2", *, tau: int | None = None, **options: Any
) -> "LocalUpdateTrainer.Config":
    """A config of torchtitan's own trainer, as one of LocalUpdateTrainer; see there.

    Raises OptionError for an unknown name, and for the config of another trainer, which has its own
    loop.
    """
    one_of("algorithm", algorithm, get_args(Name))
    if type(config) is not Trainer.Config:
        raise OptionError(
            f"the config is a {type(config).__qualname__}, whose trainer has its own loop; it"
            " must be a torchtitan.trainer.Trainer.Config"
        )
    values = {field_.name: getattr(config, field_.name) for field_ in fields(config)}
    chosen = LocalUpdates(algorithm=algorithm, tau=tau, options=options)
    return LocalUpdateTrainer.Config(**values, local_updates=chosen)


class LocalUpdateTrainer(Trainer):
    """torchtitan's trainer, whose replicas are averaged in rounds instead of at every step.

    A worker is one of the `parallelism.data_parallel_replicate_degree` replicas. torchtitan sees
    the ranks of its worker only: FSDP2, the tokens that a loss is divided by, gradient norms and
    logged losses are the worker's own, and its steps wait for no other worker. Data are shared out
    among all, and `training.global_batch_size` is that of all.

    In a checkpoint the model is the point that all workers agree on (the consensus), as it is in
    validation; each worker's own model and optimizers, and each rank's part of the algorithm, have
    their own keys. A last checkpoint of the model alone holds the model with which training
    ends, on all ranks.

    Raises OptionError for pipelines, for ranks that are no equal workers, for several ranks that
    are one worker, and for what the algorithm refuses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """That of torchtitan, and the algorithm."""

        local_updates: LocalUpdates = field(default_factory=LocalUpdates)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        chosen = config.local_updates
        kind = attrgetter(chosen.algorithm)(algorithms)
        options = (
            dict(chosen.options) if chosen.tau is None else {**chosen.options, "tau": chosen.tau}
        )
        (model,) = self.model_parts
        self.algorithm = kind(model, list(self.optimizers), worker=self._workers, **options)
        if self.checkpointer.enable:
            self._add_states(self.checkpointer.states)
        if config.validator.enable:
            validate = self.validator.validate

            def validate_agreed(*arguments: Any) -> None:
                with self.agreed():
                    validate(*arguments)

            self.validator.validate = validate_agreed

    def init_distributed(self) -> ParallelDims:
        """What torchtitan sees: the ranks of this worker, and a share of batches and data."""
        size = super().init_distributed().world_size
        config = self.config
        whole, workers = (
            config.training.global_batch_size,
            config.parallelism.data_parallel_replicate_degree,
        )
        _refuse(config.parallelism, whole, size)
        mesh = init_device_mesh(
            device_type, (workers, size // workers), mesh_dim_names=("worker", "world")
        )
        self._workers = Workers.of_mesh(mesh, "worker")
        self.worker = f"worker{mesh.get_local_rank('worker')}"
        config.dataloader = _Shared(
            loader=config.dataloader, worker=mesh.get_local_rank("worker"), workers=workers
        )
        if whole > 0:
            config.training = replace(config.training, global_batch_size=whole // workers)
        alone = replace(config.parallelism, data_parallel_replicate_degree=1)
        dims = _WorkerDims.from_config(alone, size // workers)
        dims.worker_mesh = mesh["world"]
        return dims

    def agreed(self) -> AbstractContextManager[None]:
        """Within, the model holds the consensus; after the end it does anyway."""
        return nullcontext() if self.algorithm.closed else self.algorithm.consensus(buffers=True)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """As always; the last one ends the training, unless a checkpoint can be gone on from."""
        super().train_step(data_iterator)
        saved = self.config.checkpoint
        resumable = saved.enable and not saved.load_only and not saved.last_save_model_only
        if self.step == self.config.training.steps and not resumable:
            self.algorithm.finish()

    def train(self) -> None:
        """As always; all ranks end with the same model. The other workers hear of errors."""
        try:
            super().train()
        except BaseException as error:
            self.algorithm.__exit__(type(error), error, error.__traceback__)
            raise
        if not self.algorithm.closed:
            self.algorithm.finish()

    def _add_states(self, states: dict[str, Any]) -> None:
        """Let a checkpoint keep what is in the docstring of the class."""
        model, optimizers, algorithm = states[MODEL], self.optimizers, self.algorithm

        def agreed() -> dict[str, Any]:  # copies: it may be written while the model is trained
            with self.agreed():
                return {name: tensor.clone() for name, tensor in model.state_dict().items()}

        def load_agreed(state: dict[str, Any]) -> None:
            if STATE not in state:  # otherwise the worker's own model is loaded
                model.load_state_dict(state)

        def own() -> dict[str, Any]:
            return {self.worker: dict(model.state_dict()), **algorithm.state_dict()}

        def load_own(state: dict[str, Any]) -> None:
            model.load_state_dict(state[self.worker])
            algorithm.load_state_dict(state)

        def steps() -> dict[str, Any]:
            if not all(
                optimizer.state for optimizer in optimizers
            ):  # torchtitan would take a step to make it
                others = self.config.optimizer.build(model_parts=self.model_parts)
                others.state_dict()
                for optimizer, other in zip(optimizers, others, strict=True):
                    optimizer.state.update(other.state)
            return {self.worker: optimizers.state_dict()}

        def load_steps(state: dict[str, Any]) -> None:
            optimizers.load_state_dict(state[self.worker])

        states[MODEL] = _Part(agreed, load_agreed)
        states[STATE] = _Part(own, load_own)
        states[OPTIMIZER] = _Part(steps, load_steps)


class _WorkerDims(ParallelDims):
    """The dimensions of one worker."""

    worker_mesh: DeviceMesh
    """Its ranks, in one dimension; torchtitan takes those of the world (0.3)."""

    def build_mesh(self) -> DeviceMesh:
        """As always, with the worker for the world."""
        made = parallel_dims.init_device_mesh
        parallel_dims.init_device_mesh = lambda *_, **__: self.worker_mesh
        try:
            mesh: DeviceMesh = super().build_mesh()
        finally:
            parallel_dims.init_device_mesh = made
        return mesh


@dataclass(kw_only=True, slots=True)
class _Shared(Configurable.Config):
    """A data loader's config, whose parts are those of all workers."""

    loader: Any
    worker: int
    workers: int

    def build(self, *, dp_world_size: int, dp_rank: int, **others: Any) -> Any:
        """That of a rank, by its place in the worker."""
        return self.loader.build(
            dp_world_size=self.workers * dp_world_size,
            dp_rank=self.worker * dp_world_size + dp_rank,
            **others,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a checkpoint: what gives it, and what takes it. torch calls this a Stateful."""

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


def _refuse(parallelism: ParallelismConfig, whole: int, size: int) -> None:
    """Raise OptionError for what workers cannot be made of; `whole` is the global batch size."""
    workers = parallelism.data_parallel_replicate_degree
    if parallelism.pipeline_parallel_degree > 1:
        raise OptionError(
            f"pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}; it must be 1:"
            " all ranks of a worker must hold the same layers"
        )
    if workers == 1 < size:
        raise OptionError(
            f"data_parallel_replicate_degree is 1, so that {size} ranks are one worker, and nothing"
            " is averaged: set it to the number of workers"
        )
    if whole > 0 and whole % workers:
        raise OptionError(
            f"global_batch_size is {whole}; it must be a multiple of the {workers} workers"
        )
