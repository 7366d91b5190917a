"""What is asked: strategies with one model on one cluster, and what is set besides."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from co2sim.case import Case
from co2sim.cluster import Cluster
from co2sim.console.repeated import refuse_twice
from co2sim.errors import OptionError
from co2sim.grid import strategy_title, varied
from co2sim.step_factors import NO_GOAL, Goal
from co2sim.strategies import Strategy, parse
from co2sim.strategies.step import title
from co2sim.totals import tokens_of
from co2sim.workload import Model

MOST_STRATEGIES = 12
"""What a chart can tell apart."""

Settings = Mapping[str, str]
"""Texts by paths, as `grid.vary` takes them."""


@dataclass(frozen=True)
class Question:
    """A job, whose strategy is still open, the strategies to compare, and the tokens to train.

    Raises OptionError for none or more than `MOST_STRATEGIES` strategies, for one that is given
    twice, and for one that cannot be read.
    """

    job: Case
    strategies: tuple[str, ...]
    tokens: float | None = None
    goal: Goal = NO_GOAL

    def __post_init__(self) -> None:
        """Refuse what no page can show."""
        if not 0 < len(self.strategies) <= MOST_STRATEGIES:
            raise OptionError(
                f"{len(self.strategies)} strategies are given; it must be 1 to {MOST_STRATEGIES}"
            )
        refuse_twice("strategy", map(strategy_title, self.strategies))
        if self.tokens is not None:
            tokens_of(self.tokens)

    @cached_property
    def parsed(self) -> tuple[Strategy, ...]:
        """The strategies, as objects."""
        return tuple(map(parse, self.strategies))

    @property
    def titles(self) -> tuple[str, ...]:
        """The strategies, as results name them."""
        return tuple(map(title, self.parsed))

    def takes(self, place: int, path: str) -> bool:
        """Whether a path means something for the strategy at this place."""
        if not path.startswith("strategy."):
            return True
        return hasattr(self.parsed[place], path.removeprefix("strategy."))

    def case(self, place: int, settings: Settings) -> Case:
        """The case of the strategy at this place, with all settings that it takes."""
        asked = {path: text for path, text in settings.items() if self.takes(place, path)}
        return varied(replace(self.job, strategy=self.strategies[place]), asked)

    def loaded(self, place: int, settings: Settings) -> Case:
        """As `case`, with objects for the cluster and the model: files are read once."""
        case = self.case(place, settings)
        key = (str(case.cluster), str(case.model), tuple(sorted(case.overrides.items())))
        if key not in self._read:
            cluster, model = case.load()
            self._read[key] = cluster.value, model.value
        hardware, trained = self._read[key]
        return replace(case, cluster=hardware, model=trained, overrides={})

    @cached_property
    def _read(self) -> dict[tuple[str, str, tuple[tuple[str, str], ...]], tuple[Cluster, Model]]:
        return {}
