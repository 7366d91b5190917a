"""What is asked: strategies with one model on one cluster, and what is set besides."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from co2sim.common.cli import refuse_twice
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.models.memory import GIB
from co2sim.models.workload import Model
from co2sim.prediction import power
from co2sim.prediction.case import Case
from co2sim.prediction.goodput import goodput_of
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, scale_of, step_factor
from co2sim.prediction.totals import tokens_of
from co2sim.report.charts import parts
from co2sim.strategies import Strategy, parse
from co2sim.strategies.step import title
from co2sim.studies.grid import strategy_title, with_changes

MAX_STRATEGIES = 12
"""What a chart can tell apart."""

Settings = Mapping[str, str]
"""Texts by paths, as `grid.vary` takes them."""


@dataclass(frozen=True)
class Question:
    """A job, whose strategy is still open, the strategies to compare, and the tokens to train.

    Raises OptionError for none or more than `MAX_STRATEGIES` strategies, for one that is given
    twice, and for one that cannot be read.
    """

    job: Case
    strategies: tuple[str, ...]
    tokens: float | None = None
    goal: Goal = NO_GOAL

    def __post_init__(self) -> None:
        """Refuse what no page can show."""
        if not 0 < len(self.strategies) <= MAX_STRATEGIES:
            raise OptionError(
                f"{len(self.strategies)} strategies are given; it must be 1 to {MAX_STRATEGIES}"
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

    def title(self, place: int, settings: Settings) -> str:
        """The strategy at this place with the options that are set; as it was given if none is."""
        try:
            strategy = self.case(place, settings).strategy
            return strategy_title(strategy)
        except OptionError:
            return self.titles[place]

    def case(self, place: int, settings: Settings) -> Case:
        """The case of the strategy at this place, with all settings that it takes."""
        asked = {path: text for path, text in settings.items() if self.takes(place, path)}
        return with_changes(replace(self.job, strategy=self.strategies[place]), asked)

    def loaded(self, place: int, settings: Settings) -> Case:
        """As `case`, with objects for the cluster and the model: files are read once."""
        case = self.case(place, settings)
        inputs = (case.cluster, case.model, case.stack, *sorted(case.overrides.items()))
        key = tuple(map(str, inputs))
        if key not in self._read:
            cluster, model = case.load()
            self._read[key] = cluster.value, model.value
        hardware, trained = self._read[key]
        of_stack = {
            path: text for path, text in case.overrides.items() if path.startswith("stack.")
        }
        return replace(case, cluster=hardware, model=trained, overrides=of_stack)

    @cached_property
    def _read(self) -> dict[tuple[str, ...], tuple[Cluster, Model]]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one case. Shares are of a round; `memory` is in GiB on a GPU, which has `capacity`.

    `slowest` and `fastest` are the ends of the 90 % interval, as shares of `tokens_per_s`. `factor`
    is how many times the tokens of DDP it trains; None if not known. `factor_low` and `factor_high`
    are the ends of its range, relative to it. `watts` is the power of all
    nodes at the meter, None if not known. `strategy` is named with the options that it has there.
    A step has `samples` of `batch` tokens in all; a GPU takes them in `micro_steps` of
    `micro_batch`, and repeats what `recompute` says.
    """

    strategy: str
    samples: int | None
    batch: float
    micro_batch: int
    micro_steps: int
    recompute: str
    precision: str
    stack: str
    tokens_per_s: float
    slowest: float | None
    fastest: float | None
    exposed: float
    behind: float
    slower: float
    memory: float
    capacity: float
    fits: bool
    factor: float | None
    factor_low: float | None
    factor_high: float | None
    watts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The share of the time that failures take, and the ends of its range; 1: nothing gets done."""

    lost: float
    lost_least: float
    lost_most: float


def figures(case: Case, result: Result, goal: Goal) -> Figures:
    """The figures of a case that was simulated. Nothing more is simulated."""
    cluster = case.load()[0].value
    _, behind, exposed, slower = parts(result).values()
    factor = step_factor(result.strategy, scale_of(result), goal)
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    ends = (None, None) if factor is None else factor.ends
    return Figures(
        strategy=result.strategy,
        samples=result.global_batch,
        batch=result.tokens_per_gpu_per_step * result.gpus,
        micro_batch=result.micro_batch,
        micro_steps=result.accumulation,
        recompute=result.recompute,
        precision=result.precision,
        stack=result.stack,
        tokens_per_s=result.tokens_per_s,
        slowest=None if low is None else low / result.tokens_per_s,
        fastest=None if high is None else high / result.tokens_per_s,
        exposed=exposed,
        behind=behind,
        slower=slower,
        memory=result.memory_bytes_per_gpu["total"] / GIB,
        capacity=cluster.gpu.memory / GIB,
        fits=result.fits_in_memory,
        factor=None if factor is None else factor.factor,
        factor_low=ends[0],
        factor_high=ends[1],
        watts=power.power(result, cluster.resized(result.gpus)),
    )


def lost(case: Case, result: Result) -> Lost | None:
    """What failures take of it; None where nothing fails. It takes half a millisecond."""
    cluster, model = case.load()
    try:
        kept = goodput_of(result, cluster.value, model.value, optimizer=case.optimizer)
    except OptionError:  # failures leave no time for work
        return Lost(lost=1.0, lost_least=1.0, lost_most=1.0)
    if kept is None:
        return None
    return Lost(lost=1 - kept.useful, lost_least=1 - kept.high, lost_most=1 - kept.low)
