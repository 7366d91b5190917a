"""The simulator against an independent longest path, and against cases worked out by hand."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedules

from co2sim.hardware.cluster import Cluster, HostEffects, Link
from co2sim.schedule.schedule import (
    LEADERS,
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.simulation.noise import Noise
from co2sim.simulation.run import execute
from co2sim.simulation.trace import Trace

SECOND = 1e12
"""FLOP that take a tiny GPU one second."""


def run(schedule: Schedule, cluster: Cluster, rounds: int = 1, **options: object) -> Trace:
    """Execute in bf16, and hold the trace against the rules of its schedule."""
    trace = execute(schedule, cluster, precision="bf16", rounds=rounds, **options)  # type: ignore[arg-type]
    assert trace.violations(schedule) == []
    return trace


def seconds(name: str, length: float, *after: After, stream: str = "compute") -> Op:
    """A compute op of so many seconds."""
    return Op(name, Compute("work", length * SECOND), stream, after)


def transfer(
    name: str, elements: int, *after: After, stream: str = "comm", group: Group = WORLD
) -> Op:
    """An all-gather of so many fp32 elements."""
    return Op(name, Collective(Kind.ALL_GATHER, name, elements, DType.FP32, group), stream, after)


def ends(trace: Trace, rank: int = 0) -> dict[str, float]:
    """When the ops of the last round end."""
    return {s.op: s.end for s in trace.spans if s.rank == rank and s.round == trace.rounds - 1}


# --- the oracle: the longest path through the unrolled graph -----------------------------------


def unrolled(
    schedule: Schedule, layout: Layout, rounds: int, speed: Mapping[int, float]
) -> nx.DiGraph:
    """Who precedes whom: a vertex for the end of every op, one for all members of a collective.

    An edge's length is the duration of the op that it leads to. Collectives take one second for
    every member but the first, as in a ring of pure latency.
    """
    graph = nx.DiGraph()

    def vertex(op: Op, turn: int, rank: int) -> Hashable:
        if isinstance(op.work, Collective):
            return op.name, turn, op.work.group.members(rank, layout).start, op.work.group
        return op.name, turn, rank, None

    by_name = {op.name: op for op in schedule.body}
    for rank in range(layout.world_size):
        last: dict[str, Hashable] = {}
        for turn in range(rounds):
            for op in schedule.body:
                here = vertex(op, turn, rank)
                if isinstance(op.work, Collective):
                    length = len(op.work.group.members(rank, layout)) - 1.0
                else:
                    length = op.work.flops / SECOND / speed.get(rank // layout.gpus_per_node, 1.0)
                before = [last[op.stream]] if op.stream in last else ["start"]
                before += [
                    vertex(by_name[wait.op], turn - wait.rounds_ago, rank)
                    for wait in op.after
                    if turn >= wait.rounds_ago
                ]
                graph.add_weighted_edges_from((other, here, length) for other in before)
                last[op.stream] = here
    return graph


def longest_paths(graph: nx.DiGraph) -> dict[Hashable, float]:
    """When every vertex is reached."""
    reached: dict[Hashable, float] = {}
    for vertex in nx.topological_sort(graph):
        into = graph.in_edges(vertex, data="weight")
        reached[vertex] = max((reached[other] + length for other, _, length in into), default=0.0)
    return reached


def uncontended(nodes: int, gpus: int) -> Cluster:
    """Links of one second of latency and no limit on bandwidth; collectives never exclude."""
    link = Link(1e40, 1.0)
    return tiny.cluster(nodes, gpus, intra=link, inter=link, backend="gloo")


WORKS = st.one_of(
    st.builds(lambda length: seconds("op", length).work, st.integers(0, 9)),
    st.builds(
        lambda group: transfer("op", 1, group=group).work,
        st.sampled_from([WORLD, NODE, PEERS, LEADERS]),
    ),
)


@given(
    random_schedules(WORKS, ["compute", "comm", "side"]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 2), st.sampled_from([0.25, 0.5, 2.0]), max_size=3),
    st.booleans(),
)
def test_without_contention_every_op_ends_at_the_longest_path(
    schedule: Schedule,
    shape: tuple[int, int],
    rounds: int,
    speed: dict[int, float],
    fold: bool,  # noqa: FBT001
) -> None:
    """On random schedules with slow nodes, folded or not, every span is where the graph puts it."""
    cluster = uncontended(*shape)
    speed = {node: value for node, value in speed.items() if node < shape[0]}
    trace = run(schedule, cluster, rounds, noise=Noise(node_speed=speed), fold=fold)
    graph = unrolled(schedule, cluster.layout, rounds, speed)
    reached = longest_paths(graph)
    works = {op.name: op.work for op in schedule.body}
    for span in trace.spans:
        work = works[span.op]
        group = work.group if isinstance(work, Collective) else None
        start = group.members(span.rank, cluster.layout).start if group else span.rank
        assert span.end == pytest.approx(reached[span.op, span.round, start, group])
    assert tiny.makespan(trace) == pytest.approx(nx.dag_longest_path_length(graph))
    assert sum(trace.ranks.values()) == cluster.layout.world_size


# --- by hand: durations, contention, backends ---------------------------------------------------


def pair(group_a: Group, group_b: Group) -> Schedule:
    """Two all-gathers of 4e6 bytes at once: each takes 3 ms alone on four nodes of one GPU."""
    return Schedule(
        "pair",
        (
            transfer("a", 1_000_000, stream="a", group=group_a),
            transfer("b", 1_000_000, stream="b", group=group_b),
        ),
    )


@pytest.mark.parametrize(
    ("second", "options", "end"),
    [
        (WORLD, {}, 3e-3),
        (WORLD, {"communicators": "stream"}, 6e-3),
        (WORLD, {"backend": "gloo"}, 6e-3),
        (PEERS, {}, 6e-3),
    ],
    ids=["nccl", "stream", "gloo", "groups"],
)
def test_only_collectives_of_one_nccl_communicator_take_turns(
    second: Group, options: dict[str, Any], end: float
) -> None:
    """In the order of issue; those of other streams, groups and Gloo share the links."""
    trace = run(pair(WORLD, second), tiny.cluster(4, 1, **options))
    assert ends(trace) == pytest.approx({"a": end, "b": 6e-3})


def test_communication_in_flight_slows_compute_down() -> None:
    """10 s of compute with 4 s of communication at 25 %: 3.2 s of work in 4 s, then 6.8 s."""
    body = (seconds("work", 10.0), transfer("x", 1_000_000))
    cluster = tiny.cluster(4, 1, inter=Link(0.75e6), interference=0.25)
    assert ends(run(Schedule("s", body), cluster)) == pytest.approx({"x": 4.0, "work": 10.8})


def test_each_collective_takes_its_time_from_the_compute_beside_it() -> None:
    """0.5 s each: x begins with 10 s of compute and y within. As z begins, they have ended.

    With interference the 6 s of x and of y, 0.4 s apart, slow it down besides.
    """
    link = Link(1e40, 3.0)  # two ring steps over three nodes: 6 s
    body = (
        transfer("x", 1, stream="a"),
        seconds("work", 10.0),
        seconds("half", 0.4, After("x"), stream="a"),
        transfer("y", 1, After("half"), stream="a"),
        transfer("z", 1, After("work"), stream="b"),
    )
    plain = tiny.cluster(3, 1, inter=link, host=HostEffects(call_interference=0.5), backend="gloo")
    assert ends(run(Schedule("s", body), plain))["work"] == pytest.approx(11.0)
    found = ends(run(Schedule("s", body), replace(plain, interference=0.25)))
    assert found["y"] == pytest.approx(12.4)
    assert found["work"] == pytest.approx(12.4 + (11.0 - 0.4 - 12.0 / 1.25))


def test_streams_that_share_a_processor_let_those_that_communicate_go_first() -> None:
    """10 s of work stand still for 2 s of each of two streams that share it, and ends 4 s later.

    They begin together, after 6 s. Where streams are apart, all take their own time. A third stream
    that does not communicate shares what is left with the first.
    """
    body = (
        transfer("x", 1, stream="a"),
        seconds("quantize", 2.0, After("x"), stream="a"),
        transfer("y", 1, stream="b"),
        seconds("copy", 2.0, After("x"), stream="b"),
        seconds("work", 10.0),
    )
    links: dict[str, Any] = {"inter": Link(1e40, 3.0), "backend": "gloo"}  # two ring steps: 6 s
    apart, shared = (
        tiny.cluster(3, 1, host=host, **links) for host in (None, HostEffects(one_core=True))
    )
    plain = {"x": 6.0, "y": 6.0}
    found = ends(run(Schedule("s", body), apart))
    assert found == pytest.approx(plain | {"quantize": 8.0, "copy": 8.0, "work": 10.0})
    found = ends(run(Schedule("s", body), shared))
    assert found == pytest.approx(plain | {"quantize": 10.0, "copy": 10.0, "work": 14.0})
    third = seconds("more", 4.0, stream="third")
    found = ends(run(Schedule("s", (*body, third)), shared))
    assert found == pytest.approx(
        plain | {"quantize": 10.0, "copy": 10.0, "more": 12.0, "work": 18.0}
    )


def test_nics_of_a_node_that_computes_attain_a_fraction() -> None:
    """4 s of communication beside 2 s of compute, at half of the rate: 1 s of it is done then."""
    body = (seconds("work", 1.5), seconds("more", 0.5), transfer("x", 1_000_000))
    link = Link(0.75e6, busy_efficiency=0.5)
    found = ends(run(Schedule("s", body), tiny.cluster(4, 1, inter=link)))
    assert found == pytest.approx({"work": 1.5, "more": 2.0, "x": 5.0})
    assert ends(run(Schedule("s", body), tiny.cluster(1, 4, inter=link)))["x"] < 0.01


MOVE = transfer("x", 1_000_000, group=LEADERS)


@pytest.mark.parametrize(
    ("body", "rounds", "later"),
    [
        ((MOVE, seconds("work", 1.0, After("x"))), 1, 1.0),
        ((seconds("work", 1.0, stream="comm"), MOVE), 2, 2.0),
        ((MOVE, transfer("y", 1, group=NODE), seconds("work", 1.0, After("x"))), 1, 1.0),
    ],
    ids=["waits", "next round", "another stream"],
)
def test_who_does_not_wait_for_leaders_is_not_folded(
    body: tuple[Op, ...], rounds: int, later: float
) -> None:
    """4 s of the leaders delay their next op, but not that of others, who may be ahead."""
    trace = run(Schedule("s", body), tiny.cluster(4, 2, inter=Link(0.75e6)), rounds)
    assert len(trace.ranks) == 8
    assert ends(trace, 0)["work"] == pytest.approx(later + 4)
    assert ends(trace, 1)["work"] == pytest.approx(later)


def test_jitter_scales_latency_as_well_as_bytes() -> None:
    """A collective of pure latency takes its 3 s times the factor that is drawn for it."""
    noise = Noise(jitter=0.3, seed=4)
    move = transfer("x", 1)
    cluster = tiny.cluster(4, 1, inter=Link(1e40, 1.0))
    trace = run(Schedule("s", (move,)), cluster, 5, noise=noise)
    factors = noise.op_slowdowns(2, 0, 5)
    lengths = [tiny.by_op(trace)[turn, "x"] for turn in range(5)]
    assert [s.end - s.start for s in lengths] == pytest.approx([3 * f for f in factors])


def test_free_communication_takes_no_time() -> None:
    """With free communication only compute and waiting for slow members are left."""
    body = (transfer("x", 1_000_000), seconds("work", 2.0, After("x")), transfer("y", 9))
    cluster = tiny.cluster(4, 1, inter=Link(1e3, 5.0), interference=0.5)
    trace = run(Schedule("s", body), cluster, rounds=3, free_communication=True)
    assert tiny.makespan(trace) == pytest.approx(6.0)


# --- by hand: strategies ------------------------------------------------------------------------

STEP = 15e-6 + 2.4e-9 + 56e-9
"""Seconds of a tiny step: 5 MFLOP forward, 10 backward, embedding rows, optimizer: 28 B x 2000."""

SLOW = 120e-6
"""Seconds of an fp32 all-reduce of 2000 parameters on 2 x 2 GPUs at 0.1 GB/s: 2 x 3/4 x 8000 B."""


@pytest.mark.parametrize(
    ("strategy", "last", "expected"),
    [
        ("local_sgd(tau=4)", "outer", 4 * STEP + SLOW + 20e-9),
        ("diloco(tau=4)", "outer", 4 * STEP + SLOW + 28e-9 + 52e-9),
        ("co2.published(tau=4)", "outer", SLOW + 68e-9),
        ("co2.published(tau=10)", "outer", 10 * STEP + 68e-9),
        ("co2.published(tau=10,staleness=2)", "outer", 10 * STEP + 68e-9),
        ("overlap_local_sgd(tau=10)", "outer", 10 * STEP + 68e-9),
        ("ddp", "optimizer", STEP + SLOW / 2),
        ("zero1", "optimizer", STEP - 42e-9 + SLOW / 2),
    ],
)
def test_a_round_takes_what_the_algorithm_says(strategy: str, last: str, expected: float) -> None:
    """Blocking averages add to the steps; CO2 hides the shorter of average and steps.

    DDP's only bucket waits for the whole backward; ZeRO-1 halves the optimizer twice and moves as
    much in two halves. CO2 with staleness 2 may start the next average while one is on its way.
    """
    slow = tiny.cluster(2, 2, inter=Link(1e8))  # an average takes longer than seven steps
    spans = tiny.by_op(run(tiny.schedule(strategy), slow, rounds=8))
    assert spans[7, last].end - spans[6, last].end == pytest.approx(expected, rel=1e-9)


# --- size and progress --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "noise"), [("ddp", Noise()), ("zeropp", Noise()), ("zeropp", Noise(jitter=0.1))]
)
def test_progress_rises_to_1_and_changes_nothing(strategy: str, noise: Noise) -> None:
    """By every engine; the trace is the same as without."""
    schedule, cluster, said = tiny.schedule(strategy), tiny.cluster(), list[float]()
    trace = run(schedule, cluster, 40, noise=noise, progress=said.append)
    assert trace == run(schedule, cluster, 40, noise=noise)
    assert said == sorted(said)
    assert 0 <= said[0] < said[-1] == 1
