"""Which cells the grid of the bound check has."""

from collections.abc import Iterator

from analysis.convergence.objectives.families import AT_MINIMUM, FAMILIES
from analysis.convergence.protocol.grid import GridTask

_BEYOND = ((2, 0.2612), (4, 0.1502), (16, 0.0423))
"""Delays and inner steps beyond the condition, where gradient descent on x^2/2 for 200 rounds
exceeds the bound by 2, 5 and 7 %: a condition with half of its constant C would let them pass.
Source: docs/theory.md, corrections."""


def plan(*, quick: bool) -> Iterator[GridTask]:
    """The cells of the grid: everything but what runs side by side."""
    for family in FAMILIES:
        if family in AT_MINIMUM:
            continue
        costly = family.startswith("logistic")
        unlike = FAMILIES[family](2).heterogeneous
        if costly:
            sizes = [(4, tau, rounds) for tau in (1, 8) for rounds in (8, 64)]
            sizes = sizes[1:2] if quick else sizes
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
    for delay, step in _BEYOND:
        yield GridTask(
            family="isotropic",
            workers=1,
            local_steps=1,
            rounds=200,
            delay=delay,
            seeds=2,
            inner_step=step,
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
