"""Speed and learning in one answer: how many steps a method needs for each one of DDP.

Pure functions over results. Measured factors are those of co2sim/catalog/step_factors.toml, which
says how they were measured; a user's own come first.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds
from co2sim.common.validation import above, between, whole
from co2sim.prediction.result import Result
from co2sim.strategies import LocalSteps, Strategy, parse
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import round_steps
from co2sim.strategies.step import title

_MAX_STEPS = 10**12
_MAX_FACTOR = 1e6
_GIVEN = "given"
_BETA1 = 0.9
"""Of AdamW in the measurements, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFactor:
    """The steps that a method needs for one of DDP to the same loss.

    `measured` is the strategy that it was measured with, `source` who says so.
    """

    factor: float
    source: str
    measured: str | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The loss to reach, as a number of steps of DDP (None: none is asked for), and own factors.

    `factors` maps names of strategies, "co2", or strategies with options, "co2(tau=48)", to
    numbers. Raises OptionError for what is unknown or out of range.
    """

    steps: int | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the numbers, and name strategies as results do."""
        if self.steps is not None:
            steps = whole("steps of ddp to the loss", self.steps, 1, _MAX_STEPS)
            object.__setattr__(self, "steps", steps)
        found: dict[str, float] = {}
        for text, factor in self.factors.items():
            strategy = parse(text)
            name = strategy.name if text.strip() == strategy.name else title(strategy)
            what = f"the steps factor of {name}"
            if name in found:
                raise OptionError(f"{what} is given twice")
            found[name] = between(what, above(what, factor, 0), 0, _MAX_FACTOR)
        object.__setattr__(self, "factors", found)


NO_GOAL = Goal()


def step_factor(strategy: str, goal: Goal = NO_GOAL) -> StepFactor | None:
    """The factor of a strategy as results name it: given, or measured at the nearest tau.

    1 for what makes the steps of DDP; None for what was not measured.
    """
    known = _parsed(strategy)
    for name in (strategy, known.name if known else strategy):
        if name in goal.factors:
            return StepFactor(factor=goal.factors[name], source=_GIVEN)
    if known is None:
        return None
    if not isinstance(known, LocalSteps):
        return StepFactor(factor=1.0, source="its steps are those of ddp")
    if "auto" in {known.tau, getattr(known, "delay", None)}:
        return None  # not yet a method
    alike = [entry for entry in _entries() if _kind(_measured(entry["strategy"])) == _kind(known)]
    if not alike:
        return None
    entry = min(alike, key=lambda entry: (_distance(known, entry["strategy"]), -entry["steps"]))
    conditions = (
        f"a GPT of {entry['parameters']:,} parameters, {entry['workers']} workers,"
        f" {entry['steps']} steps"
    )
    if entry["beta1"] != _BETA1:
        conditions += f", AdamW with beta1 {entry['beta1']:g}, outer step {entry['outer']}"
    return StepFactor(factor=entry["factor"], source=conditions, measured=entry["strategy"])


def to_loss(result: Result, goal: Goal) -> ToLoss | None:
    """Steps, time and cost to the loss that DDP reaches after `goal.steps` steps of this batch.

    None where no factor is known. Raises OptionError where the goal has no steps.
    """
    if goal.steps is None:
        raise OptionError("the goal has no steps; give those after which ddp has the loss")
    found = step_factor(result.strategy, goal)
    if found is None:
        return None
    steps = goal.steps * found.factor
    price = result.cost_per_billion_tokens
    tokens = steps * result.tokens_per_gpu_per_step * result.gpus
    return ToLoss(
        steps=steps,
        time_s=steps * result.step_time_s,
        cost=None if price is None else price * tokens / 1e9,
        currency=result.currency,
        factor=found,
    )


def to_dict(result: Result, goal: Goal) -> dict[str, Any]:
    """A result as plain values for JSON, with `to_loss` (None: not known) if the goal has steps."""
    if goal.steps is None:
        return result.to_dict()
    found = to_loss(result, goal)
    return result.to_dict() | {"to_loss": None if found is None else asdict(found)}


def remark(strategies: Iterable[str], goal: Goal = NO_GOAL) -> str:
    """One line on what steps of the local-update methods among these are worth; "" for none."""
    measured: dict[str, dict[str, None]] = {}
    others: dict[object, str] = {}
    example = ""
    for strategy in dict.fromkeys(strategies):
        known = _parsed(strategy)
        if not isinstance(known, LocalSteps):
            continue
        example = example or known.name
        found = step_factor(strategy, goal)
        if found is None:
            others.setdefault(_kind(known), f"{strategy}: not measured")
        elif found.measured is None:
            name = strategy if strategy in goal.factors else known.name
            others[name] = f"{name}: {found.factor:g} ({_GIVEN})"
        else:
            said = f"{found.measured}: {found.factor:.3g}"
            measured.setdefault(found.source, {})[said] = None
    told = [f"{', '.join(said)} or more ({source})" for source, said in measured.items()]
    if not told and not others:
        return ""
    return (
        "a step of local updates is not worth a step of ddp; steps to the same loss, ddp = 1:"
        f" {'; '.join([*told, *others.values()])}; --steps-factor {example}=1.3 sets your own"
    )


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


def _distance(one: Any, measured: str) -> tuple[float, ...]:
    """Between taus, by their ratio; then between delays, and what is done with late averages."""
    other: Any = _measured(measured)
    ratio = abs(math.log(round_steps(one) / round_steps(other)))
    pairs = zip(_lateness(one), _lateness(other), strict=True)
    return ratio, *(abs(mine - theirs) for mine, theirs in pairs)


def _lateness(strategy: Any) -> tuple[float, float, float]:
    """Delay, keep and predict; 0 where averages are not late."""
    delay = getattr(strategy, "delay", None) or 0
    return (delay, *strategy.kept()) if delay and isinstance(strategy, CO2) else (delay, 0, 0)


@cache
def _entries() -> tuple[Mapping[str, Any], ...]:
    text = (resources.files("co2sim.catalog") / "step_factors.toml").read_text("utf-8")
    return tuple(tomllib.loads(text)["factor"])
