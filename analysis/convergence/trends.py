"""A neural network under CO2, SlowMo and local SGD, compared with the bound: trends, not a check.

The constants of a network are estimates, so the bound may be wrong for it either way. What can be
compared is how things move with tau and with the method, at the best inner step of each cell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from analysis.convergence import bound
from analysis.convergence.bound import Bound
from analysis.convergence.objectives.mlp import MLP, Batches, digits
from analysis.convergence.objectives.problems import Array
from analysis.convergence.setting import RunSize, Setting, Variants, variants
from analysis.convergence.simulate import Trajectory, walk
from co2sim.common.tables import print_table

METHODS = (("local SGD", 0, 1.0, 0.0), ("SlowMo", 0, 1.0, 0.5), ("CO2", 1, 1.0, 0.5))
"""Name, delay, outer step, momentum."""
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Inner steps, of which every cell gets its best."""
_BATCH = 16
MAX_WORKERS = 256
MAX_KEPT = 10_000
"""Steps times seeds: every round of a run is kept, 180 kB of it for each."""
_VISITS = 6
"""Rounds of a run at which constants are estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One cell: a method and a tau, at its best inner step.

    `measured` is A, `error` its standard error over seeds, `loss` the training loss at the end,
    `to_target` the local steps until the loss was at most the target, on the seeds that got there
    (`reached` of them). `smoothness`, `noise`, `spread` are the largest estimates along the run;
    `bound` is what the theorem would give with them, None where no bound holds at this step.
    `largest_step` is the largest gamma it would allow.
    """

    method: str
    tau: int
    inner_step: float
    measured: float
    error: float
    loss: float
    to_target: float | None
    reached: int
    smoothness: float
    noise: float
    spread: float
    bound: float | None
    largest_step: float


def trends(
    *,
    workers: int = 4,
    steps: int = 512,
    taus: Sequence[int] = (1, 4, 16),
    seeds: int = 3,
    target: float = 0.2,
    by_label: bool = False,
) -> Iterator[Trend]:
    """Train with every method and tau for the same number of local steps."""
    network = digits(workers if by_label else 1)
    for name, delay, outer_step, momentum in METHODS:
        for tau in taus:
            which = variants(np.array(_STEPS), outer_step=outer_step, momentum=momentum)
            size = RunSize(
                workers=workers,
                rounds=steps // tau,
                local_steps=tau,
                seeds=seeds,
                delay=delay,
            )
            outcome, path = walk(network, which, size, sampler=Batches(network, _BATCH))
            loss = outcome.value.mean(axis=1)
            place = int(np.nanargmin(np.where(np.isfinite(loss), loss, np.inf)))
            setting = _estimated(network, which, place, path, size)
            yield _trend(
                name,
                setting,
                outcome.gradient[place],
                network.value(path.points[:, place]),
                target,
            )


def _estimated(
    network: MLP, which: Variants, place: int, path: Trajectory, size: RunSize
) -> Setting:
    """The setting of a run, with the largest constants that were met along its first seed."""
    rng = np.random.default_rng(4)
    visited = [
        path.points[turn, place, 0] for turn in np.linspace(0, size.rounds, _VISITS, dtype=int)
    ]
    sampler = Batches(network, _BATCH)
    return Setting(
        smoothness=max(network.curvature(point, rng) for point in visited),
        noise=max(sampler.variance(point, rng) for point in visited),
        heterogeneity=max(float(network.spread(point)) for point in visited),
        gap=float(network.value(network.start)),
        workers=size.workers,
        rounds=size.rounds,
        local_steps=size.local_steps,
        inner_step=float(which.inner_step[place]),
        outer_step=float(which.outer_step[place]),
        momentum=float(which.momentum[place]),
        delay=size.delay,
    )


def _trend(name: str, setting: Setting, gradient: Array, losses: Array, target: float) -> Trend:
    """`gradient` is A by seed, `losses` [rounds + 1, seeds]."""
    below = losses <= target
    first = np.where(below.any(axis=0), below.argmax(axis=0), -1)
    got = first[first >= 0]
    covered = bound.evaluate(setting)
    return Trend(
        method=name,
        tau=setting.local_steps,
        inner_step=setting.inner_step,
        measured=float(gradient.mean()),
        error=float(gradient.std(ddof=1) / np.sqrt(len(gradient))) if len(gradient) > 1 else 0.0,
        loss=float(losses[-1].mean()),
        to_target=float(got.mean()) * setting.local_steps if len(got) else None,
        reached=len(got),
        smoothness=setting.smoothness,
        noise=setting.noise,
        spread=setting.heterogeneity,
        bound=covered.total if isinstance(covered, Bound) else None,
        largest_step=bound.largest_inner_step(setting),
    )


LABEL = (
    "A trend, not a check: L, sigma^2 and zeta^2 are the largest estimates at a few points of each"
    " run, f_inf is taken as 0, and the inner step is the best of a few."
)


def to_dict(lines: Sequence[Trend]) -> dict[str, Any]:
    """Plain values for JSON."""
    return {"label": LABEL, "trends": [asdict(trend) for trend in lines]}


def print_all(out: Console, lines: Sequence[Trend], target: float) -> None:
    """The table, under its label."""
    rows = [
        (
            trend.method,
            f"{trend.tau}",
            f"{trend.inner_step:g}",
            f"{trend.largest_step:.2g}",
            f"{trend.loss:.3f}",
            "-" if trend.to_target is None else f"{trend.to_target:.0f} ({trend.reached} seeds)",
            f"{trend.measured:.3g} ± {trend.error:.1g}",
            "no bound" if trend.bound is None else f"{trend.bound:.3g}",
            f"{trend.smoothness:.2f}",
            f"{trend.noise:.2f}",
            f"{trend.spread:.2f}",
        )
        for trend in lines
    ]
    columns = (
        *("method", "tau", "best gamma", "feasible", "last loss", f"steps to {target:g}"),
        *("mean |grad f|^2", "bound", "L", "sigma^2", "zeta^2"),
    )
    print_table(out, "a small network on digits", columns, rows)
    out.print(LABEL, highlight=False, markup=False)
