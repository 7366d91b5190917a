"""Whole published trainings: what they say, which is beside an answer, and a project's factor."""

from dataclasses import replace
from statistics import median

import pytest

from co2sim import Goal, Question, run, totals_of
from co2sim.catalog import load_cluster, load_model, names
from co2sim.prediction.whole import (
    Training,
    beside,
    most_alike,
    published_factors,
    published_project,
    read_project,
    trainings,
    whole_words,
)

BY_NAME = {each.name: each for each in trainings()}
CASE = Question(cluster="dgx-h100", model="llama3-8b", strategy="fsdp", gpus=64)
RESULT = run(CASE)


@pytest.mark.parametrize("whole", trainings(), ids=lambda whole: whole.name)
def test_a_training_names_its_gpu_and_source_and_is_no_faster_than_trainings_are(
    whole: Training,
) -> None:
    """Over all its hours a training keeps 10 to 60 % of the peak: a wrong unit shows."""
    assert whole.gpu in names("gpus")
    assert whole.source
    assert 0.1 < whole.effective / whole.peak < 0.6
    assert whole.passed <= whole.parameters


def test_hours_agree_with_published_speeds() -> None:
    """LLaMA 65B: 380 tokens/s a GPU. Llama 3.1 405B: less than its steady 380 to 430 TFLOP/s.

    Apertus: 723 tokens/s a GPU would be 5.76 million hours. All speeds by the same papers.
    """
    llama = BY_NAME["LLaMA 65B"]
    assert llama.tokens / llama.gpu_hours / 3600 == pytest.approx(380, rel=0.01)
    assert 0.75 * 380e12 < BY_NAME["Llama 3.1 405B"].effective < 430e12
    apertus = BY_NAME["Apertus 70B"]
    assert 1 < apertus.gpu_hours / (apertus.tokens / 723 / 3600) < 1.1


@pytest.mark.parametrize(
    ("cluster", "model", "name"),
    [
        ("dgx-h100", "llama3-8b", "Llama 3.1 8B"),
        ("dgx-h200", "llama3-70b", "Llama 3.1 70B"),
        ("h800-3200g", "deepseek-v3", "DeepSeek-V3"),
        ("dgx-a100", "llama-70b", "Llama 2 70B"),
        ("dgx-h100", "qwen3-30b-a3b", "JetMoE 8B"),
    ],
)
def test_the_most_alike_has_the_gpu_the_kind_and_the_size(
    cluster: str, model: str, name: str
) -> None:
    """The model itself on its own GPU, or the nearest of its kind."""
    assert most_alike(load_cluster(cluster).value.gpu, load_model(model).value).name == name


def test_the_same_model_is_compared_by_tokens() -> None:
    """As many times the GPU-hours of a token, whatever the tokens, and without the project."""
    whole = BY_NAME["Llama 3.1 8B"]
    for tokens, goal in ((1e12, Goal()), (5e12, Goal(project=read_project("2")))):
        totals = totals_of(CASE, RESULT, tokens, goal)
        found = beside(CASE, totals)
        mine = totals.gpu_hours / totals.project / tokens
        assert (found.training, found.same_model, found.same_gpu) == (whole, True, True)
        assert found.factor == pytest.approx(whole.gpu_hours / whole.tokens / mine, rel=0.01)


@pytest.mark.parametrize("cluster", ["dgx-b200", "h20-3200g"])
def test_another_gpu_is_compared_at_its_peak(cluster: str) -> None:
    """A B200, or the slower H20, that keeps as much of its peak as an H100 did is once as fast."""
    case = replace(CASE, cluster=cluster)
    totals = totals_of(case, run(case), 1e12)
    found = beside(case, totals)
    gpu, active = case.load()[0].value.gpu, case.load()[1].value.active_parameters
    kept = 6 * active * 1e12 / (totals.gpu_hours * 3600) / gpu.peak["bf16"]
    assert not found.same_gpu
    assert found.factor == pytest.approx(kept / (found.training.effective / found.training.peak))


def test_nothing_stands_beside_images_and_adapters() -> None:
    """They train no tokens, or not all parameters; and without tokens there is nothing to say."""
    vision = replace(CASE, model="vit-b16")
    assert not whole_words(vision, totals_of(vision, run(vision), 1e9))
    adapters = replace(CASE, lora=16)
    assert not whole_words(adapters, totals_of(adapters, run(adapters), 1e12))
    assert not whole_words(CASE, None)


def test_the_published_project_is_the_median() -> None:
    """With the most as its long end; days have that range, and no project is below 1."""
    factors, project = published_factors(), published_project()
    assert len(factors) >= 8
    assert (project.factor, project.high) == (median(factors), max(factors))
    assert read_project(" Published ") == project
    one, whole = (totals_of(CASE, RESULT, 1e12, Goal(project=p)) for p in (Goal().project, project))
    assert whole.days == pytest.approx(project.factor * one.days)
    assert whole.days_high / whole.days > one.days_high / one.days
