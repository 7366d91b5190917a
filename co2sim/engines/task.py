"""What a worker does: some cases, one after the other, if it is the same co2sim.

All that travels is plain, so that another co2sim can read it, and say which it is.
"""

import pickle
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from co2sim.errors import EngineError
from co2sim.identity import own_identity
from co2sim.machine import share_memory

_DONE, _OTHER, _UNREAD = "done", "other", "unread"


def pack(function: Callable[[Any], Any], cases: Sequence[Any]) -> bytes:
    """The content of a task; what a script or a notebook defines travels with it."""
    import cloudpickle  # noqa: PLC0415 - time that one process does not need

    packed: bytes = cloudpickle.dumps((function, cases))
    return packed


def expected() -> tuple[str, ...]:
    """What a worker has to be: plain texts."""
    return astuple(own_identity())


def work(expected: Sequence[str], share: int, content: bytes) -> tuple[str, Any]:
    """In a worker: the function of every case, with the seconds that it all took.

    Nothing is read before it is clear that the sender has the same co2sim.
    """
    own = own_identity()
    if tuple(expected) != astuple(own):
        return _OTHER, (platform.node(), str(own))
    share_memory(share)
    try:
        function, cases = pickle.loads(content)  # noqa: S301 - of who may run code here anyway
    except Exception as error:  # noqa: BLE001 - whatever a class of a user raises
        return _UNREAD, f"{type(error).__name__}: {error}"
    began = time.perf_counter()
    found = [function(case) for case in cases]
    return _DONE, (time.perf_counter() - began, found)


def answers(given: tuple[str, Any]) -> tuple[float, list[Any]]:
    """Seconds and answers of a task. Raises EngineError for a worker that could not work."""
    kind, found = given
    if kind == _OTHER:
        host, other = found
        raise EngineError(
            f"the worker on {host} has {other}; here it is {own_identity()}: install the same there"
        )
    if kind == _UNREAD:
        raise EngineError(
            f"a worker cannot read the cases: {found}; what they are made of has to be installed"
            " there, too"
        )
    seconds, results = found
    return seconds, results
