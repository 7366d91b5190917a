"""Memory of a GPU, in bytes by item.

Model states follow ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3): 2 bytes of
parameter and 2 of gradient in half precision, and K of optimizer state; activations follow
Korthikanti et al. 2022 (arXiv 2205.05198). Strategies add what they gather and reduce.

A step has two moments of much memory: the backward pass of the loss, with the logits, and that of
the last layer, with the gradients of its activations. The larger one is the peak. PyTorch's
allocator serves all that (`torch.cuda.max_memory_allocated`), and holds more than it serves; beside
it there are the CUDA context and the buffers of NCCL: `OVERHEAD`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes
from co2sim.models.operators import (
    AnyOperator,
    Attention,
    Block,
    Operator,
    Product,
    TensorExchange,
)
from co2sim.schedule.schedule import Compute, DType, Group, Layout, Schedule
from co2sim.training.workload import Workload

GIB: Bytes = 2.0**30

CONTEXT: Mapping[bool, Bytes] = {False: 0.51 * GIB, True: 1.2 * GIB}
"""Of the driver, for a process, without communication; True: where CUDA loads all kernels at once,
as it did before CUDA 11.7.

Source: stas00/ml-engineering, training/performance/README.md, an A100: 1.78 GiB with torch 1.10.2,
0.90 with 1.13.1 and 0.92 with 2.1.1, of which the mean is taken. Lazy: hahnyuan/PB-LLM issue 3, an
A800: 79.27 GiB in use, 74.53 of them allocated by PyTorch and 4.23 reserved. TianheWu/CoSeR issue
10, an A100: 14.25, 12.87 and 0.89, so 0.49.
"""

COMMUNICATOR: Mapping[bool, Bytes] = {False: 544e6, True: 688e6}
"""Of NCCL, for a communicator of two ranks, or of more (True); further nodes add nothing.

Source: NVIDIA/nccl issue 964, measured on 4 A100; issue 864 on the nodes. Connections that an
all-to-all opens are not counted.
"""

FRAGMENTATION = 0.05
"""What PyTorch's allocator holds and cannot use, as a fraction of what comes and goes in a step.

Source: hahnyuan/PB-LLM issue 3: 4.23 GiB of 78.76. It is 15 % on average where memory is saved by
offloading and adapters, and up to 33 % (Guo et al. 2024, GMLake, arXiv 2401.08156).
"""

STATES = ("parameters", "gradients", "optimizer")
"""Items that an optimizer needs for its step."""

OVERHEAD = ("cached", "fragmentation", "nccl", "context")
"""Items that PyTorch's allocator does not count as allocated."""

_LOSS_BYTES = {False: (10.0, 12.0), True: (10.0, 16.0)}
"""Of PyTorch's cross entropy for a logit, forward and back; True: of a divided vocabulary.

Forward: the logits in 16 bits and in fp32, and log-probabilities. Backward: these, their gradient,
and that of the logits (`nll_loss` behind `log_softmax`), all in fp32; and a sum of gradients in
torch.distributed.tensor.parallel.loss_parallel.
"""


_EVEN = 1e-9
"""Of the peak: rounding, where items grow evenly."""


@dataclass(frozen=True, slots=True)
class Passing:
    """Bytes that come and go: while each block goes forward and backward, and at single moments.

    `forward` and `backward` are by block, or one number for all, `loss` forward and back, or one
    number. `end` is behind the last backward pass, and `step` while the optimizer updates.
    """

    forward: ArrayLike = 0.0
    loss: ArrayLike = 0.0
    backward: ArrayLike = 0.0
    end: Bytes = 0.0
    step: Bytes = 0.0

    def __post_init__(self) -> None:
        """Keep numbers as tuples: those of two are compared at once."""
        for name in ("forward", "loss", "backward"):
            sizes = np.asarray(getattr(self, name), float)
            object.__setattr__(self, name, tuple(sizes.tolist()) if sizes.ndim else float(sizes))

    def moments(self, blocks: int) -> NDArray[np.float64]:
        """At every moment of a micro-step over a number of blocks, in order, and of the update."""
        forward, backward = (
            np.broadcast_to(np.asarray(sizes, float), blocks)
            for sizes in (self.forward, self.backward)
        )
        loss = np.broadcast_to(np.asarray(self.loss, float), 2)
        return np.concatenate([forward, loss, backward[::-1], [self.end, self.step]])


Items: TypeAlias = Mapping[str, Bytes | Passing]
"""What a strategy holds, by name: for ever, or at times."""


def model_states(
    job: Workload,
    *,
    parameter_shards: int = 1,
    gradient_shards: int = 1,
    optimizer_shards: int = 1,
    copies: bool = False,
) -> dict[str, Bytes | Passing]:
    """Parameters, gradients and optimizer states, each divided over its number of shards.

    What is frozen has neither gradients nor optimizer states, and no master copy among these.
    What is offloaded is in the host's memory, states with the master copy (`host_memory`). Under
    autocast whole parameters are their own master copy, their gradients are in fp32, too, and
    buckets hold `copies` of these. `whole_gradients` are bytes an element until a block is done.
    """
    wide = job.autocast and parameter_shards == 1 and job.precision is not DType.FP32
    width = DType.FP32.bytes if wide else job.precision.bytes
    gradient = DType.FP32.bytes if wide else job.gradient_bytes
    states: dict[str, Bytes | Passing] = {}
    if job.offload != "parameters":
        states["parameters"] = job.owned(parameter_shards) * width
        states["gradients"] = as_they_come(job, gradient, gradient_shards)
    if gradient_shards > 1 or job.accumulation == 1:
        states["whole_gradients"] = gradient if gradient_shards == 1 else job.precision.bytes
    if not job.states_on_host:
        states["optimizer"] = (
            job.moments(optimizer_shards) if wide else job.optimizer_states(optimizer_shards)
        )
    if job.reduce_bytes and gradient_shards == 1:
        states["reduction"] = Passing(end=job.trained * job.reduce_bytes)
    if job.update_bytes:
        states["update"] = Passing(step=job.owned_trained(optimizer_shards) * job.update_bytes)
    if wide:
        states["casts"] = casts(job)
        states["bucket"] = job.trained * gradient if copies else 0.0
    return states


def as_they_come(job: Workload, width: Bytes, shards: int = 1) -> Passing:
    """Gradients that are kept: those of the blocks behind; all where micro-steps sum them up."""
    whole = job.owned_trained(shards) * width
    if job.accumulation > 1 or job.main_gradients:
        return Passing(whole, whole, whole, whole, whole)
    sizes = np.array([block.trained for block in job.model.blocks], float)
    if tied := job.model.blocks[-1].trained_tied:
        sizes[0], sizes[-1] = sizes[0] - tied, sizes[-1] + tied  # of the embedding, by the head
    behind = sizes[::-1].cumsum()[::-1] - sizes
    return Passing(backward=behind * (whole / (sizes.sum() or 1.0)), end=whole, step=whole)


def casts(job: Workload, *, cached: bool = True) -> Passing:
    """Weights as autocast makes them for products, from a forward pass to the backward one.

    It has `cached` those of parameters until the forward pass ends, but not those of FSDP's views:
    of blocks that run again there is what is at work. Source: pytorch v2.1, aten/src/ATen/
    autocast_mode.cpp, cached_cast.
    """
    products = [block.of(Product) for block in job.model.blocks]
    sizes = np.array([sum(op.elements + op.shared for op in ops) for ops in products], float)
    sizes *= job.precision.bytes
    again = np.array([job.repeats(block) for block in job.model.blocks])
    once, work = np.where(again, 0.0, sizes).cumsum(), np.where(again, sizes, 0.0)
    there = sizes.cumsum() if cached else once + work
    return Passing(there, [there[-1] if cached else once[-1], once[-1]], once + work)


def host_memory(job: Workload, schedule: Schedule) -> Bytes:
    """Of what a GPU offloads: optimizer states, and the gradients that come for them.

    Parameters that are offloaded, and gradients with them, are what `moved_to_host` says.
    """
    moved = {
        work.kernel: work.memory_bytes
        for work in schedule.works
        if isinstance(work, Compute) and work.place == "link"
    }
    share = moved.get("from_host", 0.0) / job.precision.bytes / max(1, job.trained)
    return share * (job.trained * job.update.master_bytes + job.moments(1)) + moved.get(
        "to_host", 0.0
    )


def sent_to_host(job: Workload) -> dict[str, Bytes]:
    """What layers keep of a micro-batch that goes to the host, by layer: of all but the last two.

    Raises OptionError where there is nothing to send.
    """
    sizes: dict[object, Bytes] = {}
    sent: dict[str, Bytes] = {}
    for block, made, kind in job.executed:
        if kind not in sizes:
            sizes[kind] = _checkpoint(job, block) or kept_bytes(job, made)
        if block.is_layer:
            sent[block.name] = sizes[kind]
    few = dict(list(sent.items())[:-ON_GPU])
    if not any(few.values()):
        raise OptionError(
            f"offload=activations moves nothing of {job.model.name}: {len(sent)} layers say what"
            f" they keep, of which {ON_GPU} stay"
        )
    return few


ON_GPU = 2
"""Layers whose activations are on the GPU where others are on the host: one that is at work, and
one that comes or goes."""


def _checkpoint(job: Workload, block: Block) -> Bytes:
    """The input of a block that runs again; 0 of others.

    Under autocast sums are in fp32, and so is what goes from layer to layer.
    """
    width = max(job.precision.bytes, job.autocast * DType.FP32.bytes)
    return job.repeats(block) * block.boundary * width * job.micro_batch


def moved_to_host(whole: "Timeline", kept: "Timeline") -> Bytes:
    """What of the states of a job without offloading is not `kept` on the GPU."""
    return sum(whole.most(name) - kept.most(name) for name in STATES)


@dataclass(frozen=True)
class Timeline:
    """What a GPU holds at every moment of a micro-step: by item, in bytes.

    Moments are the blocks on the way forward, the loss, the blocks on the way back, what comes
    behind them, and the update of the optimizer. `cached` is what PyTorch's allocator keeps at each
    besides, for other streams and other sizes: a stream reuses its own blocks only, and one of them
    holds no more than it was made for.
    """

    moments: tuple[str, ...]
    items: Mapping[str, NDArray[np.float64]]
    cached: NDArray[np.float64]

    @cached_property
    def total(self) -> NDArray[np.float64]:
        """Of all items."""
        return sum(self.items.values(), np.zeros(len(self.moments)))

    @property
    def peak(self) -> int:
        """The moment that holds most."""
        return int(np.argmax(self.total))

    @cached_property
    def milestones(self) -> dict[str, int]:
        """The moments that matter, by what they are: the loss only where there are logits."""
        loss, last = self.moments.index("loss"), len(self.moments) - 1
        fullest = loss + 2 + int(np.argmax(self.total[loss + 2 : last - 1]))
        at_loss = {"forward of the loss": loss, "backward of the loss": loss + 1}
        return {
            "end of the forward pass": loss - 1,
            **(at_loss if "logits" in self.items else {}),
            f"{self.moments[fullest]}, the fullest block": fullest,
            self.moments[last - 1]: last - 1,
            "optimizer step": last,
        }

    @property
    def bends(self) -> list[int]:
        """The moments between which every item grows evenly, as it does along equal layers."""
        turns = np.abs(np.diff(np.stack([*self.items.values()]), 2)) > _EVEN * self.total.max()
        return [0, *(int(turn) + 1 for turn in np.flatnonzero(turns.any(0))), len(self.moments) - 1]

    @property
    def unused(self) -> Bytes:
        """What the allocator has `cached` when it holds most, beside the peak of what it serves."""
        return float(np.max(self.total + self.cached) - self.total[self.peak])

    def most(self, *items: str) -> Bytes:
        """The most of an item, or of several together."""
        sizes = [self.items[name] for name in items if name in self.items]
        return float(np.sum(sizes, axis=0).max()) if sizes else 0.0

    def at(self, moment: int) -> dict[str, Bytes]:
        """The items of a moment, but for those of no bytes."""
        return {name: float(sizes[moment]) for name, sizes in self.items.items() if sizes[moment]}


def timeline(job: Workload, held: Items, micro_batches: float = 1.0, late: float = 0.0) -> Timeline:
    """What is there at every moment of the last micro-step, with what a strategy has `held`.

    Of that `whole_gradients` are the bytes an element of a gradient until its block is done. What
    is kept for backward passes is that of `micro_batches`: a stage of a pipeline begins
    several before it ends one. Of `late` ones gradients of weights are still to come, for which
    what runs again is kept, too.

    `checkpoints` are the inputs of the blocks that run again, `activations` what is kept of the
    others, and of the one that goes back just then. `outputs` are what a loop holds besides, such
    as logits in fp32. `logits` are those with their gradient and what the loss holds, `workspace`
    the gradients of activations, `unreduced` those of weights.
    """
    blocks, count = job.executed, len(job.executed)
    others = dict(held) | ({"outputs": _outputs(job)} if job.keeps_outputs else {})
    if job.quantize_base != "none":
        others["dequantized"] = _dequantized(job)
    each, streams, block = (
        others.pop(name, 0.0) for name in ("whole_gradients", "streams", "last_block")
    )
    whole = each if isinstance(each, float) else 0.0
    steps = {kind: Backward.of(job, made) for _, made, kind in blocks}
    repeats = [job.repeats(block) for block, _, _ in blocks]
    inputs = np.array([_checkpoint(job, block) for block, _, _ in blocks])
    kept = np.array(
        [0.0 if r else steps[kind].kept for (_, _, kind), r in zip(blocks, repeats, strict=True)]
    )
    worst = [steps[kind].worst(whole) for _, _, kind in blocks]
    needed, workspace, gradients = (np.array(column) for column in zip(*worst, strict=True))
    logits = np.array([steps[kind].logits for _, _, kind in blocks])
    loss = np.sum([step.loss for step in steps.values()], axis=0)
    more, ends = micro_batches - 1, np.zeros(2)
    again = sum(_needed(job, made) for _, made, _ in blocks) - kept.sum() if late else 0.0

    def line(
        before: NDArray[np.float64], here: NDArray[np.float64], after: float
    ) -> NDArray[np.float64]:
        """Of what stays from a block's forward pass to its backward pass; none stays longer."""
        behind = np.cumsum(before)
        forward, back = behind, behind - before + here
        if job.offload == "activations":
            gone = _gone(before, [block.is_layer for block, _, _ in blocks])
            forward, back = behind - gone, back - gone
        passes = np.concatenate([forward, [forward[-1]] * 2, back[::-1]]) + after
        return np.concatenate([passes, ends])

    items = {
        "checkpoints": line(inputs, inputs, more * inputs.sum()),
        "activations": line(kept, needed, more * kept.sum() + late * again),
        "workspace": np.concatenate([np.zeros(count), ends, workspace[::-1], ends]),
        "unreduced": np.concatenate([np.zeros(count), ends, gradients[::-1], ends]),
        "logits": np.concatenate([logits, loss, logits[::-1], ends]),
    }
    for name, size in others.items():
        passing = size if isinstance(size, Passing) else Passing(size, size, size, size, size)
        items[name] = items.get(name, 0.0) + passing.moments(count)
    cached = _cached(job, items, streams, block, float(logits.sum()))
    there = {name: sizes for name, sizes in items.items() if sizes.any()}
    return Timeline(_moments([block.name for block, _, _ in blocks]), there, cached)


def _dequantized(job: Workload) -> Passing:
    """The largest matrix of a block that is stored in fewer bits, as a product at work reads it."""
    sizes = [
        max((op.whole * max(op.tensors) / op.elements for op in of if op.packed), default=0.0)
        for block in job.model.blocks
        for of in [block.of(Product)]
    ]
    there = np.array(sizes) * job.precision.bytes
    return Passing(there, backward=there)


def _gone(kept: NDArray[np.float64], layers: Sequence[bool]) -> NDArray[np.float64]:
    """What of layers up to a block is on the host: of all but the last two of these.

    So it is on the way forward, and on the way back, where one of the two has come just then.
    """
    passed = np.cumsum(layers)
    first = np.concatenate([[0.0], kept[np.asarray(layers, bool)].cumsum()])
    there: NDArray[np.float64] = first[np.maximum(passed - ON_GPU, 0)]
    return there


def _moments(names: Sequence[str]) -> tuple[str, ...]:
    """Those of blocks of these names."""
    return (
        *(f"forward of {name}" for name in names),
        "loss",
        "backward of the loss",
        *(f"backward of {name}" for name in reversed(names)),
        "reduction of the last gradients",
        "optimizer",
    )


def _cached(
    job: Workload,
    items: Mapping[str, NDArray[np.float64]],
    streams: Bytes | Passing,
    block: Bytes | Passing,
    logits: Bytes,
) -> NDArray[np.float64]:
    """What the allocator keeps at every moment for other streams, and of other sizes.

    A strategy makes `streams` bytes on their own streams, and at the end a `block` for the last
    reduction. A block of logits in 16 bits does not hold those in fp32; copies of all gradients are
    larger than any other, and the last one may be.
    """
    cached = np.zeros_like(items["logits"])
    assert isinstance(streams, float)
    assert isinstance(block, float)
    if streams:
        cached += streams - items.get("gradients", 0.0)
    if "reduction" in items:
        cached += items["reduction"].max() - items["reduction"]
    eager = job.loss == "eager"
    if block > logits * (1 + eager):
        cached += block
        cached[-2] -= block
    if eager:
        cached[len(job.executed) + 1] += logits
    return cached


def _outputs(job: Workload) -> Passing:
    """What the model gave, where the loop holds it: logits, and keys and values of every layer.

    Those of layers that do not run again are activations that are kept anyway.

    Source: transformers v4.35, modeling_llama.py: CausalLMOutputWithPast, with logits.float(), and
    past_key_values unless use_cache is False, which its own gradient checkpointing sets.
    """
    blocks = job.executed
    logits = sum(block.logits for block, _, _ in blocks) * job.micro_batch * DType.FP32.bytes
    keys = [
        job.repeats(block) * sum(op.rows * op.keys * (op.wide + op.value) for op in of)
        for block, _, _ in blocks
        for of in [block.of(Attention)]
    ]
    there = np.cumsum(keys) * job.micro_batch * job.precision.bytes
    every = float(there[-1]) + logits
    return Passing(there, every, every, every, every)


@dataclass(frozen=True, slots=True)
class Backward:
    """A block's backward pass in steps, one for each operator that computes, on a micro-batch.

    `kept` is there between the two passes. At each of `steps` there are the activations that are
    still needed, the gradients of operands and results, and elements of weights whose gradient has
    been made so far. `logits` are there as long as the block is at work, and `loss` at the loss, on
    the way forward and back.
    """

    kept: Bytes
    steps: tuple[tuple[Bytes, Bytes, int], ...]
    logits: Bytes = 0.0
    loss: tuple[Bytes, Bytes] = (0.0, 0.0)

    def worst(self, whole: Bytes) -> tuple[Bytes, Bytes, Bytes]:
        """The step that holds most, with `whole` bytes an element of whole gradients."""
        rows = [(needed, passing, whole * done) for needed, passing, done in self.steps]
        return max(rows, key=sum)

    @staticmethod
    def of(job: Workload, block: Block) -> "Backward":
        """Of a block as it is executed.

        The operators come back in reverse. One needs the gradient of its result and makes that of
        its operands; then what was kept of its result is free.
        """
        width = job.precision.bytes * job.micro_batch
        there, passing = _needed(job, block), block.boundary * width
        steps: list[tuple[Bytes, Bytes, int]] = []
        done = 0
        for op in reversed(block.operators):
            done += 0 if op.frozen else op.elements + (op.shared if isinstance(op, Product) else 0)
            result, operands = _gradients(op)
            if operands:
                result = 0.0 if block.logits else result  # that of the logits counts as theirs
                there -= op.rows * _made(op) * width
                steps.append((there, passing + (result + operands) * width, done))
                there -= op.rows * _more(op) * width
        if not steps or done > steps[-1][2]:  # gradients of what computes nothing come last
            steps.append((there, passing, done))
        logits = block.logits * job.micro_batch
        loss = _LOSS_BYTES[job.tp > 1]
        if job.loss == "fused":  # compiled code does not overwrite the logits by their gradient
            loss = (job.precision.bytes, job.precision.bytes * (1 + job.compiled))
        loss = job.loss_bytes or loss
        return Backward(
            kept=kept_bytes(job, block),
            steps=tuple(steps),
            logits=logits * job.precision.bytes,
            loss=(logits * loss[0], logits * loss[1]),
        )


def _gradients(op: AnyOperator) -> tuple[float, float]:
    """Elements of the gradients of an operator's result, and of its operands, of a sample."""
    match op:
        case Product():
            rows = op.rows * (op.count or 1)
            return rows * op.columns, rows * op.inner
        case Attention():
            heads = float(op.rows * op.heads)
            scores = 2.0 * op.heads * op.rows * op.length if op.softmax and not op.fused else 0.0
            return heads * op.value, heads * (2 * op.wide + op.value) + scores
        case Operator(parts=parts) if "activation" in parts:
            made = _made(op)
            return op.rows * made, op.rows * (op.traffic_alone - made)
    return 0.0, 0.0


def overhead(
    items: Mapping[str, Bytes],
    cached: Bytes,
    groups: Iterable[Group],
    layout: Layout,
    *,
    eager_loading: bool = False,
) -> dict[str, Bytes]:
    """What PyTorch does not allocate, beside `items` that it does, for the groups that meet.

    `cached` are blocks of other streams and other sizes (`Timeline`).

    Parameters, gradients and optimizer states stay where they are; all else leaves gaps.
    """
    lasting = (*STATES, "secondary", "outer")
    passing = sum(size for name, size in items.items() if name not in lasting)
    ranks = [len(group.members(0, layout)) for group in groups]
    sizes = {
        "cached": cached,
        "fragmentation": FRAGMENTATION * passing,
        "nccl": sum(COMMUNICATOR[count > 2] for count in ranks if count > 1),  # noqa: PLR2004
        "context": CONTEXT[eager_loading],
    }
    return {name: size for name, size in sizes.items() if size}


def allocated(items: Mapping[str, Bytes]) -> Bytes:
    """The part of all items that `torch.cuda.max_memory_allocated` counts."""
    return sum(size for name, size in items.items() if name not in (*OVERHEAD, "total"))


def reserved(items: Mapping[str, Bytes]) -> Bytes:
    """The part that `torch.cuda.max_memory_reserved` counts."""
    return sum(size for name, size in items.items() if name not in {"nccl", "context", "total"})


def _needed(job: Workload, block: Block) -> Bytes:
    """What is there of a block for its backward pass, but for its logits."""
    return sum(_kept_of(job, op) for op in block.operators)


def kept_bytes(job: Workload, block: Block) -> Bytes:
    """What is kept of a block until its backward pass, but for its logits."""
    if not job.rerun.every_second(block):
        return sum(_kept_of(job, op, freed=True) for op in block.operators)
    elements = block.boundary
    products = block.of(Product)
    if not any(op.name == "bias" for op in block.operators):
        every = [op.rows * width for op in products for width in op.widths or (op.columns,)]
        # No other operator reads the result of its last product: compiled code does not keep it.
        elements += sum(every[: -1 if job.compiled else None : 2])
    scores = [op for op in block.of(Attention) if op.softmax]
    elements += sum(op.rows * op.heads * op.value for op in scores)
    statistics = sum(op.statistics_bytes for op in scores)
    return (elements * job.precision.bytes + statistics) * job.micro_batch


def _kept_of(job: Workload, op: AnyOperator, *, freed: bool = False) -> Bytes:
    """What is kept of an operator; without what it makes when it runs again, if that is `freed`."""
    alone = bool(op.again.flops) and job.again.kind == "operators"
    runs = freed and alone
    elements = job.kept * op.rows * (op.kept - (_made(op) + _more(op) if runs else 0.0))
    statistics = 0.0
    match op:
        case Attention(softmax=True):
            again = bool(op.again.flops) and job.again.kind != "full"
            statistics = op.statistics_bytes if op.fused and not again else 0.0
            elements += 0.0 if op.fused or again else op.scores
        case TensorExchange(sequence=True, side="input") if job.keep_gathered and not runs:
            elements += op.rows * op.width * (1 - 1 / op.ranks)
    return (elements * job.precision.bytes + statistics) * job.micro_batch


def _made(op: AnyOperator) -> float:
    """Elements of a row that come back when it runs again, but for what others fuse away."""
    return op.kept - _more(op) if op.made is None else op.made


def _more(op: AnyOperator) -> float:
    return sum(elements for _, elements in op.unfused)
