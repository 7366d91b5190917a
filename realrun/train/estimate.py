"""Measure the constants of the bound at points of a training: noise, curvature, heterogeneity."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from co2sim.strategies.local import LocalSteps, Replica
from realrun.errors import TrainingError
from realrun.execute.world import World
from realrun.train.constants import Estimates, Point, length, moments
from realrun.train.settings import MOST, TrainSettings
from realrun.train.tasks.task import Task, loss_of

if TYPE_CHECKING:
    from realrun.train.parallelize import WrappedModel

CURVED = 4
"""Batches in number 0: the fewer samples, the more their curvature exceeds that of all."""

BATCHES = 8
"""Independent batches of every worker at a point; the error of a standard error is about 1/4."""

ITERATIONS = 30
"""Of the power iteration, at most."""

TOLERANCE = 1e-3
"""It ends when an iteration changes the curvature by a smaller share."""

_CHUNK = 2**20
"""Elements whose inner products are taken in float64 at once."""

_Mean: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RankLoss:
    """This rank's part of the function that is trained.

    `loss` gives the loss of this rank's share of a batch, which depends on the number of the batch
    only; batches of different numbers are independent, and all but 0 of one size. `over_all`
    averages a tensor in place over all ranks, `over_worker` over those of a worker.
    """

    parameters: Sequence[Tensor]
    loss: Callable[[int], Tensor]
    over_all: _Mean
    over_worker: _Mean


def measure(function: RankLoss, step: int, batches: int = BATCHES) -> tuple[Point, Tensor]:
    """The constants here, and the gradient of batch 0, whose curvature it is. All ranks call it."""
    gradient, curvature = _power_iteration(function)
    gradients, losses, products = [], [], []
    for index in range(1, batches + 1):
        loss = function.loss(index)
        slope = _slope(function, loss)
        gradients.append(slope.detach())
        losses.append(loss.detach())
        products.append(_product(function, slope, curvature.direction))
    mine = function.over_worker(torch.stack(gradients))
    by_worker = function.over_all(_inner_products(mine))
    shared = _inner_products(function.over_all(mine))
    noise, spread, squared = moments(by_worker.cpu().numpy(), shared.cpu().numpy())
    elsewhere = length(_inner_products(function.over_all(torch.stack(products))).cpu().numpy())
    seen = function.over_all(torch.stack(losses).double()).tolist()
    point = Point(
        step=step,
        losses=tuple(seen),
        gradient=squared,
        noise=noise,
        heterogeneity=spread,
        curvature=curvature.value,
        elsewhere=elsewhere,
        iterations=curvature.iterations,
        change=curvature.change,
    )
    if not all(map(math.isfinite, (*point.losses, point.curvature, elsewhere.value, noise.value))):
        raise TrainingError(f"the estimates after step {step} are not finite: training diverges")
    return point, gradient


@dataclass(frozen=True, slots=True)
class _Curvature:
    """|H v| of the unit vector before `direction`, which is H v / |H v|."""

    value: float
    direction: Tensor
    iterations: int
    change: float


def _power_iteration(function: RankLoss) -> tuple[Tensor, _Curvature]:
    """The gradient of batch 0, and its Hessian's eigenvalue of the largest magnitude.

    |H v| for the unit vector v of an iteration never falls, and never exceeds that magnitude. It
    reaches it, too, where eigenvalues of both signs have it, though v is then no eigenvector.
    """
    slope = _slope(function, function.loss(0))
    random = torch.Generator().manual_seed(0)
    start = torch.randn(slope.numel(), generator=random).to(slope)
    curvature = _Curvature(0.0, start / start.norm(), 0, math.inf)
    while curvature.iterations < ITERATIONS and curvature.change > TOLERANCE:
        product = function.over_all(_product(function, slope, curvature.direction))
        size = product.norm().item()
        if size == 0.0:
            curvature = _Curvature(0.0, curvature.direction, curvature.iterations + 1, 0.0)
            break
        change = size / curvature.value - 1.0 if curvature.value else math.inf
        # Ranks must agree on when to stop, to the last bit.
        agreed = function.over_all(torch.tensor([abs(change)], device=slope.device)).item()
        curvature = _Curvature(size, product / size, curvature.iterations + 1, agreed)
    return function.over_all(slope.detach().clone()), curvature


def _slope(function: RankLoss, loss: Tensor) -> Tensor:
    """The gradient as one vector that can itself be differentiated.

    Unlike `backward` it runs no hooks of DDP, and leaves `grad` alone.
    """
    return _flat(
        torch.autograd.grad(loss, function.parameters, create_graph=True, materialize_grads=True)
    )


def _product(function: RankLoss, slope: Tensor, direction: Tensor) -> Tensor:
    """Hessian times direction, of this rank's samples."""
    return _flat(
        torch.autograd.grad(
            slope, function.parameters, direction, retain_graph=True, materialize_grads=True
        )
    )


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _inner_products(rows: Tensor) -> Tensor:
    """[k, k] in float64 of k rows."""
    parts = (part.double() for part in torch.split(rows, _CHUNK, dim=1))
    return torch.stack([part @ part.T for part in parts]).sum(0)


class Estimator:
    """Measurements at the start, in the middle and at the end of a training, each before a step.

    They are of the mean of all workers, each on its samples: training does not change, but for
    averages that are under way, which get free time.
    """

    def __init__(
        self, settings: TrainSettings, task: Task, method: "WrappedModel", world: World
    ) -> None:
        self._method, self._last = method, settings.last
        size = world.layout.world_size
        strategy, node = settings.parsed, None
        if isinstance(strategy, LocalSteps) and method.workers < size:
            node = world.group("training", Replica.of(strategy).inside)

        def loss(index: int) -> Tensor:
            samples = settings.batch * (1 if index else CURVED)
            batch = task.batch(settings.seed, MOST + 1 + index, samples, world.rank, size)
            return loss_of(method.bare, batch)

        self._function = RankLoss(
            list(method.bare.parameters()),
            loss,
            lambda tensor: _averaged(tensor, None),
            lambda tensor: tensor if node is None else _averaged(tensor, node),
        )
        self._workers = size if node is None else size // node.size()
        self._samples, self._micro = settings.batch // self._workers, settings.batch // size
        self._points: list[Point] = []
        self._open: tuple[Tensor, Tensor] | None = None

    def at(self, step: int) -> None:
        """Measure what is due after this step. All ranks call it, after every step."""
        due = step in {0, self._last // 2, self._last - 1}
        if not due and self._open is None:
            return
        with self._method.mean(), sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
            here = _flat([part.detach() for part in self._function.parameters])
            if self._open is not None:
                self._close(here)
            if due:
                point, gradient = measure(self._function, step)
                self._points.append(point)
                self._open = here, gradient

    def _close(self, here: Tensor) -> None:
        """Add the curvature along the step that has just been made."""
        assert self._open is not None
        before, gradient = self._open
        self._open = None
        moved = (here - before).norm().item()
        if moved:
            now = self._function.over_all(_slope(self._function, self._function.loss(0)).detach())
            bent = (now - gradient).norm().item() / moved
            self._points[-1] = replace(self._points[-1], along_step=bent)

    def result(self) -> Estimates:
        """What was found."""
        return Estimates(
            workers=self._workers,
            samples=self._samples,
            micro_batch=self._micro,
            points=tuple(self._points),
        )


def _averaged(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor.div_(dist.get_world_size(group))
