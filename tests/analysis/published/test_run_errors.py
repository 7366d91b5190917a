"""What is fitted to published training runs, and how far predictions without it are off."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from one_sample import simulate

from analysis.published import run_errors, stack_fit
from analysis.published.cells import cell_of_run
from analysis.published.predict import CellPrediction
from analysis.published.runs import TrainingRun, training_runs
from analysis.published.stack_fit import SHARED, Linear, generation
from co2sim.catalog import load_stack, names
from co2sim.common.errors import CatalogError
from co2sim.models.operators import NARROW
from co2sim.prediction import driver
from co2sim.prediction.intervals import (
    KIND_WORDS,
    ErrorModel,
    ScalingErrors,
    error_model,
    parts_of,
)
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.result import memory_fit
from co2sim.training.stack import Setting

EVERY = training_runs()
RUNS = [run for run in EVERY if run.is_counted]
NAMES = [one.name for one in SHARED]
RESULT = simulate("dgx-h100", "gpt2-small", "ddp", gpus=8)
PLAIN = Setting(gpu="H100", gpus=8, parameters=1e9, shares="states", divided=1, tokens=1e4)


def linear(errors: dict[str, float], slope: float = -1.0) -> Linear:
    """Around the priors, of all runs, whose errors by source depend on the first number alone."""
    slopes = np.zeros((len(RUNS), len(SHARED)))
    slopes[:, 0] = slope
    found = np.array([errors.get(run.site, 0.0) for run in RUNS])
    settings = tuple(replace(PLAIN, gpus=run.gpus) for run in RUNS)
    return Linear(tuple(RUNS), settings, {one.name: one.prior for one in SHARED}, found, slopes)


def test_every_number_is_of_some_run_and_every_run_has_some() -> None:
    """A number that no run determines is its prior, and would be called fitted."""
    for one in SHARED:
        assert any(one.holds_for(run) for run in RUNS), one.name
    for run in RUNS:
        paths = [one.path for one in SHARED if one.holds_for(run)]
        more = generation(run) in {gpu for one in SHARED for gpu in one.gpus}
        assert len(paths) == len(set(paths)) == 5 + more + stack_fit.routes(run), run


def test_every_stack_of_the_catalog_has_fitted_numbers() -> None:
    """A new stack shares those of its kind, or has its own."""
    of_stacks = {name for one in SHARED for name in one.stacks}
    found = {name: load_stack(name).value for name in names("stacks")}
    own = {name for name, stack in found.items() if stack.kernels or stack.efficiency}
    assert of_stacks == set(found) - own


def test_common_errors_are_fitted_away() -> None:
    """All runs 8 % too fast, and a number whose growth makes them slower: it grows."""
    found = linear(dict.fromkeys({run.site for run in RUNS}, 0.08)).without(None)
    assert math.log(found[NAMES[0]] / SHARED[0].prior) == pytest.approx(0.08, abs=0.01)
    assert found[NAMES[1]] == pytest.approx(SHARED[1].prior, rel=1e-3)


@given(st.floats(-0.5, 0.5))
def test_a_source_that_is_left_out_changes_nothing(error: float) -> None:
    """Whatever its own errors are."""
    others = dict.fromkeys({run.site for run in RUNS}, 0.05)
    one, other = (linear({**others, "nanotron": e}).without("nanotron") for e in (0.0, error))
    assert one == other


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With four digits, for all and without each source; without a file one line says so."""
    found = stack_fit.record()
    (tmp_path / stack_fit.RECORD).write_text(stack_fit.written(found))
    assert stack_fit.record(tmp_path) == found
    assert set(found.left_out) == {run.site for run in RUNS}
    with pytest.raises(CatalogError, match=stack_fit.RECORD):
        stack_fit.record(tmp_path / "none")


def test_the_catalog_states_what_was_fitted() -> None:
    """In its files of GPUs and stacks, and in its defaults: to write them again changes nothing."""
    spread = load_stack(stack_fit.UNKNOWN).value.spread
    for path, content in run_errors.catalog_files(stack_fit.record().values, spread).items():
        assert path.read_bytes() == content, path


def test_a_stack_that_nobody_knows_is_as_unsure_as_stacks_differ() -> None:
    """Its spread is what errors have beyond those of known stacks: 0 where they have no more."""
    model = ErrorModel(error_model().shared, near=0.05, own=0.1, factor=1.645)
    chance = np.random.default_rng(7)

    def rows(beyond: float) -> list[run_errors.Left]:
        wide = math.sqrt(model.variance(PLAIN) + beyond**2)
        errors = chance.normal(0, wide, 4000)
        return [run_errors.Left(RUNS[0], RESULT, PLAIN, float(error)) for error in errors]

    assert run_errors.spread_between(rows(0.3), model) == pytest.approx(0.3, rel=0.1)
    assert run_errors.spread_between(rows(0.0)[:1], model) == 0


def drawn(chance: np.random.Generator, sites: int) -> list[run_errors.Left]:
    """Errors of 12 runs of each site, which share 0.15, and 0.3 more where there are experts."""
    made = []
    for site in range(sites):
        run = RUNS[0].changed(paper=str(site), site=str(site))
        shared, experts = chance.normal(0, 0.15), chance.normal(0, 0.3)
        for index in range(12):
            setting = replace(PLAIN, parameters=1e9 * 16**index, experts=index % 2 == 0)
            error = shared + experts * setting.experts + chance.normal(0, 0.05)
            made.append(run_errors.Left(run, RESULT, setting, error))
    return made


@pytest.mark.parametrize("seed", [4, 5])
def test_the_model_of_errors_finds_how_errors_were_made(seed: int) -> None:
    """What sites share, and what runs of a kind do; nine of ten of new sites are covered."""
    chance = np.random.default_rng(seed)
    model = run_errors.likeliest(drawn(chance, 60))
    assert model.shared["experts"] == pytest.approx(0.3, rel=0.35)
    assert math.hypot(model.shared["site"], model.near) == pytest.approx(0.16, rel=0.35)
    rows = drawn(chance, 300)
    inside = [abs(row.error) <= model.reach(row.setting) for row in rows]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.04)


@given(st.floats(0.02, 0.3), st.floats(0.02, 0.3), st.floats(0.02, 0.3))
def test_a_measured_run_tells_nothing_of_what_it_does_not_have(
    site: float, own: float, experts: float
) -> None:
    """A dense run leaves the spread of experts as it was, and one of experts makes it less."""
    shared = dict.fromkeys(parts_of(PLAIN), 0.0) | {"site": site, "experts": experts}
    model = ErrorModel(shared, 0.0, own, 1.645)
    asked = replace(PLAIN, experts=True)
    left = model.variance(asked, [PLAIN])
    assert left == pytest.approx(site**2 * own**2 / (site**2 + own**2) + experts**2 + own**2)
    assert model.variance(asked, [asked]) < left <= model.variance(asked)


@pytest.mark.parametrize("seed", [6, 7])
def test_the_error_of_ratios_is_found_again_and_covers_new_ones(seed: int) -> None:
    """Drawn with a variance that grows with the loss; nine of ten of another draw are inside."""
    chance = np.random.default_rng(seed)

    def drawn(count: int) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        ratios, nodes = np.exp(-chance.uniform(0, 0.4, count)), 2 ** chance.integers(1, 8, count)
        sigma = np.hypot(0.02, 0.1 * np.sqrt(-np.log(ratios) * np.log2(nodes)))
        return ratios, nodes, ratios * np.exp(sigma * chance.standard_t(5, count))

    ratios, nodes, there = drawn(4000)
    parts = [ScalingErrors.parts(r, int(n)) for r, n in zip(ratios, nodes, strict=True)]
    found, factor = run_errors._lossy(parts, np.log(ratios / there), np.ones(4000))
    assert found["lost"] == pytest.approx(0.1, rel=0.1)
    errors = ScalingErrors(**found, factor=factor, runs=4000)
    ratios, nodes, there = drawn(4000)
    inside = [
        errors.ends(ratio, int(n))[0] <= measured
        for ratio, n, measured in zip(ratios, nodes, there, strict=True)
    ]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_ratios_are_of_one_job_on_two_numbers_of_gpus() -> None:
    """Nothing but GPUs and micro-steps differs; what both are off by is in no ratio."""
    known = [run for run in RUNS if run.paper in {"atorch", "torchtitan_h100"}]
    values = [stack_fit.record().left_out[run.site] for run in known]
    results = stack_fit.predictions(known, values, 1, "predicting")
    pairs = run_errors.scalings(known, results)
    assert len(pairs) == 15
    twice = [
        run.changed(tokens_per_s_per_gpu=2 * run.tokens_per_s_per_gpu)  # type: ignore[operator]
        for run in known
    ]
    assert [pair.error for pair in run_errors.scalings(twice, results)] == pytest.approx(
        [pair.error for pair in pairs]
    )
    assert all(abs(pair.error) < 0.05 for pair in pairs)
    rows = run_errors.compared_scalings(known, results)
    assert all(row.low <= row.predicted <= row.high for row in rows)


@pytest.mark.nightly
def test_the_coverage_of_ratios_is_that_of_the_docs() -> None:
    """Of all published ratios, their source left out of the fit and of the interval."""
    values = [stack_fit.record().left_out[run.site] for run in RUNS]
    rows = run_errors.compared_scalings(RUNS, stack_fit.predictions(RUNS, values, 1, "predicting"))
    inside = np.mean([row.low <= row.published <= row.high for row in rows])
    text = Path("docs/stacks.md").read_text("utf-8")
    said = text.partition("## How far off ratios are")[2].partition("| all | ")[2].split(" | ")
    assert int(said[0]) == len(rows) == error_model().scaling.runs  # type: ignore[union-attr]
    assert float(said[3].rstrip(" %")) == pytest.approx(100 * inside, abs=0.5)


def test_intervals_of_a_source_do_not_know_it(tmp_path: Path) -> None:
    """Each source has a model of its own, and it is read as it was written."""
    models = run_errors.recorded_models()
    assert set(models) == {run.site for run in RUNS}
    path, content = run_errors.models_file(models, tmp_path)
    path.write_bytes(content)
    assert run_errors.recorded_models(tmp_path) == models
    with pytest.raises(CatalogError, match=run_errors.INTERVALS):
        run_errors.recorded_models(tmp_path / "none")


@pytest.mark.nightly
def test_the_errors_of_a_source_change_nothing_in_its_own_model() -> None:
    """Made again from predictions that are ten times too fast for one source."""
    known = [run for run in RUNS if run.paper in {"tinyllama", "hf_accelerate", "llama3_paper"}]
    values = [stack_fit.record().left_out[run.site] for run in known]
    results = stack_fit.predictions(known, values, 1, "predicting")
    wrong = [
        run.model_copy(update={"tokens_per_s_per_gpu": 1.0}) if run.paper == "tinyllama" else run
        for run in known
    ]
    before = run_errors.models_without(run_errors.left(known, results))
    after = run_errors.models_without(run_errors.left(wrong, results))
    assert before["tinyllama"].shared == after["tinyllama"].shared
    assert before["llama3_paper"].shared != after["llama3_paper"].shared


def test_the_catalog_says_of_each_kind_how_many_runs_and_sites_there_are() -> None:
    """Experts, divided sequences, and fp8 or below."""
    of_kind = {
        "experts": [run for run in RUNS if stack_fit.routes(run)],
        "context": [run for run in RUNS if run.cp > 1],
        "narrow": [run for run in RUNS if run.precision in NARROW],
    }
    assert set(of_kind) == set(KIND_WORDS)
    for name, some in of_kind.items():
        known = error_model().kinds[name]
        assert (known.runs, known.sites) == (len(some), len({run.site for run in some})), name


def test_the_errors_of_the_catalog_are_of_all_sources() -> None:
    """As many runs of each as are published."""
    found = {one.title: one.runs for one in error_model().sources}
    counts: dict[str, int] = {}
    for run in RUNS:
        title = run_errors.title(run.paper)
        counts[title] = counts.get(title, 0) + 1
    assert found == counts


def test_a_source_is_predicted_without_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the values of its own entry of the record; its row is in the catalog's errors."""
    asked: list[TrainingRun] = []
    true = stack_fit.overrides

    def seen(run: TrainingRun, values: stack_fit.Values) -> dict[str, str]:
        asked.append(run)
        assert values == stack_fit.record().left_out[run.site]
        return true(run, values)

    monkeypatch.setattr(stack_fit, "overrides", seen)
    from analysis.cli.published import runs  # noqa: PLC0415 - behind the patch

    runs(source=["tinyllama"], jobs=1, json_=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert len(asked) >= 1
    known = next(one for one in error_model().sources if "TinyLlama" in one.title)
    assert abs(row["error"]) == pytest.approx(known.mean, abs=1e-3)
    assert row["low"] < row["predicted_tokens_per_s_per_gpu"] < row["high"]


# --- memory, and larger runs from the smallest ---------------------------------------------------


def of(paper: str) -> list[TrainingRun]:
    """The runs of a source."""
    return [run for run in EVERY if run.paper == paper]


def test_memory_is_that_of_the_published_kind() -> None:
    """Allocated is the least, then reserved, then the total; a run of fp8 is one of bf16."""
    run = next(run for run in of("torchtitan_h100") if run.memory_kind == "reserved")
    kinds = [
        run_errors.run_memories([run.model_copy(update={"memory_kind": kind})], 1)[0][1].predicted
        for kind in ("allocated", "reserved", "total")
    ]
    assert kinds == sorted(set(kinds))
    (plain, float8) = (
        run_errors.run_memories([run.model_copy(update={"precision": kind})], 1)[0][1].predicted
        for kind in ("bf16", "fp8")
    )
    assert plain == float8


def test_runs_that_need_more_do_not_count() -> None:
    """Of context parallelism nothing is known; compilation changes no memory."""
    counted = run_errors.run_memories(of("torchtitan_h100"), 1)
    needs = [run.needs for run, _ in counted]
    assert not any("context parallel" in of_run for of_run in needs)
    assert any("torch.compile" in of_run for of_run in needs)


@pytest.fixture(scope="module")
def memories() -> list[CellPrediction]:
    """Published peaks of memory beside today's predictions."""
    return [row for _, row in run_errors.run_memories(EVERY, 1)]


def off(row: CellPrediction) -> float:
    """The size of the error of a peak, as a logarithm."""
    return abs(math.log(row.predicted / row.cell.published))


@pytest.mark.nightly
def test_the_catalog_states_the_errors_of_memory(memories: list[CellPrediction]) -> None:
    """As they are today, so that an interval is what runs show."""
    bounds = run_errors.memory_bounds(EVERY, 1)
    assert error_model().memory == run_errors.memory_errors(memories, bounds)


@pytest.mark.slow
def test_published_memory_lies_in_the_interval_of_its_stack(
    memories: list[CellPrediction],
) -> None:
    """Nine of ten runs, and of each stack as many; so do those whose source was left out."""
    known = error_model().memory
    inside: dict[str, list[bool]] = {}
    for row in memories:
        stack = load_stack(row.cell.setup.stack).value.name
        inside.setdefault(stack, []).append(off(row) <= known.of(stack)[0])
    assert set(inside) == {name for name, stack in known.stacks.items() if stack.runs}
    for stack, hits in inside.items():
        assert len(hits) == known.stacks[stack].runs
        assert sum(hits) >= math.floor(0.9 * len(hits)), stack
    assert sum(map(sum, inside.values())) >= 0.9 * len(memories)
    assert known.inside >= 0.85


@given(st.lists(st.floats(0.21, 0.6), min_size=1, max_size=6), st.integers(2, 40))
def test_a_stack_is_as_sure_as_its_runs_are_many(others: list[float], count: int) -> None:
    """Exact runs narrow the interval of their stack, few ones less, and that of no other stack."""

    def rows(runs: int) -> list[CellPrediction]:
        template = next(run for run in of("torchtitan_h100") if run.memory_gib)
        made = []
        for index, error in enumerate([*others, *[1e-6] * runs]):
            own = index >= len(others)
            run = template.model_copy(
                update={
                    "stack": "nanotron" if own else "internevo",
                    "paper": "new" if own else f"source {index}",
                }
            )
            cell = cell_of_run(run, "memory_gib")
            made.append(CellPrediction(cell, cell.published * math.exp(error)))
        return made

    few, many = (run_errors.memory_reaches(rows(runs))[1] for runs in (1, count * count))
    own = load_stack("nanotron").value.name
    other = load_stack("internevo").value.name
    assert many[own].reach <= few[own].reach <= max(others) + 2e-4
    for found in (few, many):
        assert found[other].reach == pytest.approx(max(others), abs=2e-4)


def test_a_stack_without_published_memory_has_the_interval_of_all() -> None:
    """A calibrated stack, or one with other numbers, has that of the stack that it is made of."""
    known = error_model().memory
    unknown = next(
        stack
        for name in names("stacks")
        if (stack := load_stack(name).value.name) not in known.stacks
    )
    assert known.of(unknown)[0] == known.reach == known.of("")[0]
    for name, stack in known.stacks.items():
        assert known.of(name)[0] == stack.reach
        assert known.of(f"{name}, calibrated by 3 runs")[0] == stack.reach
        assert known.of(f"{name}, with kept=1.2")[0] == stack.reach


@pytest.mark.parametrize(
    ("needed", "low", "fit"),
    [
        (0.0, 0.0, "fits"),
        (85.0, 40.0, "fits"),
        (85.1, 40.0, "tight"),
        (100.0, 99.0, "tight"),
        (100.1, 100.0, "may not fit"),
        (100.1, 100.05, "does not fit"),
        (100.1, None, "does not fit"),
    ],
)
def test_a_case_fits_is_tight_or_does_not_fit(needed: float, low: float | None, fit: str) -> None:
    """By what is predicted; beyond the memory of the GPU by where the interval begins."""
    assert memory_fit(needed, 100.0, low) == fit


def test_what_auto_takes_is_never_said_not_to_fit() -> None:
    """It leaves a tenth of the memory free where anything does; doubts of the stack are said."""
    for stack in ("torchtitan", "huggingface"):
        result = driver.run(
            Question(
                cluster="dgx-h100",
                model="llama3-8b",
                strategy="fsdp",
                stack=stack,
                gpus=16,
                **OPEN_BATCH,
            )
        )
        assert result.fits_in_memory
        assert result.memory_fit in {"fits", "tight"}
        assert not result.misfit
        reaches_over = result.memory_bytes_high > result.gpu_memory_bytes
        assert ("bad end" in result.memory_answer) == reaches_over


@pytest.mark.nightly
def test_runs_that_ran_are_not_said_not_to_fit() -> None:
    """At the worst they may not fit, but for 1 %: three of Megatron Bridge and DeepSpeed are."""
    values = [stack_fit.record().left_out[run.site] for run in RUNS]
    results = stack_fit.predictions(RUNS, values, 1, "predicting")
    wrong = [one for one in results if one.memory_fit == "does not fit"]
    assert len(wrong) <= 0.01 * len(results)


def test_a_series_differs_in_gpus_and_begins_with_the_fewest() -> None:
    """No run is in two of them."""
    found = run_errors.series(RUNS)
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
    plain = stack_fit.predictions(runs, [left_out[run.site] for run in runs], 1, "predicting")
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
    assert {one.run.id for one in found} <= {row["run"] for row in printed}


@pytest.mark.slow
def test_runs_in_fp8_count_and_have_an_interval(co2analysis: Command) -> None:
    """Those of a source that has no others."""
    rows = json.loads(co2analysis("runs", "--source", "trainy_h200", "--jobs", "1", "--json").out)
    assert [row["run"] for row in rows] == [38, 39]
    assert {row["precision"] for row in rows} == {"fp8"}
    for row in rows:
        assert row["low"] < row["predicted_tokens_per_s_per_gpu"] < row["high"]


def test_a_baseline_does_not_know_its_site() -> None:
    """Half of the peak has no error of its own; the best share of the peak is that of others."""
    chance = np.random.default_rng(3)
    rows = drawn(chance, 5)
    simple = run_errors.baselines(rows)
    half = 0.5 * RESULT.tokens_per_s_per_gpu / RESULT.mfu
    assert {rule.half for rule in simple} == {half}
    wrong = [replace(row, error=row.error + 1) if row.run.site == "0" else row for row in rows]
    again = run_errors.baselines(wrong)
    of_site = [index for index, row in enumerate(rows) if row.run.site == "0"]
    assert [again[i].single for i in of_site] == [simple[i].single for i in of_site]


def test_a_kind_on_which_a_baseline_is_better_is_named() -> None:
    """Predictions that are twice too fast, of half of the peak that is right."""
    row = run_errors.Left(RUNS[0].changed(tokens_per_s_per_gpu=100.0), RESULT, PLAIN, math.log(2))
    rows = [replace(row, run=row.run.changed(site=str(n % 4))) for n in range(12)]
    simple = [run_errors.Baselines(half=100.0, single=300.0)] * 12
    assert run_errors.beaten(rows, simple) == [f"{run_errors.DENSE} (half)"]
    assert run_errors.beaten(rows[:9], simple[:9]) == []


@pytest.mark.slow
def test_errors_of_one_source_are_printed_without_rules_of_others(co2analysis: Command) -> None:
    """One source has no others, of which a rule would be made."""
    ended = co2analysis("runs", "--source", "tinyllama", "--jobs", "1")
    assert ended.code == 0, ended.err
    assert "tinyllama" in ended.out
    assert "MFU" not in ended.out
