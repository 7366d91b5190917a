"""What this machine has left for a simulation, and what is kept of results that were computed."""

import math
import os
import sys
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from co2sim.common.errors import NoRoomError
from co2sim.common.units import Bytes, scaled

_SHARE = 0.5
"""Of the free memory: what a simulation may take."""
NEGLIGIBLE: Bytes = 1e7
"""Not worth asking the system for: a tenth of what importing this program took."""
_processes = 1
"""How many simulate at a time, and share."""


def share_memory(processes: int) -> None:
    """Let this process, one of several workers, take its part only."""
    global _processes  # noqa: PLW0603 - a fact about the process
    _processes = processes


def require_memory(needed: Bytes, what: str, advice: str = "") -> None:
    """Raise NoRoomError if `what` needs more than half of the free memory; `advice` ends it."""
    if needed <= NEGLIGIBLE:
        return
    free = free_memory()
    if needed > _SHARE * free / _processes:
        among = f", shared by {_processes} processes" if _processes > 1 else ""
        raise NoRoomError(
            f"{what}: this needs about {scaled(needed, 'B')} of memory, more than half of the"
            f" {scaled(max(free, 0.0), 'B')} that are free{among}{advice}"
        )


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Bytes:
    """Bytes that this process can still take: of the machine, its container, and `ulimit -v`.

    Infinite where the system does not say, as outside Linux.
    """
    return min(_of_the_machine(proc), _of_the_container(cgroup), _of_the_process(proc))


def _of_the_machine(proc: Path) -> Bytes:
    lines = _lines(proc / "meminfo")
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else math.inf


def _of_the_container(cgroup: Path) -> Bytes:
    """Its limit less its use; the cache of files, which it gives back, is not counted."""
    used = _first_number(cgroup / "memory.current")
    if math.isinf(used):
        return math.inf
    stat = dict(line.split() for line in _lines(cgroup / "memory.stat"))
    return _first_number(cgroup / "memory.max") - used + int(stat.get("inactive_file", 0))


def _of_the_process(proc: Path) -> Bytes:
    if sys.platform != "linux":
        return math.inf
    import resource  # noqa: PLC0415 - not everywhere

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    mapped = _first_number(proc / "self" / "statm") * os.sysconf("SC_PAGE_SIZE")
    return math.inf if limit == resource.RLIM_INFINITY else limit - mapped


def _first_number(path: Path) -> float:
    """The number that a file starts with; infinity where there is none, such as "max"."""
    words = " ".join(_lines(path)).split()
    return int(words[0]) if words and words[0].isdecimal() else math.inf


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `most` answers, the last used first.

    What was given must be frozen. It is compared, not hashed: the same object is equal to itself
    without a look inside, where a model has hundreds of numbers, and a schedule thousands of ops.
    With `same` only the same object counts, where others are nearly equal.
    """

    def __init__(self, most: int, *, same: bool = False) -> None:
        """Start without an answer."""
        self._most, self._same = most, same
        self._known: list[tuple[K, V]] = []

    def get(self, key: K) -> V | None:
        """The answer to what is equal to `key`, if it is known."""
        pairs = self._known  # another thread may put a new list in its place
        for index, pair in enumerate(pairs):
            if pair[0] is key or (not self._same and pair[0] == key):
                if index:
                    self._known = [pair, *pairs[:index], *pairs[index + 1 :]]
                return pair[1]
        return None

    def put(self, key: K, answer: V) -> V:
        """Remember an answer, and give it back; the one that was not used for longest may go."""
        self._known = [(key, answer), *self._known[: self._most - 1]]
        return answer


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class _Same(Generic[T]):
    """An object that equals only itself, without comparing or hashing what it holds."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def remembered(objects: int, most: int) -> Callable[[F], F]:
    """Keep the last `most` results of a function of frozen arguments.

    The first `objects` arguments count by identity: frozen objects of many parts take as long to
    hash as the answer takes, and equal ones may differ in fields that do not compare. All others
    are hashable. What raises is not kept.
    """

    def decorate(function: F) -> F:
        @lru_cache(maxsize=most)
        def known(same: tuple[_Same[Any], ...], rest: tuple[Hashable, ...]) -> Any:
            return function(*(argument.value for argument in same), *rest)

        @wraps(function)
        def asked(*arguments: Any) -> Any:
            return known(tuple(map(_Same, arguments[:objects])), arguments[objects:])

        return cast("F", asked)

    return decorate
