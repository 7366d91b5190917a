"""The numbers that runs were predicted from, with their sources, and what the runs ran on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from analysis.measured.comparison import RunComparison
from analysis.measured.overrides import UNITS
from co2sim.catalog import Fact
from co2sim.cluster import Cluster
from co2sim.report.page import Figure, PageSection
from co2sim.report.tables import Table
from co2sim.units import duration, scaled

_RECORDED = "recorded with the run"
_GIVEN = "--set"


def section(
    runs: Sequence[RunComparison], stated: Sequence[Fact] = (), changes: Sequence[str] = ()
) -> PageSection:
    """Every number of each cluster that predicts, with its source.

    `stated` are those of a cluster that stands in for the recorded ones, `changes` the paths that
    were changed.
    """
    figures = []
    for cluster, names in _clusters(runs):
        facts = stated or list(recorded(cluster, changes))
        rows = [[f.path, f.value, "assumed" if f.assumed else "", f.source] for f in facts]
        of = ", ".join(names) if len(names) <= _FEW else f"{len(names)} runs"
        table = Table(("number", "value", "status", "source"), rows, 4)
        figures.append(Figure(f"{cluster.name}, for {of}", table=table, folded=True))
    figures.append(Figure("What the runs ran on", table=_environments(runs), folded=True))
    return PageSection("inputs", "Inputs", figures=figures)


_FEW = 3


def _environments(runs: Sequence[RunComparison]) -> Table:
    names = list(dict.fromkeys(name for run in runs for name in run.record.environment))
    rows = [
        [
            run.name,
            run.predicted.model,
            run.record.kernels,
            *(run.record.environment.get(name, "-") for name in names),
        ]
        for run in runs
    ]
    return Table(("run", "model", "kernels", *names), rows, 3 + len(names))


def _clusters(runs: Sequence[RunComparison]) -> list[tuple[Cluster, list[str]]]:
    """Different clusters, with the names of their runs."""
    found: list[tuple[Cluster, list[str]]] = []
    for run in runs:
        known = next((names for cluster, names in found if cluster == run.cluster), None)
        if known is None:
            found.append((run.cluster, [run.name]))
        else:
            known.append(run.name)
    return found


def recorded(cluster: Cluster, changes: Sequence[str] = ()) -> Iterator[Fact]:
    """The numbers of a recorded cluster, those of `changes` marked as given by the user."""
    for path, value in _leaves("", asdict(cluster)):
        given = any(path == one or path.startswith(f"{one}.") for one in changes)
        yield Fact(path, _text(path, value), _GIVEN if given else _RECORDED)


def _leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """Values at dotted paths; without those that nobody stated."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), inner)
    elif value is not None:
        yield path, value


def _text(path: str, value: Any) -> str:
    *_, name = path.split(".")
    unit = "FLOP/s" if path.startswith("gpu.peak.") else UNITS.get(name)
    if unit is None or not isinstance(value, int | float):
        return f"{value:.4g}" if isinstance(value, float) else _listed(value)
    return duration(value) if unit == "s" else scaled(value, unit)


def _listed(value: object) -> str:
    """Pairs, such as sizes and efficiencies, or whatever else it is."""
    if isinstance(value, tuple | list):
        return ", ".join(_listed(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
