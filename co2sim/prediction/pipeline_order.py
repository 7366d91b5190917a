"""What a stage of a pipeline has: its GPUs, and its part of the layers.

Stages are consecutive nodes, or equal parts of a node. A stage with several chunks has every
`pp`-th of all chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). The embedding is with
the first layers, the head with the last ones; where they share weights, both stages hold them.
"""

from dataclasses import replace

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


def chunks_of(job: Workload, stage: int, pp: int, chunks: int) -> list[list[Block]]:
    """The blocks of each chunk of a stage. Raises OptionError where layers do not divide."""
    model = job.model
    first, layers, last = model.blocks[0], model.blocks[1:-1], model.blocks[-1]
    if not all(block.boundary_bytes for block in layers):
        raise OptionError(f"pp={pp} does not apply to {model.name}: its blocks have no input sizes")
    count = len(layers)
    if not count or count % (pp * chunks):
        words = f"pp={pp}" if chunks == 1 else f"pp={pp} x interleave={chunks}"
        raise OptionError(f"{words} does not divide the {count} layers of {model.name}")
    each = count // (pp * chunks)
    found: list[list[Block]] = []
    for chunk in range(chunks):
        start = (chunk * pp + stage) * each
        found.append(list(layers[start : start + each]))
    if stage == 0:
        found[0] = [first, *found[0]]
    if stage == pp - 1:
        shared = (last.tied,) if last.tied else ()
        found[-1] = [*found[-1], replace(last, tensors=(*last.tensors, *shared), tied=0)]
    return found


def sizes(job: Workload, stage: int, pp: int, chunks: int) -> list[int]:
    """How many blocks each chunk of a stage has; `job` is that of the stage."""
    first, last = stage == 0, stage == pp - 1
    each = (len(job.model.blocks) - first - last) // chunks
    found = [each] * chunks
    found[0] += first
    found[-1] += last
    return found


def stage_of(job: Workload, stage: int, pp: int, chunks: int) -> Workload:
    """A job with the part of the model that one GPU of a stage has."""
    share = job.share
    blocks = [block for part in chunks_of(share, stage, pp, chunks) for block in part]
    return replace(share, model=replace(share.model, blocks=tuple(blocks), shape=None))
