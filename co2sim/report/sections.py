"""Sections that several pages have: money, time, memory, gains, trust and inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from co2sim.prediction.evidence import EVIDENCE_COLUMNS, evidence_rows, nearest
from co2sim.prediction.notes import is_alike
from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_memory import StepMemory
from co2sim.report import charts, tables
from co2sim.report.chart_style import Drawn, Spec, high, picking, spec
from co2sim.report.html import Figure, PageSection, Timelines
from co2sim.report.tables import Answered, Table
from co2sim.report.text import totals
from co2sim.report.text.beside import LEGEND, TEXTS, columns_of, files_of, rows_of, title_of
from co2sim.report.text.memory import when
from co2sim.studies.beside import Beside
from co2sim.studies.sensitivity import Sensitivity


def best(every: Sequence[Answered], trainings: totals.Trainings) -> Answered:
    """The case that an answer names first: the best training, or the fastest that fits."""
    named = totals.chosen(trainings)
    if named:
        result = next(iter(named.values()))[1]
        return next(entry for entry in every if entry.result is result)
    return max(fitting(every), key=lambda entry: entry.result.tokens_per_s)


def money(every: Sequence[Answered], names: Sequence[str]) -> PageSection:
    """What it takes to train the tokens that were asked for; empty if not asked for."""
    table = tables.trainings(every)
    if table is None:
        return PageSection("money", "Days and money")
    alike = len({(each.cluster, each.result.gpus) for each in every}) == 1
    chart = None if alike else charts.front(fitting(every), names)
    if chart is None:
        return PageSection("money", "Days and energy", figures=_days(every, names))
    note = (
        "Lines are intervals: of the speed, together with the range of the price. Nothing is"
        f" cheaper and faster than what the dashed line joins.{misfits(every)}{picking(names)}"
    )
    figure = Figure("What it takes", note, "money by days, a point for each case", chart, table)
    return PageSection("money", "Days and money", figures=[figure])


def by_cluster(every: Iterable[Answered]) -> dict[str, list[Answered]]:
    """The cases by cluster, these in the order of their first ones."""
    groups: dict[str, list[Answered]] = {}
    for entry in every:
        groups.setdefault(entry.cluster, []).append(entry)
    return groups


def fitting(every: Sequence[Answered]) -> Sequence[Answered]:
    """The cases that charts show: those that fit in memory; all where none does."""
    return [entry for entry in every if entry.fits] or every


def misfits(every: Sequence[Answered]) -> str:
    """What is said of cases that do not fit, if there are any."""
    if not any(entry.fits for entry in every):
        return " Hollow points do not fit in memory."
    sizes: dict[str, list[str]] = {}
    for entry in every:
        if not entry.fits:
            sizes.setdefault(entry.strategy, []).append(f"{entry.result.gpus:,}")
    names = (f"{strategy} on {', '.join(gpus)} GPUs" for strategy, gpus in sizes.items())
    return f" Not drawn, as it does not fit in memory: {'; '.join(names)}." if sizes else ""


def _days(every: Sequence[Answered], names: Sequence[str]) -> list[Figure]:
    """Days over GPUs, by cluster: where nothing has a price."""
    return [
        Figure(
            title=f"Days on {cluster}",
            note=f"Bands are 90 % intervals.{misfits(group)}{picking(names)}",
            label="days by number of GPUs, a line for each strategy",
            chart=charts.over_gpus(fitting(group), names, charts.DAYS, fitting(every)),
            table=tables.trainings(group),
        )
        for cluster, group in by_cluster(entry for entry in every if entry.totals).items()
    ]


def time(
    groups: Mapping[str, Sequence[Answered]], timelines: Timelines | None = None
) -> PageSection:
    """What a round is spent on, by cluster."""
    figures = [
        Figure(
            title=f"A round on {_sizes(group)} of {cluster}",
            note="Blue is computing, brown communication. Exposed: computing waits for it. The"
            " table sums the spans of one rank by work; they overlap.",
            label="shares of the time of a round, a bar for each strategy",
            chart=_bars(charts.shares, group),
            table=tables.times(group),
        )
        for cluster, group in groups.items()
    ]
    return PageSection("time", "Where the time goes", figures=figures, timelines=timelines)


def beside(shared: Sequence[Sequence[Beside]], files: Sequence[str]) -> PageSection:
    """What jobs on one fabric lose to each other, for each case; empty where it stands alone."""
    note = f"{'; '.join(LEGEND)}. From files: {'; '.join(files_of(files))}."
    figures = [
        Figure(title_of(jobs), note, table=Table(columns_of(jobs), rows_of(jobs), TEXTS))
        for jobs in shared
    ]
    return PageSection("beside", "Jobs beside each other", figures=figures)


def memory(groups: Mapping[str, Sequence[Answered]], steps: Sequence[Answered] = ()) -> PageSection:
    """The memory of a GPU by item, by cluster; of some cases over a step, too."""
    figures = [
        Figure(
            title=f"A GPU of {cluster}, of {_sizes(group)}",
            note="The dashed line is what the GPU has.",
            label="memory of a GPU by item, a bar for each strategy",
            chart=_bars(charts.memory, group),
            table=tables.memory(group),
        )
        for cluster, group in groups.items()
    ]
    held = [(entry, StepMemory.of(entry.case, entry.result)) for entry in steps]
    figures += [_over_a_step(*each) for each in held]
    figures += [
        Figure(
            title=f"What would save memory with {entry.title}",
            note="Each option alone, at the peak.",
            table=tables.savings(memory),
        )
        for entry, memory in held
        if memory.savings
    ]
    return PageSection("memory", "Memory", figures=figures)


def _over_a_step(entry: Answered, held: StepMemory) -> Figure:
    """The memory of a case over a step."""
    last = " This is the last micro-step." if entry.result.accumulation > 1 else ""
    return Figure(
        title=f"{entry.title}, over a step",
        note=f"The peak, at the point, is in the {when(held)}.{last} The dashed line is what the"
        " GPU has. What PyTorch does not allocate is drawn as at the peak.",
        label="memory of a GPU over the moments of a step, an area for each item",
        chart=charts.step_memory(held),
        table=tables.step_memory(held),
    )


def _bars(draw: Callable[[Sequence[tuple[str, Result]]], Drawn], group: Sequence[Answered]) -> Spec:
    """A bar for each case."""
    named = [(entry.strategy, entry.result) for entry in group]
    return spec(draw(named), high([name for name, _ in named]))


def _sizes(group: Sequence[Answered]) -> str:
    sizes = sorted({entry.result.gpus for entry in group})
    return f"{' or '.join(f'{size:,}' for size in sizes)} GPUs"


def gains(levers_of: Mapping[str, Sequence[Sensitivity]]) -> PageSection:
    """What a tenth more of each number gives, by what it is about."""
    figures = []
    for about, levers in levers_of.items():
        shown = [lever for lever in levers if abs(lever.gain) >= _VISIBLE]
        if shown:
            figures.append(
                Figure(
                    title=about,
                    note="A tenth more of each number by itself, by simulation; latencies are"
                    " divided by 1.1.",
                    label="growth of throughput where one number of the hardware is a tenth better",
                    chart=charts.gains(shown),
                    table=tables.gains(shown),
                )
            )
    return PageSection("gains", "What more would give", figures=figures)


_VISIBLE = 0.0005
"""A gain that shows as more than 0.0 %."""


def trust(
    every: Sequence[Answered],
    shown: Sequence[Answered],
    comparisons: Sequence[SpeedComparison] = (),
) -> PageSection:
    """How sure it all is; warnings and notes are those of the cases `shown`, once each."""
    figures = [Figure("", table=tables.sources(every))]
    if shown:
        first = shown[0]
        note = (
            f"The published runs that are most like {first.strategy} on {first.cluster}. A distance"
            " of 1 is twice as many parameters, or four times as many GPUs or samples of a pass;"
            " another stack, GPU or way of sharing counts 2."
        )
        near = nearest(first.case, first.result)
        figures.append(Figure("", note, table=Table(EVIDENCE_COLUMNS, evidence_rows(near), 3)))
    published = tables.published(comparisons)
    if published:
        note = "Published runs of this study beside their predictions:"
        figures.append(Figure("", note, table=published))
    by_source = "How far predictions were from published runs, each source left out of the fit"
    figures.append(Figure(by_source, table=tables.errors(), folded=True))
    return PageSection(
        "trust",
        "How sure this is",
        figures=figures,
        warnings=_lines(shown, "warnings"),
        notes=_lines(shown, "notes"),
    )


def inputs(every: Sequence[Answered]) -> PageSection:
    """Every number with its source."""
    return inputs_of({entry.cluster: entry.case for entry in every}.items())


def inputs_of(
    cases: Iterable[tuple[str, Question]], varied: Mapping[str, str] | None = None
) -> PageSection:
    """Of the clusters and models of cases with their cluster, and the values of what is varied."""
    shown = tables.inputs(cases, varied)
    figures = [Figure(name, table=table, folded=True) for name, table in shown]
    intro = "Every number with its source. Those marked as assumed have none."
    return PageSection("inputs", "Inputs", intro, figures)


def _lines(shown: Sequence[Answered], kind: str) -> list[str]:
    """Warnings, or notes, once each; behind the case, unless many have them alike."""
    first_with: dict[str, Answered] = {}
    for entry in shown:
        for text in getattr(entry.result, kind):
            first_with.setdefault(text, entry)
    return [
        text if is_alike(text) else f"{entry.title}: {text}" for text, entry in first_with.items()
    ]
