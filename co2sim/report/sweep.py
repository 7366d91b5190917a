"""What a page about a sweep is about, and how much of it is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from co2sim.common.errors import Co2simError
from co2sim.common.units import parse, parse_price
from co2sim.prediction.case import Case
from co2sim.prediction.figures import ends
from co2sim.prediction.intervals import undecided
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.report.chart_style import NumberAxis, number_axis
from co2sim.report.tables import Answered
from co2sim.report.text import totals
from co2sim.studies.batch import Failure, Outcome
from co2sim.studies.grid import Setting, display_name, offer_names, strategy_title
from co2sim.studies.targets import Axis, axis_of


@dataclass(frozen=True, kw_only=True)
class Swept:
    """Cases with what each varies and what became of it, in the order of the table.

    `rows` are what --json prints of them. `missing` says how many were done where an interrupt
    left some out. `command` repeats it all.
    """

    cases: Sequence[Case]
    settings: Sequence[Setting]
    outcomes: Sequence[Outcome]
    rows: Sequence[Mapping[str, object]]
    goal: Goal
    tokens: float | None
    command: str
    missing: str = ""

    @cached_property
    def names(self) -> list[str]:
        """What each case varies, as a text."""
        return [named(setting) for setting in self.settings]

    @cached_property
    def all(self) -> list[Answered]:
        """The cases that gave a result; what they vary stands for their strategy."""
        tokens = self.tokens
        found = (
            [None] * len(self.cases)
            if tokens is None
            else totals.totals_for(self.cases, self.outcomes, tokens, self.goal)
        )
        every = zip(self.names, self.cases, self.outcomes, found, strict=True)
        offers = offer_names(case.cluster for case in self.cases)
        return [
            Answered(offers[display_name(case.cluster)], name, case, outcome, totals)
            for name, case, outcome, totals in every
            if isinstance(outcome, Result)
        ]

    @cached_property
    def failed(self) -> list[str]:
        """The cases without a result, each with its reason."""
        return [
            f"{name}: {outcome.reason}"
            for name, outcome in zip(self.names, self.outcomes, strict=True)
            if isinstance(outcome, Failure)
        ]

    @cached_property
    def paths(self) -> list[str]:
        """What varies."""
        return list(self.settings[0])

    @cached_property
    def varied(self) -> dict[str, str]:
        """The values of each path as texts."""
        return {
            path: ", ".join(dict.fromkeys(display_name(setting[path]) for setting in self.settings))
            for path in self.paths
        }

    @cached_property
    def across(self) -> NumberAxis | None:
        """How the first thing that varies is drawn, if all its values are numbers."""
        return self._numbers[0]

    @cached_property
    def placed(self) -> list[tuple[float, str, str]]:
        """Of the cases with a result: the first number as it is drawn, as it was given; the rest.

        The rest is what names the line: the strategy where nothing else varies.
        """
        first, *others = self.paths
        every = zip(self.settings, self.outcomes, self._numbers[1], strict=True)
        return [
            (
                value,
                display_name(setting[first]),
                named({path: setting[path] for path in others}) or self._alone,
            )
            for setting, outcome, value in every
            if isinstance(outcome, Result)
        ]

    @cached_property
    def _alone(self) -> str:
        return strategy_title(self.cases[0].strategy)

    @cached_property
    def _numbers(self) -> tuple[NumberAxis | None, list[float]]:
        path = self.paths[0]
        texts = [display_name(setting[path]) for setting in self.settings]
        return _numbers(path, self.cases[0], texts) or (None, [0.0] * len(texts))

    def answer(self) -> list[str]:
        """The best case: the cheapest and the fastest training, or the highest throughput."""
        every = self.all
        if self.tokens is not None:
            trainings = [(one.strategy, one.result, one.totals) for one in every]
            heads = totals.chosen(trainings)
            known = heads.items()
            said = []
            for head, (name, result, found) in known:
                assert found is not None
                lost = f"; it {result.misfit.lower()} in memory" if result.misfit else ""
                said.append(f"{head}: {name}, {totals.in_short(found, result.unit)}{lost}.")
            return [*said, *totals.traded(heads)] or totals.sentences(trainings)
        fitting = self._ranked
        if not fitting:
            return [f"None of {len(every):,} cases fits in memory."]
        best = fitting[0]
        text = f"{best.strategy} is the fastest at {best.result.tokens_per_s:,.0f}"
        text += f" {best.result.unit}s/s"
        if best.result.tokens_per_s_low is not None:
            text += f" (90 %: {ends(best.result)})"
        return [f"{text}."]

    @cached_property
    def best(self) -> Answered:
        """The case that the answer names first."""
        if self.tokens is not None:
            trainings = [(one.strategy, one.result, one.totals) for one in self.all]
            known = totals.chosen(trainings)
            if known:
                result = next(iter(known.values()))[1]
                return next(one for one in self.all if one.result is result)
        return next(iter([*self._ranked, *self.all]))

    @cached_property
    def _ranked(self) -> list[Answered]:
        """Those that fit in memory, the fastest first."""
        fitting = [one for one in self.all if one.result.fits_in_memory]
        return sorted(fitting, key=lambda one: -one.result.tokens_per_s)

    def doubts(self) -> list[str]:
        """What is missing, what failed, and whether the order of the first two is certain."""
        said = [f"This sweep was interrupted: {self.missing}."] if self.missing else []
        if self.failed:
            said.append(f"{len(self.failed):,} of {len(self.cases):,} cases failed.")
        first, second = ([*self._ranked, None, None])[:2]
        if first and second and self.tokens is None and undecided(first.result, second.result):
            said.append(
                f"Between it and {second.strategy} it is undecided: they differ by less than may be"
                " wrong."
            )
        return said


def named(setting: Setting) -> str:
    """What a case varies, as a text."""
    return ", ".join(f"{path}={display_name(value)}" for path, value in setting.items())


def _numbers(path: str, case: Case, texts: Sequence[str]) -> tuple[NumberAxis, list[float]] | None:
    """The values in what they are drawn in; None unless all of them are numbers."""
    try:
        axis = axis_of(case, path)
        drawn = number_axis(axis)
        return drawn, [_value(text, axis) * drawn.factor for text in texts]
    except Co2simError:  # what nothing is solved for, such as jitter, may be a plain number
        pass
    try:
        return NumberAxis(path), [parse(text, "") for text in texts]
    except Co2simError:
        return None


def _value(text: str, axis: Axis) -> float:
    return parse_price(text)[0] if axis.unit == "USD/s" else parse(text, axis.unit)
