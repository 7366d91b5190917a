"""What the bound is about: the constants of a problem and the sizes and steps of a run."""

from dataclasses import dataclass

from analysis.convergence.lateness import Late
from co2sim.common.errors import OptionError
from co2sim.common.validation import between, whole

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the bound is about. Squared gradients below are in units of f squared per x squared.

    `smoothness` is L: every worker's f_i has an L-Lipschitz gradient. `noise` is sigma squared:
    the variance of one worker's stochastic gradient, summed over coordinates. `heterogeneity` is
    zeta squared: the mean over workers of |grad f_i - grad f|^2 where the run comes by. `gap` is
    Delta = f(x_0) - inf f. `workers` is G, `rounds` T, `local_steps` tau, `inner_step` gamma,
    `outer_step` alpha, `momentum` beta in [0, 1), `penalty` Lambda >= 1. With `most_penalty` the
    penalty may vary in [1, most_penalty] instead, by a rule that knows only the points where rounds
    began. `delay` is how many rounds late an average is used: 1 is CO2, 0 is SlowMo, and 0 with
    outer_step 1 and momentum 0 is local SGD. With `late` averages are used some local steps late
    instead, without a restart, and `delay` does not count. `convex`: every f_i is convex.

    Raises OptionError for what is out of range.
    """

    smoothness: float
    noise: float
    heterogeneity: float = 0.0
    gap: float
    workers: int
    rounds: int
    local_steps: int
    inner_step: float
    outer_step: float = 1.0
    momentum: float = 0.0
    penalty: float = 1.0
    most_penalty: float | None = None
    delay: int = 1
    late: Late | None = None
    convex: bool = False

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
        if late.predict and self.most_penalty is not None:
            raise OptionError("a varying penalty with predict above 0 is not covered by the bound")

    @property
    def virtual_step(self) -> float:
        """Eta = alpha gamma / ((1 - beta) Lambda): what an average moves the model in the end.

        What a late average predicts is averaged again, and divides it by 1 - p.
        """
        eta = self.outer_step * self.inner_step / ((1 - self.momentum) * self.penalty)
        return eta / (1 - self.late.carried(self.local_steps)) if self.late else eta
