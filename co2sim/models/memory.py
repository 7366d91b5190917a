"""Memory of a GPU, in bytes by item.

Model states follow ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3): 2 bytes of
parameter and 2 of gradient in half precision, and K of optimizer state; activations follow
Korthikanti et al. 2022 (arXiv 2205.05198). Strategies add what they gather and reduce.

A step has two moments of much memory: the backward pass of the loss, with the logits, and that of
the last layer, with the gradients of its activations. The larger one is the peak. PyTorch's
allocator serves all that (`torch.cuda.max_memory_allocated`), and holds more than it serves; beside
it there are the CUDA context and the buffers of NCCL: `OVERHEAD`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from co2sim.common.units import Bytes
from co2sim.models.operators import AnyOperator, Attention, Block, Product, TensorExchange
from co2sim.models.workload import OPTIMIZER_BYTES, Workload
from co2sim.schedule.schedule import Compute, Group, Layout, Schedule

GIB: Bytes = 2.0**30

CONTEXT: Bytes = 0.51 * GIB
"""Of the driver, for a process: what it uses beyond PyTorch's allocator without communication.

Source: hahnyuan/PB-LLM issue 3, an A800: 79.27 GiB in use, 74.53 of them allocated by PyTorch and
4.23 reserved. TianheWu/CoSeR issue 10, an A100: 14.25, 12.87 and 0.89, so 0.49.
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

OVERHEAD = ("fragmentation", "nccl", "context")
"""Items that PyTorch's allocator does not count as allocated."""

_LOSS_BYTES: Bytes = 12.0
"""Of PyTorch's cross entropy for a logit, beside the logits in their own type: in fp32 the
log-probabilities, their gradient, and the gradient of the logits (`nll_loss` behind `log_softmax`).
"""


def model_states(
    job: Workload, *, parameter_shards: int = 1, gradient_shards: int = 1, optimizer_shards: int = 1
) -> dict[str, Bytes]:
    """Parameters, gradients and optimizer states, each divided over its number of shards.

    What is frozen has neither gradients nor optimizer states, and no master copy among these.
    States that are offloaded are in the host's memory, with the master copy (`host_memory`).
    """
    states = {
        "parameters": job.owned(parameter_shards) * job.precision.bytes,
        "gradients": job.owned_trained(gradient_shards) * job.gradient_bytes,
    }
    if job.offload == "none":
        states["optimizer"] = job.owned_trained(optimizer_shards) * job.optimizer_bytes
    return states


def host_memory(job: Workload, schedule: Schedule) -> Bytes:
    """Of what a GPU offloads: master copies, moments, and the gradients that come for them."""
    moved = {
        work.kernel: work.memory_bytes
        for work in schedule.works
        if isinstance(work, Compute) and work.place == "link"
    }
    elements = moved.get("from_host", 0.0) / job.precision.bytes
    return elements * OPTIMIZER_BYTES[job.optimizer] + moved.get("to_host", 0.0)


def activations(job: Workload, held: float = 1.0) -> dict[str, Bytes]:
    """What a micro-step needs at its peak, beside states; items of no bytes are left out.

    What is kept for backward passes is that of `held` micro-batches: a stage of a pipeline begins
    several before it ends one.
    `checkpoints` are the inputs of the blocks that are run again, `activations` what is kept of the
    others, and of the one that is run again just then, as a whole or by operators, all at once.
    `logits` are those with their gradient and what the loss holds, `workspace` the gradients of a
    block's activations, `tied_gradient` that of an embedding by the head that shares it: autograd
    adds the embedding's own at the very end.
    """
    times = Counter(kind for _, _, kind in job.executed)
    different = {kind: (block, made) for block, made, kind in reversed(job.executed)}
    kept = inputs = tied = 0.0
    for kind, (block, made) in different.items():
        if job.repeats(block):
            inputs += times[kind] * block.boundary
        else:
            kept += held * times[kind] * kept_bytes(job, made)
        tied += 0 if job.lora is not None else times[kind] * block.tied
    width = job.precision.bytes * job.micro_batch
    always = {
        "checkpoints": held * inputs * width,
        "tied_gradient": tied * job.precision.bytes,
    }
    blocks = [made for _, made in different.values()]
    loss = {"activations": kept, "logits": max(_loss(job, block) for block in blocks)}
    backward = max(
        (
            {
                "activations": kept
                + _needed(job, made)
                - (0.0 if job.repeats(block) else kept_bytes(job, made)),
                "workspace": _workspace(made) * width,
            }
            for block, made in different.values()
        ),
        key=lambda items: sum(items.values()),
    )
    peak = always | max(loss, backward, key=lambda items: sum(items.values()))
    return {name: size for name, size in peak.items() if size}


def overhead(
    items: Mapping[str, Bytes], groups: Iterable[Group], layout: Layout
) -> dict[str, Bytes]:
    """What PyTorch does not allocate, beside `items` that it does, for the groups that meet.

    Parameters, gradients and optimizer states stay where they are; all else leaves gaps.
    """
    lasting = ("parameters", "gradients", "optimizer", "secondary", "outer")
    passing = sum(size for name, size in items.items() if name not in lasting)
    ranks = [len(group.members(0, layout)) for group in groups]
    sizes = {
        "fragmentation": FRAGMENTATION * passing,
        "nccl": sum(COMMUNICATOR[count > 2] for count in ranks if count > 1),  # noqa: PLR2004
        "context": CONTEXT,
    }
    return {name: size for name, size in sizes.items() if size}


def allocated(items: Mapping[str, Bytes]) -> Bytes:
    """The part of all items that `torch.cuda.max_memory_allocated` counts."""
    return sum(size for name, size in items.items() if name not in (*OVERHEAD, "total"))


def reserved(items: Mapping[str, Bytes]) -> Bytes:
    """The part that `torch.cuda.max_memory_reserved` counts."""
    return sum(size for name, size in items.items() if name not in {"nccl", "context", "total"})


def _bytes(job: Workload, block: Block, *, freed: bool) -> Bytes:
    """What is kept of a block for its backward pass, but for its logits.

    Without what its operators make again where that is `freed`.
    """
    elements = statistics = gathered = scores = 0.0
    for op in block.operators:
        alone = bool(op.again.flops) and job.again.kind != "full"
        runs = freed and alone
        elements += op.rows * (op.kept - (_made(op) if runs else 0.0))
        if isinstance(op, Attention) and op.softmax and not alone:
            statistics += op.statistics_bytes if op.fused else 0.0
            scores += 0.0 if op.fused else op.scores
        if isinstance(op, TensorExchange) and op.sequence and op.side == "input" and not runs:
            gathered += op.rows * op.width * (1 - 1 / op.ranks)
    width = job.precision.bytes * job.micro_batch
    often = job.kept if block.is_layer and block.of(Product) else 1.0
    gathered = gathered if job.keep_gathered else 0.0
    return (elements * often + scores + gathered) * width + statistics * job.micro_batch


def _made(op: AnyOperator) -> float:
    return op.kept if op.made is None else op.made


def kept_bytes(job: Workload, block: Block) -> Bytes:
    """What is kept of an executed block until its backward pass, but for its logits."""
    if not job.rerun.every_second(block):
        return _bytes(job, block, freed=True)
    results = sum(op.rows * op.columns for op in block.of(Product))
    kept = block.boundary + results / 2  # every second one
    scores = block.of(Attention)
    mixed = sum(op.rows * op.heads * op.value for op in scores if op.softmax)
    statistics = sum(op.statistics_bytes for op in scores if op.softmax)
    return (kept + mixed) * job.precision.bytes * job.micro_batch + statistics * job.micro_batch


def _needed(job: Workload, block: Block) -> Bytes:
    """What is there of a block for its backward pass, but for its logits."""
    return _bytes(job, block, freed=False)


def _loss(job: Workload, block: Block) -> Bytes:
    """The logits of a block and what the loss makes of them; fused: their gradient, and no more."""
    width = job.precision.bytes
    beside = width if job.loss == "fused" else _LOSS_BYTES
    return block.logits * job.micro_batch * (width + beside)


def _workspace(block: Block) -> float:
    """Gradients of activations while a block's backward pass begins, in elements of a sample.

    Those of input and output of its last product, as its activations are still there; or those of
    the scores of eager attention, before and behind the softmax.
    """
    products = block.of(Product)
    if block.logits:
        return 0.0
    if not products:
        return block.boundary
    last = products[-1]
    gradients = float(last.rows * (last.inner + last.columns))
    eager = [
        2.0 * op.heads * op.length**2 for op in block.of(Attention) if op.softmax and not op.fused
    ]
    return max(gradients, *eager, 0.0)
