"""What a result rests on without a source: assumed numbers, and sizes that no table covers."""

from dataclasses import replace
from typing import Any

from co2sim.catalog import Entry, Fact
from co2sim.cluster import GPU, Cluster
from co2sim.units import scaled
from co2sim.workload import Model, Workload

_OF_TOTALS = {"gpu.tdp", "gpu.idle_power", "node_power", "pue", "grid_intensity"}
"""Numbers of a cluster that no speed rests on: `totals` names those that it used."""
_NEGLIGIBLE = 0.01
"""A probe measures passes of other shapes than a model's: sizes so near each other are the same."""


def assumed(cluster: Entry[Cluster], model: Entry[Model]) -> tuple[Fact, ...]:
    """The assumed numbers of both, which no source supports; no step depends on failures."""
    return (*_under("cluster", cluster), *_under("model", model))


def _under(prefix: str, entry: Entry[Any]) -> list[Fact]:
    used = (
        f
        for f in entry.assumed
        if f.path.removesuffix("_low").removesuffix("_high") not in _OF_TOTALS
        and not f.path.startswith("failures.")
    )
    return [replace(fact, path=f"{prefix}.{fact.path}") for fact in used]


def beyond_the_file(stated: Cluster, sized: Cluster) -> list[Fact]:
    """More nodes than the cluster has: the what-if of buying more of the same."""
    if sized.nodes <= stated.nodes:
        return []
    why = f"the cluster has {stated.nodes}; more of the same kind were asked for"
    return [Fact("cluster.nodes", str(sized.nodes), why, assumed=True)]


def beyond_the_table(gpu: GPU, job: Workload) -> list[Fact]:
    """Passes smaller or larger than any whose efficiency is known, and flash attention of none."""
    works = job.works()
    sizes = [pass_.flops for w in works for pass_ in (w.forward, w.backward) if pass_.flops]
    (least, at_least), (most, at_most) = gpu.efficiency[0], gpu.efficiency[-1]
    found = _unknown_attention(gpu, job)
    for size, bound, value, word in (
        (min(sizes, default=least), least, at_least, "smaller"),
        (max(sizes, default=most), most, at_most, "larger"),
    ):
        if (size / bound - 1) * (1 if word == "larger" else -1) > _NEGLIGIBLE:
            why = (
                f"passes of {scaled(size, 'FLOP')} are {word} than any whose efficiency is known"
                f" ({scaled(bound, 'FLOP')})"
            )
            found.append(Fact("cluster.gpu.efficiency", str(value), why, assumed=True))
    return found


def _unknown_attention(gpu: GPU, job: Workload) -> list[Fact]:
    """Flash attention where the speed of its kernels is not known."""
    if not gpu.kernels or gpu.kernels.attention_efficiency is not None:
        return []
    if not any(job.fuses(block) for block in job.model.blocks):
        return []
    why = "no speed of flash attention is known for these kernels: that of other products is taken"
    value = str(gpu.kernels.gemm_efficiency)
    return [Fact("cluster.gpu.kernels.attention_efficiency", value, why, assumed=True)]
