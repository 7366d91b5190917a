"""What is learned by stale-synchronous parallel training (SSP), in one process, by its clock."""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from ssp_clock import Course
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import AdamW

from co2sim.units import Seconds
from realrun.train.settings import TrainSettings
from realrun.train.task import Batch, Task, loss_of, means, scores


class Seen(NamedTuple):
    """The validation loss of the servers' parameters, once so many clocks of all are in."""

    clocks: int
    seconds: Seconds
    loss: float


def train(task: Task, settings: TrainSettings, course: Course) -> Iterator[Seen]:
    """Replay the moments of a course: who reads what, and whose push is in it.

    Worker w of G takes an AdamW step of its own on its share of the samples, from what the servers
    hold and what it has pushed itself; the servers add 1 / G of that step. With a bound of 0 that
    is the mean of the workers' steps, and with one worker AdamW.
    """
    count = len(course.waited)
    torch.manual_seed(settings.seed)
    first = task.model()
    whole = parameters_to_vector(first.parameters()).detach()
    models = [copy.deepcopy(first) for _ in range(count)]
    optimizers = [
        AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        for model in models
    ]
    travels: list[list[Tensor]] = [[] for _ in range(count)]
    arrived = [0] * count
    for moment in course.moments:
        worker = moment.worker
        if moment.what == "arrived":
            whole = whole + travels[worker].pop(0)
            before = min(arrived)
            arrived[worker] += 1
            least = min(arrived)
            if least > before and least % settings.eval_every == 0:
                yield Seen(least, moment.time, _validation(task, first, whole))
            continue
        began = whole + sum(travels[worker], torch.zeros(()))
        step = moment.clock + 1
        batch = task.batch(settings.seed, step, settings.batch, worker, count)
        moved = _step(models[worker], optimizers[worker], began, settings, step, batch)
        travels[worker].append(moved / count)


def _step(
    model: nn.Module,
    optimizer: AdamW,
    began: Tensor,
    settings: TrainSettings,
    step: int,
    batch: Batch,
) -> Tensor:
    """Where a step of a worker leads from there, as a displacement."""
    vector_to_parameters(began.clone(), model.parameters())  # which become views of it
    optimizer.param_groups[0]["lr"] = settings.learning_rate(step)
    optimizer.zero_grad()
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    if settings.clip_grad:
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
    optimizer.step()
    return parameters_to_vector(model.parameters()).detach() - began


def _validation(task: Task, model: nn.Module, whole: Tensor) -> float:
    vector_to_parameters(whole, model.parameters())
    with torch.no_grad():
        total = sum(scores(model, batch) for batch in task.validation)
    assert isinstance(total, Tensor)
    return means(total)[0]
