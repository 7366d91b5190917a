"""`realrun run` as users call it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Command, python
from ranks import TWO_RANKS, realrun_on_ranks

pytest.importorskip("torch")

from co2sim import Layout, Question
from co2sim.prediction import driver
from realrun import record

RUN = ("run", "-c", "cluster.toml", "-m", "tiny-5m", "--rounds", "2", "--kernels", "sleep")


@pytest.mark.dist
def test_strategies_run_one_after_the_other_and_leave_records(tmp_path: Path) -> None:
    """JSON holds the keys of `co2sim run --json`; sleep kernels take the simulated time."""
    (tmp_path / "cluster.toml").write_text(TWO_RANKS)
    done = realrun_on_ranks(
        tmp_path, 2, *RUN, *["-s", "ddp", "-s", "co2.published:tau=2", "--check", "--json"]
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    predicted = driver.run(
        Question(cluster=str(tmp_path / "cluster.toml"), model="tiny-5m", strategy="ddp")
    )
    for found in figures:
        assert found.keys() == predicted.to_dict().keys()
    assert [found["strategy"] for found in figures] == ["ddp", "co2.published(tau=2)"]
    kept = record.read(tmp_path / "out" / "ddp")
    assert kept.figures == figures[0]
    assert kept.trace.ranks == {0: 1, 1: 1}
    assert all(found["exposed_comm_s"] <= found["comm_busy_s"] for found in figures)
    assert figures[0]["round_time_s"] >= predicted.round_time_s - predicted.exposed_comm_s
    assert json.loads((tmp_path / "out" / "ddp" / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("strategy", "missing"), [("co2", "tau and delay"), ("co2:tau=3", "delay")]
)
def test_numbers_to_be_chosen_are_refused(
    realrun: Command, tmp_path: Path, strategy: str, missing: str
) -> None:
    """Before a rank starts, on a line that says what is missing."""
    (tmp_path / "cluster.toml").write_text(TWO_RANKS)
    words = ("run", "-s", "ddp", "-s", strategy)
    code, out, err = realrun(*words, "-c", "cluster.toml", "-m", "tiny-5m")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"numbers for {missing}: `co2sim run`" in err


@pytest.mark.parametrize("rounds", [1, 7])
def test_what_a_run_will_take_is_said_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rounds: int
) -> None:
    """On one rank nothing but computing takes time: as long as so many simulated rounds."""
    from realrun.cli import ranks  # noqa: PLC0415 - torch
    from realrun.measure import computing_time  # noqa: PLC0415 - torch

    (tmp_path / "cluster.toml").write_text(TWO_RANKS)
    case = Question(cluster=str(tmp_path / "cluster.toml"), model="tiny-5m", strategy="ddp")
    world: Any = SimpleNamespace(layout=Layout(1, 1), backend="gloo")
    simulated = driver.run(replace(case, gpus=1, overrides={"gpu.launch_overhead": "0 s"}))
    expected = computing_time(case, world, rounds)
    assert expected == pytest.approx((rounds + 1) * simulated.round_time_s, rel=0.05)
    for limit, said in ((0.9 * expected, "ddp: computing alone takes about"), (2 * expected, "")):
        monkeypatch.setattr(ranks, "_NEWS", limit)
        ranks._foretell(case, world, rounds)
        assert capsys.readouterr().err.startswith(said)
        assert bool(said) == (expected > limit)


def test_the_first_news_comes_when_it_is_due(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while the work that it is about goes on: a timer says it, and it is said once.

    The clock and the timer are the test's, so that a slow machine changes nothing.
    """
    from realrun.cli import ranks  # noqa: PLC0415 - torch

    clock = SimpleNamespace(now=100.0, due=[])
    timer = SimpleNamespace(start=lambda: None, cancel=clock.due.clear)

    def later(seconds: float, what: Callable[[], object]) -> SimpleNamespace:
        clock.due.append((clock.now + seconds, what))
        return timer

    def at(now: float) -> str:
        clock.now = now
        for due, what in list(clock.due):
            if due < now:
                clock.due.remove((due, what))
                what()
        return capsys.readouterr().err

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(ranks, "Timer", later)
    monkeypatch.setattr(ranks, "_NEWS", 5.0)
    say = ranks.news()
    say("round 1 of 3")
    assert at(104.9) == ""
    assert at(105.1) == "round 1 of 3\n"
    say("round 2 of 3")
    assert at(110.0) == ""
    clock.now = 110.2
    say("round 3 of 3")
    assert at(120.0) == "round 3 of 3\n"
    assert at(200.0) == ""


@pytest.mark.dist
def test_real_matrix_products_run(tmp_path: Path) -> None:
    """Flops kernels on one rank, which the command starts: a trace, no communication, a speed."""
    (tmp_path / "cluster.toml").write_text(TWO_RANKS)
    case = "run -c cluster.toml -m tiny-5m -s ddp --rounds 1 --nproc 1 --json"
    kernels = "--kernels flops --precision fp32 --set model.seq_len=64"
    done = python(tmp_path, "-m", "realrun", *case.split(), *kernels.split())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["overlap_ratio"] is None
    kept = json.loads((tmp_path / "out" / "ddp" / "run.json").read_text())
    assert 1e8 < kept["product_speed"] < 1e14  # FLOP/s of one core, however slow or fast


@pytest.mark.dist
@pytest.mark.parametrize("asked", ["precision=fp8", "offload=optimizer", "quantize_base=nf4"])
def test_what_is_predicted_only_is_not_run_as_real_products(asked: str, tmp_path: Path) -> None:
    """Products in fp8, an optimizer of the host, weights in 4 bits: nothing is written."""
    name, _, value = asked.partition("=")
    option = f"--{name.replace('_', '-')}"
    case = ("run", "-c", "dgx-h100", "-m", "tiny-5m", "-s", "ddp", "--lora", "4", option, value)
    done = realrun_on_ranks(tmp_path, 1, *case, "--kernels", "flops")
    assert done.returncode == 2
    assert f"{asked} is predicted only" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.dist
def test_adapters_are_run_as_they_are_simulated(tmp_path: Path) -> None:
    """All weights are gathered, and gradients of adapters alone reduced; the record says so."""
    asked = ("run", "-c", "dgx-h100", "-m", "tiny-5m", "-s", "fsdp", "--lora", "4", "--rounds", "1")
    done = realrun_on_ranks(tmp_path, 2, *asked, "--kernels", "flops", "--set", "model.seq_len=64")
    assert done.returncode == 0, done.stderr
    kept = record.read(tmp_path / "out" / "fsdp")
    assert kept.case.lora == 4
    sent = kept.figures["sent_bytes_per_gpu_per_step"]
    assert sent["reduce_scatter world"] == kept.figures["trained_parameters"] * 4 / 2
    assert sent["all_gather world"] > 10 * sent["reduce_scatter world"]
