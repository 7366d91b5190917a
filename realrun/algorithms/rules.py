"""The outer step of an algorithm: what a rule keeps, and what it does with an average."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from co2sim.common.delayed_averaging import LateAverage
from realrun import errors

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
    """An outer step with momentum whose average is waited for: m <- outer_momentum m + D."""

    outer_momentum: float
    outer_lr: float

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        errors.momentum("outer_momentum", self.outer_momentum)
        errors.step_size("outer_lr", self.outer_lr)

    def vectors(self) -> dict[str, int]:
        """The momentum."""
        return {"momentum": 0}

    def absorb(self, state: State, average: Tensor, penalty: float) -> Clipped:
        """Both updates at once: no average is in flight."""
        del penalty
        vectors = (state.vectors["momentum"], average, state.anchor)
        for m, mean, anchor in state.chunks(*vectors):
            m.mul_(self.outer_momentum).add_(mean)
            self.step(anchor, m, mean)
        return NOT_CLIPPED

    @abstractmethod
    def step(self, anchor: Tensor, m: Tensor, mean: Tensor) -> None:
        """Move the anchor, in place, by the new momentum and the average."""
