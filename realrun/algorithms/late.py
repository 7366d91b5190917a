"""Averages that are used while the next round runs: what is launched, and what a worker keeps.

A worker stands at anchor + offset + its local steps since the last average was used. The offset is
what it kept of its own then. Vectors are fp32; the model holds their rounded sum, so that a
displacement counts from the *rounded* start, as in `flat`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from co2sim.late_averages import MOST_FRAGMENTS, bounded, check_predict
from co2sim.ranges import between, whole
from realrun.checks import one_of

Delay: TypeAlias = int | Literal["auto"]
"""Local steps; "auto": as many as the first averages take."""

Parts: TypeAlias = Iterable[tuple[torch.dtype, slice]]
"""Slices of a vector, each of one dtype of the model and small enough for a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateAverages:
    """How an average is used `delay` local steps after its launch, while workers go on.

    The model is cut into `fragments`, which launch at evenly spread steps of a round. When D, the
    mean displacement of a fragment, arrives, its anchor takes the outer step, and then

    - keeps="launched": x <- anchor + keep (x - l) - predict (delay / tau) D, with l what the worker
      held at the launch. D points from the models to the anchor, so that - D is progress;
    - keeps="all": x <- anchor + keep (x - anchor), with the new anchor: a weighted mean of both.

    With `preview` a worker takes the outer step at once, at the launch, with its own displacement
    in place of the mean. Half of the difference goes when the mean comes, half with the next one.
    """

    delay: Delay
    keep: float = 1.0
    predict: float = 0.0
    fragments: int = 1
    keeps: Literal["launched", "all"] = "launched"
    preview: bool = False

    def check(self, tau: int) -> None:
        """Raise OptionError for options out of range, in rounds of `tau` steps."""
        if isinstance(self.delay, str):
            one_of("delay", self.delay, ("auto",))
        else:
            whole("delay", self.delay, 0 if self.keeps == "all" else 1, tau)
        between("keep", self.keep, 0, 1)
        between("predict", self.predict, 0, 1)
        whole("fragments", self.fragments, 1, min(tau, MOST_FRAGMENTS))
        check_predict(tau, self.delay, self.keep, self.predict)

    def predicted(self, delay: int, tau: int) -> float:
        """What is predicted for a delay: `predict`, or less where that was measured too long."""
        return bounded(tau, delay, self.keep, self.predict)


def depart(parts: Parts, anchor: Tensor, offset: Tensor, live: Tensor, moved: Tensor) -> None:
    """`moved` <- anchor - where the worker stands: rounded(anchor + offset) - live - offset.

    `live` is what the model holds. Exactly 0 where the offset is 0 and no step moved the model.
    """
    for dtype, at in parts:
        start = (anchor[at] + offset[at]).to(dtype)
        torch.sub(start, live[at], out=moved[at])
        moved[at].sub_(offset[at])


def stand(parts: Parts, anchor: Tensor, offset: Tensor, live: Tensor) -> None:
    """`offset` <- where the worker stands, minus the anchor, with what rounding took off."""
    for dtype, at in parts:
        start = (anchor[at] + offset[at]).to(dtype)
        offset[at].add_(live[at] - start)


def keep_since(
    late: LateAverages, delay: int, tau: int, launched: Tensor, live: Tensor, mean: Tensor
) -> None:
    """`launched` <- the offset: what is kept since the launch, and what is predicted for the rest.

    The average was used `delay` steps after it, in rounds of `tau`.
    """
    launched.neg_().add_(live).mul_(late.keep)
    if late.predict:
        launched.add_(mean, alpha=-late.predicted(delay, tau) * (delay / tau))
