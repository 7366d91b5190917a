"""What only a GPU can show: CUDA streams, events and NCCL. Skipped, with the reason, elsewhere."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT
from ranks import on_ranks
from tiny import VARIANTS

from co2sim.catalog import load_cluster
from co2sim.hardware.cluster import GPU

torch = pytest.importorskip("torch")

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="there is no CUDA device"),
]
CATALOG = ("dgx2-ib1", "p4d.24xlarge", "dgx-h100", "dgx-h200", "dgx-b200")
"""Clusters of all GPUs of NVIDIA for training that we know."""
several = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices, there are {GPUS}")


def test_every_strategy_runs_on_one_gpu_and_breaks_no_rule() -> None:
    """Streams wait for each other's events: own events show it."""
    variants = [text for text in VARIANTS if "node" not in text]
    (found,) = on_ranks("all_strategies", 1, backend="nccl", variants=variants)
    assert found == [[text] for text in variants]


def test_streams_of_a_gpu_run_at_the_same_time() -> None:
    """Two kernels of 0.2 s on two streams end together; what waits for both starts then."""
    (found,) = on_ranks("gpu_overlap", 1, backend="nccl")
    spans = {op: (start, end) for op, start, end in found}
    for name in ("a", "b"):
        start, end = spans[name]
        assert end - start == pytest.approx(0.2, rel=0.1)
    assert spans["a"][0] < spans["b"][1]
    assert spans["b"][0] < spans["a"][1]
    assert spans["c"][0] >= max(spans["a"][1], spans["b"][1]) - 1e-5


@several
def test_nccl_collectives_give_what_a_single_process_computes() -> None:
    """Every kind, type and size over NCCL, against a process that knows all inputs."""
    assert on_ranks("collectives", 2, backend="nccl") == [[]] * 2


@several
def test_every_strategy_runs_over_nccl_and_breaks_no_rule() -> None:
    """Unchanged schedules, two GPUs, in checking mode."""
    found = on_ranks("all_strategies", 2, backend="nccl", variants=VARIANTS)
    for rank in range(2):
        assert found[rank] == [[text] for text in VARIANTS]


def rates(gpu: GPU) -> tuple[float, float]:
    """By its maker: fp16, in FLOP/s, and memory, in bytes/s."""
    return gpu.peak["fp16"], gpu.memory_bandwidth


def test_a_probed_gpu_is_as_fast_as_its_maker_says_and_no_faster(tmp_path: Path) -> None:
    """Products and memory; then DDP with real products runs, and is predicted from the probe."""

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "realrun", *arguments, "--nproc", "1", "--backend", "nccl"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("probe", "--quick", "--out", "gpu.toml")
    probed = load_cluster(str(tmp_path / "gpu.toml")).value.gpu
    assert probed.launch_overhead < 2e-5
    known = [load_cluster(name).value.gpu for name in CATALOG]
    if same := [gpu for gpu in known if gpu.generation == probed.generation]:
        fp16, memory = (max(v) for v in zip(*map(rates, same), strict=True))
        assert 0.4 < probed.peak["fp16"] / fp16 < 1.02
        assert 0.5 < probed.memory_bandwidth / memory < 1.02
    figures = json.loads(call("run", "-c", "gpu.toml", "-m", "gpt2-small", "-s", "ddp", "--json"))
    assert 0 < figures["mfu"] <= 1.2


def test_averages_over_nccl_run_beside_the_compute_stream() -> None:
    """On every wire, int8 on a stream of its own; what was waited is measured by events."""
    (found,) = on_ranks("averages", 1, backend="nccl", module="algorithm_workers")
    for error, waited in found:
        assert error < 1e-6
        assert 0 <= waited < 10


def test_a_host_that_runs_ahead_is_not_held_up() -> None:
    """Steps of 20 ms, issued at once: averages are there in time, and only they are waited for."""
    (found,) = on_ranks("ahead", 1, backend="nccl", module="algorithm_workers")
    for late, waited, longest in found:
        assert late == 0
        assert waited < 0.01
        assert longest < 0.02


def test_a_captured_step_is_refused() -> None:
    """A CUDA graph would replay the step, and not what comes after it."""
    (told,) = on_ranks("captured", 1, backend="nccl", module="algorithm_workers")
    assert "OptionError" in told
    assert "capture" in told


def test_algorithms_over_gloo_equal_their_published_equations_with_models_on_a_gpu() -> None:
    """Two processes that share the GPU: the cases of the CPU."""
    from test_local_update import CASES, expected, histories  # noqa: PLC0415 - a suite of its own

    cases = [{**case, "device": "cuda"} for case in CASES]
    answers = on_ranks("follow", 2, module="algorithm_workers", cases=cases)
    for index, given in enumerate(cases):
        wanted = expected(given, 2, [])
        assert abs(histories(answers, index) - wanted).max() < 1e-4, given


def test_offloaded_vectors_take_no_memory_of_the_gpu() -> None:
    """They are in pinned host memory, and the model learns the same, bit for bit."""
    for alone, away, same in on_ranks("offloaded", 2, module="algorithm_workers"):
        assert same
        assert alone >= 12
        assert away < 1


def test_a_stream_is_held_as_long_as_asked() -> None:
    """For 5 ms, whatever the clock rate: after a second of idling, and after matrix products."""
    from realrun.execute.cuda_streams import hold  # noqa: PLC0415 - needs a GPU

    a = torch.randn(4096, 4096, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    hold(0.0)
    torch.cuda.synchronize()
    time.sleep(1.0)
    for start, end in (events[:2], events[2:]):
        start.record()
        hold(0.005)
        end.record()
        for _ in range(100):
            a @ a
    torch.cuda.synchronize()
    for start, end in (events[:2], events[2:]):
        assert start.elapsed_time(end) == pytest.approx(5.0, rel=0.1)


@several
def test_algorithms_over_nccl_equal_their_published_equations() -> None:
    """The cases of the CPU, with models on two GPUs."""
    from test_local_update import CASES, expected, histories  # noqa: PLC0415 - a suite of its own

    answers = on_ranks(
        "follow", 2, backend="nccl", gpus_per_node=2, module="algorithm_workers", cases=CASES
    )
    for index, given in enumerate(CASES):
        wanted = expected(given, 2, [])
        assert abs(histories(answers, index) - wanted).max() < 1e-4, given


@several
def test_a_rank_that_is_late_over_nccl_is_a_rank_failure() -> None:
    """The other one raises it after the deadline, and is not ended by NCCL's watchdog."""
    first, _ = on_ranks("late", 2, backend="nccl", module="algorithm_workers", dtypes=["fp32"])
    assert first[0]["told"].startswith("RankFailure")


@several
def test_qgz_gives_the_mean_over_nccl() -> None:
    """The reduction of ZeRO++ on two GPUs as one node and as two, with Triton if it is there."""
    for answers in on_ranks("means", 2, backend="nccl", module="zeropp_workers", layouts=[1, 2]):
        for found in answers:
            assert found["nearest"] == pytest.approx(1.0, abs=0.01)
            assert found["stochastic"] == pytest.approx(1.0, abs=0.01)
            assert found["nearest error"] <= found["bound"]
            assert found["summed"] == pytest.approx(2.0, rel=0.01)
