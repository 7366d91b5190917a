"""What a tenth more of each number of the hardware buys: in throughput, in GPUs, and in money."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from co2sim import study
from co2sim.calibrations import replaced
from co2sim.case import Case
from co2sim.cluster import Cluster
from co2sim.errors import Co2simError
from co2sim.result import Result

MORE = 1.1
"""How many times better each number is made: more bandwidth, or less latency."""

_ROUNDING = 1e-9
"""A gain that is nothing."""

_LINKS = ("intra", "inter", "wan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What one number does.

    `change` says what is changed, `gain` is the growth of tokens/s, `gpus` how many more GPUs of
    the same kind would give the same, and `worth_per_hour` what those cost, in `currency`. The last
    three are None where no more GPUs give more, or nothing has a price.
    """

    change: str
    gain: float
    gpus: float | None
    worth_per_hour: float | None
    currency: str | None


def moved(case: Case) -> tuple[Case, list[tuple[str, Cluster]]]:
    """The case with its numbers as objects, and its cluster with each number a tenth better."""
    case = study.settle(case)
    cluster, model = case.load()
    sized = cluster.value.resized(case.gpus) if case.gpus is not None else cluster.value
    return replace(case, cluster=sized, model=model.value, overrides={}, gpus=None), list(
        _moves(sized)
    )


def levers(case: Case) -> list[Lever]:
    """All levers of a case, the strongest first; each takes a simulation."""
    plain, moves = moved(case)
    sized = plain.cluster
    assert isinstance(sized, Cluster)
    before = study.run(plain)
    marginal = _marginal(plain, sized, before)
    found = []
    for change, better in moves:
        gain = study.run(replace(plain, cluster=better)).tokens_per_s / before.tokens_per_s - 1
        gain = gain if abs(gain) > _ROUNDING else 0.0
        gpus = gain * before.tokens_per_s / marginal if marginal else None
        price = sized.price_per_gpu
        worth = None if gpus is None or price is None else gpus * price * 3600
        found.append(
            Lever(
                change=change,
                gain=gain,
                gpus=gpus,
                worth_per_hour=worth,
                currency=None if price is None else sized.currency,
            )
        )
    return sorted(found, key=lambda lever: -lever.gain)


def _moves(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Clusters of which one number is better."""
    gpu = cluster.gpu
    peaks = {kind: speed * MORE for kind, speed in gpu.peak.items()}
    faster = replace(gpu, peak=peaks)
    yield "gpu.peak", replace(cluster, gpu=faster)
    wide = replace(gpu, memory_bandwidth=gpu.memory_bandwidth * MORE)
    yield "gpu.memory_bandwidth", replace(cluster, gpu=wide)
    for name in _LINKS:
        link: Any = getattr(cluster, name)
        used = {"intra": cluster.gpus_per_node > 1, "inter": cluster.nodes_per_site > 1}
        if link is None or not used.get(name, cluster.sites > 1):
            continue
        path = f"{name}.bandwidth"
        yield path, replaced(cluster, path, link.bandwidth * MORE)
        if link.latency:
            path = f"{name}.latency"
            yield path, replaced(cluster, path, link.latency / MORE)


def _marginal(case: Case, cluster: Cluster, before: Result) -> float | None:
    """Tokens/s that a further GPU gives, by adding a node to each site; None for no more."""
    more = cluster.layout.world_size + cluster.gpus_per_node * cluster.sites
    try:
        after = study.run(replace(case, gpus=more))
    except Co2simError:  # a global batch that does not divide, say
        return before.tokens_per_s / before.gpus
    gain = (after.tokens_per_s - before.tokens_per_s) / (more - before.gpus)
    return gain if gain > 0 else None
