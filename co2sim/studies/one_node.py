"""How well cases scale: their throughput per GPU, relative to one node."""

from collections.abc import Sequence
from dataclasses import replace

from co2sim.common.errors import Co2simError
from co2sim.prediction import driver
from co2sim.prediction.case import Case
from co2sim.prediction.result import Result
from co2sim.simulation.metrics import scalability_ratio


def efficiencies(cases: Sequence[Case], results: Sequence[Result]) -> list[float | None]:
    """Throughput per GPU of each case, relative to the same on one node of its cluster.

    One node is simulated where it is none of the cases. None where the case cannot run on one.
    """
    known = {
        repr(case): result.tokens_per_s_per_gpu for case, result in zip(cases, results, strict=True)
    }
    alone: dict[str, float | None] = {}
    found = []
    for case, result in zip(cases, results, strict=True):
        node = replace(case, gpus=case.load()[0].value.gpus_per_node)
        key = repr(node)
        if key not in alone:
            alone[key] = known[key] if key in known else _per_gpu(node)
        one = alone[key]
        found.append(one and scalability_ratio(result.tokens_per_s_per_gpu, one))
    return found


def _per_gpu(case: Case) -> float | None:
    try:
        return driver.run(case).tokens_per_s_per_gpu
    except Co2simError:  # a batch that does not divide, or a strategy between nodes
        return None
