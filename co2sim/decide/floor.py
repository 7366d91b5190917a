"""What no strategy can be faster than: the time of the computation alone."""

from dataclasses import replace

from co2sim import study
from co2sim.case import Case


class Floor:
    """The highest throughput by case; every kind of micro-step is simulated once.

    On one GPU, or on those that share every layer.

    A strategy adds communication, an optimizer's step and waiting to it, and takes nothing off.
    A pipeline does the same work, and adds a bubble.
    """

    def __init__(self) -> None:
        self._speeds: dict[object, float] = {}

    def tokens_per_s(self, case: Case) -> float:
        """Of all GPUs of a case, if they did nothing but their micro-steps."""
        assert case.gpus is not None
        cluster = case.cluster if isinstance(case.cluster, str) else id(case.cluster)
        key = (cluster, case.micro_batch, case.recompute, case.tp)
        if key not in self._speeds:
            self._speeds[key] = _each_gpu(case)
        return case.gpus * self._speeds[key]


def _each_gpu(case: Case) -> float:
    """Tokens/s of a GPU by what a second micro-step adds to a step of as few as are needed."""
    alone = replace(case, strategy="ddp", gpus=case.tp, global_batch=None, pp=1, interleave=1)
    one, two = (study.run(replace(alone, accumulation=steps)) for steps in (1, 2))
    return one.tokens_per_gpu_per_step / (two.step_time_s - one.step_time_s)
