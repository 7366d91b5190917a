"""The outer loop whose averages are used in the middle of the next round, without a restart."""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import torch
from torch import Tensor, nn

from co2sim.common.units import Seconds
from realrun.algorithms.averaging import Average, PendingAverage
from realrun.algorithms.delayed import (
    DelayedAveraging,
    Rule,
    State,
    depart,
    local_progress_since,
    stand,
)
from realrun.algorithms.flat_parameters import Flat
from realrun.algorithms.outer_loop import OuterLoop, rounding_numbers, rounding_of
from realrun.algorithms.process_groups import WorkerGroups

SAMPLES = 3
"""Averages that are measured, each until all ranks have it; the middle one decides.

The first steps of a training may take longer than those that follow. The longest of the three would
then stay the delay of the whole training, though every later average comes sooner.
"""


_STEADY = 4 / 3
"""Steps are as long as before if they are not longer or shorter by more."""
_LOOK_AGAIN = 16
"""Averages between two looks at how long steps are, once the delay is known."""
_MAX_USES = 12
"""Averages that are measured where steps are never steady."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One average: of which fragment, after which step of the run, and how long it may take.

    It holds the progress of the `covered` local steps before: fewer than a round where it is the
    first of its fragment. `began` is when it was launched; 0: not known.
    """

    fragment: int
    step: int
    delay: int
    covered: int = 0
    began: Seconds = 0.0

    @property
    def due(self) -> int:
        """The step after which it is used."""
        return self.step + self.delay


@dataclass
class AutoDelay:
    """Measures how many local steps averages take, until enough were seen.

    Until then ranks ask each other after every local step which averages have come to all of them;
    these are used at once. The very first is not counted: it opens connections. Nor are those that
    something else waited for, such as an evaluation: `disturbed` are their launches. `samples` are
    the steps that the others took, `paces` how long a step was meanwhile. Only averages of steady
    steps count, not those of a compilation; when steps are no longer what they were, it measures
    again.
    """

    tau: int
    links: WorkerGroups
    measures: bool
    uses: int = 0
    samples: list[int] = field(default_factory=list)
    paces: list[Seconds] = field(default_factory=list)
    disturbed: set[int] = field(default_factory=set)

    def arrived(
        self, under_way: Sequence[tuple[Launch, PendingAverage]]
    ) -> list[tuple[Launch, PendingAverage]]:
        """After a local step, while it measures: what has come to all ranks. All call this."""
        if not self.measures or not under_way:
            return []
        vector = under_way[0][1].vector
        if vector.is_cuda:  # the host may be steps ahead
            torch.cuda.current_stream(vector.device).synchronize()
        missing = self.links.largest([float(not flight.arrived()) for _, flight in under_way])
        return [pair for pair, late in zip(under_way, missing, strict=True) if not late]

    def disturb(self, under_way: Sequence[tuple[Launch, PendingAverage]]) -> None:
        """Averages under way are about to be waited for."""
        self.disturbed |= {launch.step for launch, _ in under_way}

    def used(self, launch: Launch, took: int) -> int | None:
        """An average was used a number of steps after its launch; 0: it was waited for at once.

        All ranks call this; gives the delay when it is known, once.
        """
        self.uses += 1
        disturbed = launch.step in self.disturbed
        self.disturbed.discard(launch.step)
        if not self.measures and self.uses % _LOOK_AGAIN:
            return None
        own = (time.monotonic() - launch.began) / took if took and launch.began else 0.0
        unknown, pace = self.links.largest([float(disturbed), own])
        if not self.measures:
            if not unknown and _differ(pace, max(self.paces, default=0.0)):
                self.measures, self.uses, self.samples, self.paces = True, 1, [], []
            return None
        if self.uses > 1 and took and not unknown:
            self.samples.append(took)
            self.paces.append(pace)
        steady = [not _differ(pace, before) for before in self.paces]
        if self.uses <= _MAX_USES:
            self.samples = [one for one, same in zip(self.samples, steady, strict=True) if same]
            self.paces = [one for one, same in zip(self.paces, steady, strict=True) if same]
        self.measures = len(self.samples) < SAMPLES
        return None if self.measures else min(self.tau, median_low(self.samples[-SAMPLES:]))

    def numbers(self) -> dict[str, float]:
        """To be saved, always by the same names; 0: no such sample yet."""
        padded = [*self.samples, *[0] * SAMPLES][:SAMPLES]
        samples = {f"sample{place}": sample for place, sample in enumerate(padded)}
        pace = max(self.paces, default=0.0)
        return {"measures": self.measures, "uses": self.uses, "pace": pace, **samples}

    def go_on(
        self, numbers: Mapping[str, float], under_way: Sequence[tuple[Launch, PendingAverage]]
    ) -> None:
        """Continue from what was saved; averages that were under way then were waited for."""
        self.measures, self.uses = bool(numbers["measures"]), int(numbers["uses"])
        saved = [int(numbers[f"sample{place}"]) for place in range(SAMPLES)]
        self.samples = [sample for sample in saved if sample]
        self.paces = [numbers.get("pace", 0.0)] * len(self.samples)
        self.disturbed = {launch.step for launch, _ in under_way}


def _differ(one: Seconds, other: Seconds) -> bool:
    """Whether steps are longer or shorter than they were; False where that is not known."""
    return min(one, other) > 0 and max(one, other) > _STEADY * min(one, other)


class DelayedLoop(OuterLoop):
    """Every fragment launches an average once a round, and uses it `delay` steps later.

    Besides anchor and vectors of the rule there are two more: the averages, and the worker's own
    points, which are what it held at the launch or, when nothing of the fragment is under way, its
    offset (see `late`). With a preview there is one more: the outer step that the worker took alone
    or, when nothing is under way, half of what that was apart from the step with the mean.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        late: DelayedAveraging,
        flat: Flat,
        links: WorkerGroups,
        average: Average,
        tau: int,
    ) -> None:
        """The state before round 0."""
        super().__init__(model, rule, flat, links, average)
        self._late, self._tau = late, tau
        self._means, self._own = flat.empty(), flat.empty()
        self._alone = flat.empty() if late.preview else None
        count = late.fragments
        ends = [flat.elements * (i + 1) // count for i in range(count)]
        self._spans = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
        self._starts = [tau * (i + 1) // count for i in range(count)]
        self._since = [0] * count
        """The step of each fragment's last launch, or at which all workers stood at one point."""
        self._under_way: list[tuple[Launch, PendingAverage]] = []
        self._auto = AutoDelay(tau, links, measures=late.delay == "auto")
        self.counters.delay = tau if late.delay == "auto" else late.delay

    def after_step(self, *, last: bool) -> None:
        """Use the averages that are due, and launch those whose step this is."""
        del last
        counters, delay = self.counters, self.counters.delay
        assert delay is not None
        now = self._now()
        here = [launch for launch, _ in self._auto.arrived(self._under_way)]
        self._under_way = [
            (replace(launch, delay=now - launch.step) if launch in here else launch, flight)
            for launch, flight in self._under_way
        ]
        self._use_due(now)
        for fragment, start in enumerate(self._starts):
            if counters.step == start:
                self._launch(fragment, now, delay)
        self._use_due(now)  # with a delay of 0

    def _now(self) -> int:
        """Local steps of the run, as rounds count them."""
        return self.counters.round * self._tau + self.counters.step

    def _launch(self, fragment: int, now: int, delay: int) -> None:
        launch = Launch(fragment, now, delay, now - self._since[fragment], time.monotonic())
        self._since[fragment] = now
        span, flat = self._spans[launch.fragment], self.flat
        part, own, moved = self.state.part(span), self._own[span], self._means[span]
        live = torch.empty_like(own)
        flat.read(live, span.start)
        depart(flat.parts(span.start, len(own)), part.anchor, own, live, moved)
        if self._alone is not None:
            self._step_alone(span, part, self._alone[span], moved, live)
        if self._late.keeps == "launched":
            own.copy_(live)
        self._under_way.append((launch, self.launch(moved)))

    def _step_alone(
        self, span: slice, part: State, alone: Tensor, moved: Tensor, live: Tensor
    ) -> None:
        """Take the outer step with this worker's own displacement; `live` <- where it stands then.

        `moved` <- the displacement without what it was apart from the others before.
        """
        moved.add_(alone)
        after = part.copy()
        self.rule.absorb(after, moved, self.rule.weigh(after, 0.0, self.links.total))
        self.rule.move(after)
        torch.add(after.anchor, alone, out=live)
        torch.sub(after.anchor, part.anchor, out=alone)
        self.publish(live, span.start)
        self.flat.read(live, span.start)

    def _use_due(self, now: int) -> None:
        for launch, flight in [pair for pair in self._under_way if pair[0].due <= now]:
            self._use(launch, flight)
            self._under_way.remove((launch, flight))
            if measured := self._auto.used(launch, launch.delay):
                self.counters.delay = measured
                self._say_what_is_predicted(measured)

    def _use(self, launch: Launch, flight: PendingAverage, *, ends: bool = False) -> None:
        """The outer step of a fragment, and what this worker keeps of its progress.

        Where training `ends`, workers keep all of it and predict nothing: no next average comes
        that would make up for what is not kept.
        """
        span, flat, late = self._spans[launch.fragment], self.flat, self._late
        if ends:
            late = replace(late, keep=1.0, predict=0.0)
        part, own = self.state.part(span), self._own[span]
        live = torch.empty_like(own)
        flat.read(live, span.start)
        if late.keeps == "all":
            stand(flat.parts(span.start, len(own)), part.anchor, own, live)
        before = part.anchor
        if late.keeps == "all" or late.preview:
            before = before.clone()
        self.use_average(flight, part, first=span.start, share=1 / late.fragments)
        self.rule.move(part)
        if late.keeps == "all":
            own.add_(before).sub_(part.anchor).mul_(late.keep)
        else:
            shorter = 1 - launch.covered / self._tau
            local_progress_since(
                late, launch.delay, self._tau, own, live, flight.vector, shorter=shorter
            )
        if self._alone is not None:
            own.add_(self._alone[span].add_(before).sub_(part.anchor).mul_(0.5))
        self.publish(torch.add(part.anchor, own, out=live), span.start)

    def _say_what_is_predicted(self, delay: int) -> None:
        late, tau = self._late, self._tau
        if (less := late.predicted(delay, tau)) != late.predict:
            warnings.warn(
                f"averages take {delay} local steps in rounds of {tau}: predict={late.predict:g}"
                f" would repeat progress for ever, so that {less:g} is taken",
                stacklevel=2,
            )

    def settle(self) -> None:
        """What is under way, and then an average of where every worker stands, waited for.

        A fragment that was launched after the last step has nothing more to average: with momentum
        another launch would move the anchor once more.
        """
        now = self._now()
        self._use_under_way()
        for fragment, since in enumerate(self._since):
            if self._late.keeps == "all" or since < now:
                self._launch(fragment, now, 0)
        self._use_under_way()
        self.start_at_anchor()

    def use_all(self) -> None:
        """What is under way."""
        self._use_under_way()
        self.start_at_anchor()

    def _use_under_way(self) -> None:
        """All averages under way, in their order, as the last ones: how long they take is open."""
        self._auto.disturb(self._under_way)
        while self._under_way:
            self._use(*self._under_way[0], ends=True)
            del self._under_way[0]

    def start_at_anchor(self) -> None:
        """No offset, and no progress since."""
        super().start_at_anchor()
        self._since = [self._now()] * len(self._spans)
        self._own.zero_()
        if self._alone is not None:
            self._alone.zero_()

    def under_way(self) -> Iterable[PendingAverage]:
        """Averages under way."""
        return [flight for _, flight in self._under_way]

    def drain(self) -> None:
        """Wait for all averages under way; how long these took is not known any more."""
        self._auto.disturb(self._under_way)
        super().drain()

    def own_vectors(self) -> dict[str, Tensor]:
        """Averages, as they arrived, the worker's own points, and its own outer step, if any."""
        alone = {} if self._alone is None else {"alone": self._alone}
        return {"averages": self._means, "own": self._own, **alone}

    def own_numbers(self) -> dict[str, float]:
        """What is under way by fragment (step -1: nothing), and what is known of delays.

        The names are always the same: torch.distributed.checkpoint loads only what it finds.
        """
        numbers: dict[str, float] = {}
        flying = {launch.fragment: (launch, flight) for launch, flight in self._under_way}
        for fragment in range(len(self._spans)):
            since = self._now() - self._since[fragment]
            launch, flight = flying.get(fragment, (Launch(fragment, -1, 0, since), None))
            numbers[f"step{fragment}"] = launch.step
            numbers[f"covered{fragment}"] = launch.covered
            numbers[f"delay{fragment}"] = launch.delay
            numbers[f"round{fragment}"] = flight.round if flight else -1
            numbers |= rounding_numbers(fragment, flight)
        return numbers | self._auto.numbers()

    def go_on(self, numbers: Mapping[str, float]) -> None:
        """Averages that are there already."""
        self._under_way = []
        for fragment, span in enumerate(self._spans):
            step, delay, number = (
                int(numbers[f"{name}{fragment}"]) for name in ("step", "delay", "round")
            )
            covered = int(numbers.get(f"covered{fragment}", self._tau))
            self._since[fragment] = step if step >= 0 else self._now() - covered
            if step >= 0:
                flight = PendingAverage(
                    number, self._means[span], errors=rounding_of(numbers, fragment)
                )
                self._under_way.append((Launch(fragment, step, delay, covered), flight))
        self._under_way.sort(key=lambda pair: pair[0].step)
        if self._late.delay == "auto":
            self._auto.go_on(numbers, self._under_way)
        else:
            self.counters.delay = self._late.delay
