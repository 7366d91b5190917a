"""`co2sim calibrate`: a stack of one's own from measured runs, and what predictions with it say."""

import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from hypothesis import given, settings
from hypothesis import strategies as st

from co2sim.catalog import load_cluster, load_stack
from co2sim.common.errors import CatalogError, OptionError
from co2sim.models.memory import GIB, reserved
from co2sim.prediction import driver
from co2sim.prediction.case import Case
from co2sim.prediction.intervals import (
    DistanceErrors,
    ErrorModel,
    Situation,
    distance,
    error_model,
    setting_of,
)
from co2sim.studies.calibration import NUMBERS, calibrate, kernel_seconds, moved, stack_file
from co2sim.studies.measured_runs import (
    MeasuredRun,
    Profile,
    measured_runs,
    part_of_step,
    read_profile,
)

JOB = Case(cluster="dgx-h100", model="llama3.2-1b", strategy="fsdp", micro_batch=2)
SIZES = (8, 32, 128)
SEQUENCE = 4096
TRUE = {"sustained": 0.7, "elementwise": 2.6, "ring_loss": 0.6, "call_overhead": 60e-6}
"""What a cluster might be like, each within a spread or two of what the catalog says."""


def true(case: Case) -> MeasuredRun:
    """A run as it would be measured there."""
    result = driver.run(moved(case, TRUE))
    return MeasuredRun("row", case, result.tokens_per_s_per_gpu)


def errors(cases: Sequence[Case], values: dict[str, float]) -> list[float]:
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


def test_one_run_scales_what_it_depends_on() -> None:
    """Then the run itself is nearly right, and what it does not depend on stays unsaid."""
    found = calibrate([true(replace(JOB, gpus=8))])
    assert max(errors([replace(JOB, gpus=8)], dict(found.values))) < 0.02
    assert "elementwise" in found.values
    assert "ring_loss" not in found.values  # of links that one node does not use
    assert found.determined["ring_loss"] == pytest.approx(0, abs=1e-9)


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

    assert off(with_it) < 0.12 < off(without)


def test_kernels_of_a_step_take_the_step_of_one_gpu() -> None:
    """Where nothing communicates and no host is slow, their sum is the simulated step."""
    case = replace(JOB, gpus=1, strategy="ddp", micro_batch=8, accumulation=2)
    case = replace(case, overrides={"stack.call_overhead": "0 s", "node_spread": "0"})
    parts = kernel_seconds(case)
    total = parts.products + parts.attention + parts.elementwise
    assert total == pytest.approx(driver.run(case).step_time_s, rel=1e-9)


def test_kernels_that_a_file_fixes_are_refused() -> None:
    """No stack changes them, so none can be calibrated there, nor on a processor that slept."""
    own = load_cluster("dgx-a100", {"gpu.kernels.gemm_efficiency": "0.6"}).value
    slept = load_cluster("dgx-a100", {"gpu": "virtual"}).value
    fixed = "no stack changes the kernels"
    for cluster, why in ((own, fixed), (slept, fixed), ("h100-3200g", "are fitted")):
        stack = "composer-2023" if why == "are fitted" else ""
        case = replace(JOB, cluster=cluster, gpus=8, stack=stack)
        with pytest.raises(OptionError, match=why):
            calibrate([MeasuredRun("row", case, 1e4)])


@pytest.mark.parametrize("factor", [30, 1 / 30])
def test_a_speed_in_another_unit_is_refused(factor: float) -> None:
    """No run is so many times as fast as predicted, nor so slow."""
    case = replace(JOB, gpus=16)
    speed = driver.run(case).tokens_per_s_per_gpu * factor
    with pytest.raises(OptionError, match="is a mistake"):
        calibrate([MeasuredRun("row", case, speed)])


@pytest.mark.parametrize("memory", [3500.0, 0.001])
def test_a_memory_in_another_unit_is_refused(memory: float) -> None:
    """It is not more than the GPU has, nor less than a tenth of a GiB."""
    case = replace(JOB, gpus=16)
    run = MeasuredRun("row", case, driver.run(case).tokens_per_s_per_gpu, memory * GIB)
    with pytest.raises(OptionError, match="memory_gib is"):
        calibrate([run])


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


def test_runs_may_differ_in_a_number_of_the_model(tmp_path: Path) -> None:
    """Such as the length of sequences."""
    (one, other) = rows(tmp_path, "model.seq_len,step_time\n2048,1 s\n8192,1 s\n")
    assert other.tokens_per_s_per_gpu == 4 * one.tokens_per_s_per_gpu


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
    here = _setting(replace(case, stack=str(own)))
    assert replace(measured, misfit=0.0, kernels="") == here
    assert measured.misfit < 0.02


def _setting(case: Case) -> Any:
    cluster, model = case.load()
    return setting_of(cluster.value, model.value, driver.run(case))


def test_what_a_user_sets_stays_set(own: Path) -> None:
    """A number of the cluster that is overridden is not that of the stack."""
    name, path = "gpu.products.sustained", str(own)
    case = replace(JOB, gpus=8, stack=path, overrides={name: "0.5"})
    assert case.load()[0].value.gpu.products.sustained == 0.5  # type: ignore[union-attr]
    case = replace(JOB, gpus=8, stack=path)
    assert case.load()[0].value.gpu.products.sustained == load_stack(path).value.sustained  # type: ignore[union-attr]


def _width(case: Case) -> float:
    result = driver.run(case)
    assert result.tokens_per_s_low is not None
    assert result.tokens_per_s_high is not None
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
    "changes",
    [
        {"cluster": "dgx-a100"},
        {"strategy": "co2.published:tau=12,worker=node"},
    ],
)
def test_another_gpu_and_local_steps_are_not_known_from_it(
    own: Path, changes: dict[str, Any]
) -> None:
    """Their interval is that of published runs."""
    result = driver.run(replace(JOB, gpus=16, stack=str(own), **changes))
    assert "published training runs" in result.interval_source


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": {"inter.bandwidth": "25 Gbit/s"}},
        {"attention": "eager"},
        {"recompute": "full"},
    ],
)
def test_other_networks_and_kernels_are_farther(tmp_path: Path, changes: dict[str, Any]) -> None:
    """So intervals are wider than for the same run on what was measured."""
    case = replace(JOB, gpus=16)
    path = tmp_path / "own.toml"
    path.write_bytes(stack_file(JOB, [true(case)], calibrate([true(case)]), "runs.csv"))
    here = replace(case, stack=str(path))
    assert _width(replace(here, **changes)) > _width(here) * 1.01


@given(st.floats(0, 20), st.floats(0, 20))
def test_no_distance_makes_an_interval_wider_than_errors_of_others(
    one: float, other: float
) -> None:
    """And a farther run never narrows it."""
    model = ErrorModel(
        {"any": 0.1}, 1.6, (), DistanceErrors(any=0.03, apart=0.02, factor=2, runs=9)
    )

    class Alone(Situation):
        parts = {"any": 1.0}  # noqa: RUF012

    near, far = (
        model.reach(Alone(exposed=0, nodes=1, divided=1, host=0, apart=apart))
        for apart in sorted((one, other))
    )
    assert near <= far <= 1.6 * 0.1 + 1e-12


def test_the_catalog_knows_errors_of_runs_predicted_from_one() -> None:
    """`co2analysis runs --fit` wrote them; see docs/stacks.md."""
    own_errors = error_model().own
    assert own_errors is not None
    assert own_errors.runs > 100
    assert 0 < own_errors.any < 0.1


@given(st.integers(1, 10), st.integers(1, 10))
def test_a_distance_is_that_back(more: int, tokens: int) -> None:
    """Nothing from itself, and twice as many GPUs are half as far as twice the parameters."""
    here = _setting(replace(JOB, gpus=8))
    there = replace(here, gpus=8 * more, tokens=here.tokens * tokens)
    expected = pytest.approx(0.5 * math.log2(more) + 0.5 * math.log2(tokens))
    assert distance(here, there) == expected
    assert distance(there, here) == expected


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


def test_a_step_counts_the_tokens_of_gpus_that_train_together_once(
    tmp_path: Path,
) -> None:
    """All of a group see the same samples."""
    text = "tp,cp,pp,step_time\n1,1,1,1 s\n2,1,4,1 s\n1,2,1,1 s\n"
    plain, divided, sequence = rows(tmp_path, text)
    assert divided.tokens_per_s_per_gpu == plain.tokens_per_s_per_gpu / 8
    assert sequence.tokens_per_s_per_gpu == plain.tokens_per_s_per_gpu / 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("gpus,tokens_per_s\n", "no rows"),
        ("gpu,tokens_per_s\n8,1\n", "unknown column 'gpu'"),
        ("gpus,gpus,step_time\n8,8,1\n", "column gpus stands there twice"),
        ("gpus,step_time\n8\n", "line 2: 1 fields under 2 columns"),
        ("gpus\n8\n", "line 2: a row has one of"),
        ("tokens_per_s,step_time\n8,1 s\n", "line 2: a row has one of"),
        ("gpus,step_time\n0,1 s\n", "line 2: gpus is 0; it must be 1 to"),
        ("gpus,step_time\n8,-1 s\n", "line 2: step_time is '-1 s'; it must be above 0 s"),
        ("gpus,tokens_per_s\n8,nan\n", "line 2: tokens_per_s is 'nan'"),
        ("gpus,tokens_per_s,memory_gib\n8,1,none\n", "line 2: memory_gib is 'none'"),
        ("gpus,tokens_per_s,model\n8,1,gpt9\n", "line 2: unknown model"),
        ("trace\nmissing.json\n", "cannot read"),
        ("gpus,tokens_per_s\n" + "8,1\n" * 201, "more than 200 rows"),
        ("gpus;tokens_per_s\n8;1\n", "by commas, not by semicolons"),
        ('gpus,tokens_per_s\n"8,1\n', "line 2: unexpected end of data"),
        ("stack,tokens_per_s\nxla,1\n", "all rows share --stack"),
        ("gpus,tokens_per_s,model.seq_len\n8,1,long\n", "line 2: "),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, said: str) -> None:
    """With its line, and what is allowed."""
    with pytest.raises(CatalogError) as error:
        rows(tmp_path, text)
    assert said in str(error.value)


EVENTS = [
    ("cpu_op", "aten::mm", 0, 5),
    ("user_annotation", "ProfilerStep#7", 0, 1000),
    ("gpu_user_annotation", "ProfilerStep#7", 100, 5000),
    ("user_annotation", "ProfilerStep#8", 1000, 1200),
    ("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 10, 600),
    ("kernel", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", 620, 200),
    ("kernel", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", 830, 100),
    ("kernel", "void at::native::vectorized_elementwise_kernel<4, at::native::mul>", 940, 60),
    ("kernel", "triton_poi_fused_add_0", 1000, 40),
    ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1040, 100),
    ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 900),
]


def trace(path: Path, events: Sequence[tuple[str, str, float, float]] = EVENTS) -> Path:
    """A file as PyTorch's profiler writes it, as far as it is read; packed where its name says."""
    made = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in events
    ]
    text = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "x"}, *made]})
    packed = gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
    path.write_bytes(packed)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_gives_the_kernels_of_a_step(tmp_path: Path, name: str) -> None:
    """By class, each divided by the steps that are marked; a step is the median of these."""
    found = read_profile(trace(tmp_path / name))
    assert found == Profile(
        step=pytest.approx(1.1e-3),
        products=pytest.approx(0.4e-3),
        attention=pytest.approx(0.05e-3),
        elementwise=pytest.approx(0.1e-3),
        communication=pytest.approx(0.45e-3),
    )


KERNEL_NAMES = {
    "products": (
        # cuBLAS, CUTLASS, cuDNN, DeepGEMM, Triton, TorchInductor
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "ampere_sgemm_128x64_tn",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NTT",
        "nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNN",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, float, 128, 16, 4, 4, false>(float)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3>",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>>>",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u, 128u, 128u>(float*)",
        "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>(int)",
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
        "void cudnn::cnn::implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1>(int)",
        "_grouped_mm_kernel",
        "matmul_kernel",
        "fused_moe_kernel",
        "triton_mm",
        "triton_tem_fused_addmm_3",
        "triton_tem_fused__grouped_mm_5",
        "triton_tem_fused__scaled_mm_native_layer_norm_gelu_1",
        "triton_tem_fused_convolution_0",
        # hipBLASLt, rocBLAS, Composable Kernel, AITER
        "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB0_AFC1.kd",
        "Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1",
        "void rocblas_gemvn_kernel<64, 16, long, float, float const*, float>(int, int)",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<ck::tensor_layout>>",
        "void ck_tile::kentry<256, 1, ck_tile::GroupedGemmKernel<ck_tile::TilePartitioner>>",
        "_ZN5aiter42bf16gemm_fp32bf16_tn_96x64_pf3_splitkE",
    ),
    "attention": (
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>",
        "void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8, 4, 4, 4>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>",
        "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<cute::C<128>>>>",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel",
        "cudnn_generated_fort_native_sdpa_sm80_flash_bprop_f16_knob_3_64x64x64_4x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<false, __nv_bfloat16, 128>(int)",
        "void cudnn::fusion::convert_dq_to_16bits<false, __nv_bfloat16, float, 256>(int)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>)",
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_attention_backward_zeros_7",
        "attn_fwd",
        "attn_fwd.kd",
        "attn_fwd-Sig-F__bf16@16_128_T_F_0_1__P__0_2_128_64_True__CO__wave2_warp4_stg1",
        "bwd_kernel_dk_dv",
        "bwd_kernel_dq",
        "bwd_kernel_fuse",
        "bwd_preprocess_varlen",
        "_bwd_preprocess_do_o_dot",
        "_fwd_kernel",
        "_attn_bwd_dkdv",
        "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVS>>",
        "void ck_tile::kentry<256, 1, ck_tile::FmhaBwdDQDKDVKernel<ck_tile::BlockGemm>>",
        "void ck_tile::kentry<256, 2, ck_tile::FmhaBwdConvertQGradKernel<ck_tile::Pipeline>>",
        "_ZN5aiter34fmha_bwd_hd128_bf16_a32_rtz_psskddvE",
    ),
    "elementwise": (
        "triton_poi_fused_mm_mul_4",
        "triton_red_fused__scaled_dot_product_flash_attention_add_5",
        "triton_per_fused__to_copy_addmm_native_layer_norm_backward_12",
        "triton_for_fused_bmm_0",
        "triton_poi_fused_all_gather_into_tensor_wait_tensor_2",
        "triton_poi_fused_flex_attention_backward_1",
        "triton_fused_addmm_view_7",
        "triton__0d1d2de",
        "void at::native::vectorized_elementwise_kernel<4, at::native::sdpa_gemm_functor<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormOps>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::Adam<mm>>",
        "void at::native::(anonymous namespace)::softmax_warp_forward<float, __nv_bfloat16, 10>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
        "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float>(int)",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, float, false>(int)",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>(int)",
        "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)",
        "kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16gmem",
        "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true>>(int)",
        "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16>>(int)",
        "_rms_norm_backward_kernel",
        "_layer_norm_bwd_kernel",
        "liger_cross_entropy_kernel",
        "rotary_kernel",
        "__amd_rocclr_copyBuffer",
        "__amd_rocclr_fillBufferAligned",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
        "rccl_main_kernel",
        "mscclKernel_Sum_half_LL_false(ncclDevComm*)",
        "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>(int)",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*)",
        "void deep_ep::internode::dispatch<false, 8, false, 65536, 20>(int4*)",
        "Memcpy PtoP (Device -> Device)",
    ),
    "": ("Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"),
}


def test_kernels_are_told_by_their_names() -> None:
    """Of libraries of NVIDIA and AMD, of compilers, of attention; copies of the host are none."""
    for part, names in KERNEL_NAMES.items():
        assert {name: part_of_step(name) for name in names} == dict.fromkeys(names, part)


def gpu_event(
    name: str, ts: float, dur: float, *, cat: str = "kernel", **args: object
) -> dict[str, object]:
    """An event as the profiler writes it for the kernel, or the launch, of a process."""
    own = {"pid": args.pop("pid", 0), "tid": args.get("stream", 0)}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args, **own}


def profile_of(folder: Path, events: Sequence[dict[str, object]]) -> Profile:
    """What is read of a trace of these events."""
    path = folder / "events.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_profile(path)


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


def test_marks_of_the_gpu_are_no_steps_but_hold_kernels(tmp_path: Path) -> None:
    """They begin and end with the kernels of a step, and each stream has one."""
    marks = [
        gpu_event("ProfilerStep#3", 1300, 900, cat="gpu_user_annotation", stream=stream)
        for stream in (7, 20)
    ]
    kernels = [gpu_event("nvjet_a", begin, 300, device=0, stream=7) for begin in (1300, 2100)]
    found = profile_of(tmp_path, [STEP, *marks, *kernels])
    assert (found.step, found.products) == (pytest.approx(1e-3), pytest.approx(0.6e-3))


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
        [gpu_event("nvjet_a", 1000, 700, pid=1, device=0, stream=7)],
        [gpu_event("nvjet_a", 1000, 700, device=0, stream=7)],
        [STEP | {"pid": 9}],
    ],
    ids=["device", "process", "stream that is too full", "marks of two processes"],
)
def test_a_trace_of_several_gpus_is_refused(
    tmp_path: Path, second: list[dict[str, object]]
) -> None:
    """By device, by process, by the time that a stream has, or by steps that are marked twice."""
    first = gpu_event("nvjet_a", 1000, 700, device=0, stream=7)
    assert profile_of(tmp_path, [STEP, first]).products == pytest.approx(0.7e-3)
    with pytest.raises(CatalogError, match="give the trace of one process"):
        profile_of(tmp_path, [STEP, first, *second])


def test_a_class_of_kernels_that_a_trace_lacks_says_nothing() -> None:
    """Of products alone only their speed is known."""
    case = replace(JOB, gpus=8)
    parts = kernel_seconds(moved(case, TRUE))
    only = Profile(1.0, parts.products, 0.0, 0.0, 0.0)
    found = calibrate([replace(true(case), profile=only)])
    assert found.determined["sustained"] > 0.1


def test_a_row_with_a_trace_needs_no_speed(tmp_path: Path) -> None:
    """Its step is that of the trace."""
    trace(tmp_path / "trace.json")
    (run,) = rows(tmp_path, "trace\ntrace.json\n")
    assert run.tokens_per_s_per_gpu == pytest.approx(2 * SEQUENCE / 1.1e-3)
    assert run.profile is not None


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    """In one line, wherever it breaks."""
    path = trace(tmp_path / "trace.json.gz")
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole[:12] + b"\xff" * 20 + whole[32:], b"no archive"):
        path.write_bytes(damaged)
        with pytest.raises(CatalogError, match="cannot read"):
            read_profile(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "no trace of PyTorch's profiler"),
        (b"[1]", "no trace of PyTorch's profiler"),
        (b"\xff", "no trace of PyTorch's profiler"),
        (b'{"traceEvents": []}', "no kernels of a GPU"),
        (b'[{"ph":"X","cat":"kernel","name":"gemm","ts":0,"dur":5}]', "no step in the trace"),
        (b'[{"ph":"X","cat":"kernel","name":"gemm","ts":0,"dur":-5}]', "no kernels of a GPU"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """In one line."""
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(CatalogError, match=said):
        read_profile(path)


# --- the command --------------------------------------------------------------------------------


def test_the_command_writes_a_stack_that_run_takes(tmp_path: Path, cli: Command) -> None:
    """And prints the numbers and the runs, before and after."""
    (tmp_path / "runs.csv").write_text("gpus,tokens_per_s_per_gpu\n8,38000\n16,37000\n")
    batch = ("--micro-batch", "2", "--accumulation", "1")
    where = ("-c", "dgx-h100", "-m", "llama3.2-1b", "-s", "fsdp", *batch)
    out = str(tmp_path / "mine.toml")
    files = ("--runs", str(tmp_path / "runs.csv"), "--out", out)
    printed = json.loads(cli("calibrate", *where, *files, "--jobs", "1", "--json").out)
    assert [run["measured_tokens_per_s_per_gpu"] for run in printed["runs"]] == [38000, 37000]
    result = json.loads(cli("run", *where, "-g", "8", "--stack", out, "--json").out)
    assert result["tokens_per_s_per_gpu"] == pytest.approx(
        printed["runs"][0]["after_tokens_per_s_per_gpu"], rel=1e-3
    )
    assert abs(result["tokens_per_s_per_gpu"] / 38000 - 1) < 0.03
    assert cli("calibrate", *where, *files).code == 0  # a stack of its own may be replaced


@pytest.mark.parametrize("out", ["runs.csv", "mine.txt", "none/mine.toml", "cluster.toml", "."])
def test_nothing_else_is_written_over(tmp_path: Path, cli: Command, out: str) -> None:
    """Not the runs, nor a cluster; a folder must be there."""
    text = "gpus,tokens_per_s_per_gpu\n8,38000\n"
    (tmp_path / "runs.csv").write_text(text)
    (tmp_path / "cluster.toml").write_text("name = 'mine'\n")
    where = ("-c", "dgx-h100", "-m", "llama3.2-1b", "-s", "fsdp", "--micro-batch", "2")
    place = ("--runs", str(tmp_path / "runs.csv"), "--out", str(tmp_path / out))
    ended = cli("calibrate", *where, *place)
    assert ended.code == 2
    assert "--out is" in ended.err
    assert (tmp_path / "runs.csv").read_text() == text
    assert len(list(tmp_path.iterdir())) == 2


def test_a_misspelled_name_of_a_measured_run_gets_a_hint(tmp_path: Path, cli: Command) -> None:
    """One of the names that such a run has."""
    path = tmp_path / "own.toml"
    head = "name = 'x'\nflash = 'flash2'\nelementwise = 2.0\ncall_overhead = '50 us'\n"
    path.write_text(f"{head}[[measured]]\ngpux = 'H100'\n")
    ended = cli("run", "-c", "dgx-h100", "-m", "gpt2-small", "-s", "ddp", "--stack", str(path))
    assert ended.code == 2
    assert "did you mean 'measured.0.gpu'" in ended.err


@pytest.mark.parametrize(
    "line",
    [
        "flash = 'flash9'",
        "elementwise = 1e50",
        "kept = 1e30",
        "sustained = 1e-9",
        "call_overhead = '50 h'",
        "measured = [{gpu = 'H100', gpus = 8, shares = 'banana'}]",
    ],
)
def test_a_stack_that_cannot_be_is_refused(tmp_path: Path, cli: Command, line: str) -> None:
    """In one line that names the number."""
    path = tmp_path / "own.toml"
    kept = "name = 'x'\nflash = 'flash2'\nelementwise = 2.0\ncall_overhead = '50 us'\n"
    name = line.split(maxsplit=1)[0]
    path.write_text(re.sub(rf"(?m)^{name} .*\n", "", kept) + line + "\n")
    ended = cli("run", "-c", "dgx-h100", "-m", "gpt2-small", "-s", "ddp", "--stack", str(path))
    assert ended.code == 2
    assert name in ended.err
