"""Jobs that share a fabric: what a file says of them, where they stand, and what each loses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Command

import co2sim
from co2sim import Question
from co2sim.common.errors import OptionError
from co2sim.studies.beside import read_beside

FABRIC = {"fabric.leaf.nodes": "4", "fabric.leaf.oversubscription": "16"}
JOB = Question(
    cluster="dgx-h100", model="gpt2-xl", strategy="ddp", gpus=64, micro_batch=1, overrides=FABRIC
)


def test_equal_jobs_lose_the_same_and_less_on_wider_uplinks() -> None:
    """Of two of a kind neither is first; with sixteen times the uplinks they lose nothing."""
    one, other = co2sim.beside([JOB, JOB])
    assert 0 < one.lost == pytest.approx(other.lost, rel=0.2)
    assert one.lost <= one.worst
    assert one.meets <= one.uses
    wide = replace(JOB, overrides={**FABRIC, "fabric.leaf.oversubscription": "1"})
    assert max(job.worst for job in co2sim.beside([wide, wide])) < one.lost


def test_a_file_of_options_is_a_job_on_the_same_fabric(tmp_path: Path) -> None:
    """Two of them, with the changes of the cluster that the first job has."""
    path = tmp_path / "other.toml"
    path.write_text('model = "gpt2-small"\nstrategy = "fsdp"\ngpus = 16\n')
    first, second = read_beside(f"{path}:2", JOB)
    assert first == second
    assert (first.model, first.strategy, first.gpus) == ("gpt2-small", "fsdp", 16)
    assert first.overrides == FABRIC


def test_more_nodes_than_a_leaf_has_are_refused() -> None:
    """Shares that are given add up to at most one."""
    half = replace(JOB, overrides={**FABRIC, "fabric.share": "0.6"})
    with pytest.raises(OptionError, match="at most 1"):
        co2sim.beside([half, half])


def test_json_has_what_each_job_loses(cli: Command, tmp_path: Path) -> None:
    """The job, and the one beside it."""
    path = tmp_path / "other.toml"
    path.write_text('model = "gpt2-xl"\nstrategy = "ddp"\ngpus = 64\nmicro_batch = 1\n')
    line = "run -c dgx-h100 -m gpt2-xl -s ddp -g 64 --micro-batch 1 --json"
    sets = [part for name, text in FABRIC.items() for part in ("--set", f"{name}={text}")]
    ended = cli(*line.split(), *sets, "--beside", str(path))
    assert ended.code == 0
    jobs = json.loads(ended.out)["beside"]
    assert [job["gpus"] for job in jobs] == [64, 64]
    assert jobs[0]["lost"] > 0
