"""Many cases at once: grids, tables, workers that die, and cases that fail."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import joblib
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import numbers

import co2sim
from co2sim import CO2, DDP, Co2simError, Layout, OptionError, PublishedCO2, Question, Schedule
from co2sim.common import convert
from co2sim.prediction import driver
from co2sim.studies import grid, run_all
from co2sim.studies.pools import processes
from co2sim.studies.run_all import efficiencies
from co2sim.studies.solve import solve
from co2sim.studies.targets import axis_of, target_of
from co2sim.training.workload import Workload

SMALL: dict[str, Any] = {"cluster": "a100-tcp80", "model": "gpt2-small", "gpus": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadly:
    """A strategy whose schedule kills the process that asks for it."""

    name: ClassVar[str] = "deadly"

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """Die as a process does when the system runs out of memory."""
        os.kill(os.getpid(), signal.SIGKILL)
        return DDP().schedule(job, layout)

    def memory(self, job: Workload, layout: Layout) -> dict[str, float]:
        """As DDP."""
        return DDP().memory(job, layout)


def test_a_grid_gives_one_row_a_case_with_units_in_the_names() -> None:
    """All combinations, the last path fastest; every row is what `simulate` gives."""
    found = co2sim.sweep(
        **SMALL,
        strategy="co2",
        vary={"inter.bandwidth": ["25 Gbit/s", "100 Gbit/s"], "strategy.tau": [1, np.int64(12)]},
    )
    assert found["vary inter.bandwidth"].tolist() == ["25 Gbit/s"] * 2 + ["100 Gbit/s"] * 2
    assert found["vary strategy.tau"].tolist() == ["1", "12"] * 2
    for row in found.to_dict("records"):
        alone = co2sim.simulate(
            **SMALL,
            strategy=CO2(tau=int(row["vary strategy.tau"])),
            overrides={"inter.bandwidth": row["vary inter.bandwidth"]},
        )
        assert row["step_time_s"] == alone.step_time_s
        assert row["memory_total_bytes"] == alone.memory_bytes_per_gpu["total"]
        free = 1 - alone.exposed_comm_s / alone.round_time_s
        assert row["efficiency_vs_free_communication"] == pytest.approx(free)
    assert found["error"].isna().all()


def test_objects_paths_and_fields_can_vary() -> None:
    """Strategies as objects, clusters by path or name, noise, batch: all have a path."""
    where = Path(co2sim.__file__).parent / "catalog" / "clusters" / "dgx-h100.toml"
    found = co2sim.sweep(
        model=tiny.model(),
        gpus=16,
        accumulation=1,
        vary={
            "cluster": ["a100-tcp80", where],
            "strategy": [DDP(), "co2.published:tau=2"],
            "straggle": "0, 0.1",
            "micro_batch": range(1, 3),
        },
    )
    assert len(found) == 16
    assert set(found["strategy"]) == {"ddp", "co2.published(tau=2)"}
    assert set(found["cluster_key"]) == {"a100-tcp80", str(where)}
    assert set(found["model_key"]) == {"tiny"}
    slow = found[found["vary straggle"] == "0.1"].reset_index(drop=True)
    even = found[found["vary straggle"] == "0"].reset_index(drop=True)
    assert (slow["step_time_s"] != even["step_time_s"]).all()


@pytest.mark.parametrize(
    ("asked", "token"),
    [
        ({"vary": {}}, "nothing varies"),
        ({"vary": {"gpus": None}}, "gpus has no values"),
        ({"vary": {"gpus": [8], "model.layers": [2, None]}}, "model.layers: None"),
        ({"vary": ["gpus=8,16"]}, "vary is ['gpus=8,16']"),
        ({"vary": {"gpus": [8]}, "sort": 3}, "sort is 3"),
    ],
    ids=str,
)
def test_a_grid_that_cannot_be_is_one_line(asked: dict[str, Any], token: str) -> None:
    """What is wrong in every case, or cannot be read at all, is an error and no table."""
    given_ = {**SMALL, "gpus": None, "strategy": "ddp", **asked}
    with pytest.raises(Co2simError) as caught:
        co2sim.sweep(**given_)
    assert token in str(caught.value)
    assert "\n" not in str(caught.value)


FIGURES: dict[str, Callable[[Any], float]] = {
    "tokens/s": lambda r: r.tokens_per_s,
    "step": lambda r: r.step_time_s,
    "exposed": lambda r: r.exposed_share,
    "memory": lambda r: r.memory_bytes_per_gpu["total"],
}


@pytest.mark.slow
def test_rows_are_sorted_by_columns_or_by_the_names_of_the_printed_table() -> None:
    """The order is that of the results one by one, falling behind a minus."""
    strategies = ["ddp", "zero3", "co2.published(tau=4)"]
    results = {s: co2sim.simulate(**SMALL, strategy=s) for s in strategies}
    for name, figure in FIGURES.items():
        values = {s: figure(result) for s, result in results.items()}
        for falling in ("", "-"):
            found = co2sim.sweep(**SMALL, vary={"strategy": strategies}, sort=falling + name)
            wanted = sorted(strategies, key=values.__getitem__, reverse=bool(falling))
            assert [values[s] for s in found["strategy"]] == [values[s] for s in wanted], name


def test_every_field_of_a_case_and_of_a_cluster_can_vary() -> None:
    """The paths follow from the dataclasses, and no list has to be kept."""
    case = Question(**SMALL, strategy="ddp")
    for path, value in {"fold": "false", "optimizer": "sgd", "rounds": 3, "seed": "4"}.items():
        assert grid.with_change(case, path, value) != case
    for path in ("channels", "sites", "backend", "price_per_gpu", "gpu", "name"):
        assert grid.with_change(case, path, "1").overrides == {path: "1"}
    for path in ("inter", "wan", "intra", "overrides", "noise", "node_speed"):
        with pytest.raises(OptionError, match="nothing is called"):
            grid.with_change(case, path, "1")


def test_scale_gives_clusters_by_strategies_by_counts() -> None:
    """Rows in the order asked for, the default counts double; each is what `simulate` gives."""
    strategies = ["ddp", PublishedCO2(tau=2)]
    found = co2sim.scale(["a100-tcp80", "dgx-h100"], "gpt2-small", strategies, gpus="16,8")
    assert found["gpus"].tolist() == [8, 16] * 4
    names = ["ddp", "ddp", "co2.published(tau=2)", "co2.published(tau=2)"]
    assert found["strategy"].tolist() == names * 2
    alone = co2sim.simulate("dgx-h100", "gpt2-small", "co2.published:tau=2", gpus=16)
    assert found["tokens_per_s"].iloc[-1] == alone.tokens_per_s
    whole = co2sim.scale(tiny.cluster(4, 2), tiny.model(), "ddp")
    assert whole["gpus"].tolist() == [2, 4, 8]
    with pytest.raises(OptionError, match="given twice"):
        co2sim.scale("dgx-h100", "gpt2-small", ["co2", "co2(tau=auto)"], gpus=[8])


def test_a_case_that_fails_is_a_row_with_its_error() -> None:
    """12 GPUs do not fill nodes of 8: the others go on, counts stay whole, sorting puts it last."""
    asked = numbers({**SMALL, "gpus": None, "strategy": "ddp"})
    found = co2sim.sweep(**asked, vary={"gpus": [16, 12, 8]}, sort="-step_time_s")
    assert found["gpus"].tolist() == [16, 8, 12]
    assert found["error"].isna().tolist() == [True, True, False]
    assert "12 GPUs do not fill nodes of 8" in found["error"].iloc[2]
    assert found["step_time_s"].isna().tolist() == [False, False, True]
    assert str(found["steps_per_round"].dtype) == "Int64"
    by_gpus = co2sim.sweep(**asked, vary={"gpus": [12, 8, 16]}, sort="gpus")
    assert by_gpus["gpus"].tolist() == [8, 16, 12]


@pytest.mark.slow
def test_a_killed_worker_costs_its_case_and_no_other() -> None:
    """Whatever was done before and comes after is there, in order; the dead one is named."""
    strategies = ["ddp", "zero3", Deadly(), "zero1", "co2.published:tau=2", Deadly(), "zeropp"]
    cases = [Question(**SMALL, strategy=strategy) for strategy in strategies]
    outcomes = run_all.run_all(cases, 2)
    dead = [isinstance(outcome, run_all.Failure) for outcome in outcomes]
    assert dead == [False, False, True, False, False, True, False]
    failure = outcomes[2]
    assert isinstance(failure, run_all.Failure)
    assert failure.case == "deadly on 16 GPUs of a100-tcp80"
    assert "its process was killed" in failure.reason
    alive = [case for case, died in zip(cases, dead, strict=True) if not died]
    assert [o for o in outcomes if isinstance(o, co2sim.Result)] == [co2sim.run(c) for c in alive]


SCRIPT = """
from dataclasses import dataclass
import co2sim

@dataclass(frozen=True)
class Mine:
    name = "mine"
    def schedule(self, job, layout):
        return co2sim.DDP().schedule(job, layout)
    def memory(self, job, layout):
        return co2sim.DDP().memory(job, layout)

print("once")
vary = {"strategy": [Mine(), co2sim.DDP()]}
found = co2sim.sweep("a100-tcp80", "gpt2-small", gpus=16, vary=vary, jobs=2, progress=False)
print(*found["strategy"], found["step_time_s"].nunique())
"""


@pytest.mark.slow
def test_a_script_of_a_user_runs_on_several_processes_as_it_is(tmp_path: Path) -> None:
    """No `if __name__` is needed, and strategies that the script defines reach the workers."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, tmp_path / "mine.py"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["once", "mine ddp 1"]
    assert ran.stderr == ""


def test_there_are_never_more_processes_than_cases_or_two_per_core() -> None:
    """`--jobs 3000` for 2 cases is 2 processes; for 3000 cases, two per core."""
    cores = joblib.cpu_count()
    assert processes(3000, 2) == min(2, 2 * cores)
    assert processes(3000, 3000) == 2 * cores
    assert processes(-1, 3000) == cores
    assert processes(5, 1) == processes(1, 5) == 1


@given(st.text("a,()", max_size=20))
def test_values_are_split_at_commas_outside_parentheses(text: str) -> None:
    """As a regular expression says it, which takes quadratic time."""
    assert convert.outside_parentheses(text.split(",")) == re.split(r",(?![^(]*\))", text)


# --- beside one node --------------------------------------------------------------------------


CASE = Question(cluster="a100-tcp80", model="gpt2-small", strategy="zero2", gpus=64)


def test_one_node_is_the_measure_though_it_is_none_of_the_cases() -> None:
    """64 GPUs among 32 and 64 that wait are no 100 %: it is what `solve` calls efficiency."""
    cases = [replace(CASE, gpus=32), CASE]
    found = efficiencies(cases, [driver.run(case) for case in cases])
    target, axis = target_of("efficiency=50%"), axis_of(CASE, "gpus", "32", "64")
    (solved,) = [solve(CASE, axis, target, tokens=None)]
    known = dict(solved.points)
    values = [one.value for one in found if one is not None]
    assert values == [pytest.approx(known[32]), pytest.approx(known[64])]
    assert values[1] < 0.9


def test_what_cannot_run_on_one_node_has_no_efficiency() -> None:
    """A global batch of 12 does not divide by 8 GPUs."""
    case = replace(CASE, gpus=4, global_batch=12)
    assert efficiencies([case], [driver.run(case)]) == [None]
