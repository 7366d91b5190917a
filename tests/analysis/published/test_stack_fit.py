"""What is fitted to published training runs, and how far predictions without it are off."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from analysis.published import run_errors, stack_fit
from analysis.published.runs import TrainingRun, training_runs
from analysis.published.stack_fit import SHARED, Linear
from co2sim.catalog import load_model, load_stack, names
from co2sim.common.errors import CatalogError
from co2sim.prediction.error_model import (
    CONTEXT_ERROR,
    CONTEXT_RUNS,
    CONTEXT_TORCHTITAN,
    EXPERT_ERROR,
    EXPERT_RUNS,
    ErrorModel,
    Situation,
    error_model,
)

RUNS = [run for run in training_runs() if run.headline]
NAMES = [one.name for one in SHARED]


def linear(errors: dict[str, float], slope: float = -1.0) -> Linear:
    """Around the priors, of all runs, whose errors by source depend on the first number alone."""
    slopes = np.zeros((len(RUNS), len(SHARED)))
    slopes[:, 0] = slope
    found = np.array([errors.get(run.paper, 0.0) for run in RUNS])
    return Linear(tuple(RUNS), {one.name: one.prior for one in SHARED}, found, slopes)


def test_every_number_is_of_some_run_and_every_run_has_some() -> None:
    """A number that no run determines is its prior, and would be called fitted."""
    for one in SHARED:
        assert any(one.holds_for(run) for run in RUNS), one.name
    for run in RUNS:
        paths = [one.path for one in SHARED if one.holds_for(run)]
        assert len(paths) == len(set(paths)) == 6, run


def test_every_stack_of_the_catalog_has_fitted_numbers() -> None:
    """A new stack shares those of its kind, or has its own."""
    of_stacks = {name for one in SHARED for name in one.stacks}
    found = {name: load_stack(name).value for name in names("stacks")}
    own = {name for name, stack in found.items() if stack.kernels or stack.efficiency}
    assert of_stacks == set(found) - own


def test_common_errors_are_fitted_away() -> None:
    """All runs 8 % too fast, and a number whose growth makes them slower: it grows."""
    found = linear(dict.fromkeys({run.paper for run in RUNS}, 0.08)).without(None)
    assert math.log(found[NAMES[0]] / SHARED[0].prior) == pytest.approx(0.08, abs=0.01)
    assert found[NAMES[1]] == pytest.approx(SHARED[1].prior, rel=1e-3)


@given(st.floats(-0.5, 0.5))
def test_a_source_that_is_left_out_changes_nothing(error: float) -> None:
    """Whatever its own errors are."""
    others = dict.fromkeys({run.paper for run in RUNS}, 0.05)
    one, other = (linear({**others, "nanotron": e}).without("nanotron") for e in (0.0, error))
    assert one == other


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With four digits, for all and without each source; without a file one line says so."""
    found = stack_fit.record()
    (tmp_path / stack_fit.RECORD).write_text(stack_fit.written(found))
    assert stack_fit.record(tmp_path) == found
    assert set(found.left_out) == {run.paper for run in RUNS}
    with pytest.raises(CatalogError, match=stack_fit.RECORD):
        stack_fit.record(tmp_path / "none")


def test_the_catalog_states_what_was_fitted() -> None:
    """In its files of GPUs and stacks, and in its defaults: to write them again changes nothing."""
    for path, content in run_errors.catalog_files(stack_fit.record().values).items():
        assert path.read_bytes() == content, path


@pytest.mark.parametrize("seed", [4, 5])
def test_the_model_of_errors_finds_how_errors_were_made(seed: int) -> None:
    """Errors of any run and of exposed time, with heavy tails; nine of ten new ones are covered."""
    chance = np.random.default_rng(seed)

    def drawn(count: int) -> tuple[list[Situation], NDArray[np.float64]]:
        shares = chance.uniform(0, 0.8, count)
        some = [Situation(exposed=one, nodes=1, divided=1, host=0.0) for one in shares]
        return some, np.hypot(0.05, 0.3 * shares) * chance.standard_t(5, count)

    situations, errors = drawn(3000)
    found, factor = run_errors.deviations_of(situations, errors, np.ones(3000))
    assert found["any"] == pytest.approx(0.05, rel=0.15)
    assert found["exposed"] == pytest.approx(0.3, rel=0.15)
    model, (situations, errors) = ErrorModel(found, factor, ()), drawn(3000)
    inside = np.abs(errors) <= [model.reach(one) for one in situations]
    assert inside.mean() == pytest.approx(0.9, abs=0.025)


def test_intervals_of_a_source_do_not_know_it(tmp_path: Path) -> None:
    """Each source has a model of its own, and it is read as it was written."""
    models = run_errors.recorded_models()
    assert set(models) == {run.paper for run in RUNS}
    path, content = run_errors.models_file(models, tmp_path)
    path.write_bytes(content)
    assert run_errors.recorded_models(tmp_path) == models
    with pytest.raises(CatalogError, match=run_errors.INTERVALS):
        run_errors.recorded_models(tmp_path / "none")


@pytest.mark.nightly
def test_the_errors_of_a_source_change_nothing_in_its_own_model() -> None:
    """Made again from predictions that are ten times too fast for one source."""
    known = [run for run in RUNS if run.paper in {"tinyllama", "hf_accelerate", "llama3_paper"}]
    values = [stack_fit.record().left_out[run.paper] for run in known]
    results = stack_fit.predictions(known, values, 1, "predicting")
    wrong = [
        run.model_copy(update={"tokens_per_s_per_gpu": 1.0}) if run.paper == "tinyllama" else run
        for run in known
    ]
    before = run_errors.models_without(known, results)
    after = run_errors.models_without(wrong, results)
    assert before["tinyllama"].deviations == after["tinyllama"].deviations
    assert before["llama3_paper"].deviations != after["llama3_paper"].deviations


@pytest.mark.nightly
def test_the_error_with_context_parallelism_is_that_of_its_published_runs() -> None:
    """What an answer with `--cp` says is what predictions of such runs give."""
    known = [run for run in training_runs() if run.unfitted and run.case().cp > 1]
    record = stack_fit.record()
    values = [record.left_out.get(run.paper, record.values) for run in known]
    found = stack_fit.predictions(known, values, 1, "")
    errors = [abs(row.error) for row in run_errors.compared(known, found)]
    own = [one for run, one in zip(known, errors, strict=True) if run.paper == "torchtitan_h100"]
    assert len(errors) == CONTEXT_RUNS
    assert math.fsum(errors) / len(errors) == pytest.approx(CONTEXT_ERROR, abs=0.005)
    assert math.fsum(own) / len(own) == pytest.approx(CONTEXT_TORCHTITAN, abs=0.005)


@pytest.mark.nightly
def test_the_error_of_mixtures_of_experts_is_that_of_their_published_runs() -> None:
    """What an answer says of them is what predictions of them give, and all divide the experts."""
    known = [run for run in training_runs() if run.unfitted]
    experts = [run for run in known if run.case().ep > 1]
    found = stack_fit.predictions(experts, [stack_fit.record().values] * len(experts), 1, "")
    errors = [abs(row.error) for row in run_errors.compared(experts, found)]
    assert len(errors) == EXPERT_RUNS
    assert math.fsum(errors) / len(errors) == pytest.approx(EXPERT_ERROR, abs=0.005)
    whole = [run for run in known if run.case().ep == 1]
    models = [load_model(run.case().model).value for run in whole]
    assert all(one.active_parameters == one.parameters for one in models)


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
        assert values == stack_fit.record().left_out[run.paper]
        return true(run, values)

    monkeypatch.setattr(stack_fit, "overrides", seen)
    from analysis.cli.runs import runs  # noqa: PLC0415 - behind the patch

    runs(source=["tinyllama"], jobs=1, json_=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert len(asked) >= 1
    known = next(one for one in error_model().sources if "TinyLlama" in one.title)
    assert abs(row["error"]) == pytest.approx(known.mean, abs=1e-3)
    assert row["low"] < row["predicted_tokens_per_s_per_gpu"] < row["high"]
