"""The executor: schedules on real processes, over Gloo."""

import gc
import itertools
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import on_ranks, ranked
from tiny import VARIANTS

from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import (
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Instance,
    Kind,
    Op,
    Schedule,
)

pytest.importorskip("torch")

import torch
from local_problem import said
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from realrun.execute import collectives, executor
from realrun.execute.collectives import allocate
from realrun.execute.executor import execute
from realrun.execute.kernels import Operands, Sleep, Synthetic, burn
from realrun.execute.run import common_start, compare
from realrun.execute.world import Clock, RankCommunicator, World

dist = pytest.mark.dist


def test_the_common_start_is_read_from_the_clock_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the system holds up between two readings would shift all of its spans."""
    readings = itertools.count(100.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(readings))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    world: Any = SimpleNamespace(clock=Clock(7.0), together=lambda _: nullcontext())
    assert common_start(world) == 100.0


@dist
@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_collectives_give_what_a_single_process_computes(nproc: int) -> None:
    """Every kind, type and size, uneven ones too, on every rank."""
    on_ranks("collectives", nproc)


@dist
@pytest.mark.parametrize(
    ("nproc", "per_node"), [pytest.param(2, 1, marks=pytest.mark.nightly), (2, 2), (4, 2)]
)
def test_every_strategy_runs_and_breaks_no_rule(nproc: int, per_node: int) -> None:
    """Unchanged schedules, on one node, two nodes, and two nodes of two, in checking mode."""
    variants = [text for text in VARIANTS if "tau=1)" not in text]
    if nproc == 4:
        variants = [text for text in variants if "node" in text or "zeropp" in text]
    on_ranks("all_strategies", nproc, gpus_per_node=per_node, variants=variants)


class Recursion(Synthetic):
    """x <- x + rank + 1 per step; every round the sum of all x, one round late, is added."""

    def __init__(self, rank: int) -> None:
        self.x, self.sum, self.rank, self.buffer = 0.0, 0.0, rank, 0.0
        self.history: list[float] = []

    def compute(self, instance: Instance, ready: float) -> None:
        """One step, or what closes a round."""
        del ready
        if instance.op.name == "step":
            self.x += self.rank + 1
        else:
            self.x += self.sum
            self.buffer = self.x  # the average starts now; the next step does not wait for it
            self.history.append(self.x)

    def fill(self, instance: Instance, given: torch.Tensor) -> None:
        """Send what the last outer step left."""
        del instance
        given.fill_(self.buffer)

    def drain(self, instance: Instance, taken: torch.Tensor) -> None:
        """Take the sum, slowly."""
        del instance
        time.sleep(0.01)
        self.sum = taken[0].item()


def averages(elements: int) -> Collective:
    """An all-reduce of all ranks."""
    return Collective(Kind.ALL_REDUCE, "x", elements, DType.FP32, WORLD)


@ranked(2)
def test_kernels_compute_what_the_exact_recursion_says(world: World) -> None:
    """A sum launched in one round is used in the next, and nothing is used too early."""
    body = (
        Op("step", Compute("step", 1.0), "compute"),
        Op("outer", Compute("outer", 1.0), "compute", (After("average", 1),)),
        Op("average", averages(3), "comm", (After("outer"),)),
    )
    kernels = Recursion(world.rank)
    execute(Schedule("late", body), kernels, 5, world)
    x, late, history = [0.0, 0.0], 0.0, []
    for _ in range(5):
        x = [value + rank + 1 + late for rank, value in enumerate(x)]
        history.append(x)
        late = sum(x)
    assert kernels.history == [values[world.rank] for values in history]


@ranked(2)
def test_streams_run_at_the_same_time_and_waits_are_kept(world: World) -> None:
    """Two naps of 0.2 s on two streams end together, and the collective starts where they end.

    That of a rank alone ends there, too, however late the host wakes up: nothing is sent.
    """
    nap = Compute("nap", 1.0)
    body = (
        Op("a", nap, "one"),
        Op("b", nap, "two"),
        Op("c", averages(10), "comm", (After("a"), After("b"))),
        Op("d", replace(averages(10), group=PEERS), "alone", (After("a"),)),
    )
    trace = execute(Schedule("two", body), Sleep({nap: 0.2}), 2, world)
    first = {span.op: (span.start, span.end) for span in trace.spans if not span.round}
    assert first["a"] == first["b"] == pytest.approx((0.0, 0.2))
    assert first["c"][0] == pytest.approx(0.2)
    assert first["c"][1] > 0.2
    assert first["d"] == pytest.approx((0.2, 0.2))


class _Copied(TorchDispatchMode):
    """Counts the bytes that are read and written by copies."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if function is torch.ops.aten.copy_.default:
            self.bytes += 2 * args[0].nbytes
        return function(*args, **(kwargs or {}))


def test_a_flops_kernel_does_the_work_that_it_states() -> None:
    """Counted by torch itself: as many FLOP, but for part of one matrix row."""
    for flops in [1e6, 1.2345e9]:
        operands = Operands.of(torch.device("cpu"), torch.float32)
        counter = FlopCounterMode(display=False)
        with counter:
            burn(Compute("forward", flops, flops / 100), operands)
        assert counter.get_total_flops() == pytest.approx(flops, abs=2 * 512 * 512)


def test_a_flops_kernel_moves_the_bytes_that_it_states() -> None:
    """Work with little arithmetic reads and writes memory instead."""
    for size in [1e3, 1.5e8]:
        operands = Operands.of(torch.device("cpu"), torch.float32)
        with _Copied() as counter:
            burn(Compute("optimizer", size / 4, size), operands)
        assert counter.bytes == pytest.approx(size, abs=2)


@ranked(2)
def test_ranks_with_different_schedules_are_told_so(world: World) -> None:
    """Before anything is launched, and in words that show the difference."""
    schedule = Schedule("s", (Op("average", averages(10 + world.rank), "comm"),))
    heard = said(lambda: execute(schedule, Sleep({}), 1, world))
    assert heard.startswith("MismatchError: rank 1 has another run than rank 0")
    assert "11 fp32" in heard
    assert "10 fp32" in heard


@ranked(2)
def test_checking_mode_names_who_launches_something_else(world: World) -> None:
    """Both sides hear what either was about to do."""
    schedule = Schedule("s", tuple(Op(name, averages(10), "comm") for name in ("average", "again")))
    world.connect(schedule)
    at = world.communicator("comm", WORLD)
    assert at is not None
    instances = list(schedule.instances(1))
    compare(instances[0], at)
    heard = said(lambda: compare(instances[world.rank], at))
    assert heard.startswith("MismatchError: rank 1 is about to run 'again' of round 0")
    assert "rank 0 'average' of round 0" in heard


def test_all_waits_of_a_collective_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 s, 3 are left after 2; a message that is late is still asked for once."""
    now, waits = 100.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    message: Any = SimpleNamespace(wait=lambda limit: waits.append(limit.total_seconds()))
    exchange = collectives.Exchange(SimpleNamespace(), 5.0)  # type: ignore[arg-type]
    for now in (100.0, 102.0, 110.0):  # noqa: B007 - what the clock shows
        exchange.wait(message)
    assert waits == [5.0, 3.0, 0.001]


@given(
    members=st.integers(1, 9),
    elements=st.integers(1, 100_003),
    kind=st.sampled_from(Kind),
    dtype=st.sampled_from([(DType.FP32, 0), (DType.BF16, 0), (DType.INT8, 64), (DType.INT4, 64)]),
)
@example(members=3, elements=1, kind=Kind.ALL_GATHER, dtype=(DType.INT4, 64))
@example(members=7, elements=5, kind=Kind.REDUCE_SCATTER, dtype=(DType.BF16, 0))
@example(members=4, elements=4096, kind=Kind.ALL_TO_ALL, dtype=(DType.INT8, 64))
@example(members=1, elements=5, kind=Kind.BROADCAST, dtype=(DType.FP32, 0))
def test_buffers_hold_the_bytes_that_the_schedule_states(
    members: int, elements: int, kind: Kind, dtype: tuple[DType, int]
) -> None:
    """Int4 half a byte, scales included; at most one element, or byte, more per member."""
    work = Collective(kind, "x", elements, dtype[0], WORLD, dtype[1])
    summed = kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE}
    if summed and dtype[1]:
        with pytest.raises(OptionError, match="fp32, fp16, bf16"):
            allocate(work, members, torch.device("cpu"))
        return
    buffers = allocate(work, members, torch.device("cpu"))
    whole = max(len(one) * one.element_size() for one in (buffers.given, buffers.taken))
    slack = members * (buffers.given.element_size() if summed else 1)
    assert work.bytes <= whole < work.bytes + slack


def test_what_comes_in_is_kept_in_the_same_memory() -> None:
    """New memory would be paged in while bytes arrive. It grows, and has the type that is asked."""
    at = RankCommunicator(None, (0, 1), 0)  # type: ignore[arg-type]
    first = at.room(100, torch.float32)
    assert (first.dtype, len(first)) == (torch.float32, 100)
    again = at.room(150, torch.bfloat16)
    assert (again.dtype, len(again)) == (torch.bfloat16, 150)
    assert again.data_ptr() == first.data_ptr()
    assert len(at.room(1000, torch.float32)) == 1000
    assert not len(at.room(0, torch.float32))


def test_an_exchange_announces_what_it_takes_before_it_gives() -> None:
    """Gloo's announcement of a receive waits behind what the same rank sends to the same member.

    So all receives of a segment are posted before its sends: else three ranks that exchanged
    400 kB each took 1.6 times as long as their links need.
    """
    posted: list[tuple[str, int]] = []

    def post(what: str, _tensors: object, _member: int, tag: int) -> SimpleNamespace:
        posted.append((what, tag))
        return SimpleNamespace(wait=lambda _: None)

    group: Any = SimpleNamespace(send=partial(post, "send"), recv=partial(post, "receive"))
    source = torch.zeros(3 * (collectives.SEGMENT_BYTES + 1), dtype=torch.uint8)
    at = RankCommunicator(group, (0, 1, 2), 1)
    collectives.all_to_all(source, torch.zeros_like(source), at, 5.0)
    segment = ["receive", "receive", "send", "send"]
    assert [what for what, _ in posted] == segment * 2
    assert [tag for _, tag in posted] == [0] * 4 + [1] * 4


def test_the_garbage_collector_leaves_alone_what_a_run_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look through all modules takes 0.1 s and more, on one rank at a time: all others wait."""
    frozen: list[int] = []

    def trace() -> Any:
        frozen.append(gc.get_freeze_count())
        return SimpleNamespace(violations=lambda *_, **__: ())

    monkeypatch.setattr(executor, "Threads", lambda _: SimpleNamespace(trace=trace))
    world: Any = Mock(device=torch.device("cpu"))
    executor.execute(Schedule("nothing", (Op("a", Compute("a", 1.0), "s"),)), Sleep({}), 1, world)
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


@given(st.integers(1, 8), st.integers(1, 20))
def test_all_segments_are_on_their_way_at_once(steps: int, count: int) -> None:
    """Every segment makes every step once, in order; a segment ends before one that is a ring on.

    So members end together, and not those behind a slow link when two thirds have crossed it.
    """
    order = list(collectives._along(steps, count))
    assert sorted(order) == [(step, number) for step in range(steps) for number in range(count)]
    place = {pair: index for index, pair in enumerate(order)}
    for step, number in order:
        if step:
            assert place[step - 1, number] < place[step, number]
        if number >= steps:
            assert place[steps - 1, number - steps] < place[0, number]
