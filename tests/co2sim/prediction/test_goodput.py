"""Goodput: closed forms, of a training by strategy, as the command says it, and event by event."""

import json
import math
import shlex
from dataclasses import astuple, replace

import numpy as np
import pytest
import tiny
from commands import Command
from goodput_simulation import NAMES, simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import lambertw
from scipy.stats import poisson

from co2sim.hardware.failures import HOST_BANDWIDTH, READ_PER_NODE, WRITE_PER_NODE, Failures
from co2sim.prediction import driver
from co2sim.prediction.goodput import (
    FailingWorkers,
    Goodput,
    Preemption,
    Restart,
    Saving,
    Trained,
    WholeJob,
    best_interval,
    erlang_loss,
    goodput_of,
    goodput_where,
    independent_worker_shares,
    missing,
    shares_of,
    spot_of,
    whole_job_shares,
    young,
)
from co2sim.prediction.question import Question

DAY, HOUR = 86400.0, 3600.0
PLAIN = Failures(node=100 * DAY, detection=60.0, restart=240.0)
JOB = Trained(gpus=64, nodes=8, parameters=7_000_000_000, round_time=1.0)
HERE = shlex.split("goodput -c a100-tcp80 -m gpt2-small -g 64 --set failures=meta-rsc-1")


def of_case(strategy: str, failures: Failures | None, nodes: int = 4, per_node: int = 2) -> Goodput:
    """Of the tiny model on a tiny cluster."""
    cluster = replace(tiny.cluster(nodes, per_node), failures=failures)
    result = driver.run(Question(cluster=cluster, model=tiny.model(), strategy=strategy))
    return goodput_of(result, cluster, tiny.model())


# --- closed forms ------------------------------------------------------------------------------


@given(
    st.floats(1e-7, 1e-3),
    st.floats(10.0, 1e4),
    st.builds(Saving, blocking=st.floats(0.0, 100.0), writing=st.floats(0.0, 10.0)),
    st.builds(
        Restart,
        restart=st.floats(0.0, 600.0),
        spares=st.integers(0, 5),
        repair=st.floats(0.0, 1e5),
    ),
)
def test_shares_sum_to_one(rate: float, every: float, saving: Saving, after: Restart) -> None:
    """All of the time is accounted for, to 1e-9, and nothing is negative."""
    for shares in (
        whole_job_shares(rate, every, saving, after),
        independent_worker_shares(rate, 4, every, after, saving.blocking),
    ):
        values = list(astuple(shares))
        assert sum(values) == pytest.approx(1, abs=1e-9)
        assert min(values) >= -1e-9


def test_young_is_that_of_his_paper() -> None:
    """A copy that takes a fiftieth of the mean time between failures, by hand."""
    assert young(1.0, 0.02) == pytest.approx(0.2)


@given(st.floats(-7.5, 2).map(lambda power: 10**power))
def test_the_best_interval_is_that_of_lamberts_function(cost: float) -> None:
    """The work between copies, in mean times between failures, solves its equation as SciPy does.

    Daly (2006, eq. 20) has its first orders; the cancellation in 1 + W costs SciPy's digits.
    """
    best = best_interval(1.0, Saving(blocking=cost))
    assert best == pytest.approx(1 + lambertw(-math.exp(-cost - 1)).real, abs=2e-8)


def test_erlang_loss_is_that_of_the_tables() -> None:
    """B(1, 1) = 1/2; B(2, 1) = 1/5; B(10, 5) = 0.018385 (Erlang 1917)."""
    assert erlang_loss(1, 1.0) == pytest.approx(1 / 2)
    assert erlang_loss(2, 1.0) == pytest.approx(1 / 5)
    assert erlang_loss(10, 5.0) == pytest.approx(0.018385, abs=5e-7)
    assert erlang_loss(3, 0.0) == 0


# --- by strategy --------------------------------------------------------------------------------


def test_what_is_synchronous_goes_back_to_a_checkpoint() -> None:
    """Rate, checkpoint, restart and reload, each worked out by hand."""
    failures = Failures(
        gpu=1000 * DAY,
        node=500 * DAY,
        switch=2000 * DAY,
        gpus_per_switch=32,
        job=10 * DAY,
        detection=60.0,
        restart=240.0,
        pause=2.0,
    )
    found = goodput_where(failures, JOB)
    rate = (64 / 1000 + 8 / 500 + 2 / 2000 + 1 / 10) / DAY
    assert found.whole.rate == pytest.approx(rate)
    assert found.failures_per_second == pytest.approx(rate)
    state = 7e9 * 12
    assert found.checkpoint_bytes == state
    written = state / (8 * WRITE_PER_NODE)
    assert found.whole.saving == Saving(blocking=2.0, writing=written)
    assert found.whole.after.down == pytest.approx(300 + state / (8 * READ_PER_NODE))
    assert found.useful == pytest.approx(
        whole_job_shares(rate, found.whole.every, found.whole.saving, found.whole.after).useful
    )
    large = goodput_where(replace(failures, host_bandwidth=1e8), JOB)
    assert large.whole.saving.blocking == pytest.approx(state / 64 / 1e8)
    blocking = goodput_where(replace(failures, checkpoint="blocking"), JOB)
    assert blocking.whole.saving == Saving(blocking=written)


def test_a_checkpoint_is_what_the_optimizer_needs() -> None:
    """Adam: 12 bytes for a parameter; SGD with momentum: 8; local updates: the outer state, too."""
    assert goodput_where(PLAIN, JOB).checkpoint_bytes == 84e9
    assert goodput_where(PLAIN, replace(JOB, moments=4.0)).checkpoint_bytes == 56e9
    parameters = tiny.model().parameters
    diloco = of_case("diloco(tau=2,worker=node)", PLAIN).checkpoint_bytes
    anchor, momentum, average = 4, 4, 4
    assert diloco == pytest.approx((12 + anchor + momentum + average) * parameters, rel=0.01)
    of_gpus = of_case("diloco(tau=2)", PLAIN).checkpoint_bytes
    assert of_gpus == pytest.approx(diloco, rel=0.01)


def test_workers_that_fail_with_their_node_stop_the_others_once() -> None:
    """8 workers on a node: as many stalls as failures of nodes, not 8 for each."""
    found = goodput_where(replace(PLAIN, regroup=7.0, detection=0.0), replace(JOB, workers=64))
    per_second = found.workers.rate * found.workers.count * found.workers.stall
    assert per_second == pytest.approx(8 / (100 * DAY) * 7.0)


@given(st.floats(0.0, 500.0), st.floats(1.0, 300.0))
def test_the_others_wait_until_a_failure_is_noticed(detection: float, round_time: float) -> None:
    """The mean over when in the round it happens of what detection takes beyond the round."""
    found = goodput_where(
        replace(PLAIN, detection=detection), replace(JOB, round_time=round_time, workers=8)
    )
    left = (np.arange(100_000) + 0.5) / 100_000 * round_time  # of the round, after the failure
    expected = float(np.maximum(0, detection - left).mean())
    assert found.workers.stall == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_local_updates_need_no_checkpoint_where_nothing_stops_all() -> None:
    """Only rates of parts of workers: no interval, no stops; with a rate of the job, both."""
    apart = goodput_where(PLAIN, replace(JOB, workers=8))
    assert math.isinf(apart.whole.every)
    assert apart.shares.checkpoint == 0
    with_job = goodput_where(replace(PLAIN, job=DAY), replace(JOB, workers=8))
    assert 0 < with_job.whole.every < DAY
    assert with_job.shares.checkpoint > 0
    assert with_job.useful < apart.useful


# --- the interval -------------------------------------------------------------------------------


@given(st.floats(1.0, 300.0), st.floats(0.0, 60.0), st.floats(0.0, 600.0), st.floats(0.0, 600.0))
def test_the_interval_is_the_best_for_copies_in_the_background_too(
    hours: float, pause: float, write: float, down: float
) -> None:
    """No better one is found by a bounded search over all that are allowed."""
    failures = Failures(
        job=hours * HOUR,
        detection=0.0,
        restart=down,
        pause=pause,
        checkpoint_bandwidth=84e9 / max(write, 1e-3),
        reload_bandwidth=1e18,
    )
    found = goodput_where(failures, JOB)
    whole = found.whole
    least = max(whole.saving.writing - whole.saving.blocking, JOB.round_time)

    def useless(every: float) -> float:
        return -whole_job_shares(whole.rate, every, whole.saving, whole.after).useful

    high = 10 * hours * HOUR + 10 * least
    best = minimize_scalar(useless, bounds=(least, high), method="bounded")
    assert found.useful >= max(-best.fun, -useless(least)) - 1e-9
    assert whole.every >= least * (1 - 1e-12)


# --- ranges and limits --------------------------------------------------------------------------


@given(st.floats(0.1, 1.0), st.floats(1.0, 10.0), st.sampled_from([1, 8]))
def test_the_range_of_rates_and_restarts_is_one_of_goodput(
    low: float, high: float, workers: int
) -> None:
    """The nominal share lies in it; without a range it has none."""
    failures = replace(PLAIN, job=20 * DAY, rate_low=low, rate_high=high, restart_high=600.0)
    found = goodput_where(failures, replace(JOB, workers=workers))
    assert found.low < found.useful <= found.high
    nominal = goodput_where(failures, replace(JOB, workers=workers), ends=False)
    assert nominal == replace(found, low=found.useful, high=found.useful)
    none = goodput_where(replace(PLAIN, job=20 * DAY), replace(JOB, workers=workers))
    assert none.low == none.useful == none.high


@given(st.floats(1e-3, 50.0), st.integers(0, 60))
def test_missing_nodes_are_the_excess_of_a_poisson_count(load: float, spares: int) -> None:
    """Beside the sum over the distribution of SciPy."""
    counts = np.arange(spares, 400)
    expected = float(((counts - spares) * poisson.pmf(counts, load)).sum())
    assert missing(load, spares) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.sampled_from([1, 8, 64]), st.floats(1.01, 5.0))
def test_better_parts_and_faster_storage_never_cost(workers: int, better: float) -> None:
    """Of every number of failures, in the direction that is better."""
    given_ = replace(PLAIN, job=30 * DAY, gpu=300 * DAY, repair=HOUR, spares=1)
    job = replace(JOB, workers=workers)
    before = goodput_where(given_, job).useful
    for name in ("node", "gpu", "job", "host_bandwidth"):
        moved = replace(given_, **{name: getattr(given_, name) * better})
        assert goodput_where(moved, job).useful >= before - 1e-12, name
    for name in ("detection", "restart", "repair", "pause"):
        moved = replace(given_, **{name: getattr(given_, name) / better})
        assert goodput_where(moved, job).useful >= before - 1e-12, name
    assert goodput_where(replace(given_, spares=2), job).useful >= before
    assert HOST_BANDWIDTH == 32e9


# --- spot nodes ---------------------------------------------------------------------------------

SPOT = Failures(
    preemption=5 * HOUR,
    notice=120.0,
    replacement=600.0,
    restart=300.0,
    reload_bandwidth=1e18,
    checkpoint_bandwidth=84e9 / 20,
    pause=10.0,
    spot_price=0.4,
)


def test_preemptions_alone_cost_the_copy_the_wait_and_the_restart() -> None:
    """One in 5 h on each of 8 nodes: no work is lost, and all begins again where one is in one."""
    found = goodput_where(SPOT, JOB)
    rate, copy = 8 / (5 * HOUR), 10 + 20
    down = copy + 600 + 300
    assert math.isinf(found.whole.every)
    assert found.whole.preempted.saving == copy
    assert found.useful == pytest.approx(math.exp(-rate * down))  # 1 / (1 + e^rd - 1)
    assert found.shares.lost == pytest.approx(0, abs=1e-12)
    late = goodput_where(replace(SPOT, notice=29.0), JOB)
    assert late.whole.preempted.saving is None
    assert late.shares.lost > 0
    assert late.whole.every == pytest.approx(best_interval(rate, late.whole.saving))


@given(st.sampled_from([1, 8]), st.floats(0.05, 0.95), st.floats(0.5, 50.0))
@settings(max_examples=settings.default.max_examples // 16)
def test_spot_stops_paying_where_a_useful_token_costs_as_much(
    workers: int, price: float, days: float
) -> None:
    """At the mean time that is found a token costs the same; above it less, below it more."""
    failures = replace(SPOT, spot_price=price, node=days * 8 * DAY)
    job = replace(JOB, workers=workers)
    found = spot_of(failures, job)
    assert found.on_demand == goodput_where(replace(failures, preemption=None), job).useful
    for times, less in ((0.9, False), (1.1, True)):
        moved = spot_of(replace(failures, preemption=found.pays_from * times), job)
        assert (moved.cost < 1) is less


# --- the command --------------------------------------------------------------------------------


def test_json_has_all_of_it(cli: Command) -> None:
    """Shares that sum to 1, speed, interval, state, and the command that repeats it."""
    (found,) = json.loads(cli(*HERE, "-s", "ddp", "--json").out)
    assert sum(found["shares"].values()) == pytest.approx(1, abs=1e-9)
    assert found["useful"] == found["shares"]["useful"]
    assert found["low"] <= found["useful"] <= found["high"]
    assert found["useful_tokens_per_s"] == pytest.approx(found["useful"] * found["tokens_per_s"])
    share = math.log(64 / 8) / math.log(1024 / 8)
    hours = 47.7 * 24 * (7.9 / 47.7 / 24) ** share
    assert found["mean_time_to_failure_s"] == pytest.approx(hours * 3600)
    assert found["workers"] is None
    assert found["whole"]["every"] > 0
    again = cli(*shlex.split(found["command"])[1:], "--json")
    assert json.loads(again.out) == [found]


def test_the_command_of_json_has_tokens_and_project(cli: Command) -> None:
    """It repeats days and money, too."""
    more = ("--tokens", "1e12", "--project", "published", "--json")
    (found,) = json.loads(cli(*HERE, "-s", "ddp", *more).out)
    again = cli(*shlex.split(found["command"])[1:], "--json")
    assert json.loads(again.out) == [found]
    assert found["totals"]["days"] > 0


@pytest.mark.parametrize("more", ["", "--tokens 1e13", "--set failures=spot-h100-peak-2026-q1"])
def test_the_first_screen_is_short(cli: Command, more: str) -> None:
    """At most 15 lines of 100 columns, for one strategy and for three; `--full` says more."""
    for names in (["fsdp"], ["ddp", "fsdp", "diloco:tau=100,worker=node"]):
        given = [word for name in names for word in ("-s", name)]
        short = cli(*HERE[:-2], *given, *shlex.split(more)).out.splitlines()
        assert len(short) <= 15
        assert max(map(len, short)) <= 100
        assert len(cli(*HERE[:-2], *given, *shlex.split(more), "--full").out.splitlines()) > 15


# --- event by event ---------------------------------------------------------------------------


def check_events(whole: WholeJob, workers: FailingWorkers | None, seed: int, most: int) -> None:
    """The useful share is within so many standard errors of the closed form, others within 4."""
    found = simulated(whole, workers, seed=seed, runs=30, failures=300)
    shares = shares_of(whole, workers)
    for name in NAMES:
        (value, error), share = found[name], getattr(shares, name)
        allowed = (most if name == "useful" else 4) * error + 2e-5
        assert abs(value - share) <= allowed, (name, share, value, error)


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["all", "workers", "both"])
@pytest.mark.parametrize("number", range(4))
def test_events_agree_with_the_closed_forms(number: int, fails: str) -> None:
    """Settings drawn at random: the useful share is within 3 standard errors, others within 4."""
    rng = np.random.default_rng(1000 + number)
    mean = 10 ** rng.uniform(4, 5.5)
    every = mean * 10 ** rng.uniform(-2, -0.5)
    after = {"detection": mean * rng.uniform(0, 0.05), "restart": mean * rng.uniform(0, 0.05)}
    if fails == "all":
        after |= {"spares": int(rng.integers(0, 4)), "repair": mean * rng.uniform(0, 2)}
    whole = WholeJob(
        rate=0.0 if fails == "workers" else 1 / mean,
        every=math.inf if fails == "workers" else every,
        saving=Saving(blocking=every * rng.uniform(0, 0.1), writing=every * rng.uniform(0, 1)),
        after=Restart(**after),
    )
    count = int(rng.integers(2, 65))
    life = mean * count * 10 ** rng.uniform(-1, 1)
    longest = 0.3 if fails == "workers" else -2
    workers = FailingWorkers(
        rate=1 / life,
        count=count,
        round_time=min(mean, life) * 10 ** rng.uniform(-4, longest),
        after=Restart(restart=min(mean, life) * rng.uniform(0, 0.02)),
        stall=life / count * rng.uniform(0, 0.05),
        absent=0.1 * float(rng.integers(2)),
    )
    check_events(whole, None if fails == "all" else workers, seed=1000 + number, most=3)


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["none", "on notice", "both", "too late"])
@pytest.mark.parametrize("number", range(3))
def test_preemptions_agree_with_the_closed_forms(number: int, copies: str) -> None:
    """With copies on notice, without, and with failures beside them: within 4 standard errors."""
    rng = np.random.default_rng(2000 + number)
    mean = 10 ** rng.uniform(4, 5.5)
    every = mean * 10 ** rng.uniform(-1.5, -0.3)
    blocking, writing = every * rng.uniform(0, 0.1), every * rng.uniform(0, 1)
    later = mean * rng.uniform(0, 0.1)
    kept = FailingWorkers(
        rate=0.3 / mean,
        count=8,
        round_time=mean * 10 ** rng.uniform(-3, -1),
        after=Restart(detection=later / 2, restart=later),
        stall=mean * rng.uniform(0, 0.003),
        absent=0.0,
        preempted=Preemption(rate=0.7 / mean, replacement=later * 2),
    )
    whole = WholeJob(
        rate=0.0 if copies in {"none", "on notice"} else 0.6 / mean,
        every=math.inf if copies in {"none", "on notice"} else every,
        saving=Saving(blocking=blocking, writing=writing),
        after=Restart(detection=later / 3, restart=later),
        preempted=Preemption(
            rate=0.0 if copies == "none" else 1.4 / mean,
            saving=None if copies == "too late" else blocking + writing,
            replacement=later * 3,
        ),
    )
    check_events(whole, kept if copies == "none" else None, seed=2000 + number, most=4)
