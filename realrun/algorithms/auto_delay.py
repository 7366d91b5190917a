"""How many local steps an average takes: measured on the first ones, the same on all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import torch

from realrun.algorithms.average import Flight
from realrun.algorithms.links import Links

SAMPLES = 3
"""Averages that are measured, each until all ranks have it; the middle one decides.

The first steps of a training may take longer than those that follow. The longest of the three would
then stay the delay of the whole training, though every later average comes sooner.
"""


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


@dataclass
class AutoDelay:
    """Measures how many local steps averages take, until enough were seen.

    Until then ranks ask each other after every local step which averages have come to all of them;
    these are used at once. The very first is not counted: it opens connections. Nor are those that
    something else waited for, such as an evaluation: `disturbed` are their launches. `samples` are
    the steps that the others took.
    """

    tau: int
    links: Links
    measures: bool
    uses: int = 0
    samples: list[int] = field(default_factory=list)
    disturbed: set[int] = field(default_factory=set)

    def arrived(self, under_way: Sequence[tuple[Launch, Flight]]) -> list[tuple[Launch, Flight]]:
        """After a local step, while it measures: what has come to all ranks. All call this."""
        if not self.measures or not under_way:
            return []
        vector = under_way[0][1].vector
        if vector.is_cuda:  # the host may be steps ahead
            torch.cuda.current_stream(vector.device).synchronize()
        missing = self.links.largest([float(not flight.arrived()) for _, flight in under_way])
        return [pair for pair, late in zip(under_way, missing, strict=True) if not late]

    def disturb(self, under_way: Sequence[tuple[Launch, Flight]]) -> None:
        """Averages under way are about to be waited for."""
        if self.measures:
            self.disturbed |= {launch.step for launch, _ in under_way}

    def used(self, launch: Launch, took: int) -> int | None:
        """An average was used so many steps after its launch; 0: it was waited for at once.

        All ranks call this; gives the delay when it is known, once.
        """
        if not self.measures:
            return None
        (unknown,) = self.links.largest([float(launch.step in self.disturbed)])
        self.disturbed.discard(launch.step)
        if self.uses and took and not unknown:
            self.samples.append(took)
        self.uses += 1
        self.measures = len(self.samples) < SAMPLES
        return None if self.measures else min(self.tau, median_low(self.samples))

    def numbers(self) -> dict[str, float]:
        """To be saved, always by the same names; 0: no such sample yet."""
        padded = [*self.samples, *[0] * SAMPLES][:SAMPLES]
        samples = {f"sample{place}": sample for place, sample in enumerate(padded)}
        return {"measures": self.measures, "uses": self.uses, **samples}

    def go_on(
        self, numbers: Mapping[str, float], under_way: Sequence[tuple[Launch, Flight]]
    ) -> None:
        """Go on from what was saved; averages that were under way then were waited for."""
        self.measures, self.uses = bool(numbers["measures"]), int(numbers["uses"])
        saved = [int(numbers[f"sample{place}"]) for place in range(SAMPLES)]
        self.samples = [sample for sample in saved if sample]
        self.disturbed = {launch.step for launch, _ in under_way}
