"""The store of torch.distributed, asked so that every call ends, and signs of life in it.

A `TCPStore` waits for ever for a server that is stopped, so that a thread asks it. Once a second
the same thread writes a sign of life, and reads notes. Nothing is concluded from signs while
training continues: who is silent matters only where a collective has failed or took too long.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from co2sim.common.units import Seconds

Answer = TypeVar("Answer")

SIGN_INTERVAL: Seconds = 1.0
"""Between two signs of life of a rank."""

_ANSWER_LIMIT: Seconds = 5.0
"""How long a store may take to answer; it does so in less than 1 ms mostly."""


class StoreError(RuntimeError):
    """The store is gone, or does not answer."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life: the number of the sign, local steps, and what this rank waits for, if so."""

    number: int
    steps: int
    waits_for: str


class RankStore:
    """A part of the store of torch.distributed, and the thread that asks it.

    `gone`: the store has ended. `signs` counts the signs of life that this rank has written.
    """

    def __init__(
        self,
        prefix: str,
        sign: Callable[[], tuple[int, str]],
        read: Callable[[PrefixStore], None],
    ) -> None:
        """Once a second the thread writes what `sign` gives (see Sign), and calls `read`."""
        default = _get_default_store()
        self._store = PrefixStore(prefix, default.clone())  # type: ignore[attr-defined] # of PrefixStore
        self.rank, self.gone, self.signs = dist.get_rank(), False, 0
        self._sign, self._read = sign, read
        self._over_network = isinstance(_underlying(default), TCPStore)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.held_by_rank_0 = self._over_network and not agent
        self._calls: SimpleQueue[tuple[Callable[[PrefixStore], Any], Future[Any]] | None]
        self._calls, self._unanswered = SimpleQueue(), Future[Any]()
        self._unanswered.set_result(None)
        self._thread = threading.Thread(target=self._serve, name="rank store", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[PrefixStore], Answer]) -> Answer:
        """What `call` gives. Raises StoreError."""
        if self.gone:
            raise StoreError("it is gone")
        if not self._unanswered.done():
            raise StoreError("it does not answer")
        answer: Future[Answer] = Future()
        self._calls.put((call, answer))
        try:
            return answer.result(_ANSWER_LIMIT)
        except TimeoutError as error:
            self._unanswered = answer
            raise StoreError("it does not answer") from error
        except RuntimeError as error:
            raise StoreError("it is gone") from error

    def stop(self) -> None:
        """No call comes any more."""
        self.gone = True
        self._calls.put(None)

    def close(self) -> None:
        """End the thread: none may be within a call of torch where the interpreter ends."""
        self.stop()
        self._thread.join(SIGN_INTERVAL)

    def signs_of(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """The last sign of life of each rank that has given one. Raises StoreError."""

        def read(store: PrefixStore) -> dict[int, Sign]:
            there = [rank for rank in ranks if store.check([f"sign {rank}"])]
            return {rank: Sign(*json.loads(store.get(f"sign {rank}"))) for rank in there}

        return self.ask(read)

    def _serve(self) -> None:
        due = time.monotonic()
        while True:
            try:
                asked = self._calls.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                due = time.monotonic() + SIGN_INTERVAL
                try:
                    self._each_second()
                except RuntimeError:
                    self.gone = True
                continue
            if asked is None:
                return
            call, answer = asked
            try:
                answer.set_result(call(self._store))
            except Exception as error:  # noqa: BLE001 - it is raised where the question was asked
                self.gone |= isinstance(error, RuntimeError)
                answer.set_exception(error)

    def _each_second(self) -> None:
        if self.gone:
            return
        if self._over_network:  # a FileStore would grow with every sign
            text = json.dumps([self.signs + 1, *self._sign()])
            self._store.set(f"sign {self.rank}", text)
        self._read(self._store)
        self.signs += 1


def _underlying(store: Any) -> Any:
    """The store below prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


_WORLDS: WeakKeyDictionary[dist.ProcessGroup, list[int]] = WeakKeyDictionary()
"""Of each default group of this process: its number, and how often it was numbered."""


def common_prefix() -> str:
    """A new part of the store for all ranks of torch.distributed. All call this in the same order.

    Neither an attempt of torchrun before this one nor a default group that was destroyed has it.
    """
    world = dist.group.WORLD
    assert world is not None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if world not in _WORLDS:
        count = _get_default_store().add(f"realrun/{attempt}/worlds", 1)
        _WORLDS[world] = [(count - 1) // world.size(), 0]
    number, calls = _WORLDS[world]
    _WORLDS[world][1] += 1
    return f"realrun/{attempt}/{number}/{calls}"
