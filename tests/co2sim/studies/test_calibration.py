"""`co2sim calibrate`: a stack of one's own from measured runs, and what predictions with it say."""

import gzip
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA

from co2sim.catalog import load_stack
from co2sim.common.errors import CatalogError, OptionError
from co2sim.prediction import driver
from co2sim.prediction.intervals import (
    setting_of,
)
from co2sim.prediction.question import Question
from co2sim.studies.calibration import NUMBERS, calibrate, kernel_seconds, moved, stack_file
from co2sim.studies.measured_runs import (
    MeasuredRun,
    Profile,
    measured_runs,
    part_of_step,
    read_profile,
)
from co2sim.training.memory import GIB, reserved

JOB = Question(cluster="dgx-h100", model="llama3.2-1b", strategy="fsdp", micro_batch=2)
SIZES = (8, 32, 128)
SEQUENCE = 4096
TRUE = {"sustained": 0.7, "elementwise": 2.6, "ring_loss": 0.6, "call_overhead": 60e-6}
"""What a cluster might be like, each within a spread or two of what the catalog says."""


def true(case: Question) -> MeasuredRun:
    """A run as it would be measured there."""
    result = driver.run(moved(case, TRUE))
    return MeasuredRun("row", case, result.tokens_per_s_per_gpu)


def errors(cases: Sequence[Question], values: dict[str, float]) -> list[float]:
    """Of predictions with these values, from what would be measured."""
    found = []
    for case in cases:
        predicted = driver.run(moved(case, values)).tokens_per_s_per_gpu
        found.append(abs(predicted / true(case).tokens_per_s_per_gpu - 1))
    return found


# --- what it finds ------------------------------------------------------------------------------


def test_runs_that_are_predicted_already_change_nothing() -> None:
    """Each number stays what the stack and the cluster state."""
    result = driver.run(replace(JOB, gpus=16))
    run = MeasuredRun("row", replace(JOB, gpus=16), result.tokens_per_s_per_gpu)
    found = calibrate([run])
    for name, value in found.values.items():
        assert value == pytest.approx(found.before[name], rel=1e-3), name
    assert found.before["sustained"] == JOB.load()[0].value.gpu.products.sustained  # type: ignore[union-attr]


def test_runs_of_one_cluster_predict_its_other_runs() -> None:
    """From three sizes and one other batch to other sizes, batches and strategies there."""
    cases = [replace(JOB, gpus=size) for size in SIZES]
    known = [*cases, replace(JOB, gpus=8, micro_batch=1)]
    found = calibrate([true(case) for case in known])
    others = [
        replace(JOB, gpus=512),
        replace(JOB, gpus=64, micro_batch=2),
        replace(JOB, gpus=64, strategy="zero2"),
        replace(JOB, gpus=16, model="llama3-8b", micro_batch=1),
    ]
    before, after = (max(errors(others, values)) for values in (dict(found.before), found.values))
    assert before > 0.08
    assert after < before / 3


@given(st.floats(0.2, 5.0))
@settings(max_examples=10)
def test_numbers_stay_within_their_bounds(factor: float) -> None:
    """However far a measured run is off."""
    case = replace(JOB, gpus=16)
    speed = driver.run(case).tokens_per_s_per_gpu * factor
    found = calibrate([MeasuredRun("row", case, speed)])
    for one in NUMBERS:
        if one.name in found.values:
            assert one.least <= found.values[one.name] <= one.most
    worse, better = (
        abs(math.log(r[0].tokens_per_s_per_gpu / speed)) for r in (found.first, found.last)
    )
    assert better <= worse + 1e-9


def test_memory_says_what_a_layer_keeps() -> None:
    """As much more as was measured, and no other number moves."""
    case = replace(JOB, gpus=8)
    heavier = driver.run(moved(case, {"kept": 1.5}))
    run = MeasuredRun(
        "row", case, heavier.tokens_per_s_per_gpu, memory=reserved(heavier.memory_bytes_per_gpu)
    )
    found = calibrate([run])
    assert found.values["kept"] == pytest.approx(1.5, rel=0.02)
    assert found.values["elementwise"] == pytest.approx(found.before["elementwise"], rel=0.01)


def test_a_profile_tells_products_from_other_kernels() -> None:
    """A throughput alone cannot say which of the two is slow."""
    case = replace(JOB, gpus=8)
    parts = kernel_seconds(moved(case, TRUE))
    profile = Profile(1.0, parts.products, parts.attention, parts.elementwise, 0.0)
    run = replace(true(case), profile=profile)
    with_it, without = calibrate([run]).values, calibrate([true(case)]).values

    def off(values: Any) -> float:
        return max(
            abs(math.log(values[name] / TRUE[name])) for name in ("sustained", "elementwise")
        )

    assert off(with_it) < 0.8 * off(without)


def test_kernels_of_a_step_take_the_step_of_one_gpu() -> None:
    """Where nothing communicates and no host is slow, their sum is the simulated step."""
    case = replace(JOB, gpus=1, strategy="ddp", micro_batch=8, accumulation=2)
    case = replace(case, overrides={"stack.call_overhead": "0 s", "node_spread": "0"})
    parts = kernel_seconds(case)
    total = parts.products + parts.attention + parts.elementwise
    assert total == pytest.approx(driver.run(case).step_time_s, rel=1e-9)


@pytest.mark.parametrize("factor", [30, 1 / 30])
def test_a_speed_in_another_unit_is_refused(factor: float) -> None:
    """No run is so many times as fast as predicted, nor so slow."""
    case = replace(JOB, gpus=16)
    speed = driver.run(case).tokens_per_s_per_gpu * factor
    with pytest.raises(OptionError, match="is a mistake"):
        calibrate([MeasuredRun("row", case, speed)])


def test_a_slow_network_is_told_from_what_rings_lose() -> None:
    """Its efficiency moves, and a larger size is predicted as it would be measured."""
    slow = {"network_efficiency": 0.5}
    cases = [
        replace(JOB, gpus=size, overrides={"inter.bandwidth": "100 Gbit/s"}) for size in (8, 16, 64)
    ]
    runs = [
        MeasuredRun("row", case, driver.run(moved(case, slow)).tokens_per_s_per_gpu)
        for case in cases[:2]
    ]
    found = calibrate(runs)
    assert found.values["network_efficiency"] < 0.75
    predicted, measured = (
        driver.run(moved(cases[2], values)).tokens_per_s_per_gpu for values in (found.values, slow)
    )
    assert predicted == pytest.approx(measured, rel=0.15)


# --- the file, and predictions with it ----------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a stack that was calibrated by one run on 8 GPUs."""
    path = tmp_path_factory.mktemp("stack") / "own.toml"
    run = true(replace(JOB, gpus=8))
    path.write_bytes(stack_file(JOB, [run], calibrate([run]), "runs.csv"))
    return path


def test_the_file_predicts_as_the_calibration_did(own: Path) -> None:
    """To the four digits that it has, with the source of every number."""
    case = replace(JOB, gpus=8)
    found = calibrate([true(case)])
    result = driver.run(replace(case, stack=str(own)))
    assert result.tokens_per_s_per_gpu == pytest.approx(
        found.last[0].tokens_per_s_per_gpu, rel=1e-3
    )
    assert "calibrated by 1 run" in result.stack
    (measured,) = load_stack(str(own)).value.measured
    here = setting_of(replace(case, stack=str(own)).job(), result)
    close = {name: pytest.approx(getattr(here, name), rel=1e-3) for name in ("exposed", "host")}
    assert replace(measured, misfit=0.0, exposed=here.exposed, host=here.host) == here
    assert all(getattr(measured, name) == size for name, size in close.items())
    assert measured.misfit < 0.02


def _width(case: Question) -> float:
    result = driver.run(case)
    return result.tokens_per_s_high / result.tokens_per_s_low


def test_intervals_are_narrow_beside_the_measured_run(own: Path) -> None:
    """They widen with the distance, smoothly, up to those of other stacks."""
    sizes = (8, 16, 64, 512, 4096)
    with_it = [_width(replace(JOB, gpus=size, stack=str(own))) for size in sizes]
    without = [_width(replace(JOB, gpus=size)) for size in sizes]
    assert with_it == sorted(with_it)
    assert with_it[0] < without[0]
    assert all(one <= other * 1.03 for one, other in zip(with_it, without, strict=True))
    result = driver.run(replace(JOB, gpus=8, stack=str(own)))
    assert "calibrated" in result.interval_source


def test_runs_that_contradict_each_other_narrow_nothing(tmp_path: Path) -> None:
    """What is left of their errors is in the interval beside them."""
    case = replace(JOB, gpus=8)
    speed = driver.run(case).tokens_per_s_per_gpu
    runs = [MeasuredRun("row", case, speed * factor) for factor in (0.5, 1.5)]
    path = tmp_path / "own.toml"
    path.write_bytes(stack_file(JOB, runs, calibrate(runs), "runs.csv"))
    assert _width(replace(case, stack=str(path))) == pytest.approx(_width(case), rel=0.05)


@pytest.mark.parametrize(
    "changes", [{"cluster": "dgx-a100"}, {"strategy": "co2.published:tau=12,worker=node"}]
)
def test_another_gpu_and_local_steps_are_not_known_from_it(
    own: Path, changes: dict[str, Any]
) -> None:
    """Their interval is that of published runs."""
    result = driver.run(replace(JOB, gpus=16, stack=str(own), **changes))
    assert "published training runs" in result.interval_source


# --- rows and traces ----------------------------------------------------------------------------


def rows(folder: Path, text: str) -> list[MeasuredRun]:
    """Those of a file."""
    path = folder / "runs.csv"
    path.write_text(text)
    return measured_runs(path, replace(JOB, gpus=16))


def test_a_row_says_what_differs_from_the_command(tmp_path: Path) -> None:
    """And its speed in one of three ways, which are one."""
    first, second, third = rows(
        tmp_path,
        "# mine\n\nmodel,gpus,accumulation,tokens_per_s,step_time,tokens_per_s_per_gpu,memory_gib\n"
        "llama3-8b,64,,640000,,,\n,,2,,500 ms,,\n,,,,,12000,61.5\n",
    )
    assert (first.case.model, first.case.gpus) == ("llama3-8b", 64)
    assert first.tokens_per_s_per_gpu == 10_000
    assert (second.case.model, second.case.gpus) == ("llama3.2-1b", 16)
    assert second.tokens_per_s_per_gpu == 2 * 2 * SEQUENCE / 0.5
    assert (third.tokens_per_s_per_gpu, third.memory) == (12_000, 61.5 * GIB)


def test_a_step_counts_the_tokens_of_gpus_that_train_together_once(tmp_path: Path) -> None:
    """All of a group see the same samples."""
    text = "tp,cp,pp,step_time\n1,1,1,1 s\n2,1,4,1 s\n1,2,1,1 s\n"
    plain, divided, sequence = rows(tmp_path, text)
    assert divided.tokens_per_s_per_gpu == plain.tokens_per_s_per_gpu / 8
    assert sequence.tokens_per_s_per_gpu == plain.tokens_per_s_per_gpu / 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("gpu,tokens_per_s\n8,1\n", "unknown column 'gpu'"),
        ("gpus,step_time\n8\n", "line 2: 1 fields under 2 columns"),
        ("gpus\n8\n", "line 2: a row has one of"),
        ("gpus,step_time\n0,1 s\n", "line 2: gpus is 0; it must be 1 to"),
        ("gpus,tokens_per_s\n8,nan\n", "line 2: tokens_per_s is 'nan'"),
        ("gpus,tokens_per_s\n" + "8,1\n" * 201, "more than 200 rows"),
        ("gpus,tokens_per_s,model.seq_len\n8,1,long\n", "line 2: "),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, said: str) -> None:
    """With its line, and what is allowed."""
    with pytest.raises(CatalogError) as error:
        rows(tmp_path, text)
    assert said in str(error.value)


def gpu_event(
    name: str, ts: float, dur: float, *, cat: str = "kernel", **args: object
) -> dict[str, object]:
    """An event as the profiler writes it for the kernel, or the launch, of a process."""
    own = {"pid": args.pop("pid", 0), "tid": args.get("stream", 0)}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args, **own}


def profile_of(
    folder: Path, events: Sequence[dict[str, object]], name: str = "events.json"
) -> Profile:
    """What is read of a trace of these events, as PyTorch writes it; packed where its name says."""
    text = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "x"}, *events]})
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return read_profile(path)


EVENTS = [
    gpu_event("aten::mm", 0, 5, cat="cpu_op"),
    gpu_event("ProfilerStep#7", 0, 1000, cat="user_annotation"),
    gpu_event("ProfilerStep#7", 100, 5000, cat="gpu_user_annotation"),
    gpu_event("ProfilerStep#8", 1000, 1200, cat="user_annotation"),
    gpu_event("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 10, 600),
    gpu_event("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", 620, 200),
    gpu_event("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", 830, 100),
    gpu_event("void at::native::vectorized_elementwise_kernel<4, at::native::mul>", 940, 60),
    gpu_event("triton_poi_fused_add_0", 1000, 40),
    gpu_event("Memcpy DtoD (Device -> Device)", 1040, 100, cat="gpu_memcpy"),
    gpu_event(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 900, stream=1
    ),
]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_gives_the_kernels_of_a_step(tmp_path: Path, name: str) -> None:
    """By class, each divided by the steps that are marked; a step is the median of these."""
    found = profile_of(tmp_path, EVENTS, name)
    assert found == Profile(
        step=pytest.approx(1.1e-3),
        products=pytest.approx(0.4e-3),
        attention=pytest.approx(0.05e-3),
        elementwise=pytest.approx(0.1e-3),
        communication=pytest.approx(0.45e-3),
    )


def test_kernels_are_told_by_their_names() -> None:
    """Of libraries of NVIDIA and AMD, of compilers, of attention; copies of the host are none."""
    lines = (DATA / "kernels.txt").read_text().splitlines()
    named = [line.partition(": ")[::2] for line in lines if not line.startswith("#")]
    assert len(named) > 90
    assert [(part_of_step(name) or "none", name) for _, name in named] == named


STEP = gpu_event("ProfilerStep#3", 1000, 1000, cat="user_annotation")
NEXT = gpu_event("ProfilerStep#4", 2500, 1000, cat="user_annotation")
"""A step, and another after a gap; the times of both in us."""


def test_kernels_outside_of_marked_steps_are_left_out(tmp_path: Path) -> None:
    """Before the first, after the last, and in the gap between two."""
    inside = [gpu_event("nvjet_a", begin, 400, device=0) for begin in (1000, 1600, 2500, 3000)]
    outside = [gpu_event("nvjet_a", begin, 300, device=0) for begin in (0, 2050, 3600)]
    found = profile_of(tmp_path, [STEP, NEXT, *inside, *outside])
    assert found.products == pytest.approx(0.8e-3)
    with pytest.raises(CatalogError, match="no kernel of the trace is in a marked step"):
        profile_of(tmp_path, [STEP, NEXT, *outside])


def test_kernels_are_of_the_step_that_launched_them(tmp_path: Path) -> None:
    """A GPU is behind its host: kernels of the last step run after its mark ends."""
    launches = [
        gpu_event("cudaLaunchKernel", begin, 5, cat="cuda_runtime", correlation=number)
        for number, begin in enumerate((900, 1100, 1900, 2100))
    ]
    kernels = [
        gpu_event("nvjet_a", begin, 100, device=0, correlation=number)
        for number, begin in enumerate((1200, 1500, 2300, 2600))
    ]
    found = profile_of(tmp_path, [STEP, *launches, *kernels])
    assert found.products == pytest.approx(0.2e-3)


def test_communication_beside_computing_is_of_one_gpu(tmp_path: Path) -> None:
    """Streams overlap; together they may take longer than the step."""
    kernels = [
        gpu_event("nvjet_a", 1000, 950, device=3, stream=7),
        gpu_event("ncclDevKernel_AllGather", 1010, 900, device=3, stream=24),
        gpu_event("Memset (Device)", 1010, 300, cat="gpu_memset", device=3, stream=30),
    ]
    found = profile_of(tmp_path, [STEP, *kernels])
    assert found.products + found.communication == pytest.approx(1.85e-3)


@pytest.mark.parametrize(
    "second",
    [
        [gpu_event("nvjet_a", 1000, 700, device=1, stream=7)],
        [gpu_event("nvjet_a", 1000, 700, device=0, stream=7)],
    ],
    ids=["device", "stream that is too full"],
)
def test_a_trace_of_several_gpus_is_refused(
    tmp_path: Path, second: list[dict[str, object]]
) -> None:
    """By device, or by the time that a stream has."""
    first = gpu_event("nvjet_a", 1000, 700, device=0, stream=7)
    assert profile_of(tmp_path, [STEP, first]).products == pytest.approx(0.7e-3)
    with pytest.raises(CatalogError, match="give the trace of one process"):
        profile_of(tmp_path, [STEP, first, *second])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "no trace of PyTorch's profiler"),
        (b'{"traceEvents": []}', "no kernels of a GPU"),
        (b'[{"ph":"X","cat":"kernel","name":"gemm","ts":0,"dur":5}]', "no step in the trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """In one line."""
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(CatalogError, match=said):
        read_profile(path)


# --- the command --------------------------------------------------------------------------------


def test_the_command_writes_a_stack_that_run_takes(tmp_path: Path, own: Path, cli: Command) -> None:
    """Over one of its own, and prints the numbers and the runs, before and after."""
    (tmp_path / "runs.csv").write_text("gpus,tokens_per_s_per_gpu\n8,38000\n")
    batch = ("--micro-batch", "2", "--accumulation", "1")
    where = ("-c", "dgx-h100", "-m", "llama3.2-1b", "-s", "fsdp", *batch)
    out = str(shutil.copy(own, tmp_path / "mine.toml"))
    files = ("--runs", str(tmp_path / "runs.csv"), "--out", out)
    printed = json.loads(cli("calibrate", *where, *files, "--jobs", "1", "--json").out)
    assert [run["measured_tokens_per_s_per_gpu"] for run in printed["runs"]] == [38000]
    result = json.loads(cli("run", *where, "-g", "8", "--stack", out, "--json").out)
    assert result["tokens_per_s_per_gpu"] == pytest.approx(
        printed["runs"][0]["after_tokens_per_s_per_gpu"], rel=1e-3
    )
    assert abs(result["tokens_per_s_per_gpu"] / 38000 - 1) < 0.03
