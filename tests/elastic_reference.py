"""What an elastic training must learn, made in one process by the equations."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from elastic_ranks import LR, MOMENTUM, RANKS, SETTINGS, TAU

from realrun.train.local_step import LocalStep
from realrun.train.methods import build_alone
from realrun.train.settings import TrainSettings
from realrun.train.tasks import make_task


def vector(model: Any) -> Any:
    """The parameters in a row."""
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def put(model: Any, values: Any) -> None:
    """Write them."""
    torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


def reference(strategy: str, present: list[list[int]], peer: Mapping[int, int]) -> Any:
    """The anchor after all rounds, made in one process by the equations.

    `present`: the ranks whose displacement is averaged, by round. A rank that comes back begins at
    the anchor, with the optimizer's state of its peer.
    """
    settings = TrainSettings(strategy=strategy, **SETTINGS)
    task = make_task(settings, torch.device("cpu"))
    torch.manual_seed(settings.seed)
    first = task.model()
    workers = []
    for rank in range(RANKS):
        method = build_alone(settings, deepcopy(first), 1.0)
        method.outer.__exit__(ValueError, None, None)  # type: ignore[union-attr] # bare steps
        workers.append(LocalStep(settings, task, method, rank, RANKS))
    anchor = vector(first)
    momentum, late = torch.zeros_like(anchor), None
    for number, ranks in enumerate(present):
        for rank in ranks:
            if number and rank not in present[number - 1]:
                state = workers[peer[rank]].method.optimizer.state_dict()
                workers[rank].method.optimizer.load_state_dict(deepcopy(state))
        for rank in ranks:
            put(workers[rank].method.bare, anchor)
        for step in range(number * TAU + 1, (number + 1) * TAU + 1):
            for rank in ranks:
                workers[rank].take(step)
        moved = torch.stack([anchor - vector(workers[r].method.bare) for r in ranks]).mean(0)
        if strategy.startswith("diloco"):
            momentum = MOMENTUM * momentum + moved
            anchor = anchor - LR * (moved + MOMENTUM * momentum)
            continue
        if late is not None:
            momentum = MOMENTUM * momentum + late
        late = moved
        anchor = anchor - LR * momentum
    return anchor
