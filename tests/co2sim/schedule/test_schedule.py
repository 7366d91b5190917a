"""The schedule: what it refuses, what its waits mean, and how it reads."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedules

from co2sim.common.errors import ScheduleError
from co2sim.schedule.schedule import (
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
    block,
)

WORK = Compute("step", 1e6)


def op(name: str, *after: After, stream: str = "compute") -> Op:
    """An op whose work does not matter."""
    return Op(name, WORK, stream, after)


def schedule(*body: Op, steps: int = 1) -> Schedule:
    """A schedule of these ops."""
    return Schedule("bad", body, steps)


REFUSED: dict[str, Callable[[], object]] = {
    "empty": schedule,
    "'a'": lambda: schedule(op("a"), op("a")),
    "'average'": lambda: schedule(op("average"), op("outer", After("averge"))),
    "not before it": lambda: schedule(op("a", After("b")), op("b")),
    "-1 rounds": lambda: schedule(op("a"), op("b", After("a", -1))),
    "steps is 0": lambda: schedule(op("a"), steps=0),
    "flops is -1": lambda: Compute("step", -1),
    "elements=0": lambda: Collective(Kind.ALL_REDUCE, "x", 0, DType.FP32, WORLD),
    "root=-1": lambda: Collective(Kind.BROADCAST, "x", 1, DType.FP32, WORLD, root=-1),
    "root=1": lambda: Collective(Kind.ALL_GATHER, "x", 1, DType.FP32, WORLD, root=1),
    "gpus_per_node": lambda: Layout(2, 0),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_could_not_run_is_refused(said: str) -> None:
    """When it is built, in words."""
    with pytest.raises(ScheduleError, match=said):
        REFUSED[said]()


bodies = random_schedules(st.just(WORK), ["a", "b", "c"]).map(lambda schedule: schedule.body)


@given(bodies, st.integers(1, 5))
def test_instances_wait_for_what_the_body_says(body: tuple[Op, ...], rounds: int) -> None:
    """An instance waits for the named op so many rounds ago, and for nothing before round 0."""
    stream = {each.name: each.stream for each in body}
    issued = list(Schedule("random", body).instances(rounds))
    assert [(i.round, i.op) for i in issued] == [(r, each) for r in range(rounds) for each in body]
    for number, instance in enumerate(issued):
        meant = Counter(
            (wait.op, instance.round - wait.rounds_ago)
            for wait in instance.op.after
            if instance.round >= wait.rounds_ago and stream[wait.op] != instance.op.stream
        )
        given_waits = Counter((issued[w].op.name, issued[w].round) for w in instance.waits)
        assert (instance.number, given_waits) == (number, meant)


layouts = st.builds(Layout, st.integers(1, 6), st.integers(1, 6))


@given(layouts)
def test_groups_partition_the_ranks(layout: Layout) -> None:
    """Every rank is in exactly one group of a kind, and agrees with its members about it."""
    n = layout.world_size
    sizes = {WORLD: n, NODE: layout.gpus_per_node, PEERS: layout.nodes}
    sizes |= {block(size): size for size in range(1, n + 1) if n % size == 0}
    for group, size in sizes.items():
        for rank in range(n):
            members = group.members(rank, layout)
            assert rank in members
            assert len(members) == size
            assert all(group.members(other, layout) == members for other in members)


@pytest.mark.parametrize("group", [block(3), Group("rack")])
def test_groups_that_do_not_divide_the_ranks_are_refused(group: Group) -> None:
    """A group that cannot be formed is an error."""
    with pytest.raises(ScheduleError, match="does not divide 8 ranks"):
        group.members(0, Layout(2, 4))


@pytest.mark.parametrize(
    ("dtype", "scale_block", "size"),
    [
        (DType.FP32, 0, 4000),
        (DType.INT4, 0, 500),
        (DType.INT8, 256, 1000 + 4 * 4),
        (DType.INT4, 999, 500 + 8),
    ],
)
def test_bytes_count_elements_and_scales(dtype: DType, scale_block: int, size: float) -> None:
    """A buffer of 1000 elements has its bytes, and 4 more for every started block of scales."""
    assert Collective(Kind.ALL_GATHER, "x", 1000, dtype, WORLD, scale_block).bytes == size


def closed(body: tuple[Op, ...]) -> tuple[Op, ...]:
    """The body with an op that waits for all of a round, and that all of the next wait for."""
    waiting = [replace(each, after=(*each.after, After("end", 1))) for each in body]
    return (*waiting, op("end", *(After(each.name) for each in body)))


@given(bodies, st.booleans())
def test_rounds_are_apart_if_the_last_op_stands_between_them(
    body: tuple[Op, ...],
    close: bool,  # noqa: FBT001
) -> None:
    """All of a round are behind the last op of the round before, and before its own: by paths.

    The graph has every instance of six rounds; none waits for more than three rounds back.
    """
    schedule = Schedule("random", closed(body) if close else body)
    size, graph, last = len(schedule.body), nx.DiGraph(), dict[str, int]()
    for number, instance in enumerate(schedule.instances(6)):
        graph.add_node(number)
        graph.add_edges_from((other, number) for other in instance.waits)
        if instance.op.stream in last:
            graph.add_edge(last[instance.op.stream], number)
        last[instance.op.stream] = number
    here = set(range(5 * size, 6 * size))
    behind = nx.descendants(graph, 5 * size - 1)
    ahead = nx.ancestors(graph, 6 * size - 1)
    assert schedule.is_sequential == (here <= behind and here - {6 * size - 1} <= ahead)
    assert schedule.is_sequential or not close
