"""Counters of an algorithm while it trains, and the statistics made from them."""

from dataclasses import dataclass

from co2sim.units import Seconds


@dataclass(frozen=True, slots=True)
class Stats:
    """What an algorithm has done so far, on this rank.

    `late` counts averages that were not there when they were to be used, `waited` the seconds in
    which training stood still for those that were due, not those that an evaluation or a checkpoint
    waited for. `bytes_sent` are the bytes that this rank sent to other workers for averages.
    `delay` is how many local steps after its launch an average is used, None where that is at the
    end of a round.
    `penalty` is the last Lambda_t, 1 before the first average was used. `clipped` is the share of
    elements of the momentum that were clipped, over all averages used and the whole model.
    """

    rounds: int
    steps: int
    penalty: float
    clipped: float
    waited: Seconds
    bytes_sent: int
    late: int = 0
    delay: int | None = None


@dataclass(slots=True)
class Counters:
    """Rounds, steps of the round that has begun, averages used, and what became of them.

    `clipped` counts elements of the whole model over all averages used, `missing` the steps that
    rounds had less than `tau`, where `finish` ended them.
    """

    round: int = 0
    step: int = 0
    used: float = 0.0
    penalty: float = 1.0
    clipped: float = 0.0
    waited: Seconds = 0.0
    late: int = 0
    delay: int | None = None
    missing: int = 0

    def stats(self, tau: int, elements: float, sent: int) -> Stats:
        """For users; `elements` are those of the whole model."""
        considered = self.used * elements
        return Stats(
            rounds=self.round,
            steps=self.round * tau + self.step - self.missing,
            penalty=self.penalty,
            clipped=self.clipped / considered if considered else 0.0,
            waited=self.waited,
            bytes_sent=sent,
            late=self.late,
            delay=self.delay,
        )
