"""The page of `co2analysis compare`: what was predicted, what was measured, and why they differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from analysis.measured import charts, op_table
from analysis.measured.attribution import AGREES, Cause
from analysis.measured.charts import WAITS, windows
from analysis.measured.comparison import BREAKDOWN, RunComparison, order_errors, summarise
from analysis.measured.op_table import SAID, dashed, signed
from co2sim.catalog import Fact
from co2sim.catalog.specs import UNITS
from co2sim.common.plots import GREY
from co2sim.common.units import counted, duration, scaled
from co2sim.hardware.cluster import Cluster
from co2sim.report.charts import timeline
from co2sim.report.html import MAX_ROUNDS, Figure, Page, PageSection, Timelines
from co2sim.report.tables import Table
from co2sim.report.text.screen import Screen


def sentence(run: RunComparison) -> str:
    """The whole answer about a run."""
    cause, share = next(iter(run.causes.items()))
    why = (
        f"the largest cause of the errors of its ops is {cause.words} ({share:.0%})"
        if share
        else f"no op is off by more than {AGREES:.0%}"
    )
    return (
        f"{run.name}: a round took {duration(run.measured_round)}, predicted"
        f" {duration(run.predicted.round_time_s)} ({signed(run.round_time_error)});"
        f" {why}.{_drift(run)}"
    )


def _drift(run: RunComparison) -> str:
    """How far the processors were from what the cluster says, if that is more than a little."""
    speed, error = run.speed, run.at_speed_error
    if speed is None or error is None or abs(speed - 1) < AGREES:
        return ""
    return (
        f" Large matrix products were {abs(speed - 1):.0%}"
        f" {'faster' if speed > 1 else 'slower'} in the run than its cluster says; at that"
        f" speed the error is {signed(error)}."
    )


def named(comparisons: Sequence[RunComparison]) -> list[RunComparison]:
    """Each run under its name, with a number where another one has it already."""
    by_name: dict[str, RunComparison] = {}
    for run in comparisons:
        names = (run.name if n == 1 else f"{run.name} ({n})" for n in count(1))
        name = next(name for name in names if name not in by_name)
        by_name[name] = run if name == run.name else replace(run, name=name)
    return list(by_name.values())


MAX_RUNS = MAX_ROUNDS // 2
"""With their own charts; a run has two timelines."""


def page(
    comparisons: Sequence[RunComparison],
    command: str,
    rank: int = 0,
    stated: Sequence[Fact] = (),
    changes: Sequence[str] = (),
) -> Page:
    """What `command` says: `stated` and `changes` are as in `_inputs`.

    Raises OptionError for a rank that was not traced.
    """
    runs = named(comparisons)
    furthest = sorted(runs, key=lambda run: -abs(run.round_time_error))[:MAX_RUNS]
    shown = [run for run in runs if any(run is other for other in furthest)]
    return Page(
        screen=Screen(answer=_answer(runs, shown)),
        doubts=list(_doubts(runs)),
        sections=[
            _overview(runs),
            PageSection("times", "Measured against predicted", _which(runs), list(_times(shown))),
            PageSection("ops", "Ops", figures=[_ops(run) for run in shown]),
            _causes(runs),
            _time(shown, rank),
            PageSection(
                "trust",
                "How sure this is",
                warnings=_lines(runs, "warnings"),
                notes=_lines(runs, "notes"),
            ),
            _inputs(comparisons, stated, changes),
        ],
        commands=[command],
        files={
            "ops.csv": ("text/csv", op_table.to_csv(comparisons).decode()),
            "comparison.json": ("application/json", json.dumps(op_table.to_dict(comparisons))),
        },
    )


def _answer(runs: Sequence[RunComparison], shown: Sequence[RunComparison]) -> list[str]:
    if len(runs) == 1:
        return [sentence(runs[0])]
    worst = max(runs, key=lambda run: abs(run.round_time_error))
    return [
        (
            f"The predicted rounds of {len(runs)} measured runs are off by"
            f" {summarise(runs)['median_round_time_error']:.1%} in the median, and by"
            f" {signed(worst.round_time_error)} at most ({worst.name})."
        ),
        *(
            f"{error.sentence[0].upper()}{error.sentence[1:]}."
            for error in order_errors(runs)[:MAX_RUNS]
        ),
        *map(sentence, shown),
    ]


def _doubts(runs: Sequence[RunComparison]) -> Iterator[str]:
    if any(run.record.kernels == "sleep" for run in runs):
        yield (
            "Kernels that sleep take as long as predicted: only communication is tested there, and"
            " the error of a round is made smaller by compute."
        )
    clocks = max(run.record.clock_error for run in runs)
    if clocks:
        yield f"Clocks of ranks agree to {duration(clocks)} only: shorter waits do not count."


def _which(runs: Sequence[RunComparison]) -> str:
    if len(runs) <= MAX_RUNS:
        return ""
    return f"Of the {MAX_RUNS} runs whose rounds are furthest off; the files hold all."


def _overview(runs: Sequence[RunComparison]) -> PageSection:
    """Errors of several runs; empty for one."""
    if len(runs) == 1:
        return PageSection("runs", "Runs")
    errors = {
        run.name: {
            words: error
            for words, error in (
                ("round time", run.round_time_error),
                ("communication busy", run.comm_busy_error),
                ("communication exposed", run.exposed_error),
            )
            if error is not None
        }
        for run in runs
    }
    note = "0 is a prediction that is right; to the right of it the prediction is too long."
    label = "signed errors of the predicted times, a line for each run"
    figures = [
        Figure("", note, label, charts.errors(errors), op_table.rounds(runs)),
        Figure("Communication of a round", table=op_table.communication(runs), folded=True),
    ]
    return PageSection("runs", "Runs", figures=figures)


def _times(shown: Sequence[RunComparison]) -> Iterator[Figure]:
    for run in shown:
        drawn = [
            {
                "what": f"{time.words.removesuffix(', per round')}, {dashed(time.error, signed)}",
                "side": side,
                "ms": 1e3 * seconds,
                "error": dashed(time.error, signed),
            }
            for time in run.times
            for side, seconds in zip(charts.SIDES, (time.predicted, time.measured), strict=True)
            if seconds is not None
        ]
        here = run.predicted
        yield Figure(
            title=run.name,
            note=f"{here.strategy} of {here.model}, {counted(here.gpus, 'GPU')};"
            f" {counted(run.record.rounds, 'round')} measured. Below each name is the error of"
            " the prediction.",
            label=f"times of a round of {run.name}, predicted and measured",
            chart=charts.times(drawn),
            table=op_table.times(run),
        )


def _ops(run: RunComparison) -> Figure:
    return Figure(
        title=run.name,
        note="A point for each op, mean over rounds and ranks: above the dashed line it took longer"
        " than predicted. The larger, the more of all errors.",
        label=f"measured over predicted time of each op of {run.name}",
        chart=charts.ops(run.ops),
        table=op_table.ops(run),
    )


def _causes(runs: Sequence[RunComparison]) -> PageSection:
    shares = {run.name: run.causes for run in runs}
    if not any(share for of_run in shares.values() for share in of_run.values()):
        text = f"No op of any run is off by more than {AGREES:.0%}."
        return PageSection("causes", "What causes the errors", notes=[text])
    said = [cause for cause in Cause if any(share[cause] >= SAID for share in shares.values())]
    rows = [[name, *(f"{of_run[cause]:.0%}" for cause in said)] for name, of_run in shares.items()]
    figure = Figure(
        title="",
        note="What part of the absolute errors of ops each cause has. Parts of an error add up to"
        " it.",
        label="shares of causes, a bar for each run",
        chart=charts.causes(shares),
        table=Table(("run", *(cause.words for cause in said)), rows),
    )
    return PageSection("causes", "What causes the errors", figures=[figure])


def _time(shown: Sequence[RunComparison], rank: int) -> PageSection:
    spent = {
        f"{run.name}, {side}": asdict(part)
        for run in shown
        for side, part in zip(charts.SIDES, run.time_breakdowns, strict=True)
    }
    rounds = {
        f"{run.name}, {side}": during.round()
        for run in shown
        for side, during in zip(charts.SIDES, windows(run, rank), strict=True)
    }
    rows = [[name, *map(duration, part.values())] for name, part in spent.items()]
    figure = Figure(
        title="A round, on average of the ranks",
        label="where a round went, a bar for each run as predicted and as measured",
        chart=charts.spent(spent),
        table=Table(("round", *BREAKDOWN.values()), rows),
    )
    note = f"Rank {rank}: the last round that was measured, or two where a round is one step."
    chart = timeline(rounds.values(), {WAITS: GREY})
    lines = Timelines(note, rounds, chart)
    return PageSection("time", "Where the time goes", figures=[figure], timelines=lines)


def _lines(runs: Sequence[RunComparison], kind: str) -> list[str]:
    """Warnings, or notes, of the predictions, once each."""
    names: Mapping[str, str] = {
        text: run.name for run in reversed(runs) for text in getattr(run.predicted, kind)
    }
    return [f"{name}: {text}" for text, name in names.items()]


_RECORDED = "recorded with the run"
_GIVEN = "--set"


def _inputs(
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
    different: list[tuple[Cluster, list[str]]] = []
    for run in runs:
        names = next((names for cluster, names in different if cluster == run.cluster), None)
        if names is None:
            different.append((run.cluster, names := []))
        names.append(run.name)
    return different


def recorded(cluster: Cluster, changes: Sequence[str] = ()) -> Iterator[Fact]:
    """The numbers of a recorded cluster, those of `changes` marked as given by the user."""
    for path, value in _leaves("", asdict(cluster)):
        by_user = any(f"{path}.".startswith(f"{change}.") for change in changes)
        yield Fact(path, _text(path, value), _GIVEN if by_user else _RECORDED)


def _leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """Values at dotted paths; without those that were not stated."""
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
        return ", ".join(map(_listed, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
