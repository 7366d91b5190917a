"""Workers, whatever started them: what all engines have in common."""

from concurrent.futures import Future
from typing import Any, Protocol

from co2sim.units import Seconds

PATIENCE: Seconds = 30.0
"""What a scheduler may take to answer as one, and to have a worker."""
ABSENCE: Seconds = 120.0
"""For how long a scheduler may be without any worker: a lost one is started again by then."""


class Pool(Protocol):
    """Workers that are there. A future gives what `task.work` gives, or the engine's own error."""

    @property
    def slots(self) -> int:
        """How many tasks should be under way."""

    @property
    def share(self) -> int:
        """The most workers that one machine has, which share its memory."""

    def submit(self, share: int, content: bytes) -> Future[Any]:
        """Start a task; `share` is how many share the memory of a machine meanwhile."""

    def died(self, error: BaseException) -> bool:
        """Whether an error of a future says that its worker died, again and again."""

    def check(self) -> None:
        """Raise EngineError where nobody is left to work; called every few seconds."""

    def close(self) -> None:
        """Stop what is under way, and let go of the workers."""
