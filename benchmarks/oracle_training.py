"""Two steps of training on fake tensors and a fake process group, and the peak of their memory.

The tracker is PyTorch's own; what is added is at which moment the peak is, the peak of each phase,
and the tensors that are there. `_without_data` says what of torch must stand aside for it, and why.
"""

# mypy: allow-untyped-calls
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from oracle_allocator import Event, reserved
from oracle_models import (
    FLASH,
    MODELS,
    PATCH,
    AdamW8bit,
    Shape,
    eager_loss,
    in_place_loss,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor import _sharding_prop as sharding_propagation
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

STEPS = 2
"""The first makes the optimizer's states and the buckets of DDP, the second has them from the
beginning."""


@dataclass(frozen=True)
class Setting:
    """A run.

    `strategy`: fsdp2, hsdp (of groups of `shard` ranks), ddp, zero1, tp, or fsdp2+tp.
    `units` of FSDP: `layers`, the rest in the root, as accelerate has it; `torchtitan`, where the
    embedding is a unit, and norm and head are another, which stays gathered.
    `gradient_sync` of micro-steps: `each` reduces in all of them, `last` only in the last.
    `loss`: eager, in_place (a fused kernel that overwrites logits), chunked (with the head).
    """

    shape: Shape
    strategy: str
    ranks: int
    samples: int
    recompute: str = "none"
    loss: str = "eager"
    optimizer: str = "adamw_fused"
    micro_steps: int = 1
    gradient_sync: str = "each"
    reshard: bool = True
    units: str = "layers"
    shard: int = 0
    tp: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    bucket_view: bool = False

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 divides it: bf16 while gathered, gradients reduced in fp32."""
        return self.strategy in {"fsdp2", "hsdp", "fsdp2+tp"}

    @property
    def replicated(self) -> bool:
        """Whether DDP trains it: parameters in fp32, products in bf16 by autocast."""
        return self.strategy in {"ddp", "zero1"}


LOSS_BACKWARD = "backward of the loss"
"""The phase before the first module's backward pass."""

Alive = tuple[int, str, str]
"""Bytes, the tracker's kind, and the phase, module and operator that made it."""


class Moments(MemTracker):
    """The tracker, which also knows the moment of the peak, and the peak of each phase."""

    phase, op = "start", ""
    moment: tuple[str, str, str] = ("", "", "")
    alive: tuple[Alive, ...] = ()
    detailed = False

    def watch(self, *, detailed: bool) -> None:
        """Begin; `detailed` lists what is alive at the peak, which takes time."""
        self.phases: dict[str, int] = defaultdict(int)
        self.origins: dict[int, str] = {}
        self.events: list[Event] = []
        self.numbers: dict[int, int] = {}
        self.detailed = detailed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, whose name is kept."""
        self.op = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def place(self) -> tuple[str, str, str]:
        """The phase, the innermost module, and the operator that ran last."""
        inside = max(self._mod_tracker.parents, key=len, default="")
        if self.phase == LOSS_BACKWARD and inside not in {"", "Global"}:
            self.phase = "backward"  # of the first module
        return self.phase, inside.replace("._checkpoint_wrapped_module", ""), self.op

    def _update_snap(self, u_type: Any, winfo: Any, *rest: Any, **named: Any) -> None:
        if self.detailed and u_type.name == "ADD":
            self.origins[id(winfo)] = " ".join(self.place())
        self._record(u_type.name, winfo)
        super()._update_snap(u_type, winfo, *rest, **named)

    def _record(self, change: str, winfo: Any) -> None:
        """What the allocator is asked for; a storage that changes its size counts as a new one."""
        if change == "ADD":
            self.numbers[id(winfo)] = len(self.events)
        number = self.numbers[id(winfo)]
        if change in {"DEL", "SIZE"}:
            self.events.append(("give", number, 0))
        if change in {"ADD", "SIZE"} and winfo.mem_consumed:
            self.events.append(("take", number, winfo.mem_consumed))
        self.events.append(("kind", number, winfo.reftype.value))

    def _update_peak_stats(self, peak_state: Any) -> None:
        before = max(self._peak_mem.values(), default=0)
        super()._update_peak_stats(peak_state)
        now = max((snap["Total"] for snap in self._curr_mem_snap.values()), default=0)
        place = self.place()
        self.phases[self.phase] = max(self.phases[self.phase], now)
        if now > before:
            self.moment = place
            if self.detailed:
                self.alive = tuple(
                    (info.mem_consumed, info.reftype.value, self.origins.get(id(info), "before"))
                    for info, _ in self._WINFO.values()
                )


class ShardedMoments(Moments, FSDPMemTracker):
    """The same for FSDP2, with a count of whole gradients before their reduction.

    The tracker knows these only in the moment of the reduction; before it they are temporary to it.
    """

    whole_gradients = 0

    def _update_peak_stats(self, peak_state: Any) -> None:
        before = self.moment
        super()._update_peak_stats(peak_state)
        if self.moment is not before:
            self.whole_gradients = self._count_whole_gradients()

    def _count_whole_gradients(self) -> int:
        """Bytes of gradients in bf16 that autograd has accumulated, and of micro-steps' in fp32."""
        found = {}
        for state in (module._get_fsdp_state() for module in self.memory_tracking):  # noqa: SLF001
            group = state._fsdp_param_group  # noqa: SLF001
            for parameter in group.fsdp_params if group else ():
                gathered = getattr(parameter, "_unsharded_param", None)
                for tensor in (
                    None if gathered is None else gathered.grad,
                    parameter.unsharded_accumulated_grad,
                ):
                    for storage in () if tensor is None else get_untyped_storages(tensor):
                        info = self._WINFO.get(storage, (None, None))[0]
                        if info is not None and info.reftype.value == "Temp":
                            found[id(info)] = info.mem_consumed
        return sum(found.values())


class _Reducer:
    """DDP's reducer, which keeps the one bucket of its first step.

    Later steps have buckets of 25 MiB in the order of the first backward pass, for which torch
    reads tensors. Together they have the same bytes, and are there all the time.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def _without_data() -> Iterator[None]:
    """Torch, without what reads data, and without a count of what is never allocated."""
    concatenate = DeviceMesh._concatenate  # noqa: SLF001

    def concatenate_outside(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return concatenate(meshes)

    with (
        # DDP compares shapes and sends parameters, once, before the first step.
        patch.object(ddp_module, "_verify_param_shape_across_processes"),
        patch.object(ddp_module, "_sync_module_states"),
        # A mesh reads its ranks.
        patch.object(DeviceMesh, "_concatenate", concatenate_outside),
        # DTensor finds the shape of a whole result on fake tensors. In a mode of its own the
        # tracker leaves them out; in ours it counts whole tensors that no rank ever has.
        patch.object(sharding_propagation, "detect_fake_mode", return_value=None),
    ):
        yield


def _selective() -> Any:
    """Contexts of selective recomputation as torchtitan's: every second product runs again.

    Source: `_apply_op_sac` in torchtitan/distributed/activation_checkpoint.py (torchtitan 0.2).
    """
    product = torch.ops.aten.mm.default
    saved = {product, FLASH.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}  # noqa: SLF001
    count: dict[str, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
        count[ctx.is_recompute] += func == product
        again = func == product and count[ctx.is_recompute] % 2 == 0
        keep = func in saved and not again
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recompute(model: nn.Module, how: str) -> None:
    """Wrap each layer, where `how` is not none."""
    if how == "none":
        return
    more: dict[str, Any] = {"context_fn": _selective} if how == "selective" else {}
    layers = cast("nn.ModuleList", model.layers)
    for name, layer in list(layers.named_children()):
        layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False, **more))


def _shard(model: Any, setting: Setting, mesh: DeviceMesh) -> None:
    """Divide a model by FSDP2, in place."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    divide = partial(fully_shard, mesh=mesh, mp_policy=policy)
    if setting.units == "torchtitan":
        divide(model.embedding, reshard_after_forward=setting.reshard)
    for layer in model.layers:
        divide(layer, reshard_after_forward=setting.reshard)
    if setting.units == "torchtitan":
        divide(model.output, reshard_after_forward=False)
    divide(model)


def _divide_tensors(model: Any, setting: Setting, mesh: DeviceMesh) -> None:
    """Divide a Llama by tensor parallelism, as torchtitan (sequence parallel) or transformers."""
    rows = setting.sequence_parallel
    between = Shard(1) if rows else Replicate()
    divided = Shard(-1) if setting.loss_parallel else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "output.head": ColwiseParallel(
                input_layouts=between,
                output_layouts=divided,
                use_local_output=not setting.loss_parallel,
            ),
        }
        | ({"output.norm": SequenceParallel()} if rows else {}),
    )
    if not rows:
        distribute_module(model.output.norm, mesh)
    for layer in model.layers:
        plan: dict[str, Any] = {
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=between),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=between),
        }
        if rows:
            plan |= {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
            }
        else:  # one optimizer takes no plain tensors beside DTensors
            distribute_module(layer.norm1, mesh)
            distribute_module(layer.norm2, mesh)
        parallelize_module(layer, mesh, plan)


def _meshes(setting: Setting) -> tuple[DeviceMesh, DeviceMesh]:
    """The ranks that hold data (replicas by shards, in HSDP), and those of tensor parallelism."""
    if setting.strategy == "hsdp":
        shape, names = (setting.ranks // setting.shard, setting.shard), ("replicate", "shard")
    else:
        shape, names = (setting.ranks // setting.tp, setting.tp), ("shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return (mesh, mesh) if setting.strategy == "hsdp" else (mesh["shard"], mesh["tp"])


def build(setting: Setting, mesh: DeviceMesh, tensors: DeviceMesh, tracked: list[Moments]) -> Any:
    """The model, divided; `tracked` is where its tracker will be."""
    # Without FSDP no framework mixes precision in tensor parallelism: all is bf16.
    torch.set_default_dtype(torch.bfloat16 if setting.strategy == "tp" else torch.float32)
    model: Any = MODELS[setting.shape.family](setting.shape)
    torch.set_default_dtype(torch.float32)
    if setting.tp > 1:
        _divide_tensors(model, setting, tensors)
    _recompute(model, setting.recompute)
    if setting.sharded:
        _shard(model, setting, mesh)
    if not setting.replicated:
        return model
    replica: Any = DistributedDataParallel(
        model,
        gradient_as_bucket_view=setting.bucket_view,
    )
    replica.reducer = _Reducer(replica.reducer)

    def reduce(
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        del state  # divides in place, as the hook that DDP has without one
        kind = tracked[0]._ref_class  # noqa: SLF001
        tracked[0]._update_and_maybe_create_winfos(  # noqa: SLF001
            bucket.buffer(),
            kind["GRAD" if setting.bucket_view else "OTH"],
        )
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(setting.ranks))
        return done

    replica.register_comm_hook(None, reduce)
    return replica


def optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; of ZeRO-1 the one that torch has."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw_fused": partial(torch.optim.AdamW, fused=True),
        "adamw_foreach": partial(torch.optim.AdamW, foreach=True),
        "sgd": partial(torch.optim.SGD, foreach=True),
        "sgd_momentum": partial(torch.optim.SGD, momentum=0.9, foreach=True),
        "adamw_8bit": AdamW8bit,
    }
    if setting.strategy == "zero1":
        options = {"foreach": True} if setting.optimizer == "adamw_foreach" else {"fused": True}
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, **options)
    return kinds[setting.optimizer](model.parameters())


def _forward(setting: Setting, model: Any, inputs: Tensor, labels: Tensor, track: Moments) -> Any:
    """The loss; logits are gone when this returns, as torchtitan sees to."""
    mixed = torch.autocast("cpu", torch.bfloat16) if setting.replicated else nullcontext()
    with mixed:
        if setting.loss == "chunked":
            return model(inputs, labels)
        logits = model(inputs)
        track.phase = "loss"
        loss = eager_loss if setting.loss == "eager" else in_place_loss
        return loss(logits, labels)


def _step(setting: Setting, model: Any, track: Moments) -> None:
    """Gradients of all micro-steps."""
    for index in range(setting.micro_steps):
        reduced = index == setting.micro_steps - 1 or setting.gradient_sync == "each"
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduced)
        quiet = setting.replicated and not reduced
        scope: AbstractContextManager[Any] = model.no_sync() if quiet else nullcontext()
        ruled = loss_parallel() if setting.loss_parallel else nullcontext()
        with scope, ruled:
            inputs, labels = _batch(setting)
            track.phase = "forward"
            loss = _forward(setting, model, inputs, labels, track)
            track.phase = LOSS_BACKWARD
            loss.backward()
            del loss, inputs, labels
        track.reset_mod_stats()


def _batch(setting: Setting) -> tuple[Tensor, Tensor]:
    """Tokens and labels, or pictures and classes."""
    shape, samples = setting.shape, setting.samples
    if shape.family == "vit":
        side = PATCH * round(shape.tokens**0.5)
        return torch.empty(samples, 3, side, side), torch.zeros(samples, dtype=torch.int64)
    size = (samples, shape.tokens)
    return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)


COLUMNS = {
    "parameters_bytes": {"Parameter", "Sharded Param", "Buffer"},
    "gathered_bytes": {"Unsharded Param"},
    "gradients_bytes": {"Gradient", "Sharded Grad"},
    "unsharded_gradients_bytes": {"Unsharded Grad"},
    "activations_bytes": {"Activation", "Inputs"},
    "temporaries_bytes": {"Temp"},
    "optimizer_bytes": {"Optstate", "OptState"},
    "communication_bytes": {"All Gather", "Reduce Scatter", "Other"},
}
"""Which of the tracker's kinds each column has."""


def measure(
    setting: Setting, *, detailed: bool = False, allocator: bool = False
) -> tuple[dict[str, Any], tuple[Alive, ...]]:
    """Bytes at the peak, by kind; when it is; the peak of each phase; and what is alive then.

    With `allocator` also what PyTorch's caching allocator reserves.
    """
    dist.init_process_group("fake", rank=0, world_size=setting.ranks, store=FakeStore())
    meshes = _meshes(setting)  # their ranks are read
    with _without_data(), FakeTensorMode():
        tracked: list[Moments] = []
        model = build(setting, *meshes, tracked)
        rule = optimizer(setting, model)
        track = ShardedMoments(model, rule) if setting.sharded else Moments()
        track.watch(detailed=detailed)
        tracked.append(track)
        if not setting.sharded:
            track.track_external(model)
        with track:
            for _ in range(STEPS):
                _step(setting, model, track)
                track.phase = "optimizer"
                rule.step()
                for parameter in model.parameters():
                    parameter.grad = None
        peak = next(iter(track.get_tracker_snapshot("peak").values()))
        count = sum(parameter.numel() for parameter in model.parameters())
    dist.destroy_process_group()
    kinds = {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}
    phase, module, op = track.moment
    found: dict[str, Any] = {"parameters": count, "peak_bytes": kinds.pop("Total")}
    if allocator:
        found["reserved_bytes"] = reserved(track.events)
    found |= {"moment": phase, "module": module, "operator": op}
    for column, names in COLUMNS.items():
        found[column] = sum(kinds.pop(name, 0) for name in names)
    assert not any(kinds.values()), kinds
    if isinstance(track, ShardedMoments):
        found["unsharded_gradients_bytes"] += track.whole_gradients
        found["temporaries_bytes"] -= track.whole_gradients
    track.phases["backward"] = max(track.phases["backward"], track.phases[LOSS_BACKWARD])
    for name in ("forward", "loss", "backward", "optimizer"):
        found[f"peak_{name}_bytes"] = track.phases[name]
    return found, track.alive
