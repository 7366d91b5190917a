"""Answers that are kept: equal inputs find them, few are kept, and no schedule is mixed up."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from co2sim import DDP, Case, study
from co2sim.recent import Recent
from co2sim.schedule import Layout, Schedule
from co2sim.workload import Workload

CASE = Case(cluster="dgx-h100", model="gpt2-small", strategy="zero3", gpus=16)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6))), st.integers(1, 4))
def test_the_last_used_are_kept(steps: list[tuple[bool, int]], most: int) -> None:
    """Whatever is kept and asked for: as a list whose front is what was used last."""
    recent: Recent[int, str] = Recent(most)
    kept: list[int] = []
    for keeps, number in steps:
        if keeps and number not in kept:
            assert recent.keep(number, f"answer {number}") == f"answer {number}"
            kept = [number, *kept][:most]
        found = recent.find(number)
        assert found == (f"answer {number}" if number in kept else None)
        if found:
            kept = [number, *(other for other in kept if other != number)]


def test_a_schedule_is_built_once_for_clusters_of_one_layout() -> None:
    """Another bandwidth has the same schedule; another size, batch, model or option has not."""
    schedule = CASE.prepare().schedule
    faster = replace(CASE, overrides={"inter.bandwidth": "1 Tbit/s"})
    assert faster.prepare().schedule is schedule
    for other in (
        replace(CASE, gpus=32),
        replace(CASE, micro_batch=2),
        replace(CASE, model="gpt2-medium"),
        replace(CASE, strategy="zero3(prefetch=7)"),
        replace(CASE, precision="fp16"),
    ):
        assert other.prepare().schedule != schedule


def test_no_result_depends_on_what_was_simulated_before() -> None:
    """Cases in turn give what each gave first, by text or as an object."""
    cases = [
        replace(CASE, strategy=strategy, gpus=gpus)
        for strategy in ("ddp(bucket_mib=30)", DDP(bucket_mib=30), "zeropp", "fsdp", "co2(tau=4)")
        for gpus in (8, 16)
    ]
    first = [study.run(case) for case in cases]
    assert [study.run(case) for case in reversed(cases)] == first[::-1]


def test_a_strategy_of_the_users_is_asked_each_time() -> None:
    """Its answer may depend on what it has not among its options."""
    asked = []

    class Own(DDP):
        def schedule(self, job: Workload, layout: Layout) -> Schedule:
            asked.append(layout)
            return super().schedule(job, layout)

    case = replace(CASE, strategy=Own())
    case.prepare()
    case.prepare()
    assert len(asked) == 2
