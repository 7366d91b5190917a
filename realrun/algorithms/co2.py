"""CO2: local steps whose average is hidden behind the next round's."""

from dataclasses import dataclass
from typing import Any, Self, Unpack

from torch import nn

from co2sim.common.delayed_averaging import Delay, LateAverage
from co2sim.common.validation import whole
from realrun import errors
from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.pacing import Tau
from realrun.algorithms.rounds import tau_of
from realrun.algorithms.rules import MomentumRule
from realrun.errors import DEFAULT_GAP, Gap


@dataclass(frozen=True, slots=True)
class Clipping:
    """Elements of the outer momentum are clipped to [-limit, limit], in units of parameters.

    With a `residual_decay` in (0, 1) one more vector keeps a running mean of what is clipped, for
    `stats().running_residual`, whose bound is smaller where the clip takes off noise
    (docs/theory.md, any momentum error). Raises OptionError.
    """

    limit: float
    residual_decay: float = 0.0

    def __post_init__(self) -> None:
        errors.limit("clip", self.limit)
        errors.momentum("residual_decay", self.residual_decay)


class CO2(LocalUpdate):
    """Train with CO2: every worker takes `tau` local steps, and averages are hidden behind them.

    - `tau`: local steps of a round; "auto": the shortest round that hides an average of the model
      here, after five steps that are averaged as by LocalSGD (`stats().tau`).
    - `delay`: local steps after its launch an average is used, 1 to tau; "auto": as many as
      averages take here, measured again when they come late (`stats().delay`, `.late`, `.waited`).
      Or a LateAverage, which also says what workers keep, and in how many parts the model travels.
    - `outer_momentum`, `outer_lr`: m <- outer_momentum m + D, x <- x - outer_lr m, with D the mean
      of what workers moved away from x. By default x becomes the mean of the workers.
    - `clip`: elements of m are at most this large; a Clipping also measures what is taken off. With
      Adam a worker moves an element by about lr tau: 1 to 3 times that stops what runs away.

    The other options are those of every algorithm: see LocalUpdate. `CO2.published` is the method
    of the paper. How well each learns: docs/what-it-learns.md.

    Sources: Sun et al., ICLR 2024, arXiv 2401.16265; without a restart, DaSGD: Zhou et al. 2020,
    arXiv 2006.00441; delay=tau and LateAverage(keep=1), CoCoD-SGD: Shen et al. 2019, arXiv
    1906.12043. Raises OptionError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: Tau = "auto",
        delay: Delay | LateAverage = "auto",
        outer_momentum: float = 0.0,
        outer_lr: float = 1.0,
        clip: float | Clipping | None = None,
        **common: Unpack[Common],
    ) -> None:
        late = delay if isinstance(delay, LateAverage) else LateAverage(delay=delay)
        steps = tau_of(tau)
        if steps != "auto":
            late = late.of(steps)
        rule = MomentumRule(
            outer_momentum=outer_momentum, outer_lr=outer_lr, late=late, **_clipping(clip)
        )
        super().__init__(model, optimizer, rule, tau=steps, **common)

    @classmethod
    def published(
        cls,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: int = 12,
        staleness: int = 1,
        outer_momentum: float = 0.0,
        outer_lr: float = 0.5,
        gap: Gap = DEFAULT_GAP,
        penalty: float = 1.0,
        clip: float | Clipping | None = None,
        **common: Unpack[Common],
    ) -> Self:
        """CO2 as its paper has it: an average is used `staleness` rounds late, with a restart.

        At the end of round t: wait for the all-reduce launched `staleness` rounds ago, the mean D
        of x_{s,0} - x_{s,tau}; m <- outer_momentum m + D / Lambda_t, clipped to [-clip, clip];
        launch the all-reduce of this round's displacement; x_{t+1,0} <- x_{t,0} - outer_lr m. So
        the first `staleness` rounds end where they began. `staleness` 0 waits at once, and is
        SlowMo.

        The gain outer_lr / (1 - outer_momentum) is what a displacement moves the anchor in the end.
        An average that comes a round late is a delayed step, which is stable up to smaller steps
        only: on a small GPT (benchmarks/convergence.py) a gain of 1/2 was the best of those tried
        at tau 3 and 12, a gain of 2 always the worst. It learned less than CO2's default.

        `gap` and `penalty`: see MomentumRule; a penalty other than 1 needs gap="constant". Raises
        OptionError.
        """
        rule = MomentumRule(
            outer_momentum=outer_momentum,
            outer_lr=outer_lr,
            gap=gap,
            penalty=penalty,
            staleness=staleness,
            **_clipping(clip),
        )
        made = cls.__new__(cls)
        LocalUpdate.__init__(made, model, optimizer, rule, tau=whole("tau", tau, 1), **common)
        return made


def _clipping(clip: float | Clipping | None) -> dict[str, Any]:
    """The fields of the rule."""
    if clip is None:
        return {}
    clipping = clip if isinstance(clip, Clipping) else Clipping(limit=clip)
    return {"clip": clipping.limit, "residual_decay": clipping.residual_decay}
