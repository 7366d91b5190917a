"""Training in one process, with what travels between ranks coded where the algorithms code it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from quantization_codes import Code
from torch import Generator, Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import AdamW

from realrun.train.settings import TrainSettings
from realrun.train.task import Task, loss_of, means, scores

Place: TypeAlias = Literal["weights (qwZ)", "gradients (qgZ)", "outer gradients"]
PLACES: tuple[Place, ...] = get_args(Place)

NODES, PER_NODE = 2, 2
WORKERS = NODES * PER_NODE
TAU = 12
"""Local steps of a round, where outer gradients travel."""

Send = Callable[[Tensor], Tensor]
"""What is received of rows [rows, elements] that are sent."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The last validation loss, and samples of what is sent: flat fp32, by place."""

    loss: float
    sent: dict[Place, Tensor]


class Worker(NamedTuple):
    """A model, and its optimizer."""

    model: nn.Module
    optimizer: AdamW

    @classmethod
    def like(cls, model: nn.Module, settings: TrainSettings) -> "Worker":
        """A worker that begins where the model is."""
        made = copy.deepcopy(model)
        return cls(
            made, AdamW(made.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        )


def train(
    task: Task, settings: TrainSettings, place: Place, code: Code | None, block: int = 0
) -> Trained:
    """Train with what is sent at a place coded; None: as it is.

    Weights and gradients are those of data-parallel training, outer gradients those of averages
    of 4 workers after every 12 steps (LocalSGD).
    """
    torch.manual_seed(settings.seed)
    model = task.model()
    chance = Generator().manual_seed(settings.seed)

    def send(rows: Tensor) -> Tensor:
        return code.received(rows, block, chance) if code else rows

    turn = _rounds if place == "outer gradients" else _steps
    sent = turn(model, task, settings, place, send)
    with torch.no_grad():
        total = torch.stack([scores(model, batch) for batch in task.validation]).sum(0)
    return Trained(means(total)[0], sent)


def reduced(gradients: list[Tensor], send: Send) -> Tensor:
    """The mean of gradients of ranks as ZeRO++ makes it: a sum in each node, then of the nodes.

    As in `Reduce`, a row of the first exchange is what one rank of every node shall have.
    """
    parts = [_rows(one, WORKERS).view(NODES, PER_NODE, -1).transpose(0, 1) for one in gradients]
    inside = [send(one.flatten(1)).reshape(WORKERS, -1) for one in parts]
    sums = [torch.stack(inside[n * PER_NODE : (n + 1) * PER_NODE]).sum(0) for n in range(NODES)]
    total = torch.stack([send(one) for one in sums]).sum(0).view(PER_NODE, NODES, -1)
    return total.transpose(0, 1).flatten()[: len(gradients[0])] / len(gradients)


def averaged(displacements: list[Tensor], send: Send) -> Tensor:
    """The mean of displacements as `realrun.algorithms.average` makes it: coded on both ways."""
    count = len(displacements)
    mean = torch.stack([send(_rows(one, count)) for one in displacements]).sum(0) / count
    return send(mean).flatten()[: len(displacements[0])]


def _rows(vector: Tensor, count: int) -> Tensor:
    """A flat vector as so many equal rows, filled up with zeros."""
    return pad(vector, (0, -len(vector) % count)).view(count, -1)


def _steps(
    model: nn.Module, task: Task, settings: TrainSettings, place: Place, send: Send
) -> dict[Place, Tensor]:
    """Data-parallel steps; the model ends with its own weights, not with those that were sent."""
    worker = Worker.like(model, settings)
    parameters = list(worker.model.parameters())
    sent: dict[Place, Tensor] = {}
    for step in range(1, settings.steps + 1):
        own = parameters_to_vector(parameters).detach()
        if place == "weights (qwZ)":
            seen = send(_rows(own, WORKERS)).flatten()[: len(own)]
            vector_to_parameters(seen.clone(), parameters)
        parts = range(WORKERS) if place == "gradients (qgZ)" else range(1)
        gradients = [_gradient(worker.model, task, settings, step, p, len(parts)) for p in parts]
        gradient = reduced(gradients, send) if len(parts) > 1 else gradients[0]
        vector_to_parameters(own, parameters)
        _apply(worker, gradient, settings, step)
        sent = {"weights (qwZ)": own, "gradients (qgZ)": gradients[0]}
    vector_to_parameters(parameters_to_vector(parameters).detach(), model.parameters())
    return sent


def _rounds(
    model: nn.Module, task: Task, settings: TrainSettings, _: Place, send: Send
) -> dict[Place, Tensor]:
    """Rounds of local steps, and the average of what they changed."""
    workers = [Worker.like(model, settings) for _ in range(WORKERS)]
    anchor = parameters_to_vector(model.parameters()).detach().clone()
    sent: dict[Place, Tensor] = {}
    for step in range(1, settings.steps + 1):
        for part, worker in enumerate(workers):
            gradient = _gradient(worker.model, task, settings, step, part, WORKERS)
            _apply(worker, gradient, settings, step)
        if step % TAU == 0 or step == settings.steps:
            moved = [anchor - _vector(worker.model) for worker in workers]
            anchor = anchor - averaged(moved, send)
            for worker in workers:
                vector_to_parameters(anchor.clone(), worker.model.parameters())
            sent = {"outer gradients": moved[0]}
    vector_to_parameters(anchor, model.parameters())
    return sent


def _vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def _gradient(
    model: nn.Module, task: Task, settings: TrainSettings, step: int, part: int, parts: int
) -> Tensor:
    """The flat gradient of a share of the samples of a step."""
    model.zero_grad()
    loss_of(model, task.batch(settings.seed, step, settings.batch, part, parts)).backward()  # type: ignore[no-untyped-call]
    return torch.cat([_filled(p).flatten() for p in model.parameters()])


def _filled(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _apply(worker: Worker, gradient: Tensor, settings: TrainSettings, step: int) -> None:
    """An AdamW step by a gradient, clipped as in training."""
    start = 0
    for parameter in worker.model.parameters():
        parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    worker.optimizer.param_groups[0]["lr"] = settings.learning_rate(step)
    if settings.clip_grad:
        nn.utils.clip_grad_norm_(worker.model.parameters(), settings.clip_grad)
    worker.optimizer.step()
