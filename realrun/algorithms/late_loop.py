"""The outer loop whose averages are used in the middle of the next round, without a restart."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from realrun.algorithms.auto_delay import AutoDelay
from realrun.algorithms.average import Average, Flight
from realrun.algorithms.flat import Flat
from realrun.algorithms.late import Late, depart, keep_since, stand
from realrun.algorithms.outer_loop import OuterLoop
from realrun.algorithms.rule import Rule, State
from realrun.algorithms.workers import Links


@dataclass(frozen=True, slots=True)
class Launch:
    """One average: of which fragment, after which step of the run, and how long it may take."""

    fragment: int
    step: int
    delay: int

    @property
    def due(self) -> int:
        """The step after which it is used."""
        return self.step + self.delay


class LateLoop(OuterLoop):
    """Every fragment launches an average once a round, and uses it `delay` steps later.

    Besides anchor and vectors of the rule there are two more: the averages, and the worker's own
    points, which are what it held at the launch or, when nothing of the fragment is under way, its
    offset (see `late`).
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        late: Late,
        flat: Flat,
        links: Links,
        average: Average,
        tau: int,
    ) -> None:
        """The state before round 0."""
        super().__init__(model, rule, flat, links, average)
        self._late, self._tau = late, tau
        self._means, self._own = flat.empty(), flat.empty()
        count = late.fragments
        ends = [flat.elements * (i + 1) // count for i in range(count)]
        self._spans = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
        self._starts = [tau * (i + 1) // count for i in range(count)]
        self._launches: list[Launch] = []
        self._auto = AutoDelay(tau, links) if late.delay == "auto" else None
        self.counters.delay = tau if late.delay == "auto" else late.delay

    def after_step(self, *, last: bool) -> None:
        """Use the averages that are due, and launch those whose step this is."""
        del last
        counters, delay = self.counters, self.counters.delay
        assert delay is not None
        now = counters.round * self._tau + counters.step
        if self._auto:
            self._auto.look(now, self.flights, self._launches)
        self._use_due(now)
        for fragment, start in enumerate(self._starts):
            if counters.step == start:
                self._launch(Launch(fragment, now, delay))
        self._use_due(now)  # with a delay of 0

    def _launch(self, launch: Launch) -> None:
        span, flat, state = self._spans[launch.fragment], self.flat, self.state
        live = flat.empty()
        flat.read(live)
        depart(flat.parts(span), state.anchor, self._own, live, self._means)
        if self._late.keeps == "launched":
            self._own[span].copy_(live[span])
        self._launches.append(launch)
        self.flights.append(self.average.launch(self._means[span], self.counters.round))

    def _use_due(self, now: int) -> None:
        while self._launches and self._launches[0].due <= now:
            self._use(self._launches[0], self.flights[0])
            self._launches.pop(0)
            self.flights.popleft()

    def _use(self, launch: Launch, flight: Flight) -> None:
        """The outer step of a fragment, and what this worker keeps of its own."""
        span, flat, late = self._spans[launch.fragment], self.flat, self._late
        part, own = self.state.part(span), self._own[span]
        live = flat.empty()
        flat.read(live)
        if late.keeps == "all":
            stand(flat.parts(span), self.state.anchor, self._own, live)
            before = part.anchor.clone()
        self.use_average(flight, part, first=span.start, share=1 / late.fragments)
        self.rule.move(part)
        if late.keeps == "all":
            own.add_(before).sub_(part.anchor).mul_(late.keep)
        else:
            keep_since(late, launch.delay / self._tau, own, live[span], flight.vector)
        torch.add(part.anchor, own, out=live[span])
        self.publish(live)
        if self._auto:
            self._settle(self._auto.used())

    def _settle(self, delay: int | None) -> None:
        """From the next launch on."""
        if delay is not None:
            self.counters.delay, self._auto = delay, None

    def agreed(self) -> Tensor:
        """The anchor as it will be when all that is under way has been used.

        Waits for it. Nothing that is kept changes.
        """
        self.drain()
        after = State(
            self.state.anchor.clone(),
            {name: one.clone() for name, one in self.state.vectors.items()},
            dict(self.state.numbers),
            self.state.chunk,
        )
        for launch, flight in zip(self._launches, self.flights, strict=True):
            part = after.part(self._spans[launch.fragment])
            norm = after.norm(flight.vector, self.links.total)
            self.rule.absorb(part, flight.vector, norm, self.links.total)
            self.rule.move(part)
        return after.anchor

    def drain(self) -> None:
        """Wait for all averages under way; how long these took cannot be told any more."""
        if self._auto:
            self._auto.disturbed(self.flights)
        super().drain()

    def own_vectors(self) -> dict[str, Tensor]:
        """Averages, as they arrived, and the worker's own points."""
        return {"averages": self._means, "own": self._own}

    def own_numbers(self) -> dict[str, float]:
        """What is under way, and what is known of how long averages take."""
        rows = [
            (f"under_way{launch.fragment}_{name}", value)
            for launch, flight in zip(self._launches, self.flights, strict=True)
            for name, value in (
                ("step", launch.step),
                ("delay", launch.delay),
                ("round", flight.round),
            )
        ]
        return {**dict(rows), **(self._auto.numbers() if self._auto else {})}

    def go_on(self, numbers: Mapping[str, float]) -> None:
        """Averages that are there already."""
        found = []
        for fragment, span in enumerate(self._spans):
            name = f"under_way{fragment}_"
            if name + "step" in numbers:
                launch = Launch(fragment, int(numbers[name + "step"]), int(numbers[name + "delay"]))
                found.append((launch, Flight(int(numbers[name + "round"]), self._means[span])))
        found.sort(key=lambda pair: pair[0].step)
        self._launches = [launch for launch, _ in found]
        self.flights.clear()
        self.flights.extend(flight for _, flight in found)
        if self._late.delay != "auto":
            self.counters.delay = self._late.delay
        elif self._auto and "slowest" in numbers:
            self._auto.go_on(numbers)
        else:
            self._auto = None  # it was settled
