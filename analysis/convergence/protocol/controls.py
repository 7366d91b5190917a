"""One cause at a time, with common random numbers; what penalty and clipping do; what must fail."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.convergence import bound, exact_moments
from analysis.convergence.bound import Bound, Setting
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.problems import Array, Quadratic
from analysis.convergence.protocol import oracle, rates
from analysis.convergence.simulate import Variants, run, variants

_SIGMA2 = 1.0
_CLIPS = (np.inf, 8.0, 2.0, 0.5)
_PENALTIES = (1.0, 2.0, 4.0)
_LOADS = (0.2, 0.4, 0.8, 1.2, 1.6)
"""gamma L tau of the runs that penalty and clipping may rescue."""
_STEPS = 16
_GENTLE = 0.3
"""Largest slope in T, in magnitude, of a run whose fixed step leaves it at its noise floor."""


def plan(*, quick: bool) -> Iterator[dict[str, Any]]:
    """All experiments of this layer."""
    seeds = 32 if quick else 256
    yield {"what": "staleness", "seeds": seeds, "rounds": 256}
    yield {"what": "terms"}
    for family in ("isotropic", "cosine") if quick else ("isotropic", "spread", "cosine", "hill"):
        for delay in (1, 0):
            yield {"what": "rescue", "family": family, "delay": delay, "seeds": 16, "rounds": 128}
    yield {"what": "controls", "seeds": 400}


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """One experiment."""
    return _MEASURES[spec["what"]](spec)


def _staleness(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The excess of CO2 over SlowMo in A, with the same noise."""
    lines = []
    for family in ("isotropic", "spread", "cosine", "hill"):
        problem = FAMILIES[family](4)
        which = variants(
            np.array([0.02, 0.05, 0.02]) / problem.smoothness,
            outer_step=np.array([1.0, 1.0, 0.5]),
            momentum=np.array([0.0, 0.0, 0.5]),
            noise=_SIGMA2,
        )
        sizes = {"workers": 4, "local_steps": 4, "rounds": spec["rounds"], "seeds": spec["seeds"]}
        late = run(problem, which, **sizes, delay=1, seed=5).gradient
        now = run(problem, which, **sizes, delay=0, seed=5).gradient
        lines += [
            {
                "family": family,
                "gamma": float(which.inner_step[place]),
                "beta": float(which.momentum[place]),
                "synchronous": float(now[place].mean()),
                "excess": float((late - now)[place].mean()),
                "error": float((late - now)[place].std(ddof=1) / np.sqrt(spec["seeds"])),
                "alone": float(
                    np.hypot(late[place].std(ddof=1), now[place].std(ddof=1))
                    / np.sqrt(spec["seeds"])
                ),
            }
            for place in range(len(which))
        ]
    return {"lines": lines}


def _terms(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the exact A on quadratics beside the term that covers each.

    A is linear in |x_0|^2 and sigma^2, so that runs without either give the other's part. Staleness
    is what delay adds to the part of the noise, drift what local steps add for workers that differ.
    """
    del spec
    lines = []
    for load in (0.1, 0.5, 0.95):
        for tau in (1, 4, 16):
            lines += list(_parts(load, tau))
    return {"lines": lines}


def _parts(fraction: float, tau: int) -> Iterator[dict[str, Any]]:
    problem = FAMILIES["isotropic"](4)
    two = FAMILIES["two kinds"](4)
    assert isinstance(problem, Quadratic)
    assert isinstance(two, Quadratic)
    whole = Setting(
        smoothness=1.0,
        noise=_SIGMA2,
        gap=float(problem.value(problem.start)),
        workers=4,
        rounds=4096,
        local_steps=tau,
        inner_step=1.0,
        convex=True,
    )
    whole = replace(whole, inner_step=fraction * bound.largest_inner_step(whole))
    covered = bound.evaluate(whole)
    assert isinstance(covered, Bound)
    sizes: dict[str, Any] = {"workers": 4, "rounds": whole.rounds, "local_steps": tau}
    noisy = variants(whole.inner_step, noise=_SIGMA2)
    quiet = variants(whole.inner_step)
    resting = replace(problem, start=0 * problem.start)
    start = exact_moments.exact(problem, quiet, **sizes)
    late, now = (exact_moments.exact(resting, noisy, **sizes, delay=delay) for delay in (1, 0))
    single = exact_moments.exact(
        resting, noisy, workers=4, rounds=whole.rounds * tau, local_steps=1, delay=0
    )
    floor = exact_moments.exact(replace(two, start=two.optimum), quiet, **sizes, spread=True)
    mixed = replace(whole, noise=0.0, heterogeneity=float(floor.spread[0]))
    apart = bound.evaluate(mixed)
    assert isinstance(apart, Bound)
    for name, part, term in (
        ("optimization", start.gradient[0], covered.optimization),
        ("noise", single.gradient[0], covered.noise),
        ("staleness", late.gradient[0] - now.gradient[0], covered.staleness),
        ("drift", floor.gradient[0], apart.drift),
    ):
        yield {
            "term": name,
            "fraction": fraction,
            "tau": tau,
            "measured": float(part),
            "bound": term,
            "ratio": float(part) / term if term else None,
        }


def _rescue(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A with several penalties and clips, for steps up to and beyond the edge of stability."""
    problem = FAMILIES[spec["family"]](8)
    grid = [
        (load / _STEPS / problem.smoothness, penalty, clip, aware)
        for load in _LOADS
        for penalty, clip, aware in _rules(spec["delay"])
    ]
    step, penalty, clip, aware = (np.array(part) for part in zip(*grid, strict=True))
    which = variants(
        step,
        outer_step=1.0,
        momentum=0.5,
        penalty=penalty,
        clip=clip,
        noise=_SIGMA2,
        gap_aware=aware,
    )
    found = run(
        problem,
        which,
        workers=8,
        rounds=spec["rounds"],
        local_steps=_STEPS,
        seeds=spec["seeds"],
        delay=spec["delay"],
        seed=9,
    )
    first = float((problem.gradient(problem.start) ** 2).sum())
    with np.errstate(invalid="ignore"):
        measured = np.nan_to_num(found.gradient.mean(axis=1), nan=np.inf, posinf=np.inf)
    return {
        "first": first,
        "lines": [
            {
                "load": load,
                "rule": _rule(which, place),
                "measured": min(float(measured[place]), 1e300),
                "clipped": float(found.clipped[place]),
                "lost": bool(measured[place] > first),
            }
            for place, load in enumerate(np.repeat(_LOADS, len(_rules(spec["delay"]))).tolist())
        ],
    }


def _rules(delay: int) -> list[tuple[float, float, bool]]:
    """Penalty, clip, and whether the penalty is gap-aware."""
    found = [(penalty, np.inf, False) for penalty in _PENALTIES]
    found += [(1.0, clip, False) for clip in _CLIPS[1:]]
    return [*found, (1.0, np.inf, True)] if delay else found


def _rule(which: Variants, place: int) -> str:
    if which.gap_aware[place]:
        return "gap-aware penalty"
    if np.isfinite(which.clip[place]):
        return f"clip {which.clip[place]:g}"
    penalty = which.penalty[place]
    return "neither" if penalty == 1 else f"penalty {penalty:g}"


def _controls(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What must not work."""
    problem = FAMILIES["isotropic"](4)
    assert isinstance(problem, Quadratic)
    rounds: Array = np.array([2.0**exponent for exponent in range(8, 17)])
    fixed = _over_rounds(problem, [variants(0.05, noise=_SIGMA2)] * len(rounds), rounds)
    tuned = [variants(float(np.sqrt(4 / (t * 4))), noise=_SIGMA2) for t in rounds]
    scaled = _over_rounds(problem, tuned, rounds)
    beyond = []
    for alpha, beta in ((1.0, 0.5), (0.5, 0.8), (1.5, 0.2)):
        for factor in (0.95, 1.05):
            progress = factor * exact_moments.edge(beta)
            step = 1 - (1 - progress / alpha) ** (1 / 4)
            which = variants(step, outer_step=alpha, momentum=beta)
            sizes: dict[str, Any] = {"workers": 1, "local_steps": 4, "seeds": 1}
            values = [
                float(run(problem, which, rounds=count, **sizes).value[0, 0])
                for count in (500, 1000)
            ]
            beyond.append(
                {"alpha": alpha, "beta": beta, "factor": factor, "growth": values[1] / values[0]}
            )
    cell = {
        "family": "isotropic",
        "workers": 4,
        "local_steps": 8,
        "rounds": 32,
        "delay": 0,
        "seeds": spec["seeds"],
    }
    right, wrong = (oracle.scores(cell, claimed=delay) for delay in (0, 1))
    return {
        "fixed_slope": _slope(rounds, fixed),
        "scaled_slope": _slope(rounds, scaled),
        "beyond": beyond,
        "delay_0_against_delay_0": max(abs(z) for row in right for z in row),
        "delay_0_against_delay_1": max(abs(z) for row in wrong for z in row),
    }


def _over_rounds(problem: Quadratic, which: Sequence[Variants], rounds: Array) -> Array:
    values = [
        exact_moments.exact(problem, each, workers=4, rounds=int(count), local_steps=4).gradient[0]
        for each, count in zip(which, rounds, strict=True)
    ]
    return np.array(values)


def _slope(rounds: Array, values: Array) -> float:
    """The exponent of T over the last three factors of 2."""
    return float(np.polyfit(np.log(rounds[-4:]), np.log(values[-4:]), 1)[0])


_MEASURES = {
    "staleness": _staleness,
    "terms": _terms,
    "rescue": _rescue,
    "controls": _controls,
}


def summary(
    results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    """Everything that the report says about isolation and negative controls."""
    by = {(s["what"], s.get("delay"), s.get("family")): cell for s, cell in results}
    controls = by["controls", None, None]
    stable = [line for line in controls["beyond"] if line["factor"] < 1]
    unstable = [line for line in controls["beyond"] if line["factor"] > 1]
    return {
        "staleness": by["staleness", None, None]["lines"],
        "terms": by["terms", None, None]["lines"],
        "rescue": [
            {"family": family, "delay": delay, **cell}
            for (what, delay, family), cell in by.items()
            if what == "rescue"
        ],
        "controls": controls,
        "fixed_fails": abs(controls["fixed_slope"]) < _GENTLE < abs(controls["scaled_slope"]),
        "edge_fails": all(line["growth"] > 1 for line in unstable)
        and all(line["growth"] < 1 for line in stable),
        "delay_fails": controls["delay_0_against_delay_0"]
        < oracle.SCORE
        < controls["delay_0_against_delay_1"],
        "staleness_found": all(
            line["excess"] > oracle.SCORE * line["error"]
            for line in by["staleness", None, None]["lines"]
            if line["family"] in rates.EQUAL
        ),
    }
