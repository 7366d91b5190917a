"""What ranks of the FSDP tests do: a step of torch's own fully_shard, and what it asks for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from co2sim.strategies import FSDP
from realrun.execute.world import World
from realrun.torch_compat import ALL_GATHER, REDUCE_SCATTER

WIDTH, LAYERS = 16, 3


class Stack(nn.Module):
    """An embedding, layers of WIDTH x WIDTH and a head twice as wide."""

    def __init__(self) -> None:
        """Every tensor divides by the ranks, so that nothing is padded."""
        super().__init__()
        self.embedding = nn.Linear(8, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out.sum()


@contextmanager
def listening(heard: list[list[Any]]) -> Iterator[None]:
    """Note kind, number of ranks, type and elements of the whole buffer of every collective."""
    kinds = {
        ALL_GATHER: "all_gather",
        REDUCE_SCATTER: "reduce_scatter",
        "all_reduce": "all_reduce",
    }
    before = {name: getattr(dist, name) for name in kinds}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            large = max(tensors, key=Tensor.numel)
            dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[large.dtype]
            heard.append([kinds[name], kwargs["group"].size(), dtype, large.numel()])
            return before[name](*args, **kwargs)

        return call

    for name in kinds:
        setattr(dist, name, wrap(name))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(dist, name, original)


def steps(world: World, options: list[dict[str, Any]], micro_steps: int) -> list[Any]:
    """The collectives of a step of torch with the options of our strategy."""
    found = []
    for given in options:
        strategy = FSDP(**given)
        ranks, shard = world.layout.world_size, strategy.shard or world.layout.world_size
        mesh = init_device_mesh("cpu", (ranks,))
        if shard != ranks:
            size = world.layout.gpus_per_node if shard == "node" else shard
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=names)
        reduce = {"fp32": torch.float32, "bf16": torch.bfloat16}[strategy.reduce]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        model = Stack()
        for layer in model.layers:
            kept = strategy.reshard_after_forward
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=kept)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        heard: list[list[Any]] = []
        for micro in range(micro_steps):
            if strategy.sync == "last":
                last = micro == micro_steps - 1
                model.set_requires_gradient_sync(last)
                if strategy.reshard_after_forward is False:
                    model.set_reshard_after_backward(last)
            with listening(heard):
                model(torch.ones(2, 8)).backward()
        found.append(heard)
    return found
