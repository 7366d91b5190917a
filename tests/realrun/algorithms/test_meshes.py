"""Workers that are parts of a DeviceMesh: FSDP2, tensor parallelism and HSDP inside a worker."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from local_problem import (
    algorithm_of,
    batch,
    co2_of,
    followed,
    loss,
    network,
    optimizer,
    said,
    train,
    vector,
)
from ranks import everywhere, on_ranks, ranked
from reference_local_update import case, check, expected
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from realrun.algorithms import LocalSGD, LocalUpdate, Workers
from realrun.execute.world import World

pytestmark = pytest.mark.dist

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "tp": (("dp", "fsdp", "tp"), (2, 1, 2)),
    "tp alone": (("dp", "tp"), (2, 2)),
    "fsdp, tp": (("dp", "fsdp", "tp"), (2, 2, 2)),
    "hsdp": (("dp", "replicate", "shard"), (2, 2, 2)),
    "hsdp of one": (("dp", "replicate", "shard"), (1, 2, 2)),
    "fsdp": (("dp", "fsdp"), (2, 2)),
    "ddp": (("dp", "ddp"), (2, 2)),
}
"""Dimensions of the mesh; those but the first are inside a worker."""
CASES = [
    case("LocalSGD", "adamw", rounds=5, tau=2),
    case("CO2", "adamw", rounds=5, tau=2, outer_lr=0.7, clip=0.02),
    case("DiLoCo", "sgd", rounds=5, tau=2, outer_momentum=0.9, outer_lr=0.5),
    case("CO2", "momentum", rounds=5, tau=2, delay=1, keep=0.5, predict=0.5),
]


def spread(inside: str, mesh: DeviceMesh, seed: int) -> nn.Module:
    """The model of the problem over the ranks of a worker; its 7 rows are uneven shards."""
    model = network(seed=seed)
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        plan = {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "3": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
    if "hsdp" in inside or "fsdp" in names:
        shards = mesh["replicate", "shard"] if "hsdp" in inside else mesh["fsdp"]
        fully_shard(model[0], mesh=shards)
        fully_shard(model, mesh=shards)
    if "ddp" in names:
        return DistributedDataParallel(model, process_group=mesh.get_group("ddp"))
    return model


def started(
    inside: str, problem: dict[str, Any], **buffers: Tensor
) -> tuple[nn.Module, torch.optim.Optimizer, LocalUpdate, DeviceMesh]:
    """Model, optimizer, algorithm and mesh; only the first replica of the first worker is right."""
    names, sizes = MESHES[inside]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    replica = mesh.get_local_rank("replicate") if "hsdp" in inside else 0
    model = spread(inside, mesh, seed=mesh.get_local_rank("dp") + 2 * replica)
    for name, value in buffers.items():
        model.register_buffer(name, value)
    optim = optimizer(model, problem["inner"])
    workers = "node" if inside in {"fsdp", "ddp"} else Workers.of_mesh(mesh, "dp")
    made = algorithm_of(problem["algorithm"], model, optim, worker=workers, **problem["options"])
    return model, optim, made, mesh


def train_inside(
    model: nn.Module, optim: torch.optim.Optimizer, mesh: DeviceMesh, steps: range
) -> None:
    """Ranks that share the data of a worker take their part of a batch."""
    names = mesh.mesh_dim_names or ()
    part, count = 0, 1
    for name in ("fsdp", "ddp", "replicate", "shard"):
        if name in names:
            size = mesh.size(names.index(name))
            part, count = part * size + mesh.get_local_rank(name), count * size
    for step in steps:
        inputs, targets = (
            torch.chunk(rows, count)[part] for rows in batch(mesh.get_local_rank("dp"), step)
        )
        optim.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optim.step()


def follow(_: World, inside: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train by every case: the whole model of this rank's worker after each round, and stats."""
    answers = []
    for problem in cases:
        model, optim, algorithm, mesh = started(inside, problem)
        steps = partial(train_inside, model, optim, mesh)
        answers.append(followed(problem, algorithm, steps, partial(vector, model)))
    return answers


@pytest.mark.parametrize(
    ("inside", "ranks", "cases"),
    [
        ("tp", 4, CASES),  # 2 workers x 1 FSDP2 rank x 2 tensor parallel ranks
        ("tp alone", 4, CASES[1:2]),  # plain and replicated parameters count once in norms
        ("fsdp, tp", 8, CASES),  # 2 workers x 2 FSDP2 x 2 tensor parallel ranks, uneven shards
        ("hsdp", 8, CASES[1::2]),  # 2 workers x 2 replicas x 2 shards, replicas made alike
    ],
    ids=["tp", "tp alone", "fsdp, tp", "hsdp"],
)
def test_workers_on_a_mesh_equal_one_process(
    inside: str, ranks: int, cases: list[dict[str, Any]]
) -> None:
    """Models of both workers, penalties, clipped shares and residuals."""
    answers = on_ranks("follow", ranks, module=__name__, inside=inside, cases=cases)
    for index, problem in enumerate(cases):
        seen: list[Any] = []
        wanted = expected(problem, 2, seen)
        for rank, answer in enumerate(answers):
            check(answer[index], problem, wanted[:, 2 * rank // ranks], seen)


@pytest.mark.nightly
@ranked(8)
def test_a_worker_on_a_mesh_resumes_bit_for_bit(_: World) -> None:
    """Within a round and between two, with fragments under way and replicas on submeshes."""
    problem = case("CO2", "adamw", tau=2, delay=1, fragments=2, outer_momentum=0.5, clip=0.02)
    for cut in (3, 4):
        first = model, optim, algorithm, mesh = started("fsdp, tp", problem)
        train_inside(model, optim, mesh, range(cut))
        saved = copy.deepcopy([part.state_dict() for part in first[:3]])
        train_inside(model, optim, mesh, range(cut, 8))
        second = other, again, restarted, _ = started("fsdp, tp", problem)
        for part, state in zip(second, saved, strict=False):
            part.load_state_dict(state)
        train_inside(other, again, mesh, range(cut, 8))
        assert torch.equal(vector(model), vector(other))
        assert torch.equal(algorithm._outer.state.anchor, restarted._outer.state.anchor)
        algorithm.close()
        restarted.close()


@ranked(4)
def test_consensus_and_end_are_one_whole_model_on_a_mesh(world: World) -> None:
    """And buffers are their mean; what a worker holds comes back after the consensus."""
    seen = torch.tensor([float(world.rank)])
    model, optim, algorithm, mesh = started("tp", case("CO2", tau=2), seen=seen)
    with algorithm:
        train_inside(model, optim, mesh, range(3))
        model.seen.fill_(world.rank)
        before = vector(model).tolist()
        with algorithm.consensus(buffers=True):
            consensus = vector(model).tolist()
            assert model.seen.tolist() == [1.5]
        assert before == vector(model).tolist() != consensus
    assert model.seen.tolist() == [1.5]
    for alike in (consensus, vector(model).tolist()):
        assert everywhere(alike) == [alike] * 4
    held = everywhere(before)
    assert held[0] == held[1] != held[2]


@ranked(4)
def test_replicas_that_differ_are_named(world: World) -> None:
    """Only ranks that hold the same part: with HSDP, and of a parameter that is not sharded.

    A replica of rank 3 is changed before the end of the first round.
    """
    for inside, ranks, kinds in (
        ("hsdp of one", "[1, 3]", ["MismatchError"] * 4),
        ("tp alone", "[2, 3]", ["RankFailure"] * 2 + ["MismatchError"] * 2),
    ):
        model, optim, algorithm, mesh = started(inside, case("LocalSGD", tau=2))
        train_inside(model, optim, mesh, range(1))
        weight = model[1].weight
        if world.rank == 3:
            (weight.to_local() if isinstance(weight, DTensor) else weight).data[0] += 1
        heard = said(lambda: train_inside(model, optim, mesh, range(1, 2)))  # noqa: B023 - called at once
        assert heard.startswith(kinds[world.rank]), heard
        assert f"after round 0 ranks {ranks} of a worker hold" in heard
        algorithm.close()


@ranked(4, last=True)
def test_meshes_that_workers_cannot_average_over_are_refused(_: World) -> None:
    """With what was problem and what is allowed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    turned = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "shard"))
    nameless = init_device_mesh("cpu", (4,))
    workers = Workers.of_mesh(mesh, "dp")

    def start(model: nn.Module) -> LocalSGD:
        return LocalSGD(model, optimizer(model, "sgd"), worker=workers)

    swapped, wide, unsummed = network(), network(), nn.Module()
    fully_shard(swapped, mesh=turned["shard"])
    fully_shard(wide, mesh=mesh)
    summed = DTensor.from_local(torch.ones(2), mesh["shard"], [Partial()])
    unsummed.register_parameter("sum", nn.Parameter(summed))
    heard = said(lambda: start(swapped))
    assert heard.startswith("MismatchError: rank")
    assert "'part of 0.weight: Shard(dim=0) 1 of 2'" in heard
    for call, words in (
        (partial(start, wide), "spread over ranks [0, 1, 2, 3]"),
        (
            partial(start, unsummed),
            "'sum' is placed as (Partial(sum),); each placement must be a shard",
        ),
        (lambda: Workers.of_mesh(mesh, "replicate"), "across is 'replicate'; it must name"),
        (lambda: Workers.of_mesh(mesh, "replicate"), "each once: dp, shard"),
        (lambda: Workers.of_mesh(mesh, ()), "across is ()"),
        (lambda: Workers.of_mesh(nameless, "dp"), "has no names (mesh_dim_names)"),
        (lambda: Workers.of_mesh(mesh["shard"], "shard"), "of 4; give the mesh of all ranks"),
    ):
        assert words in said(call)


@ranked(8)
def test_dimensions_of_a_mesh_tell_workers_apart(world: World) -> None:
    """One dimension, two in any order, and all; the others are a worker. 2 x 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    rank = world.rank
    a, b, c = rank // 4, rank // 2 % 2, rank % 2
    for names, peers, inner in (
        (["a"], [rank % 4, rank % 4 + 4], [4 * a + other for other in range(4)]),
        (["c", "a"], [2 * b, 2 * b + 1, 2 * b + 4, 2 * b + 5], [4 * a + c, 4 * a + c + 2]),
        (["a", "b", "c"], list(range(8)), [rank]),
    ):
        workers = Workers.of_mesh(mesh, names)
        assert (workers.peer_ranks, workers.inner_ranks) == (peers, inner)


# --- where a worker is a node of two ranks -------------------------------------------------------


@ranked(4, gpus_per_node=2)
def test_an_evaluation_of_the_consensus_leaves_nothing_gathered(_: World) -> None:
    """FSDP2 that keeps whole parameters after a forward must not go on with the wrong ones.

    In the middle of a round, without a backward pass in between.
    """
    model, optim, slowmo, mesh = started("fsdp", case("SlowMo", tau=2))
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(reshard_after_forward=False)

    def evaluated() -> float:
        with torch.no_grad():
            return float(loss(model, 7, 7))

    with slowmo:
        train_inside(model, optim, mesh, range(3))
        live = evaluated()
        with slowmo.consensus():
            assert evaluated() != live
        assert evaluated() == live
        for module in sharded:
            module.reshard()
        assert evaluated() == live


@ranked(4, gpus_per_node=2)
def test_nodes_that_hold_nothing_in_common_are_refused(world: World) -> None:
    """Where ranks of a node train apart; and shards over all ranks, which are no worker's."""
    mine = [0, 1] if world.rank < 2 else [2, 3]

    def bare(steps: int) -> None:
        model = network()
        optim = optimizer(model, "sgd")
        with co2_of(model, optim, tau=2, worker="node"):
            train(model, optim, world.rank, range(steps))

    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    bare(0)
    assert len(groups) == before, "groups made for worker='node' are problem back"
    heard = said(lambda: bare(3))
    assert heard.startswith("MismatchError: after round 0")
    assert f"{mine}" in heard
    sharded = network()
    fully_shard(sharded, mesh=DeviceMesh("cpu", list(range(4))))
    optim = optimizer(sharded, "sgd")
    heard = said(lambda: LocalSGD(sharded, optim, worker="node"))
    assert "over ranks [0, 1, 2, 3]" in heard
    assert f"worker is ranks {mine}" in heard
    assert f"worker is ranks [{world.rank}]" in said(lambda: LocalSGD(sharded, optim))


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
@ranked(4, gpus_per_node=2)
def test_nodes_fail_and_resume_as_one(world: World, inside: str, tmp_path: Path) -> None:
    """A NaN or a drift in one rank's share is an error on all; dcp keeps every rank's state."""
    start = partial(started, inside, case("CO2", "adamw", tau=2, check_every=1))

    def harmed(rank: int, harm: Callable[[LocalUpdate], None]) -> str:
        def go_on() -> None:
            model, optim, algorithm, mesh = start()
            with algorithm:
                train_inside(model, optim, mesh, range(3))
                if world.rank == rank:
                    harm(algorithm)
                train_inside(model, optim, mesh, range(3, 8))

        return said(go_on)

    def poison(algorithm: LocalUpdate) -> None:
        launch = algorithm._outer.launch

        def launch_nan(values: torch.Tensor) -> Any:
            values[0] = torch.nan
            return launch(values)

        algorithm._outer.launch = launch_nan

    def tamper(algorithm: LocalUpdate) -> None:
        algorithm._outer.state.anchor[1] += 1

    heard = harmed(2, poison)  # the first rank of the second node, in its own part
    assert heard.startswith("NonFiniteError: the average of round 1")
    assert ("0.weight" in heard) == (world.rank in {0, 2})
    assert "rank 2" in heard
    assert harmed(3, tamper).startswith("MismatchError: after round 1")
    model, optim, algorithm, mesh = start()
    with algorithm:
        train_inside(model, optim, mesh, range(5))
        dcp.save({"algorithm": algorithm}, checkpoint_id=tmp_path / inside)
        anchor = algorithm._outer.state.anchor.clone()
        flying = algorithm._outer.flights[0].vector.clone()
    other = start()[2]
    with other:
        dcp.load({"algorithm": other}, checkpoint_id=tmp_path / inside)
        assert torch.equal(other._outer.state.anchor, anchor)
        assert torch.equal(other._outer.flights[0].vector, flying)
        assert other.stats().steps == 5
