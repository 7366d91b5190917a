"""Predicted beside measured: the cause that was changed is the cause that is named."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import tiny
from commands import Command
from simulated_record import (
    Change,
    disturbed,
    measured,
    more_latency,
    more_launch,
    same,
    slower_gpu,
    slower_network,
)

from analysis.measured.attribution import Cause, attribute, interference, split
from analysis.measured.comparison import (
    OrderError,
    RunComparison,
    changed,
    compare,
    labels,
    order_errors,
    summarise,
)
from co2sim.hardware.cluster import Cluster, Link
from co2sim.schedule.schedule import (
    NODE,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Kind,
    Op,
    Schedule,
)
from co2sim.simulation.metrics import round_times, window
from co2sim.simulation.noise import QUIET, Noise
from co2sim.simulation.run import execute
from realrun.record import Record, write


def shares(strategy: str, change: Change = same, noise: Noise = QUIET) -> dict[Cause, float]:
    """Shares of the causes of a constructed measurement."""
    return compare("run", measured(strategy, change, noise)).causes


JITTER = Noise(jitter=0.05, seed=3)

CHANGED = [
    ("ddp", slower_network, Cause.BANDWIDTH),
    ("co2.published(tau=4)", slower_network, Cause.BANDWIDTH),
    ("zeropp", more_latency, Cause.LATENCY),
    ("ddp", more_launch, Cause.LAUNCH),
    ("zeropp", disturbed, Cause.CONTENTION),
    ("ddp", slower_gpu, Cause.COMPUTE),
    ("co2.published(tau=4)", slower_gpu, Cause.COMPUTE),
]


@pytest.mark.parametrize(("strategy", "change", "cause"), CHANGED)
def test_the_one_thing_that_was_changed_is_the_dominant_cause(
    strategy: str, change: Change, cause: Cause
) -> None:
    """It explains most of all errors; with 5 % jitter ranks wait, too, and it stays the largest."""
    found = shares(strategy, change)
    assert next(iter(found)) is cause
    assert found[cause] > 0.6
    if change is not disturbed:
        assert next(iter(shares(strategy, change, JITTER))) is cause


@pytest.mark.parametrize("strategy", ["zero2", "co2.published(tau=4)"])
def test_a_slow_node_is_a_straggler_and_others_wait_for_it(strategy: str) -> None:
    """The slow node's computes are named straggler; collectives that err much wait for it."""
    noise = Noise(node_speed={1: 0.8})
    comparison = compare("run", measured(strategy, noise=noise))
    found = comparison.causes
    assert set(list(found)[:2]) == {Cause.WAITING, Cause.STRAGGLER}
    collectives = {op.name for op in comparison.schedule.body if isinstance(op.work, Collective)}
    names = labels(comparison.schedule)
    waiting = {names[name] for name in collectives}
    for row in comparison.ops:
        if row.share > 0.05 and row.cause:
            assert row.cause is (Cause.WAITING if row.label in waiting else Cause.STRAGGLER)


@pytest.mark.parametrize("strategy", ["zeropp", "co2.published(tau=3,worker=node)"])
def test_traces_that_agree_have_no_errors_and_no_causes(strategy: str) -> None:
    """A simulation beside itself: all errors are 0 and nothing is blamed."""
    comparison = compare("run", measured(strategy))
    assert comparison.round_time_error == pytest.approx(0, abs=1e-9)
    assert comparison.overlap_difference == pytest.approx(0, abs=1e-6)
    assert all(row.cause is None and row.error == pytest.approx(0) for row in comparison.ops)
    assert not any(comparison.causes.values())


@pytest.mark.parametrize(
    ("strategy", "change"),
    [("zero3", slower_network), ("zeropp", more_latency), ("zeropp", disturbed)],
)
def test_parts_add_up_to_the_error(strategy: str, change: Change) -> None:
    """Nothing of an error is lost, and nothing invented, whatever the noise."""
    noise = Noise(jitter=0.1, straggle=0.1, seed=1)
    comparison = compare("run", measured(strategy, change, noise))
    for d in comparison.differences:
        assert sum(d.parts.values()) == pytest.approx(d.error, abs=1e-12)
    found = comparison.ops
    assert sum(row.share for row in found) == pytest.approx(1)
    whole = sum(d.error for d in comparison.differences)
    assert sum(sum(row.parts.values()) for row in found) == pytest.approx(whole)


def crossing(compute: float) -> Schedule:
    """Two all-reduces of 8 ms each on streams of their own, the second after a compute op."""
    work = Collective(Kind.ALL_REDUCE, "a", 8_000_000, DType.INT8, WORLD)
    other = replace(work, buffer="b")
    return Schedule(
        "crossing",
        (
            Op("a", work, "one"),
            Op("work", Compute("work", compute), "compute"),
            Op("b", other, "two", (After("work"),)),
            Op("end", Compute("end", 1e9), "compute", (After("a"), After("b"))),
        ),
    )


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_collectives_that_meet_against_the_prediction_are_in_contention(backend: str) -> None:
    """A compute op shorter than predicted lets two collectives share the link, or queue on it."""
    cluster = tiny.cluster(2, 1, backend=backend)
    schedule = crossing(1e10)
    before = execute(schedule, cluster, precision="bf16", rounds=2, fold=False)
    after = execute(crossing(2e9), cluster, precision="bf16", rounds=2, fold=False)
    found = attribute(schedule, cluster, "bf16", before, after, rounds=1)
    for op in ("a", "b"):
        for d in (d for d in found if d.op == op and d.error > 1e-6):
            assert max(d.parts, key=lambda cause: abs(d.parts[cause])) is Cause.CONTENTION
            assert d.parts[Cause.CONTENTION] == pytest.approx(d.error, rel=1e-6)
    assert sum(d.parts.get(Cause.CONTENTION, 0.0) for d in found) > 0
    (work,) = {round(d.parts[Cause.COMPUTE], 9) for d in found if d.op == "work"}
    assert work == pytest.approx(-8e-3)


def pair() -> Schedule:
    """Two equal all-reduces of 8 MB that start together on streams of their own."""
    work = Collective(Kind.ALL_REDUCE, "a", 8_000_000, DType.INT8, WORLD)
    return Schedule("pair", (Op("a", work, "one"), Op("b", replace(work, buffer="b"), "two")))


@pytest.mark.parametrize(
    ("communicators", "overlaps"), [("stream", (0.5, 0.5)), ("group", (0.0, 0.5))]
)
def test_collectives_queue_only_on_a_communicator_that_they_share(
    communicators: str, overlaps: tuple[float, float]
) -> None:
    """With one for each stream both share the link; with one for both the second waits for it.

    Either way the time alone that is left is that of the cost model.
    """
    cluster = tiny.cluster(2, 1, backend="nccl", communicators=communicators)
    trace = execute(pair(), cluster, precision="bf16", rounds=1, fold=False)
    parts = split(trace, pair(), cluster, 0)
    for op, overlap in zip("ab", overlaps, strict=True):
        assert parts[op, 0, 0].overlap_fraction == pytest.approx(overlap)
        assert parts[op, 0, 0].alone == pytest.approx(8e-3)


def test_members_that_end_apart_and_start_late_never_give_negative_waits() -> None:
    """A member may end before another starts, by clocks that differ: waits are cut at its end."""
    schedule = Schedule(
        "one",
        (
            Op("reduce", Collective(Kind.ALL_REDUCE, "g", 1000, DType.FP32, NODE), "comm"),
            Op("work", Compute("work", 1e9), "compute"),
        ),
    )
    cluster = tiny.cluster(1, 2, intra=Link(1e9, 1e-6))
    found = execute(schedule, cluster, precision="bf16", rounds=1, fold=False)
    late = [
        span._replace(start=span.end + 1, end=span.end + 2)
        if (span.rank, span.op) == (1, "reduce")
        else span
        for span in found.spans
    ]
    broken = replace(found, spans=tuple(late))
    for part in split(broken, schedule, cluster, 0).values():
        assert part.waiting >= 0
        assert part.active >= 0
    parts = attribute(schedule, cluster, "bf16", found, broken, rounds=1)
    assert all(sum(d.parts.values()) == pytest.approx(d.error) for d in parts)


def test_interference_is_what_makes_equal_works_equal() -> None:
    """Works that take 1/(1 - 0.25) times as long beside communication lose a quarter."""
    samples = [("a", 1.0, 0.0), ("a", 1 / 0.75, 1.0), ("b", 4 / (1 - 0.125), 0.5), ("b", 4.0, 0.0)]
    assert interference(samples) == pytest.approx(0.25, abs=0.01)
    assert interference([("a", 1.0, 1.0), ("b", 2.0, 0.0)]) == 0.0
    assert interference([]) == 0.0


def test_predicting_on_the_cluster_that_was_measured_leaves_no_error() -> None:
    """With the true description, as an object or as changed numbers, both agree."""
    record = measured("zero3", slower_network)
    recorded = record.case.cluster
    assert isinstance(recorded, Cluster)
    assert abs(compare("run", record).round_time_error) > 0.1
    for cluster in (
        slower_network(recorded),
        changed(recorded, {"inter.bandwidth": f"{recorded.inter.bandwidth / 3!r} B/s"}),
    ):
        assert compare("run", record, cluster).round_time_error == pytest.approx(0, abs=1e-9)


@pytest.fixture(scope="module")
def three() -> list[RunComparison]:
    """Three runs: as predicted, on a slower network, on a slower GPU."""
    return [
        compare(change.__name__, measured("ddp", change))
        for change in (same, slower_network, slower_gpu)
    ]


def test_summary_is_median_and_largest_of_absolute_errors(three: list[RunComparison]) -> None:
    """Of every figure, by its definition from predicted and measured numbers."""
    whole = summarise(three)

    def errors(figure: str) -> list[float]:
        pairs = [(getattr(one.predicted, figure), one.measured[figure]) for one in three]
        return sorted(abs(here / there - 1) for here, there in pairs)

    assert whole["runs"] == 3
    for figure, name in (
        ("comm_busy_s", "comm_busy_error"),
        ("exposed_comm_s", "exposed_error"),
        ("round_time_s", "round_time_error"),
    ):
        _, middle, most = errors(figure)
        assert whole[f"median_{name}"] == pytest.approx(middle, abs=1e-12)
        assert whole[f"largest_{name}"] == pytest.approx(most)
    gaps = sorted(abs(one.overlap_difference or 0.0) for one in three)
    assert (whole["median_overlap_difference"], whole["largest_overlap_difference"]) == (
        gaps[1],
        gaps[2],
    )


def test_exposed_communication_is_compared_where_there_is_some(three: list[RunComparison]) -> None:
    """Hidden here and there is no error; predicted but not measured is no division by zero."""
    for here, there, error in (
        (0.0, 0.0, None),  # nothing is exposed
        (0.0, 0.009, None),  # less than a hundredth of 1 s: hidden, too
        (0.05, 0.0, 5.0),  # as hundredths of the busy time
        (0.0, 0.05, -1.0),
        (0.3, 0.2, 0.5),
    ):
        run = replace(
            three[0],
            predicted=replace(three[0].predicted, exposed_comm_s=here),
            measured=dict(three[0].measured, comm_busy_s=1.0, exposed_comm_s=there),
        )
        assert run.exposed_error == (error if error is None else pytest.approx(error))


# --- which of two is faster ---------------------------------------------------------------------


def orders(*records: Record) -> list[OrderError]:
    """The errors of order among these runs, which are named by their strategies."""
    runs = [compare(str(one.case.strategy), one) for one in records]
    return order_errors(runs)


def test_an_order_that_is_not_the_predicted_one_is_an_error() -> None:
    """Of CO2, with several steps in a round, and DDP, by the times of a step; else none."""
    assert not orders(measured("ddp"), measured("co2.published(tau=4)"))
    late, usual = measured("co2.published(tau=4)", slower_gpu), measured("ddp")
    for pair in ((late, usual), (usual, late)):
        (error,) = orders(*pair)
        assert (error.first, error.second, error.certain) == ("co2.published(tau=4)", "ddp", True)
        steps = [compare("", one).step_times for one in (late, usual)]
        assert error.predicted == pytest.approx(steps[1][0] / steps[0][0] - 1)
        assert error.measured == pytest.approx(steps[1][1] / steps[0][1] - 1)
        assert error.predicted > 0 > error.measured


def test_a_round_time_is_the_mean_of_its_rounds() -> None:
    """Of the rounds of which an interval is made, with and without rounds before them."""
    record = measured("co2.published(tau=2)", noise=Noise(jitter=0.2, seed=2), rounds=3)
    schedule = record.case.stage().schedule
    for rounds in (1, 3, record.trace.rounds):
        times = round_times(record.trace, schedule, rounds)
        assert len(times) == rounds
        assert times.mean() == pytest.approx(window(record.trace, schedule, rounds).round_time)


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two runs in a folder, and nothing else."""
    monkeypatch.chdir(tmp_path)
    write(Path("runs/ddp"), measured("ddp", slower_network))
    write(Path("runs/co2"), measured("co2.published(tau=2)", slower_gpu))


@pytest.mark.usefixtures("runs")
def test_json_and_csv_hold_every_op(co2analysis: Command) -> None:
    """JSON has the promised keys; JSON and CSV hold every op with its error and parts."""
    code, out, _ = co2analysis("compare", "runs/ddp", "--json", "--csv", "ops.csv")
    assert code == 0
    (run,) = json.loads(out)["runs"]
    promised = {"predicted", "measured", "comm_busy_error", "exposed_error", "overlap_difference"}
    promised |= {"round_time_error", "ops", "causes", "step_time_s", "steps_per_round"}
    assert promised <= run.keys()
    assert run["round_time_error"] == pytest.approx(
        run["predicted"]["round_time_s"] / run["measured"]["round_time_s"] - 1
    )
    body = measured("ddp").case.stage().schedule.body
    assert [op["op"] for op in run["ops"]] == [op.name for op in body]
    frame = pd.read_csv("ops.csv")
    assert list(frame["op"]) == [op.name for op in body]
    errors = frame["measured_s"] - frame["predicted_s"]
    assert frame["excess_s"].to_numpy() == pytest.approx(errors.to_numpy())
    parts = frame[[f"{cause}_s" for cause in Cause]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(errors.to_numpy(), abs=1e-12)
    assert sum(run["causes"].values()) == pytest.approx(1)
