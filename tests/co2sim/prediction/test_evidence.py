"""Published training runs beside an answer."""

import json

import pytest
from commands import Command

from analysis.published.runs import training_runs
from co2sim.prediction.driver import run
from co2sim.prediction.intervals import nearest, shares
from co2sim.prediction.question import Question
from co2sim.strategies import STRATEGIES


@pytest.mark.parametrize("paper", ["torchtitan_h100", "nanotron", "deepspeed_azure"])
def test_a_published_run_is_the_nearest_to_itself(paper: str) -> None:
    """At distance 0, and further ones follow."""
    one = next(one for one in training_runs() if one.paper == paper and one.headline)
    case = one.case()
    near = nearest(case, run(case))
    assert near[0].distance == pytest.approx(0, abs=1e-6)
    assert one.tokens_per_s_per_gpu in {
        found.run.published for found in near if found.distance < 1e-6
    }
    distances = [found.distance for found in near]
    assert distances == sorted(distances)


def test_nothing_is_near_a_local_update_on_a_gpu_of_players(cli: Command) -> None:
    """And the first line of an answer says so; near a published run it says nothing."""
    case = Question(cluster="rtx3090-10x8", model="tiny-5m", strategy="diloco(tau=20)", gpus=16)
    result = run(case)
    assert result.unlike_published
    assert result.nearest_published == nearest(case, result)[0].distance
    place = ("-c", "rtx3090-10x8", "-m", "tiny-5m", "-s", "diloco:tau=20", "-g", "16")
    for command in ("run", "scale"):
        first = " ".join(cli(command, *place)[1].split())[:250]  # a title takes several lines
        assert "no published run is near" in first
    known = Question(cluster="dgx-h100", model="llama3-8b", strategy="fsdp", gpus=64)
    assert run(known).nearest_published is not None
    assert not run(known).unlike_published


def test_evidence_is_in_the_json_if_it_is_asked_for(cli: Command) -> None:
    """With source, setting, published and predicted throughput, and distance."""
    job = ("run", "-c", "dgx-h100", "-m", "llama3-8b", "-s", "fsdp", "-g", "64", "--json")
    assert "evidence" not in json.loads(cli(*job)[1])
    (first, *_) = json.loads(cli(*job, "--evidence")[1])["evidence"]
    assert first["run"]["source"]
    assert first["run"]["published"] > 0
    assert first["distance"] >= 0


def test_every_strategy_shares_something_or_nothing() -> None:
    """Local updates share whole steps."""
    assert {shares(name) for name in STRATEGIES} == {"nothing", "states", "parameters", "steps"}
