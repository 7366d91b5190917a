"""The mean of flat fp32 vectors over workers, asynchronously, in buckets.

On the wire, and what it costs a rank among n, for S bytes of fp32:

- "fp32": ring all-reduce, 2 (n-1)/n S bytes;
- "bf16": the rounded vector, summed in bf16; half of that;
- "int8", "int4": blocks of 2048 elements with one fp32 scale. Each rank quantizes, exchanges
  parts with all others (all_to_all), sums in fp32 what it got, quantizes the mean and sends it to
  all (all_gather): two roundings of at most half a scale, and a quarter or an eighth of the bytes
  of fp32. The chain runs on a thread that owns the communicator, beside training; on a GPU, on its
  own stream. How much both roundings took off travels along, in 8 bytes of each bucket.

All ranks get the same bits, since every element is summed on one of them only.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from co2sim.common.units import Seconds
from co2sim.common.validation import above
from realrun.algorithms.departures import DepartureLog, together
from realrun.algorithms.process_groups import (
    DEADLINE,
    Ended,
    Wait,
    Wire,
    wait_for,
    wait_until,
    wire_of,
)
from realrun.algorithms.quantization import dequantize, quantize, sum_rows
from realrun.algorithms.quantization_format import (
    Bits,
    Quantized,
    from_wire,
    to_wire,
    wire_bytes,
)
from realrun.torch_compat import all_gather_single

BUCKET_MIB = 25.0
"""As in DistributedDataParallel: large enough for full bandwidth, small enough to pipeline."""

BLOCK = 2048
"""Quantized elements that share a scale; as in co2sim's `diloco`."""

_BITS: dict[Wire, Bits] = {"int8": 8, "int4": 4}
_ERROR_BYTES = 8
"""Two numbers of fp32 behind the second message of a bucket: what its roundings took off."""

_PART = 32 * BLOCK
"""Elements of a row whose rounding errors are summed at once."""


@dataclass(eq=False, slots=True)
class PendingAverage:
    """An average under way. `vector` must not be touched until `wait` has returned.

    `pieces`: how to wait for each part that is left, and whether it has ended. Launched after local
    step `step`: who left before will not come. It is the mean of `members` ranks; None: of all.
    `largest`: of the elements of this rank's; `blame`: whose are not finite.
    `errors`: for each bucket two sums of squares (see `rounding`), once it has arrived.
    """

    round: int
    vector: Tensor
    pieces: list[tuple[Wait, Ended]] = field(default_factory=list)
    finish: Callable[[], None] = lambda: None
    deadline: Seconds = DEADLINE
    notices: DepartureLog | None = None
    step: int = 0
    members: int | None = None
    largest: Tensor | None = None
    blame: str = ""
    errors: list[Tensor] = field(default_factory=list)

    def rounding(self) -> tuple[float, float]:
        """What quantization took off, once it was waited for: the same on all ranks.

        The mean over ranks of |v_i - sent_i|^2, and |mean of what was sent - what all got|^2. So
        the vector is off by at most the sum of their roots (Jensen), both 0 where nothing was
        quantized.
        """
        if not self.errors:
            return 0.0, 0.0
        sent, mean = torch.stack([error.double() for error in self.errors]).sum(0).tolist()
        return sent, mean

    def arrived(self) -> bool:
        """Whether nothing is left to wait for, as the host sees it."""
        return all(ended() for _, ended in self.pieces)

    def wait(self) -> None:
        """Wait until `vector` holds the mean. Raises RankFailure."""
        if not self.pieces:
            return
        what, limit = f"the average of round {self.round}", time.monotonic() + self.deadline
        notices, look = self.notices, None
        if notices:
            look = partial(notices.check, what, self.step, round_=self.round)
        with together(notices, what, self.deadline, round_=self.round):
            while self.pieces:
                wait_until(limit, *self.pieces[0], look)
                self.pieces.pop(0)
        self.finish()


@dataclass(frozen=True, slots=True)
class Transport:
    """How averages travel. Raises OptionError for what is out of range.

    `dtype`: "fp32", "bf16", "int8", "int4", or torch.bfloat16. `bucket_mib`: MiB of fp32 in one
    collective, above 0. `pg_options`: of the communicators over NCCL, such as
    ProcessGroupNCCL.Options of few CTAs (`config.max_ctas`), or with `is_high_priority_stream`.
    """

    dtype: Wire | torch.dtype = "fp32"
    bucket_mib: float = BUCKET_MIB
    pg_options: Any = None

    def __post_init__(self) -> None:
        wire_of(self.dtype)
        above("bucket_mib", self.bucket_mib, 0)

    @property
    def wire(self) -> Wire:
        """The type, by name."""
        return wire_of(self.dtype)

    @property
    def bucket(self) -> int:
        """Bytes of fp32 in one collective."""
        return int(self.bucket_mib * 2**20)


class Stopwatch:
    """How long training stands still: this thread, or the current stream of a GPU.

    Nothing here waits for the GPU, whose host continues to issue work.
    """

    def __init__(self, device: torch.device) -> None:
        """Start. Called on the stream of the training."""
        self._events = (_event(), _event()) if device.type == "cuda" else None
        self._start, self._seconds = time.perf_counter(), 0.0
        if self._events:
            self._events[0].record()

    def stands(self) -> bool:
        """Whether training has come here, and does nothing else by now."""
        return self._events is None or _happened(self._events[0])

    def stop(self) -> None:
        """Stop. Called on the stream of the training."""
        self._seconds = time.perf_counter() - self._start
        if self._events:
            self._events[1].record()

    def is_known(self) -> bool:
        """Whether `seconds` is known without waiting."""
        return self._events is None or _happened(self._events[1])

    def seconds(self) -> Seconds:
        """Seconds between start and stop."""
        if self._events is None:
            return self._seconds
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@contextmanager
def beside_training(
    flight: PendingAverage, after: torch.cuda.Event | None = None
) -> Iterator[None]:
    """Within, what a GPU does waits for the average and `after`, not for the steps before.

    So the host may read a number without waiting for these. Afterwards, training waits for it.
    An average that was waited for already, or was loaded, belongs to the stream of the training.
    """
    device = flight.vector.device
    if device.type != "cuda" or not flight.pieces:
        yield
        return
    training, stream = torch.cuda.current_stream(device), _side_stream(device)
    if after:
        stream.wait_event(after)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        training.wait_stream(stream)


class Average:
    """Means over the ranks of `group`, which nothing else uses; None: this rank is alone.

    `sent` counts the bytes that this rank sends to others: an all-reduce goes around the ring, an
    exchange is pairwise; vectors are cut into n equal parts, rounded up.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        wire: Wire,
        deadline: Seconds,
        bucket: int,
        notices: DepartureLog | None = None,
    ) -> None:
        """`bucket` is in bytes of fp32. `notices` say who has left, also while one waits."""
        self._notices = notices
        self._group, self._wire, self._deadline = group, wire, deadline
        self._elements, self._bits = max(1, bucket // 4), _BITS.get(wire, 8)
        self._size = group.size() if group else 1
        self._owner: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self.quantizes = wire in _BITS
        self.present: Callable[[], bool] | None = None
        """Whether this rank counts; None: all do."""
        self._counting: dist.ProcessGroup | None = None
        self.sent = 0

    def weigh(self, present: Callable[[], bool], group: dist.ProcessGroup | None) -> None:
        """From now on, average over the ranks that are `present` at a launch; counted in `group`.

        All ranks call this, between the same two launches; nothing else may use `group` then.
        """
        self.present, self._counting = present, group

    def launch(self, vector: Tensor, round_: int) -> PendingAverage:
        """Start averaging `vector` in place, for round `round_`."""
        if self.present is None or self._counting is None:
            return self._launched(vector, round_)
        here = self.present()
        if not here:
            vector.zero_()
        flight = self._launched(vector, round_)
        count = torch.tensor([float(here)], dtype=torch.float64, device="cpu")
        work = dist.all_reduce(count, group=self._counting, async_op=True)
        assert work is not None
        flight.pieces.append((partial(wait_for, work), work.is_completed))
        mean = flight.finish

        def finish() -> None:
            mean()
            flight.members = int(count)
            if flight.members:
                more = self._size / flight.members
                flight.vector.mul_(more)
                flight.errors = [error.double() * more**2 for error in flight.errors]

        flight.finish = finish
        return flight

    def _launched(self, vector: Tensor, round_: int) -> PendingAverage:
        flight = PendingAverage(round_, vector, deadline=self._deadline)
        if self._notices:
            flight.notices, flight.step = self._notices, self._notices.steps()
        if self._group is None or not len(vector):
            return flight
        if self.quantizes:
            for bucket in torch.split(vector, self._elements):
                flight.pieces.append(self._submit(bucket, flight.errors))
            return flight
        sent = vector if self._wire == "fp32" else vector.to(torch.bfloat16)
        for bucket in torch.split(sent, self._elements):
            work = dist.all_reduce(bucket, group=self._group, async_op=True)
            assert work is not None
            flight.pieces.append((partial(wait_for, work), work.is_completed))
            part = -(-len(bucket) // self._size)
            self.sent += 2 * (self._size - 1) * part * bucket.element_size()

        def finish() -> None:
            if sent is not vector:
                vector.copy_(sent)
            vector.div_(self._size)

        flight.finish = finish
        return flight

    def _submit(self, bucket: Tensor, errors: list[Tensor]) -> tuple[Wait, Ended]:
        """Hand a bucket to the thread that owns the group; gives how to wait, and how to ask."""
        if self._owner is None:
            self._owner = ThreadPoolExecutor(1, thread_name_prefix="average")
            self._stream = _stream(bucket.device) if bucket.is_cuda else None
        part = -(-len(bucket) // self._size)
        self.sent += (self._size - 1) * (2 * wire_bytes(part, self._bits, BLOCK) + _ERROR_BYTES)
        if self._stream is None:
            sent = self._owner.submit(self._exchange, bucket, part, errors)
            return sent.result, sent.done
        filled, stream = torch.cuda.current_stream(bucket.device).record_event(), self._stream

        def beside() -> torch.cuda.Event:
            with torch.cuda.device(bucket.device), torch.cuda.stream(stream):
                stream.wait_event(filled)
                self._exchange(bucket, part, errors)
                ended: torch.cuda.Event = stream.record_event()
                return ended

        done = self._owner.submit(beside)

        def wait(seconds: Seconds) -> None:
            event = done.result(seconds)
            torch.cuda.current_stream(bucket.device).wait_event(event)

        def arrived() -> bool:
            return done.done() and (done.exception() is not None or _happened(done.result()))

        return wait, arrived

    def _exchange(self, bucket: Tensor, part: int, errors: list[Tensor]) -> None:
        """`bucket` <- the mean of all ranks' buckets; NaN and infinities spoil their block.

        To `errors` goes what both roundings took off, summed over all parts.
        """
        assert self._group is not None
        n, bits = self._size, self._bits
        rows = bucket.new_zeros(n * part)
        rows[: len(bucket)].copy_(bucket)
        quantized = quantize(rows.view(n, part), bits, BLOCK)
        sent, first = to_wire(quantized), _taken_off(rows.view(n, part), quantized, bits) / n
        taken = torch.empty_like(sent)
        dist.all_to_all_single(taken.view(-1), sent.view(-1), group=self._group)
        mean = sum_rows(from_wire(taken, bits, BLOCK, part), bits, BLOCK, part).div_(n)
        quantized = quantize(mean, bits, BLOCK)
        squares = torch.stack((first, _taken_off(mean, quantized, bits))).view(torch.uint8)
        taken = taken.new_empty(n, taken.shape[1] + _ERROR_BYTES)
        mine = torch.cat((to_wire(quantized), squares))
        all_gather_single(taken.view(-1), mine, group=self._group)
        off = taken[:, -_ERROR_BYTES:].clone(memory_format=torch.contiguous_format)
        errors.append(off.view(torch.float32).double().sum(0))
        codes, scales = from_wire(taken[:, :-_ERROR_BYTES], bits, BLOCK, part)
        bucket.copy_(dequantize(codes, scales, bits, BLOCK, part).view(-1)[: len(bucket)])

    def close(self) -> None:
        """End the thread. No average may be under way."""
        if self._owner is not None:
            self._owner.shutdown()


def _taken_off(rows: Tensor, quantized: Quantized, bits: Bits) -> Tensor:
    """|rows - what is sent for them|^2; on a CPU in parts that fit into its cache."""
    size = rows.shape[-1] if rows.is_cuda else _PART
    squares = []
    for first in range(0, rows.shape[-1], size):
        part = rows[..., first : first + size]
        end = first + part.shape[-1]
        codes = quantized.codes[..., first * bits // 8 : -(-end * bits // 8)]
        scales = quantized.scales[..., first // BLOCK : -(-end // BLOCK)]
        rounded = dequantize(codes, scales, bits, BLOCK, part.shape[-1])
        off: Tensor = torch.linalg.vector_norm(rounded.sub_(part))
        squares.append(off.square())
    return torch.stack(squares).sum()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _happened(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream, which is kept: no two averages are used at once."""
    return _stream(device)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
