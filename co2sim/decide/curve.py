"""A figure over an axis, by simulation."""

from dataclasses import replace

from co2sim import study
from co2sim.case import Case
from co2sim.decide.axis import Axis
from co2sim.decide.crossings import Figure
from co2sim.decide.levers import moved
from co2sim.decide.targets import End, Target, View
from co2sim.errors import Co2simError, OptionError
from co2sim.goodput.of_result import goodput_of
from co2sim.result import Result
from co2sim.step_factors import Goal, step_factor

_LEAST = 1e-6
"""Of the time: where less is useful, nothing gets done."""

_LITTLE = 1e-3
"""A gain that is not worth a word."""


class Curve:
    """The figure over the axis; every value is simulated once."""

    def __init__(
        self, case: Case, axis: Axis, target: Target, tokens: float | None, goal: Goal
    ) -> None:
        self._case, self._axis, self._target = case, axis, target
        self._tokens, self._goal = tokens, goal
        self._views: dict[float, View | None] = {}
        self._alone: dict[str, Result] = {}
        self.error: Co2simError | None = None
        self.has_interval = False
        self.currency: str | None = None

    def figure(self, value: float) -> float | None:
        """As predicted; None where it does not fit in memory, or cannot be simulated."""
        return self.of("predicted")(value)

    def known(self, value: float) -> bool:
        """Whether the value can be simulated."""
        return self._view(value) is not None

    def of(self, end: End) -> Figure:
        """At an end of the interval."""

        def figure(value: float) -> float | None:
            view = self._view(value)
            if view is None:
                return None
            if not view.result.fits_in_memory and self._target.name != "memory":
                return None
            return self._target.metric.of(view.at(end))

        return figure

    def binding(self, value: float) -> tuple[str, float] | None:
        """The number of which a tenth more does most for the figure there, and what it gives."""
        metric = self._target.metric
        before = self.figure(value)
        assert before is not None
        plain, moves = moved(self._axis.at(self._case, value))
        sign = 1 if metric.more else -1
        best: tuple[str, float] | None = None
        for change, cluster in moves:
            if change == self._axis.path:
                continue
            found = metric.of(self._seen(replace(plain, cluster=cluster)))
            if sign * (found - (best[1] if best else before)) > _LITTLE * abs(before):
                best = change, found
        return best

    def _view(self, value: float) -> View | None:
        if value not in self._views:
            try:
                self._views[value] = self._seen(self._axis.at(self._case, value))
            except Co2simError as error:
                self.error = self.error or error
                self._views[value] = None
        return self._views[value]

    def _seen(self, case: Case) -> View:
        result = study.run(case)
        self.has_interval = self.has_interval or result.tokens_per_s_low is not None
        self.currency = self.currency or result.currency
        alone = self._one_node(case) if self._target.metric.needs == "alone" else None
        tokens = self._tokens
        if self._target.metric.needs == "tokens":
            factor = step_factor(result.strategy, self._goal)
            if factor is None or tokens is None:
                raise OptionError(
                    f"nobody knows what a step of {result.strategy} is worth; give"
                    f" --steps-factor {result.strategy.partition('(')[0]}=1.3, say"
                )
            tokens *= factor.factor
        return View(result, alone, tokens, self._goodput(case, result))

    def _goodput(self, case: Case, result: Result) -> tuple[float, float, float] | None:
        """The useful share of the time, and its ends, where the target asks for it."""
        entries = case.load()
        cluster, model = entries[0].value, entries[1].value
        if cluster.failures is None or self._target.metric.needs not in {"tokens", "failures"}:
            return None
        found = goodput_of(result, cluster, model, optimizer=case.optimizer)
        assert found is not None
        return (found.useful, max(found.low, _LEAST), found.high)

    def _one_node(self, case: Case) -> Result:
        """The result on one node: what is between nodes is not asked for again."""
        single = replace(case, gpus=case.load()[0].value.gpus_per_node)
        beyond = ("inter.", "wan.")
        same = {k: v for k, v in single.overrides.items() if not k.startswith(beyond)}
        key = f"{single.strategy} {single.micro_batch} {single.accumulation} {same}"
        if isinstance(single.cluster, str) and key in self._alone:
            return self._alone[key]
        found = study.run(single)
        if isinstance(single.cluster, str):
            self._alone[key] = found
        return found
