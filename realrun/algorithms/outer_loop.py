"""The outer loop of local updates: what a rank keeps between rounds, and the averages under way."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from co2sim.common.units import Seconds
from realrun.algorithms.averaging import Average, PendingAverage, Stopwatch, beside_training
from realrun.algorithms.flat_parameters import Flat
from realrun.algorithms.pacing import WaitWatch
from realrun.algorithms.process_groups import WorkerGroups
from realrun.algorithms.rules import Clipped, Rule, State
from realrun.errors import NonFiniteError, named_ranks


def finite_norm(
    flight: PendingAverage, now: int, flat: Flat, state: State, links: WorkerGroups, first: int = 0
) -> float:
    """Norm of an average over the whole model, to be used in round `now`.

    It holds the elements of the model from `first` on.

    One pass over the vector serves both: a norm is finite only if all elements are. Raises
    NonFiniteError on all ranks, whichever holds the element; it names those that gave such ones.
    """
    total = links.total
    norm = state.norm(flight.vector, total)
    if math.isfinite(norm):
        return norm
    bad = (~flight.vector.isfinite()).nonzero()
    (count,) = total([len(bad)])
    if not count:  # only the squares were too large for fp32
        (square,) = total([float((flight.vector.double() ** 2).sum())])
        return math.sqrt(square)
    where = f"first in {flat.name_at(first + int(bad[0]))!r}" if len(bad) else "on other ranks"
    flight.blame = flight.blame or _blame(flight.largest, links)
    raise NonFiniteError(
        f"the average of round {flight.round}, used in round {now}, has {count:g} elements that"
        f" are NaN or infinite, {where}; {flight.blame}; anchor and momentum are as before"
        " (on_nonfinite='anchor' continues without such workers)",
        round=flight.round,
    )


def _blame(norm: Tensor | None, links: WorkerGroups) -> str:
    """Who gave what is not finite, as a text. All ranks call this."""
    ranks = links.which(here=norm is not None and not bool(norm.isfinite()))
    if ranks:
        which = named_ranks(ranks)
        return f"from {which}, whose parameters held them at the launch; those of others did not"
    return "what ranks gave to it was finite, or is not known any more"


def mark_of(*tensors: Tensor) -> str:
    """A hash of dense tensors, to compare them between ranks; on a GPU nothing leaves it."""
    mark = hashlib.blake2b()
    for tensor in tensors:
        if tensor.is_cuda:
            mark.update(weighted_sum(tensor).to_bytes(8, "little", signed=True))
        else:
            mark.update(tensor.view(torch.uint8).numpy().data)
    return mark.hexdigest()


_ODD = 0x1E3779B97F4A7C15
"""A multiplier that spreads places over 64 bits (the golden ratio, Knuth's multiplicative hash)."""


def weighted_sum(tensor: Tensor) -> int:
    """The sum of its words, each times an odd number of its place, modulo 2^64.

    It is another one where a single word is, and with a chance of 2^-64 the same for other tensors.
    """
    data = tensor.detach().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
    words, total, first = data.view(width), 0, 0
    for part in torch.split(words, 2**24):
        places = torch.arange(first, first + len(part), device=data.device) * _ODD | 1
        total += int((part.long() * places).sum())
        first += len(part)
    return (total + 2**63) % 2**64 - 2**63


def rounding_numbers(index: int, flight: PendingAverage | None) -> dict[str, float]:
    """To be saved: what quantization took off an average under way, which has arrived."""
    sent, mean = flight.rounding() if flight else (0.0, 0.0)
    return {f"rounding_sent{index}": sent, f"rounding_mean{index}": mean}


def rounding_of(numbers: Mapping[str, float], index: int) -> list[Tensor]:
    """What `rounding_numbers` gave, as the `errors` of an average; none in older states."""
    names = rounding_numbers(index, None)
    values = [numbers.get(name, 0.0) for name in names]
    return [torch.tensor(values, dtype=torch.float64, device="cpu")]


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


class NobodyLeftError(Exception):
    """An average of which no rank was a member: all have used up their data."""


class OuterLoop(ABC):
    """What all loops share: the state of a rule, and how a model and averages are handled."""

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        flat: Flat,
        links: WorkerGroups,
        average: Average,
        tau: int | None,
    ) -> None:
        """The state before round 0: the anchor is what the model holds.

        Rounds have `tau` steps; without, as many as those after which it is chosen.
        """
        self.rule, self.flat, self.links, self.average = rule, flat, links, average
        self.tau = tau or (rule.late.shortest_round if rule.late else 1)
        # FSDP2 may keep parameters gathered, after a forward without backward.
        self._gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
        vectors = {name: flat.empty(count) for name, count in rule.vectors().items()}
        self.state = State(flat.empty(), vectors, rule.numbers(), flat.chunk)
        flat.read(self.state.anchor)
        (self._elements,) = links.total([flat.elements])
        self.counters = Counters(tau=self.tau)
        self._clocks: deque[Stopwatch] = deque()
        self._absorbed: torch.cuda.Event | None = None
        self._loaded = False
        self.lap: Seconds = 0.0
        """What the last round took."""
        self._watch = WaitWatch(links)
        self._prepare(tau)

    @abstractmethod
    def _prepare(self, tau: int | None) -> None:
        """Make what a loop keeps besides; `tau` None: it is still to be chosen."""

    def restart(self) -> str:
        """Take the anchor again from the model; gives a text if that is another one."""
        now = self.flat.empty()
        self.flat.read(now)
        if not self._loaded and self.flat.are_close(now, self.state.anchor):
            return "parameters as they were sent to all"
        self._loaded = True
        self.state.anchor.copy_(now)
        return f"parameters loaded since, with hash {mark_of(now)[:16]}"

    @abstractmethod
    def after_step(self, *, last: bool) -> None:
        """What is to be done after a local step; `last` of a round."""

    def launches(self, *, last: bool) -> bool:
        """Whether `after_step` launches an average."""
        return last

    def is_finite(self) -> bool:
        """Whether this worker's parameters are finite: the same on all of its ranks."""
        live = self.flat.empty()
        self.flat.read(live)
        (bad,) = self.links.total([float(not bool(live.isfinite().all()))])
        return not bad

    def launch(self, vector: Tensor) -> PendingAverage:
        """Start averaging `vector` in place, for this round."""
        norm = torch.linalg.vector_norm(vector, torch.inf) if len(vector) else None
        flight = self.average.launch(vector, self.counters.round)
        flight.largest = norm
        return flight

    def use_average(
        self, flight: PendingAverage, state: State, *, first: int = 0, share: float = 1.0
    ) -> None:
        """Wait for an average, see that it is finite, and give it to the rule.

        `state` is the part of the whole state that it belongs to: from element `first` on, a
        `share` of the model. Raises NobodyLeftError for the mean of no rank.
        """
        counters = self.counters
        clock = Stopwatch(flight.vector.device) if flight.pieces else None
        with beside_training(flight, self._absorbed):
            was_there = flight.arrived()
            flight.wait()
            counters.late += bool(not was_there and clock and clock.stands())
            if flight.members == 0:
                raise NobodyLeftError
            norm = finite_norm(flight, counters.round, self.flat, state, self.links, first)
            counters.penalty = self.rule.weigh(state, norm, self.links.total)
            rounding = flight.rounding()  # here, where a GPU need not do what was issued since
        if clock:
            clock.stop()
            self._clocks.append(clock)
        self._count_waiting()
        clipped = self.rule.absorb(state, flight.vector, counters.penalty)
        self._mark_absorbed()
        counters.used += share
        self._count_residuals(clipped, rounding)

    def _count_residuals(self, clipped: Clipped, rounding: tuple[float, float]) -> None:
        """Add what clip and quantization took off, over all ranks of a worker."""
        if not (self.rule.clips or self.average.quantizes):
            return
        counters = self.counters
        count, squares, running, sent, mean = self.links.total((*clipped, *rounding))
        counters.clipped += count
        counters.running_residual += running
        counters.clip_residual += counters.penalty**2 * squares
        counters.rounding_residual += (math.sqrt(sent) + math.sqrt(mean)) ** 2

    def _mark_absorbed(self) -> None:
        """The vectors of the rule are now those that the next penalty is taken from."""
        if (anchor := self.state.anchor).is_cuda:
            self._absorbed = torch.cuda.current_stream(anchor.device).record_event()

    def _count_waiting(self, *, every: bool = False) -> None:
        """Add what clocks show by now; `every`: wait for those that are still to come."""
        while self._clocks and (every or self._clocks[0].is_known()):
            self.counters.waited += self._clocks.popleft().seconds()

    def publish(self, vector: Tensor, start: int = 0) -> None:
        """Elements from `start` on of the model <- `vector`, on all ranks of the worker."""
        with self.links.together(
            "gathering of parameters inside the worker", round_=self.counters.round
        ):
            self.flat.write(vector, start)
        for module in self._gathered:
            module.reshard()

    @contextmanager
    def consensus(self, *, alone: bool = False) -> Iterator[None]:
        """Within, the model holds what `settle` would end with; afterwards all is as before.

        `alone`: other ranks may have left, so that only what is under way counts.
        """
        live = self.flat.empty(on_host=True)
        self.flat.read(live)
        state = self.state_dict()
        numbers = state.pop("numbers")
        kept = {name: vector.to("cpu", copy=True) for name, vector in state.items()}
        try:
            (self.use_all if alone else self.settle)()
            yield
        finally:
            self._count_waiting(every=True)
            sent = {"bytes_sent": self.average.sent}
            self.load_state_dict({**kept, "numbers": numbers | sent})
            self.publish(live)

    @abstractmethod
    def settle(self) -> None:
        """Use all that is under way, and all own progress; then stand at the anchor."""

    @abstractmethod
    def use_all(self) -> None:
        """Use all that is under way, and stand at the anchor, without own progress."""

    def drain(self) -> None:
        """Wait for all averages under way, without applying them, as evaluating and saving do.

        Who has not been waited for may be a round behind, and has that much more time.
        """
        for flight in self.under_way():
            flight.deadline += self.lap
            flight.wait()

    @property
    def steps(self) -> int:
        """Local steps so far."""
        return self.counters.round * self.tau + self.counters.step - self.counters.missing

    def stats(self) -> Stats:
        """What was done so far."""
        self._count_waiting(every=True)
        counters = self.counters
        considered = counters.used * self._elements
        names = {field.name for field in fields(Stats)}
        same = {name: value for name, value in asdict(counters).items() if name in names}
        return Stats(
            **same
            | {
                "rounds": counters.round,
                "steps": self.steps,
                "bytes_sent": self.average.sent,
                "clipped": counters.clipped / considered if considered else 0.0,
                "tau": counters.tau or None,
            }
        )

    def close_round(self) -> None:
        """Count a round that has ended, after however many steps."""
        self.counters.missing += self.tau - self.counters.step
        self.counters.step = 0
        self.counters.round += 1

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps: anchor, vectors of the rule, averages as they arrived, numbers."""
        self.drain()
        self._count_waiting(every=True)
        numbers = {
            **asdict(self.counters),
            **self.state.numbers,
            **self.own_numbers(),
            "bytes_sent": self.average.sent,
        }
        return {
            "anchor": self.state.anchor,
            **self.state.vectors,
            **self.own_vectors(),
            "numbers": numbers,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.drain()
        self._clocks.clear()
        vectors = {"anchor": self.state.anchor, **self.state.vectors, **self.own_vectors()}
        for name, vector in vectors.items():
            if name in saved:
                vector.copy_(saved[name])
            else:  # of a rule that kept no momentum, as there was none
                vector.zero_()
        self._mark_absorbed()
        numbers = saved["numbers"]
        self.state.numbers = {name: numbers[name] for name in self.state.numbers}
        counted = {field.name: numbers.get(field.name, field.default) for field in fields(Counters)}
        self.counters = Counters(**counted)
        self.average.sent = numbers["bytes_sent"]
        self.go_on(numbers)

    def start_at_anchor(self) -> None:
        """Stand where all stand, with no progress of one's own; all of it is in the state."""
        self.publish(self.state.anchor)

    def drop_progress(self) -> None:
        """Stand at the anchor, while averages under way are used as always."""
        self.publish(self.state.anchor)

    @abstractmethod
    def under_way(self) -> Iterable[PendingAverage]:
        """Averages under way."""

    @abstractmethod
    def own_vectors(self) -> dict[str, Tensor]:
        """Vectors that a loop keeps besides those of its rule, to save and to load in place."""

    @abstractmethod
    def own_numbers(self) -> dict[str, float]:
        """Numbers that a loop keeps besides those of its rule."""

    @abstractmethod
    def go_on(self, numbers: Mapping[str, float]) -> None:
        """Averages under way as they were saved; the vectors are loaded already."""


class RoundLoop(OuterLoop):
    """Averages are used at the end of a round, from which all workers start at one point.

    With staleness k there are k buffers, at least one: those of `flights` hold averages under way,
    those of `free` hold nothing that is needed.
    """

    def _prepare(self, tau: int | None) -> None:
        """Buffers, of which none is under way."""
        del tau
        self.flights: deque[PendingAverage] = deque()
        self.free = [self.flat.empty() for _ in range(max(1, self.rule.staleness))]

    def after_step(self, *, last: bool) -> None:
        """The outer step. The order matters: with staleness 1, one buffer serves every average."""
        if not last:
            return
        rule, state, flat = self.rule, self.state, self.flat
        if rule.staleness and len(self.flights) == rule.staleness:
            self._use_oldest()
        buffer = self.free.pop()
        flat.read(buffer)
        if rule.pull is not None:
            buffer.lerp_(state.anchor, rule.pull)
            flat.round(buffer)
            self.publish(buffer)
        flat.displace(state.anchor, buffer)
        self.flights.append(self.launch(buffer))
        if not rule.staleness:
            self._use_oldest()
        if rule.pull is None:
            rule.move(state)
            self.publish(state.anchor)

    def settle(self) -> None:
        """Close a round that has begun, and use all averages."""
        if self.counters.step:
            self.after_step(last=True)
        self.use_all()

    def use_all(self) -> None:
        """Each average in its turn, with the outer step that comes after it."""
        while self.flights:
            self._use_oldest()
            self.rule.move(self.state)
        self.publish(self.state.anchor)

    def _use_oldest(self) -> None:
        self.use_average(self.flights[0], self.state)
        if self.rule.staleness:
            self._watch.used(self.tau, 1, self.tau, self.counters.waited)
        self.free.append(self.flights.popleft().vector)

    def under_way(self) -> Iterable[PendingAverage]:
        """Averages under way, the oldest first."""
        return self.flights

    def own_vectors(self) -> dict[str, Tensor]:
        """The averages, those under way first."""
        buffers = [*(flight.vector for flight in self.flights), *self.free]
        return {f"average{i}": buffers[i] for i in range(self.rule.staleness)}

    def own_numbers(self) -> dict[str, float]:
        """How many averages are under way, and what rounding took off them, by always one name."""
        waiting = [*self.flights, *[None] * self.rule.staleness][: self.rule.staleness]
        numbers: dict[str, float] = {"in_flight": len(self.flights)}
        for index, flight in enumerate(waiting):
            numbers |= rounding_numbers(index, flight)
        return numbers

    def go_on(self, numbers: Mapping[str, float]) -> None:
        """Averages that are there already."""
        buffers = [*(flight.vector for flight in self.flights), *self.free]
        flying = int(numbers["in_flight"])
        first = self.counters.round - flying
        self.flights = deque(
            PendingAverage(first + i, buffers[i], errors=rounding_of(numbers, i))
            for i in range(flying)
        )
        self.free = buffers[flying:]
