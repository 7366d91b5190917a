"""What may differ between simulated runs, how much is run, and what is measured."""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from analysis.convergence.objectives.problems import Array


@dataclass(frozen=True, slots=True)
class Variants:
    """What may differ between runs side by side; every field is an array of the same length.

    `clip` is phi, the largest magnitude of an element of the momentum in units of gradients (so
    that tau steps of gradient 1 add tau), infinite for none. `noise` is sigma squared of a worker.
    `gap_aware` chooses Lambda_t = 1 + |x_t - x_{t-1}| / max alpha |average used before| in place of
    `penalty`. `keep` and `predict` are those of averages that are used some steps late (`Late`); no
    other run heeds them. See `Setting` for the others.
    """

    inner_step: Array
    outer_step: Array
    momentum: Array
    penalty: Array
    clip: Array
    noise: Array
    keep: Array
    predict: Array
    gap_aware: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.inner_step)


def variants(
    inner_step: Array | float,
    *,
    outer_step: Array | float = 1.0,
    momentum: Array | float = 0.0,
    penalty: Array | float = 1.0,
    clip: Array | float = np.inf,
    noise: Array | float = 0.0,
    keep: Array | float = 1.0,
    predict: Array | float = 0.0,
    gap_aware: NDArray[np.bool_] | bool = False,
) -> Variants:
    """Variants from numbers and arrays of one length, which are broadcast together."""
    floats = (inner_step, outer_step, momentum, penalty, clip, noise, keep, predict)
    *numbers, flags = np.broadcast_arrays(*(np.atleast_1d(v) for v in floats), gap_aware)
    parts = [np.array(number, dtype=float) for number in numbers]
    return Variants(*parts, gap_aware=np.array(flags, dtype=bool))  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """How much is run: `workers` is G, `rounds` T, `local_steps` tau, every seed a run of its own.

    `delay` is how many rounds late the average of a round is used: 1 or more is CO2, 0 is SlowMo.
    With `late_steps` it is used so many local steps late instead, without a restart.
    """

    workers: int
    rounds: int
    local_steps: int
    seeds: int = 1
    delay: int = 1
    late_steps: int | None = None


def select(which: Variants, chosen: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Variants:
    """Some of the variants."""
    parts = {field.name: getattr(which, field.name)[chosen] for field in fields(which)}
    return replace(which, **parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, per variant and seed: [C, S], or per variant: [C].

    `gradient` is A, the mean of |grad f(mean of workers)|^2 over all steps, before each step.
    `drift` is the mean squared distance of workers from their mean. In both means, steps before the
    arrival of a late average count `keep`. `value` is f - f_inf at the last x. `spread` and
    `variance` are the largest means over seeds, of all steps, of the workers' disagreement and of
    the gradients' variance. `clipped` is the share of momentum elements that were clipped,
    `penalty` the largest that was used. `final` is the last x, [C, S, d].
    """

    gradient: Array
    drift: Array
    value: Array
    spread: Array
    variance: Array
    clipped: Array
    penalty: Array
    final: Array
