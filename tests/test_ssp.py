"""The clock of stale-synchronous parallel training: closed forms, and what its bound promises."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from ssp_clock import Course, Servers, rounds, ssp

CLOCKS = 40
FREE = Servers(workers=4, servers=2, parameter_bytes=0.0)


@pytest.mark.parametrize("bound", [0, 1, 3, 10])
def test_one_slow_worker_sets_the_pace_of_all(bound: int) -> None:
    """It never waits; the others are ahead by the bound, and wait the rest of the time."""
    course = ssp(FREE, lambda worker, _: 1.0 if worker else 2.0, CLOCKS, bound)
    assert course.seconds == 2.0 * CLOCKS
    assert max(course.staleness()) == bound
    assert course.waited == [0.0] + [CLOCKS - 1 - 2.0 * bound] * 3


def test_with_a_bound_of_0_each_clock_takes_as_long_as_its_slowest_worker() -> None:
    """Bulk-synchronous training, whoever is slow when."""
    seconds = {
        (worker, clock): 1 + (7 * worker + 3 * clock) % 5
        for worker in range(4)
        for clock in range(CLOCKS)
    }
    course = ssp(FREE, lambda *which: float(seconds[which]), CLOCKS, 0)
    slowest = (max(seconds[worker, clock] for worker in range(4)) for clock in range(CLOCKS))
    assert course.seconds == sum(slowest)
    assert set(course.staleness()) == {0}


def test_messages_take_turns_at_each_network_card() -> None:
    """As many servers as workers: each card is always busy, in no bound of 0 beside computing."""
    place = Servers(workers=4, servers=4, parameter_bytes=4.0, bandwidth=10.0, latency=0.01)
    course = ssp(place, lambda *_: 1.0, CLOCKS, 0)
    assert course.seconds == pytest.approx(CLOCKS * (0.41 + 1.0 + 0.41))
    overlapped = ssp(place, lambda *_: 1.0, CLOCKS, 1)
    assert overlapped.seconds == pytest.approx(CLOCKS * (0.41 + 1.0) + 0.41)
    few = Servers(workers=4, servers=1, parameter_bytes=4.0, bandwidth=10.0)
    alone = ssp(few, lambda *_: 0.0, CLOCKS, 0)
    assert alone.seconds == pytest.approx(CLOCKS * (4 * 0.4 + 0.4))  # pushes follow pulls


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_nobody_is_further_ahead_than_the_bound(data: Any) -> None:
    """For any times: each clock is read and arrives once, in order; a larger bound is no slower."""
    workers = data.draw(st.integers(1, 5))
    rows = st.lists(st.floats(0.01, 5.0), min_size=12, max_size=12)
    seconds = [data.draw(rows) for _ in range(workers)]
    bound = data.draw(st.integers(0, 5))
    place = Servers(workers=workers, servers=2, parameter_bytes=0.0)

    def run(bound: int) -> Course:
        return ssp(place, lambda worker, clock: seconds[worker][clock], 12, bound)

    course = run(bound)
    assert max(course.staleness()) <= bound
    for what in ("read", "arrived"):
        for worker in range(workers):
            mine = [m.clock for m in course.moments if (m.what, m.worker) == (what, worker)]
            assert mine == list(range(12))
    times = [one.time for one in course.moments]
    assert times == sorted(times)
    assert course.seconds >= max(map(sum, seconds)) - 1e-9
    assert run(bound + 1).seconds <= course.seconds + 1e-9


# --- what is learned -----------------------------------------------------------------------------


def test_one_worker_learns_as_adamw() -> None:
    """However its pushes travel: it knows what it has pushed itself."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from ssp_training import train  # noqa: PLC0415 - needs torch

    from realrun.train.settings import TrainSettings  # noqa: PLC0415
    from realrun.train.task import loss_of, means, scores  # noqa: PLC0415 - needs torch
    from realrun.train.tasks import make_task  # noqa: PLC0415 - needs torch

    chosen = TrainSettings(task="digits", size="tiny", steps=8, batch=8, warmup=2, eval_every=4)
    task = make_task(chosen, torch.device("cpu"))
    place = Servers(workers=1, servers=1, parameter_bytes=1.0, bandwidth=1.0)
    seen = list(train(task, chosen, ssp(place, lambda *_: 0.3, 8, 3)))
    torch.manual_seed(chosen.seed)
    model = task.model()
    optim = torch.optim.AdamW(model.parameters(), weight_decay=chosen.weight_decay)
    for step in range(1, 9):
        optim.param_groups[0]["lr"] = chosen.learning_rate(step)
        optim.zero_grad()
        loss_of(model, task.batch(chosen.seed, step, 8)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_grad)
        optim.step()
    with torch.no_grad():
        expected, _ = means(sum(scores(model, batch) for batch in task.validation))
    assert [one.clocks for one in seen] == [4, 8]
    assert seen[-1].loss == pytest.approx(expected, rel=1e-4)


# --- rounds --------------------------------------------------------------------------------------


def test_rounds_wait_for_the_slowest_and_hide_what_a_delay_covers() -> None:
    """DDP: each step its slowest, and a ring. Local updates: each round; late averages: nothing."""
    place = Servers(workers=4, servers=1, parameter_bytes=4.0, bandwidth=6.0, latency=0.5)
    ring = 2 * 3 / 4 * 4 / 6 + 6 * 0.5

    def compute(worker: int, clock: int) -> float:
        return 2.0 if worker == clock % 4 else 1.0

    steps, waited = rounds(place, compute, 24, 1)
    assert steps == pytest.approx([(step + 1) * (2 + ring) for step in range(24)])
    assert waited == pytest.approx([24 * (2 + ring) - 30] * 4)
    steps, waited = rounds(place, compute, 24, 4)
    assert steps[-1] == pytest.approx(6 * (5 + ring))
    assert waited == pytest.approx([6 * ring] * 4)
    steps, waited = rounds(place, compute, 24, 8, delay=4)
    assert steps[-1] == pytest.approx(30.0)
    assert waited == pytest.approx([0.0] * 4)
