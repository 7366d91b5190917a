"""The whole protocol: measured cell by cell, in parallel, resumable; then judged."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed, parallel_config

from analysis.convergence.bound import TERMS, Bound, Infeasible, Setting
from analysis.convergence.protocol import controls, grid, oracle, rates, tightness
from analysis.convergence.protocol.tightness import Row
from co2sim.files import write_atomically

_LAYERS: dict[str, Any] = {
    "oracle": oracle,
    "grid": grid,
    "rates": rates,
    "isolation": controls,
}
"""Modules with `plan` and `measure`."""
LEAST_CONFIGURATIONS = 3000
TIGHT = 0.7
"""A ratio of measured to bound that one family has to exceed."""
_LEAST_CELLS = 30
_LEAST_EDGES = 20

Cell = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, and what was found."""

    claim: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was measured, judged."""

    quick: bool
    cells: int
    oracle: Mapping[str, Any]
    grid: Mapping[str, Any]
    rates: Mapping[str, Any]
    controls: Mapping[str, Any]
    rows: Sequence[Row]
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        """Whether everything holds."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All but the rows, as plain values."""
        return {
            "passed": self.passed,
            "quick": self.quick,
            "cells": self.cells,
            "checks": [
                {"claim": c.claim, "passed": c.passed, "found": c.found} for c in self.checks
            ],
            "oracle": self.oracle,
            "grid": self.grid,
            "rates": self.rates,
            "isolation": self.controls,
        }


def measure(
    folder: Path, *, quick: bool, jobs: int, progress: Callable[[int, int], None]
) -> dict[str, list[Cell]]:
    """Measure all cells that `folder` does not hold yet; finished ones stay there if interrupted.

    `progress` gets how many cells are done, and how many there are.
    """
    tasks = [
        (layer, spec) for layer, module in _LAYERS.items() for spec in module.plan(quick=quick)
    ]
    version = _version()
    places = {
        place: folder / f"{layer}-{_key(spec, version)}.json"
        for place, (layer, spec) in enumerate(tasks)
    }
    found: dict[int, Mapping[str, Any]] = {}
    for place, path in places.items():
        kept = _kept(path)
        if kept is not None:
            found[place] = kept
    missing = sorted(places.keys() - found.keys(), key=lambda place: -_cost(tasks[place][1]))
    progress(len(found), len(tasks))
    with parallel_config(backend="loky", inner_max_num_threads=1):
        results = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)(
            delayed(_one)(place, *tasks[place]) for place in missing
        )
        for place, cell in results:
            write_atomically({places[place]: json.dumps(cell).encode()})
            found[place] = cell
            progress(len(found), len(tasks))
    whole: dict[str, list[Cell]] = {layer: [] for layer in _LAYERS}
    for place, (layer, spec) in enumerate(tasks):
        whole[layer].append((spec, found[place]))
    return whole


def _kept(path: Path) -> Mapping[str, Any] | None:
    """The cell of a file; None if there is none, or if what is there was cut off."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and found else None


def _one(place: int, layer: str, spec: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    return place, _LAYERS[layer].measure(spec)


def _cost(spec: Mapping[str, Any]) -> float:
    """Cells that take long go first, so that no core waits for the last one."""
    rounds = spec.get("rounds", 1000)
    total = sum(rounds) if isinstance(rounds, list) else rounds
    heavy = 50 if str(spec.get("family")).startswith("logistic") else 1
    return float(total * spec.get("local_steps", 16) * heavy)


def _version() -> str:
    """A hash of the whole wing: a change of any of its modules makes measured cells stale."""
    folder = Path(__file__).parents[1]
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _key(spec: Mapping[str, Any], version: str) -> str:
    text = json.dumps(spec, sort_keys=True) + version
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def judge(
    measured: Mapping[str, Sequence[Cell]],
    *,
    quick: bool,
    evaluate: Callable[[Setting], Bound | Infeasible] | None = None,
) -> Findings:
    """What the cells say. Another `evaluate` puts another bound in place of ours."""
    rows = tightness.rows(measured["grid"], evaluate)
    parts = {
        "oracle": oracle.summary(measured["oracle"]),
        "grid": tightness.summary(rows),
        "rates": rates.summary(measured["rates"]),
        "controls": controls.summary(measured["isolation"]),
    }
    return Findings(
        quick=quick,
        cells=sum(len(cells) for cells in measured.values()),
        rows=rows,
        checks=[
            *_oracle_checks(parts["oracle"]),
            *_grid_checks(parts["grid"]),
            *_rate_checks(parts["rates"]),
            *_control_checks(parts["controls"]),
        ],
        **parts,
    )


def _oracle_checks(found: Mapping[str, Any]) -> Iterator[Check]:
    error, score, edge = (
        found[name] for name in ("largest_identity_error", "largest_score", "largest_edge_error")
    )
    yield Check(
        f"identities of the derivation hold to {oracle.IDENTITY:g}",
        error <= oracle.IDENTITY,
        f"largest relative error {error:.1e} on {found['identities']} settings",
    )
    yield Check(
        f"simulator against oracle: |z| < {oracle.SCORE:g} on {_LEAST_CELLS} settings or more",
        score < oracle.SCORE and found["configurations"] >= _LEAST_CELLS,
        f"largest {score:.2f} of {len(found['scores'])} z on {found['configurations']}",
    )
    yield Check(
        f"edge of stability within {oracle.EDGE:g} on {_LEAST_EDGES} (alpha, beta) or more",
        edge <= oracle.EDGE and len(found["edges"]) >= _LEAST_EDGES,
        f"largest distance {edge:.1e} on {len(found['edges'])}",
    )


def _grid_checks(found: Mapping[str, Any]) -> Iterator[Check]:
    yield Check(
        "no violation of the bound at mean + 3 standard errors, on"
        f" {LEAST_CONFIGURATIONS:,} distinct configurations or more",
        found["violations"] == 0 and found["configurations"] >= LEAST_CONFIGURATIONS,
        f"{found['violations']} violations on {found['configurations']:,} distinct ones of"
        f" {found['settings']:,} settings ({found['infeasible']} infeasible)",
    )
    name, best = max(found["by_family"].items(), key=lambda item: item[1]["largest"])
    yield Check(
        f"measured/bound exceeds {TIGHT:g} on a family: the bound is not vacuous",
        best["largest"] > TIGHT,
        f"{best['largest']:.3f} on {name}",
    )
    wrong = {name: found["noticed"][name]["violations"] for name in TERMS}
    yield Check(
        "the grid can fail: it does when any one term is missing, a tenth or half of itself",
        all(count > 0 for counts in wrong.values() for count in counts.values()),
        "violations with half of it: "
        + ", ".join(f"{name} {counts['0.5']:,}" for name, counts in wrong.items()),
    )


def _rate_checks(found: Mapping[str, Any]) -> Iterator[Check]:
    agreed = [line["agree"] for line in found["agreement"]]
    yield Check(
        "slopes in the small stratum: the oracle's are in the intervals of the simulated ones",
        all(agreed) and bool(agreed),
        f"{sum(agreed)} of {len(agreed)} fits of (G, tau, T)",
    )
    fits = found["fits"]
    unlike = [line for line in fits if line["heterogeneous"]]
    alike = [line for line in fits if not line["heterogeneous"]]
    yield Check(
        "the term G tau/T is found for heterogeneous problems and not for homogeneous ones",
        all(line["found"] for line in unlike) and not any(line["found"] for line in alike),
        f"heterogeneous {sum(line['found'] for line in unlike)} of {len(unlike)},"
        f" homogeneous {sum(line['found'] for line in alike)} of {len(alike)}",
    )


def _control_checks(found: Mapping[str, Any]) -> Iterator[Check]:
    controls = found["controls"]
    yield Check(
        "staleness alone: CO2 over SlowMo with the same noise is above 4 standard errors",
        found["staleness_found"],
        f"{len(found['staleness'])} settings",
    )
    yield Check(
        "negative control: with a fixed step there is no slope of -1/2 in T",
        found["fixed_fails"],
        f"{controls['fixed_slope']:.3f}; with the step of the rate {controls['scaled_slope']:.3f}",
    )
    growth = [line["growth"] for line in controls["beyond"] if line["factor"] > 1]
    yield Check(
        "negative control: 5 % beyond the edge runs diverge, 5 % below they do not",
        found["edge_fails"],
        f"f - f_inf grows at least {min(growth):,.0f} fold in 500 rounds",
    )
    yield Check(
        "negative control: runs without the delay fit SlowMo's oracle, and CO2's refuses them",
        found["delay_fails"],
        f"|z| up to {controls['delay_0_against_delay_0']:.1f} against SlowMo's,"
        f" {controls['delay_0_against_delay_1']:.0f} against CO2's",
    )
