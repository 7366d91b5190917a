"""SlowMo: local steps, a blocking average, and momentum on what it moved."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from realrun import checks
from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.rule import Absorbed, State, Total


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMoRule:
    """m <- beta m + D; x <- x - alpha m.

    D is in the units of parameters. The paper divides it by the learning rate and multiplies the
    step by it again, which is the same while the rate is constant within a round and from round
    to round.
    Source: Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643, algorithm 1.
    """

    outer_momentum: float
    outer_lr: float
    staleness: int = 0
    pull: None = None
    clips: bool = False

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        checks.momentum("outer_momentum", self.outer_momentum)
        checks.step_size("outer_lr", self.outer_lr)

    def vectors(self) -> dict[str, int]:
        """The momentum."""
        return {"momentum": 0}

    def numbers(self) -> dict[str, float]:
        """None."""
        return {}

    def absorb(self, state: State, average: Tensor, norm: float, total: Total) -> Absorbed:
        """Both updates in one go: nothing is under way."""
        del norm, total
        vectors = (state.vectors["momentum"], average, state.anchor)
        for m, mean, anchor in state.chunks(*vectors):
            m.mul_(self.outer_momentum).add_(mean)
            anchor.add_(m, alpha=-self.outer_lr)
        return Absorbed()

    def move(self, state: State) -> None:
        """The anchor has moved."""


class SlowMo(LocalUpdate):
    """Train with SlowMo: `tau` local steps, then wait for the average D of x_{t,0} - x_{t,tau}.

    m <- outer_momentum m + D; x_{t+1,0} <- x_{t,0} - outer_lr m. See SlowMoRule for the source,
    LocalUpdate for the other options. Raises OptionError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        tau: int = 12,
        outer_momentum: float = 0.5,
        outer_lr: float = 1.0,
        **common: Unpack[Common],
    ) -> None:
        rule = SlowMoRule(outer_momentum=outer_momentum, outer_lr=outer_lr)
        super().__init__(model, optimizer, rule, tau=tau, **common)
