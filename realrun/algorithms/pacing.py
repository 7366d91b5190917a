"""Numbers that a training measures for itself: how late averages are used, and how long rounds are.

All ranks decide the same, from the largest of what they measured, in collectives of the host.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import median, median_low
from typing import Literal, TypeAlias

import torch

from co2sim.common.delayed_averaging import LONGEST
from co2sim.common.units import Seconds
from realrun.algorithms.averaging import PendingAverage
from realrun.algorithms.process_groups import WorkerGroups
from realrun.errors import warn_user

Tau: TypeAlias = int | Literal["auto"]
"""Local steps of a round; "auto": the shortest round that hides its averages."""

_WARM_UP = 2
"""Steps before any is timed, which compile and allocate; their average opens connections."""
_TIMED = 3
"""Steps that are timed, and averaged in one average that is timed."""

SAMPLES = 5
"""Averages that are measured at least: one of them may be an outlier."""

_LATE = 3 / 4
"""Share of late averages from which on the delay is too short; up to a half is expected."""

_STEADY = 4 / 3
"""Steps are as long as before if they are not longer or shorter by more."""
_LOOK_AGAIN = 16
"""Averages between two looks at how long steps are, once the delay is known."""
_RENEW = 8
"""Looks after which averages are measured again: a link may have become faster."""
_UNSTEADY = 4
"""Times as many averages as are wanted are measured where steps are never steady."""
_WINDOWS = 3
"""Two rounds each, before the first is judged."""
_WAITING = 0.1
"""Share of the time that is spent waiting, from which on it is said."""


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


UnderWay: TypeAlias = Sequence[tuple[Launch, PendingAverage]]


def clock_of(device: torch.device) -> Callable[[], Seconds]:
    """Seconds when a device has done what it was given: the host may be steps ahead of a GPU."""

    def now() -> Seconds:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return time.monotonic()

    return now


@dataclass
class AutoTau:
    """Chooses tau after the first steps: as many as one average of the whole model takes.

    The first steps end with an average that all wait for, and so do the next ones, which are timed:
    a training that begins so has lost nothing, as all workers then stand at one point. tau is what
    `co2sim` chooses: the shortest round of at least `least` steps whose average it hides.
    """

    links: WorkerGroups
    least: int
    now: Callable[[], Seconds]
    began: Seconds = 0.0
    steps: list[Seconds] = field(default_factory=list)

    def ends(self, step: int) -> bool:
        """After local step number `step` of the run: whether these steps are to be averaged now."""
        now = self.now()
        if step > _WARM_UP:
            self.steps.append(now - self.began)
        self.began = now
        return step in {_WARM_UP, _WARM_UP + _TIMED}

    def averaged(self) -> int | None:
        """The average that all waited for is there: tau, if it is known. All ranks call this."""
        now = self.now()
        taken, self.began = now - self.began, now
        if len(self.steps) < _TIMED:
            return None
        average, step = self.links.largest([taken, median(self.steps)])
        needed = math.ceil(average / step) if step else LONGEST
        return max(self.least, min(LONGEST, needed))


@dataclass
class AutoDelay:
    """Measures how many local steps averages take, until enough were seen.

    Until then ranks ask each other after every local step which averages have come to all of them;
    these are used at once. The very first is not counted: it opens connections. Nor are those that
    something else waited for, such as an evaluation: `disturbed` are their launches. `samples` are
    the steps that the others took, `paces` how long a step was meanwhile. Only averages of steady
    steps count, not those of a compilation. It takes a whole round of `fragments` to see how long
    averages queue behind each other.

    The middle one decides: a longer delay is waited for less, and learns less. It measures again
    now and then, when steps are no longer what they were, and when three of four averages come
    late; then the delay becomes longer, until it is tau.
    """

    tau: int
    links: WorkerGroups
    measures: bool
    """False from the start where the delay is given."""
    fragments: int = 1
    delay: int = 0
    uses: int = 0
    late: int = 0
    samples: list[int] = field(default_factory=list)
    paces: list[Seconds] = field(default_factory=list)
    disturbed: set[int] = field(default_factory=set)

    @property
    def wanted(self) -> int:
        """Samples that decide."""
        return max(SAMPLES, self.fragments)

    def arrived(self, under_way: UnderWay) -> list[Launch]:
        """After a local step, while it measures: what has come to all ranks. All call this."""
        if not self.measures or not under_way:
            return []
        vector = under_way[0][1].vector
        if vector.is_cuda:  # the host may be steps ahead
            torch.cuda.current_stream(vector.device).synchronize()
        missing = self.links.largest([float(not flight.arrived()) for _, flight in under_way])
        return [launch for (launch, _), late in zip(under_way, missing, strict=True) if not late]

    def disturb(self, under_way: UnderWay) -> None:
        """Averages under way are about to be waited for."""
        self.disturbed |= {launch.step for launch, _ in under_way}

    def used(self, launch: Launch, *, late: bool) -> int | None:
        """An average was used, and came `late` or not.

        All ranks call this; gives the delay of averages to come where that changes.
        """
        if not self.measures and not self.delay:
            return None
        took = launch.delay
        self.uses += 1
        self.late += late
        disturbed = launch.step in self.disturbed
        self.disturbed.discard(launch.step)
        if not self.measures and self.uses % _LOOK_AGAIN:
            return None
        pace_here = (time.monotonic() - launch.began) / took if took and launch.began else 0.0
        unknown, pace, many = self.links.largest([float(disturbed), pace_here, float(self.late)])
        if not self.measures:
            return self._look(0.0 if unknown else pace, many / _LOOK_AGAIN)
        if self.uses > 1 and took and not unknown:
            self.samples.append(took)
            self.paces.append(pace)
        if self.uses <= _UNSTEADY * self.wanted:
            steady = [not _differ(pace, before) for before in self.paces]
            self.samples = list(compress(self.samples, steady))
            self.paces = list(compress(self.paces, steady))
        if len(self.samples) < self.wanted:
            return None
        self.measures, self.late = False, 0
        seen = median_low(self.samples[-self.wanted :])
        self.delay = min(self.tau, max(self.delay, seen))
        return self.delay

    def _look(self, pace: Seconds, late: float) -> int | None:
        """Measure again where steps have changed, or a longer delay would have fewer late ones."""
        self.late = 0
        changed = _differ(pace, max(self.paces, default=0.0))
        longer = late > _LATE and self.delay < self.tau
        if not (changed or longer or self.uses >= _LOOK_AGAIN * _RENEW):
            return None
        self.delay = self.delay + 1 if longer else 0
        self.measures, self.uses, self.samples, self.paces = True, 1, [], []
        return self.tau

    def numbers(self, most: int) -> dict[str, float]:
        """To be saved, always by the same names, with `most` fragments; 0: no such sample yet."""
        places = max(SAMPLES, most)
        padded = [*self.samples, *[0] * places][:places]
        samples = {f"sample{index}": sample for index, sample in enumerate(padded)}
        pace = max(self.paces, default=0.0)
        return {"measures": self.measures, "uses": self.uses, "pace": pace, **samples}

    def go_on(self, numbers: Mapping[str, float], delay: int, under_way: UnderWay) -> None:
        """Continue from what was saved; averages that were under way then were waited for."""
        self.measures, self.uses = bool(numbers["measures"]), int(numbers["uses"])
        self.delay = 0 if self.measures else delay
        saved = [int(numbers.get(f"sample{index}", 0)) for index in range(self.wanted)]
        self.samples = [sample for sample in saved if sample]
        self.paces = [numbers.get("pace", 0.0)] * len(self.samples)
        self.disturbed = {launch.step for launch, _ in under_way}


@dataclass
class WaitWatch:
    """Warns once where a training waits for its averages, with the tau that would hide them."""

    links: WorkerGroups
    now: Callable[[], Seconds] = time.monotonic
    uses: int = 0
    began: Seconds = 0.0
    waited: Seconds = 0.0
    said: bool = False

    def used(self, tau: int, fragments: int, delay: int, waited: Seconds) -> None:
        """An average was used; `waited` is the time spent waiting so far. All ranks call this.

        `delay` is 0 where it is measured: then it is not what is too short.

        What counts is the rank that waits least, as others wait for it and not for the link, and
        some rounds: where the delay changes, averages that are under way are waited for at once.
        """
        self.uses += 1
        window = max(_LOOK_AGAIN, 2 * fragments)
        if self.said or self.uses % window:
            return
        now = self.now()
        if self.uses == window:  # the first ones opened connections
            self.began, self.waited = now, waited
            return
        (opposite,) = self.links.largest([-(waited - self.waited) / (now - self.began)])
        share = -opposite
        if self.uses < _WINDOWS * window or share < _WAITING:
            return
        self.said = True
        if self.links.rank == 0:
            remedy = f"a longer delay than {delay}, or delay='auto', hides more"
            if not 0 < delay < tau:
                needed = math.ceil(tau / max(1 - share, tau / LONGEST))
                remedy = f"this link needs rounds of about tau={needed} local steps"
            warn_user(
                f"training waits for averages {share:.0%} of the time, in rounds of tau={tau}:"
                f" {remedy}"
            )


def _differ(pace: Seconds, other: Seconds) -> bool:
    """Whether steps are longer or shorter than they were; False where that is not known."""
    return min(pace, other) > 0 and max(pace, other) > _STEADY * min(pace, other)
