"""Overlap-Local-SGD: models are pulled to an anchor whose average arrives one round late."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from realrun import checks
from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.rule import Absorbed, State, Total


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLocalSGDRule:
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
    clips: bool = False
    late: None = None

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        checks.pull("pull", self.pull)
        checks.momentum("anchor_momentum", self.anchor_momentum)

    def vectors(self) -> dict[str, int]:
        """The anchor's momentum."""
        return {"momentum": 0}

    def numbers(self) -> dict[str, float]:
        """None."""
        return {}

    def absorb(self, state: State, average: Tensor, norm: float, total: Total) -> Absorbed:
        """Anchor: v <- b v - D; z <- z + v."""
        del norm, total
        vectors = (state.vectors["momentum"], average, state.anchor)
        for v, mean, anchor in state.chunks(*vectors):
            v.mul_(self.anchor_momentum).sub_(mean)
            anchor.add_(v)
        return Absorbed()

    def move(self, state: State) -> None:
        """The anchor has moved."""


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
