"""How well cases scale: their throughput per GPU, relative to one node."""

from dataclasses import replace

import pytest

from co2sim.prediction import driver
from co2sim.prediction.question import Question
from co2sim.studies.run_all import efficiencies
from co2sim.studies.solve import solve
from co2sim.studies.targets import axis_of, target_of

CASE = Question(cluster="a100-tcp80", model="gpt2-small", strategy="zero2", gpus=64)


def test_one_node_is_the_measure_though_it_is_none_of_the_cases() -> None:
    """64 GPUs among 32 and 64 that wait are no 100 %: it is what `solve` calls efficiency."""
    cases = [replace(CASE, gpus=32), CASE]
    found = efficiencies(cases, [driver.run(case) for case in cases])
    target, axis = target_of("efficiency=50%"), axis_of(CASE, "gpus", "32", "64")
    (solved,) = [solve(CASE, axis, target, tokens=None)]
    known = dict(solved.points)
    assert found == [pytest.approx(known[32]), pytest.approx(known[64])]
    assert found[1] is not None
    assert found[1] < 0.9


def test_what_cannot_run_on_one_node_has_no_efficiency() -> None:
    """A global batch of 12 does not divide by 8 GPUs."""
    case = replace(CASE, gpus=4, global_batch=12)
    assert efficiencies([case], [driver.run(case)]) == [None]
