"""The tables of a report: names of columns, and texts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from co2sim.catalog import Fact
from co2sim.common.units import counted, duration, figures, number, percent, scaled
from co2sim.prediction.figures import in_table
from co2sim.prediction.intervals import error_model
from co2sim.prediction.notes import lacking
from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_memory import StepMemory
from co2sim.prediction.totals import Totals
from co2sim.report.text import solve, totals
from co2sim.report.text.answer import LACKS, marked
from co2sim.report.text.memory import SAVINGS
from co2sim.report.text.memory import savings as shown_savings
from co2sim.report.text.result import first_of
from co2sim.studies.candidates import Candidate
from co2sim.studies.grid import display_name, short_names, strategy_title
from co2sim.studies.run_all import Efficiency
from co2sim.studies.sensitivity import Sensitivity
from co2sim.studies.solve import Solved


@dataclass(frozen=True, slots=True)
class Answered:
    """A case, its result, and what it takes to train the tokens that were asked for, if any.

    `cluster` is the name of the offer, with what was varied; `strategy` names it there.
    `efficiency` is the throughput per GPU, relative to one node, where it is known.
    """

    cluster: str
    strategy: str
    case: Question
    result: Result
    totals: Totals | None
    efficiency: Efficiency | None = None

    @property
    def fits(self) -> bool:
        """Whether it fits in memory."""
        return self.result.fits_in_memory

    @property
    def title(self) -> str:
        """The strategy, on how many GPUs of which cluster."""
        return f"{self.strategy} on {counted(self.result.gpus, 'GPU')} of {self.cluster}"


_NAMED = 12
"""Strategies that are named where there are many."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells in rows; the first `texts` columns are texts, the others figures.

    `legend` says what is written short in it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    legend: str = ""


def _legend(results: Iterable[Result]) -> str:
    """What the mark says."""
    lacks = "; ".join(lacking(result.notes for result in results))
    return f"{LACKS} what-if: {lacks}" if lacks else ""


def speeds(group: Sequence[Answered]) -> Table:
    """What every case of a cluster gives."""
    heads = (figure.headed(group[0].result) for figure in in_table("page"))
    rows = [_speed(entry) for entry in group]
    legend = _legend(entry.result for entry in group)
    return Table(("strategy", "GPUs", *heads), rows, legend=legend)


def _speed(entry: Answered) -> list[str]:
    texts = [figure.shown(entry.result) or "-" for figure in in_table("page")]
    if entry.result.memory_fit != "fits":
        texts[-1] = f"{texts[-1].removesuffix('*')}, {entry.result.memory_word}"
    return [marked(entry.strategy, entry.result), str(entry.result.gpus), *texts]


def trainings(every: Sequence[Answered]) -> Table | None:
    """What it takes to train the tokens that were asked for; None if not asked for."""
    if all(one.totals is None for one in every):
        return None
    heads, cells = totals.table_of([entry.totals for entry in every])
    rows = [
        [entry.cluster, marked(entry.strategy, entry.result), str(entry.result.gpus), *row]
        for entry, row in zip(every, cells, strict=True)
    ]
    legend = _legend(entry.result for entry in every)
    return Table(("cluster", "strategy", "GPUs", *heads), rows, 2, legend)


def options(candidates: Sequence[Candidate], *, at_length: bool = True) -> Table:
    """What each option of a plan takes, as far as it is known; else not `at_length`.

    Then the ends of its cost and its memory are left out.
    """
    money = next((c.totals.currency for c in candidates if c.totals.currency), None)
    stacks = len({c.case.stack for c in candidates if isinstance(c.case.stack, str)}) > 1
    energy = any(candidate.totals.energy_kwh is not None for candidate in candidates)
    divided = any(candidate.case.mesh_words() for candidate in candidates)
    columns = ["cluster", "strategy", *["stack"] * stacks, *["divided by"] * divided]
    columns += [
        "recompute",
        "GPUs",
        "micro-batch",
        "days",
        "GPU-hours",
        *([money] if money else []),
        *["MWh"] * energy,
    ]
    names = short_names(candidate.case.cluster for candidate in candidates)
    rows = []
    for candidate in candidates:
        case, total, result = candidate.case, candidate.totals, candidate.result
        row = [
            *(names[display_name(case.cluster)], marked(result.strategy, result)),
            *[str(case.stack)] * stacks,
            *([case.mesh_words() or "-"] * divided),
            *(case.recompute, f"{result.gpus:,}"),
            *(f"{case.micro_batch} x {result.accumulation}", totals.ranged(total, "days")),
            f"{total.gpu_hours:,.0f}",
        ]
        if money:
            row.append(totals.ranged(total, "cost") if at_length else f"{total.cost:,.0f}")
        row += ["-" if total.energy_kwh is None else number(total.energy_kwh / 1000)] * energy
        row += [scaled(result.memory_bytes_per_gpu["total"], "B")] * at_length
        rows.append(row)
    columns += ["memory"] * at_length
    legend = _legend(candidate.result for candidate in candidates)
    return Table(columns, rows, 3 + stacks + divided, legend)


def times(group: Sequence[Answered]) -> Table:
    """Spans of the last round on one rank by kernel or collective: they overlap."""
    spans = [entry.result.breakdown_s for entry in group]
    rows = [
        [name, *(duration(times[name]) if name in times else "-" for times in spans)]
        for name in dict.fromkeys(chain.from_iterable(spans))
    ]
    return Table(("work", *(entry.strategy for entry in group)), rows)


def efficiencies(group: Sequence[Answered]) -> Table:
    """How well each case scales, and what waits for communication."""
    rows = [
        [
            entry.strategy,
            f"{entry.result.gpus:,}",
            "-" if entry.efficiency is None else str(entry.efficiency),
            f"{entry.result.exposed_share:.1%}",
        ]
        for entry in group
    ]
    return Table(("strategy", "GPUs", "relative to one node", "exposed communication"), rows)


def memory(group: Sequence[Answered]) -> Table:
    """Bytes of a GPU by item."""
    sizes = [entry.result.memory_bytes_per_gpu for entry in group]
    names = [name for name in dict.fromkeys(chain.from_iterable(sizes)) if name != "total"]
    rows = [
        [name, *(scaled(items[name], "B") if items.get(name) else "-" for items in sizes)]
        for name in (*names, "total")
    ]
    return Table(("item", *(entry.strategy for entry in group)), rows)


def step_memory(memory: StepMemory) -> Table:
    """Bytes of a GPU by item at the moments of a step; those between them lie between them."""
    line = memory.line
    rows = [
        [
            line.moments[moment],
            *(
                scaled(sizes[moment], "B") if sizes[moment] else "-"
                for sizes in line.items.values()
            ),
            scaled(line.total[moment], "B"),
        ]
        for moment in line.bends
    ]
    beside = ", ".join(f"{name} {scaled(size, 'B')}" for name, size in memory.beside.items())
    legend = f"Beside what PyTorch allocates, at the peak: {beside}." if beside else ""
    return Table(("moment", *line.items, "allocated"), rows, legend=legend)


def savings(memory: StepMemory) -> Table:
    """What each option alone would save at the peak."""
    return Table(SAVINGS, shown_savings(memory))


def gains(levers: Iterable[Sensitivity]) -> Table:
    """What a tenth more of each number buys."""
    rows = [
        [
            lever.change,
            percent(lever.gain, 2),
            "-" if lever.gpus is None else figures(lever.gpus),
            "-"
            if lever.worth_per_hour is None
            else f"{lever.worth_per_hour:,.2f} {lever.currency}",
        ]
        for lever in levers
    ]
    return Table(("a tenth better", "more tokens/s", "as a number of GPUs", "worth an hour"), rows)


def reached(group: Sequence[Solved]) -> Table:
    """Where the values of one target are reached: a row for each strategy."""
    metric, axis = group[0].target.metric, group[0].axis
    limits = [metric.shown(answer.value, group[0].currency) for answer in group[0].answers]
    rows = [
        [
            strategy_title(solved.case.strategy),
            *(solve.told(answer, axis) for answer in solved.answers),
            solve.best(solved),
        ]
        for solved in group
    ]
    return Table(("strategy", *limits, "best"), rows, 1 + len(limits))


def published(comparisons: Sequence[SpeedComparison]) -> Table | None:
    """Published speeds beside their predictions; None where there are none."""
    rows = [[comparison.cell.cluster, *comparison_cells(comparison)] for comparison in comparisons]
    return Table(("cluster", *COMPARED), rows, 3) if rows else None


COMPARED = ("strategy", "quantity", "GPUs", "published", "predicted", "error")


def comparison_cells(comparison: SpeedComparison) -> list[str]:
    """A published speed beside its prediction, under `COMPARED`."""
    cell = comparison.cell
    return [
        cell.strategy,
        cell.kind.replace("_per_s", "/s").replace("_", " "),
        "->".join(map(str, cell.sizes)),
        figures(cell.value),
        figures(comparison.predicted),
        percent(comparison.error),
    ]


def sources(every: Sequence[Answered]) -> Table:
    """Where the intervals come from, and for which strategies."""
    of_source: dict[str, dict[str, None]] = {}
    for entry in every:
        names = of_source.setdefault(entry.result.interval_source or "no interval", {})
        names[entry.strategy] = None
    return Table(
        ("where the 90 % interval comes from", "of"),
        [[source, first_of(list(names), _NAMED)] for source, names in of_source.items()],
        2,
    )


def errors() -> Table:
    """How far predictions were from published runs of sources that were left out of the fit."""
    rows = [
        [source.title, f"{source.runs}", f"{source.mean:.1%}", f"{source.bias:+.1%}"]
        for source in error_model().sources
    ]
    return Table(("source", "runs", "mean error", "bias"), rows, 1)


def inputs(
    cases: Iterable[tuple[str, Question]], varied: Mapping[str, str] | None = None
) -> list[tuple[str, Table]]:
    """Every number of the clusters and models of cases with their cluster, under their names.

    `varied` has the values of those that are not the same in all cases, by path.
    """
    tables: dict[str, Table] = {}
    changed = {path.removeprefix("model."): words for path, words in (varied or {}).items()}
    for cluster, case in cases:
        hardware, model = case.load()
        heads = {
            f"{cluster}: {hardware.value.name}": hardware.facts,
            f"{display_name(case.model)}: {model.value.name}": model.facts,
        }
        for head, entries in heads.items():
            if entries:
                tables.setdefault(head, _facts(entries, changed))
    return list(tables.items())


def _facts(entries: Iterable[Fact], varied: Mapping[str, str]) -> Table:
    rows = [
        [fact.path, varied[fact.path], "varied", "as asked for"]
        if fact.path in varied
        else [fact.path, fact.value, "assumed" if fact.assumed else "", fact.source]
        for fact in entries
    ]
    return Table(("number", "value", "status", "source"), rows, 4)
