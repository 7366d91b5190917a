"""The outer loop whose averages are used in the middle of the next round, without a restart.

A worker stands at anchor + offset + its local steps since the last average was used. The offset is
what it kept of its progress then. Vectors are fp32; the model holds their rounded sum, so that a
displacement counts from the *rounded* start, as in `flat_parameters`.
"""

import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from co2sim.common.delayed_averaging import EVEN, bounded
from realrun.algorithms.averaging import PendingAverage
from realrun.algorithms.outer_loop import OuterLoop, rounding_numbers, rounding_of
from realrun.algorithms.pacing import AutoDelay, Launch
from realrun.algorithms.rules import State

Parts: TypeAlias = Iterable[tuple[torch.dtype, slice]]
"""Slices of a vector, each of one dtype of the model and small enough for a cache."""


def take_displacement(
    parts: Parts, anchor: Tensor, offset: Tensor, live: Tensor, moved: Tensor
) -> None:
    """`moved` <- anchor - where the worker stands: rounded(anchor + offset) - live - offset.

    `live` is what the model holds. Exactly 0 where the offset is 0 and no step moved the model.
    """
    for dtype, span in parts:
        start = (anchor[span] + offset[span]).to(dtype)
        torch.sub(start, live[span], out=moved[span])
        moved[span].sub_(offset[span])


def take_offset(parts: Parts, anchor: Tensor, offset: Tensor, live: Tensor) -> None:
    """`offset` <- where the worker stands, minus the anchor, with what rounding took off."""
    for dtype, span in parts:
        start = (anchor[span] + offset[span]).to(dtype)
        offset[span].add_(live[span] - start)


def local_progress_since(
    launched: Tensor, live: Tensor, mean: Tensor, *, keep: float, predict: float
) -> None:
    """`launched` <- the offset: the share that is kept of the progress since the launch, and more.

    `predict` is the share of the mean displacement that stands for the rest.
    """
    launched.neg_().add_(live).mul_(keep)
    if predict:
        launched.add_(mean, alpha=-predict)


class DelayedLoop(OuterLoop):
    """Every fragment launches an average once a round, and uses it `delay` steps later.

    Besides anchor and vectors of the rule there are two more: the averages, and the worker's own
    points, which are what it held at the launch or, when nothing of the fragment is under way, its
    offset (see `late`). With a preview there is one more: the outer step that the worker took alone
    or, when nothing is under way, half of what that was apart from the step with the mean.
    """

    def _prepare(self, tau: int | None) -> None:
        """Vectors of zeros, and fragments of the first rounds."""
        assert self.rule.late is not None
        self._late, flat = self.rule.late, self.flat
        self.least = self._late.shortest_round
        self._means, self._own = flat.empty(), flat.empty()
        self._alone = flat.empty() if self._late.preview else None
        self._under_way: list[tuple[Launch, PendingAverage]] = []
        self._most = 0 if tau else max(EVEN, self._late.fragments or 0)
        self._divide()
        self._set_delay()
        self.counters.tau = tau or 0

    def choose(self, tau: int) -> None:
        """Rounds have `tau` steps from now on. No average may be under way."""
        steps = self.steps
        self.tau = self.counters.tau = tau
        self.counters.missing += self.steps - steps
        self._divide()
        self._set_delay()

    def _divide(self) -> None:
        """Fragments of a round of `tau` steps. Raises OptionError for options that do not fit."""
        late, tau = self._late.of(self.tau), self.tau
        assert late.keep is not None
        assert late.predict is not None
        self._keep, self._predict, count = late.keep, late.predict, late.parts(tau)
        ends = [self.flat.elements * (i + 1) // count for i in range(count)]
        self._spans = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
        self._starts = [tau * (i + 1) // count for i in range(count)]
        self._since = [self._now()] * count
        """The step of each fragment's last launch, or at which all workers stood at one point."""
        automatic = late.delay == "auto"
        self._auto = AutoDelay(tau, self.links, measures=automatic, fragments=count)

    def _set_delay(self) -> None:
        self.counters.delay = self.tau if self._late.delay == "auto" else self._late.delay

    def after_step(self, *, last: bool) -> None:
        """Use the averages that are due, and launch those whose step this is."""
        del last
        counters, delay = self.counters, self.counters.delay
        assert delay is not None
        now = self._now()
        here = self._auto.arrived(self._under_way)
        self._under_way = [
            (replace(launch, delay=now - launch.step) if launch in here else launch, flight)
            for launch, flight in self._under_way
        ]
        self._use_due(now)
        for fragment, start in enumerate(self._starts):
            if counters.step == start:
                self._launch(fragment, now, delay)
        self._use_due(now)  # with a delay of 0

    def close_round(self) -> None:
        """Also where it was shorter: no step was taken that a fragment's next average covers."""
        missing = self.tau - self.counters.step
        super().close_round()
        self._since = [since + missing for since in self._since]

    def launches(self, *, last: bool) -> bool:
        """Whether a fragment begins its average after this step."""
        del last
        return self.counters.step in self._starts

    def _now(self) -> int:
        """Local steps of the run, as rounds count them."""
        return self.counters.round * self.tau + self.counters.step

    def _launch(self, fragment: int, now: int, delay: int) -> None:
        launch = Launch(fragment, now, delay, now - self._since[fragment], time.monotonic())
        self._since[fragment] = now
        span, flat = self._spans[launch.fragment], self.flat
        part, kept, moved = self.state.part(span), self._own[span], self._means[span]
        live = torch.empty_like(kept)
        flat.read(live, span.start)
        take_displacement(flat.parts(span.start, len(kept)), part.anchor, kept, live, moved)
        if self._alone is not None:
            self._step_alone(span, part, self._alone[span], moved, live)
        if self._late.keeps == "launched":
            kept.copy_(live)
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
        counters, count = self.counters, len(self._spans)
        for launch, flight in [pair for pair in self._under_way if pair[0].due <= now]:
            late = counters.late
            self._use(launch, flight)
            self._under_way.remove((launch, flight))
            if changed := self._auto.used(launch, late=counters.late > late):
                counters.delay = changed
                self._say_what_is_predicted(changed)
            if not self._auto.measures:
                fixed = 0 if self._late.delay == "auto" else self._late.delay
                self._watch.used(self.tau, count, fixed, counters.waited)

    def _use(self, launch: Launch, flight: PendingAverage, *, ends: bool = False) -> None:
        """The outer step of a fragment, and what this worker keeps of its progress.

        Where training `ends`, workers keep all of it and predict nothing: no next average comes
        that would make up for what is not kept.
        """
        span, flat, tau = self._spans[launch.fragment], self.flat, self.tau
        keep, predict = self._keep, bounded(tau, launch.delay, self._keep, self._predict)
        if ends:
            keep, predict = 1.0, 0.0
        whole = self._late.keeps == "all"
        part, kept = self.state.part(span), self._own[span]
        live = torch.empty_like(kept)
        flat.read(live, span.start)
        if whole:
            take_offset(flat.parts(span.start, len(kept)), part.anchor, kept, live)
        before = part.anchor.clone() if whole or self._alone is not None else part.anchor
        self.use_average(flight, part, first=span.start, share=1 / len(self._spans))
        self.rule.move(part)
        if whole:
            kept.add_(before).sub_(part.anchor).mul_(keep)
        else:  # what a shorter round cannot predict is kept
            keep += predict * (1 - launch.covered / tau)
            share = predict * (launch.delay / tau)
            local_progress_since(kept, live, flight.vector, keep=keep, predict=share)
        if self._alone is not None:
            kept.add_(self._alone[span].add_(before).sub_(part.anchor).mul_(0.5))
        self.publish(torch.add(part.anchor, kept, out=live), span.start)

    def _say_what_is_predicted(self, delay: int) -> None:
        less = bounded(self.tau, delay, self._keep, self._predict)
        if less != self._predict:
            warnings.warn(
                f"averages take {delay} local steps in rounds of {self.tau}:"
                f" predict={self._predict:g} would repeat progress for ever, so that {less:g} is"
                " taken",
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

    def drop_progress(self) -> None:
        """No offset; where a fragment is under way, as if this worker had launched its anchor."""
        super().drop_progress()
        self._own.zero_()
        if self._alone is not None:
            self._alone.zero_()
        if self._late.keeps == "launched":
            for launch, _ in self._under_way:
                span = self._spans[launch.fragment]
                self.flat.read(self._own[span], span.start)

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
        for fragment in range(self._most or len(self._spans)):
            since = self._since[fragment] if fragment < len(self._spans) else self._now()
            nothing = Launch(fragment, -1, 0, self._now() - since)
            launch, flight = flying.get(fragment, (nothing, None))
            numbers[f"step{fragment}"] = launch.step
            numbers[f"covered{fragment}"] = launch.covered
            numbers[f"delay{fragment}"] = launch.delay
            numbers[f"round{fragment}"] = flight.round if flight else -1
            numbers |= rounding_numbers(fragment, flight)
        return numbers | self._auto.numbers(self._most or len(self._spans))

    def go_on(self, numbers: Mapping[str, float]) -> None:
        """Averages that are there already."""
        self._under_way = []
        if self._most:
            self.tau = self.counters.tau or self.least
            self._divide()
        else:
            self.counters.tau = self.tau
        for fragment, span in enumerate(self._spans):
            step, delay, round_ = (
                int(numbers[f"{name}{fragment}"]) for name in ("step", "delay", "round")
            )
            covered = int(numbers.get(f"covered{fragment}", self.tau))
            self._since[fragment] = step if step >= 0 else self._now() - covered
            if step >= 0:
                flight = PendingAverage(
                    round_, self._means[span], errors=rounding_of(numbers, fragment)
                )
                self._under_way.append((Launch(fragment, step, delay, covered), flight))
        self._under_way.sort(key=lambda pair: pair[0].step)
        if self._late.delay == "auto":
            self._auto.go_on(numbers, self.counters.delay or self.tau, self._under_way)
        else:
            self._set_delay()
