"""Streams as threads: one thread per stream, so that no communicator is used by two at once.

The end of an op on a virtual device is known when it starts. Its thread continues at once; only who
sends what the op computes waits until then.
"""

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from co2sim.common.errors import Co2simError
from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Collective, Instance
from co2sim.simulation.trace import Span, Trace
from realrun.errors import MismatchError, RankFailure
from realrun.execute.collectives import alone, carry_out
from realrun.execute.run import Run, common_start, compare
from realrun.execute.world import RankCommunicator, first
from realrun.lab.time_dilation import lasting, now
from realrun.launch.monitor import Place

_GRACE: Seconds = 1.0
"""How long streams get to notice that another one failed."""


class _Stopped(Exception):  # noqa: N818 - no error: another stream failed
    """Ends the thread of a stream after another stream has failed."""


class Threads:
    """An execution on this process's CPU, with collectives over Gloo."""

    def __init__(self, run: Run) -> None:
        self.run, self.world = run, run.world
        self.buffers = run.buffers()
        instances = list(run.schedule.instances(run.rounds))
        self.ends: list[Seconds | None] = [None] * len(instances)
        self.left = len(instances)
        self.spans: list[Span] = []
        self.failure: Co2simError | None = None
        self.streams: dict[str, list[Instance]] = {s: [] for s in run.schedule.streams}
        # Each thread has its own condition: an op that ends wakes those that wait for it.
        self.lock = threading.Lock()
        self.over = threading.Condition(self.lock)
        self.changed = {stream: threading.Condition(self.lock) for stream in self.streams}
        self.awaited: dict[str, int] = {}
        for instance in instances:
            self.streams[instance.op.stream].append(instance)
        self.start = self.last = 0.0

    def trace(self) -> Trace:
        """Execute; the spans of this rank."""
        threads = [
            threading.Thread(target=partial(self._stream, name, instances), name=name, daemon=True)
            for name, instances in self.streams.items()
        ]
        self.start = common_start(self.world)
        self.world.watch.listen(self._stop)
        for thread in threads:
            thread.start()
        with self.over:
            self.over.wait_for(lambda: self.failure or not self.left)
            self._until(self.last, self.over)
        if not self.failure:
            for thread in threads:
                thread.join()
            return self.run.trace(self.spans)
        limit = time.monotonic() + _GRACE
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))
        seen = now() - self.start
        ended = [span for span in self.spans if span.end <= seen]
        self.failure.trace = self.run.trace(ended)  # type: ignore[attr-defined]
        raise self.failure

    def _stop(self, failure: Co2simError) -> None:
        with self.lock:
            self.failure = self.failure or failure
            for condition in (self.over, *self.changed.values()):
                condition.notify()

    def _stream(self, stream: str, instances: Sequence[Instance]) -> None:
        if any(isinstance(instance.op.work, Collective) for instance in instances):
            first()
        free = self.start
        try:
            for instance in instances:
                ready = max(free, self._await(stream, instance.waits))
                free = self._perform(instance, ready)
        except _Stopped:
            pass  # why stands in self.failure, and the main thread raises it

    def _until(self, moment: Seconds, changed: threading.Condition) -> None:
        """Wait until then, or a failure, with the lock."""
        left = moment - now()
        if left > 0:
            changed.wait_for(lambda: self.failure, lasting(left))

    def _begin_at(self, ready: Seconds, stream: str) -> None:
        """Wait until a virtual device has computed what an op needs."""
        if ready > now():
            with self.lock:
                self._until(ready, self.changed[stream])
            if self.failure:
                raise _Stopped

    def _await(self, stream: str, waits: Sequence[int]) -> Seconds:
        """When the last of the awaited ops ended."""
        latest = self.start
        for wait in waits:
            if self.ends[wait] is None:
                with self.lock:
                    self.awaited[stream] = wait
                    self.changed[stream].wait_for(
                        lambda wait=wait: self.failure or self.ends[wait] is not None  # type: ignore[misc]
                    )
            if self.failure:
                raise _Stopped
            latest = max(latest, self.ends[wait] or latest)
        return latest

    def _perform(self, instance: Instance, ready: Seconds) -> Seconds:
        index, turn, op, _ = instance
        if self.failure:
            raise _Stopped
        comm = None
        if isinstance(op.work, Collective):
            comm = self.world.communicator(op.stream, op.work.group)
        if comm or self.run.reports(instance):
            self._begin_at(ready, op.stream)
        self.run.begin(instance)
        place = Place(index, turn, op.name)
        self.world.watch.enter(op.stream, place)
        try:
            if isinstance(op.work, Collective):
                end = self._communicate(instance, comm, ready, place)
            else:
                end = self.run.kernels.compute(instance, ready) or now()
        except (_Stopped, RankFailure, MismatchError) as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is sent to all
            self._give_up(self.world.watch.raised(place, error))
        span = Span(self.world.rank, turn, op.name, op.stream, ready - self.start, end - self.start)
        self.world.watch.exit(op.stream)
        with self.lock:
            self.spans.append(span)
            self.ends[index] = end
            self.last = max(self.last, end)
            self.left -= 1
            for stream, wait in self.awaited.items():
                if wait == index:
                    self.changed[stream].notify()
            if not self.left:
                self.over.notify()
        return end

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, Co2simError):
            self._stop(error)
        raise _Stopped from error

    def _communicate(
        self, instance: Instance, comm: RankCommunicator | None, ready: Seconds, place: Place
    ) -> Seconds:
        """Carry out a collective; when it ends. Of a rank alone that is at once: nothing is sent.

        An error of Gloo means that a rank is missing; find out which.
        """
        op, kernels = instance.op, self.run.kernels
        assert isinstance(op.work, Collective)
        buffers = self.buffers[op.name]
        kernels.fill(instance, buffers.given)
        if comm is None:
            alone(buffers)
            kernels.drain(instance, buffers.taken)
            return ready
        try:
            if self.run.check:
                compare(instance, comm)
            carry_out(op.work, buffers, comm, self.world.deadline)
        except RuntimeError as error:
            if self.failure:
                raise _Stopped from error
            raise self.world.watch.lost(place, comm.members, error) from error
        end = now()
        kernels.drain(instance, buffers.taken)
        return end


@contextmanager
def short_collections() -> Iterator[None]:
    """Within, the garbage collector leaves alone what is there already: modules, above all.

    Looking through these takes 0.1 to 0.5 s, at another moment on each rank: all others wait.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
