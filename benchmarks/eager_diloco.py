"""Eager DiLoCo: a worker uses its own fresh outer gradient at once, the others' a round late.

Source: Kale, Douillard and Donchev 2025, arXiv 2502.12996, as we read it. With M workers, and
delta_i = where worker i began the round - where it stands at its end, every worker steps with

    delta_i / M + (sum of the other workers' delta of the round before) / M

by an outer Nesterov SGD of its own, and begins the next round where that leads. So workers begin
their rounds at different points. Before round 0 the others' delta is 0.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass
class EagerDiLoCo:
    """The outer step of one worker; `group` None: it is alone.

    `start` is where its round began, `own` its delta of the round before, and `mean` the mean of
    all workers' once `flight` has landed.
    """

    model: nn.Module
    group: dist.ProcessGroup | None
    tau: int
    outer_lr: float
    outer_momentum: float
    step: int = 0
    flight: dist.Work | None = None
    start: Tensor = field(init=False)
    momentum: Tensor = field(init=False)
    own: Tensor = field(init=False)
    mean: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Before round 0."""
        self.start = parameters_to_vector(self.model.parameters()).detach().clone()
        self.momentum, self.own, self.mean = (torch.zeros_like(self.start) for _ in range(3))

    @torch.no_grad()
    def after_step(self, *_: object) -> None:
        """The hook of the optimizer: after `tau` of them the outer step."""
        self.step += 1
        if self.step % self.tau:
            return
        workers = self.group.size() if self.group else 1
        self.land()
        delta = self.start - parameters_to_vector(self.model.parameters())
        mixed = delta / workers + self.mean - self.own / workers
        self.momentum.mul_(self.outer_momentum).add_(mixed)
        self.start.sub_(mixed + self.outer_momentum * self.momentum, alpha=self.outer_lr)
        vector_to_parameters(self.start.clone(), self.model.parameters())
        self.own, self.mean = delta, delta / workers
        if self.group:
            self.flight = dist.all_reduce(self.mean, group=self.group, async_op=True)

    def land(self) -> None:
        """Wait for the average under way, if there is one."""
        if self.flight is not None:
            self.flight.wait()
            self.flight = None
