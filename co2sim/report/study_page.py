"""The page of a study: strategies over numbers of GPUs, on one cluster or several."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise, zip_longest

from co2sim.common.errors import Co2simError
from co2sim.common.units import counted
from co2sim.prediction.intervals import undecided
from co2sim.prediction.published import SpeedComparison
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal, local_updates
from co2sim.prediction.totals import result_to_dict
from co2sim.prediction.verdict import Verdict, tells
from co2sim.report import charts, sections, tables
from co2sim.report.chart_style import picking
from co2sim.report.html import MAX_ROUNDS, Figure, Page, PageSection, Timelines
from co2sim.report.rounds import last_round
from co2sim.report.tables import Answered
from co2sim.report.text import totals
from co2sim.report.text.result import too_close, verdict_lines
from co2sim.studies.grid import display_name, offer_names, strategy_title
from co2sim.studies.run_all import efficiencies
from co2sim.studies.sensitivity import Sensitivity, levers
from co2sim.studies.table import to_frame

_MOST = 3
"""Sentences of the answer on the first screen."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Cases with their results, in order; those of one cluster follow each other.

    `panels` names the cluster of each case, with what was varied; without, it is as it was given.
    `verdicts` are those on the cases, None on what is no local-update method. `tokens` are those to
    train, None if not asked for. `command` is what a user types to repeat it all.
    """

    cases: Sequence[Question]
    results: Sequence[Result]
    goal: Goal
    tokens: float | None
    comparisons: Sequence[SpeedComparison]
    command: str
    panels: Sequence[str] = ()
    verdicts: Sequence[Verdict | None] = ()

    @cached_property
    def all(self) -> tuple[Answered, ...]:
        """Every case with its figures."""
        trained = totals.totals_for(self.cases, self.results, self.tokens, self.goal)
        titles = [strategy_title(case.strategy) for case in self.cases]
        scaled = efficiencies(self.cases, self.results)
        rows = zip(self._offers, titles, self.cases, self.results, trained, strict=True)
        return tuple(
            Answered(*row, asked=self.tokens is not None, efficiency=efficiency)
            for row, efficiency in zip(rows, scaled, strict=True)
        )

    @cached_property
    def keys(self) -> Sequence[str]:
        """The cluster of each case as it was given, with what was varied."""
        return self.panels or [display_name(case.cluster) for case in self.cases]

    @cached_property
    def _offers(self) -> list[str]:
        """The cluster of each case by its name, with what was varied."""
        names = offer_names([case.cluster for case in self.cases])
        keys = [display_name(case.cluster) for case in self.cases]
        return [
            f"{names[key]}{panel.removeprefix(key)}"
            for key, panel in zip(keys, self.keys, strict=True)
        ]

    @cached_property
    def clusters(self) -> dict[str, list[Answered]]:
        """The cases by cluster."""
        return sections.by_cluster(self.all)

    @cached_property
    def largest(self) -> dict[str, list[Answered]]:
        """By cluster, the cases with the most GPUs."""
        groups = {}
        for name, group in self.clusters.items():
            most = max(entry.result.gpus for entry in group)
            groups[name] = [entry for entry in group if entry.result.gpus == most]
        return groups

    @cached_property
    def best(self) -> Answered:
        """The case that the answer names first."""
        return sections.best(self.all, self._trainings() if self.tokens is not None else ())

    def answer(self) -> list[str]:
        """The answer, a sentence each; the first one stands for all."""
        if self.tokens is None:
            return [*_compared(self.largest), *self._fastest()]
        trainings = self._trainings()
        alone = self._priced or not totals.chosen(trainings)
        compared = [] if alone else list(_compared(self.largest))
        return [*compared, *totals.in_brief(trainings)]

    @property
    def _priced(self) -> bool:
        return any(entry.totals and entry.totals.cost is not None for entry in self.all)

    def heading(self) -> str:
        """Model, tokens and batch; and the answer in a few words."""
        about = sections.about(self.all, self.tokens)
        best = f"{self.best.strategy} on {counted(self.best.result.gpus, 'GPU')}"
        if len(self.clusters) > 1 and not self._priced:  # "A is 54 % faster than B on 64 GPUs"
            return f"{about}: {self.answer()[0].partition(' (90 %')[0].rstrip('.')}"
        return f"{about}: {best} of {self.best.cluster}"

    def facts(self, held: Sequence[Sensitivity]) -> dict[str, list[str]]:
        """The first screen; `found` are the levers of the best."""
        said = self.answer()
        if self.tokens is not None and not self._priced:
            said = [said[0], *(text for text in said[1:] if text.startswith("Fastest"))]
        about = f"{self.best.strategy} on {counted(self.best.result.gpus, 'GPU')}"
        facts = {
            "The answer": said[:_MOST],
            "Is it worth it": self._worth(),
            "How sure": sections.surest(self.best, *self._undecided()),
            f"What would change it ({about})": sections.binding(held, self.best.result.unit),
            "Evidence": sections.evidence(self.best),
        }
        return {name: lines for name, lines in facts.items() if lines}

    def _worth(self) -> list[str]:
        judged = [v for v in self.verdicts if v]
        return [line for v in judged for line in verdict_lines(v, named=len(judged) > 1)]

    def doubts(self) -> list[str]:
        """What the intervals do not tell apart, by cluster, and what steps are worth."""
        said = self._undecided()
        if self.verdicts and self.tokens is None:
            return said
        worth = totals.worth(self.results, self.goal)
        if worth and self.tokens is None:
            said.append(f"Speed is not progress: {worth}. With --tokens the answer counts it.")
        elif worth:
            said.append(f"Counted in days and money: {worth}.")
        return said

    def _undecided(self) -> list[str]:
        said = {name: _too_close(group) for name, group in self.largest.items()}
        return [f"On {name}: {text}." for name, text in said.items() if text]

    def _fastest(self) -> Iterator[str]:
        for name, group in self.largest.items():
            first = _first(group)
            size = counted(group[0].result.gpus, "GPU")
            if first is None:
                yield f"On {size} of {name} nothing of this fits in memory."
                continue
            verb = "is the fastest" if len(group) > 1 else "runs"
            speed = sections.speed_of(first.result)
            yield f"On {size} of {name}, {first.strategy} {verb} at {speed}."

    def _trainings(self) -> totals.Trainings:
        return [(entry.title, entry.result, entry.totals) for entry in self.all]


def page(study: Study) -> Page:
    """It takes a few simulations: a round of each strategy, and what more would buy."""
    names = [entry.strategy for entry in study.all]
    held = _levers(study)
    at_most = [entry for group in study.largest.values() for entry in group]
    return Page(
        answer=[study.heading(), *study.answer()],
        facts=study.facts(held),
        doubts=[*study.doubts(), *sections.predicted_with(study.all)],
        sections=[
            sections.money(study.all, names),
            _speed(study, names),
            _time(study),
            sections.memory(study.largest),
            sections.gains({study.best.title: held}),
            sections.trust(study.all, at_most, study.comparisons),
            sections.inputs(study.all),
        ],
        commands=[study.command],
        files=_files(study),
    )


def _files(study: Study) -> dict[str, tuple[str, str]]:
    frame = to_frame(study.cases, study.results, goal=study.goal, tokens=study.tokens)
    results = [
        {
            "cluster_key": key,
            **result_to_dict(entry.case, entry.result, study.goal, study.tokens),
            **({"verdict": asdict(verdict)} if verdict else {}),
        }
        for key, entry, verdict in zip_longest(study.keys, study.all, study.verdicts)
    ]
    return {
        "study.csv": ("text/csv", frame.to_csv(index=False)),
        "study.json": ("application/json", json.dumps(results)),
    }


def _speed(study: Study, names: Sequence[str]) -> PageSection:
    figures = []
    stars = " Stars are published." if study.comparisons else ""
    for cluster, group in study.clusters.items():
        unit, drawn = group[0].result.unit, sections.fitting(group)
        figures.append(
            Figure(
                title=f"{unit}s per second on {cluster}",
                note=f"Bands are 90 % intervals.{sections.misfits(group)}{stars}{picking(names)}",
                label=f"{unit}s per second by number of GPUs, a line for each strategy",
                chart=charts.over_gpus(
                    drawn, names, charts.speed(unit), sections.fitting(study.all), study.comparisons
                ),
                table=tables.speeds(group),
            )
        )
        relative = charts.efficiency(drawn, names)
        if relative:
            figures.append(
                Figure(
                    title=f"Efficiency on {cluster}",
                    note="Throughput per GPU, relative to the same on one node. The table has the"
                    " share of exposed communication beside it.",
                    label="throughput per GPU by number of GPUs, a line for each strategy",
                    chart=relative,
                    table=tables.efficiencies(group),
                )
            )
    return PageSection("speed", "Speed", figures=figures)


def _time(study: Study) -> PageSection:
    timed = [entry for entry in study.largest[study.best.cluster] if entry.case.pp == 1]
    if not timed:  # pipelines have no round that all ranks follow
        return sections.time(study.largest)
    rounds = {entry.strategy: last_round(entry.case) for entry in timed[:MAX_ROUNDS]}
    note = f"One rank, on {timed[0].result.gpus} GPUs of {timed[0].cluster}."
    lines = Timelines(note, rounds, charts.timeline(rounds.values()))
    return sections.time(study.largest, lines)


def _levers(study: Study) -> list[Sensitivity]:
    """Of the answer's case; none where it cannot be simulated again."""
    try:
        return levers(study.best.case)
    except Co2simError:
        return []


_MAX = 3
"""Clusters that the fastest one is compared with, and pairs of strategies of each."""
_NOTABLE = 1.1
"""How many times as much a strategy must gain to be named besides."""
_SAME = 1.005
"""Below this there is no difference worth a word."""
_TIMES = 2.0
"""From here on people say "times"."""


def _pace(entry: Answered) -> float:
    """How fast a case gets on: units a second, or, with tokens to train, trainings a day.

    0 where the worth of its steps is not known.
    """
    if not entry.asked:
        return entry.result.tokens_per_s
    return 0.0 if entry.totals is None else 1 / entry.totals.days


def _pace_ends(entry: Answered) -> tuple[float, float] | None:
    """The 90 % interval of `_pace`; None where there is none."""
    if not entry.asked:
        low, high = entry.result.tokens_per_s_low, entry.result.tokens_per_s_high
        return None if low is None or high is None else (low, high)
    if entry.totals is None or entry.totals.days_low is None or entry.totals.days_high is None:
        return None
    return 1 / entry.totals.days_high, 1 / entry.totals.days_low


def _first(group: Sequence[Answered]) -> Answered | None:
    """The one that gets on fastest, of those that fit in memory."""
    fitting = [entry for entry in group if entry.fits and _pace(entry)]
    return max(fitting, key=_pace, default=None)


def _compared(largest: Mapping[str, Sequence[Answered]]) -> Iterator[str]:
    """How much faster one cluster is than the others, and so how much more it may cost.

    Nothing where they have not the same number of GPUs, or nothing fits in memory. Nothing of the
    price where only speeds are known, and a step of one is not worth a step of the other.
    """
    best = [entry for group in largest.values() if (entry := _first(group))]
    if len(best) < 2 or len({entry.result.gpus for entry in best}) > 1:  # noqa: PLR2004
        return
    top, *others = sorted(best, key=_pace, reverse=True)
    size = counted(top.result.gpus, "GPU")
    for other in others[:_MAX]:
        ratio, sure, interval = _pace(top) / _pace(other), _ratio(top, other), ""
        if sure is not None:
            interval = f" (90 %: {sure[0]:.2g} to {sure[1]:.2g} times)"
        yield from _headline(top, other, ratio, f"on {size}{interval}", sure)
        yield (
            f"That is with the fastest strategy of each: {top.strategy} on {top.cluster},"
            f" {other.strategy} on {other.cluster}."
        )
        yield from _gained(largest[top.cluster], largest[other.cluster], ratio)
        if sure and sure[0] <= 1:
            yield "Which of the two is faster is undecided: their 90 % intervals overlap."
    yield " ".join(f"{entry.cluster} is {entry.result.cluster}." for entry in best)


def _headline(
    top: Answered, other: Answered, ratio: float, where: str, sure: tuple[float, float] | None
) -> Iterator[str]:
    """The headline of two clusters; no advice where the range of the ratio is too wide for one."""
    names = {top.result.strategy, other.result.strategy}
    alike = top.asked or len(names) == 1 or not local_updates(names)
    speed = "" if alike else f" in {top.result.unit}s/s"
    if ratio < _SAME:
        advice = ": take the one that costs less" if alike else ""
        yield f"{top.cluster} and {other.cluster} are equally fast{speed} {where}{advice}."
        return
    known = sure is None or tells(*sure)
    worth = f": it is worth {_dearer(ratio)}" if known else ": what it is worth is not known"
    worth = worth if alike else ""
    verb = "trains" if alike else "is"
    yield f"{top.cluster} {verb} {_faster(ratio)} {other.cluster}{speed} {where}{worth}."


def _too_close(group: Sequence[Answered]) -> str:
    """One line on neighbours in pace whose order is undecided; "" for none."""
    ranked = sorted((each for each in group if each.fits and _pace(each)), key=_pace, reverse=True)
    pairs = [
        f"{entry.strategy} and {other.strategy}"
        for entry, other in pairwise(ranked)
        if _undecided(entry, other)
    ]
    return too_close(pairs, group[0].result.gpus, _MAX) if pairs else ""


def _undecided(entry: Answered, other: Answered) -> bool:
    """Of two on one cluster. What a step is worth is no error that they share."""
    if not entry.asked:
        return undecided(entry.result, other.result)
    sure = _ratio(entry, other)
    return sure is not None and sure[0] <= 1


def _ratio(entry: Answered, other: Answered) -> tuple[float, float] | None:
    """How many times as fast one is, from its worst against the other's best to the contrary."""
    these, those = _pace_ends(entry), _pace_ends(other)
    if these is None or those is None:
        return None
    return these[0] / those[1], these[1] / those[0]


def _gained(here: Sequence[Answered], there: Sequence[Answered], ratio: float) -> Iterator[str]:
    """The strategy for which two clusters differ most, if that is more than the ratio.

    Of those that fit in memory on both.
    """
    speeds = {entry.strategy: entry.result.tokens_per_s for entry in there if entry.fits}
    gained = {
        entry.strategy: entry.result.tokens_per_s / speeds[entry.strategy]
        for entry in here
        if entry.fits and entry.strategy in speeds
    }
    name = max(gained, key=lambda name: abs(math.log(gained[name])), default="")
    more = max(gained[name], 1 / gained[name]) if name else 1.0
    if more > _NOTABLE * ratio:
        clusters = [here[0].cluster, there[0].cluster]
        faster, slower = clusters if gained[name] > 1 else reversed(clusters)
        yield f"With {name}, {faster} is {_faster(more)} {slower}."


def _faster(ratio: float) -> str:
    """How much faster, as a text that ends before what it is compared with."""
    return f"{ratio - 1:.1%} faster than" if ratio < _TIMES else f"{ratio:.1f} times as fast as"


def _dearer(ratio: float) -> str:
    if ratio < _TIMES:
        return f"a price an hour that is up to {ratio - 1:.1%} higher"
    return f"up to {ratio:.1f} times the price an hour"
