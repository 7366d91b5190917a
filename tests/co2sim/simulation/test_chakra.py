"""Chakra traces: MLCommons' schema reads what we write, we read it back, and those of others."""

import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedules

from co2sim.common.errors import CatalogError, OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.schedule.schedule import (
    LEADERS,
    NODE,
    PEERS,
    WORLD,
    Collective,
    Compute,
    DType,
    FusedAttention,
    Gemm,
    Kernels,
    Kind,
    Schedule,
    block,
    peers_of_blocks,
)
from co2sim.simulation import chakra
from co2sim.simulation.chakra import export, schema
from co2sim.simulation.costs import compute_time

pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="the extra chakra is missing")
KINDS = schema.schema()

from chakra.src.third_party.utils import protolib  # noqa: E402 - of the extra

ONE_SAMPLE = ["--micro-batch", "1", "--accumulation", "1"]
ON = ["-c", "dgx-h100", "-m", "gpt2-small", "--gpus", "16", *ONE_SAMPLE]


@pytest.fixture(autouse=True, scope="module")
def _no_wait_for_disks() -> Iterator[None]:
    """Hundreds of small folders need not survive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sync", lambda: None)
        yield


def official(path: Path) -> list[Any]:
    """The nodes of a file, as the schema and the reader of MLCommons' package read them."""
    file = io.BytesIO(path.read_bytes())
    nodes = []
    assert protolib.decodeMessage(file, KINDS.GlobalMetadata())
    while protolib.decodeMessage(file, node := KINDS.Node()):
        nodes.append(node)
    assert file.tell() == path.stat().st_size
    return nodes


def value(message: Any, name: str) -> Any:
    """An attribute of a message; None where it is not there."""
    for one in message.attr:
        if one.name == name:
            return getattr(one, one.WhichOneof("value"))
    return None


def written(
    schedule: Schedule, cluster: Cluster, seen: int = 0, **options: Any
) -> tuple[Any, list[Any], int]:
    """Write a trace that is read back: its groups, `seen` ranks as MLCommons reads them, rounds."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "out"
        found = chakra.write(schedule, cluster, place, precision="bf16", **options)
        ranks = [official(place / f"trace.{rank}.et") for rank in range(seen)]
        groups = json.loads((place / "comm_group.json").read_text())
        back = chakra.read(place)
    layout, rounds = cluster.layout, found.rounds
    assert found.nodes == rounds * len(schedule.body)
    assert back == chakra.Imported(schedule, layout.world_size, layout, rounds)
    return groups, ranks, rounds


def rounded_up(exact: float) -> int:
    """What a whole number says of an amount: at least 1."""
    return max(1, math.ceil(exact))


@given(st.sampled_from(tiny.VARIANTS), st.sampled_from([(2, 2), (3, 1)]), st.sampled_from([1, 2]))
def test_every_rank_says_what_its_schedule_does(
    strategy: str, layout: tuple[int, int], accumulation: int
) -> None:
    """By MLCommons' schema: FLOP, bytes, members, the order of streams, and waits of every rank."""
    schedule = tiny.schedule(strategy, layout, accumulation=accumulation)
    cluster = tiny.cluster(*layout)
    everybody = list(range(cluster.layout.world_size))
    groups, ranks, rounds = written(schedule, cluster, len(everybody))
    assert rounds == schedule.lag + 1
    for rank, nodes in enumerate(ranks):
        last: dict[str, int] = {}
        streams = {}
        for node, (number, _, op, waits) in zip(nodes, schedule.instances(rounds), strict=True):
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


NAMES = st.text('abc.µ€ /"\\{', min_size=1, max_size=4)
AMOUNTS = (
    st.floats(0, 1e18) | st.integers(0, 2**53) | st.just(0.5)
)  # whole ones as a float has them
_SIDES = st.integers(1, 2**20)
PRODUCTS = st.builds(Gemm, _SIDES, _SIDES, _SIDES, AMOUNTS, _SIDES, AMOUNTS)
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


SCHEDULES = st.builds(
    replace,
    random_schedules(COMPUTES | collectives(), ["x", "y", "z"], NAMES, most=6),
    name=NAMES,
    steps=st.integers(1, 48),
)


@given(SCHEDULES, st.integers(1, 3), st.integers(0, 2))
def test_any_schedule_comes_back(schedule: Schedule, nodes: int, more: int) -> None:
    """Of any works, streams, waits and rounds that show all of them, on nodes of 2 GPUs."""
    written(schedule, tiny.cluster(nodes, 2), rounds=schedule.lag + 1 + more)


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
        assert "trace." in said or chakra.read(place).schedule == schedule


def complaint(place: Path) -> str:
    """The one line that is said of a trace that is refused; nothing where it is read."""
    try:
        chakra.read(place)
    except CatalogError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes may be right
        return str(error)
    return ""


# --- traces of others, and files that are none ---------------------------------------------------


def node(number: int, kind: str, waits: Sequence[int] = (), **attributes: Any) -> Any:
    """A node of somebody else: texts, whole numbers, truths, fractions as attributes."""
    kinds = {str: "string_val", bool: "bool_val", int: "int64_val", float: "double_val"}
    made = KINDS.Node(id=number, name=f"n{number % 100}", type=KINDS.NodeType.Value(kind))
    made.data_deps.extend(waits)
    for name, one in attributes.items():
        if isinstance(one, list):
            truths = KINDS.BoolList(values=one)
            made.attr.append(KINDS.AttributeProto(name=name, bool_list=truths))
        else:
            made.attr.append(KINDS.AttributeProto(**{"name": name, kinds[type(one)]: one}))
    return made


def collective(number: int, kind: str, size: int, waits: Sequence[int] = (), **more: Any) -> Any:
    """A collective of somebody else."""
    value = KINDS.CollectiveCommType.Value(kind)
    return node(number, "COMM_COLL_NODE", waits, comm_type=value, comm_size=size, **more)


def put(folder: Path, *ranks: Sequence[Any], groups: Any = None) -> Path:
    """Write nodes of ranks as a trace of somebody else."""
    folder.mkdir()
    for rank, nodes in enumerate(ranks):
        parts = [KINDS.GlobalMetadata(version="0.0.4"), *nodes]
        content = b"".join(schema.delimited(part.SerializeToString()) for part in parts)
        (folder / f"x.{rank}.et").write_bytes(content)
    if groups is not None:
        (folder / "comm_group.json").write_text(json.dumps(groups))
    return folder


def test_a_trace_of_others_takes_what_closed_forms_say(tmp_path: Path) -> None:
    """Compute, an all-reduce in the node beside more compute, one between nodes, compute.

    1 TFLOP/s, 1 TB/s, 10 GB/s in a node and 1 GB/s between: of n ranks a ring all-reduce of S bytes
    takes 2 (n-1)/n S through each link. Ids of the ranks differ, as in traces of MLCommons'
    generator, and nodes do not stand in their order.
    """

    def rank(number: int) -> list[Any]:
        first = 100 * number
        nodes = [
            node(first, "COMP_NODE", num_ops=2e9, tensor_size=10),  # 2 ms
            collective(first + 1, "ALL_REDUCE", 80_000_000, [first], pg_name=f"{1 + number // 2}"),
            node(first + 2, "COMP_NODE", [first], num_ops=10**9, tensor_size=5 * 10**9),  # 5 ms
            collective(
                first + 3, "ALL_REDUCE", 6_000_000, [first + 1], pg_name=f"{3 + number % 2}"
            ),
            node(first + 4, "COMP_NODE", [first + 2, first + 3], num_ops=10**9),  # 1 ms
        ]
        return nodes[::-1]

    groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}
    trace = chakra.read(put(tmp_path / "t", *map(rank, range(4)), groups=groups))
    works = [op.work for op in trace.schedule.body]
    assert [w.group for w in works if isinstance(w, Collective)] == [block(2), peers_of_blocks(2)]
    found = chakra.replay(trace, tiny.cluster(2, 2))
    within, between = 80e6 / 10e9, 2 * 6e6 / 1e9  # two rings share the NICs of a node
    assert found.round_time_s == pytest.approx(2e-3 + max(5e-3, within + between) + 1e-3)


def own(folder: Path, strategy: str = "zeropp") -> Path:
    """A trace of ours on 2 nodes of 2 GPUs."""
    chakra.write(tiny.schedule(strategy), tiny.cluster(), folder, precision="bf16")
    return folder


COMPUTE = node(0, "COMP_NODE", num_ops=5)
REDUCE = collective(0, "ALL_REDUCE", 5)


GROUP_7 = collective(0, "ALL_REDUCE", 5, pg_name="7")


@pytest.mark.parametrize(
    ("ranks", "groups", "words"),
    [
        ([[COMPUTE], [node(0, "COMP_NODE", num_ops=6)]], None, ["rank 1", "flops"]),
        ([[COMPUTE], [COMPUTE, node(1, "COMP_NODE", num_ops=5)]], None, ["rank 1", "2 nodes"]),
        ([[COMPUTE, COMPUTE]], None, ["id 0"]),
        ([[node(0, "COMP_NODE", [7], num_ops=5)]], None, ["node 7"]),
        ([[node(0, "COMP_NODE", num_ops=-5)]], None, ["num_ops is -5"]),
        ([[collective(0, "ALL_REDUCE", 0)]], None, ["comm_size is 0"]),
        ([[collective(0, "ALL_REDUCE", 5, involved_dim=[True, False])]], None, ["involved_dim"]),
        ([[GROUP_7]], None, ["'7'"]),
        ([[REDUCE]] * 3, {"7": [0, 9]}, ["comm_group.json", "[0, 9]"]),
        ([[GROUP_7]] * 4, {"7": [0, 3]}, ["[0, 3]"]),
        ([[GROUP_7]] * 4, {"7": [0, 1]}, ["x.2.et", "rank 2"]),
    ],
)
def test_a_trace_of_others_that_is_no_schedule_is_refused(
    ranks: list[list[Any]], groups: Any, words: list[str], tmp_path: Path
) -> None:
    """One line: the file, the node, what is wrong."""
    said = complaint(put(tmp_path / "t", *ranks, groups=groups))
    assert all(word in said for word in words), said


def test_files_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no file, a missing rank, a pipe, nothing, garbage, a large file, too many."""
    assert "No such file" in complaint(tmp_path / "none" / "deeper")
    assert "no Chakra traces" in complaint(tmp_path)
    place = own(tmp_path / "t")
    (place / "trace.1.et").rename(place / "away")
    assert "trace.1.et is missing" in complaint(place)
    os.mkfifo(place / "trace.1.et")
    assert "regular file" in complaint(place)
    (place / "trace.1.et").unlink()
    (place / "trace.1.et").write_bytes(b"")
    assert "trace.1.et" in complaint(place)
    for content in (b"\xff" * 100, b"\x05hello", b"\x00" * 10):
        (place / "trace.0.et").write_bytes(content)
        assert "trace.0.et: message 0" in complaint(place)
    shutil.copy(place / "away", place / "other.0.et")
    assert "'other', 'trace'" in complaint(place)
    (place / "comm_group.json").unlink()
    monkeypatch.setattr(chakra.reading, "MAX_RECORD_BYTES", 10)
    assert "larger than" in complaint(place / "other")
    monkeypatch.undo()
    monkeypatch.setattr(chakra.reading, "MAX_RANKS", 3)
    assert "4 ranks" in complaint(own(tmp_path / "u"))


def test_what_is_interrupted_or_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C amid the files, a disk without room, a folder with files: nothing half-written."""
    schedule = tiny.schedule("co2.published(tau=2,staleness=2)")

    def interrupt(done: int, _: int) -> None:
        if done == 2:
            assert len(list(tmp_path.rglob("*.et"))) == 2
            raise KeyboardInterrupt

    def write(name: str, **options: Any) -> None:
        chakra.write(schedule, tiny.cluster(), tmp_path / name, precision="bf16", **options)

    with pytest.raises(KeyboardInterrupt):
        write("t", done=interrupt)
    with pytest.raises(OptionError, match="at least 3 rounds"):
        write("t", rounds=2)
    with pytest.raises(OptionError, match="nodes of a rank"):
        write("t", rounds=10**6)
    with pytest.raises(OptionError, match="cannot write"):
        write("a\0b")
    with monkeypatch.context() as patch:
        patch.setattr(export, "MAX_TRACE_BYTES", 1000.0)
        with pytest.raises(OptionError, match="1 kB"):
            write("t")
    assert not list(tmp_path.iterdir())
    (tmp_path / "t").mkdir()
    write("t")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert len(before) == 6
    with pytest.raises(OptionError, match="exists"):
        write("t")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("changes", [["--set", "inter.bandwidth=1 Gbit/s"]])
def test_the_commands_give_what_run_gives(cli: Command, tmp_path: Path, changes: list[str]) -> None:
    """`export` writes all 16 ranks, folded ones too; `replay` gives the figures of `run`."""
    strategy = "co2:tau=3,delay=1,worker=node"
    assert cli("export", *ON, "-s", strategy, "-o", "t").code == 0
    assert len(list((tmp_path / "t").glob("trace.*.et"))) == 16
    replayed = json.loads(cli("replay", "t", "-c", "dgx-h100", *changes, "--json").out)
    ran = json.loads(cli("run", *ON, "-s", strategy, *changes, "--json").out)
    same = set(replayed) & set(ran) - {"cluster", "schedule"}  # two things of this name
    assert len(same) > 10
    assert {name: replayed[name] for name in same} == {name: ran[name] for name in same}
