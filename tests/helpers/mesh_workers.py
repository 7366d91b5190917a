"""What ranks of tests do whose workers are parts of a DeviceMesh: FSDP2, tensor parallel, both."""

import copy
from functools import partial
from typing import Any

import torch
from algorithm_workers import followed
from local_problem import algorithm_of, batch, network, optimizer, said
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from realrun.algorithms import LocalSGD, LocalUpdate, Workers
from realrun.execute.world import World

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "tp": (("dp", "fsdp", "tp"), (2, 1, 2)),
    "tp alone": (("dp", "tp"), (2, 2)),
    "fsdp, tp": (("dp", "fsdp", "tp"), (2, 2, 2)),
    "hsdp": (("dp", "replicate", "shard"), (2, 2, 2)),
    "hsdp of one": (("dp", "replicate", "shard"), (1, 2, 2)),
}
"""Dimensions of the mesh; those but the first are inside a worker."""


def mesh_of(inside: str) -> DeviceMesh:
    """The mesh of all ranks."""
    names, sizes = MESHES[inside]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


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
    if "hsdp" in inside:
        fully_shard(model[0], mesh=mesh["replicate", "shard"])
        fully_shard(model, mesh=mesh["replicate", "shard"])
    elif "fsdp" in names:
        fully_shard(model[0], mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    return model


def started(
    inside: str, case: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer, LocalUpdate, DeviceMesh]:
    """Model, optimizer, algorithm and mesh; only the first replica of the first worker is right."""
    mesh = mesh_of(inside)
    replica = mesh.get_local_rank("replicate") if "hsdp" in inside else 0
    model = spread(inside, mesh, seed=mesh.get_local_rank("dp") + 2 * replica)
    optim = optimizer(model, case["inner"])
    kind = partial(algorithm_of, case["algorithm"])
    workers = Workers.of_mesh(mesh, "dp")
    return model, optim, kind(model, optim, worker=workers, **case["options"]), mesh


def train_inside(
    model: nn.Module, optim: torch.optim.Optimizer, mesh: DeviceMesh, steps: range
) -> None:
    """Ranks that share the data of a worker take their part of a batch."""
    names = mesh.mesh_dim_names or ()
    place, count = 0, 1
    for name in ("fsdp", "replicate", "shard"):
        if name in names:
            size = mesh.size(names.index(name))
            place, count = place * size + mesh.get_local_rank(name), count * size
    for step in steps:
        given, wanted = (
            torch.chunk(part, count)[place] for part in batch(mesh.get_local_rank("dp"), step)
        )
        optim.zero_grad()
        (model(given) - wanted).square().mean().backward()
        optim.step()


def whole(model: nn.Module) -> Tensor:
    """All parameters in one row, gathered."""
    found = [one.detach() for one in model.parameters()]
    return torch.cat(
        [(one.full_tensor() if isinstance(one, DTensor) else one).reshape(-1) for one in found]
    )


def follow(_: World, inside: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train by every case: the whole model of this rank's worker after each round, and stats."""
    found = []
    for case in cases:
        model, optim, algorithm, mesh = started(inside, case)
        steps = partial(train_inside, model, optim, mesh)
        found.append(followed(case, algorithm, steps, partial(whole, model)))
    return found


def resumed(_: World, inside: str, case: dict[str, Any], cuts: list[int]) -> list[list[bool]]:
    """Whether a run cut after some steps ends with the model and the anchor of an uncut one."""
    found, last = [], 4 * case["options"]["tau"]
    for cut in cuts:
        model, optim, algorithm, mesh = started(inside, case)
        train_inside(model, optim, mesh, range(cut))
        saved = copy.deepcopy([model.state_dict(), optim.state_dict(), algorithm.state_dict()])
        train_inside(model, optim, mesh, range(cut, last))
        other, again, restarted, _ = started(inside, case)
        other.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        restarted.load_state_dict(saved[2])
        train_inside(other, again, mesh, range(cut, last))
        ends = [
            (whole(one), one_of._outer.state.anchor)
            for one, one_of in ((model, algorithm), (other, restarted))
        ]
        found.append([torch.equal(*pair) for pair in zip(*ends, strict=True)])
        algorithm.close()
        restarted.close()
    return found


def ended(world: World, inside: str, case: dict[str, Any]) -> dict[str, Any]:
    """The whole model and a buffer: in a consensus, before and after it, and after the end."""
    mesh = mesh_of(inside)
    model = spread(inside, mesh, seed=0)
    model.register_buffer("seen", torch.tensor([float(world.rank)]))
    optim = optimizer(model, case["inner"])
    kind = partial(algorithm_of, case["algorithm"])
    with kind(model, optim, worker=Workers.of_mesh(mesh, "dp"), **case["options"]) as algorithm:
        train_inside(model, optim, mesh, range(3))
        model.seen.fill_(world.rank)
        found = {"before": whole(model).tolist()}
        with algorithm.consensus(buffers=True):
            found["consensus"], found["seen"] = whole(model).tolist(), model.seen.tolist()
        found["after"] = whole(model).tolist()
    found["end"] = [*whole(model).tolist(), *model.seen.tolist()]
    return found


def tampered(world: World) -> list[str]:
    """What is told where a replica of rank 3 is changed before the end of the first round."""
    case = {"algorithm": "LocalSGD", "inner": "sgd", "options": {"tau": 2}}
    told = []
    for inside in ("hsdp of one", "tp alone"):
        model, optim, algorithm, mesh = started(inside, case)
        train_inside(model, optim, mesh, range(1))
        one = model[1].weight
        local = one.to_local() if isinstance(one, DTensor) else one
        if world.rank == 3:
            local.data[0] += 1
        told.append(said(lambda: train_inside(model, optim, mesh, range(1, 2))))  # noqa: B023 - called at once
        algorithm.close()
    return told


def refused(_: World) -> dict[str, str]:
    """What is told of meshes and placements that cannot be averaged over."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    turned = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "shard"))
    nameless = init_device_mesh("cpu", (4,))
    workers = Workers.of_mesh(mesh, "dp")

    def start(model: nn.Module) -> None:
        LocalSGD(model, optimizer(model, "sgd"), worker=workers)

    swapped, wide = network(), network()
    fully_shard(swapped, mesh=turned["shard"])
    fully_shard(wide, mesh=mesh)
    partial = nn.Module()
    summed = DTensor.from_local(torch.ones(2), mesh["shard"], [Partial()])
    partial.register_parameter("sum", nn.Parameter(summed))
    return {
        "turned": said(lambda: start(swapped)),
        "wide": said(lambda: start(wide)),
        "partial": said(lambda: start(partial)),
        "unknown": said(lambda: Workers.of_mesh(mesh, "replicate")),
        "none": said(lambda: Workers.of_mesh(mesh, ())),
        "nameless": said(lambda: Workers.of_mesh(nameless, "dp")),
        "part": said(lambda: Workers.of_mesh(mesh["shard"], "shard")),
    }


def groups(_: World, across: list[list[str]]) -> list[list[list[int]]]:
    """Peers and ranks of a worker, where dimensions of a mesh of 2 x 2 x 2 tell workers apart."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    found = [Workers.of_mesh(mesh, names) for names in across]
    return [[one.peer_ranks, one.inner_ranks] for one in found]
