"""Steps of many micro-steps by a few: the same figures as those of all."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim import Case, simulate
from co2sim.hardware.cluster import Link
from co2sim.models.architecture import Transformer, language_model
from co2sim.prediction import micro_steps
from co2sim.prediction.result import Result

MODEL = language_model(
    "gpt", Transformer(layers=8, hidden=64, heads=8, ffn=256), vocab=1000, tokens=32, tied=True
)
ALL = 10**9

jobs = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from([one for one in tiny.VARIANTS if "hpz_group" not in one]),
        "shape": st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2)]),
        "tp": st.sampled_from([1, 2]),
        "sequence_parallel": st.booleans(),
        "accumulation": st.integers(4, 16).map(lambda n: 4 * n),
        "interference": st.sampled_from([0.0, 0.1]),
        "busy_efficiency": st.sampled_from([1.0, 0.8]),
        "bandwidth": st.sampled_from([1e8, 1e9, 1e10, 1e11]),
        "latency": st.sampled_from([0.0, 1e-6]),
    }
)


def found(job: dict[str, Any], fewest: int = 8) -> Result:
    """The figures of a case with at least `fewest` micro-steps simulated."""
    options = dict(job)
    options["pp"], options["interleave"] = options.pop("shape")
    options["sequence_parallel"] = options["sequence_parallel"] and options["tp"] > 1
    inter = Link(*(options.pop(name) for name in ("bandwidth", "latency")))
    inter = replace(inter, busy_efficiency=options.pop("busy_efficiency"))
    cluster = tiny.cluster(4, 4, inter=inter, interference=options.pop("interference"))
    with patch.object(micro_steps, "_FEWEST", fewest):
        return simulate(cluster, MODEL, **options)


@given(jobs)
def test_a_few_micro_steps_give_the_figures_of_all(job: dict[str, Any]) -> None:
    """To 1e-9, by every strategy, where communication is hidden and where it is not."""
    few, whole = found(job), found(job, ALL)
    slack = 1e-9 * whole.round_time_s
    assert few.exposed_comm_s == pytest.approx(whole.exposed_comm_s, abs=slack)
    for name in ("round_time_s", "step_time_s", "tokens_per_s", "mfu", "comm_busy_s"):
        assert getattr(few, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=slack)
    for name in ("wire_bytes_per_gpu_per_step", "nic_bytes_per_node_per_step"):
        assert getattr(few, name) == pytest.approx(getattr(whole, name), rel=1e-9)
    assert few.breakdown_s == pytest.approx(whole.breakdown_s, rel=1e-9, abs=slack)
    assert few.memory_bytes_per_gpu == whole.memory_bytes_per_gpu
    assert few.warnings == whole.warnings
