"""Averages that are used while the next round runs: what is launched, and what a worker keeps.

A worker stands at anchor + offset + its local steps since the last average was used. The offset is
what it kept of its progress then. Vectors are fp32; the model holds their rounded sum, so that a
displacement counts from the *rounded* start, as in `flat_parameters`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from co2sim.common.delayed_averaging import LateAverage
from co2sim.common.units import Seconds
from realrun import errors

Parts: TypeAlias = Iterable[tuple[torch.dtype, slice]]
"""Slices of a vector, each of one dtype of the model and small enough for a cache."""


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


def local_progress_since(
    launched: Tensor, live: Tensor, mean: Tensor, *, keep: float, predict: float
) -> None:
    """`launched` <- the offset: the share that is kept of the progress since the launch, and more.

    `predict` is the share of the mean displacement that stands for the rest.
    """
    launched.neg_().add_(live).mul_(keep)
    if predict:
        launched.add_(mean, alpha=-predict)


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
        found = torch.stack([torch.stack(self._counts).sum().double(), *squares]).tolist()
        return Clipped(int(found[0]), *found[1:])


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
    def late(self) -> LateAverage | None: ...  # noqa: D102

    def vectors(self) -> dict[str, int]:
        """Names of the vectors it keeps, and how many rows each has (0: a plain vector)."""

    def numbers(self) -> dict[str, float]:
        """Numbers that it keeps, as they are before round 0."""

    def weigh(self, state: State, norm: float, total: Total) -> float:
        """The penalty that D gets, 1 for none. `norm` is its Euclidean norm over the whole model.

        It may read vectors, and change numbers only.
        """

    def absorb(self, state: State, average: Tensor, penalty: float) -> Clipped:
        """Take D in; gives what was clipped.

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
    late: LateAverage | None = None

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        errors.momentum("outer_momentum", self.outer_momentum)
        errors.step_size("outer_lr", self.outer_lr)

    def vectors(self) -> dict[str, int]:
        """The momentum."""
        return {"momentum": 0}

    def numbers(self) -> dict[str, float]:
        """None."""
        return {}

    def weigh(self, state: State, norm: float, total: Total) -> float:
        """No penalty."""
        del state, norm, total
        return 1.0

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

    def move(self, state: State) -> None:  # noqa: B027 - `step` has moved it
        """The anchor has moved."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What an algorithm has done so far, on this rank.

    `late` counts averages that were not there when they were to be used, `waited` the seconds in
    which training stood still for those that were due, not those that an evaluation or a checkpoint
    waited for. `seconds` are those of all rounds, `waiting_share` is the part of them that was
    waited. `bytes_sent` are the bytes that this rank sent to other workers for averages.
    `tau` is how many local steps a round has, None until that is chosen. `delay` is how many local
    steps after its launch an average is used, None where that is at the end of a round.
    `penalty` is the last Lambda_t, 1 before the first average was used. `clipped` is the share of
    elements of the momentum that were clipped, over all averages used and the whole model.

    Sums over all averages used and the whole model say how far the outer momentum was from the
    exact one, in squared units of parameters. `clip_residual` is that of |Lambda (u - clip(u))|^2
    for u = beta m + D / Lambda, and `running_residual` that of the running mean of the same, where
    CO2's `residual_decay` keeps one. `rounding_residual` is one of upper bounds of |D - D'|^2, with
    the mean D' of int8 or int4 in the place of D; the rounding of bf16 is not measured. With T
    rounds of tau local steps of size gamma (plain SGD, fp32 parameters),
    eps <= (sqrt(clip_residual) + sqrt(rounding_residual)) / (gamma tau sqrt(T))
    in units of one gradient is what `co2analysis bound --clip-residual` takes (docs/theory.md).
    """

    rounds: int
    steps: int
    penalty: float
    clipped: float
    clip_residual: float
    rounding_residual: float
    waited: Seconds
    bytes_sent: int
    late: int = 0
    delay: int | None = None
    running_residual: float = 0.0
    tau: int | None = None
    seconds: Seconds = 0.0

    @property
    def waiting_share(self) -> float:
        """Of the time of all rounds, 0 to 1: how much of it training stood still for averages."""
        return min(1.0, self.waited / self.seconds) if self.seconds else 0.0


@dataclass(slots=True)
class Counters:
    """Rounds, steps of the round that has begun, averages used, and what became of them.

    `clipped` counts elements of the whole model over all averages used, `missing` the steps that
    rounds had less than `tau`, where `finish` ended them, or tau was chosen. `tau` is 0 until it is
    chosen. For the residuals see Stats.
    """

    round: int = 0
    step: int = 0
    used: float = 0.0
    penalty: float = 1.0
    clipped: float = 0.0
    clip_residual: float = 0.0
    running_residual: float = 0.0
    rounding_residual: float = 0.0
    waited: Seconds = 0.0
    late: int = 0
    delay: int | None = None
    missing: int = 0
    tau: int = 0
    seconds: Seconds = 0.0

    def stats(self, steps: int, elements: float, sent: int) -> Stats:
        """For users, after `steps` local steps; `elements` are those of the whole model."""
        considered = self.used * elements
        return Stats(
            rounds=self.round,
            steps=steps,
            penalty=self.penalty,
            clipped=self.clipped / considered if considered else 0.0,
            clip_residual=self.clip_residual,
            rounding_residual=self.rounding_residual,
            waited=self.waited,
            bytes_sent=sent,
            late=self.late,
            delay=self.delay,
            running_residual=self.running_residual,
            tau=self.tau or None,
            seconds=self.seconds,
        )
