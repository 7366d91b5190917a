"""Memory of a GPU, in bytes by item.

Model states follow ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3): 2 bytes of
parameter and 2 of gradient in half precision, and K of optimizer state; activations follow
Korthikanti et al. 2022 (arXiv 2205.05198). What the framework itself takes is not counted.
"""

from co2sim.units import Bytes
from co2sim.workload import Workload


def model_states(
    job: Workload, *, parameter_shards: int = 1, gradient_shards: int = 1, optimizer_shards: int = 1
) -> dict[str, Bytes]:
    """Parameters, gradients and optimizer states, each divided over its number of shards."""
    size = job.parameters * job.precision.bytes
    return {
        "parameters": size / parameter_shards,
        "gradients": size / gradient_shards,
        "optimizer": job.parameters * job.optimizer_bytes / optimizer_shards,
    }


def activations(job: Workload) -> Bytes:
    """Activations at the peak of a micro-step.

    "none" keeps everything, "selective" all but attention scores (as flash attention does), "full"
    the input of every block and all of the block being recomputed.
    """
    scale = job.micro_batch * job.precision.bytes / 2
    blocks = job.model.blocks
    if job.recompute == "full":
        kept = sum(block.boundary_bytes for block in blocks)
        return scale * (
            kept + max(block.activation_bytes + block.attention_bytes for block in blocks)
        )
    scores = sum(block.attention_bytes for block in blocks) if job.recompute == "none" else 0.0
    return scale * (sum(block.activation_bytes for block in blocks) + scores)
