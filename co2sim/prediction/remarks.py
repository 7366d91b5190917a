"""Notes that many results have alike: which options change nothing, and what is not counted."""

from collections.abc import Iterable, Sequence

from co2sim.hardware.cluster import Cluster
from co2sim.models.architecture import Block
from co2sim.models.workload import Workload
from co2sim.simulation.noise import Noise

_FEW = 128
"""GPUs. Published runs of one kind show what more of them cost, and begin here."""

IDLE_RECOMPUTE = "recompute=selective repeats nothing: flash attention keeps no scores"
_NO_KERNELS = "changes memory, but not time: the GPU has no kernels, as that of h100-calibrated has"
IDLE_CHECKPOINTING = "checkpointing=reentrant changes nothing without recompute=full"
EAGER_ATTENTION = f"attention=eager {_NO_KERNELS}"
EAGER_LOSS = f"loss=eager {_NO_KERNELS}"
SCALE = (
    f"on more than {_FEW} GPUs, where interference, node_spread and step_spread are 0, what more"
    " GPUs cost beyond exposed communication is not counted: published FSDP runs on 512 H100 lost 4"
    " to 8 % against 128; a probe measures interference, and h100-calibrated has fitted values"
)
ALIKE = (IDLE_RECOMPUTE, IDLE_CHECKPOINTING, EAGER_ATTENTION, EAGER_LOSS, SCALE)


def remarks(
    cluster: Cluster, job: Workload, blocks: Sequence[Block], noise: Noise, gpus: int
) -> tuple[str, ...]:
    """Those on a job of `blocks` on so many GPUs, of which `cluster` may be one stage."""
    plain = cluster.gpu.kernels is None
    scores, logits = any(block.scores for block in blocks), any(block.logits for block in blocks)
    even = not (cluster.interference or cluster.node_spread or cluster.step_spread)
    uneven_by_hand = noise.jitter or noise.straggle
    found = {
        IDLE_RECOMPUTE: (job.recompute, job.attention) == ("selective", "flash"),
        IDLE_CHECKPOINTING: job.checkpointing == "reentrant" and job.recompute != "full",
        EAGER_ATTENTION: plain and scores and job.attention == "eager",
        EAGER_LOSS: plain and logits and job.loss == "eager",
        SCALE: even and gpus > _FEW and not uneven_by_hand,
    }
    return tuple(text for text, holds in found.items() if holds)


def alike(notes: Iterable[Sequence[str]]) -> list[str]:
    """The remarks among the notes of results, once each."""
    return list(dict.fromkeys(note for one in notes for note in one if note in ALIKE))


def own(notes: Sequence[str]) -> list[str]:
    """The notes that are of one result alone: what was chosen for it."""
    return [note for note in notes if note not in ALIKE]
