"""Local SGD: local steps, then a blocking average of the models."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.rule import Absorbed, State, Total


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGDRule:
    """x <- x - D, the mean of the workers' models.

    Averaging what moved equals averaging models in exact arithmetic and loses less in low
    precision. Source: Stich 2019, Local SGD converges fast and communicates little, ICLR 2019,
    arXiv 1805.09767.
    """

    staleness: int = 0
    pull: None = None
    clips: bool = False
    late: None = None

    def vectors(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def numbers(self) -> dict[str, float]:
        """None."""
        return {}

    def absorb(self, state: State, average: Tensor, norm: float, total: Total) -> Absorbed:
        """Nothing is under way, so the anchor may move at once."""
        del norm, total
        for anchor, mean in state.chunks(state.anchor, average):
            anchor.sub_(mean)
        return Absorbed()

    def move(self, state: State) -> None:
        """The anchor has moved."""


class LocalSGD(LocalUpdate):
    """Train with local SGD: `tau` steps of any optimizer, then the mean of all workers' models.

    With tau=1 and SGD (no momentum) this is data-parallel training. See LocalSGDRule for the
    source, LocalUpdate for the other options. Raises OptionError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        tau: int = 12,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, optimizer, LocalSGDRule(), tau=tau, **common)
