"""Local SGD, and what others have made of its outer step: SlowMo, DiLoCo, Overlap-Local-SGD.

Averages are waited for at the end of a round, but for Overlap-Local-SGD, which uses them a round
later, and streaming DiLoCo, some steps later. CO2 has its own module.
"""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from co2sim.common.delayed_averaging import Delay, LateAverage
from co2sim.common.errors import OptionError
from co2sim.common.validation import whole
from realrun import errors
from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.rules import NOT_CLIPPED, Clipped, MomentumRule, Rule, State


class LocalSGD(LocalUpdate):
    """Train with local SGD: `tau` steps of any optimizer, then the mean of all workers' models.

    With tau=1 and SGD (no momentum) this is data-parallel training. What moved is averaged, which
    in exact arithmetic equals the mean of models and loses less in low precision. See LocalUpdate
    for the other options. Raises OptionError. Source: Stich 2019, Local SGD converges fast and
    communicates little, ICLR 2019, arXiv 1805.09767.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: int = 12,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, optimizer, MomentumRule(staleness=0), tau=tau, **common)


class SlowMo(LocalUpdate):
    """Train with SlowMo: `tau` local steps, then wait for the average D of x_{t,0} - x_{t,tau}.

    m <- outer_momentum m + D; x_{t+1,0} <- x_{t,0} - outer_lr m. D is in the units of parameters.
    The paper divides it by the learning rate and multiplies the step by it again, which is the same
    while the rate is constant within a round and from round to round. See LocalUpdate for the other
    options. Raises OptionError. Source: Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643,
    algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: int = 12,
        outer_momentum: float = 0.5,
        outer_lr: float = 1.0,
        **common: Unpack[Common],
    ) -> None:
        rule = MomentumRule(outer_momentum=outer_momentum, outer_lr=outer_lr, staleness=0)
        super().__init__(model, optimizer, rule, tau=tau, **common)


class DiLoCo(LocalUpdate):
    """Train with DiLoCo: `tau` local steps, then wait for the average D of x_{t,0} - x_{t,tau}.

    D is the gradient of an SGD with Nesterov momentum that moves the common point. The inner
    optimizer is yours (AdamW in the paper, with tau 500). See LocalUpdate for the other options.
    Raises OptionError. Source: Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1.

    Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): the model is cut into `fragments`,
    parts of its parameters in their order. Each is averaged once a round, at evenly spread steps.
    `delay` local steps after its launch the average of anchor - x moves the anchor of the fragment,
    and every worker takes the mixture x <- keep x + (1 - keep) anchor; so `keep` is their alpha,
    1/2 by default as there. A delay of 0 waits at once, and keep is 0 then by default; "auto" takes
    as many steps as the first averages need (see CO2). dtype "int4" is theirs; their 4-bit numbers
    are floats, ours are integers with one scale for 2048 elements. In the paper fragments are
    layers, strided; here they are equal shares of the elements.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: Delay = 0,
        keep: float | None = None,
        **common: Unpack[Common],
    ) -> None:
        late = None
        if fragments != 1 or delay != 0:
            kept = (0.0 if delay == 0 else 0.5) if keep is None else keep
            late = LateAverage(
                delay=delay, keep=kept, predict=0.0, fragments=fragments, keeps="all"
            )
            late.of(whole("tau", tau, 1))
        elif keep is not None:
            raise OptionError(f"keep={keep} needs fragments or a delay: DiLoCo restarts workers")
        rule = MomentumRule(
            outer_momentum=outer_momentum,
            outer_lr=outer_lr,
            nesterov=True,
            staleness=0,
            late=late,
        )
        super().__init__(model, optimizer, rule, tau=tau, **common)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLocalSGDRule(Rule):
    """The end of round t, with anchor z_0 = x_0 and v = 0.

    1. from round 1 on, wait for X_{t-1}, the mean of the models pulled in round t-1;
       v <- b v + X_{t-1} - z_{t-1}; z_t <- z_{t-1} + v. In round 0 the anchor stays;
    2. every worker: x <- (1 - pull) x + pull z_t;
    3. launch the average of these x, which gives X_t.

    With b = 0 the anchor is the mean of one round ago. With pull = 1 nothing would ever move: what
    is averaged would be the anchor. What travels is z_t - x, whose mean D is z_t - X_t. Source:
    Wang, Liang, Joshi 2020, Overlap Local-SGD, arXiv 2002.09539 (its anchor with momentum); when
    the first average is used is our reading.
    """

    pull: float
    anchor_momentum: float
    staleness: int = 1

    def __post_init__(self) -> None:
        errors.pull("pull", self.pull)
        errors.momentum("anchor_momentum", self.anchor_momentum)

    def vectors(self) -> dict[str, int]:
        """The anchor's momentum."""
        return {"momentum": 0}

    def absorb(self, state: State, average: Tensor, penalty: float) -> Clipped:
        """Anchor: v <- b v - D; z <- z + v."""
        del penalty
        vectors = (state.vectors["momentum"], average, state.anchor)
        for v, mean, anchor in state.chunks(*vectors):
            v.mul_(self.anchor_momentum).sub_(mean)
            anchor.add_(v)
        return NOT_CLIPPED


class OverlapLocalSGD(LocalUpdate):
    """Train with Overlap-Local-SGD: `tau` local steps, then a pull to the anchor of a round ago.

    Workers never hold the same model; the anchor is what to evaluate (`consensus`). See
    OverlapLocalSGDRule for equations and source, LocalUpdate for the other options. Raises
    OptionError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: int = 12,
        pull: float = 0.6,
        anchor_momentum: float = 0.7,
        **common: Unpack[Common],
    ) -> None:
        rule = OverlapLocalSGDRule(pull=pull, anchor_momentum=anchor_momentum)
        super().__init__(model, optimizer, rule, tau=tau, **common)
