"""What ranks of the tests do with buffers, frozen weights and other modules of every kind."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from local_problem import said
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from realrun.algorithms import DiLoCo, LocalSGD
from realrun.execute.world import World


class Pair(torch.Tensor):
    """A subclass that keeps codes and a scale, as quantized weights do, and can do little."""

    codes: Tensor
    scale: Tensor

    def __new__(cls, codes: Tensor, _: Tensor) -> Self:
        """Without memory of its own."""
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Names of what it consists of."""
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        """Nothing but `detach`."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(str(func))


class Closed(Pair):
    """One that does not tell what it consists of."""

    __tensor_flatten__ = property()  # type: ignore[assignment]


def linear(**buffers: Tensor | None) -> nn.Module:
    """A layer with buffers."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    for name, one in buffers.items():
        model.register_buffer(name, one)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, steps: int = 4) -> None:
    """Some steps on this rank's data."""
    for step in range(steps):
        numbers = torch.Generator().manual_seed(100 * world.rank + step)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=numbers)).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of the weights that are trained."""
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of within."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in told]


def numbers(tensor: Tensor) -> list[Any]:
    """The elements, readable in JSON."""
    flat = (tensor.to_dense() if tensor.layout != torch.strided else tensor).flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).flatten()
    return [str(one) for one in flat.double().tolist()]


def layouts(rank: int) -> dict[str, Tensor]:
    """Buffers of every kind whose values are those of a rank: 100 on rank 1 more than on rank 0."""
    table = torch.arange(24.0).view(4, 6) + 100 * rank
    with torch.inference_mode():
        cached = torch.arange(3.0) + 100 * rank
    return {
        "slice": table[:, :3],
        "holes": table[::2, 3::2],
        "transposed": torch.arange(6.0).add(100 * rank).view(2, 3).t(),
        "expanded": torch.arange(3.0).add(100 * rank).expand(4, 3),
        "repeated": torch.full((1,), 5.0 + 100 * rank).expand(4),
        "overlapping": torch.arange(5.0).add(100 * rank).as_strided((3, 3), (1, 1)),
        "scalar": torch.tensor(5.0 + 100 * rank),
        "empty": torch.zeros(0, 3),
        "fp64": torch.arange(3.0, dtype=torch.float64) + 100 * rank,
        "fp16": (torch.arange(3.0) + 100 * rank).half(),
        "byte": (torch.ones(3) + rank).to(torch.float8_e4m3fn),
        "complex": torch.full((2,), complex(1 + 100 * rank, 2)),
        "conjugate": torch.full((2,), complex(1 + 100 * rank, 2)).conj(),
        "cached": cached,
        "sparse": torch.diag(torch.arange(1.0, 4) + 100 * rank).to_sparse(),
        "rows": torch.diag(torch.arange(1.0, 4) + 100 * rank).to_sparse_csr(),
        "count": torch.tensor(3 + 100 * rank),
        "flags": torch.tensor([rank == 0, rank == 1]),
    }


def of_every_layout(world: World) -> dict[str, list[Any]]:
    """Buffers at the start, where all hold the first rank's, in a consensus, and at the end."""
    buffers = layouts(world.rank)
    model = linear(**buffers)
    outside = buffers["slice"]._base
    assert outside is not None
    found: dict[str, list[Any]] = {name: [] for name in buffers}
    with LocalSGD(model, sgd(model), tau=2) as algorithm:
        for name, one in buffers.items():
            found[name].append(numbers(one))
        train(model, algorithm.optimizers[0], world)
        for name, one in layouts(world.rank).items():
            with torch.inference_mode(one.is_inference()):
                if name in {"expanded", "repeated"}:
                    buffers[name][0] = one[0]
                elif one.layout == torch.sparse_csr:
                    buffers[name].values().copy_(one.values())
                else:
                    buffers[name].copy_(one)
        with algorithm.consensus(buffers=True):
            for name, one in buffers.items():
                found[name].append(numbers(one))
    for name, one in buffers.items():
        found[name].append(numbers(one))
    found["outside"] = [numbers(outside[1::2])]
    return found


def first_ones(_: World) -> dict[str, list[Any]]:
    """The buffers of rank 0 and of rank 1, and their means."""
    one, other = layouts(0), layouts(1)
    for each in (one, other):
        each["byte"] = each["byte"].double()
    return {
        name: [
            numbers(one[name]),
            numbers(one[name] if name in {"count", "flags"} else _mean(one[name], other[name])),
        ]
        for name in one
    }


def _mean(one: Tensor, other: Tensor) -> Tensor:
    dense = [(each.to_dense() if each.layout != torch.strided else each) for each in (one, other)]
    return (dense[0].clone() + dense[1].clone()) / 2


def left_alone(world: World) -> dict[str, Any]:
    """Buffers that are equal on all ranks, of kinds that have no mean, and what is warned of."""
    codes = torch.arange(4, dtype=torch.int8)
    scale = torch.tensor(0.5)
    with heard() as made:
        model = linear(
            quantized=torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint8),
            nowhere=torch.zeros(3, device="meta"),
            pair=Pair(codes + world.rank, scale),
            closed=Closed(codes, scale),
        )
        algorithm = LocalSGD(model, sgd(model), tau=2)
    train(model, algorithm.optimizers[0], world)
    with heard() as ended:
        algorithm.finish()
    pair = model.pair
    assert isinstance(pair, Pair)
    return {
        "made": [one for one in made if "deprecated" not in one],
        "ended": ended,
        "codes": pair.codes.tolist(),
    }


def not_finite(world: World) -> dict[str, Any]:
    """Elements that are not finite, on one rank and on all, at every end."""
    found: dict[str, Any] = {}
    mask = torch.full((3, 3), float("-inf")).triu(1)

    def trained(end: Callable[[Any, nn.Module], None], name: str) -> None:
        model = linear(mask=mask.clone(), moving=mask.clone(), bad=torch.zeros(3))
        also = AveragedModel(linear(seen=torch.zeros(2)))
        algorithm = LocalSGD(model, sgd(model), tau=2)
        train(model, algorithm.optimizers[0], world)
        model.moving[0, 0] = world.rank
        model.bad.copy_(torch.tensor([world.rank, 4.0, 4.0]))
        if world.rank:
            model.bad[1], model.bad[2] = float("nan"), float("inf")
        also.module.seen[0] = float("inf") if world.rank else 7.0
        with heard() as told:
            end(algorithm, also)
        found[name] = {
            "mask": bool(torch.equal(model.mask, mask)),
            "moving": numbers(model.moving[0]),
            "bad": numbers(model.bad),
            "also": numbers(also.module.seen),
            "told": sorted(told),
        }

    def finish(algorithm: Any, also: nn.Module) -> None:
        algorithm.finish(also)

    def agree(algorithm: Any, also: nn.Module) -> None:
        with algorithm.consensus(also, buffers=True):
            assert bool(also.module.seen.isfinite().all())  # type: ignore[union-attr, operator]
        algorithm.finish(buffers=False)

    trained(finish, "finish")
    trained(agree, "consensus")
    return found


def joined(world: World) -> dict[str, Any]:
    """What ranks hold after a block in which the first one has no data."""
    model = nn.Sequential(nn.BatchNorm1d(6), linear(mask=torch.full((2,), float("-inf"))))
    teacher = linear().requires_grad_(requires_grad=False)
    model.add_module("teacher", teacher)
    also = AveragedModel(nn.Linear(2, 1))
    optimizer = sgd(model)
    with (
        heard() as told,
        LocalSGD(model, optimizer, tau=2) as algorithm,
        algorithm.join(also),
    ):
        if world.rank:
            for _ in range(2):
                optimizer.zero_grad()
                model[1](model[0](torch.randn(8, 6) + 3)).sum().backward()  # type: ignore[index]
                optimizer.step()
            also.n_averaged.fill_(9)
            next(teacher.parameters()).data.fill_(5.0)
        else:
            model[0].running_var.fill_(float("nan"))  # type: ignore[index, operator, union-attr]
    return {
        "batches": int(model[0].num_batches_tracked),  # type: ignore[index, arg-type]
        "variance": bool(model[0].running_var.isfinite().all()),  # type: ignore[index, operator, union-attr, arg-type]
        "mask": numbers(model[1].mask),  # type: ignore[index, arg-type]
        "averaged": int(also.n_averaged),
        "teacher": numbers(next(teacher.parameters())),
        "told": told,
    }


def unlike(world: World) -> dict[str, Any]:
    """Buffers that differ between ranks in the end, in a consensus and after it."""
    model = linear(
        grown=torch.zeros(4),
        typed=torch.zeros(2),
        graph=torch.eye(3).to_sparse(),
        gone=torch.zeros(1),
        mean=torch.zeros(3),
    )
    algorithm = LocalSGD(model, sgd(model), tau=2)
    train(model, algorithm.optimizers[0], world)
    if world.rank:
        model.grown = torch.arange(8.0)
        model.typed = torch.zeros(2, dtype=torch.float64)
        model.graph = torch.ones(3, 3).to_sparse()
        model.gone = None
        model.register_buffer("new", torch.ones(2))
    model.mean.fill_(world.rank)
    with heard() as within, algorithm.consensus(buffers=True):
        mean = numbers(model.mean)
    with heard() as told:
        algorithm.finish(*([linear()] if world.rank else []))
    return {
        "names": [one.split("'")[1] for one in told],
        "alike": within == told[: len(within)],
        "sizes": [len(model.grown), model.graph._nnz(), len(list(model.buffers()))],
        "mean": [mean, numbers(model.mean)],
        "parameters": numbers(model.weight),
    }


def frozen(world: World) -> dict[str, list[str]]:
    """Frozen weights in a consensus, after it and at the end, however they were changed."""
    moves: dict[str, Callable[[nn.Module], object]] = {
        "data": lambda one: one.weight.data.mul_(0).add_(world.rank),
        "assigned": lambda one: setattr(one.weight, "data", torch.full((1, 6), float(world.rank))),
        "replaced": lambda one: setattr(
            one, "weight", nn.Parameter(torch.full((1, 6), float(world.rank)), requires_grad=False)
        ),
        "loaded": lambda one: one.load_state_dict(
            {"weight": torch.full((1, 6), float(world.rank)), "bias": torch.zeros(1)}
        ),
        "one row": lambda one: one.weight.data[0, 2:3].fill_(world.rank),
        "thawed": lambda one: (
            one.requires_grad_().weight.data.fill_(world.rank)
            is one.requires_grad_(requires_grad=False)
        ),
    }
    model = nn.ModuleDict({name: linear() for name in ("student", "own", *moves)})
    for name in ("own", *moves):
        model[name].requires_grad_(requires_grad=False)
    optimizer = sgd(model["student"])
    found: dict[str, list[str]] = {}
    with LocalSGD(model, optimizer, tau=2) as local:
        model["own"].weight.data.fill_(world.rank)  # before the first step: as it was loaded
        train(model["student"], optimizer, world)
        for name, move in moves.items():
            move(model[name])
        with local.consensus(buffers=True):
            found = {name: numbers(model[name].weight[0, 2]) for name in moves}
        for name in moves:
            found[name] += numbers(model[name].weight[0, 2])
    for name in moves:
        found[name] += numbers(model[name].weight[0, 2])
    return {**found, "own": numbers(model["own"].weight[0, 2])}


def by_default(world: World, dtype: str, device: str) -> list[list[str]]:
    """Parameters after trainings under torch's defaults of fp32 and the CPU, and under others."""
    found = []
    for first, then in ((torch.float32, "cpu"), (getattr(torch, dtype), device)):
        model = linear(mean=torch.zeros(3)).float()
        torch.set_default_dtype(first)
        torch.set_default_device(then)
        try:
            with DiLoCo(model, sgd(model), tau=2, dtype="int8") as algorithm:
                torch.set_default_device("cpu")  # the data
                torch.set_default_dtype(torch.float32)
                train(model, algorithm.optimizers[0], world)
                torch.set_default_dtype(first)
                torch.set_default_device(then)
                with algorithm.consensus(buffers=True):
                    pass
                kept = algorithm.state_dict()[f"rank{world.rank}"]
                types = {str(one.dtype) for one in kept.values() if isinstance(one, Tensor)}
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device("cpu")
        found.append([*numbers(model.weight), *types])
    return found


def spectral(world: World) -> list[list[str]]:
    """The vectors of power iterations, in the end, of both kinds of a spectral norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.spectral_norm(nn.Linear(6, 1)),
    )
    with LocalSGD(model, sgd(model), tau=2) as algorithm:
        train(model, algorithm.optimizers[0], world)
        own = dict(model.named_buffers())
        if world.rank:
            for one in own.values():
                one.neg_()
        first = [one.clone() for one in own.values()]
        for one in first:
            dist.broadcast(one, 0)
    return [
        [str(torch.equal(one, before)) for one, before in zip(own.values(), first, strict=True)]
    ]


def new_buffers(world: World) -> str:
    """What is said where the ranks begin with sparse buffers of other structure."""
    matrix = torch.eye(3) if world.rank else torch.ones(3, 3)
    model = linear(graph=matrix.to_sparse())
    return said(lambda: LocalSGD(model, sgd(model), tau=2))
