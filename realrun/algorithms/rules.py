"""The outer step of an algorithm: what a rule keeps, and what it does with an average."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from co2sim.common.delayed_averaging import LateAverage
from co2sim.common.validation import whole
from realrun import errors
from realrun.errors import GAPS, Gap

_LATEST = 100
"""Rounds that an average may be late: each has a buffer. As in co2sim."""

Total: TypeAlias = Callable[[Sequence[float]], list[float]]
"""Sums numbers over the ranks that share one worker, so that norms are of the whole model."""


@dataclass(slots=True)
class State:
    """What a rule keeps between rounds, all of it in the units of parameters.

    `anchor` is x_{t,0}, the point that all workers start the round from. `chunk` is how many
    elements are worked on at once: the passes of a step then find them in the cache.
    """

    anchor: Tensor
    vectors: dict[str, Tensor]
    numbers: dict[str, float]
    chunk: int = 2**18

    def part(self, span: slice) -> "State":
        """The state of some elements; a view, but for the numbers, which are those of all."""
        vectors = {name: vector[..., span] for name, vector in self.vectors.items()}
        return State(self.anchor[span], vectors, self.numbers, self.chunk)

    def copy(self) -> "State":
        """Another one with the same numbers and elements."""
        vectors = {name: vector.clone() for name, vector in self.vectors.items()}
        return State(self.anchor.clone(), vectors, dict(self.numbers), self.chunk)

    def chunks(self, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The same elements of several vectors, chunk by chunk."""
        return zip(*(torch.split(vector, self.chunk) for vector in vectors), strict=True)

    def norm(self, vector: Tensor, total: Total) -> float:
        """Euclidean norm over the whole model; not finite if an element is not, or too large."""
        squares = [
            torch.linalg.vector_norm(part).double() ** 2 for part in torch.split(vector, self.chunk)
        ]
        here = float(torch.stack(squares).sum()) if squares else 0.0
        (square,) = total([here])
        return float(square**0.5)


class Clipped(NamedTuple):
    """What a clip did to momentum u: elements it changed, and the sum of squares of u - clip(u).

    `running` is that of a running mean of Lambda (u - clip(u)), 0 where none is kept. The squares
    are in squared units of parameters, as u is.
    """

    elements: int
    squares: float
    running: float = 0.0


NOT_CLIPPED = Clipped(0, 0.0)
"""Of rules without a clip."""


class Clip:
    """Clips vectors chunk by chunk to [-limit, limit], and sums up what it took off them.

    With a `decay` it moves running means, r <- decay r + (1 - decay) penalty (what it took off).
    """

    def __init__(self, limit: float | None, decay: float = 0.0, penalty: float = 1.0) -> None:
        """None: no clip."""
        self._limit, self._decay, self._penalty = limit, decay, penalty
        self._counts: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._running: list[Tensor] = []

    def __call__(self, vector: Tensor, mean: Tensor | None = None) -> None:
        """Clip in place; `mean` is the running mean of the same elements, where one is kept."""
        if self._limit is None:
            return
        taken = softshrink(vector, self._limit)  # what is beyond the limit, 0 within
        self._counts.append((taken != 0).sum())  # count_nonzero is slower on CPUs
        self._norms.append(torch.linalg.vector_norm(taken))
        if mean is not None:
            mean.mul_(self._decay).add_(taken, alpha=(1 - self._decay) * self._penalty)
            self._running.append(torch.linalg.vector_norm(mean))
        vector.clamp_(-self._limit, self._limit)

    def result(self) -> Clipped:
        """Over all that was clipped; on a GPU this waits for it, once."""
        if not self._counts:
            return NOT_CLIPPED
        kept = [norms for norms in (self._norms, self._running) if norms]
        squares = [torch.stack(norms).double().square().sum() for norms in kept]
        sums = torch.stack([torch.stack(self._counts).sum().double(), *squares]).tolist()
        return Clipped(int(sums[0]), *sums[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """One algorithm's outer step; this one keeps nothing, and weighs all averages alike.

    D is the average over workers of anchor - x after the local steps. `staleness` rounds pass
    between its launch and its use. `pull` is how far x goes towards the anchor, before the
    displacement of this round is taken; None where x is set to the anchor instead, afterwards.
    With `late` an average is used while the next round runs, and neither staleness nor pull count.
    The fields of a rule are what must be equal on all workers.
    """

    staleness: int = 0
    pull: float | None = None
    late: LateAverage | None = None

    @property
    def clips(self) -> bool:
        """Whether clipped elements are counted."""
        return False

    def vectors(self) -> dict[str, int]:
        """Names of the vectors it keeps, and how many rows each has (0: a plain vector)."""
        return {}

    def numbers(self) -> dict[str, float]:
        """Numbers that it keeps, as they are before round 0."""
        return {}

    def weigh(self, state: State, norm: float, total: Total) -> float:
        """The penalty that D gets, 1 for none. `norm` is its Euclidean norm over the whole model.

        It may read vectors, and change numbers only.
        """
        del state, norm, total
        return 1.0

    @abstractmethod
    def absorb(self, state: State, average: Tensor, penalty: float) -> Clipped:
        """Take D in; gives what was clipped.

        The anchor may only move here if x was launched from the new one (`pull`), or if nothing
        is under way (`staleness` 0); all others move it in `move`.
        """

    def move(self, state: State) -> None:  # noqa: B027 - most have moved it in `absorb`
        """Move the anchor, after the displacement of this round was taken from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumRule(Rule):
    """m <- beta m + D / Lambda, clipped to [-clip, clip]; then x <- x - alpha m.

    With `nesterov` x <- x - alpha (D + beta m), as torch.optim.SGD(nesterov=True) on D, neither
    clipped nor late by rounds. Without staleness, penalty and clip this is SlowMo's; with alpha 1
    and no momentum x becomes the mean of the workers' models.

    The published equation for the penalty Lambda is not available to us; it is a named choice:

    - "constant": Lambda = `penalty`, as in the authors' released code (1 there).
    - "gap_aware", ours: Lambda_t = 1 + |x_{t,0} - x_{t-k,0}| / max_{s<t-k} alpha |D_s|, with
      staleness k, Euclidean norms over the whole model; 1 where the maximum is over nothing, or
      0. For k = 1 it lies in [1, 1 + 1/(1-beta)]. Since x_{t,0} - x_{t-k,0} = -alpha (the sum of
      the last k momenta), alpha cancels.

    Source: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
    Overlap, ICLR 2024, arXiv 2401.16265.
    """

    outer_momentum: float = 0.0
    outer_lr: float = 1.0
    nesterov: bool = False
    gap: Gap = "constant"
    penalty: float = 1.0
    clip: float | None = None
    residual_decay: float = 0.0
    staleness: int = 1

    def __post_init__(self) -> None:
        errors.momentum("outer_momentum", self.outer_momentum)
        errors.limit("outer_lr", self.outer_lr)
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
        """For the gap: the largest |D| so far, and how many averages there were."""
        return {"largest": 0.0, "absorbed": 0.0} if self.gap == "gap_aware" else {}

    @property
    def _at_once(self) -> bool:
        """Whether an average moves the anchor at once, so that no vector holds it meanwhile.

        Those within a round do, where the next one needs nothing of them.
        """
        inside = self.late is not None or not self.staleness
        return inside and not self.outer_momentum and self.gap == "constant"

    @property
    def _remembers(self) -> bool:
        return self.gap == "gap_aware" and self.staleness > 1

    def absorb(self, state: State, average: Tensor, penalty: float) -> Clipped:
        """Momentum: m <- beta m + D / Lambda, clipped; without it, the anchor at once."""
        clip = Clip(self.clip, self.residual_decay, penalty)
        kept = [state.vectors["residual"]] if self.residual_decay else []
        if self._at_once:
            for anchor, mean, *running in state.chunks(state.anchor, average, *kept):
                m = mean * (1 / penalty)
                clip(m, *running)
                anchor.add_(m, alpha=-self.outer_lr)
            return clip.result()
        momentum = state.vectors["momentum"]
        if self._remembers:
            past = state.vectors["past"]
            past[int(state.numbers["absorbed"]) % len(past)].copy_(momentum)
            state.numbers["absorbed"] += 1
        for m, mean, *running in state.chunks(momentum, average, *kept):
            m.mul_(self.outer_momentum).add_(mean, alpha=1 / penalty)
            clip(m, *running)
        if self.nesterov:
            for anchor, m, mean in state.chunks(state.anchor, momentum, average):
                anchor.add_(mean, alpha=-self.outer_lr)
                anchor.add_(m, alpha=-self.outer_lr * self.outer_momentum)
        return clip.result()

    def move(self, state: State) -> None:
        """Anchor: x_{t+1,0} <- x_{t,0} - alpha m."""
        if self._at_once or self.nesterov:
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
