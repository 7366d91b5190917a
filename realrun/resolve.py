"""Fit a case to the ranks that were started."""

from dataclasses import replace

from co2sim.catalog import Fact
from co2sim.hardware.cluster import Backend
from co2sim.prediction.case import Case
from co2sim.prediction.notes import assumed
from co2sim.schedule.schedule import Layout


def resolve(case: Case, layout: Layout, backend: Backend) -> tuple[Case, tuple[Fact, ...]]:
    """The case with its cluster and model as objects, and those of their numbers without a source.

    The cluster gets these nodes and backend, keeps its sites, and has a communicator for every
    stream and group, as the executor makes them.
    """
    cluster, model = case.load()
    here = replace(
        cluster.value,
        nodes=layout.nodes,
        gpus_per_node=layout.gpus_per_node,
        backend=backend,
        communicators="stream",
    )
    return replace(case, cluster=here, model=model.value, overrides={}), assumed(cluster, model)
