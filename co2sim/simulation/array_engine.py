"""All ranks at once, op by op in the order of issue, where none has to share.

The end of an op follows from when it starts, unless compute slows down beside communication, or
collectives meet on links. Where neither happens all ends are the longest paths through the
schedule, taken here for all classes of ranks in one array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from co2sim.schedule.schedule import Collective, Group
from co2sim.simulation.lowering import Communicator, Lowered, Times

_Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class _Chain:
    """Computes of one stream that follow each other; only the first may have waits.

    `places` are those of the ops in the body, `seconds` is [op, class].
    """

    places: NDArray[np.intp]
    stream: str
    offsets: tuple[int, ...]
    seconds: _Array


@dataclass(frozen=True, eq=False, slots=True)
class _Meeting:
    """A collective of all communicators of its group."""

    place: int
    stream: str
    offsets: tuple[int, ...]
    group: Group
    latency: _Array
    solo: _Array


@dataclass(frozen=True, eq=False, slots=True)
class _Members:
    """Classes by communicator: `order` lists them, `cuts` says where each communicator begins.

    `place` is the place of each class's communicator, `factors` is jitter, [instance, place].
    """

    order: NDArray[np.intp]
    cuts: NDArray[np.intp]
    place: NDArray[np.intp]
    factors: _Array | None


def applies(lowered: Lowered, sharing: set[int]) -> bool:
    """Whether nothing is shared; `sharing` are the works that may be."""
    return not (sharing or lowered.slows)


def run(lowered: Lowered, progress: Callable[[float], None] | None = None) -> Times:
    """Starts and ends of all rounds, where this `applies`."""
    return _Run(lowered).times(progress)


class _Run:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered, self.steps = lowered, _steps(lowered)
        self.size = len(lowered.schedule.body)
        shape = (lowered.rounds * self.size, len(lowered.classes))
        self.starts, self.ends = np.zeros(shape), np.zeros(shape)
        self.free = {stream: np.zeros(shape[1]) for stream in lowered.schedule.streams}
        self.factors = np.stack(lowered.class_factors, axis=1) if lowered.class_factors else None
        self.members = {
            group: _members(together, lowered.place[group], lowered.communicator_factors)
            for group, together in lowered.communicators.items()
        }

    def times(self, progress: Callable[[float], None] | None) -> Times:
        lowered, steps = self.lowered, self.steps
        for turn in range(lowered.rounds):
            with np.errstate(divide="ignore"):  # the rate of what takes no time
                for step in steps:
                    if isinstance(step, _Chain):
                        self._compute(step, turn * self.size)
                    else:
                        self._meet(step, turn * self.size + step.place)
            if progress:
                progress((turn + 1) / lowered.rounds)
        return self.starts, self.ends

    def _ready(self, step: _Chain | _Meeting, number: int) -> _Array:
        """When an instance can start on each class."""
        ready = self.free[step.stream]
        for offset in step.offsets:
            if offset <= number:
                ready = np.maximum(ready, self.ends[number - offset])
        return ready

    def _compute(self, chain: _Chain, base: int) -> None:
        numbers = base + chain.places
        times = np.empty((len(numbers) + 1, len(self.lowered.classes)))
        times[0] = self._ready(chain, int(numbers[0]))
        times[1:] = chain.seconds
        if self.factors is not None:
            times[1:] *= self.factors[numbers]
        np.add.accumulate(times, axis=0, out=times)
        self.starts[numbers], self.ends[numbers] = times[:-1], times[1:]
        self.free[chain.stream] = times[-1]

    def _meet(self, step: _Meeting, number: int) -> None:
        members = self.members[step.group]
        ready = self._ready(step, number)
        self.starts[number] = ready
        come = np.maximum.reduceat(ready[members.order], members.cuts)
        latency, solo = step.latency, step.solo
        if members.factors is not None:
            factors = members.factors[number]
            latency, solo = latency * factors, solo * factors
        ends = come + latency + 1.0 / (1.0 / solo)  # as the network: by the rate of a flow
        self.free[step.stream] = self.ends[number] = ends[members.place]


def _members(
    together: tuple[Communicator, ...],
    place: Sequence[int],
    factors: Sequence[_Array] | None,
) -> _Members:
    lengths = [len(one.members) for one in together]
    jitter = np.stack([factors[one.number] for one in together], axis=1) if factors else None
    return _Members(
        np.array([index for one in together for index in one.members]),
        np.cumsum([0, *lengths[:-1]]),
        np.array(place),
        jitter,
    )


def _steps(lowered: Lowered) -> list[_Chain | _Meeting]:
    """The body: runs of computes in one stream in one piece, and collectives."""
    schedule = lowered.schedule
    slowdowns = np.array([c.slowdown for c in lowered.classes])
    chains: dict[str, list[int]] = {}
    found: list[list[int] | _Meeting] = []
    costs: dict[int, tuple[_Array, _Array]] = {}
    for place, (op, number) in enumerate(zip(schedule.body, schedule.work_numbers, strict=True)):
        if isinstance(op.work, Collective):
            chains.pop(op.stream, None)
            if number not in costs:
                transfers = lowered.transfers[place]
                latency = np.array([transfer.latency for transfer in transfers])
                costs[number] = latency, np.array([transfer.solo for transfer in transfers])
            offsets = schedule.offsets[place]
            meeting = _Meeting(place, op.stream, offsets, op.work.group, *costs[number])
            found.append(meeting)
        elif op.stream in chains and not schedule.offsets[place]:
            chains[op.stream].append(place)
        else:
            chains[op.stream] = [place]
            found.append(chains[op.stream])
    seconds = np.array(lowered.seconds)
    return [
        each
        if isinstance(each, _Meeting)
        else _Chain(
            np.array(each),
            schedule.body[each[0]].stream,
            schedule.offsets[each[0]],
            seconds[each][:, None] * slowdowns,
        )
        for each in found
    ]
