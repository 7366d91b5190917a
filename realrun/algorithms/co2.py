"""CO2: local steps whose average is hidden behind the next round's."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from co2sim.common.delayed_averaging import even_fragments, kept
from co2sim.common.errors import OptionError
from co2sim.common.validation import between, whole
from realrun import errors
from realrun.algorithms.delayed import Clip, Clipped, Delay, DelayedAveraging, State, Total
from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
from realrun.errors import DEFAULT_GAP, GAPS, Gap


@dataclass(frozen=True, slots=True, kw_only=True)
class CO2Rule:
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
    pull: None = None
    delay: Delay | None = None
    keep: float | None = None
    predict: float | None = None
    fragments: int = 1
    preview: bool = False
    tau: int = 1

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        errors.momentum("outer_momentum", self.outer_momentum)
        errors.step_size("outer_lr", self.outer_lr)
        errors.one_of("gap", self.gap, GAPS)
        errors.penalty("penalty", self.penalty, self.gap)
        object.__setattr__(self, "staleness", whole("staleness", self.staleness))
        if self.clip is not None:
            errors.limit("clip", self.clip)
        errors.momentum("residual_decay", self.residual_decay)
        if self.residual_decay and self.clip is None:
            raise OptionError("residual_decay is of what a clip takes off, and clip is not given")
        for name in ("keep", "predict"):
            if getattr(self, name) is not None:
                between(name, getattr(self, name), 0, 1)
        if self.delay is not None and self.staleness != 1:
            raise OptionError(
                f"staleness is {self.staleness}, but delay={self.delay} says when averages are used"
            )
        errors.flag("preview", self.preview)
        late = (self.keep, self.predict, self.fragments, self.preview)
        if self.delay is None and late != (None, None, 1, False):
            raise OptionError(
                "keep, predict, fragments and preview need delay: without it workers restart"
            )
        if self.fragments > 1 and self.gap == "gap_aware":
            raise OptionError("gap='gap_aware' needs norms of the whole model, not of fragments")
        if self.preview and self.gap == "gap_aware":
            raise OptionError(
                "gap='gap_aware' needs the norm of an average; preview steps before there is one"
            )

    @property
    def late(self) -> DelayedAveraging | None:
        """With a delay averages are used while the next round runs."""
        if self.delay is None:
            return None
        keep, predict = kept(self.tau, self.keep, self.predict)
        return DelayedAveraging(
            delay=self.delay,
            keep=keep,
            predict=predict,
            fragments=self.fragments,
            preview=self.preview,
        )

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
        return self.delay is not None and not self.outer_momentum and self.gap == "constant"

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


class CO2(LocalUpdate):
    """Train with CO2: every worker takes `tau` local steps, and averages overlap with them.

    At the end of round t: wait for the all-reduce launched `staleness` rounds ago, the mean D of
    x_{s,0} - x_{s,tau}; m <- outer_momentum m + D / Lambda_t, clipped to [-clip, clip]; launch
    the all-reduce of this round's displacement; x_{t+1,0} <- x_{t,0} - outer_lr m. So the first
    `staleness` rounds end where they began. `staleness` 0 waits at once, and is SlowMo.

    The gain outer_lr / (1 - outer_momentum) is what a displacement moves the anchor in the end. An
    average that comes a round late is a delayed step, which is stable up to smaller steps only. On
    a small GPT (benchmarks/convergence.py) the default gain of 1/2 was the best of those tried at
    tau 3 and 12, a gain of 2 always the worst.

    `delay`, ours: an average is used as soon as it may be there, `delay` local steps after its
    launch, 1 to tau, and workers do not start again. With l what a worker held at the launch, it
    continues from x <- anchor + keep (x - l) - predict (delay / tau) D: it keeps that share of what
    it has learned since, and `predict` replaces more of it by what all learned on average a moment
    ago; predict delay / tau must be below 1. By default all is kept in rounds below 8 steps, half
    of it in longer ones, and predict is 1 - keep. With keep=1 and a gain of 1, the default here,
    the mean of all workers moves exactly as in LocalSGD, and only their agreement is late.
    `fragments` cuts the model into parts, which launch at evenly spread steps of a round: each
    takes less time to arrive, so that its delay is shorter, and the network is used evenly. In
    rounds of 12 steps in 12 fragments keep=0.25, predict=1, outer_momentum=0.2, outer_lr=0.9
    learned best (docs/what-it-learns.md).

    `preview`: at a round's end a worker takes the outer step at once, with its own displacement in
    place of the mean. Half of the difference goes when the mean comes, the rest when the next one
    comes. With keep=1, predict=0 and no clip the mean of all workers then moves exactly as with the
    blocking outer step of this momentum and lr: momentum is not late either. With tau=1, delay=1,
    AdamW without momentum (betas=(0.0, 0.95)), outer_momentum=0.9, outer_lr=0.1 and a
    preview a text model learned almost as with DDP, with all averages hidden
    (docs/what-it-learns.md).

    delay="auto" uses the first averages when all ranks have them, and then takes the steps that the
    middle one of three took, at most tau (`stats().delay`; until then tau). There is one fragment
    for each step by default, up to 64. An average that takes longer is waited for (`stats().late`).
    keep=1 and gain 1 are DaSGD (Zhou et al. 2020, arXiv 2006.00441), with delay=tau CoCoD-SGD (Shen
    et al. 2019, arXiv 1906.12043).

    `gap` and `penalty`: see CO2Rule; a penalty other than 1 needs gap="constant".

    `clip` bounds elements of m, which are displacements in the units of parameters, not gradients.
    For SGD a displacement is about lr * tau * gradient; for Adam it is at most about lr * tau, its
    mean over workers mostly far less; m is up to 1 / (1 - outer_momentum) times as much. So choose
    it relative to lr * tau, and watch `stats().clipped`: with Adam, 1 to 3 times lr * tau stops
    what runs away, a quarter of it also outliers.

    `residual_decay`, in [0, 1): one more vector keeps a running mean of what is clipped, for
    `stats().running_residual`. The bound of it is smaller where the clip takes off noise
    (docs/theory.md, any momentum error). 0 keeps none.

    For all other options and what is kept, see LocalUpdate. Raises OptionError.
    """

    def __init__(  # noqa: PLR0913 - one argument per option
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: int = 12,
        outer_momentum: float = 0.0,
        outer_lr: float | None = None,
        gap: Gap | None = None,
        penalty: float = 1.0,
        clip: float | None = None,
        residual_decay: float = 0.0,
        staleness: int = 1,
        delay: Delay | None = None,
        keep: float | None = None,
        predict: float | None = None,
        fragments: int | None = None,
        preview: bool = False,
        **common: Unpack[Common],
    ) -> None:
        tau = whole("tau", tau, 1)
        rule = CO2Rule(
            outer_momentum=outer_momentum,
            outer_lr=(0.5 if delay is None else 1.0) if outer_lr is None else outer_lr,
            gap=(DEFAULT_GAP if delay is None else "constant") if gap is None else gap,
            penalty=penalty,
            clip=clip,
            residual_decay=residual_decay,
            staleness=staleness,
            delay=delay,
            keep=keep,
            predict=predict,
            fragments=(even_fragments(tau) if delay == "auto" else 1)
            if fragments is None
            else fragments,
            preview=preview,
            tau=tau,
        )
        if rule.late:
            rule.late.check(rule.tau)
        super().__init__(model, optimizer, rule, tau=tau, **common)
