"""The oracle layer of the protocol: identities, exact moments against simulation, stability."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.convergence import exact_moments
from analysis.convergence.objectives.families import FAMILIES, same
from analysis.convergence.objectives.problems import Array, Gaussian, Quadratic
from analysis.convergence.simulate import Variants, run, select, variants, walk

IDENTITY = 1e-12
"""Largest relative error of the identities."""
SCORE = 4.0
"""Largest |z| of a simulated mean."""
EDGE = 0.002
"""Largest distance of a measured from the exact edge of stability, in alpha q."""
_OFFSETS = np.linspace(-0.02, 0.02, 9)
"""Around the edge, in alpha q, where growth is measured."""
_EDGE_ROUNDS = 4000
_CO2 = [(a, b) for b in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9) for a in (0.3, 0.5, 1.0, 1.5) if a > 1 - b]
_SLOWMO = [(a, b) for b in (0.0, 0.3, 0.6, 0.9) for a in (1.1 * (1 + b), 2.0 * (1 + b))]
"""Outer steps and momenta; a smaller alpha never gets to the edge, because q < 1 or q < 2."""


_SIZES = ((2, 96), (5, 48), (12, 12), (3, 32))
"""G and T of the cells to simulate."""


def plan(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Cells to simulate, the identities, and the edges."""
    yield {"what": "identities"}
    yield {"what": "edges"}
    sizes = {1: (_SIZES[0], _SIZES[1]), 3: (_SIZES[1], _SIZES[2])}
    sizes |= {8: (_SIZES[2], _SIZES[3]), 16: (_SIZES[3], _SIZES[0])}
    for family in ("isotropic", "spread", "quadratics apart"):
        for tau in (1, 8) if quick else (1, 3, 8, 16):
            for delay, (workers, rounds) in zip((1, 0), sizes[tau], strict=True):
                yield {
                    "what": "moments",
                    "family": family,
                    "workers": workers,
                    "local_steps": tau,
                    "rounds": rounds,
                    "delay": delay,
                    "seeds": 4000,
                }


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """One cell."""
    if spec["what"] == "identities":
        return {"errors": [_identity(*case) for case in _CASES]}
    if spec["what"] == "edges":
        found = _edges(_CO2, 1) + _edges(_SLOWMO, 0)
        return {"edges": found}
    return {"scores": scores(spec, spec["delay"])}


_CASES = (
    ("isotropic", 1.0, 0.0, 1.0, 1),
    ("spread", 0.7, 0.5, 2.0, 1),
    ("quadratics apart", 0.3, 0.9, 1.5, 1),
    ("cosine", 0.6, 0.8, 1.0, 1),
    ("hills apart", 0.5, 0.5, 1.0, 1),
    ("isotropic", 0.7, 0.5, 2.0, 0),
    ("cosines apart", 0.9, 0.6, 1.0, 0),
    ("spread", 0.5, 0.5, 1.0, 2),
)


@dataclass(frozen=True)
class _Watched:
    """Gaussian noise; keeps the mean of the workers and of their noisy gradients at every step."""

    inner: Gaussian
    means: list[Array] = field(default_factory=list)
    gradients_: list[Array] = field(default_factory=list)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """As without a watch."""
        return self.inner.draw(rng, shape)

    def gradients(
        self, points: Array, drawn: NDArray[Any], deviation: Array
    ) -> tuple[Array, Array | None]:
        """As without a watch."""
        found = self.inner.gradients(points, drawn, deviation)
        self.means.append(points.mean(axis=-2))
        self.gradients_.append(found[0].mean(axis=-2))
        return found


def _identity(family: str, alpha: float, beta: float, penalty: float, delay: int) -> float:
    """The largest error of the identities of the virtual iterate, relative to the largest |x|.

    z is made of what has not reached x yet: weights 1 up to the delay, then beta, beta^2, ... The
    sums are of the noisy gradients themselves, not of how far points moved. Checked are z_0 = x_0,
    z_{t+1} = z_t - eta D_t and, within rounds, z_{t,k} - mean_{t,k} = z_t - x_t -
    (eta - gamma) sum_{j<k} gradient_{t,j}; for delay 1 also that z is the extrapolation
    x_{t+1} + beta/(1 - beta) (x_{t+1} - x_t), of points only, and z_t - x_t = -eta Lambda m_t.

    Source: THEORY, derivation, step 1. Its z_t - x_t = -eta m_t lacks a factor Lambda.
    """
    step, rounds, count = 0.05, 24, 5
    problem = FAMILIES[family](4)
    which = variants(step, outer_step=alpha, momentum=beta, penalty=penalty, noise=1.0)
    sizes: dict[str, Any] = {"workers": 4, "rounds": rounds, "local_steps": count, "seeds": 4}
    watched = _Watched(Gaussian(problem))
    _, path = walk(problem, which, **sizes, delay=delay, sampler=watched, record=True)
    assert path is not None
    eta = alpha * step / ((1 - beta) * penalty)
    shape = (rounds, count, *path.points.shape[1:])
    means, slopes = (np.array(p).reshape(shape) for p in (watched.means, watched.gradients_))
    sums, before = slopes.sum(axis=1), np.cumsum(slopes, axis=1) - slopes
    virtual = [_virtual(path.points, sums, t, eta, beta, delay) for t in range(rounds)]
    errors = [virtual[0] - path.points[0]]
    errors += [virtual[t + 1] - virtual[t] + eta * sums[t] for t in range(rounds - 1)]
    for t, z in enumerate(virtual):
        x, ahead = path.points[t], path.points[t + 1]
        errors.append(z - eta * before[t] - means[t] - (z - x - (eta - step) * before[t]))
        if delay == 1:
            errors.append(ahead + beta / (1 - beta) * (ahead - x) - z)
            errors.append(z - x + eta * penalty * path.momenta[t])
    largest = max(np.abs(error).max() for error in errors)
    return float(largest / np.abs(path.points).max())


def _virtual(points: Array, sums: Array, t: int, eta: float, beta: float, delay: int) -> Array:
    total = np.zeros_like(points[0])
    for s in range(t):
        age = t - s
        total = total + (1.0 if age <= delay else beta ** (age - delay)) * sums[s]
    return np.asarray(points[t] - eta * total)


def moments_variants() -> Variants:
    """Three settings that run side by side."""
    return variants(
        np.array([0.02, 0.08, 0.02]),
        outer_step=np.array([0.5, 0.7, 1.0]),
        momentum=np.array([0.5, 0.2, 0.0]),
        penalty=np.array([1.0, 2.0, 1.0]),
        noise=np.array([1.0, 0.5, 2.0]),
    )


def scores(spec: Mapping[str, Any], claimed: int) -> list[list[float]]:
    """The z of A, drift and |x_T|^2 against the oracle for the delay `claimed`: per variant.

    Drift is exactly 0 with one local step, and has no z there.
    """
    problem = FAMILIES[spec["family"]](spec["workers"])
    assert isinstance(problem, Quadratic)
    which = moments_variants()
    sizes = {name: spec[name] for name in ("workers", "rounds", "local_steps")}
    exact = exact_moments.exact(problem, which, **sizes, delay=claimed)
    found = []
    for place in range(len(which)):
        seed = [place, spec["local_steps"], spec["delay"], *spec["family"].encode()]
        alone = select(which, slice(place, place + 1))
        measured = run(problem, alone, **sizes, seeds=spec["seeds"], delay=spec["delay"], seed=seed)
        pairs = (
            (measured.gradient, exact.gradient[place]),
            (measured.drift, exact.drift[place]),
            ((measured.final**2).sum(axis=-1), exact.final[1, place].sum()),
        )
        found.append([_score(values[0], expected) for values, expected in pairs])
    return [[z for z in row if z is not None] for row in found]


def _score(values: Array, expected: float) -> float | None:
    """How many standard errors the mean is from what is expected; None where nothing varies."""
    error = float(values.std(ddof=1)) / np.sqrt(len(values))
    return float((values.mean() - expected) / error) if error else None


def _edges(pairs: Sequence[tuple[float, float]], delay: int) -> list[dict[str, float]]:
    """Where noiseless runs stop shrinking, by simulation, for every (alpha, beta)."""
    tau = 3
    progress = np.array([exact_moments.edge(beta, delay) + _OFFSETS for _, beta in pairs])
    alpha, beta = (np.array(part)[:, None] + 0 * _OFFSETS for part in zip(*pairs, strict=True))
    step = 1 - np.cbrt(1 - progress / alpha)
    which = variants(step.ravel(), outer_step=alpha.ravel(), momentum=beta.ravel())
    problem = same(1.0)
    _, path = walk(
        problem,
        which,
        workers=1,
        rounds=_EDGE_ROUNDS,
        local_steps=tau,
        seeds=1,
        delay=delay,
        record=True,
    )
    assert path is not None
    size = np.log(
        np.abs(path.points[:-1]) + np.abs(path.momenta * which.inner_step[:, None, None])
    )[:, :, 0, 0].reshape(_EDGE_ROUNDS, *progress.shape)
    quarter = _EDGE_ROUNDS // 4
    growth = size[-quarter:].mean(axis=0) - size[quarter : 2 * quarter].mean(axis=0)
    found = []
    for row, (a, b) in enumerate(pairs):
        measured = float(np.interp(0.0, growth[row], progress[row]))
        found.append(
            {
                "alpha": a,
                "beta": b,
                "delay": delay,
                "measured": measured,
                "exact": exact_moments.edge(b, delay),
            }
        )
    return found


def summary(
    results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    """Everything that the report says about this layer."""
    cells = [(spec, cell) for spec, cell in results if spec["what"] == "moments"]
    z = [score for _, cell in cells for row in cell["scores"] for score in row]
    errors = [e for _, cell in results for e in cell.get("errors", [])]
    edges = [e for _, cell in results for e in cell.get("edges", [])]
    return {
        "identities": len(errors),
        "largest_identity_error": max(errors),
        "configurations": sum(len(cell["scores"]) for _, cell in cells),
        "scores": z,
        "largest_score": max(abs(score) for score in z),
        "edges": edges,
        "largest_edge_error": max(abs(e["measured"] - e["exact"]) for e in edges),
    }
