"""Buffers, frozen weights and other modules of every kind end alike on all ranks, or are named."""

from collections.abc import Callable
from typing import Any, Self

import pytest

pytest.importorskip("torch")

import torch
from local_problem import warned
from ranks import everywhere, ranked
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.swa_utils import AveragedModel

from realrun.algorithms import DiLoCo, LocalSGD, MismatchError
from realrun.execute.world import World

NAN, INF = float("nan"), float("inf")


class Pair(torch.Tensor):
    """A subclass that keeps codes and a scale, as quantized weights do, and can do little."""

    codes: Tensor
    scale: Tensor

    def __new__(cls, codes: Tensor, _: Tensor) -> Self:
        """Without memory of its own."""
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

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

    __tensor_flatten__ = property()


def linear(**buffers: Tensor | None) -> nn.Module:
    """A layer with buffers."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Four steps on this rank's data."""
    for step in range(4):
        numbers = torch.Generator().manual_seed(100 * world.rank + step)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=numbers)).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of the weights that are trained."""
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)


def numbers(tensor: Tensor) -> list[str]:
    """The elements; NaN equals NaN."""
    flat = (tensor.to_dense() if tensor.layout != torch.strided else tensor).flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).flatten()
    return list(map(str, flat.double().tolist()))


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


def mean_of_both(name: str) -> list[str]:
    """The mean of a buffer over two ranks; what is no number is the first rank's."""
    first, second = (layouts(rank)[name] for rank in range(2))
    if name in {"count", "flags"}:
        return numbers(first)
    dense = [each.to_dense() if each.layout != torch.strided else each for each in (first, second)]
    if name == "byte":
        dense = [each.double() for each in dense]
    return numbers((dense[0].clone() + dense[1].clone()) / 2)


@ranked(2)
def test_buffers_of_every_layout_start_from_the_first_rank_and_end_with_the_mean(
    world: World,
) -> None:
    """Slices, expanded, overlapping and sparse ones too; memory outside of a slice is untouched.

    In a consensus they are the mean, too.
    """
    buffers = layouts(world.rank)
    model = linear(**buffers)
    outside = buffers["slice"]._base
    means = {name: mean_of_both(name) for name in buffers}
    with LocalSGD(model, sgd(model), tau=2) as algorithm:
        for name, value in layouts(0).items():
            assert numbers(buffers[name]) == numbers(value), name
        train(model, algorithm.optimizers[0], world)
        for name, value in layouts(world.rank).items():
            with torch.inference_mode(value.is_inference()):
                if name in {"expanded", "repeated"}:
                    buffers[name][0] = value[0]
                elif value.layout == torch.sparse_csr:
                    buffers[name].values().copy_(value.values())
                else:
                    buffers[name].copy_(value)
        with algorithm.consensus(buffers=True):
            assert {name: numbers(each) for name, each in buffers.items()} == means
    assert {name: numbers(each) for name, each in buffers.items()} == means
    kept = outside[1::2, 3:] - 100 * world.rank
    assert kept.tolist() == [[9.0, 10.0, 11.0], [21.0, 22.0, 23.0]]


@ranked(2)
def test_buffers_without_a_mean_stay_as_they_are(world: World) -> None:
    """Quantized and meta ones; codes of a subclass are sent, what cannot be read is named."""
    codes, scale = torch.arange(4, dtype=torch.int8), torch.tensor(0.5)
    with warned() as made:
        model = linear(
            quantized=torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint8),
            nowhere=torch.zeros(3, device="meta"),
            pair=Pair(codes + world.rank, scale),
            closed=Closed(codes, scale),
        )
        algorithm = LocalSGD(model, sgd(model), tau=2)
    (text,) = made
    assert "'closed'" in text
    train(model, algorithm.optimizers[0], world)
    with warned() as ended:
        algorithm.finish()
    assert not ended
    assert model.pair.codes.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["finish", "consensus"])
@ranked(2)
def test_elements_that_are_not_finite_on_one_rank_are_left_out_and_named(
    world: World, way: str
) -> None:
    """At every end; those of a mask that all ranks have stay."""
    mask = torch.full((3, 3), -INF).triu(1)
    model = linear(mask=mask.clone(), moving=mask.clone(), bad=torch.zeros(3))
    also = AveragedModel(linear(seen=torch.zeros(2)))
    algorithm = LocalSGD(model, sgd(model), tau=2)
    train(model, algorithm.optimizers[0], world)
    model.moving[0, 0] = world.rank
    model.bad.copy_(torch.tensor([1.0, NAN, INF] if world.rank else [0.0, 4.0, 4.0]))
    also.module.seen[0] = INF if world.rank else 7.0
    with warned() as texts:
        if way == "finish":
            algorithm.finish(also)
        else:
            with algorithm.consensus(also, buffers=True):
                assert bool(also.module.seen.isfinite().all())
            algorithm.finish(buffers=False)
    assert everywhere(sorted(texts)) == [sorted(texts)] * 2
    bad, other = sorted(texts)
    assert "'AveragedModel 0: module.seen'" in bad + other
    assert "'bad'" in bad + other
    assert "rank 1" in bad
    assert torch.equal(model.mask, mask)
    if way == "finish":
        assert model.moving[0].tolist() == [0.5, -INF, -INF]
        assert model.bad.tolist() == [0.5, 4.0, 4.0]
        assert also.module.seen.tolist() == [7.0, 0.0]
    elif world.rank:
        assert also.module.seen.tolist() == [INF, 0.0]


@ranked(2)
def test_a_rank_without_data_gives_nothing_to_buffers_counts_and_frozen_weights(
    world: World,
) -> None:
    """NaN of a rank that took no step does not count, and nothing is warned of."""
    norm, layer = nn.BatchNorm1d(6), linear(mask=torch.full((2,), -INF))
    teacher = linear().requires_grad_(requires_grad=False)
    model = nn.Sequential(norm, layer, teacher)
    also = AveragedModel(nn.Linear(2, 1))
    optimizer = sgd(model)
    with warned() as texts, LocalSGD(model, optimizer, tau=2) as local, local.join(also):
        if world.rank:
            for _ in range(2):
                optimizer.zero_grad()
                layer(norm(torch.randn(8, 6) + 3)).sum().backward()
                optimizer.step()
            also.n_averaged.fill_(9)
            teacher.weight.data.fill_(5.0)
        else:
            norm.running_var.fill_(NAN)
    assert not texts
    assert (int(norm.num_batches_tracked), int(also.n_averaged)) == (2, 9)
    assert norm.running_var.isfinite().all()
    assert layer.mask.tolist() == [-INF, -INF]
    assert teacher.weight.tolist() == [[5.0] * 6]


@ranked(2)
def test_buffers_that_differ_between_ranks_are_kept_and_named(world: World) -> None:
    """By all ranks at once, in a consensus and in the end; all others are averaged."""
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
    with warned() as within, algorithm.consensus(buffers=True):
        assert model.mean.tolist() == [0.5] * 3
    with warned() as texts:
        algorithm.finish(*([linear()] if world.rank else []))
    names = [text.split("'")[1] for text in texts]
    assert set(names) == {
        *("grown", "typed", "graph", "gone", "new", "Linear 0: weight", "Linear 0: bias")
    }
    assert within == texts[: len(within)]
    sizes = (len(model.grown), model.graph._nnz(), len(list(model.buffers())))
    assert sizes == ((8, 9, 5) if world.rank else (4, 3, 5))
    assert model.mean.tolist() == [0.5] * 3
    ends = everywhere((names, model.weight.tolist()))
    assert ends[0] == ends[1]


def of(rank: int) -> Tensor:
    """A weight of which every element is the rank."""
    return torch.full((1, 6), float(rank))


MOVES: dict[str, Callable[[nn.Module, int], object]] = {
    "data": lambda layer, rank: layer.weight.data.mul_(0).add_(rank),
    "assigned": lambda layer, rank: setattr(layer.weight, "data", of(rank)),
    "replaced": lambda layer, rank: setattr(
        layer, "weight", nn.Parameter(of(rank), requires_grad=False)
    ),
    "loaded": lambda layer, rank: layer.load_state_dict(
        {"weight": of(rank), "bias": torch.zeros(1)}
    ),
    "some": lambda layer, rank: layer.weight.data[0, 2:3].fill_(rank),
    "thawed": lambda layer, rank: (
        layer.requires_grad_().weight.data.fill_(rank),
        layer.requires_grad_(requires_grad=False),
    ),
}


@ranked(2)
def test_frozen_weights_that_moved_end_with_the_mean_however_they_were_written(
    world: World,
) -> None:
    """Through `.data`, by loading, as another tensor; what differed before the first step stays.

    A consensus has the mean, too, and afterwards each rank what it had.
    """
    model = nn.ModuleDict({name: linear() for name in ("student", "before", *MOVES)})
    for name in ("before", *MOVES):
        model[name].requires_grad_(requires_grad=False)

    def frozen() -> set[float]:
        return {float(model[name].weight[0, 2]) for name in MOVES}

    with LocalSGD(model, sgd(model["student"]), tau=2) as local:
        model["before"].weight.data.fill_(world.rank)  # as it was loaded
        train(model["student"], local.optimizers[0], world)
        for name, move in MOVES.items():
            move(model[name], world.rank)
        with local.consensus(buffers=True):
            assert frozen() == {0.5}
        assert frozen() == {float(world.rank)}
    assert frozen() == {0.5}
    assert model["before"].weight[0, 2] == world.rank


def set_defaults(dtype: torch.dtype, device: str) -> None:
    """Those of torch."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)


@pytest.mark.parametrize(
    ("dtype", "device"), [("bfloat16", "cpu"), ("float64", "cpu"), ("float32", "meta")]
)
@ranked(2)
def test_the_defaults_of_torch_change_nothing(world: World, dtype: str, device: str) -> None:
    """What is kept is fp32, on the parameters' device, and the result is the same."""
    ends = []
    for defaults in ((torch.float32, "cpu"), (getattr(torch, dtype), device)):
        model = linear(mean=torch.zeros(3)).float()
        set_defaults(*defaults)
        try:
            with DiLoCo(model, sgd(model), tau=2, dtype="int8") as algorithm:
                set_defaults(torch.float32, "cpu")  # the data
                train(model, algorithm.optimizers[0], world)
                set_defaults(*defaults)
                with algorithm.consensus(buffers=True):
                    pass
                kept = algorithm.state_dict()[f"rank{world.rank}"]
        finally:
            set_defaults(torch.float32, "cpu")
        types = {str(each.dtype) for each in kept.values() if isinstance(each, Tensor)}
        ends.append((numbers(model.weight), types))
    assert ends[0] == ends[1]


@ranked(2)
def test_vectors_of_a_spectral_norm_are_the_first_ranks(world: World) -> None:
    """The mean of two vectors of length 1 is shorter, and with other signs nothing.

    Of power iterations of both kinds of a spectral norm.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.spectral_norm(nn.Linear(6, 1)),
    )
    with LocalSGD(model, sgd(model), tau=2) as algorithm:
        train(model, algorithm.optimizers[0], world)
        vectors = list(model.buffers())
        if world.rank:
            for vector in vectors:
                vector.neg_()
        first = [vector.clone() for vector in vectors]
        for vector in first:
            dist.broadcast(vector, 0)
    assert all(map(torch.equal, vectors, first))


@ranked(2, last=True)
def test_sparse_buffers_of_other_structure_are_named_at_the_start(world: World) -> None:
    """They cannot be sent in place."""
    matrix = torch.eye(3) if world.rank else torch.ones(3, 3)
    model = linear(graph=matrix.to_sparse())
    with pytest.raises(MismatchError, match="graph"):
        LocalSGD(model, sgd(model), tau=2)
