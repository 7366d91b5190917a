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
from co2sim.schedule.mesh import Mesh


def stage_cluster(cluster: Cluster, mesh: Mesh) -> Cluster:
    """The GPUs of one stage. Raises OptionError where stages fill no nodes, and no parts of one."""
    if cluster.sites > 1:
        raise OptionError(
            f"pp={mesh.pp} needs a cluster of one site, and {cluster.name} has several"
        )
    return cluster.resized(mesh.stage_gpus(cluster.layout))


def chunks_of(job: Workload, stage: int) -> list[list[Block]]:
    """The blocks of each chunk of a stage. Raises OptionError for a model without layers."""
    model = job.model
    first, layers, last = model.blocks[0], model.blocks[1:-1], model.blocks[-1]
    if not layers or not all(block.boundary_bytes for block in layers):
        raise OptionError(
            f"pp={job.pp} does not apply to {model.name}: its blocks have no input sizes"
        )
    counts = job.layer_counts(len(layers))
    found: list[list[Block]] = []
    for part in range(stage, job.pp * job.interleave, job.pp):
        start = sum(counts[:part])
        found.append(list(layers[start : start + counts[part]]))
    if stage == 0:
        found[0] = [first, *found[0]]
    if stage == job.pp - 1:
        shared = (last.tied,) if last.tied else ()
        found[-1] = [*found[-1], replace(last, tensors=(*last.tensors, *shared), tied=0)]
    return found


def first_alike(job: Workload) -> list[int]:
    """For every stage the number of the first one that has equal blocks in its chunks."""
    found: list[int] = []
    known: dict[object, int] = {}
    for stage in range(job.pp):
        parts = chunks_of(job.share, stage)
        alike = tuple(tuple(replace(one, name="") for one in part) for part in parts)
        found.append(known.setdefault(alike, stage))
    return found


def stage_of(job: Workload, stage: int) -> Workload:
    """A job with the part of the model that one GPU of a stage has."""
    share = job.share
    blocks = [block for part in chunks_of(share, stage) for block in part]
    return replace(share, model=replace(share.model, blocks=tuple(blocks), shape=None))
