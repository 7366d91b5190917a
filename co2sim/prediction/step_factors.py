"""Speed and learning in one answer: how many steps a method needs for each one of DDP.

Pure functions over results. A user's own factors come first. Of models with 10 million parameters
and more the factor is that of published losses (`factor_of_training`), of smaller ones that of
co2sim/catalog/step_factors.toml, which says how it was measured.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from co2sim.catalog.facts import read_table
from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds, counted
from co2sim.common.validation import above, between, whole
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Layout
from co2sim.strategies import LocalSteps, Strategy, parse
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import round_steps, workers_of
from co2sim.strategies.step import title

_MAX_STEPS = 10**12
_MAX_FACTOR = 1e6
_GIVEN = "given"
_BETA1 = 0.9
"""Of AdamW in the measurements, where nothing else is said."""
_TOY = 10_000_000
"""Parameters below which a model is one of those that the factors were measured with."""
_SOON = 5
"""Local steps within which an average is used at no cost: arXiv 2501.18512, Figure 10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFactor:
    """The steps that a method needs for one of DDP to the same loss.

    `source` is who says so, `low` and `high` the ends of its range; `high` is None where it is a
    lower bound. `measured` is the strategy that it was measured with, where that was a toy.
    `beyond` is in what the training is beyond all published ones.
    """

    factor: float
    source: str
    low: float
    high: float | None
    measured: str | None = None
    beyond: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Given, or 1 as nothing is exchanged or all is: no range."""
        return self.low == self.high

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of its range, relative to it; of a lower bound the high one is 1."""
        return self.low / self.factor, (self.high or self.factor) / self.factor

    def __str__(self) -> str:
        """The factor and its range."""
        if self.certain:
            return f"{self.factor:.3g}"
        if self.high is None:
            return f"{self.factor:.3g} or more"
        return f"{self.factor:.3g} ({self.low:.3g} to {self.high:.3g})"


def joined(time: float | None, end: float) -> float | None:
    """An end of a time, relative to it, with the same end of a step factor.

    The errors of a speed and of a factor have nothing to do with each other. As for any product of
    independent factors, their variances add up in the logarithm, and so do the squares of the
    distances to the ends. The range of a factor, two standard deviations to each side, counts as
    one of 90 %, which is a little wide. A `time` of None counts as exact.
    """
    if end == 1:
        return time
    reach = math.hypot(math.log(time or 1.0), math.log(end))
    return math.exp(reach if end > 1 else -reach)


@dataclass(frozen=True, slots=True)
class Scale:
    """On what a factor depends beside the strategy: the model's parameters, and the workers.

    None where a result of an older version does not say.
    """

    parameters: int | None
    workers: int | None


def scale_of(result: Result) -> Scale:
    """Of a result."""
    return Scale(result.parameters, result.workers)


def scale_of_case(case: Question) -> Scale:
    """Of a case that need not be simulated. Its strategy is a text, or one of `STRATEGIES`."""
    entries = case.load()
    cluster, model = entries[0].value, entries[1].value
    if case.gpus is not None:
        cluster = cluster.resized(case.gpus)
    strategy = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    nodes = max(1, cluster.nodes // case.apart)
    sites = cluster.sites if nodes % cluster.sites == 0 else 1
    layout = Layout(nodes, cluster.layout.world_size // case.apart // nodes, sites)
    return Scale(model.parameters, workers_of(strategy, case.ranks(layout)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToLoss:
    """What it takes to reach the loss that DDP reaches after some steps.

    `cost` is in `currency`; both are None where the cluster has no price.
    """

    steps: float
    time_s: Seconds
    cost: float | None
    currency: str | None
    factor: StepFactor


@dataclass(frozen=True, slots=True)
class Project:
    """How many times as long as one training a whole project takes: `factor`, `low` to `high`.

    Restarts by people, failed attempts, evaluations and trials take their time. Raises OptionError
    for less than 1.
    """

    factor: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is shorter than its training."""
        factor = between("the factor of a project", self.factor, 1, _MAX_FACTOR)
        object.__setattr__(self, "factor", factor)

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the range, relative to the factor."""
        return (self.low or self.factor) / self.factor, (self.high or self.factor) / self.factor


ONE_TRAINING = Project(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The loss to reach, as a number of steps of DDP (None: none is asked for), and own factors.

    `factors` maps names of strategies, "co2", or strategies with options, "co2(tau=48)", to
    numbers. Days and money are those of a `project`. Raises OptionError for what is unknown or out
    of range.
    """

    steps: int | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    project: Project = ONE_TRAINING

    def __post_init__(self) -> None:
        """Check the numbers, and name strategies as results do."""
        if self.steps is not None:
            steps = whole("steps of ddp to the loss", self.steps, 1, _MAX_STEPS)
            object.__setattr__(self, "steps", steps)
        named: dict[str, float] = {}
        for text, factor in self.factors.items():
            strategy = parse(text)
            name = strategy.name if text.strip() == strategy.name else title(strategy)
            what = f"the steps factor of {name}"
            if name in named:
                raise OptionError(f"{what} is given twice")
            named[name] = between(what, above(what, factor, 0), 0, _MAX_FACTOR)
        object.__setattr__(self, "factors", named)


NO_GOAL = Goal()


def step_factor(strategy: str, scale: Scale, goal: Goal = NO_GOAL) -> StepFactor | None:
    """The factor of a strategy as results name it: given, published, or measured.

    1 for what makes the steps of DDP; None for what was neither published nor measured.
    """
    method = _parsed(strategy)
    name = _stated(strategy, method, goal)
    if name is not None:
        return _certain(goal.factors[name], _GIVEN)
    if method is not None and not isinstance(method, LocalSteps):
        return _certain(1.0, "its steps are those of ddp")
    if method is None or "auto" in {method.tau, getattr(method, "delay", None)}:
        return None  # not ours, or not yet a method
    return _of_local_updates(method, scale)


def _stated(strategy: str, method: Any, goal: Goal) -> str | None:
    """The name by which the goal states the factor of a strategy, the narrowest of several.

    A strategy whose "auto" options became numbers is also named as it was before.
    """
    if strategy in goal.factors:
        return strategy
    for name in goal.factors if isinstance(method, CO2) else ():
        stated = parse(name)
        if name != stated.name and isinstance(stated, CO2) and "auto" in {stated.tau, stated.delay}:
            chosen = [option for option in ("tau", "delay") if getattr(stated, option) == "auto"]
            chosen += ["fragments"] if stated.delay == "auto" and stated.fragments is None else []
            if stated == replace(method, **{option: getattr(stated, option) for option in chosen}):
                return name
    return method.name if method and method.name in goal.factors else None


def _of_local_updates(method: Any, scale: Scale) -> StepFactor | None:
    """The factor of workers with a number of local steps: published, or measured."""
    if scale.workers == 1 and method.name != "diloco":
        return _certain(1.0, "one worker averages with none; its outer step is not counted")
    toy = _toy(method)
    if scale.parameters is None or scale.workers is None:
        said = "the size of this model is not known"
        return toy and replace(toy, source=f"{toy.source}; {said}")
    if scale.parameters < _TOY and scale.workers > 1:
        return toy
    return _published(method, scale.parameters, scale.workers, toy)


def _certain(factor: float, source: str) -> StepFactor:
    return StepFactor(factor=factor, source=source, low=factor, high=factor)


def _toy(method: Any) -> StepFactor | None:
    """The factor that was measured with a toy, at the nearest tau."""
    alike = [entry for entry in _entries() if _kind(_measured(entry["strategy"])) == _kind(method)]
    if not alike:
        return None
    entry = min(alike, key=lambda entry: (_distance(method, entry["strategy"]), -entry["steps"]))
    conditions = (
        f"a GPT of {entry['parameters']:,} parameters, {entry['workers']} workers,"
        f" {entry['steps']} steps"
    )
    if entry["beta1"] != _BETA1:
        conditions += f", AdamW with beta1 {entry['beta1']:g}, outer step {entry['outer']}"
    factor, name = entry["factor"], entry["strategy"]
    return StepFactor(factor=factor, source=conditions, low=factor, high=None, measured=name)


def _published(
    method: Any, parameters: int, workers: int, toy: StepFactor | None
) -> StepFactor | None:
    """The factor of a model that is no toy.

    Only of DiLoCo losses were found for such models. The others get its factor, with a range that
    ends with what their own toy needed; None for those that have none.
    """
    steps, late = round_steps(method), _wait(method) > _SOON
    is_diloco = method.name == "diloco"
    if not is_diloco and toy is None:
        return None
    of_diloco = factor_of_training(parameters, workers, steps, late=late)
    source, low, high = _basis(), of_diloco.low, of_diloco.high
    if late:
        source += "; used a round late: arXiv 2502.12996"
        low = factor_of_training(parameters, workers, steps).low
    if toy is not None and (late or not is_diloco):
        high = max(high, toy.factor)
        source += f"; the high end is {toy.measured} of {toy.source}"
    if not is_diloco:
        source = (
            f"no losses of large models with {method.name} are published: this is from {source}"
        )
        source += f"; at least 1, as the outer step of {method.name} is not that of DiLoCo"
    factor = of_diloco.factor if is_diloco else max(1.0, of_diloco.factor)
    high = max(high, factor)
    return StepFactor(factor=factor, source=source, low=low, high=high, beyond=of_diloco.beyond)


def _wait(strategy: Any) -> int:
    """The local steps before an average is used."""
    delay = getattr(strategy, "delay", None)
    if delay is None and strategy.name in {"co2.published", "overlap_local_sgd"}:
        return int(getattr(strategy, "staleness", 1) * round_steps(strategy))
    return int(delay or 0)


def to_loss(result: Result, goal: Goal) -> ToLoss | None:
    """Steps, time and cost to the loss that DDP reaches after `goal.steps` steps of this batch.

    None where no factor is known. Raises OptionError where the goal has no steps.
    """
    if goal.steps is None:
        raise OptionError("the goal has no steps; give those after which ddp has the loss")
    factor = step_factor(result.strategy, scale_of(result), goal)
    if factor is None:
        return None
    steps = goal.steps * factor.factor
    price = result.cost_per_billion_tokens
    tokens = steps * result.tokens_per_gpu_per_step * result.gpus
    return ToLoss(
        steps=steps,
        time_s=steps * result.step_time_s,
        cost=None if price is None else price * tokens / 1e9,
        currency=result.currency,
        factor=factor,
    )


def to_dict(result: Result, goal: Goal) -> dict[str, Any]:
    """A result as plain values for JSON, with `to_loss` (None: not known) if the goal has steps."""
    if goal.steps is None:
        return result.to_dict()
    reached = to_loss(result, goal)
    return result.to_dict() | {"to_loss": None if reached is None else asdict(reached)}


def local_updates(strategies: Iterable[str]) -> bool:
    """Whether a step of one of these is not a step of DDP."""
    return any(isinstance(_parsed(strategy), LocalSteps) for strategy in strategies)


def remark(trainings: Iterable[tuple[str, Scale]], goal: Goal = NO_GOAL) -> str:
    """One line on what steps of the local-update methods among these are worth; "" for none."""
    sources: dict[str, dict[str, None]] = {}
    others: dict[object, str] = {}
    by_name: dict[str, list[tuple[Scale, StepFactor]]] = {}
    example = ""
    for strategy, scale in dict.fromkeys(trainings):
        method = _parsed(strategy)
        if not isinstance(method, LocalSteps):
            continue
        example = example or method.name
        factor = step_factor(strategy, scale, goal)
        if factor is None:
            others.setdefault(_kind(method), f"{strategy}: not measured")
        elif factor.source == _GIVEN:
            name = _stated(strategy, method, goal) or method.name
            others[name] = f"{name}: {factor.factor:g} ({_GIVEN})"
        else:
            by_name.setdefault(factor.measured or strategy, []).append((scale, factor))
    for name, all_found in by_name.items():
        for said, source in _told(name, all_found):
            sources.setdefault(source, {})[said] = None
    sentences = [f"{', '.join(said)} ({source})" for source, said in sources.items()]
    if not sentences and not others:
        return ""
    return (
        "a step of local updates is not worth a step of ddp; steps to the same loss, ddp = 1:"
        f" {'; '.join([*sentences, *others.values()])}; --steps-factor {example}=1.3 sets your own"
    )


def _told(name: str, all_found: Sequence[tuple[Scale, StepFactor]]) -> Iterator[tuple[str, str]]:
    """The least and the most factor of a strategy from each source, and the source."""
    by_source: dict[str, list[tuple[Scale, StepFactor]]] = {}
    for scale, factor in all_found:
        by_source.setdefault(factor.source, []).append((scale, factor))
    for source, group in by_source.items():
        ends = sorted(group, key=lambda pair: pair[1].factor)
        said = []
        for scale, factor in dict.fromkeys((ends[0], ends[-1])):
            text = str(factor)
            if factor.measured is None and not factor.certain:
                text += f" with {counted(scale.workers or 0, 'worker')}"
            if factor.beyond:
                text += f", though no published training had {' or '.join(factor.beyond)}"
            said.append(text)
        yield f"{name}: {' to '.join(dict.fromkeys(said))}", source


def _parsed(strategy: str) -> Strategy | None:
    """The strategy; None for one that is not ours."""
    try:
        return parse(strategy)
    except Co2simError:
        return None


@cache
def _measured(name: str) -> Strategy:
    """A strategy of the table."""
    return parse(name)


def _kind(strategy: Any) -> tuple[str, int, bool, bool, int]:
    """What has to be alike for a factor to say anything; with a preview rounds must be as long."""
    late = bool(getattr(strategy, "delay", 0))
    parts = (getattr(strategy, "fragments", 1) or 1) > 1
    previews = round_steps(strategy) if getattr(strategy, "preview", False) else 0
    return strategy.name, getattr(strategy, "staleness", 1), late, parts, previews


def _distance(method: Any, measured: str) -> tuple[float, ...]:
    """Between taus, by their ratio; then between delays, and what is done with late averages."""
    other: Any = _measured(measured)
    ratio = abs(math.log(round_steps(method) / round_steps(other)))
    pairs = zip(_lateness(method), _lateness(other), strict=True)
    return ratio, *(abs(mine - theirs) for mine, theirs in pairs)


def _lateness(strategy: Any) -> tuple[float, float, float]:
    """Delay, keep and predict; 0 where averages are not late."""
    delay = getattr(strategy, "delay", None) or 0
    return (delay, *strategy.kept()) if delay and isinstance(strategy, CO2) else (delay, 0, 0)


@cache
def _entries() -> tuple[Mapping[str, Any], ...]:
    return tuple(read_table("step_factors")["factor"])


# --- published losses, for a size of the model and a number of workers ----------------------------

FAR = 4.0
"""A size is beyond the published ones if it is this many times larger or smaller."""

_DEVIATIONS = 2.0
"""Half a range in standard deviations; twice that beyond what is published."""


@dataclass(frozen=True, slots=True)
class PublishedFactor:
    """A step factor by published losses, its range, and in what it is beyond them."""

    factor: float
    low: float
    high: float
    beyond: tuple[str, ...]


def factor_of_training(
    parameters: int, workers: int, tau: int, *, late: bool = False
) -> PublishedFactor:
    """The factor of DiLoCo by the law of the published losses.

    Rounds shorter than the published ones count as these, and sizes beyond the published ones as
    the nearest of them: that the factor falls with the size is not extrapolated. `late` averages
    are used a round later.
    """
    law = published_losses()["law"]
    smallest, largest = law["sizes"]
    shortest, longest = law["taus"]
    logarithm = (
        law["constant"]
        + law["workers"] * math.log(workers)
        + law["tau"] * math.log(max(tau, shortest) / shortest)
        + law["parameters"] * math.log(min(max(parameters, smallest), largest) / 1e9)
        + (math.log(law["late"]) if late else 0.0)
    )
    beyond = []
    if not smallest / FAR <= parameters <= largest * FAR:
        beyond.append(f"{_short(parameters)} parameters")
    if workers > law["most_workers"]:
        beyond.append(f"{workers} workers")
    if tau > longest:
        beyond.append(f"tau={tau}")
    elif tau < shortest:
        beyond.append(f"tau={tau} (the factor is that of tau={shortest})")
    width = _DEVIATIONS * law["deviation"] * (2 if beyond else 1)
    ends = math.exp(logarithm - width), math.exp(logarithm + width)
    return PublishedFactor(math.exp(logarithm), *ends, tuple(beyond))


def _basis() -> str:
    """What the law rests on, as a text."""
    law = published_losses()["law"]
    smallest, largest = map(_short, law["sizes"])
    shortest, longest = law["taus"]
    return (
        f"published losses of DiLoCo with {smallest} to {largest} parameters, 1 to"
        f" {law['most_workers']} workers, tau {shortest} to {longest}: arXiv 2503.09799, 2501.18512"
    )


def published_losses() -> Mapping[str, Any]:
    """Those of co2sim/catalog/published_step_factors.toml, and the law that is fitted to them."""
    return read_table("published_step_factors")


def _short(parameters: float) -> str:
    """A number of parameters in millions or billions."""
    if parameters >= 1e9:  # noqa: PLR2004
        return f"{parameters / 1e9:.3g} billion"
    return f"{parameters / 1e6:.3g} million"
