"""A user's own module, trained by torch on two ranks, does and keeps what its trace says.

The oracle is PyTorch on real tensors: its counter of FLOP, what autograd saves, and what
DistributedDataParallel and fully_shard send.
"""

# mypy: allow-untyped-calls
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from places import ROOT
from ranks import TWO_RANKS, on_ranks, realrun_on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from workers import listening

from co2sim import Question
from co2sim.prediction.job import Stage
from co2sim.schedule.schedule import Collective
from co2sim.tracing.from_torch import Source, load_build, trace
from co2sim.training.memory import kept_bytes
from realrun import record
from realrun.execute.world import World
from realrun.torch_compat import ALL_GATHER, REDUCE_SCATTER

MODEL = f"{ROOT / 'examples' / 'own_model.py'}:small"
STEPS, SAMPLES = 2, 4
aten: Any = torch.ops.aten


# --- on the ranks ---------------------------------------------------------------------------------


def attention(query: Any, key: Any, value: Any, *_: Any, **_more: Any) -> int:
    """FLOP of the kernel of a processor, which PyTorch's counter does not know."""
    return int(sdpa_flop_count(query, key, value))


def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **_m: Any) -> int:
    """The same of its gradients."""
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def convolution_backward(gradient: Any, _x: Any, weight: Any, *_: Any, **_more: Any) -> int:
    """As many for each of two gradients as forward; PyTorch's counter ignores groups in one."""
    return 2 * 2 * int(prod(gradient)) * int(prod(weight[1:]))


COUNTED = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    aten.convolution_backward: convolution_backward,
}


def step(source: Source, model: nn.Module, batch: Tensor) -> tuple[int, int]:
    """FLOP of both passes, and bytes that the module keeps for its gradients."""
    assert source.loss is not None
    held = {x.untyped_storage().data_ptr() for x in (*model.parameters(), batch)}
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in held:
            saved[x.untyped_storage().data_ptr()] = x
        return x

    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counted:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logits = model(batch)
        kept = sum(x.untyped_storage().nbytes() for x in saved.values())
        source.loss(lambda _: logits, batch).backward()
    return counted.get_total_flops(), kept


def reduced_by_ddp(_world: World) -> dict[str, int]:
    """Of one step on a rank: parameters, FLOP, bytes kept and bytes all-reduced."""
    source = load_build(MODEL)
    model = DistributedDataParallel(source.build())
    sizes: list[int] = []

    def reduce(_state: None, bucket: Any) -> Any:
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(dist.group.WORLD, bucket)

    reduce.__annotations__.clear()  # PyTorch checks those of its own types
    model.register_comm_hook(None, reduce)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        sizes.clear()
        flop, kept = step(source, model, source.batch())
        optimizer.step()
        optimizer.zero_grad()
    parameters = sum(x.numel() for x in model.parameters())
    return {"parameters": parameters, "flop": flop, "kept": kept, "reduced": sum(sizes)}


def sent_by_fsdp(_world: World) -> list[list[Any]]:
    """Kinds and bytes of the collectives of a step, each layer divided by itself."""
    source = load_build(MODEL)
    net = source.build()
    layers = next(x for x in net.children() if isinstance(x, nn.Sequential))
    assert source.loss is not None
    for layer in layers:
        fully_shard(layer)
    fully_shard(net)
    kinds = {ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter"}
    with listening(*((dist, name) for name in kinds)) as heard:
        source.loss(net, source.batch()).backward()
    return [[kinds[name], large.nbytes] for name, _, large in heard]


# --- the claims -----------------------------------------------------------------------------------


def predicted(folder: Path, strategy: str) -> Stage:
    """The same step, by co2sim: eager kernels in fp32, without recomputation."""
    (folder / "cluster.toml").write_text(TWO_RANKS)
    return Question(
        cluster=str(folder / "cluster.toml"),
        model=MODEL,
        strategy=strategy,
        stack="huggingface",
        precision="fp32",
        micro_batch=SAMPLES,
        accumulation=1,
        recompute="none",
    ).stage()


@pytest.mark.dist
@pytest.mark.slow
def test_a_step_of_torch_has_the_flop_bytes_and_activations_of_the_trace(tmp_path: Path) -> None:
    """Parameters, FLOP and reduced bytes are equal, kept bytes within 0.1 %."""
    done = on_ranks("reduced_by_ddp", 2, module=__name__)
    source: Source = load_build(MODEL)
    traced = trace(source.build, source.batch, source.loss)
    stage = predicted(tmp_path, "ddp")
    works = [op.work for op in stage.schedule.body]
    job = stage.workload
    kept = sum(kept_bytes(job, executed) for _, executed, _ in job.executed)
    for rank in done:
        assert traced.parameter_count == job.parameters == rank["parameters"]
        assert traced.flop == rank["flop"]
        assert kept == pytest.approx(rank["kept"], rel=1e-3)
        reduced = sum(work.bytes for work in works if isinstance(work, Collective))
        assert reduced == rank["reduced"]


@pytest.mark.dist
@pytest.mark.slow
def test_torch_gathers_and_reduces_the_blocks_of_the_trace(tmp_path: Path) -> None:
    """With fully_shard on each entry of the list, in the order of the schedule."""
    body = predicted(tmp_path, "fsdp:clip=false").schedule.body
    works = [op.work for op in body if isinstance(op.work, Collective)]
    for rank in on_ranks("sent_by_fsdp", 2, module=__name__):
        assert rank == [[str(work.kind), work.bytes] for work in works]


@pytest.mark.dist
@pytest.mark.slow
def test_realrun_executes_the_schedule_of_a_module(tmp_path: Path) -> None:
    """Its record holds the model as it was traced, and a span of every operation."""
    stage = predicted(tmp_path, "ddp")
    words = ["run", "-c", "cluster.toml", "-m", MODEL, "-s", "ddp", "--micro-batch", "4"]
    more = ["--rounds", "1", "--kernels", "sleep", "--check", "--accumulation", "1"]
    done = realrun_on_ranks(tmp_path, 2, *words, *more)
    assert done.returncode == 0, done.stderr
    kept = record.read(tmp_path / "out" / "ddp")
    assert kept.case.model == stage.workload.model
    spans = [span.op for span in kept.trace.spans if span.rank == 0]
    assert {op.name for op in stage.schedule.body} <= set(spans)
