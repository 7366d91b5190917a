"""What ranks of the ZeRO++ tests do."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from local_problem import said
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from realrun.algorithms import zeropp
from realrun.algorithms.quantization import dequantize, quantize
from realrun.algorithms.zeropp import apply_zeropp
from realrun.execute.world import World
from realrun.torch_compat import REDUCE_SCATTER, fsdp_param_groups
from realrun.train.tasks.presets import GPTShape
from realrun.train.tasks.task import loss_of
from realrun.train.tasks.text import GPT, text

SHAPE = GPTShape(layers=2, hidden=32, heads=4, context=32)
OFF = {"qwz": False, "hpz": False, "qgz": False}
SHAPES = ((1500, 40), (7, 5), (1,), (64, 33))
"""Of parameters whose gradients are known: a large one, and some that FSDP2 must pad."""


class Product(nn.Module):
    """A loss whose gradient is whatever it is multiplied with."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
        """Parameters with one seed everywhere."""
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, factors: list[Tensor]) -> Tensor:
        """The sum of all products."""
        pairs = zip(self.weights, factors, strict=True)
        return torch.stack([(weight * factor).sum() for weight, factor in pairs]).sum()


def factors(rank: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    """Gradients of a rank, on the CPU: something in common, and something of its own."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (1, 100 + rank))
    return [
        torch.randn(shape, generator=common) + torch.randn(shape, generator=own) for shape in shapes
    ]


def mean(found: Callable[[int], list[Tensor]], ranks: int) -> list[Tensor]:
    """The exact mean over ranks."""
    return [sum(parts) / ranks for parts in zip(*map(found, range(ranks)), strict=True)]


def flat(parts: list[Tensor]) -> Tensor:
    """All elements in one row, in double precision."""
    return torch.cat([part.detach().flatten().double() for part in parts])


def whole(x: Tensor) -> Tensor:
    """The tensor of which every rank has a shard."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def slope(got: Tensor, expected: Tensor) -> float:
    """Of the least squares line through the origin."""
    return float((got @ expected) / (expected @ expected))


def reduced(per_node: int, divide: float = 0.0, bad: int | None = None, **options: Any) -> Tensor:
    """Gradients after one backward with qgZ alone; rank `bad` adds a NaN."""
    model = Product()
    fully_shard(model)
    how = {"ranks_per_node": per_node, "block": 256, "qwz": False, "hpz": False}
    apply_zeropp(model, **how, **options)
    if divide:
        model.set_gradient_divide_factor(divide)
    given = factors(dist.get_rank())
    if dist.get_rank() == bad:
        given[0][3, 5] = float("nan")
    model([factor.to(model.weights[0].device) for factor in given]).backward()
    return flat([whole(weight.grad) for weight in model.weights]).cpu()


def means(world: World, layouts: list[int]) -> list[dict[str, float]]:
    """For every number of ranks per node: how qgZ's result relates to the exact mean."""
    ranks = world.layout.world_size
    expected = flat(mean(factors, ranks))
    largest = max(float(part.abs().max()) for rank in range(ranks) for part in factors(rank))
    found = []
    for per_node in layouts:
        answer: dict[str, float] = {"bound": bound(ranks, per_node, largest)}
        for rounding in ("nearest", "stochastic"):
            got = reduced(per_node, rounding=rounding)
            answer[rounding] = slope(got, expected)
            answer[f"{rounding} error"] = float((got - expected).abs().max())
        answer["summed"] = slope(reduced(per_node, divide=1.0), expected)
        spoilt = ~reduced(per_node, bad=ranks - 1).isfinite()
        answer["spoilt"] = int(spoilt.sum()) if bool(spoilt[3 * SHAPES[0][1] + 5]) else 0
        found.append(answer)
    return found


def bound(ranks: int, per_node: int, largest: float) -> float:
    """Half of the steps on the way of an element of the mean, if none is above `largest`.

    Every rank's step, then every node's step of its sum, if there are two hops.
    """
    nodes = ranks // per_node
    steps = ranks * largest / 7
    if 1 < per_node < ranks:
        steps += nodes * (per_node * largest + steps / nodes / 2) / 7
    return steps / ranks / 2


@contextmanager
def listening(heard: list[tuple[list[int], str, int]]) -> Iterator[None]:
    """Note every collective of weights and gradients: ranks, type, bytes of the buffer."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            large = max(tensors, key=Tensor.numel)
            ranks = dist.get_process_group_ranks(kwargs["group"])
            size = large.numel() * large.element_size()
            heard.append((ranks, str(large.dtype).removeprefix("torch."), size))
            return original(*args, **kwargs)

        return call

    places = {(zeropp, "all_gather_single"), (dist, REDUCE_SCATTER), (dist, "all_to_all_single")}
    before = {place: getattr(*place) for place in places}
    for place, call in before.items():
        setattr(*place, wrap(call))
    try:
        yield
    finally:
        for place, call in before.items():
            setattr(*place, call)


def sharded(reshard: int | None = None, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """A small GPT after fully_shard, layer by layer."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    how = {"mp_policy": policy or MixedPrecisionPolicy(), "reshard_after_forward": reshard}
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    return model


def train(model: nn.Module, steps: int, accumulate: int = 1) -> tuple[list[float], Tensor]:
    """AdamW; gives the losses of all ranks' mean, and all weights."""
    task, rank, ranks = text(SHAPE, torch.device("cpu")), dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            batch = task.batch(0, step * accumulate + micro, 8 * ranks, rank, ranks)
            loss = loss_of(model, batch) / accumulate
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    every = torch.stack(losses)
    dist.all_reduce(every)
    every /= ranks
    return every.tolist(), flat([whole(weight) for weight in model.parameters()])


def exact(_: World) -> dict[str, bool]:
    """Where nothing is quantized, ZeRO++ gives the bits of FSDP2."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for name, policy, accumulate in (("fp32", None, 1), ("bf16", bf16, 2)):
        losses, weights = train(sharded(policy=policy), 3, accumulate)
        for switch, options, reshard in (
            ("off", OFF, None),
            ("hpz", OFF | {"hpz": True}, None),
            ("hpz, root too", OFF | {"hpz": True}, True),
            ("hpz by FSDP2", OFF | {"hpz": True}, 2),
            ("hpz of one rank", OFF | {"hpz": True, "ranks_per_node": 1}, None),
        ):
            model = sharded(reshard, policy)
            apply_zeropp(model, **({"ranks_per_node": 2} | options))
            other = train(model, 3, accumulate)
            found[f"{switch} in {name}"] = other[0] == losses and torch.equal(other[1], weights)
    return found


def quality(_: World, steps: int, parts: list[str], **options: Any) -> list[float]:
    """The last losses with each part, with all, and with none, all from the same start."""
    found = []
    for name in parts:
        model = sharded()
        if name:
            switches = {key: name in {key, "all"} for key in OFF}
            apply_zeropp(model, ranks_per_node=2, **switches, **options)
        losses = train(model, steps)[0][-10:]
        found.append(sum(losses) / len(losses))
    return found


class Look(torch.autograd.Function):
    """Changes nothing, and calls `note` in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None]) -> Tensor:
        """Note the forward."""
        ctx.note = note
        note("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Note the backward."""
        ctx.note("backward")
        return grad, None


class Watched(Product):
    """Keeps the weights that its forward and its backward see."""

    def forward(self, factors: list[Tensor]) -> Tensor:
        """The same sum."""
        self.seen: dict[str, Tensor] = {}
        return Look.apply(super().forward(factors), self.note)

    def note(self, when: str) -> None:
        """Copy the weights as they are."""
        self.seen[when] = flat(list(self.weights))


def weights(world: World) -> dict[str, Any]:
    """What forward and backward compute with under qwZ, and what the optimizer keeps."""
    block = 64
    found: dict[str, Any] = {}
    for hpz in (False, True):
        model = Watched()
        exact_weights = flat(list(model.weights))
        fully_shard(model, reshard_after_forward=True)
        shards = [weight.to_local().clone() for weight in model.weights]
        apply_zeropp(model, ranks_per_node=2, qgz=False, hpz=hpz, block=block)
        if hpz:  # as a user does who looks at weights between steps
            model.unshard(async_op=True).wait()
            model.reshard()
        model(factors(world.rank)).backward()
        used, later = model.seen["forward"], model.seen["backward"]
        everywhere: list[Any] = [None] * world.layout.world_size
        dist.all_gather_object(everywhere, used)
        step = float(exact_weights.abs().max()) / 127
        found[f"hpz={hpz}"] = {
            "same on all ranks": all(torch.equal(one, used) for one in everywhere),
            "off by steps": float((used - exact_weights).abs().max()) / step,
            "backward": ["exact", "as forward"][torch.equal(later, used)]
            if torch.equal(later, used) or torch.equal(later, exact_weights)
            else "neither",
            "shards kept": all(
                torch.equal(one, weight.to_local())
                for one, weight in zip(shards, model.weights, strict=True)
            ),
        }
    model = Product(((1024, 4),))
    fully_shard(model)
    shard = model.weights[0].to_local().flatten()
    apply_zeropp(model, ranks_per_node=2, block=block)
    for async_op in (False, True):
        handle = model.unshard(async_op=async_op)
        if handle:
            handle.wait()
        mine = model.weights[0].detach().flatten().chunk(world.layout.world_size)[world.rank]
        expected = dequantize(*quantize(shard, 8, block), 8, block, shard.numel())
        found[f"own shard, async {async_op}"] = torch.equal(mine, expected)
        model.reshard()
    return found


WIRE = ((512, 64), (256, 32))
"""Shapes whose shards, among 4 ranks, are whole blocks of 64."""


def wire(world: World, layouts: list[int], block: int) -> list[dict[str, Any]]:
    """Messages of one step of a module, and what ZeRO++ says that it sent."""
    found = []
    for per_node in layouts:
        for name in ("off", "qwz", "hpz", "qgz", "all"):
            options = {key: name in {key, "all"} for key in OFF}
            model = Product(WIRE)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fully_shard(model, reshard_after_forward=True, mp_policy=policy)
            if name in {"off", "hpz"}:
                switched = apply_zeropp(model, ranks_per_node=per_node, **options)
            else:
                switched = apply_zeropp(model, ranks_per_node=per_node, block=block, **options)
            heard: list[tuple[list[int], str, int]] = []
            with listening(heard):
                model(factors(world.rank, WIRE)).backward()
            sent = {
                key: [getattr(switched, key).inside, getattr(switched, key).between]
                for key in ("forward", "backward", "reduce")
            }
            found.append({"name": name, "per_node": per_node, "heard": heard, "sent": sent})
    return found


def refusals(world: World) -> dict[str, str]:
    """What apply_zeropp says to what it cannot do."""

    def model(**how: Any) -> Product:
        made = Product()
        fully_shard(made, **how)
        return made

    ranks = world.layout.world_size
    hybrid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    reverse = DeviceMesh("cpu", list(reversed(range(ranks))))
    double = Product().double()
    fully_shard(double)
    apply_zeropp(double, ranks_per_node=1)
    products = model()
    apply_zeropp(products, ranks_per_node=2)
    op = dist.ReduceOp.MAX
    reduce = fsdp_param_groups(products)[0]._reduce_scatter_comm
    world_group = dist.distributed_c10d._get_default_group()
    local = os.environ.pop("LOCAL_WORLD_SIZE")
    found = {
        "plain": said(lambda: apply_zeropp(Product())),
        "divide": said(lambda: apply_zeropp(model(), ranks_per_node=3)),
        "zero": said(lambda: apply_zeropp(model(), ranks_per_node=0)),
        "environment": said(lambda: apply_zeropp(model())),
        "hybrid": said(lambda: apply_zeropp(model(mesh=hybrid), ranks_per_node=2)),
        "reverse": said(lambda: apply_zeropp(model(mesh=reverse), ranks_per_node=2)),
        "block": said(lambda: apply_zeropp(model(), block=0)),
        "idle block": said(lambda: apply_zeropp(model(), block=64, qwz=False, qgz=False)),
        "rounding": said(lambda: apply_zeropp(model(), rounding="up")),
        "idle rounding": said(lambda: apply_zeropp(model(), rounding="stochastic", qgz=False)),
        "disagree": said(lambda: apply_zeropp(model(), ranks_per_node=2, qwz=world.rank != 1)),
        "twice": said(lambda: apply_zeropp(products, ranks_per_node=2)),
        "types": said(double.unshard),
        "op": said(lambda: reduce(torch.empty(2), torch.empty(8), world_group, op)),
    }
    os.environ["LOCAL_WORLD_SIZE"] = local
    switched = apply_zeropp(model(), rounding="stochastic", seed=5)
    assert switched.generator is not None
    found["default"] = str(switched.places.per_node)
    found["seed"] = str(switched.generator.initial_seed())
    return found
