"""Metrics: each on spans written by hand, or against a count by brute force."""

from dataclasses import replace

import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st
from one_sample import simulate

from co2sim.hardware.cluster import Link
from co2sim.schedule.schedule import (
    NODE,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.simulation import metrics
from co2sim.simulation.metrics import Window
from co2sim.simulation.noise import Noise
from co2sim.simulation.run import execute
from co2sim.simulation.trace import Span, Trace

COLLECTIVE = Collective(Kind.ALL_GATHER, "x", 1, DType.FP32, WORLD)
SCHEDULE = Schedule(
    "hand",
    (
        Op("work", Compute("forward", 1.0), "compute"),
        Op("again", Compute("forward", 1.0), "compute"),
        Op("x", COLLECTIVE, "comm", (After("work"),)),
    ),
)


def hand(*rounds: tuple[float, float, float, float], rank: int = 0) -> list[Span]:
    """Rounds given as the ends of work and again, and the start and end of x."""
    spans: list[Span] = []
    clock = 0.0
    for turn, (work, again, start, end) in enumerate(rounds):
        spans += [
            Span(rank, turn, "work", "compute", clock, work),
            Span(rank, turn, "again", "compute", work, again),
            Span(rank, turn, "x", "comm", start, end),
        ]
        clock = again
    return spans


def traced(*spans: Span) -> Trace:
    """A trace of these spans."""
    ranks = dict.fromkeys((span.rank for span in spans), 1)
    rounds = 1 + max(span.round for span in spans)
    return Trace("hand", Layout(1, len(ranks)), rounds, ranks, tuple(spans))


THREE = hand((1, 2, 1, 3), (3, 4, 3, 5), (5, 6, 5, 7))


def test_a_window_runs_from_the_last_compute_before_it_to_the_last_compute_in_it() -> None:
    """Rounds are counted from the end of their last compute op; all rounds start at 0."""
    trace = traced(*THREE)
    assert metrics.window(trace, SCHEDULE, 2) == Window(2, 6, 2)
    assert metrics.window(trace, SCHEDULE, 3) == Window(0, 6, 3)
    assert metrics.window(trace, SCHEDULE, 1).round_time == 2


def test_a_window_ends_with_the_slowest_rank() -> None:
    """The round of a cluster is that of its slowest rank."""
    trace = traced(*hand((1, 2, 1, 3)), *hand((1, 5, 1, 3), rank=1))
    assert metrics.window(trace, SCHEDULE, 1).end == 5


def test_equal_periods_of_all_ops_are_steady() -> None:
    """A trace is steady when the last period shifts every op by the same time."""
    assert metrics.is_steady(traced(*THREE), SCHEDULE)
    assert not metrics.is_steady(traced(*THREE[:6], *hand(*[(5, 6, 5, 7.5)] * 3)[6:]), SCHEDULE)
    assert not metrics.is_steady(traced(*THREE[:3]), SCHEDULE)


@given(st.sampled_from(tiny.VARIANTS), st.floats(1e8, 1e10))
def test_what_is_called_steady_goes_on_for_ever(strategy: str, bandwidth: float) -> None:
    """Once two rounds are equal, the rounds simulated after them are equal, too.

    Where averages take hardly longer than rounds, those in flight grow for very many rounds first.
    """
    schedule = tiny.schedule(strategy)
    cluster = tiny.cluster(inter=Link(bandwidth, 1e-6))
    longer = execute(schedule, cluster, precision="bf16", rounds=18)
    firsts = (longer.first(rounds) for rounds in range(2, 13))
    trace = next((first for first in firsts if metrics.is_steady(first, schedule)), None)
    assume(trace is not None)
    now = metrics.window(trace, schedule, 1).round_time
    assert metrics.window(longer, schedule, 1).round_time == pytest.approx(now, rel=1e-9)
    assert metrics.window(longer, schedule, 6).round_time == pytest.approx(now, rel=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_busy_time_counts_every_instant_once(
    intervals: list[tuple[int, int]], start: int, length: int
) -> None:
    """Overlapping spans count once, and only inside the window."""
    spans = [Span(0, 0, "x", "comm", a, a + size) for a, size in intervals]
    during = Window(start, start + length, 1)
    covered = {t for a, size in intervals for t in range(a, a + size)}
    assert metrics.busy(spans, during) == len(covered & set(range(start, start + length)))


def test_communication_is_busy_as_on_the_busiest_rank() -> None:
    """Of two nodes with 1 and 2 s of communication in a round, the second counts."""
    inside = Collective(Kind.ALL_GATHER, "b", 10, DType.BF16, NODE)
    schedule = Schedule("nodes", (*SCHEDULE.body[:-1], replace(SCHEDULE.body[-1], work=inside)))
    quiet = [span for rank in (0, 1) for span in hand((1, 3, 1, 2), (4, 6, 4, 5), rank=rank)]
    loud = [span for rank in (2, 3) for span in hand((1, 3, 1, 3), (4, 6, 4, 6), rank=rank)]
    trace = replace(traced(*quiet, *loud), layout=Layout(2, 2))
    during = metrics.window(trace, schedule, 2)
    assert metrics.communication(trace, schedule, during).busy == 2


_TIMES = st.tuples(*[st.integers(0, 6)] * 3, st.integers(1, 6))
"""Of work, a pause, work and communication, which takes some."""


@given(st.lists(_TIMES, min_size=2, max_size=2), st.lists(_TIMES, min_size=2, max_size=2))
def test_communication_is_busy_while_all_are_there_and_exposed_while_its_rank_computes_nothing(
    first: list[tuple[int, ...]], second: list[tuple[int, ...]]
) -> None:
    """Counted instant by instant, from the last rank that comes to the last that ends.

    Who comes before the last waits, which is no communication.
    """
    spans = []
    for rank, rounds in enumerate((first, second)):
        clock, done = 0, 0
        for turn, (work, pause, again, late) in enumerate(rounds):
            ends = clock + work, clock + work + pause + again
            start = max(ends[0], done)
            done = start + late
            spans += [
                Span(rank, turn, "work", "compute", clock, ends[0]),
                Span(rank, turn, "again", "compute", ends[0] + pause, ends[1]),
                Span(rank, turn, "x", "comm", start, done),
            ]
            clock = ends[1]
    trace = traced(*spans)
    during = replace(metrics.window(trace, SCHEDULE, 2), start=0.0)
    meetings = [[span for span in spans if span.op == "x" and span.round == t] for t in (0, 1)]
    instants: dict[str, list[float]] = {"busy": [], "waiting": [], "exposed": []}
    for rank in (0, 1):
        moving, waits, computes = set[int](), set[int](), set[int]()
        for both in meetings:
            come = int(max(span.start for span in both))
            moving |= set(range(come, int(max(span.end for span in both))))
            waits |= set(range(int(both[rank].start), come))
        for span in spans:
            if span.rank == rank and span.op != "x":
                computes |= set(range(int(span.start), int(span.end)))
        for name, times in (("busy", moving), ("waiting", waits), ("exposed", moving - computes)):
            instants[name].append(sum(time < during.end for time in times) / 2)
    assert metrics.exposed(trace, SCHEDULE, during) == max(instants["exposed"])
    seen = metrics.communication(trace, SCHEDULE, during)
    assert (seen.busy, seen.waiting) == (max(instants["busy"]), max(instants["waiting"]))


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "local_sgd(tau=3)", "co2.published(tau=3)"])
def test_a_slow_node_delays_a_round_by_the_time_that_it_adds(strategy: str) -> None:
    """The delay is the round time minus that of the same case with equal nodes, no more."""
    case = (tiny.cluster(4, 2), tiny.model(), strategy)
    equal = simulate(*case)
    slow = simulate(*case, noise=Noise(node_speed={1: 0.5}))
    assert equal.straggler_delay_s is None
    assert slow.straggler_delay_s == pytest.approx(slow.round_time_s - equal.round_time_s)
    assert slow.straggler_delay_s > 0


def test_the_scalability_ratio_compares_per_gpu() -> None:
    """The published example: zero2 from 3488 tokens/s on 16 GPUs to 22810 on 128 keeps 0.82."""
    assert metrics.scalability_ratio(22810 / 128, 3488 / 16) == pytest.approx(0.82, abs=0.005)
