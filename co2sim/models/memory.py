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
from co2sim.models.blocks import kinds
from co2sim.models.workload import Block, Workload
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
    What is offloaded is in the host's memory, states with the master copy (`host_memory`).
    """
    if job.offload == "parameters":
        return {"parameters": 0.0, "gradients": 0.0}
    states = {
        "parameters": job.owned(parameter_shards) * job.precision.bytes,
        "gradients": job.owned_trained(gradient_shards) * job.gradient_bytes,
    }
    if job.offload == "none":
        states["optimizer"] = job.optimizer_states(optimizer_shards)
    return states


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
    return share * (job.trained * job.master_bytes + job.moments(1)) + moved.get("to_host", 0.0)


def moved_to_host(whole: Mapping[str, Bytes], kept: Mapping[str, Bytes]) -> Bytes:
    """What of the items of a job without offloading is not `kept` on the GPU."""
    items = "parameters", "gradients", "optimizer"
    return sum(whole.get(name, 0.0) - kept.get(name, 0.0) for name in items)


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
    times: Counter[tuple[int, bool]] = Counter()
    different: dict[tuple[int, bool], Block] = {}
    for kind, block in zip(kinds(job.model), job.model.blocks, strict=True):
        alike = kind, job.repeats(block)
        times[alike] += 1
        different.setdefault(alike, block)
    blocks = different.values()
    kept = inputs = tied = 0.0
    for alike, block in different.items():
        if alike[1]:
            inputs += times[alike] * block.boundary_bytes
        else:
            kept += held * times[alike] * _kept(job, block)
        tied += 0 if block.adapters else times[alike] * block.tied
    always = {
        "checkpoints": held * _scaled(job, inputs),
        "tied_gradient": tied * job.precision.bytes,
    }
    loss = {"activations": kept, "logits": max(_loss(job, block) for block in blocks)}
    backward = max(
        (
            {
                "activations": kept + _repeated(job, block),
                "workspace": _scaled(job, _workspace(job, block)),
            }
            for block in blocks
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


def _scaled(job: Workload, size: Bytes) -> Bytes:
    """Bytes of a micro-batch, from those of a sample in a 2-byte type."""
    return size * job.micro_batch * job.precision.bytes / 2


def _repeated(job: Workload, block: Block) -> Bytes:
    """What is there again while a block's backward pass continues."""
    if job.repeats(block):
        return _needed(job, block)
    return _needed(job, block) - _kept(job, block)


def _kept(job: Workload, block: Block) -> Bytes:
    """What is kept of a block until its backward pass, but for its logits."""
    if not job.repeats_products(block):
        return _needed(job, block) - _made_again(job, block)
    pairs = block.adapters.pairs if block.adapters else ()
    products = (*block.products, *(product for pair in pairs for product in pair))
    results = sum(product.rows * product.columns for product in products if not product.count)
    kept = block.boundary_bytes + results  # every second one, of 2 bytes
    if block.scores is None:
        return _scaled(job, kept)
    return (
        _scaled(job, kept + 2.0 * block.scores.mixed)
        + block.scores.statistics_bytes * job.micro_batch
    )


def _made_again(job: Workload, block: Block) -> Bytes:
    """What of it operators make again, but for attention, which leaves nothing to count."""
    operators = block.operators
    if operators is None or not job.again.operators:
        return 0.0
    size = operators.norms if job.again.of("norms") else 0.0
    if not job.again.of("mlp"):
        size += operators.activation if job.again.of("activation") else 0.0
        return job.kept * _scaled(job, size)
    inputs = max(0, block.division.inputs - 1) if block.division else 0
    return job.kept * _scaled(job, size + operators.mlp) + _gathered(job, block, inputs)


def _needed(job: Workload, block: Block) -> Bytes:
    """What is there of a block for its backward pass, but for its logits."""
    kept = _scaled(job, block.activation_bytes)
    if block.products and not block.logits:
        kept *= job.kept
    kept += _gathered(job, block, block.division.inputs if block.division else 0)
    if block.scores is None or job.repeats_attention(block):
        return kept
    if job.fuses(block):
        return kept + block.scores.statistics_bytes * job.micro_batch
    return kept + _scaled(job, block.scores.bytes)


def _gathered(job: Workload, block: Block, inputs: int) -> Bytes:
    """What tensor-parallel ranks keep of the parts of the others, of some inputs of products."""
    part = block.division
    if part is None or not (part.sequence and job.keep_gathered):
        return 0.0
    others = 1 - 1 / part.ranks
    return inputs * part.elements * others * job.micro_batch * job.precision.bytes


def _loss(job: Workload, block: Block) -> Bytes:
    """The logits of a block and what the loss makes of them; fused: their gradient, and no more."""
    width = job.precision.bytes
    beside = width if job.loss == "fused" else _LOSS_BYTES
    return block.logits * job.micro_batch * (width + beside)


def _workspace(job: Workload, block: Block) -> Bytes:
    """Gradients of activations while a block's backward pass begins, of a sample in a 2-byte type.

    Those of input and output of its last product, as its activations are still there; or those of
    the scores of eager attention, before and behind the softmax.
    """
    if block.logits:
        return 0.0
    if not block.products:
        return block.boundary_bytes
    last = block.products[-1]
    gradients = 2.0 * last.rows * (last.inner + last.columns)
    if block.scores is None or job.fuses(block):
        return gradients
    return max(gradients, 4.0 * block.scores.heads * block.scores.length**2)
