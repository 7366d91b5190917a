"""Whole published trainings beside predictions: `co2analysis whole`."""

import tomllib

import pytest

from analysis.published.whole import Whole, factors_file, predicted
from co2sim.prediction.whole import trainings


@pytest.fixture(scope="module")
def rows() -> list[Whole]:
    """All of them, predicted."""
    return predicted()


def test_the_catalog_has_the_factors_of_today(rows: list[Whole]) -> None:
    """Within 3 %; `co2analysis whole --write co2sim/catalog/training_factors.toml` renews them."""
    now = tomllib.loads(factors_file(rows))
    kept = {each.name: each.factor for each in trainings() if each.factor is not None}
    assert now == pytest.approx(kept, rel=0.03)


def test_what_is_predicted_fits_and_has_the_published_size(rows: list[Whole]) -> None:
    """The model of a setting has the parameters of its training, within 5 %, and may fit."""
    for row in rows:
        if row.result is not None:
            assert row.result.parameters == pytest.approx(row.training.parameters, rel=0.05)
            assert row.result.memory_bytes_low <= row.result.gpu_memory_bytes
            assert row.training.gpus in {None, row.result.gpus}
