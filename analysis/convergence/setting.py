"""What the theorem and its simulator are given: numbers, late averages, variants of a method."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from co2sim.common import validation
from co2sim.common.convert import Reader, option
from co2sim.common.delayed_averaging import MAX_FRAGMENTS, bounded, check_predict, kept
from co2sim.common.errors import OptionError
from co2sim.common.validation import between, whole

Array = NDArray[np.float64]

MAX_STEPS = 100_000
"""The longest delay in local steps; a round has at most as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """How a late average is used: `steps` local steps after its launch, without a restart.

    At the arrival workers move to the new anchor, plus `keep` of what they did since the launch,
    plus `predict` x steps/tau of the mean displacement that has just arrived. `steps` is d, from 1
    to tau; `keep` is in (0, 1]: what is thrown away altogether has no bound. `predict` x steps/tau
    is below 1, so that what is predicted, and is part of the next displacement, dies out. The model
    is cut into `fragments`, which launch at evenly spread steps of a round.

    Raises OptionError for what is out of range. Source: docs/theory.md, the late average.
    """

    steps: int
    keep: float = 1.0
    predict: float = 0.0
    fragments: int = 1

    def __post_init__(self) -> None:
        validation.whole("delay", self.steps, 1, MAX_STEPS)
        validation.whole("fragments", self.fragments, 1, MAX_FRAGMENTS)
        validation.fraction("keep", self.keep)
        validation.between("predict", self.predict, 0, 1)

    def carried(self, local_steps: int) -> float:
        """The share p of a displacement that is part of the next one, by prediction."""
        return self.predict * self.steps / local_steps

    def launches(self, local_steps: int) -> list[int]:
        """After how many steps of a round fragments launch, each number once."""
        count = self.fragments
        return sorted({local_steps * (i + 1) // count for i in range(count)})

    def counted(self, local_steps: int) -> float:
        """The steps of a round, of which those before the arrival count `keep` each."""
        return self.keep * self.steps + local_steps - self.steps


def late_average(
    steps: int,
    local_steps: int,
    keep: float | None = None,
    predict: float | None = None,
    fragments: int = 1,
) -> Late:
    """With what CO2 keeps and predicts in rounds of that length, where that is not given.

    Raises OptionError for what is out of range.
    """
    share, predicted = kept(local_steps, keep, predict)
    return Late(steps=steps, keep=share, predict=predicted, fragments=fragments)


def later(late: Late, steps: int, local_steps: int) -> Late:
    """The same with another delay; what would be repeated for ever is not predicted."""
    predict = bounded(local_steps, steps, late.keep, late.predict)
    return replace(late, steps=steps, predict=predict)


@dataclass(frozen=True, slots=True)
class Delay:
    """A delay as it is given: in local steps, or in whole rounds with a restart at their end."""

    steps: int | None
    rounds: int

    def __str__(self) -> str:
        count, unit = (self.rounds, "round") if self.steps is None else (self.steps, "step")
        return f"{count} {unit}{'' if count == 1 else 's'}"


ONE_ROUND = Delay(None, 1)
"""That of CO2 as published."""
_TEXT = re.compile(r"(\d{1,18})\s*(steps?|rounds?)?")


def delay(text: str | Delay) -> Delay:
    """A delay from "3", "3 steps" or "1 round"; 0 is the same in both units.

    Raises OptionError.
    """
    if isinstance(text, Delay):
        return text
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"--delay is {text!r}; it must be a number of local steps, such as 3 or '3 steps', or"
            " of rounds, such as '1 round'"
        )
    count = int(match[1])
    if count == 0 or (match[2] or "").startswith("round"):
        return Delay(None, count)
    return Delay(count, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How averages are late, as the options of a command say; see `Late`."""

    delay: Annotated[Delay, Reader(lambda _, text: delay(text), "DELAY")] = option(
        ONE_ROUND,
        "When an average is used: 3 or '3 steps' after its launch, without a restart; '1 round'"
        " later with a restart, as in CO2; 0 is SlowMo or local SGD.",
        "late",
    )
    keep: float | None = option(
        None,
        "Share of the steps since its launch that a late average leaves; default: that of CO2, 1"
        " in rounds of less than 8 steps, else 1/2.",
        "late",
    )
    predict: float | None = option(
        None,
        "Share that the mean displacement predicts instead; default: 1 - keep.",
        "late",
    )
    fragments: int = option(
        1,
        "Parts of the model, which launch their averages at evenly spread steps of a round.",
        "late",
    )

    def average(self, local_steps: int) -> Late | None:
        """What is done with averages that are late by local steps; None for whole rounds."""
        if self.delay.steps is not None:
            mix = self.keep, self.predict, self.fragments
            return late_average(self.delay.steps, local_steps, *mix)
        if self != Lateness(delay=self.delay):
            raise OptionError(
                "--keep, --predict and --fragments are for a delay in local steps, such as 3;"
                f" --delay is {self.delay}"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What is known about a clip: what a run recorded, or phi and the largest derivative.

    `clip_residual` is eps of `clipping.with_residual`. `gradient_bound` is M of
    `clipping.with_noise`; without it sqrt(2 L Delta) is taken, which for equal data holds where f
    is not above its value at the start. Raises OptionError for what is out of range.
    """

    clip_residual: float | None = option(
        None,
        "Also the bound of a run whose momentum had an error of this size, by clipping or by"
        " quantized averages: root mean square over rounds, in units of one gradient.",
        "clip",
    )
    residual_decay: float = option(
        0.0,
        "The residual is that of a running mean, r <- decay r + (1 - decay) s; 0: of s.",
        "clip",
    )
    phi: float | None = option(
        None,
        "Also the bound with this clip of the momentum, in units of a sum of gradients.",
        "clip",
    )
    gradient_bound: float | None = option(
        None,
        "M: the largest partial derivative of any worker's loss; default: sqrt(2 L Delta).",
        "clip",
    )

    def __post_init__(self) -> None:
        if self.residual_decay and self.clip_residual is None:
            raise OptionError("--residual-decay is that of --clip-residual, which is missing")
        for flag in ("clip_residual", "gradient_bound"):
            if (value := getattr(self, flag)) is not None:
                validation.at_least(f"--{flag.replace('_', '-')}", value, 0)
        if self.phi is not None:
            validation.above("--phi", self.phi, 0)
        if not 0 <= self.residual_decay < 1:
            raise OptionError(
                f"--residual-decay is {self.residual_decay:g}; it must be at least 0 and below 1"
            )

    @property
    def before(self) -> bool:
        """Whether something is asked of a clip before a run."""
        return self.phi is not None or self.gradient_bound is not None


SMALLEST, LARGEST = 1e-60, 1e60
"""The magnitudes of constants for which no term over- or underflows."""
_ABOVE_0 = ("smoothness", "inner_step", "outer_step")
_RANGES = (
    ("workers", 1, 10**60),
    ("rounds", 1, 10**60),
    ("local_steps", 1, 100_000),
    ("delay", 0, 1_000_000),
)
"""Whole numbers; `drift` takes as long as there are local steps."""
_MOST = 10**6
"""Numbers that the constants of fragments are sums of: a bound takes 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the bound is about: the fields say it, those of the command line in their help.

    Squared gradients are in units of f squared per x squared. A penalty that varies does so in
    [1, most_penalty], by a rule that knows only the points where rounds began. `delay` is how many
    rounds late an average is used: 1 is CO2, 0 is SlowMo, and 0 with outer_step 1 and momentum 0 is
    local SGD. With `late` averages are used some local steps late instead, without a restart, and
    `delay` does not count.

    Raises OptionError for what is out of range.
    """

    smoothness: float = option(
        MISSING, "L: Lipschitz constant of every worker's gradient.", "problem"
    )
    noise: float = option(MISSING, "Sigma squared: variance of one worker's gradient.", "problem")
    heterogeneity: float = option(0.0, "Zeta squared: mean of |grad f_i - grad f|^2.", "problem")
    gap: float = option(MISSING, "Delta: loss at the start minus its lowest value.", "problem")
    workers: int = option(MISSING, "G: workers whose models are averaged.", "run")
    rounds: int = option(MISSING, "T: rounds; each ends with an average.", "run")
    local_steps: int = option(MISSING, "Tau: steps between averages.", "run")
    inner_step: float = option(
        MISSING,
        "Gamma: learning rate of local steps; default: the one with the least bound.",
        "run",
    )
    outer_step: float = option(1.0, "Alpha: learning rate of the outer step.", "method")
    momentum: float = option(0.0, "Beta: outer momentum, in [0, 1).", "method")
    penalty: float = option(1.0, "Lambda: constant divisor of averages, 1 or more.", "method")
    most_penalty: float | None = option(None, "Largest Lambda, if it varies from 1 on.", "method")
    delay: int = 1
    late: Late | None = None
    convex: bool = option(
        False,  # noqa: FBT003
        "Every worker's function is convex.",
        "run",
    )

    def __post_init__(self) -> None:
        for name in _ABOVE_0:
            between(name, getattr(self, name), SMALLEST, LARGEST)
        for name in ("noise", "heterogeneity", "gap"):
            value = getattr(self, name)
            if value != 0 and not SMALLEST <= value <= LARGEST:
                raise OptionError(
                    f"{name} is {value:g}; it must be 0, or {SMALLEST:g} to {LARGEST:g}"
                )
        for name, least, most in _RANGES:
            whole(name, getattr(self, name), least, most)
        if not 0 <= self.momentum < 1:
            raise OptionError(f"momentum is {self.momentum:g}; it must be in [0, 1)")
        for name in ("penalty", "most_penalty"):
            value = getattr(self, name)
            if value is not None:
                between(name, value, 1, LARGEST)
        if self.most_penalty is not None and self.penalty != 1:
            raise OptionError("give penalty or most_penalty, not both")
        if self.late is not None:
            self._check_late(self.late)

    def _check_late(self, late: Late) -> None:
        if late.steps > self.local_steps:
            raise OptionError(
                f"delay is {late.steps} steps; it must be at most local_steps, {self.local_steps}"
            )
        check_predict(self.local_steps, late.steps, late.keep, late.predict)
        validation.whole("fragments", late.fragments, 1, self.local_steps)
        validation.whole("fragments times local_steps", late.fragments * self.local_steps, 1, _MOST)
        for name, value, least in (("predict", late.predict, 0), ("fragments", late.fragments, 1)):
            if value > least and self.most_penalty is not None:
                raise OptionError(
                    f"a varying penalty with {name} above {least} is not covered by the bound:"
                    f" {name} is {value:g}"
                )

    @property
    def virtual_step(self) -> float:
        """Eta = alpha gamma / ((1 - beta) Lambda): what an average moves the model in the end.

        What a late average predicts is averaged again, and divides it by 1 - p.
        """
        eta = self.outer_step * self.inner_step / ((1 - self.momentum) * self.penalty)
        return eta / (1 - self.late.carried(self.local_steps)) if self.late else eta


@dataclass(frozen=True, slots=True)
class Variants:
    """What may differ between runs side by side; every field is an array of the same length.

    `clip` is phi, the largest magnitude of an element of the momentum in units of gradients (so
    that tau steps of gradient 1 add tau), infinite for none. `noise` is sigma squared of a worker.
    With `most_penalty` above 0 the penalty is Lambda_t = 1 + |x_t - x_{t-1}| / max alpha |average
    used before|, at most that, in place of `penalty`. `keep` and `predict` are those of averages
    that are used some steps late (`Late`); no other run heeds them. `decay` is that of the running
    mean of what was clipped that is recorded besides. See `Setting` for the others.
    """

    inner_step: Array
    outer_step: Array
    momentum: Array
    penalty: Array
    clip: Array
    noise: Array
    keep: Array
    predict: Array
    decay: Array
    most_penalty: Array

    def __len__(self) -> int:
        return len(self.inner_step)


def variants(inner_step: Array | float, **others: Array | float) -> Variants:
    """Variants from numbers and arrays of one length, which are broadcast together.

    Those that are not among `others` do nothing: 0, or 1 for `_ONES`, and no clip.
    """
    values = {field.name: 0.0 for field in fields(Variants)} | dict.fromkeys(_ONES, 1.0)
    chosen = values | {"clip": np.inf, "inner_step": inner_step} | others
    parts = np.broadcast_arrays(*map(np.atleast_1d, chosen.values()))
    return Variants(*(np.array(part, dtype=float) for part in parts))


_ONES = ("outer_step", "penalty", "keep")


def variants_of(settings: Sequence[Setting], clip: Array | float = np.inf) -> Variants:
    """Settings that run side by side, for their own size and lateness; `clip` is phi."""
    lates = [setting.late or Late(steps=1) for setting in settings]
    names = ("inner_step", "outer_step", "momentum", "penalty", "noise")
    return variants(
        **{name: np.array([getattr(setting, name) for setting in settings]) for name in names},
        most_penalty=np.array([setting.most_penalty or 0.0 for setting in settings]),
        keep=np.array([late.keep for late in lates]),
        predict=np.array([late.predict for late in lates]),
        clip=clip,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """How much is run: `workers` is G, `rounds` T, `local_steps` tau, every seed its own run.

    `delay` is how many rounds late the average of a round is used: 1 or more is CO2, 0 is SlowMo.
    With `late_steps` it is used that many local steps late instead, without a restart. `fragments`
    are equal parts of the coordinates, which launch as those of `Late` do.
    """

    workers: int
    rounds: int
    local_steps: int
    seeds: int = 1
    delay: int = 1
    late_steps: int | None = None
    fragments: int = 1


def size_of(setting: Setting, seeds: int) -> RunSize:
    """How much a setting runs."""
    return RunSize(
        workers=setting.workers,
        rounds=setting.rounds,
        local_steps=setting.local_steps,
        seeds=seeds,
        delay=setting.delay,
        late_steps=setting.late.steps if setting.late else None,
        fragments=setting.late.fragments if setting.late else 1,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, per variant and seed: [C, S], or per variant: [C].

    `gradient` is A, the mean of |grad f(mean of workers)|^2 over all steps, before each step.
    `drift` is the mean squared distance of workers from their mean. In both means, steps before the
    arrival of a late average count `keep`, in each fragment for itself. `value` is f - f_inf at the
    last x. `spread` and `variance` are the largest means over seeds, of all steps, of the workers'
    disagreement and of the gradients' variance. `clipped` is the share of momentum elements that
    were clipped, `penalty` the largest that was used. `residual` is the mean over rounds of |what
    was clipped|^2, in units of a sum of gradients and with Lambda counted 1, of updates that moved
    a point that was visited; `running` that of its running mean. `final` is the last x, [C, S, d].
    """

    gradient: Array
    drift: Array
    value: Array
    spread: Array
    variance: Array
    clipped: Array
    penalty: Array
    residual: Array
    running: Array
    final: Array
