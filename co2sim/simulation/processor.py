"""How fast a rank computes, beside what it communicates at the same time."""

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Processor:
    """That of one rank. `interference` is that of the cluster, `in_flight` counts collectives."""

    interference: float
    in_flight: int = 0

    def communicate(self, change: int) -> bool:
        """Count a collective that begins (1) or ends (-1); whether the pace of computes changes."""
        before = self.in_flight > 0
        self.in_flight += change
        return before != (self.in_flight > 0)

    @property
    def pace(self) -> float:
        """Seconds of work that a compute gets done in a second."""
        return 1.0 / (1.0 + self.interference) if self.in_flight else 1.0
