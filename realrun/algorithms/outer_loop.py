"""The outer loop of local updates: what a rank keeps between rounds, and the averages under way."""

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from realrun.algorithms.average import Average, Flight
from realrun.algorithms.counters import Counters, Stats
from realrun.algorithms.finite import finite_norm
from realrun.algorithms.flat import Flat
from realrun.algorithms.rule import Rule, State
from realrun.algorithms.workers import Links


def mark_of(*tensors: Tensor) -> str:
    """A hash of dense tensors, to compare them between ranks."""
    mark = hashlib.blake2b()
    for tensor in tensors:
        mark.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
    return mark.hexdigest()


class OuterLoop:
    """Outer steps by the rule of an algorithm.

    With staleness k there are k buffers, at least one: those of `flights` hold averages under way,
    the oldest first, those of `free` hold nothing that is needed.
    """

    def __init__(
        self, model: nn.Module, rule: Rule, flat: Flat, links: Links, average: Average
    ) -> None:
        """The state before round 0: the anchor is what the model holds."""
        self.rule, self.flat, self.links, self.average = rule, flat, links, average
        # FSDP2 may keep parameters gathered, after a forward without backward.
        self._gathered = [one for one in model.modules() if isinstance(one, FSDPModule)]
        vectors = {
            name: torch.zeros(
                (count, flat.elements) if count else flat.elements, device=flat.device
            )
            for name, count in rule.vectors().items()
        }
        self.state = State(flat.empty(), vectors, rule.numbers(), flat.chunk)
        flat.read(self.state.anchor)
        self.free = [flat.empty() for _ in range(max(1, rule.staleness))]
        self.flights: deque[Flight] = deque()
        (self._elements,) = links.total([flat.elements])
        self.counters = Counters()

    def restart(self) -> str:
        """Take the anchor anew from the model; gives in words whether that is another one."""
        now = self.flat.empty()
        self.flat.read(now)
        if torch.equal(now, self.state.anchor):
            return "parameters as they were sent to all"
        self.state.anchor.copy_(now)
        return f"parameters loaded since, with hash {mark_of(now)[:16]}"

    def step(self) -> None:
        """The outer step. The order matters: with staleness 1, one buffer serves every average."""
        rule, state, flat = self.rule, self.state, self.flat
        if rule.staleness and len(self.flights) == rule.staleness:
            self._use_average()
        buffer = self.free.pop()
        flat.read(buffer)
        if rule.pull is not None:
            buffer.lerp_(state.anchor, rule.pull)
            flat.round(buffer)
            self.publish(buffer)
        flat.displace(state.anchor, buffer)
        self.flights.append(self.average.launch(buffer, self.counters.round))
        if not rule.staleness:
            self._use_average()
        if rule.pull is None:
            rule.move(state)
            self.publish(state.anchor)

    def _use_average(self) -> None:
        """Wait for the oldest average, see that it is finite, and give it to the rule."""
        flight = self.flights[0]
        self.counters.waited += flight.wait()
        total = self.links.total
        norm = finite_norm(flight, self.counters.round, self.flat, self.state, total)
        absorbed = self.rule.absorb(self.state, flight.vector, norm, total)
        self.counters.used += 1
        self.counters.penalty = absorbed.penalty
        if self.rule.clips:
            self.counters.clipped += total([absorbed.clipped])[0]
        self.free.append(self.flights.popleft().vector)

    def publish(self, vector: Tensor) -> None:
        """The model <- `vector`, on all ranks of the worker."""
        with self.links.together(
            "gathering of parameters inside the worker", round=self.counters.round
        ):
            self.flat.write(vector)
        for module in self._gathered:
            module.reshard()

    def drain(self) -> None:
        """Wait for all averages under way, without applying them."""
        for flight in self.flights:
            self.counters.waited += flight.wait()

    def stats(self, tau: int) -> Stats:
        """What was done so far."""
        return self.counters.stats(tau, self._elements, self.average.sent)

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps: anchor, vectors of the rule, averages as they arrived, numbers."""
        self.drain()
        averages = [*(flight.vector for flight in self.flights), *self.free]
        numbers = {
            **asdict(self.counters),
            **self.state.numbers,
            "in_flight": len(self.flights),
            "bytes_sent": self.average.sent,
        }
        return {
            "anchor": self.state.anchor,
            **self.state.vectors,
            **{f"average{i}": averages[i] for i in range(self.rule.staleness)},
            "numbers": numbers,
        }

    def load_state_dict(self, own: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.drain()
        self.state.anchor.copy_(own["anchor"])
        for name, vector in self.state.vectors.items():
            vector.copy_(own[name])
        numbers = own["numbers"]
        self.state.numbers = {name: numbers[name] for name in self.state.numbers}
        self.counters = Counters(**{one.name: numbers[one.name] for one in fields(Counters)})
        self.average.sent = numbers["bytes_sent"]
        buffers = [*(flight.vector for flight in self.flights), *self.free]
        for index in range(self.rule.staleness):
            buffers[index].copy_(own[f"average{index}"])
        flying = numbers["in_flight"]
        first = self.counters.round - flying
        self.flights = deque(Flight(first + i, buffers[i]) for i in range(flying))
        self.free = buffers[flying:]
