"""What is fitted to published training runs, and how far predictions without it are off."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.published import run_errors, stack_fit
from analysis.published.runs import TrainingRun, training_runs
from analysis.published.stack_fit import SHARED, Linear
from co2sim.catalog import load_stack, names
from co2sim.common.errors import CatalogError
from co2sim.prediction.error_model import Situation, error_model

RUNS = [run for run in training_runs() if run.expressible]
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
    assert of_stacks == {name for name in names("stacks") if not load_stack(name).value.kernels}


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


def test_the_model_of_errors_covers_what_it_was_made_of() -> None:
    """Errors of three sizes of deviations, with heavy tails: nine of ten lie in the intervals."""
    chance = np.random.default_rng(4)
    situations = [
        Situation(exposed=share, nodes=1, divided=1, tokens=16_384)
        for share in chance.uniform(0, 0.8, 4000)
    ]
    true = error_model()
    errors = np.array([true.deviation(one) for one in situations]) * chance.standard_t(
        5, len(situations)
    )
    inside = np.abs(errors) <= [true.reach(one) for one in situations]
    assert 0.8 < inside.mean() < 1


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
