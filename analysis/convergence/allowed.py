"""How late an average may be used: what lateness costs in the bound, beside waiting."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from analysis.convergence import bound
from analysis.convergence.bound import Bound
from analysis.convergence.lateness import Delay, Late
from analysis.convergence.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLine:
    """The bound with one delay; None where no bound holds.

    `price` is by what share the bound is above that of waiting for the average.
    """

    delay: Delay
    inner_step: float
    load: float
    bound: Bound | None
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The longest delays, in local steps, and the bound with some of them.

    `steps` is the longest whose price is at most `price`, 0 if that of 1 step is above it.
    `feasible` is the longest with which the condition holds; where inner steps are tuned it is tau.
    Both are None where waiting itself has no bound. `lines` begin with waiting for the average
    (delay 0) and end with the delay of CO2, 1 round with a restart.
    """

    price: float
    steps: int | None
    feasible: int | None
    lines: tuple[DelayLine, ...]


def allowed(setting: Setting, price: float, *, tune: bool) -> Allowed:
    """How late averages may be: `setting` says what is kept, its own delay does not count.

    With `tune` every delay has its own best inner step. The bound rises with the delay, and so does
    the load; bisection relies on it. Raises OptionError where `bound.tuned` does.
    """
    mix = setting.late or Late(steps=1)
    waiting = replace(setting, late=None, delay=0)
    base = _total(_evaluated(waiting, tune=tune)[1])

    def line(steps: int) -> DelayLine:
        late = replace(mix, steps=steps) if steps else None
        return _line(replace(waiting, late=late), Delay(steps or None, 0), base, tune=tune)

    tau = setting.local_steps
    steps = _longest(lambda d: line(d).price <= price, tau)
    feasible = _longest(lambda d: line(d).bound is not None, tau)
    shown = {0, tau, *(2**j for j in range(tau.bit_length())), steps or 0, feasible or 0}
    restart = _line(replace(waiting, delay=1), Delay(None, 1), base, tune=tune)
    lines = (*(line(d) for d in sorted(shown) if d <= tau), restart)
    return Allowed(price=price, steps=steps, feasible=feasible, lines=lines)


def _evaluated(setting: Setting, *, tune: bool) -> tuple[Setting, Bound | None]:
    setting = bound.tuned(setting) if tune else setting
    found = bound.evaluate(setting)
    return setting, found if isinstance(found, Bound) else None


def _total(found: Bound | None) -> float:
    return math.inf if found is None else found.total


def _line(setting: Setting, delay: Delay, base: float, *, tune: bool) -> DelayLine:
    setting, found = _evaluated(setting, tune=tune)
    total = _total(found)
    price = total / base - 1 if 0 < base < math.inf else 0.0 if total == base == 0 else math.inf
    return DelayLine(
        delay=delay,
        inner_step=setting.inner_step,
        load=bound.load(setting),
        bound=found,
        price=price,
    )


def _longest(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number from 0 to `most` that holds, if all below it do; None if 0 does not."""
    if not holds(0):
        return None
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
