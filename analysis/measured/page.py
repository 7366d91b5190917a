"""The page of `co2analysis compare`: what was predicted, what was measured, and why they differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count
from typing import Any

from analysis.measured import charts, op_table
from analysis.measured.attribution import AGREES, Cause
from analysis.measured.charts import WAITS, windows
from analysis.measured.comparison import OrderError, RunComparison, order_errors, summarise
from analysis.measured.op_table import OpError, by_label, causes
from co2sim.catalog import Fact
from co2sim.catalog.specs import UNITS
from co2sim.common.plots import GREY
from co2sim.common.units import counted, duration, percent, scaled
from co2sim.hardware.cluster import Cluster
from co2sim.report.charts import timeline
from co2sim.report.html import MAX_ROUNDS, Figure, Page, PageSection, Timelines
from co2sim.report.tables import Table


@dataclass(frozen=True)
class ComparedRun:
    """A run under a name that no other run of the page has."""

    name: str
    run: RunComparison

    @cached_property
    def ops(self) -> list[OpError]:
        """Errors by op."""
        return by_label(self.run)

    @cached_property
    def causes(self) -> dict[Cause, float]:
        """Shares of causes, the largest first."""
        return causes(self.ops)

    @property
    def measured(self) -> float:
        """Seconds of a round."""
        return float(self.run.measured["round_time_s"])

    @property
    def sentence(self) -> str:
        """The whole answer about this run."""
        cause, share = next(iter(self.causes.items()))
        why = (
            f"the largest cause of the errors of its ops is {cause.words} ({share:.0%})"
            if share
            else f"no op is off by more than {AGREES:.0%}"
        )
        return (
            f"{self.name}: a round took {duration(self.measured)}, predicted"
            f" {duration(self.run.predicted.round_time_s)}"
            f" ({percent(self.run.round_time_error, 1)}); {why}.{self._drift}"
        )

    @property
    def _drift(self) -> str:
        """How far the processors were from what the cluster says, if that is more than a little."""
        speed, error = self.run.speed, self.run.at_speed_error
        if speed is None or error is None or abs(speed - 1) < AGREES:
            return ""
        return (
            f" Large matrix products were {abs(speed - 1):.0%}"
            f" {'faster' if speed > 1 else 'slower'} in the run than its cluster says; at that"
            f" speed the error is {percent(error, 1)}."
        )


def named(comparisons: Sequence[RunComparison]) -> list[ComparedRun]:
    """Each run under its name, with a number where another one has it already."""
    found: dict[str, ComparedRun] = {}
    for run in comparisons:
        names = (run.name if n == 1 else f"{run.name} ({n})" for n in count(1))
        name = next(name for name in names if name not in found)
        found[name] = ComparedRun(name, run)
    return list(found.values())


MAX_RUNS = MAX_ROUNDS // 2
"""With their own charts; a run has two timelines."""
_MIN = 0.005
"""Share of a cause that is said: what rounds to 1 %."""


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
    order = sorted(runs, key=lambda one: -abs(one.run.round_time_error))[:MAX_RUNS]
    shown = [one for one in runs if one in order]
    return Page(
        answer=_answer(runs, shown),
        doubts=list(_doubts(runs)),
        sections=[
            _overview(runs),
            PageSection("times", "Measured against predicted", _which(runs), list(_times(shown))),
            PageSection("ops", "Ops", figures=[_ops(one) for one in shown]),
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


def _answer(runs: Sequence[ComparedRun], shown: Sequence[ComparedRun]) -> list[str]:
    if len(runs) == 1:
        return [runs[0].sentence]
    whole = summarise([one.run for one in runs])
    worst = max(runs, key=lambda one: abs(one.run.round_time_error))
    return [
        (
            f"The predicted rounds of {len(runs)} measured runs are off by"
            f" {whole.median_round_time_error:.1%} in the median, and by"
            f" {percent(worst.run.round_time_error, 1)} at most ({worst.name})."
        ),
        *(f"{error.sentence[0].upper()}{error.sentence[1:]}." for error in _orders(runs)),
        *(one.sentence for one in shown),
    ]


def _orders(runs: Sequence[ComparedRun]) -> list[OrderError]:
    return order_errors([(one.name, one.run) for one in runs])[:MAX_RUNS]


def _doubts(runs: Sequence[ComparedRun]) -> Iterator[str]:
    if any(one.run.record.kernels == "sleep" for one in runs):
        yield (
            "Kernels that sleep take as long as predicted: only communication is tested there, and"
            " the error of a round is made smaller by compute."
        )
    clocks = max(one.run.record.clock_error for one in runs)
    if clocks:
        yield f"Clocks of ranks agree to {duration(clocks)} only: shorter waits do not count."


def _which(runs: Sequence[ComparedRun]) -> str:
    if len(runs) <= MAX_RUNS:
        return ""
    return f"Of the {MAX_RUNS} runs whose rounds are furthest off; the files hold all."


def _overview(runs: Sequence[ComparedRun]) -> PageSection:
    """Errors of several runs; empty for one."""
    if len(runs) == 1:
        return PageSection("runs", "Runs")
    found = {
        one.name: {
            what: error
            for what, error in (
                ("round time", one.run.round_time_error),
                ("communication busy", one.run.comm_busy_error),
                ("communication exposed", one.run.exposed_error),
            )
            if error is not None
        }
        for one in runs
    }
    rows = [
        [
            one.name,
            one.run.predicted.strategy,
            one.run.predicted.cluster,
            str(one.run.predicted.gpus),
            duration(one.run.predicted.round_time_s),
            duration(one.measured),
            str(one.run.schedule.steps),
            *(duration(step) for step in one.run.step_times),
            *(_signed(found[one.name].get(what)) for what in _ERRORS),
        ]
        for one in runs
    ]
    times = ("predicted round", "measured", "steps per round", "predicted step", "measured step")
    columns = ("run", "strategy", "cluster", "GPUs", *times, *_ERRORS)
    note = "0 is a prediction that is right; to the right of it the prediction is too long."
    label = "signed errors of the predicted times, a line for each run"
    figure = Figure("", note, label, charts.errors(found), Table(columns, rows, 3))
    return PageSection("runs", "Runs", figures=[figure])


_ERRORS = ("round time", "communication busy", "communication exposed")


def _times(shown: Sequence[ComparedRun]) -> Iterator[Figure]:
    for one in shown:
        drawn = [
            {
                "what": f"{time.words.removesuffix(', per round')}, {_signed(time.error)}",
                "side": side,
                "ms": 1e3 * seconds,
                "error": _signed(time.error),
            }
            for time in one.run.times
            for side, seconds in zip(charts.SIDES, (time.predicted, time.measured), strict=True)
            if seconds is not None
        ]
        rows = [
            [
                time.words,
                duration(time.predicted),
                "-" if time.measured is None else duration(time.measured),
                _signed(time.error),
            ]
            for time in one.run.times
        ]
        here = one.run.predicted
        yield Figure(
            title=one.name,
            note=f"{here.strategy} of {here.model}, {counted(here.gpus, 'GPU')};"
            f" {counted(one.run.record.rounds, 'round')} measured. Below each name is the error of"
            " the prediction.",
            label=f"times of a round of {one.name}, predicted and measured",
            chart=charts.times(drawn),
            table=Table(("time of a round", *charts.SIDES, "error"), rows),
        )


def _ops(one: ComparedRun) -> Figure:
    rows = [
        [
            op.label,
            op.cause.words if op.cause else charts.AGREES,
            f"{op.count:g}",
            duration(op.predicted),
            duration(op.measured),
            _signed(op.error),
            f"{op.share:.1%}",
        ]
        for op in one.ops
    ]
    columns = ("op", "cause", "per round", *charts.SIDES, "error", "share of all errors")
    return Figure(
        title=one.name,
        note="A point for each op, mean over rounds and ranks: above the dashed line it took longer"
        " than predicted. The larger, the more of all errors.",
        label=f"measured over predicted time of each op of {one.name}",
        chart=charts.ops(one.ops),
        table=Table(columns, rows, 2),
    )


def _causes(runs: Sequence[ComparedRun]) -> PageSection:
    found = {one.name: one.causes for one in runs}
    if not any(share for shares in found.values() for share in shares.values()):
        text = f"No op of any run is off by more than {AGREES:.0%}."
        return PageSection("causes", "What causes the errors", notes=[text])
    named = [cause for cause in Cause if any(shares[cause] >= _MIN for shares in found.values())]
    rows = [[name, *(f"{shares[cause]:.0%}" for cause in named)] for name, shares in found.items()]
    figure = Figure(
        title="",
        note="What part of the absolute errors of ops each cause has. Parts of an error add up to"
        " it.",
        label="shares of causes, a bar for each run",
        chart=charts.causes(found),
        table=Table(("run", *(cause.words for cause in named)), rows),
    )
    return PageSection("causes", "What causes the errors", figures=[figure])


def _time(shown: Sequence[ComparedRun], rank: int) -> PageSection:
    spent = {
        f"{one.name}, {side}": part
        for one in shown
        for side, part in zip(charts.SIDES, one.run.time_breakdowns, strict=True)
    }
    rounds = {
        f"{one.name}, {side}": during.round()
        for one in shown
        for side, during in zip(charts.SIDES, windows(one.run, rank), strict=True)
    }
    rows = [
        [name, *map(duration, (part.compute, part.communication, part.waiting, part.idle))]
        for name, part in spent.items()
    ]
    figure = Figure(
        title="A round, on average of the ranks",
        label="where a round went, a bar for each run as predicted and as measured",
        chart=charts.spent(spent),
        table=Table(("round", *op_table.BREAKDOWN.values()), rows),
    )
    note = f"Rank {rank}: the last round that was measured, or two where a round is one step."
    chart = timeline(rounds.values(), {WAITS: GREY})
    lines = Timelines(note, rounds, chart)
    return PageSection("time", "Where the time goes", figures=[figure], timelines=lines)


def _lines(runs: Sequence[ComparedRun], kind: str) -> list[str]:
    """Warnings, or notes, of the predictions, once each."""
    found: Mapping[str, str] = {
        text: one.name for one in reversed(runs) for text in getattr(one.run.predicted, kind)
    }
    return [f"{name}: {text}" for text, name in found.items()]


def _signed(error: float | None) -> str:
    return "-" if error is None else percent(error, 1)


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
        return ", ".join(_listed(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
