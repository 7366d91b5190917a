"""SlowMo: local steps, a blocking average, and momentum on what it moved."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.rule import MomentumRule


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMoRule(MomentumRule):
    """m <- beta m + D; x <- x - alpha m.

    D is in the units of parameters. The paper divides it by the learning rate and multiplies the
    step by it again, which is the same while the rate is constant within a round and from round
    to round.
    Source: Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643, algorithm 1.
    """

    def step(self, anchor: Tensor, m: Tensor, mean: Tensor) -> None:
        """The anchor's step."""
        del mean
        anchor.add_(m, alpha=-self.outer_lr)


class SlowMo(LocalUpdate):
    """Train with SlowMo: `tau` local steps, then wait for the average D of x_{t,0} - x_{t,tau}.

    m <- outer_momentum m + D; x_{t+1,0} <- x_{t,0} - outer_lr m. See SlowMoRule for the source,
    LocalUpdate for the other options. Raises OptionError.
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
        rule = SlowMoRule(outer_momentum=outer_momentum, outer_lr=outer_lr)
        super().__init__(model, optimizer, rule, tau=tau, **common)
