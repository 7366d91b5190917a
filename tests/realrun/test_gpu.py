"""What only a GPU can show: CUDA streams, events and NCCL. Skipped, with the reason, elsewhere."""

import json
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from commands import python
from ranks import on_ranks, ranked
from tiny import VARIANTS

from co2sim.catalog import load_cluster
from co2sim.schedule.schedule import After, Compute, Op, Schedule

pytest.importorskip("torch")

import torch
from local_problem import co2_of, network, optimizer, said, slopes, train, vector
from torch import distributed as dist
from torch import nn

from realrun.execute.world import World

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="there is no CUDA device"),
]
CATALOG = ("dgx2-ib1", "p4d.24xlarge", "dgx-h100", "dgx-h200", "dgx-b200")
"""Clusters of all GPUs of NVIDIA for training that we know."""
several = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices, there are {GPUS}")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=several)])
def test_every_strategy_runs_and_breaks_no_rule(gpus: int) -> None:
    """Unchanged schedules, in checking mode: streams wait for each other's events."""
    variants = [text for text in VARIANTS if gpus > 1 or "node" not in text]
    on_ranks("all_strategies", gpus, backend="nccl", variants=variants)


@ranked(1, backend="nccl")
def test_streams_of_a_gpu_run_at_the_same_time(world: World) -> None:
    """Two kernels of 0.2 s on two streams end together; what waits for both starts then."""
    from workers import execute, sleeping  # noqa: PLC0415 - needs torch

    nap, short = Compute("nap", 1.0), Compute("short", 1.0)
    body = (
        Op("a", nap, "one"),
        Op("b", nap, "two"),
        Op("c", short, "three", (After("a"), After("b"))),
    )
    trace = execute(Schedule("two", body), sleeping(world, {nap: 0.2, short: 0.001}), 2, world)
    spans = {span.op: (span.start, span.end) for span in trace.spans if span.round == 1}
    for name in ("a", "b"):
        start, end = spans[name]
        assert end - start == pytest.approx(0.2, rel=0.1)
    assert spans["a"][0] < spans["b"][1]
    assert spans["b"][0] < spans["a"][1]
    assert spans["c"][0] >= max(spans["a"][1], spans["b"][1]) - 1e-5


@several
def test_nccl_collectives_give_what_a_single_process_computes() -> None:
    """Every kind, type and size over NCCL, against a process that knows all inputs."""
    on_ranks("collectives", 2, backend="nccl")


def test_a_probed_gpu_is_as_fast_as_its_maker_says_and_no_faster(tmp_path: Path) -> None:
    """Products and memory; then DDP with real products runs, and is predicted from the probe."""

    def call(*arguments: str) -> str:
        alone = ("--nproc", "1", "--backend", "nccl")
        done = python(tmp_path, "-m", "realrun", *arguments, *alone)
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("probe", "--quick", "--out", "gpu.toml")
    probed = load_cluster(str(tmp_path / "gpu.toml")).value.gpu
    assert probed.launch_overhead < 2e-5
    known = [load_cluster(name).value.gpu for name in CATALOG]
    if same := [gpu for gpu in known if gpu.generation == probed.generation]:
        fp16 = max(gpu.peak["fp16"] for gpu in same)
        memory = max(gpu.memory_bandwidth for gpu in same)
        assert 0.4 < probed.peak["fp16"] / fp16 < 1.02
        assert 0.5 < probed.memory_bandwidth / memory < 1.02
    figures = json.loads(call("run", "-c", "gpu.toml", "-m", "gpt2-small", "-s", "ddp", "--json"))
    assert 0 < figures["mfu"] <= 1.2


@ranked(1, backend="nccl")
def test_averages_over_nccl_run_beside_the_compute_stream(world: World) -> None:
    """On every wire, int8 on a stream of its own; what was waited is measured by events."""
    from realrun.algorithms.averaging import (  # noqa: PLC0415 - needs torch
        Average,
        Stopwatch,
        beside_training,
    )
    from realrun.algorithms.process_groups import Wire  # noqa: PLC0415 - as above

    for wire in get_args(Wire):
        average = Average(dist.group.WORLD, wire, 10.0, 4 * 300_000)
        values = torch.full((1_000_001,), world.rank + 1.0, device=world.device)
        flight = average.launch(values, 0)
        clock = Stopwatch(values.device)
        with beside_training(flight):
            flight.wait()
        clock.stop()
        assert 0 <= clock.seconds() < 10
        assert (values - (dist.get_world_size() + 1) / 2).abs().max() < 1e-6
        average.close()


@pytest.mark.parametrize(
    "options", [{}, {"delay": 2}, {"delay": 2, "fragments": 2, "dtype": "int8"}]
)
@ranked(1, backend="nccl")
def test_a_host_that_runs_ahead_is_not_held_up(world: World, options: dict[str, Any]) -> None:
    """Steps of 20 ms, issued at once: averages are there in time, and only they are waited for.

    Of the host, which issues a round while the GPU works on it.
    """
    from realrun.algorithms.averaging import Average  # noqa: PLC0415 - needs torch
    from realrun.execute.cuda_streams import hold  # noqa: PLC0415 - needs a GPU

    model = network().to(world.device)
    optim = optimizer(model, "sgd")
    with co2_of(model, optim, tau=4, **options) as co2:
        wire = options.get("dtype", "fp32")
        co2._outer.average = Average(dist.group.WORLD, wire, 10.0, 2**20)
        for step in range(24):
            if step == 12:  # what is done for the first time takes longer
                before = co2.stats()
            slopes(model, world.rank, step)
            if step >= 12:
                hold(0.02)
            start = time.perf_counter()
            optim.step()
            assert not 12 <= step < 16 or time.perf_counter() - start < 0.02
        stats = co2.stats()
        assert stats.late == before.late
        assert stats.waited - before.waited < 0.01


@ranked(1, backend="nccl")
def test_a_captured_step_is_refused(world: World) -> None:
    """A CUDA graph would replay the step, and not what comes after it."""
    model = network().to(world.device)
    optim = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
    algorithm = co2_of(model, optim, tau=2)
    train(model, optim, world.rank, range(4))

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optim.step()

    heard = said(capture)
    algorithm.close()
    assert heard.startswith("OptionError")
    assert "capture" in heard


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cuda"), pytest.param("nccl", None, marks=several)]
)
def test_algorithms_equal_their_published_equations_with_models_on_gpus(
    backend: str, device: str | None
) -> None:
    """The cases of the CPU: two processes that share a GPU over Gloo, and two GPUs over NCCL."""
    from reference_local_update import expected  # noqa: PLC0415 - needs torch
    from test_local_update import CASES, histories  # noqa: PLC0415 - a suite of its own

    cases = [case | ({"device": device} if device else {}) for case in CASES]
    answers = on_ranks("follow", 2, backend=backend, module="test_local_update", cases=cases)
    for index, problem in enumerate(cases):
        assert abs(histories(answers, index) - expected(problem, 2)).max() < 1e-4, problem


@ranked(2)
def test_offloaded_vectors_take_no_memory_of_the_gpu(world: World) -> None:
    """They are in pinned host memory, and the model learns the same, bit for bit."""
    kept, models = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(1024, 1024).cuda()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        before = torch.cuda.memory_allocated()
        with co2_of(model, optim, tau=2, offload=offload) as co2:
            kept.append((torch.cuda.memory_allocated() - before) / 1024**2)  # bytes a parameter
            for step in range(6):
                x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step + world.rank))
                optim.zero_grad()
                model(x.cuda()).square().mean().backward()
                optim.step()
            co2.finish()
        models.append(vector(model))
    assert torch.equal(*models)
    assert kept[0] >= 12
    assert kept[1] < 1


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
@ranked(2, backend="nccl")
def test_a_rank_that_is_late_over_nccl_is_a_rank_failure(world: World) -> None:
    """The other one raises it after the deadline, and is not ended by NCCL's watchdog.

    Rank 1 is late in round 2, until the other has given up.
    """
    deadline, store = 2.0, dist.distributed_c10d._get_default_store()
    model = network().to(world.device)
    optim = optimizer(model, "sgd")

    def go_on() -> None:
        with co2_of(model, optim, tau=2, timeout=deadline):
            for step in range(10):
                limit = time.monotonic() + 10 * deadline
                while step == 4 and world.rank and time.monotonic() < limit:
                    if store.add("gave up", 0):
                        break
                    time.sleep(0.05)
                train(model, optim, world.rank, range(step, step + 1))

    heard = said(go_on)
    store.add("gave up", 1)
    assert world.rank or heard.startswith("RankFailure")
    dist.barrier()


@several
@ranked(2, backend="nccl")
def test_qgz_gives_the_mean_over_nccl(world: World) -> None:
    """The reduction of ZeRO++ on two GPUs as one node and as two, with Triton if it is there."""
    from test_zeropp import mean_by_qgz  # noqa: PLC0415 - a suite of its own

    mean_by_qgz(world, [1, 2])
