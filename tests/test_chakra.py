"""Chakra traces: MLCommons' own schema reads what we write, and what we read is what we wrote."""

import io
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim import chakra
from co2sim.chakra.schema import schema
from co2sim.cluster import Cluster
from co2sim.compute import compute_time
from co2sim.errors import CatalogError
from co2sim.schedule import (
    LEADERS,
    NODE,
    PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    FusedAttention,
    Kernels,
    Kind,
    Layout,
    Op,
    Product,
    Schedule,
    block,
    peers_of_blocks,
)
from co2sim.simulator import execute
from co2sim.work import Work

pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="the extra chakra is missing")
KINDS = schema()

from chakra.src.third_party.utils import protolib  # noqa: E402 - of the extra


@pytest.fixture(autouse=True, scope="module")
def _no_wait_for_disks() -> Iterator[None]:
    """Hundreds of small folders need not survive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sync", lambda: None)
        yield


class Decoded(NamedTuple):
    """A file as MLCommons' package reads it."""

    head: Any
    nodes: list[Any]


def official(path: Path) -> Decoded:
    """Read a file with the schema and the reader of MLCommons' package."""
    file = io.BytesIO(path.read_bytes())
    head, nodes = KINDS.GlobalMetadata(), []
    assert protolib.decodeMessage(file, head)
    while protolib.decodeMessage(file, node := KINDS.Node()):
        nodes.append(node)
    assert file.tell() == path.stat().st_size
    return Decoded(head, nodes)


def value(message: Any, name: str) -> Any:
    """An attribute of a message; None where it is not there."""
    for one in message.attr:
        if one.name == name:
            return getattr(one, one.WhichOneof("value"))
    return None


def written(
    schedule: Schedule, cluster: Cluster, folder: Path, **options: Any
) -> tuple[chakra.Written, list[Decoded]]:
    """Write a trace, and read every rank of it with MLCommons' package."""
    found = chakra.write(schedule, cluster, folder, precision="bf16", **options)
    ranks = [official(folder / f"trace.{rank}.et") for rank in range(found.ranks)]
    return found, ranks


def rounded_up(exact: float) -> int:
    """What a whole number says of an amount: at least 1."""
    return max(1, math.ceil(exact))


@pytest.mark.parametrize("layout", [(2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_every_rank_says_what_its_schedule_does(
    strategy: str, layout: tuple[int, int], tmp_path: Path
) -> None:
    """By MLCommons' schema: FLOP, bytes, members, the order of streams, and waits of every rank."""
    schedule, cluster = tiny.schedule(strategy, layout), tiny.cluster(*layout)
    found, ranks = written(schedule, cluster, tmp_path / "out")
    groups = json.loads((tmp_path / "out" / "comm_group.json").read_text())
    everybody = list(range(cluster.layout.world_size))
    assert len(ranks) == found.ranks == len(everybody)
    for rank, (_, nodes) in enumerate(ranks):
        last: dict[str, int] = {}
        streams = {}
        for node, (number, _, op, waits) in zip(
            nodes, schedule.instances(found.rounds), strict=True
        ):
            streams[number] = op.stream
            assert (node.id, node.name) == (number, op.name)
            assert list(node.ctrl_deps) == ([last[op.stream]] if op.stream in last else [])
            others = [wait for wait in node.data_deps if streams[wait] != op.stream]
            assert others == list(waits)
            last[op.stream] = number
            if isinstance(op.work, Compute):
                assert node.type == KINDS.COMP_NODE
                assert value(node, "num_ops") == rounded_up(op.work.flops)
                assert value(node, "tensor_size") == rounded_up(op.work.memory_bytes)
                taken = compute_time(op.work, cluster.gpu, "bf16")
                assert node.duration_micros == max(1, round(taken * 1e6))
                continue
            members = list(op.work.group.members(rank, cluster.layout))
            if len(members) == 1:
                assert node.type == KINDS.COMP_NODE
                continue
            assert node.type == KINDS.COMM_COLL_NODE
            name = KINDS.CollectiveCommType.Name(value(node, "comm_type"))
            assert name == op.work.kind.value.upper()
            named = value(node, "pg_name")
            assert (groups[named] if named else everybody) == members
            parts = len(members) if op.work.kind is Kind.ALL_GATHER else 1
            assert value(node, "comm_size") == rounded_up(op.work.bytes / parts)


@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_the_dependencies_of_a_trace_give_the_times_of_its_schedule(
    strategy: str, tmp_path: Path
) -> None:
    """Longest paths through the nodes end when the simulator ends with free communication."""
    schedule, cluster = tiny.schedule(strategy), tiny.cluster()
    found, ranks = written(schedule, cluster, tmp_path / "out")
    ends: list[float] = []
    for node, (_, _, op, _) in zip(ranks[0].nodes, schedule.instances(found.rounds), strict=True):
        free = isinstance(op.work, Collective)
        taken = 0.0 if free else compute_time(op.work, cluster.gpu, "bf16")  # type: ignore[arg-type]
        start = max((ends[wait] for wait in (*node.ctrl_deps, *node.data_deps)), default=0.0)
        ends.append(start + taken)
    trace = execute(
        schedule, cluster, precision="bf16", rounds=found.rounds, free_communication=True
    )
    assert max(ends) == pytest.approx(tiny.makespan(trace), rel=1e-9)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", tiny.VARIANTS)
def test_what_is_read_is_what_was_written(strategy: str, accumulation: int, tmp_path: Path) -> None:
    """Export and import give the same schedule of every strategy, and so the same simulation."""
    schedule = tiny.schedule(strategy, accumulation=accumulation)
    found = chakra.write(schedule, tiny.cluster(), tmp_path / "out", precision="bf16")
    back = chakra.read(tmp_path / "out")
    assert back == chakra.Imported(schedule, 4, Layout(2, 2), found.rounds)
    assert found.rounds == schedule.lag + 1


NAMES = st.text('abc.µ€ /"\\{', min_size=1, max_size=4)
AMOUNTS = (
    st.floats(0, 1e18) | st.integers(0, 2**53) | st.just(0.5)
)  # whole ones as a float has them
PRODUCTS = st.builds(Product, AMOUNTS, AMOUNTS)
ATTENTION = st.builds(FusedAttention, AMOUNTS, AMOUNTS, st.integers(1, 9000), AMOUNTS)
KERNELS = st.builds(
    Kernels,
    st.lists(PRODUCTS, max_size=2).map(tuple),
    st.floats(0, 1e6),
    AMOUNTS,
    st.booleans(),
    st.none() | ATTENTION,
)
PARTS = st.builds(Compute, NAMES, AMOUNTS, AMOUNTS, st.none() | KERNELS)
COMPUTES = st.builds(
    Compute, NAMES, AMOUNTS, AMOUNTS, st.none() | KERNELS, st.lists(PARTS, max_size=2).map(tuple)
)


@st.composite
def collectives(draw: st.DrawFn) -> Collective:
    """Any collective; groups fit every layout of `schedules`."""
    kind = draw(st.sampled_from(list(Kind)))
    rooted = kind in {Kind.BROADCAST, Kind.REDUCE}
    return Collective(
        kind,
        draw(NAMES),
        draw(st.integers(1, 10**15)),
        draw(st.sampled_from(list(DType))),
        draw(st.sampled_from([WORLD, NODE, PEERS, LEADERS, block(2), peers_of_blocks(2)])),
        draw(st.sampled_from([0, 1, 256])),
        draw(st.integers(0, 3)) if rooted else 0,
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any small schedule: works of all kinds, streams, and waits within and across rounds."""
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    body = []
    for place, name in enumerate(names):
        waits = [
            After(other, ago)
            for at, other in enumerate(names)
            for ago in draw(st.lists(st.integers(0, 3), max_size=1))
            if ago or at < place
        ]
        works: st.SearchStrategy[Work] = COMPUTES | collectives()
        body.append(Op(name, draw(works), draw(st.sampled_from("xyz")), tuple(waits)))
    return Schedule(draw(NAMES), tuple(body), draw(st.integers(1, 48)))


@given(schedules(), st.integers(1, 3), st.integers(0, 2))
def test_any_schedule_comes_back(schedule: Schedule, nodes: int, more: int) -> None:
    """Of any works, streams, waits and rounds that show all of them, on nodes of 2 GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "out"
        cluster = tiny.cluster(nodes, 2)
        rounds = schedule.lag + 1 + more
        found, ranks = written(schedule, cluster, place, rounds=rounds)
        assert len(ranks[0].nodes) == found.nodes == rounds * len(schedule.body)
        assert chakra.read(place) == chakra.Imported(schedule, 2 * nodes, Layout(nodes, 2), rounds)


@given(st.data())
def test_a_damaged_file_is_refused_in_one_line_or_says_the_same(data: st.DataObject) -> None:
    """Bytes of one rank changed, cut or added: never a traceback, never another schedule.

    A fault can hide only where it changes nothing of what a rank does: in a duration.
    """
    schedule = tiny.schedule("zero2(bucket=700)", (1, 2))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "out"
        chakra.write(schedule, tiny.cluster(1, 2), place, precision="bf16")
        path = place / f"trace.{data.draw(st.integers(0, 1))}.et"
        content = bytearray(path.read_bytes())
        start = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.integers(0, 3))
        content[start : start + length] = data.draw(st.binary(max_size=3))
        path.write_bytes(content)
        said = complaint(place)
        assert "\n" not in said
        assert "trace." in said or chakra.read(place).schedule == schedule


def complaint(place: Path) -> str:
    """What is said of a trace that is refused; nothing where it is read."""
    try:
        chakra.read(place)
    except CatalogError as error:
        return str(error)
    return ""
