"""Workers, whatever started them: what all engines have in common."""

import re
import socket
from concurrent.futures import Future
from typing import Any, Protocol

from co2sim.convert import shown
from co2sim.errors import EngineError, OptionError
from co2sim.units import Seconds

PATIENCE: Seconds = 30.0
"""What a scheduler may take to answer as one, and to have a worker."""
ABSENCE: Seconds = 120.0
"""For how long a scheduler may be without any worker: a lost one is started again by then."""
_REACH: Seconds = 10.0
"""What a machine may take to answer at all."""


def reach(what: str, address: str, schemes: str, example: str) -> None:
    """Check that something listens at HOST:PORT, behind one of some schemes or none.

    `schemes` are those that may be, between bars. Libraries take longer, or do not come back.
    Raises OptionError for what is no address, EngineError where nobody answers.
    """
    found = re.fullmatch(rf"(?:(?:{schemes})://)?\[?([^\[\]/\s]+?)\]?:([0-9]{{1,5}})", address)
    if found is None:
        raise OptionError(f"scheduler is {shown(address)}; of {what} it is {example}")
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_REACH).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"no {what} scheduler answers at {address}: {reason}") from None


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
