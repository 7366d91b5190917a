"""Whether a local-update method is worth it: the speed of its steps against how many it needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from co2sim.common.errors import Co2simError
from co2sim.common.units import figures
from co2sim.prediction.intervals import unshared
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, StepFactor, scale_of, step_factor
from co2sim.schedule.schedule import DType
from co2sim.strategies import LocalSteps, parse
from co2sim.strategies.co2 import CO2, PublishedCO2
from co2sim.strategies.diloco import DiLoCo
from co2sim.strategies.local_sgd import LocalSGD, OverlapLocalSGD, SlowMo


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A local-update method against a synchronous one, with the same batch and to the same loss.

    Its steps are `step_time_ratio` times as fast as those of `against`, and it needs `factor` times
    as many, `low` to `high` (None: not known; a `high` of None alone: `low` or more).
    `against_fits` says whether that one fits in memory. `sooner` is
    by how much it is faster to the loss: 0.07 for 7 %, below 0 where it is slower, `sooner_low` and
    `sooner_high` are the ends of its 90 % range by the factor and by what the errors of the two
    speeds do not share (a `sooner_low` of None: not known). `certain` says that this sign holds at
    both ends. `source` is where the factor comes from.
    `python` is the line that trains so; None where nothing does, for the reason `untrainable`.
    """

    strategy: str
    against: str | None
    against_fits: bool
    step_time_ratio: float | None
    factor: float | None
    low: float | None
    high: float | None
    sooner: float | None
    sooner_low: float | None
    sooner_high: float | None
    certain: bool
    source: str
    python: str | None
    untrainable: str = ""

    def __str__(self) -> str:
        """The verdict in a line, without the name of the strategy."""
        if self.step_time_ratio is None:
            return "not known, as no synchronous strategy could be simulated with this batch"
        head = f"steps {figures(self.step_time_ratio)} times as fast as {self.against}"
        head += "" if self.against_fits else " (which is predicted not to fit in memory)"
        if self.factor is None or self.sooner is None:
            name = self.strategy.partition("(")[0]
            return (
                f"{head}; how many more it needs is not known: worth it if fewer than"
                f" {figures(self.step_time_ratio)} times as many (--steps-factor {name}=1.3)"
            )
        return f"{head}, {self._needed()} needed: {self._outcome()}"

    def _needed(self) -> str:
        assert self.factor is not None
        if self.high is None:
            return f"{self.factor:.3g} times as many or more"
        ends = f" ({self.low:.3g} to {self.high:.3g})" if self.low != self.high else ""
        return f"{self.factor:.3g}{ends} times as many"

    def _outcome(self) -> str:
        assert self.sooner is not None
        assert self.sooner_high is not None
        low, high = self.sooner_low, 1 + self.sooner_high
        times = f"{f'{1 + low:.3g} to' if low is not None else 'at most'} {high:.3g} times as fast"
        if not self.certain:
            return f"whether it is worth it is not known, {times} to the same loss"
        head, more = ("", "sooner") if self.sooner >= 0 else ("not worth it, ", "longer")
        if low is None or not tells(1 + low, high):
            return f"{head}{more}, by how much is not known: {times} to the same loss"
        much = 1 - 1 / (1 + self.sooner) if self.sooner >= 0 else 1 / (1 + self.sooner) - 1
        return f"{head}{much:.0%}".replace("%", " %") + f" {more}"


VAGUE = 3.0
"""Of the ends of a range, from which on its middle is no advice. The middle is then off by a factor
of 1.7 at either end, more than offers of the same GPU differ in price."""


def tells(low: float, high: float) -> bool:
    """Whether a ratio in this range says which of two is the better, and about how much."""
    return not low < 1 < high and high <= VAGUE * low


def verdicts(
    cases: Sequence[Question],
    results: Sequence[Result],
    simulate: Callable[[Question], Result],
    goal: Goal = NO_GOAL,
) -> list[Verdict | None]:
    """On each result, None where it is of no local-update method.

    It is compared with the fastest synchronous strategy among the results that has as many GPUs and
    the same batch, and fits in memory; else with what its worker runs inside, which takes a
    simulation: `driver.run`.
    """
    return [
        _verdict(case, result, results, simulate, goal)
        if isinstance(_parsed(result), LocalSteps)
        else None
        for case, result in zip(cases, results, strict=True)
    ]


def _parsed(result: Result) -> object:
    try:
        return parse(result.strategy)
    except Co2simError:  # a strategy of a user
        return None


def _verdict(
    case: Question,
    result: Result,
    others: Sequence[Result],
    simulate: Callable[[Question], Result],
    goal: Goal,
) -> Verdict:
    strategy = _parsed(result)
    other = _synchronous(result, others)
    if other is None:
        other = _simulated(case, result, strategy, simulate)
    needed = step_factor(result.strategy, scale_of(result), goal)
    line, untrainable = python_line(strategy)
    ratio = None if other is None else other.step_time_s / result.step_time_s
    sooner: float | None = None
    low: float | None = None
    high: float | None = None
    certain = False
    if other is not None and needed is not None:
        base = step_factor(other.strategy, scale_of(other), goal)
        if base is not None and base.factor != 1:  # a user says so
            needed = replace(
                needed,
                factor=needed.factor / base.factor,
                low=needed.low / base.factor,
                high=None if needed.high is None else needed.high / base.factor,
            )
        sooner, low, high = _judged(result, other, needed)
        certain = high < 0 if sooner < 0 else low is not None and low >= 0
    return Verdict(
        strategy=result.strategy,
        against=None if other is None else other.strategy,
        against_fits=other is not None and other.fits_in_memory,
        step_time_ratio=ratio,
        factor=needed.factor if needed else None,
        low=needed.low if needed else None,
        high=needed.high if needed else None,
        sooner=sooner,
        sooner_low=low,
        sooner_high=high,
        certain=certain,
        source=needed.source if needed else "neither published nor measured",
        python=line,
        untrainable=untrainable,
    )


def _judged(result: Result, other: Result, factor: StepFactor) -> tuple[float, float | None, float]:
    """By how much it is faster to the loss, and the ends of that; a low one of None: not known."""
    ratio = other.step_time_s / result.step_time_s
    reach = unshared(result, other)
    reach = reach if math.isfinite(reach) else 0.0  # measured ones
    gain = ratio / factor.factor
    best = gain * math.exp(math.hypot(reach, math.log(factor.factor / factor.low)))
    if factor.high is None:
        return gain - 1, None, best - 1
    worst = gain * math.exp(-math.hypot(reach, math.log(factor.high / factor.factor)))
    return gain - 1, worst - 1, best - 1


def _comparable(result: Result, other: Result) -> bool:
    batches = [r.gpus * r.tokens_per_gpu_per_step for r in (result, other)]
    same = (result.gpus, result.cluster, result.model) == (other.gpus, other.cluster, other.model)
    return same and math.isclose(*batches)


def _synchronous(result: Result, others: Sequence[Result]) -> Result | None:
    """The fastest of those that were asked."""
    alike = [
        other
        for other in others
        if (strategy := _parsed(other)) is not None
        and not isinstance(strategy, LocalSteps)
        and _comparable(result, other)
    ]
    fitting = [other for other in alike if other.fits_in_memory]
    return min(fitting, key=lambda other: other.step_time_s, default=None)


def _simulated(
    case: Question, result: Result, strategy: Any, simulate: Callable[[Question], Result]
) -> Result | None:
    """What its worker runs inside, on all GPUs, with as many samples in a step."""
    inside = "ddp" if strategy.worker == "gpu" else strategy.inner or "zero2"
    tried = replace(case, strategy=inside)
    try:
        inner = simulate(tried)
        if not _comparable(result, inner):
            inner = simulate(
                replace(
                    tried,
                    global_batch=None,
                    micro_batch=result.micro_batch,
                    accumulation=result.accumulation,
                )
            )
    except Co2simError:  # such as more GPUs than it can divide anything over
        return None
    return inner if _comparable(result, inner) else None


_CLASSES: dict[type, str] = {
    CO2: "CO2",
    PublishedCO2: "CO2.published",
    LocalSGD: "LocalSGD",
    OverlapLocalSGD: "OverlapLocalSGD",
    SlowMo: "SlowMo",
    DiLoCo: "DiLoCo",
}
"""The algorithm of `realrun.algorithms` that trains by a strategy."""
_LATE = ("keep", "predict", "fragments", "preview")
"""Options of CO2 that are those of a LateAverage."""
_WHEN = ("fragments", "delay", "staleness")
"""Options of the others that say when averages are used."""
_UNTRAINABLE = {
    "average": "every rank averages its share",
    "scale_block": "blocks of quantized averages have their own size",
}
"""Options that change what is simulated alone, with what is trained instead."""


def python_line(strategy: Any) -> tuple[str | None, str]:
    """The Python that trains by a strategy; or None, and why nothing does."""
    name = _CLASSES.get(type(strategy))
    if name is None:
        return None, "no algorithm of realrun.algorithms is this strategy"
    options = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    changed = {field.name for field in fields(strategy) if options[field.name] != field.default}
    for option, why in _UNTRAINABLE.items():
        if option in changed:
            return None, f"{option}={options[option]} is not trained: {why}"
    if strategy.dtype is DType.FP16:
        return None, "dtype=fp16 is not trained: averages travel as fp32, bf16, int8 or int4"
    if strategy.inner == "zero1":
        return None, "inner=zero1 is not trained: in a worker is ddp, zero2, zero3, zeropp or fsdp"
    kept = {"tau": options["tau"]}
    late = {option: options[option] for option in _LATE if option in changed}
    if isinstance(strategy, CO2):
        arguments = _arguments({"delay": strategy.delay, **late})
        kept["delay"] = f"LateAverage({arguments})" if late else strategy.delay
    else:
        kept |= {option: options[option] for option in _WHEN if option in changed}
    kept |= {option: f'"{options[option]}"' for option in ("worker", "dtype") if option in changed}
    inside = f"  # {strategy.inner or 'zero2'} inside of a {strategy.worker}"
    line = f"{name}(model, optimizer, {_arguments(kept)})"
    return line + (inside if strategy.worker != "gpu" else ""), ""


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
