"""Which cells the grid of the bound check has."""

from collections.abc import Iterator
from dataclasses import replace

from analysis.convergence.objectives.families import AT_MINIMUM, FAMILIES
from analysis.convergence.protocol.grid import GridTask

_BEYOND = (
    (2, 1, 1.0, 0.2612),
    (4, 1, 1.0, 0.1502),
    (16, 1, 1.0, 0.0423),
    (1, 4, 1000.0, 1.139e-4),
    (0, 16, 1000.0, 8.62e-5),
)
"""Delays, tau, outer and inner steps beyond the condition, where gradient descent on x^2/2 for 200
rounds exceeds the bound by 2 to 61 %: a condition with half of omega^2 would let them pass.
Source: docs/theory.md, is it true."""


def plan(*, quick: bool) -> Iterator[GridTask]:
    """The cells of the grid: everything but what runs side by side."""
    for family in FAMILIES:
        if family in AT_MINIMUM:
            continue
        costly = family.startswith("logistic")
        unlike = FAMILIES[family](2).heterogeneous
        if costly:
            sizes = [(4, tau, rounds) for tau in (1, 8) for rounds in (8, 64)]
            sizes = sizes[:1] if quick else sizes
        else:
            least = 2 if unlike else 1
            sizes = [
                (workers, tau, rounds)
                for workers in ((4,) if quick else (least, 4, 16))
                for tau in (1, 4, 16)
                for rounds in ((8, 64) if quick else (3, 8, 64, 256))
                if tau * rounds <= (256 if quick else 2048)
            ]
        for workers, tau, rounds in sizes:
            for delay in (1,) if quick or costly else (1, 0, 2):
                yield GridTask(
                    family=family,
                    workers=workers,
                    local_steps=tau,
                    rounds=rounds,
                    delay=delay,
                    seeds=8 if costly or quick else 12,
                )
    yield from _exact_plan(quick=quick)
    yield from _minimum_plan(quick=quick)
    for delay, tau, outer_step, step in _BEYOND:
        yield GridTask(
            family="isotropic",
            workers=1,
            local_steps=tau,
            rounds=200,
            delay=delay,
            seeds=2,
            inner_step=step,
            outer_step=outer_step,
        )


def _exact_plan(*, quick: bool) -> Iterator[GridTask]:
    """Long runs on quadratics, where the oracle gives A without simulation; seeds 0 says so."""
    for family in ("isotropic", "spread", "quadratics apart", "two kinds"):
        for workers in (16,) if quick else (2, 16):
            for tau in (1, 16) if quick else (1, 4, 16, 64):
                for rounds in (1024,) if quick else (64, 1024, 16384):
                    for delay in (1,) if quick else (1, 0):
                        yield GridTask(
                            family=family,
                            workers=workers,
                            local_steps=tau,
                            rounds=rounds,
                            delay=delay,
                            seeds=0,
                        )


def _minimum_plan(*, quick: bool) -> Iterator[GridTask]:
    """Runs without a gap, by the oracle: long enough for staleness and drift to be all of A."""
    for family in AT_MINIMUM:
        unlike = FAMILIES[family](2).heterogeneous
        for tau in (1, 16) if quick else (1, 4, 16, 64):
            if unlike and tau == 1:
                continue  # no drift
            for rounds in (16384,) if quick else (256, 4096, 16384):
                for delay in (1,) if unlike else (1, 0):  # local SGD would run away
                    yield GridTask(
                        family=family,
                        workers=2 if unlike else 1,
                        local_steps=tau,
                        rounds=rounds,
                        delay=delay,
                        seeds=0,
                    )


_LATE_BEYOND = ((6, 5, 10.0, 0.0093), (6, 1, 5.0, 0.0378), (16, 16, 1000.0, 2.923e-5))
"""Tau, d, outer and inner steps beyond the condition, where x^2/2 without momentum exceeds the
bound that half of omega^2 in the condition would give. Source: docs/theory.md, is it true."""
_MIXES = ((1.0, 0.0), (0.5, 0.5), (0.75, 0.25), (0.5, 0.0), (0.2, 0.8), (1.0, 0.5))
"""What is kept, and what is predicted."""
_QUICK_MIXES = _MIXES[:2]
_STEPS = {1: (1,), 4: (1, 2, 4), 16: (1, 4, 16)}
"""Tau, and the delays to it."""
_QUICK_STEPS = {1: (1,), 4: (2,), 16: (16,)}


def late_grid_plan(*, quick: bool) -> Iterator[GridTask]:
    """The cells of late averages: by the oracle on quadratics, by simulation elsewhere."""
    sizes = _QUICK_STEPS if quick else _STEPS
    for tau, delays in sizes.items():
        for late in delays:
            yield from _late_exact_plan(tau, late, quick=quick)
            yield from _late_minimum_plan(tau, late, quick=quick)
            if not quick or 1 < late < tau:
                yield from _late_simulated_plan(tau, late, quick=quick)
    # so long and gentle that the drift is nearly all that its term allows
    yield _task("opposed at its minimum", 2, 2, 2, 4096 if quick else 16384, 0, quick=True)
    for tau, late, outer_step, inner_step in _LATE_BEYOND:
        task = _task("isotropic", 1, tau, late, 600, 2, quick=True)
        yield replace(task, outer_step=outer_step, inner_step=inner_step, mixes=((1.0, 0.0),))


def _late_exact_plan(tau: int, late: int, *, quick: bool) -> Iterator[GridTask]:
    families = (
        ("isotropic", "quadratics apart")
        if quick
        else (
            "isotropic",
            "spread",
            "two kinds",
            "quadratics apart",
        )
    )
    for family in families:
        unlike = FAMILIES[family](2).heterogeneous
        for rounds in (64,) if quick else (8, 64, 256):
            yield _task(family, 4 if unlike else 16, tau, late, rounds, 0, quick=quick)


def _late_minimum_plan(tau: int, late: int, *, quick: bool) -> Iterator[GridTask]:
    for family in AT_MINIMUM:
        unlike = FAMILIES[family](2).heterogeneous
        if not (unlike and tau == 1):  # no drift
            rounds = 256 if quick and unlike else 1024
            yield _task(family, 2 if unlike else 1, tau, late, rounds, 0, quick=quick)


def _late_simulated_plan(tau: int, late: int, *, quick: bool) -> Iterator[GridTask]:
    for family in ("cosine", "hill", "cosines apart", "hills apart"):
        for rounds in (8,) if quick else (8, 64):
            yield _task(family, 4, tau, late, rounds, 8 if quick else 12, quick=quick)


def _task(
    family: str, workers: int, tau: int, late: int, rounds: int, seeds: int, *, quick: bool
) -> GridTask:
    return GridTask(
        family=family,
        workers=workers,
        local_steps=tau,
        rounds=rounds,
        delay=1,
        seeds=seeds,
        late_steps=late,
        mixes=_QUICK_MIXES if quick else _MIXES,
    )
