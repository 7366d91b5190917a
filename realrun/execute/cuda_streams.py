"""Streams as CUDA streams: the host issues all ops, and events on the GPU make them wait."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from co2sim.common.errors import Co2simError
from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Collective, Compute, Instance
from co2sim.simulation.trace import Span, Trace
from realrun.execute.collectives import Buffers, alone, launch
from realrun.execute.kernels import Synthetic
from realrun.execute.run import Run, common_start, compare
from realrun.lab.time_dilation import now
from realrun.launch.monitor import Place

_POLL: Seconds = 0.0005


@dataclass(frozen=True, slots=True)
class _Issued:
    """An op on its stream: events before and after it, of our own.

    PyTorch's timing of NCCL work (TORCH_NCCL_ENABLE_TIMING) is reported to prevent overlap.
    """

    instance: Instance
    start: torch.cuda.Event
    end: torch.cuda.Event


@triton.jit(do_not_specialize=["nanoseconds"])
def hold_kernel(nanoseconds: tl.int64) -> None:
    """Read the GPU's timer until so much time has passed: unlike cycles, at any clock rate."""
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()


def hold(seconds: Seconds) -> None:
    """Hold the current stream."""
    hold_kernel[(1,)](round(seconds * 1e9), num_warps=1, enable_fp_fusion=False)


class GpuSleep(Synthetic):
    """Hold the stream, by a kernel that looks at the GPU's timer, as `Sleep` holds a thread."""

    def __init__(self, seconds: Mapping[Compute, Seconds]) -> None:
        """Compile the kernel, which takes longer than it."""
        self._seconds = seconds
        hold(0.0)
        torch.cuda.synchronize()

    def compute(self, instance: Instance, ready: Seconds) -> None:
        """Wait on the stream."""
        del ready
        work = instance.op.work
        assert isinstance(work, Compute)
        hold(self._seconds[work])


def run_on_gpu(run: Run) -> Trace:
    """Execute on this process's GPU, with collectives over NCCL."""
    world = run.world
    buffers = run.buffers()
    streams = {name: torch.cuda.Stream(world.device) for name in run.schedule.streams}
    zero, start = _origin(run)
    issued: list[_Issued] = []
    spans: list[Span] = []
    try:
        for instance in run.schedule.instances(run.rounds):
            run.begin(instance)
            op = instance.op
            place = Place(instance.number, instance.round, op.name)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = streams[op.stream]
            with torch.cuda.stream(stream):
                for wait in instance.waits:
                    stream.wait_event(issued[wait].end)
                before.record()
                if isinstance(op.work, Collective):
                    _communicate(run, instance, place, buffers)
                else:
                    try:
                        run.kernels.compute(instance, now())
                    except Exception as error:
                        raise world.watch.raised(place, error) from error
                after.record()
            issued.append(_Issued(instance, before, after))
        _drain(run, issued, spans, zero, start)
    except Co2simError as error:
        error.trace = run.trace(spans)  # type: ignore[attr-defined]
        raise
    return run.trace(spans)


def _communicate(run: Run, instance: Instance, place: Place, buffers: dict[str, Buffers]) -> None:
    op = instance.op
    assert isinstance(op.work, Collective)
    pair = buffers[op.name]
    run.kernels.fill(instance, pair.given)
    comm = run.world.communicator(op.stream, op.work.group)
    if comm is None:
        alone(pair)
    else:
        try:
            if run.check:
                compare(instance, comm)
            launch(op.work, pair, comm).wait()  # the stream waits, not the host
        except RuntimeError as error:
            raise run.world.watch.lost(place, comm.members, error) from error
    run.kernels.drain(instance, pair.taken)


def _origin(run: Run) -> tuple[torch.cuda.Event, Seconds]:
    """An event, and what the common clock showed, in seconds since the common start, at it."""
    torch.cuda.synchronize(run.world.device)
    start = common_start(run.world)
    zero = torch.cuda.Event(enable_timing=True)
    zero.record()
    zero.synchronize()
    return zero, now() - start


def _drain(
    run: Run, issued: list[_Issued], spans: list[Span], zero: torch.cuda.Event, offset: Seconds
) -> None:
    """Wait for every op in turn, none longer than the deadline, and read its events."""
    for issue in issued:
        limit = time.monotonic() + run.world.deadline
        op, turn = issue.instance.op, issue.instance.round
        place = Place(issue.instance.number, turn, op.name)
        run.world.watch.enter(op.stream, place)
        while not issue.end.query():
            if run.world.watch.failure:
                raise run.world.watch.failure
            if time.monotonic() > limit:
                group = getattr(op.work, "group", None)
                members = group.members(run.world.rank, run.world.layout) if group else ()
                raise run.world.watch.lost(place, members, TimeoutError("it did not end"))
            time.sleep(_POLL)
        run.world.watch.exit(op.stream)
        begin, end = (zero.elapsed_time(event) / 1e3 + offset for event in (issue.start, issue.end))
        spans.append(Span(run.world.rank, turn, op.name, op.stream, begin, end))
