"""CO2: local steps whose average is hidden behind the next round's."""

from dataclasses import dataclass
from typing import Any, Self, Unpack

from torch import Tensor, nn

from co2sim.common.delayed_averaging import Delay, LateAverage
from co2sim.common.validation import whole
from realrun import errors
from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.pacing import Tau
from realrun.algorithms.rounds import tau_of
from realrun.algorithms.rules import Clip, Clipped, Rule, State, Total
from realrun.errors import DEFAULT_GAP, GAPS, Gap

_LATEST = 100
"""Rounds that an average may be late: each has a buffer. As in co2sim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CO2Rule(Rule):
    """m <- beta m + D / Lambda, clipped to [-clip, clip]; then x <- x - alpha m.

    The published equation for the penalty Lambda is not available to us; it is a named choice:

    - "constant": Lambda = `penalty`, as in the authors' released code (1 there).
    - "gap_aware", ours: Lambda_t = 1 + |x_{t,0} - x_{t-k,0}| / max_{s<t-k} alpha |D_s|, with
      staleness k, Euclidean norms over the whole model; 1 where the maximum is over nothing, or
      0. For k = 1 it lies in [1, 1 + 1/(1-beta)]. Since x_{t,0} - x_{t-k,0} = -alpha (the sum of
      the last k momenta), alpha cancels.

    Source: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
    Overlap, ICLR 2024, arXiv 2401.16265.
    """

    outer_momentum: float
    outer_lr: float
    gap: Gap = "constant"
    penalty: float = 1.0
    clip: float | None = None
    residual_decay: float = 0.0
    staleness: int = 1

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        errors.momentum("outer_momentum", self.outer_momentum)
        errors.step_size("outer_lr", self.outer_lr)
        errors.one_of("gap", self.gap, GAPS)
        errors.penalty("penalty", self.penalty, self.gap)
        object.__setattr__(self, "staleness", whole("staleness", self.staleness, 0, _LATEST))

    @property
    def clips(self) -> bool:
        """Whether elements are counted."""
        return self.clip is not None

    def vectors(self) -> dict[str, int]:
        """The momentum; for the gap over k > 1 rounds also the k - 1 before it.

        And the running mean of what is clipped, if that is asked for.
        """
        clipped = {"residual": 0} if self.residual_decay else {}
        if self._at_once:
            return clipped
        past = {"past": self.staleness - 1} if self._remembers else {}
        return {"momentum": 0, **past, **clipped}

    def numbers(self) -> dict[str, float]:
        """The largest |D| so far, and how many averages there were."""
        return {"largest": 0.0, "absorbed": 0.0}

    @property
    def _at_once(self) -> bool:
        """Whether an average moves the anchor at once, so that no vector holds it meanwhile.

        Late averages do, where the next one needs nothing of them.
        """
        return self.late is not None and not self.outer_momentum and self.gap == "constant"

    @property
    def _remembers(self) -> bool:
        return self.gap == "gap_aware" and self.staleness > 1

    def absorb(self, state: State, average: Tensor, penalty: float) -> Clipped:
        """Momentum: m <- beta m + D / Lambda, clipped."""
        if self._at_once:
            return self._absorb_at_once(state, average, penalty)
        momentum, clip = state.vectors["momentum"], self._clip(penalty)
        if self._remembers:
            past = state.vectors["past"]
            past[int(state.numbers["absorbed"]) % len(past)].copy_(momentum)
        state.numbers["absorbed"] += 1
        for m, mean, *running in state.chunks(momentum, average, *self._running(state)):
            m.mul_(self.outer_momentum).add_(mean, alpha=1 / penalty)
            clip(m, *running)
        return clip.result()

    def _clip(self, penalty: float) -> Clip:
        return Clip(self.clip, self.residual_decay, penalty)

    def _running(self, state: State) -> list[Tensor]:
        """The running mean of what is clipped, if it is kept."""
        return [state.vectors["residual"]] if self.residual_decay else []

    def _absorb_at_once(self, state: State, average: Tensor, penalty: float) -> Clipped:
        """Anchor: x_{t+1,0} <- x_{t,0} - alpha D / Lambda, clipped."""
        clip = self._clip(penalty)
        for anchor, mean, *running in state.chunks(state.anchor, average, *self._running(state)):
            m = mean * (1 / penalty)
            clip(m, *running)
            anchor.add_(m, alpha=-self.outer_lr)
        return clip.result()

    def move(self, state: State) -> None:
        """Anchor: x_{t+1,0} <- x_{t,0} - alpha m."""
        if self._at_once:
            return
        for anchor, m in state.chunks(state.anchor, state.vectors["momentum"]):
            anchor.add_(m, alpha=-self.outer_lr)

    def weigh(self, state: State, norm: float, total: Total) -> float:
        """Lambda_t, from points that were known before this average."""
        if self.gap == "constant":
            return self.penalty
        largest = state.numbers["largest"]
        state.numbers["largest"] = max(largest, norm)
        if largest == 0.0 or self.staleness == 0:
            return 1.0
        moved = state.vectors["momentum"]
        if self._remembers:
            moved = moved + state.vectors["past"].sum(0)
        return 1.0 + state.norm(moved, total) / largest


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
        """Refuse numbers out of range."""
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
        rule = CO2Rule(
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

        `gap` and `penalty`: see CO2Rule; a penalty other than 1 needs gap="constant". Raises
        OptionError.
        """
        rule = CO2Rule(
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
