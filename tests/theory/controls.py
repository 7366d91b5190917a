"""The rate, what delay adds to it, where penalties and clips help, and what must fail."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from scipy.optimize import nnls

from analysis.convergence.setting import Array, RunSize, variants
from theory.cells import Cells, Check, table
from theory.exact_moments import exact
from theory.oracle import SCORE, MomentsTask, scores
from theory.problems import FAMILIES, run

EQUAL, UNEQUAL = ("isotropic", "spread"), ("two kinds",)
"""Problems whose workers are equal, or not; all have L = 1."""
_RATES = ((1.0, 0.0), (0.5, 0.5))
"""Outer steps and momenta, alpha = 1 - beta."""
_GENTLE = 0.3
"""Largest slope in T, in magnitude, of a run whose fixed step leaves it at its noise floor."""
_LOADS = (0.2, 0.4, 0.8, 1.2, 1.6)
"""gamma L tau of the runs that penalty and clipping may rescue."""
RULES = {
    "neither": (1.0, np.inf, 0.0),
    "penalty 2": (2.0, np.inf, 0.0),
    "penalty 4": (4.0, np.inf, 0.0),
    "clip 8": (1.0, 8.0, 0.0),
    "clip 2": (1.0, 2.0, 0.0),
    "clip 0.5": (1.0, 0.5, 0.0),
    "gap-aware": (1.0, np.inf, np.inf),
}
"""Penalty, clip, and the largest penalty where it varies."""


def rate_points(family: str) -> tuple[Array, Array]:
    """Sizes (G, tau, T), [cells, 3], and the exact A of each with `_RATES`, [cells, 2].

    The steps are those of the rate form with theta = 1, eta = sqrt(G/(T tau)), and gamma L tau is
    below 1/2. Source: docs/theory.md, averages late by whole rounds, rate.
    """
    alpha, beta = (np.array(part) for part in zip(*_RATES, strict=True))
    sizes, values = [], []
    powers = [2**exponent for exponent in range(17)]
    for workers, tau, rounds in product(powers[1:7], powers[:7], powers[8:]):
        eta = np.sqrt(workers / (rounds * tau))
        if eta * tau < 0.5:
            which = variants(eta * (1 - beta) / alpha, outer_step=alpha, momentum=beta, noise=1.0)
            size = RunSize(workers=workers, rounds=rounds, local_steps=tau)
            sizes.append((workers, tau, rounds))
            values.append(exact(FAMILIES[family](workers), which, size).gradient)
    return np.array(sizes, dtype=float), np.array(values)


def fit(sizes: Array, values: Array) -> Array:
    """Nonnegative coefficients of 1/sqrt(G T tau), 1/T, G/T and G tau/T."""
    workers, tau, rounds = sizes.T
    root = 1 / np.sqrt(workers * tau * rounds)
    columns = [root, 1 / rounds, workers / rounds, workers * tau / rounds]
    return np.asarray(nnls(np.stack(columns, axis=1) / values[:, None], np.ones(len(values)))[0])


def last_interval(sizes: Array, values: Array) -> tuple[float, float]:
    """An interval of 95 % of the coefficient of G tau/T, by resampling cells 400 times."""
    draws = np.random.default_rng(2).integers(len(values), size=(400, len(values)))
    low, high = np.quantile([fit(sizes[d], values[d])[-1] for d in draws], [0.025, 0.975])
    return float(low), float(high)


def staleness(family: str, rounds: int, seeds: int) -> list[float]:
    """How many standard errors A of CO2 is above that of SlowMo with the same noise."""
    problem = FAMILIES[family](4)
    which = variants(
        np.array([0.02, 0.05, 0.02]) / problem.smoothness,
        outer_step=np.array([1.0, 1.0, 0.5]),
        momentum=np.array([0.0, 0.0, 0.5]),
        noise=1.0,
    )
    size = RunSize(workers=4, local_steps=4, rounds=rounds, seeds=seeds)
    late = run(problem, which, size, seed=5).gradient
    excess = late - run(problem, which, replace(size, delay=0), seed=5).gradient
    return list(excess.mean(axis=1) / excess.std(axis=1, ddof=1) * np.sqrt(seeds))


def rescue(family: str, delay: int, seeds: int) -> tuple[Array, Array]:
    """A over the squared gradient at the start, and the share that was clipped: [rules, loads]."""
    problem = FAMILIES[family](8)
    rules = [rule for name, rule in RULES.items() if delay or name != "gap-aware"]
    cases = [(load, *rule) for rule in rules for load in _LOADS]
    load, penalty, clip, most = (np.array(part) for part in zip(*cases, strict=True))
    which = variants(
        load / 16 / problem.smoothness,
        momentum=0.5,
        penalty=penalty,
        clip=clip,
        noise=1.0,
        most_penalty=most,
    )
    size = RunSize(workers=8, rounds=128, local_steps=16, seeds=seeds, delay=delay)
    outcome = run(problem, which, size, seed=9)
    first = (problem.gradient(problem.start) ** 2).sum()
    with np.errstate(invalid="ignore"):
        grown = np.nan_to_num(outcome.gradient.mean(axis=1), nan=np.inf, posinf=np.inf) / first
    return grown.reshape(len(rules), -1), outcome.clipped.reshape(len(rules), -1)


def slope(*, scaled: bool) -> float:
    """The exponent of T in A over the last three factors of 2, with a fixed step or the rate's."""
    rounds = 2.0 ** np.arange(8, 17)
    values = []
    for count in rounds[-4:]:
        which = variants(float(np.sqrt(4 / (count * 4))) if scaled else 0.05, noise=1.0)
        size = RunSize(workers=4, rounds=int(count), local_steps=4)
        values.append(exact(FAMILIES["isotropic"](4), which, size).gradient[0])
    return float(np.polyfit(np.log(rounds[-4:]), np.log(values), 1)[0])


def checks(cells: Cells, *, quick: bool) -> Iterator[Check | str]:
    """Whether the rate has its terms, staleness shows, rules rescue, and what must fail does."""
    yield from _rates(cells)
    excess = cells(staleness, [(family, 256, 32 if quick else 256) for family in EQUAL])
    yield Check(
        f"staleness alone: CO2 over SlowMo with the same noise is above {SCORE:g} standard errors",
        all(each > SCORE for line in excess for each in line),
        f"{sum(map(len, excess))} settings",
    )
    yield from _rescues(cells, quick=quick)
    fixed, scaled = slope(scaled=False), slope(scaled=True)
    yield Check(
        "negative control: with a fixed step there is no slope of -1/2 in T",
        abs(fixed) < _GENTLE < abs(scaled),
        f"{fixed:.3f}; with the step of the rate {scaled:.3f}",
    )
    task = MomentsTask("isotropic", 4, 8, 32, 150 if quick else 400, delay=0)
    right, wrong = (max(abs(z) for row in scores(task, claimed) for z in row) for claimed in (0, 1))
    yield Check(
        "negative control: runs without the delay fit SlowMo's oracle and not CO2's",
        right < SCORE < wrong,
        f"|z| up to {right:.1f} against SlowMo's, {wrong:.0f} against CO2's",
    )


def _rates(cells: Cells) -> Iterator[Check | str]:
    families = (*EQUAL, *UNEQUAL)
    lines: dict[tuple[str, float, float], tuple[float, float]] = {}
    for family, (sizes, values) in zip(
        families, cells(rate_points, [(family,) for family in families]), strict=True
    ):
        lines |= {
            (family, *p): last_interval(sizes, v) for p, v in zip(_RATES, values.T, strict=True)
        }
    alike = [low > 0 for (family, *_), (low, _) in lines.items() if family in EQUAL]
    unlike = [low > 0 for (family, *_), (low, _) in lines.items() if family in UNEQUAL]
    yield Check(
        "the term G tau/T is significant for heterogeneous problems, not for homogeneous ones",
        all(unlike) and not any(alike),
        f"heterogeneous {sum(unlike)} of {len(unlike)}, homogeneous {sum(alike)} of {len(alike)}",
    )
    yield "the coefficient of G tau/T\n\n" + table(
        ("problem", "alpha", "beta", "low", "high"),
        [(*key, f"{low:.3f}", f"{high:.3f}") for key, (low, high) in lines.items()],
    )


def _rescues(cells: Cells, *, quick: bool) -> Iterator[Check | str]:
    families = ("isotropic", "cosine") if quick else ("isotropic", "spread", "cosine", "hill")
    tasks = [(family, delay, 6 if quick else 16) for family in families for delay in (1, 0)]
    measured = dict(zip(tasks, cells(rescue, tasks), strict=True))
    names = list(RULES)
    grown = {(family, delay): lines for (family, delay, _), (lines, _) in measured.items()}
    lost, slowmo = grown["isotropic", 1] > 1, grown["isotropic", 0] > 1
    beyond = np.array(_LOADS) > 0.68
    slower = grown["isotropic", 1][1:, 0] > grown["isotropic", 1][0, 0]
    yield Check(
        "on quadratics CO2 diverges from gamma L tau = 0.68 on, where SlowMo does not; a penalty of"
        " 4 keeps it, and at small steps every rule only slows it down",
        bool(
            lost[0, beyond].all()
            and not lost[0, ~beyond].any()
            and not slowmo[0].any()
            and not lost[names.index("penalty 4")].any()
            and slower.all()
        ),
        f"without a rule A is {grown['isotropic', 1][0, -1]:.2g} times that at the start, SlowMo's"
        f" {grown['isotropic', 0][0, -1]:.2g}",
    )
    for (family, delay, _), (lines, clipped) in measured.items():
        rows = [
            (name, *(f"{a:.2g}" + (f" ({c:.0%})" if c else "") for a, c in zip(*pair, strict=True)))
            for name, *pair in zip(names, lines, clipped, strict=False)
        ]
        title = f"{'CO2' if delay else 'SlowMo'}, {family}: A over that at the start (clipped)"
        columns = ("rule", *(f"gamma L tau = {load:g}" for load in _LOADS))
        yield f"{title}\n\n{table(columns, rows)}"
