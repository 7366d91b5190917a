"""What a stage of a pipeline has: its GPUs, and its part of the layers.

Stages are consecutive nodes, or equal parts of a node. A stage with several chunks has every
`pp`-th of all chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). The embedding is with
the first layers, the head with the last ones; where they share weights, both stages hold them.

Chunks that do not divide the layers have unequal parts. Where they divide the layers with embedding
and head, these count as a layer each, as in the 16 stages of Llama 3.1 405B (arXiv 2407.21783,
section 3.3.2; --account-for-embedding-in-pipeline-split and
--account-for-loss-in-pipeline-split of Megatron-LM). Elsewhere the first chunks have one more.
"""

from dataclasses import replace
from itertools import groupby

from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.models.architecture import Block
from co2sim.models.workload import Workload


def stage_cluster(cluster: Cluster, pp: int) -> Cluster:
    """The GPUs of one stage. Raises OptionError where stages fill no nodes, and no parts of one."""
    if cluster.sites > 1:
        raise OptionError(f"pp={pp} needs a cluster of one site, and {cluster.name} has several")
    gpus, g = cluster.layout.world_size, cluster.gpus_per_node
    each = gpus // pp
    if gpus % pp or (each % g and g % each):
        raise OptionError(
            f"pp={pp} does not divide {gpus} GPUs into full nodes of {g}, or into equal parts of"
            " nodes"
        )
    return cluster.resized(each)


def layer_counts(layers: int, pp: int, chunks: int) -> list[int]:
    """The layers of each chunk of all stages, in the order in which a sample passes them.

    Raises OptionError where there are fewer layers than chunks.
    """
    parts = pp * chunks
    each, more = divmod(layers, parts)
    if more and not (layers + 2) % parts:
        whole = (layers + 2) // parts
        return [whole - 1, *[whole] * (parts - 2), whole - 1]
    if not each:
        words = f"pp={pp}" if chunks == 1 else f"pp={pp} x interleave={chunks}"
        raise OptionError(f"{words} is more than the {layers} layers: each has one at least")
    return [each + 1] * more + [each] * (parts - more)


def split_words(layers: int, pp: int, chunks: int) -> str | None:
    """How layers are split, as a text; None where all stages have as many."""
    counts = layer_counts(layers, pp, chunks)
    if len(set(counts)) == 1:
        return None
    found = [(count, len(list(same))) for count, same in groupby(counts)]
    runs = ", ".join(f"{times} x {count}" if times > 1 else f"{count}" for count, times in found)
    where = f"{pp} stages" if chunks == 1 else f"{pp} stages of {chunks} chunks, in turn"
    ends = "; embedding and head count as a layer each" if counts[0] < counts[1] else ""
    return f"the {layers} layers are split unevenly on {where}: {runs}{ends}"


def chunks_of(job: Workload, stage: int, pp: int, chunks: int) -> list[list[Block]]:
    """The blocks of each chunk of a stage. Raises OptionError for a model without layers."""
    model = job.model
    first, layers, last = model.blocks[0], model.blocks[1:-1], model.blocks[-1]
    if not layers or not all(block.boundary_bytes for block in layers):
        raise OptionError(f"pp={pp} does not apply to {model.name}: its blocks have no input sizes")
    counts = layer_counts(len(layers), pp, chunks)
    found: list[list[Block]] = []
    for part in range(stage, pp * chunks, pp):
        start = sum(counts[:part])
        found.append(list(layers[start : start + counts[part]]))
    if stage == 0:
        found[0] = [first, *found[0]]
    if stage == pp - 1:
        shared = (last.tied,) if last.tied else ()
        found[-1] = [*found[-1], replace(last, tensors=(*last.tensors, *shared), tied=0)]
    return found


def first_alike(job: Workload, pp: int, chunks: int) -> list[int]:
    """For every stage the number of the first one that has equal blocks in its chunks."""
    found: list[int] = []
    known: dict[object, int] = {}
    for stage in range(pp):
        parts = chunks_of(job.share, stage, pp, chunks)
        alike = tuple(tuple(replace(one, name="") for one in part) for part in parts)
        found.append(known.setdefault(alike, stage))
    return found


def stage_of(job: Workload, stage: int, pp: int, chunks: int) -> Workload:
    """A job with the part of the model that one GPU of a stage has."""
    share = job.share
    blocks = [block for part in chunks_of(share, stage, pp, chunks) for block in part]
    return replace(share, model=replace(share.model, blocks=tuple(blocks), shape=None))
