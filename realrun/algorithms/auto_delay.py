"""How many local steps an average takes: measured on the first ones, the same on all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import torch

from realrun.algorithms.average import Flight
from realrun.algorithms.links import Links

SAMPLES = 3
"""Averages that are measured, each as on its slowest rank; the middle one decides.

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
    """Looks after every local step which averages have arrived, until enough were seen.

    Until then averages are used a whole round late. The very first is not counted: it opens
    connections. Nor are those that something else waited for, such as an evaluation. `took` are the
    local steps that averages under way took, by their launch; 0 where that cannot be told. Those of
    averages that were used are `samples`, each as on its slowest rank.
    """

    tau: int
    links: Links
    measures: bool
    uses: int = 0
    samples: list[int] = field(default_factory=list)
    took: dict[int, int] = field(default_factory=dict)

    def look(self, now: int, under_way: Sequence[tuple[Launch, Flight]]) -> None:
        """After a local step: note which averages are there."""
        if not self.measures:
            return
        missing = [pair for pair in under_way if pair[0].step not in self.took]
        if missing and missing[0][1].vector.is_cuda:  # the host may be steps ahead
            torch.cuda.current_stream(missing[0][1].vector.device).synchronize()
        for launch, flight in missing:
            if flight.arrived():
                self.took[launch.step] = max(1, now - launch.step)

    def disturbed(self, under_way: Sequence[tuple[Launch, Flight]]) -> None:
        """Averages under way are about to be waited for."""
        for launch, flight in under_way if self.measures else ():
            if not flight.arrived():
                self.took.setdefault(launch.step, 0)

    def used(self, launch: Launch) -> int | None:
        """An average was used. All ranks call this; gives the delay when it is known, once."""
        if not self.measures:
            return None
        took = self.took.pop(launch.step, self.tau)
        unknown, slowest = self.links.largest([float(not took), float(took)])
        if self.uses and not unknown:
            self.samples.append(int(slowest))
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
        self.took = {launch.step: 0 for launch, _ in under_way}
