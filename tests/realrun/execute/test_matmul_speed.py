"""The speed of processors in a run: measured, kept, and used beside the probe's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_record import measured, slower_gpu

from analysis.measured.comparison import compare, summarise
from analysis.measured.page import sentence
from co2sim.common.errors import CatalogError
from co2sim.schedule.schedule import Collective, Compute
from co2sim.simulation.costs import compute_time
from realrun import record
from realrun.execute.matmul_speed import Products, at_speed, beside, each_round, slowest
from realrun.record import Record


def attained(share: float, run: Record) -> float:
    """FLOP/s of large products at this share of what the cluster of a record says."""
    gpu = run.case.cluster.gpu  # type: ignore[union-attr]
    return share / beside(1.0, gpu, "bf16")


def test_the_slowest_rank_counts_and_times_are_averaged() -> None:
    """100 FLOP in 1 and 3 s on the slowest of two ranks; where one timed nothing, none counts."""
    assert slowest(100, [[9.0, 1.0, 2.0], [0.5, 3.0]], 0) == 50
    assert slowest(100, [[], [1.0]], 0) is None


def test_who_was_slow_catches_up_where_averages_arrive_late() -> None:
    """Two ranks are slow in turn. Without lag all rounds are; a lag of one makes up for one."""
    assert slowest(100, [[3.0, 1.0], [1.0, 3.0]], 0) == 200 / 6
    assert slowest(100, [[3.0, 1.0], [1.0, 3.0]], 1) == 200 / 4
    three = [[3.0, 3.0, 3.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]]
    assert slowest(100, three, 0) == 600 / 18
    assert slowest(100, three, 1) == 600 / 15
    assert slowest(100, three, 2) == slowest(100, three, 3) == 600 / 12
    assert slowest(100, [[3.0, 3.0], [1.0, 1.0]], 1) == 200 / 6


def test_products_beside_communication_are_left_out() -> None:
    """Unless a round has no others: then all count."""
    run = measured("ddp")
    trace, schedule = run.trace, run.case.stage().schedule
    works = {op.name: op.work for op in schedule.body}
    mine = replace(trace, spans=tuple(span for span in trace.spans if span.rank == 0))
    computed = [span for span in mine.spans if isinstance(works[span.op], Compute)]
    busy = [span for span in mine.spans if isinstance(works[span.op], Collective)]
    alone = {
        (span.op, span.round)
        for span in computed
        if all(other.end <= span.start or other.start >= span.end for other in busy)
    }
    assert 0 < len(alone) < len(computed)
    ops = [(span.op, span.round) for span in computed]
    timed = {op: Products(2, 2.0 if op in alone else 20.0) for op in ops}
    assert each_round(mine, schedule, timed, 2) == [1.0, 1.0]
    timed = {op: made for op, made in timed.items() if op not in alone}
    assert each_round(mine, schedule, timed, 2) == [10.0, 10.0]
    assert each_round(mine, schedule, {}, 2) == []


@given(st.floats(0.2, 5), st.floats(1e3, 1e16))
def test_every_kernel_takes_as_much_longer_as_large_products(scale: float, flops: float) -> None:
    """GPUs that attain a share of the speed with large products attain it with all kernels."""
    run = measured("ddp")
    gpu = replace(run.case.cluster.gpu, launch_overhead=0.0)  # type: ignore[union-attr]
    case = replace(run.case, cluster=replace(run.case.cluster, gpu=gpu))  # type: ignore[type-var]
    slower = at_speed(case, attained(scale, run)).cluster.gpu  # type: ignore[union-attr]
    for work in (Compute("x", flops), Compute("x", 0.0, flops)):
        took = compute_time(work, slower, "bf16") * scale
        assert took == pytest.approx(compute_time(work, gpu, "bf16"))


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "co2.published(tau=4)"])
def test_a_slower_machine_is_told_from_a_wrong_prediction(strategy: str) -> None:
    """With 70 % of the speed the prediction is too fast; at the speed of the run it is right."""
    run = measured(strategy, slower_gpu)
    found = compare("run", replace(run, product_speed=attained(0.7, run)))
    assert found.round_time_error < -0.05
    assert found.speed == pytest.approx(0.7)
    assert found.at_speed_error == pytest.approx(0, abs=1e-9)
    assert summarise([found])["largest_at_speed_error"] == pytest.approx(0, abs=1e-9)
    assert "30% slower" in sentence(found)
    assert compare("run", measured(strategy)).at_speed_error is None


def test_the_speed_is_kept_with_a_run(tmp_path: Path) -> None:
    """A speed that no processor has is refused, and named."""
    run = replace(measured("ddp"), product_speed=9e10)
    record.write(tmp_path, run)
    assert record.read(tmp_path).product_speed == run.product_speed
    kept = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(kept | {"product_speed": 0}))
    with pytest.raises(CatalogError, match="product_speed"):
        record.read(tmp_path)
