"""The mean of flat fp32 vectors over workers, asynchronously, in buckets."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from co2sim.units import Seconds
from realrun.algorithms.workers import lost

Wire: TypeAlias = Literal["fp32", "bf16", "int8"]

WIRES = ("fp32", "bf16")

BUCKET_MIB = 25.0
"""As in DistributedDataParallel: large enough for full bandwidth, small enough to pipeline."""


@dataclass(eq=False, slots=True)
class Flight:
    """An average under way. `vector` must not be touched until `wait` has returned."""

    round: int
    vector: Tensor
    waits: list[Callable[[float], object]] = field(default_factory=list)
    finish: Callable[[], None] = lambda: None
    deadline: float = 60.0

    def wait(self) -> float:
        """Wait until `vector` holds the mean; gives the seconds waited, 0 if it was there.

        On a GPU these are the seconds that its stream stood still. Raises RankFailure.
        """
        if not self.waits:
            return 0.0
        clock = Stopwatch(self.vector.device)
        limit = time.monotonic() + self.deadline
        try:
            while self.waits:
                self.waits[0](max(0.001, limit - time.monotonic()))
                self.waits.pop(0)
        except (RuntimeError, TimeoutError) as error:
            what = f"the average of round {self.round}"
            raise lost(what, error, self.deadline, round=self.round) from error
        waited = clock.seconds()
        self.finish()
        return waited


class Stopwatch:
    """Seconds spent here: of this thread, or of the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Start."""
        self._start = time.perf_counter()
        self._event = _event() if device.type == "cuda" else None
        if self._event:
            self._event.record()

    def seconds(self) -> float:
        """Seconds since the start. A GPU is waited for: its next use needs the result anyway."""
        if not self._event:
            return time.perf_counter() - self._start
        end = _event()
        end.record()
        end.synchronize()
        return float(self._event.elapsed_time(end)) / 1e3


class Average:
    """Means over the ranks of `group`, which nobody else uses; None: this rank is alone.

    On the wire: "fp32"; "bf16", rounded, and summed in bf16. `sent` counts the bytes that this
    rank sends, by the ring: 2 (n-1) equal parts (rounded up) for an all-reduce.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, wire: Wire, deadline: float, bucket: int
    ) -> None:
        """`bucket` is in bytes of fp32."""
        self._group, self._wire, self._deadline = group, wire, deadline
        self._elements = max(1, bucket // 4)
        self._size = group.size() if group else 1
        self.sent = 0

    def launch(self, vector: Tensor, number: int) -> Flight:
        """Start averaging `vector` in place, for round `number`."""
        flight = Flight(number, vector, deadline=self._deadline)
        if self._group is None or not len(vector):
            return flight
        sent = vector if self._wire == "fp32" else vector.to(torch.bfloat16)
        for bucket in torch.split(sent, self._elements):
            work = dist.all_reduce(bucket, group=self._group, async_op=True)
            assert work is not None
            flight.waits.append(partial(_wait, work))
            part = -(-len(bucket) // self._size)
            self.sent += 2 * (self._size - 1) * part * bucket.element_size()

        def finish() -> None:
            if sent is not vector:
                vector.copy_(sent)
            vector.div_(self._size)

        flight.finish = finish
        return flight

    def close(self) -> None:
        """Nothing is kept."""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _wait(work: dist.Work, seconds: Seconds) -> None:
    work.wait(timedelta(seconds=seconds))
