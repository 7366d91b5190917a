"""Jobs that share a fabric: what a file says of them, where they stand, and what each loses."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Command

import co2sim
from co2sim import Question
from co2sim.common.errors import OptionError
from co2sim.simulation.beside import Meeting, Shared
from co2sim.studies.beside import Together, read_beside

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


@pytest.mark.parametrize(
    ("nodes", "gpus", "parts"),
    [(4, (64, 64), (2, 2)), (4, (64, 16, 16), (2, 1, 1)), (5, (8, 8, 8), (1, 1, 1))],
)
def test_jobs_have_whole_nodes_of_a_leaf_and_no_more_than_it_has(
    nodes: int, gpus: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    """At least one each, equal jobs the same."""
    on = {**FABRIC, "fabric.leaf.nodes": str(nodes)}
    jobs = [replace(JOB, model="gpt2-small", gpus=count, overrides=on) for count in gpus]
    sharers = Together.of(jobs).sharers
    assert tuple(sharer.cluster.pods[0].ours for sharer in sharers) == parts


def test_more_jobs_than_a_leaf_has_nodes_are_refused() -> None:
    """Each has one of every leaf at least."""
    with pytest.raises(OptionError, match="5 jobs beside each other on leaves of 4 nodes"):
        Together.of([JOB] * 5)


def test_the_part_of_the_speed_is_that_of_the_time_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds of 2 s that take 4 and 2.5: half and a fifth; of 2 that take 2: nothing, and so on."""
    rounds = ([2.0, 2.0], [4.0, 2.5]), ([2.0, 2.0], [2.0, 1.9])
    shared = [Shared(tuple(alone), tuple(taken), 0.1, 0.2) for alone, taken in rounds]
    monkeypatch.setattr(Meeting, "run", lambda _: shared)
    together = Together.of([JOB, JOB])
    results = [replace(result, step_time_s=2.0) for result in together.results]
    one, other = replace(together, results=results).meet()
    assert (one.lost, one.worst) == (pytest.approx(0.35), pytest.approx(0.5))
    assert one.error == pytest.approx(0.15)
    assert other.lost == pytest.approx((0 - 0.1 / 1.9) / 2)
    assert (one.draws, one.leaf_nodes) == (2, 2)


SETS = [part for name, text in FABRIC.items() for part in ("--set", f"{name}={text}")]
LINE = [*shlex.split("run -c dgx-h100 -m gpt2-xl -s ddp -g 64 --micro-batch 1"), *SETS]


def test_the_table_says_which_job_is_of_which_file(cli: Command, tmp_path: Path) -> None:
    """Numbers tell equal jobs apart, and the draws are counted: four where they do not differ."""
    path = tmp_path / "other.toml"
    path.write_text('model = "gpt2-xl"\ngpus = 16\nmicro_batch = 1\n')
    ended = cli(*LINE, "--beside", f"{path}:2")
    assert ended.code == 0
    assert f"2, 3: {path}" in ended.out
    assert "(draws: 4)" in ended.out
    assert [line[:1] for line in ended.out.splitlines() if "GPT-2" in line][-3:] == ["1", "2", "3"]


def test_the_answer_is_there_before_others_are_simulated(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt leaves the first screen, and says what is not there."""
    path = tmp_path / "other.toml"
    path.write_text('model = "gpt2-xl"\ngpus = 64\nmicro_batch = 1\n')

    def interrupt(_: Meeting) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Meeting, "run", interrupt)
    ended = cli(*LINE, "--beside", str(path))
    assert ended.code == 130
    assert "ddp on 64 GPUs" in ended.out
    assert "beside" in ended.err


@pytest.mark.parametrize(
    "changes",
    [
        {"fabric.rails": "true"},
        {"fabric.leaf.oversubscription": "2"},
        {"fabric.switch_ports": "64"},
        {"fabric.paths": "hashed"},
        {"fabric.spine.nodes": "16"},
        {"inter.bandwidth": "25 Gbit/s"},
        {"fabric.nics": "4"},
    ],
    ids="".join,
)
def test_another_fabric_for_the_same_leaves_is_refused(changes: dict[str, str]) -> None:
    """What describes switches and links is that of the first job."""
    (name,) = changes
    other = replace(JOB, overrides={**FABRIC, **changes})
    with pytest.raises(OptionError, match=f"^{name} is {changes[name]}, and .* in the first job"):
        Together.of([JOB, other])


def test_the_share_and_the_placement_are_of_a_job() -> None:
    """A quarter of each leaf, scattered, beside the other three."""
    first, other = (
        replace(JOB, model="gpt2-small", overrides={**FABRIC, **changes})
        for changes in (
            {"fabric.share": "0.75"},
            {"fabric.share": "0.25", "fabric.placement": "scattered"},
        )
    )
    assert [s.cluster.pods[0].ours for s in Together.of([first, other]).sharers] == [3, 1]


def test_a_part_of_a_node_is_refused() -> None:
    """It sends nothing over uplinks, so that it loses nothing, nor takes any."""
    with pytest.raises(OptionError, match="4 of the 8 GPUs of a node send nothing over uplinks"):
        Together.of([JOB, replace(JOB, gpus=4)])


def test_jobs_on_two_clusters_are_refused() -> None:
    """The error names both."""
    with pytest.raises(OptionError, match="one cluster; these are on dgx-h100 and dgx-a100"):
        co2sim.beside([JOB, replace(JOB, cluster="dgx-a100")])


def test_no_job_is_refused() -> None:
    """In words, as any other list that cannot be."""
    with pytest.raises(OptionError, match="give one Question or more"):
        co2sim.beside([])


def test_the_sum_of_the_shares_is_told_and_not_each() -> None:
    """Of 17 jobs that state none but one."""
    jobs = [replace(JOB, overrides={**FABRIC, "fabric.share": "0.5"}), *[JOB] * 16]
    with pytest.raises(OptionError, match=r"^fabric\.share of 17 jobs adds up to 16\.5"):
        Together.of(jobs)


def test_numbers_of_the_cluster_are_read_dotted_or_as_texts(tmp_path: Path) -> None:
    """TOML makes a table of what is dotted."""
    path = tmp_path / "other.toml"
    path.write_text(
        'model = "gpt2-small"\n[overrides]\nfabric.share = 0.5\n"fabric.rails" = false\n'
    )
    (job,) = read_beside(str(path), JOB)
    assert job.overrides == FABRIC | {"fabric.share": "0.5", "fabric.rails": "false"}


def test_the_page_has_the_table_of_the_jobs_beside(cli: Command, tmp_path: Path) -> None:
    """With the same figures as the screen."""
    pytest.importorskip("altair")
    path, page = tmp_path / "other.toml", tmp_path / "page.html"
    path.write_text('model = "gpt2-small"\ngpus = 16\nmicro_batch = 1\n')
    ended = cli(*LINE, "--beside", str(path), "--report", str(page))
    assert ended.code == 0
    text = page.read_text("utf-8")
    row = next(line.split() for line in ended.out.splitlines() if "small" in line)
    assert "Jobs beside each other" in text
    assert f"2: {path}" in text
    assert all(f">{cell}</td>" in text for cell in row if cell.endswith("%"))


def test_another_job_that_does_not_fit_in_memory_is_said(cli: Command, tmp_path: Path) -> None:
    """In its row, and in JSON; nothing is said where all fit."""
    path = tmp_path / "other.toml"
    path.write_text('model = "llama3-70b"\nstrategy = "ddp"\ngpus = 64\n')
    ended = cli(*LINE, "--beside", str(path))
    assert "memory" in ended.out
    row = next(line for line in ended.out.splitlines() if line.startswith("2") and "70B" in line)
    assert row.rstrip().endswith("DOES NOT FIT")
    first, other = json.loads(cli(*LINE, "--beside", str(path), "--json").out)["beside"]
    assert (first["fits_in_memory"], other["fits_in_memory"]) == (True, False)
