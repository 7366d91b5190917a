"""Steps of many micro-steps by a few: the same figures as those of all."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from one_sample import simulate
from test_pipeline import MODEL

from co2sim import Question
from co2sim.hardware.cluster import Link
from co2sim.prediction import predict as module
from co2sim.prediction.predict import stage_figures
from co2sim.prediction.result import Result
from co2sim.simulation import metrics
from co2sim.simulation.noise import RunOptions
from co2sim.simulation.run import Simulator
from co2sim.strategies import DDP

LONG = (
    *(
        "co2.published(tau=12)",
        "co2.published(tau=13,staleness=2)",
        "local_sgd(tau=12,worker=node)",
        "diloco(tau=14)",
    ),
    *(
        "overlap_local_sgd(tau=12)",
        "slowmo(tau=12,worker=node,inner=ddp)",
        "co2.published(tau=12,dtype=int8)",
    ),
    *("co2.published(tau=12,worker=node,inner=fsdp)", "diloco(tau=12,fragments=2,delay=1)"),
    *("co2(tau=18,delay=2,worker=node)", "diloco(tau=16,delay=1)"),
)
"""Strategies whose local steps are many, too."""

jobs = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(
            [*(one for one in tiny.VARIANTS if "hpz_group" not in one), *LONG]
        ),
        "shape": st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]),
        "tp": st.sampled_from([1, 2]),
        "sequence_parallel": st.booleans(),
        "accumulation": st.integers(1, 8).map(lambda n: 4 * n),
        "interference": st.sampled_from([0.0, 0.1]),
        "busy_efficiency": st.sampled_from([1.0, 0.8]),
        "bandwidth": st.sampled_from([1e9, 1e10, 1e11]),
        "latency": st.sampled_from([0.0, 1e-6]),
    }
)


def found(job: dict[str, Any], *, whole: bool = False) -> Result:
    """The figures of a case; `whole` says that all micro-steps and local steps are simulated."""
    options = dict(job)
    options["pp"], options["interleave"] = options.pop("shape")
    options["sequence_parallel"] = options["sequence_parallel"] and options["tp"] > 1
    inter = Link(*(options.pop(name) for name in ("bandwidth", "latency")))
    inter = replace(inter, busy_efficiency=options.pop("busy_efficiency"))
    cluster = tiny.cluster(4, 4, inter=inter, interference=options.pop("interference"))
    fewest = {"_FEWEST": 10**9, "_LOCAL_STEPS": 10**9}
    with patch.multiple(module, **fewest) if whole else nullcontext():
        return simulate(cluster, MODEL, **options)


@settings(max_examples=settings().max_examples // 2)  # each is two cases, one of them slow
@given(jobs)
def test_a_few_micro_steps_give_the_figures_of_all(job: dict[str, Any]) -> None:
    """To 1e-9, by every strategy, where communication is hidden and where it is not."""
    few, whole = found(job), found(job, whole=True)
    slack = 1e-9 * whole.round_time_s
    assert few.exposed_comm_s == pytest.approx(whole.exposed_comm_s, abs=slack)
    for name in ("round_time_s", "step_time_s", "tokens_per_s", "mfu", "comm_busy_s"):
        assert getattr(few, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=slack)
    for name in ("wire_bytes_per_gpu_per_step", "nic_bytes_per_node_per_step"):
        assert getattr(few, name) == pytest.approx(getattr(whole, name), rel=1e-9)
    sent = [one.sent_bytes_per_gpu_per_step for one in (few, whole)]
    assert sent[0] == pytest.approx(sent[1], rel=1e-9)
    assert sum(sent[0].values()) == pytest.approx(few.wire_bytes_per_gpu_per_step)
    assert few.breakdown_s == pytest.approx(whole.breakdown_s, rel=1e-9, abs=slack)
    assert few.memory_bytes_per_gpu == whole.memory_bytes_per_gpu
    assert few.warnings == whole.warnings


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "co2.published(tau=2)"])
def test_a_step_of_more_micro_steps_takes_no_more_ops(strategy: str) -> None:
    """So that time and memory do not grow with them."""
    few, many = (
        Question(
            cluster=tiny.cluster(4, 4), model=MODEL, strategy=strategy, pp=4, accumulation=count
        )
        for count in (64, 4096)
    )
    ops = [len(stage_figures(one.job(), 1).stage.schedule.body) for one in (few, many)]
    assert ops[0] == ops[1]


@pytest.mark.parametrize("strategy", ["zero1(bucket=2000)", "co2.published(tau=2)"])
def test_micro_steps_repeat_where_the_last_round_ends_faster_than_others(strategy: str) -> None:
    """Where no exchanges of a next round share links with its collectives: the midst repeats."""
    job: dict[str, Any] = {"strategy": strategy, "pp": 4, "tp": 2, "sequence_parallel": True}
    case = Question(cluster=tiny.cluster(4, 4), model=MODEL, accumulation=64, **job)
    few = stage_figures(case.job(), 1)
    prepared = case.job().stage(1)
    many = Simulator(RunOptions(), prepared, None).rounds(12)
    assert not metrics.is_steady(many, prepared.schedule)
    midst = metrics.window(many.first(10), prepared.schedule, 1)
    assert few.round_time == pytest.approx(midst.round_time, rel=1e-9)
    assert len(few.stage.schedule.body) < len(prepared.schedule.body) / 2


def test_beside_an_average_that_is_under_way_nothing_repeats() -> None:
    """Though micro-steps beside it are alike: it ends in one of those that would be left out."""
    slow, fast = (
        Question(
            cluster=tiny.cluster(8, 4, inter=Link(bandwidth)),
            model=MODEL,
            strategy="co2.published(tau=4)",
            pp=4,
            accumulation=8,
        )
        .job()
        .stage(1)
        for bandwidth in (2e8, 1e11)
    )
    for prepared, repeats in ((slow, False), (fast, True)):
        trace = Simulator(RunOptions(), prepared, None).until_steady()[0]
        assert (metrics.repeated(prepared.schedule, trace, "micro_step") is not None) is repeats


def test_micro_steps_of_a_strategy_of_ones_own_are_all_simulated() -> None:
    """What it does in each of them is not known."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Own(DDP):
        name: ClassVar[str] = "own"

    one = Question(cluster=tiny.cluster(4, 4), model=MODEL, strategy=Own(), pp=4, accumulation=64)
    names = [op.name for op in stage_figures(one.job(), 1).stage.schedule.body]
    assert any(name.startswith("m63.") for name in names)
    assert any(name.startswith("m31.") for name in names)
