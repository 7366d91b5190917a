"""The gap of the virtual iterate under late averages, checked on recorded runs."""

from dataclasses import replace

import numpy as np

from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Gaussian
from analysis.convergence.protocol.identities import Watched
from analysis.convergence.simulate import run
from analysis.convergence.variants import RunSize, variants

CASES = (
    ("isotropic", 1.0, 0.0, 1.0, 5, 2, 1.0, 0.0),
    ("spread", 0.7, 0.5, 2.0, 5, 5, 1.0, 0.0),
    ("quadratics apart", 0.3, 0.9, 1.5, 5, 3, 0.5, 0.0),
    ("cosine", 1.0, 0.0, 1.0, 4, 2, 0.5, 0.5),
    ("cosines apart", 0.6, 0.5, 1.0, 4, 4, 0.75, 0.6),
    ("hills apart", 1.2, 0.25, 1.0, 1, 1, 0.3, 0.25),
)
"""Family, alpha, beta, Lambda, tau, d, keep, predict; in the last beta = p."""
_ROUNDS = 16


def gap_error(  # noqa: PLR0917 - a row of CASES
    family: str,
    alpha: float,
    beta: float,
    penalty: float,
    tau: int,
    late: int,
    keep: float,
    predict: float,
) -> float:
    """The largest error of z - mean at any step, relative to the largest |mean|.

    z moves by -E c_k times the averaged gradient. What the gap should be follows from the weights
    w_n of the page. Source: docs/theory.md, the late average, gap.
    """
    step = 0.05
    which = variants(
        step,
        outer_step=alpha,
        momentum=beta,
        penalty=penalty,
        noise=1.0,
        keep=keep,
        predict=predict,
    )
    problem = FAMILIES[family](4)
    size = RunSize(workers=4, rounds=_ROUNDS, local_steps=tau, seeds=4, late_steps=late)
    watched = Watched(Gaussian(problem))
    run(problem, which, size, sampler=watched)
    shape = (_ROUNDS, tau, *watched.means[0].shape)
    means, slopes = (np.array(part).reshape(shape) for part in (watched.means, watched.slopes))
    p = predict * late / tau
    eta = alpha * step / ((1 - beta) * penalty)
    whole = eta / (1 - p)
    left = [
        (whole - step) * p**n + eta * sum(beta ** (j + 1) * p ** (n - 1 - j) for j in range(n))
        for n in range(_ROUNDS + 1)
    ]
    counts = np.ones((_ROUNDS, tau))
    counts[1:, :late] = keep
    sums = np.einsum("tk,tk...->t...", counts, slopes)
    virtual = means[0, 0].copy()
    error = 0.0
    for t in range(_ROUNDS):
        for k in range(tau):
            arrived = t == 0 or k >= late
            gap = sum((left[t - s - (not arrived)] * sums[s] for s in range(t)), 0 * virtual)
            weight = whole * counts[t, :k] - (step * counts[t, :k] if arrived else step)
            gap = -gap - np.einsum("k,k...->...", weight, slopes[t, :k])
            error = max(error, float(np.abs(virtual - means[t, k] - gap).max()))
            virtual = virtual - whole * counts[t, k] * slopes[t, k]
    return error / float(np.abs(means).max())


def mean_error() -> float:
    """How far the mean is from that of local SGD with the same noise, relatively.

    All is kept and the outer step is 1, on a problem with linear gradients: the mean of the
    workers must move exactly as if every average had been waited for.
    """
    problem = FAMILIES["isotropic"](4)
    which = variants(0.05, noise=1.0)
    size = RunSize(workers=4, rounds=_ROUNDS, local_steps=5, seeds=4, delay=0)
    paths = []
    for late in (None, 1, 3, 5):
        watched = Watched(Gaussian(problem))
        run(problem, which, replace(size, late_steps=late), sampler=watched)
        paths.append(np.array(watched.means))
    largest = max(float(np.abs(path - paths[0]).max()) for path in paths[1:])
    return largest / float(np.abs(paths[0]).max())
