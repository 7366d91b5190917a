"""DiLoCo: AdamW inside, Nesterov momentum on averaged pseudo-gradients outside; streamed, too."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from co2sim.errors import OptionError
from co2sim.ranges import whole
from realrun.algorithms.late import Delay, LateAverages
from realrun.algorithms.local_update import Common, LocalUpdate
from realrun.algorithms.optimizers import Optimizers
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
            late = LateAverages(delay=delay, keep=kept, fragments=fragments, keeps="all")
            late.check(whole("tau", tau, 1))
        elif keep is not None:
            raise OptionError(f"keep={keep} needs fragments or a delay: DiLoCo restarts workers")
        rule = DiLoCoRule(outer_momentum=outer_momentum, outer_lr=outer_lr, late=late)
        super().__init__(model, optimizer, rule, tau=tau, **common)
