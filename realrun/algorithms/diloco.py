"""DiLoCo: AdamW inside, Nesterov momentum on the averaged pseudo-gradient outside."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.rule import MomentumRule


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoRule(MomentumRule):
    """m <- beta m + D; x <- x - alpha (D + beta m), as torch.optim.SGD(nesterov=True) on D.

    Source: Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1.
    """

    def step(self, anchor: Tensor, m: Tensor, mean: Tensor) -> None:
        """The anchor's step."""
        anchor.add_(mean, alpha=-self.outer_lr).add_(m, alpha=-self.outer_lr * self.outer_momentum)


class DiLoCo(LocalUpdate):
    """Train with DiLoCo: `tau` local steps, then wait for the average D of x_{t,0} - x_{t,tau}.

    D is the gradient of an SGD with Nesterov momentum that moves the common point. The inner
    optimizer is yours (AdamW in the paper, with tau 500). See DiLoCoRule for the source,
    LocalUpdate for the other options. Raises OptionError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        tau: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **common: Unpack[Common],
    ) -> None:
        rule = DiLoCoRule(outer_momentum=outer_momentum, outer_lr=outer_lr)
        super().__init__(model, optimizer, rule, tau=tau, **common)
