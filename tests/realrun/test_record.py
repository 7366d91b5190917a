"""A run's folder: what was asked, what was measured, and the timeline."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import cluster, model

from co2sim import Question
from co2sim.common.errors import CatalogError, Co2simError
from co2sim.prediction import driver
from co2sim.schedule.schedule import Collective, Layout
from realrun import record
from realrun.record import Record


@pytest.fixture
def made() -> Record:
    """A simulated run, as if it had been measured."""
    case = Question(
        cluster=cluster(), model=model(), strategy="co2.published(tau=2)", precision="fp32"
    )
    _, trace = driver.trace(replace(case, fold=False))
    return Record(
        case=case,
        kernels="sleep",
        rounds=1,
        trace=trace,
        clock_error=1e-6,
        figures=driver.run(case).to_dict(),
        environment={"torch": "2"},
    )


def test_what_is_written_is_read(made: Record, tmp_path: Path) -> None:
    """Cluster, model, options, spans and figures; the prediction can be repeated exactly."""
    written = record.write(tmp_path / "run", made)
    assert {path.name for path in written} == {"run.json", "trace.jsonl", "trace.json"}
    found = record.read(tmp_path / "run")
    assert found.case == made.case
    assert found.trace == made.trace
    assert found.figures == json.loads(json.dumps(made.figures))
    assert driver.run(found.case) == driver.run(made.case)


def test_every_option_of_the_case_is_kept(made: Record, tmp_path: Path) -> None:
    """The batch, too, whichever way it was given: without it another workload is predicted."""
    for changes in (
        {"micro_batch": 2, "accumulation": 3, "precision": "bf16", "optimizer": "sgd"},
        {"global_batch": 16, "recompute": "full"},
        {"overrides": {"stack.experts_all_to_all": "hierarchical"}},
    ):
        case = replace(made.case, **changes)  # type: ignore[arg-type]
        _, trace = driver.trace(replace(case, fold=False))
        record.write(tmp_path / "run", replace(made, case=case, trace=trace))
        assert record.read(tmp_path / "run").case == case


def test_a_run_of_an_older_version_is_read(made: Record, tmp_path: Path) -> None:
    """Without what came later: such a run had none of it."""
    record.write(tmp_path / "run", made)
    path = tmp_path / "run" / "run.json"
    run = json.loads(path.read_text())
    later = ("tp", "sequence_parallel", "ep", "cp", "lora", "quantize_base")
    for name in (*later, "offload", "stack", "overrides"):
        del run[name]
    path.write_text(json.dumps(run))
    assert record.read(tmp_path / "run").case == made.case


def test_a_run_keeps_what_was_said_of_its_stack() -> None:
    """Numbers of cluster and model are in these; a stack stays a name with its numbers."""
    of_stack = {"stack.experts_all_to_all": "hierarchical"}
    asked = Question(
        cluster="dgx-h100",
        model="qwen3-30b-a3b",
        strategy="zero1",
        ep=16,
        overrides={"inter.bandwidth": "1 Gbit/s", "model.experts.load": "1.2", **of_stack},
    )
    found, _ = record.resolve(asked, Layout(2, 8), "gloo")
    assert found.overrides == of_stack
    assert found.stage().workload.experts_all_to_all == "hierarchical"
    routed = [
        op.work.routed for op in found.stage().schedule.body if isinstance(op.work, Collective)
    ]
    assert {(one.load, one.by_node) for one in routed if one} == {(1.2, True)}


def test_other_folders_are_refused_in_one_line(made: Record, tmp_path: Path) -> None:
    """Whatever is wrong with it, the folder is named."""
    for damage in ["missing", "empty", "not json", "other keys"]:
        folder = tmp_path / "run"
        if damage != "missing":
            record.write(folder, made)
            texts = {"empty": "", "not json": "{", "other keys": "{}"}
            (folder / "run.json").write_text(texts[damage])
        with pytest.raises(CatalogError, match=f"{folder} is not the folder of a run: ") as caught:
            record.read(folder)
        assert isinstance(caught.value, Co2simError)
        assert "\n" not in str(caught.value)
