"""Chakra traces of others, the commands, and what is refused."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command

from co2sim import chakra
from co2sim.chakra import export, schema
from co2sim.errors import CatalogError, OptionError
from co2sim.schedule import WORLD, Collective, DType, Kind, Layout, block, peers_of_blocks

pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="the extra chakra is missing")
KINDS = schema.schema()

from chakra.src.generator import generator  # noqa: E402 - of the extra

ON = ["-c", "dgx-h100", "-m", "gpt2-small", "--gpus", "16"]


@pytest.fixture(autouse=True, scope="module")
def _no_wait_for_disks() -> Iterator[None]:
    """Small folders need not survive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sync", lambda: None)
        yield


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


@pytest.mark.parametrize(
    ("make", "kind", "parts"),
    [
        (generator.one_comm_coll_node_allreduce, Kind.ALL_REDUCE, 1),
        (generator.one_comm_coll_node_allgather, Kind.ALL_GATHER, 4),
        (generator.one_comm_coll_node_reducescatter, Kind.REDUCE_SCATTER, 1),
        (generator.one_comm_coll_node_alltoall, Kind.ALL_TO_ALL, 1),
        (generator.one_comm_coll_node_broadcast, Kind.BROADCAST, 1),
    ],
)
def test_collectives_of_mlcommons_generator_are_read(
    make: Callable[[int, int], None],
    kind: Kind,
    parts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its `comm_size` is the input of a rank: of an all-gather, one part of the whole buffer."""
    monkeypatch.chdir(tmp_path)
    make(4, 1000)
    trace = chakra.read(tmp_path)
    (op,) = trace.schedule.body
    assert op.work == Collective(kind, op.name, 1000 * parts, DType.INT8, WORLD)
    assert (trace.ranks, trace.layout, trace.rounds) == (4, None, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: generator.one_comm_coll_node_barrier(2), "(BARRIER) is a BARRIER; allowed are"),
        (lambda: generator.one_comm_send_node(2, 8), "is a COMM_SEND_NODE; allowed are COMP_NODE"),
        (lambda: generator.one_comm_recv_node(2, 8), "is a COMM_RECV_NODE"),
        (lambda: generator.one_remote_mem_load_node(2, 8), "is a MEM_LOAD_NODE"),
        (lambda: generator.one_metadata_node_all_types(2), "is a METADATA_NODE"),
        (lambda: generator.one_comp_node(2, 5), "is a COMP_NODE without num_ops"),
    ],
)
def test_nodes_of_mlcommons_generator_that_we_have_not_are_named(
    make: Callable[[], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says which node, of which type, and what is allowed."""
    monkeypatch.chdir(tmp_path)
    make()
    with pytest.raises(CatalogError) as refused:
        chakra.read(tmp_path)
    assert words.replace("(BARRIER)", "('BARRIER')") in str(refused.value)
    assert ".0.et: node " in str(refused.value)
    assert "\n" not in str(refused.value)


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


def edit(path: Path, change: Callable[[Any], None], message: int) -> None:
    """Change one message of a file."""
    parts = list(schema.messages(path.read_bytes(), 10**6))
    kind = KINDS.Node if message else KINDS.GlobalMetadata
    one = kind.FromString(parts[message])
    change(one)
    parts[message] = one.SerializeToString()
    path.write_bytes(b"".join(map(schema.delimited, parts)))


def set_attribute(name: str, value: int) -> Callable[[Any], None]:
    """Give an attribute another number."""

    def change(message: Any) -> None:
        next(one for one in message.attr if one.name == name).uint64_val = value

    return change


def set_field(name: str, value: Any) -> Callable[[Any], None]:
    """Give a field another value."""
    return lambda message: setattr(message, name, value)


def set_work(message: Any) -> None:
    """Give the first work a field that is none."""
    texts = next(one for one in message.attr if one.name == "co2sim.works").string_list.values
    texts[0] = texts[0].replace("bf16", "fp17").replace('"flops":', '"flop":')


@pytest.mark.parametrize(
    ("rank", "message", "change", "words"),
    [
        (0, 4, set_attribute("num_ops", 5), ["trace.0.et", "node 3", "num_ops is 5"]),
        (3, 4, set_attribute("num_ops", 5), ["trace.3.et", "node 3", "num_ops is 5"]),
        (1, 1, set_field("name", "other"), ["trace.1.et", "'other'", "name is 'other'"]),
        (0, 4, set_attribute("co2sim.work", 999), ["node 3", "co2sim.work is 999"]),
        (0, 4, set_field("id", 7), ["node 3", "id is 7, and should be 3"]),
        (2, 3, set_field("duration_micros", 77), ["trace.2.et", "duration_micros is 77"]),
        (0, 0, set_attribute("co2sim.rounds", 5), ["nodes are not 5 rounds"]),
        (0, 0, set_attribute("co2sim.rounds", 0), ["co2sim.rounds is 0"]),
        (0, 0, set_attribute("co2sim.format", 2), ["co2sim.format is 2; only 1"]),
        (0, 0, set_attribute("co2sim.nodes", 9), ["18 ranks", "4 files"]),
        (1, 0, set_attribute("co2sim.steps", 9), ["trace.1.et", "metadata"]),
        (0, 0, set_work, ["its work"]),
    ],
)
def test_a_trace_of_ours_that_contradicts_itself_is_refused(
    rank: int, message: int, change: Callable[[Any], None], words: list[str], tmp_path: Path
) -> None:
    """The file, the node, what it says, and what it should say."""
    place = own(tmp_path / "t")
    edit(place / f"trace.{rank}.et", change, message)
    with pytest.raises(CatalogError) as refused:
        chakra.read(place)
    assert all(word in str(refused.value) for word in words), refused.value
    assert len(str(refused.value).splitlines()) == 1


COMPUTE = node(0, "COMP_NODE", num_ops=5)
REDUCE = collective(0, "ALL_REDUCE", 5)


@pytest.mark.parametrize(
    ("ranks", "groups", "words"),
    [
        ([[COMPUTE], [node(0, "COMP_NODE", num_ops=6)]], None, ["flops '6.0'", "'5.0'", "rank 1"]),
        ([[COMPUTE], [COMPUTE, node(1, "COMP_NODE", num_ops=5)]], None, ["rank 1 has 2 nodes"]),
        ([[COMPUTE, COMPUTE]], None, ["two nodes have the id 0"]),
        ([[node(0, "COMP_NODE", [7], num_ops=5)]], None, ["waits for node 7, which is not there"]),
        ([[node(0, "COMP_NODE", [0], num_ops=5)]], None, ["node 0 ('n0') waits for itself"]),
        ([[node(0, "COMP_NODE", num_ops=-5)]], None, ["num_ops is -5"]),
        ([[node(0, "COMP_NODE", num_ops="5")]], None, ["num_ops is '5'"]),
        ([[node(0, "COMP_NODE", num_ops=float("nan"))]], None, ["num_ops is nan"]),
        ([[node(0, "COMP_NODE", num_ops=5, is_cpu_op=True)]], None, ["is_cpu_op"]),
        ([[collective(0, "ALL_REDUCE", 0)]], None, ["comm_size is 0"]),
        ([[collective(0, "ALL_REDUCE", 5, involved_dim=[True, False])]], None, ["involved_dim"]),
        ([[collective(0, "ALL_REDUCE", 5, pg_name="7")]], None, ["process group '7'"]),
        ([[REDUCE]] * 3, {"7": [0, 9]}, ["comm_group.json", "[0, 9]", "0 to 2"]),
        ([[REDUCE]] * 3, {"7": [1, 1]}, ["comm_group.json", "each once"]),
        ([[REDUCE]] * 3, [], ["comm_group.json", "must be an object"]),
        (
            [[collective(0, "ALL_REDUCE", 5, pg_name="7")]] * 4,
            {"7": [0, 3]},
            ["[0, 3]", "of 4 ranks only"],
        ),
        (
            [[collective(0, "ALL_REDUCE", 5, pg_name="7")]] * 4,
            {"7": [0, 1]},
            ["x.2.et", "without rank 2"],
        ),
        ([[]], None, ["no nodes"]),
    ],
)
def test_a_trace_of_others_that_is_no_schedule_is_refused(
    ranks: list[list[Any]], groups: Any, words: list[str], tmp_path: Path
) -> None:
    """One line: the file, the node, what is wrong."""
    place = put(tmp_path / "t", *ranks, groups=groups)
    with pytest.raises(CatalogError) as refused:
        chakra.read(place)
    assert all(word in str(refused.value) for word in words), refused.value
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 400


def test_files_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no file, a missing rank, a pipe, nothing, garbage, a large file, too many."""

    def said(place: Path) -> str:
        with pytest.raises(CatalogError) as refused:
            chakra.read(place)
        return str(refused.value)

    assert "No such file" in said(tmp_path / "none" / "deeper")
    assert "no Chakra traces" in said(tmp_path)
    place = own(tmp_path / "t")
    (place / "trace.1.et").rename(place / "away")
    assert "trace.1.et is missing" in said(place)
    os.mkfifo(place / "trace.1.et")
    assert "not a regular file" in said(place)
    (place / "trace.1.et").unlink()
    (place / "trace.1.et").write_bytes(b"")
    assert "trace.1.et: it is empty" in said(place)
    (place / "trace.0.et").write_bytes(b"\xff" * 100)
    assert "trace.0.et: message 0" in said(place)
    (place / "trace.0.et").write_bytes(b"\x05hello")
    assert "message 0 is no GlobalMetadata" in said(place)
    (place / "trace.0.et").write_bytes(b"\x00" * 10)
    assert "message 0 is 0 bytes long" in said(place)
    shutil.copy(place / "away", place / "other.0.et")
    assert "2 traces, such as 'other', 'trace'" in said(place)
    (place / "comm_group.json").unlink()
    monkeypatch.setattr(chakra.reading, "MOST_RECORD_BYTES", 10)
    assert "larger than" in said(place / "other")
    monkeypatch.undo()
    monkeypatch.setattr(chakra.reading, "MOST_RANKS", 3)
    assert "4 ranks; at most 3" in said(own(tmp_path / "u"))


def test_other_process_groups_than_those_of_the_schedule_are_refused(tmp_path: Path) -> None:
    """Our file of groups was changed, or is gone."""
    place = own(tmp_path / "t")
    groups = place / "comm_group.json"
    for content in (groups.read_text().replace("[0, 1]", "[0, 3]"), "{}"):
        groups.write_text(content)
        with pytest.raises(CatalogError, match=r"in comm_group.json, group 1 is not of ranks 0, 1"):
            chakra.read(place)


def test_only_nodes_as_large_as_those_of_the_trace_replay_it(tmp_path: Path) -> None:
    """Its groups are nodes of 2 GPUs: on nodes of 4 others would meet."""
    trace = chakra.read(own(tmp_path / "t"))
    with pytest.raises(OptionError, match=r"2 nodes of 2 GPUs.*1 node of 4 GPUs"):
        chakra.replay(trace, tiny.cluster(1, 4))


def test_what_is_interrupted_or_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C amid the files, a disk without room, a folder with files: nothing half-written."""
    schedule = tiny.schedule("co2(tau=2,staleness=2)")

    def interrupt(done: int, _: int) -> None:
        if done == 2:
            assert len(list(tmp_path.rglob("*.et"))) == 2
            raise KeyboardInterrupt

    def write(name: str, **options: Any) -> None:
        chakra.write(schedule, tiny.cluster(), tmp_path / name, precision="bf16", **options)

    with pytest.raises(KeyboardInterrupt):
        write("t", done=interrupt)
    with pytest.raises(OptionError, match="2 rounds ago, which at least 3 rounds show"):
        write("t", rounds=2)
    with pytest.raises(OptionError, match="nodes of a rank are more than"):
        write("t", rounds=10**6)
    with pytest.raises(OptionError, match="cannot write"):
        write("a\0b")
    with monkeypatch.context() as patch:
        patch.setattr(export, "MOST_TRACE_BYTES", 1000.0)
        with pytest.raises(OptionError, match=r"4 files of .* at most 1 kB are written"):
            write("t")
    assert not list(tmp_path.iterdir())
    (tmp_path / "t").mkdir()
    write("t")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert len(before) == 6
    with pytest.raises(OptionError, match="exists"):
        write("t")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The base install has no protobuf."""
    monkeypatch.setitem(sys.modules, "chakra", None)
    monkeypatch.delitem(sys.modules, "chakra.schema.protobuf.et_def_pb2")
    with pytest.raises(OptionError, match=r"pip install 'co2sim\[chakra\]'"):
        own(tmp_path / "t")


@pytest.mark.parametrize("strategy", ["zeropp", "co2:tau=3,delay=1,worker=node"])
def test_the_commands_give_what_run_gives(cli: Command, tmp_path: Path, strategy: str) -> None:
    """`export` writes all 16 ranks, folded ones too; `replay` gives the figures of `run`."""
    code, out, _ = cli("export", *ON, "-s", strategy, "-o", "t")
    assert code == 0
    assert out.startswith("16 files of ")
    assert "--workload-configuration=t/trace" in out
    assert len(list((tmp_path / "t").glob("trace.*.et"))) == 16
    replayed = json.loads(cli("replay", "t", "-c", "dgx-h100", "--json")[1])
    run = json.loads(cli("run", *ON, "-s", strategy, "--json")[1])
    same = set(replayed) & set(run)
    assert len(same) > 10
    for name in same - {"cluster"}:
        assert replayed[name] == run[name], name
    code, out, _ = cli("replay", "t/trace", "-c", "dgx-h100")
    assert code == 0
    assert "communication exposed, per round" in out


def test_a_trace_on_another_network_is_the_same_what_if(cli: Command) -> None:
    """`--set` changes the cluster of a replay as it does that of a run."""
    cli("export", *ON, "-s", "ddp", "-o", "t")
    slow = ["--set", "inter.bandwidth=1 Gbit/s", "--json"]
    replayed = json.loads(cli("replay", "t", "-c", "dgx-h100", *slow)[1])
    run = json.loads(cli("run", *ON, "-s", "ddp", *slow)[1])
    assert replayed["round_time_s"] == run["round_time_s"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", *ON, "-s", "co2", "--rounds", "1"], ["rounds is 1", "at least 2 rounds"]),
        (["export", *ON, "-s", "ddp", "--rounds", "0"], ["rounds is 0"]),
        (["export", *ON, "-s", "ddp", "--rounds", "9" * 30], ["nodes of a rank are more than"]),
        (["export", *ON[:4], "-g", "80000", "-s", "ddp"], ["80,000 ranks are more than"]),
        (["replay", "none", "-c", "dgx-h100"], ["no Chakra traces"]),
        (["replay", ".", "-c", "dgx-h100"], ["no Chakra traces"]),
        (["replay", "none", "-c", "dgx-h101"], ["dgx-h101"]),
        (["replay"], ["--cluster"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    cli: Command, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    """Exit code 2."""
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_what_astra_sim_does_not_simulate_is_told(cli: Command) -> None:
    """ZeRO-2 with owners reduces to one rank: ASTRA-sim knows no such collective."""
    out = cli("export", *ON, "-s", "zero2:owners=true", "-o", "t")[1]
    assert "warning: ASTRA-sim does not simulate broadcast and reduce" in out


def test_layouts_with_sites_come_back(tmp_path: Path) -> None:
    """Two sites of two nodes: the groups of sites are those of the layout."""
    layout = Layout(4, 2, sites=2)
    schedule = tiny.strategies.parse("co2(tau=2,delay=1,worker=site)").schedule(tiny.job(), layout)
    from co2sim.cluster import Link  # noqa: PLC0415 - for this test

    cluster = tiny.cluster(4, 2, sites=2, wan=Link(1e8))
    chakra.write(schedule, cluster, tmp_path / "t", precision="bf16")
    found = chakra.read(tmp_path / "t")
    assert (found.schedule, found.layout) == (schedule, layout)
