"""Peaks of memory of published runs beside predictions, and larger runs from the smallest."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from commands import Command
from one_sample import simulate

from analysis.published import run_errors, stack_fit
from analysis.published.runs import TrainingRun, training_runs
from co2sim.prediction.error_model import error_model

RUNS = training_runs()


def of(paper: str) -> list[TrainingRun]:
    """The runs of a source."""
    return [run for run in RUNS if run.paper == paper]


def test_memory_is_that_of_the_published_kind() -> None:
    """Allocated is the least, then reserved, then the total; a run of fp8 is one of bf16."""
    run = next(run for run in of("torchtitan_h100") if run.memory_kind == "reserved")
    kinds = [
        run_errors.run_memories([run.model_copy(update={"memory_kind": kind})], 1)[0].predicted
        for kind in ("allocated", "reserved", "total")
    ]
    assert kinds == sorted(set(kinds))
    (plain, float8) = (
        run_errors.run_memories([run.model_copy(update={"precision": kind})], 1)[0].predicted
        for kind in ("bf16", "fp8")
    )
    assert plain == float8


def test_runs_that_need_more_do_not_count() -> None:
    """Of context parallelism nothing is known; compilation changes no memory."""
    counted = run_errors.run_memories(of("torchtitan_h100"), 1)
    needs = [run.needs for row in counted for run in row.cell.runs if isinstance(run, TrainingRun)]
    assert not any("context parallel" in of_run for of_run in needs)
    assert any("torch.compile" in of_run for of_run in needs)


@pytest.mark.nightly
def test_the_catalog_states_the_errors_of_memory() -> None:
    """As they are today, so that an interval is what runs show."""
    every = run_errors.run_memories(RUNS, 1)
    found = run_errors.memory_errors(every)
    assert error_model().memory == found
    inside = [abs(math.log(one.predicted / one.cell.published)) <= found.reach for one in every]
    assert sum(inside) / len(inside) >= 0.85


def test_a_case_fits_is_tight_or_does_not_fit() -> None:
    """By where the memory of the GPU lies in the interval of what is needed."""
    base = simulate("dgx-h100", "llama3-8b", "fsdp", gpus=8)
    needs = base.memory_bytes_per_gpu["total"]
    fits = {}
    for room in (0.4, 0.95, 1.05, 2.5):
        size = f"{room * needs} B"
        result = simulate("dgx-h100", "llama3-8b", "fsdp", gpus=8, overrides={"gpu.memory": size})
        fits[room] = (result.memory_fit, result.misfit)
    assert fits == {
        0.4: ("does not fit", "DOES NOT FIT"),
        0.95: ("tight", "MAY NOT FIT"),
        1.05: ("tight", ""),
        2.5: ("fits", ""),
    }


@pytest.mark.nightly
def test_runs_that_ran_are_not_said_not_to_fit() -> None:
    """At the worst they are tight."""
    known = [run for run in RUNS if run.headline]
    values = [stack_fit.record().left_out[run.paper] for run in known]
    results = stack_fit.predictions(known, values, 1, "predicting")
    assert "does not fit" not in {one.memory_fit for one in results}


def test_a_series_differs_in_gpus_and_begins_with_the_fewest() -> None:
    """No run is in two of them."""
    found = run_errors.series(run for run in RUNS if run.headline)
    members = [run for some in found for run in some]
    assert len(members) == len({(run.paper, run.id) for run in members})
    for some in found:
        assert some[0].gpus == min(run.gpus for run in some) < max(run.gpus for run in some)
        assert len({(run.paper, run.stack, run.model, run.tp, run.pp) for run in some}) == 1


def test_larger_runs_are_predicted_from_the_smallest(co2analysis: Command) -> None:
    """On two series of one source: nearer than without it, and not knowing the larger ones."""
    every = of("torchtitan_h100")
    left_out = stack_fit.record().left_out
    found = run_errors.further_runs([run for run in every if run.headline], left_out, 1)
    assert {one.run.gpus for one in found} == {128}
    runs = [one.run for one in found]
    plain = stack_fit.predictions(runs, [left_out[run.paper] for run in runs], 1, "predicting")
    before, after = (
        abs(stack_fit.log_errors(runs, results)).mean()
        for results in (plain, [one.result for one in found])
    )
    assert after < before / 2
    wrong = [
        run.model_copy(update={"tokens_per_s_per_gpu": 1.0}) if run.gpus > 8 else run
        for run in every
        if run.headline
    ]
    again = run_errors.further_runs(wrong, left_out, 1)
    assert [one.result.step_time_s for one in again] == [one.result.step_time_s for one in found]
    printed = json.loads(
        co2analysis("runs", "--own", "--source", "torchtitan_h100", "--jobs", "1", "--json").out
    )
    assert [row["run"] for row in printed] == [one.run.id for one in found]


def test_errors_of_own_runs_grow_with_the_distance_as_they_were_made() -> None:
    """The likelihood finds both deviations again, and nine of ten further errors are inside."""
    run = next(run for run in RUNS if run.headline)
    assert run.tokens_per_s_per_gpu is not None
    result = simulate("dgx-h100", "llama3-8b", "fsdp", gpus=8)
    chance = np.random.default_rng(7)

    def drawn(count: int) -> list[run_errors.Further]:
        found = []
        for apart in chance.uniform(0, 8, count):
            error = math.hypot(0.04, 0.03 * apart) * chance.standard_t(5)
            speed = run.tokens_per_s_per_gpu * math.exp(error)  # type: ignore[operator]
            one = replace(result, tokens_per_s_per_gpu=speed)
            found.append(run_errors.Further(run, run, one, float(apart)))
        return found

    found = run_errors.own_errors(drawn(2000))
    assert found.any == pytest.approx(0.04, rel=0.2)
    assert found.apart == pytest.approx(0.03, rel=0.15)
    others = drawn(2000)
    errors = stack_fit.log_errors([run] * 2000, [one.result for one in others])
    inside = [abs(e) <= found.reach(one.apart) for e, one in zip(errors, others, strict=True)]
    assert sum(inside) / 2000 == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("flag", ["--memory", "--own", "--unfitted"])
def test_an_unknown_source_is_named(co2analysis: Command, flag: str) -> None:
    """In one line."""
    ended = co2analysis("runs", flag, "--source", "nobody")
    assert ended.code == 2
    assert "unknown source 'nobody'" in ended.err


@pytest.mark.slow
def test_runs_that_enter_no_fit_are_predicted_apart(co2analysis: Command) -> None:
    """Those in fp8 and below, and of experts, of which none counts in figures of errors."""
    unfitted = {(run.paper, run.id) for run in RUNS if run.unfitted}
    assert not unfitted & {(run.paper, run.id) for run in RUNS if run.headline}
    given = ("--source", "trainy_h200", "--jobs", "1", "--json")
    rows = json.loads(co2analysis("runs", "--unfitted", *given).out)
    assert [row["run"] for row in rows] == [38, 39]
    assert {row["precision"] for row in rows} == {"fp8"}
    for row in rows:
        assert row["low"] < row["predicted_tokens_per_s_per_gpu"] < row["high"]
