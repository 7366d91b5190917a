"""Rates: slopes in G, tau and T by strata of gamma L tau, and the fit of the terms of the rate."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from analysis.convergence import exact_moments
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Array, Quadratic
from analysis.convergence.simulate import Variants, run, variants

STRATA = (("small", 0.0, 0.1), ("middle", 0.1, 0.5), ("large", 0.5, 2.0))
"""Names and ranges of gamma L tau."""
FEATURES = ("1/sqrt(G T tau)", "1/T", "G/T", "G tau/T")
PAIRS = ((1.0, 0.0), (0.5, 0.5))
"""Outer steps and momenta, alpha = 1 - beta."""
EQUAL, UNEQUAL = ("isotropic", "spread"), ("two kinds",)
_NOISE = 1.0
_RESAMPLES = 400
_TAIL = 0.025
_WIDTH = 3.0
"""Half the width of an interval, in standard errors."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)


def plan(*, quick: bool) -> Iterator[dict[str, Any]]:
    """The exact factorial of every family, and the cells of it that are also simulated."""
    for family in (*EQUAL, *UNEQUAL):
        yield {"what": "exact", "family": family}
        if quick and family == "spread":
            continue
        for workers in (2, 8) if quick else (2, 4, 8, 16, 32, 64):
            for tau in (1, 4) if quick else (1, 2, 4, 8, 16):
                exponents = (8, 10, 12) if quick else (8, 10, 12, 14)
                yield {
                    "what": "simulated",
                    "family": family,
                    "workers": workers,
                    "local_steps": tau,
                    "rounds": [2**e for e in exponents if 2**e * tau <= (4096 if quick else 16384)],
                    "seeds": 16 if quick else 32,
                }


def settings(workers: int, tau: int, rounds: int) -> Variants:
    """The steps of the rate form with theta = 1: eta = sqrt(G/(T tau)).

    Source: THEORY, rate form.
    """
    eta = np.sqrt(workers / (rounds * tau))
    alpha, beta = (np.array(part) for part in zip(*PAIRS, strict=True))
    return variants(eta * (1 - beta) / alpha, outer_step=alpha, momentum=beta, noise=_NOISE)


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The exact A of all cells of a family, or the simulated A of each seed of one (G, tau)."""
    if spec["what"] == "exact":
        return {"cells": list(_exact_cells(spec["family"]))}
    workers, tau = spec["workers"], spec["local_steps"]
    problem = _quadratic(spec["family"], workers)
    found = []
    for rounds in spec["rounds"]:
        which = settings(workers, tau, rounds)
        sizes = {"workers": workers, "rounds": rounds, "local_steps": tau}
        seed = [rounds, tau, workers, *spec["family"].encode()]
        measured = run(problem, which, **sizes, seeds=spec["seeds"], seed=seed)
        found.append({"rounds": rounds, "measured": measured.gradient.tolist()})
    return {"cells": found}


def _quadratic(family: str, workers: int) -> Quadratic:
    problem = FAMILIES[family](workers)
    assert isinstance(problem, Quadratic)
    return problem


def _exact_cells(family: str) -> Iterator[dict[str, Any]]:
    for workers in _SIZES[1:]:
        problem = _quadratic(family, workers)
        for tau in _SIZES:
            for rounds in (2**e for e in range(8, 17)):
                which = settings(workers, tau, rounds)
                sizes = {"workers": workers, "rounds": rounds, "local_steps": tau}
                found = exact_moments.exact(problem, which, **sizes)
                load = float(which.inner_step[0]) * problem.smoothness * tau
                yield {**sizes, "load": load, "exact": found.gradient.tolist()}


def slopes(sizes: Array, values: Array) -> Array:
    """The exponents of G, tau and T in the best power law: [3] or [3, n] for values [cells, n].

    `sizes` is [cells, 3].
    """
    design = np.concatenate([np.ones((len(sizes), 1)), np.log(sizes)], axis=1)
    return np.asarray(np.linalg.lstsq(design, np.log(values), rcond=None)[0][1:])


def fit(sizes: Array, values: Array, *, last: bool = True) -> tuple[Array, float]:
    """Nonnegative coefficients of the features, and the root mean square of relative errors.

    `last` = False leaves G tau/T out.
    """
    workers, tau, rounds = sizes.T
    columns = [1 / np.sqrt(workers * tau * rounds), 1 / rounds, workers / rounds]
    columns += [workers * tau / rounds] if last else []
    design = np.stack(columns, axis=1) / values[:, None]
    coefficients, rest = nnls(design, np.ones(len(values)))
    return np.asarray(coefficients), float(rest) / np.sqrt(len(values))


def summary(
    results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    """Everything that the report says about rates."""
    exact = {spec["family"]: cell["cells"] for spec, cell in results if spec["what"] == "exact"}
    return {
        "slopes": [line for family in exact for line in _exact_slopes(family, exact[family])],
        "agreement": [
            line
            for family in exact
            for line in _agreement(family, exact[family], _simulated(results, family))
        ],
        "fits": [
            _fit(family, exact[family], pair) for family in exact for pair in range(len(PAIRS))
        ],
        "curves": {family: _curve(cells) for family, cells in exact.items()},
    }


def _sizes(cells: Sequence[Mapping[str, Any]]) -> Array:
    return np.array([[c["workers"], c["local_steps"], c["rounds"]] for c in cells], dtype=float)


def _exact_slopes(family: str, cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for place, (alpha, beta) in enumerate(PAIRS):
        for name, low, high in STRATA:
            chosen = [
                c for c in cells if low <= c["load"] < high and np.isfinite(c["exact"][place])
            ]
            found = slopes(_sizes(chosen), np.array([c["exact"][place] for c in chosen]))
            yield {
                "family": family,
                "alpha": alpha,
                "beta": beta,
                "stratum": name,
                "cells": len(chosen),
                "slopes": found.tolist(),
            }


def _simulated(
    results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], family: str
) -> dict[tuple[int, int, int], Array]:
    found = {}
    for spec, cell in results:
        if spec["what"] == "simulated" and spec["family"] == family:
            for part in cell["cells"]:
                key = (spec["workers"], spec["local_steps"], part["rounds"])
                found[key] = np.array(part["measured"])
    return found


def _agreement(
    family: str,
    cells: Sequence[Mapping[str, Any]],
    simulated: Mapping[tuple[int, int, int], Array],
) -> Iterator[dict[str, Any]]:
    """Slopes of simulated and of exact values on the same cells of the small stratum.

    The interval follows from the spread over seeds, cell by cell. It is three standard errors wide
    on both sides: 95 % for all slopes of the report together.
    """
    name, low, high = STRATA[0]
    chosen = [
        c
        for c in cells
        if low <= c["load"] < high and (c["workers"], c["local_steps"], c["rounds"]) in simulated
    ]
    if not chosen:
        return
    for place, (alpha, beta) in enumerate(PAIRS):
        sizes = _sizes(chosen)
        expected = slopes(sizes, np.array([c["exact"][place] for c in chosen]))
        each = [simulated[c["workers"], c["local_steps"], c["rounds"]][place] for c in chosen]
        measured = slopes(sizes, np.array([seeds.mean() for seeds in each]))
        spread = [seeds.std(ddof=1) / seeds.mean() / np.sqrt(len(seeds)) for seeds in each]
        design = np.concatenate([np.ones((len(sizes), 1)), np.log(sizes)], axis=1)
        error = np.sqrt((np.linalg.pinv(design)[1:] ** 2) @ np.array(spread) ** 2)
        low_end, high_end = measured - _WIDTH * error, measured + _WIDTH * error
        yield {
            "family": family,
            "alpha": alpha,
            "beta": beta,
            "stratum": name,
            "cells": len(chosen),
            "measured": measured.tolist(),
            "low": low_end.tolist(),
            "high": high_end.tolist(),
            "exact": expected.tolist(),
            "agree": bool(((low_end <= expected) & (expected <= high_end)).all()),
        }


def _fit(family: str, cells: Sequence[Mapping[str, Any]], place: int) -> dict[str, Any]:
    chosen = [c for c in cells if c["load"] < STRATA[1][2]]
    sizes, values = _sizes(chosen), np.array([c["exact"][place] for c in chosen])
    coefficients, error = fit(sizes, values)
    _, without = fit(sizes, values, last=False)
    rng = np.random.default_rng(2)
    draws = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    boot = np.array([fit(sizes[draw], values[draw])[0] for draw in draws])
    low, high = np.quantile(boot, [_TAIL, 1 - _TAIL], axis=0)
    return {
        "family": family,
        "alpha": PAIRS[place][0],
        "beta": PAIRS[place][1],
        "cells": len(chosen),
        "coefficients": coefficients.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "error": error,
        "error_without": without,
        "found": bool(low[-1] > 0),
        "heterogeneous": family in UNEQUAL,
    }


def _curve(cells: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """A against T at G = 8 for some tau, without momentum: [tau, T, A]."""
    return [
        [c["local_steps"], c["rounds"], c["exact"][0]]
        for c in cells
        if c["workers"] == 8 and c["local_steps"] in {1, 4, 16, 64} and c["load"] < 1  # noqa: PLR2004 - what is drawn
    ]
