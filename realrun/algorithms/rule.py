"""What an algorithm does with an average: pure functions over flat vectors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from realrun import checks
from realrun.algorithms.late import LateAverages

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


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What became of an average: the penalty that it got, and how many elements were clipped."""

    penalty: float = 1.0
    clipped: int = 0


class Rule(Protocol):
    """One algorithm's outer step.

    D is the average over workers of anchor - x after the local steps. `staleness` rounds pass
    between its launch and its use. `pull` is how far x goes towards the anchor, before the
    displacement of this round is taken; None where x is set to the anchor instead, afterwards.
    With `late` an average is used while the next round runs, and neither staleness nor pull count.
    A rule is a frozen dataclass, and its fields are what must be equal on all workers.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def staleness(self) -> int: ...  # noqa: D102
    @property
    def pull(self) -> float | None: ...  # noqa: D102
    @property
    def clips(self) -> bool: ...  # noqa: D102
    @property
    def late(self) -> LateAverages | None: ...  # noqa: D102

    def vectors(self) -> dict[str, int]:
        """Names of the vectors it keeps, and how many rows each has (0: a plain vector)."""

    def numbers(self) -> dict[str, float]:
        """Numbers that it keeps, as they are before round 0."""

    def absorb(self, state: State, average: Tensor, norm: float, total: Total) -> Absorbed:
        """Take D in. `norm` is its Euclidean norm over the whole model.

        The anchor may only move here if x was launched from the new one (`pull`), or if nothing
        is under way (`staleness` 0); all others move it in `move`.
        """

    def move(self, state: State) -> None:
        """Move the anchor, after the displacement of this round was taken from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumRule(ABC):
    """An outer step with momentum whose average is waited for: m <- outer_momentum m + D."""

    outer_momentum: float
    outer_lr: float
    staleness: int = 0
    pull: None = None
    clips: bool = False
    late: LateAverages | None = None

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
        """Both updates at once: no average is in flight."""
        del norm, total
        vectors = (state.vectors["momentum"], average, state.anchor)
        for m, mean, anchor in state.chunks(*vectors):
            m.mul_(self.outer_momentum).add_(mean)
            self.step(anchor, m, mean)
        return Absorbed()

    @abstractmethod
    def step(self, anchor: Tensor, m: Tensor, mean: Tensor) -> None:
        """Move the anchor, in place, by the new momentum and the average."""

    def move(self, state: State) -> None:  # noqa: B027 - `step` has moved it
        """The anchor has moved."""
