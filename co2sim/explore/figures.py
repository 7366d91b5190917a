"""The figures of a case that a page shows, and what follows from them by arithmetic."""

from dataclasses import dataclass

from co2sim import power
from co2sim.case import Case
from co2sim.errors import OptionError
from co2sim.goodput.of_result import goodput_of
from co2sim.memory import GIB
from co2sim.report.bar_charts import parts
from co2sim.result import Result
from co2sim.step_factors import Goal, step_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one case. Shares are of a round; `memory` is in GiB on a GPU, which has `capacity`.

    `slowest` and `fastest` are the ends of the 90 % interval, as shares of `tokens_per_s`. `factor`
    is how many times the tokens of DDP it trains; None where nobody knows. `watts` is the power of
    all nodes at the meter, None where nobody knows.
    """

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
    factor = step_factor(result.strategy, goal)
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    return Figures(
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
