"""Products of layers in fp8 and below: which they are, what they take, and what stays as it was."""

import math

import pytest
from one_sample import simulate
from small_gpt import small

from co2sim.catalog import load_cluster, load_stack
from co2sim.models.operators import NARROW
from co2sim.models.transformer import Experts, Transformer
from co2sim.schedule.schedule import Gemm, Kernels
from co2sim.simulation.costs import kernel_parts
from co2sim.training.workload import Workload

BODY = Transformer(
    layers=1,
    hidden=64,
    heads=4,
    ffn=128,
    bias=False,
    norm="rmsnorm",
    experts=Experts(count=4, active=2, width=32),
)
MODEL = small(BODY, 16)
JOB = {"cluster": "dgx-h100", "model": "llama3-8b", "strategy": "fsdp", "gpus": 8}


def kernels(narrow: str | None, **options: object) -> list[Kernels]:
    """Forward and backward pass of every block."""
    job = Workload(MODEL, micro_batch=2, narrow=narrow, **options)  # type: ignore[arg-type]
    made = [one.kernels for work in job.works() for one in (work.forward, work.backward)]
    return [one for one in made if one]


def test_products_with_weights_of_layers_are_narrow_and_no_others() -> None:
    """Not those of attention's scores, of the router, and over the vocabulary."""
    layer = kernels("fp8", attention="eager")[2]
    assert [one.narrow for one in layer.products] == ["fp8", "", "", "fp8", "", "fp8", "fp8"]
    head = kernels("fp8")[4]
    assert {one.narrow for one in head.products} == {""}
    assert head.cast_bytes == 0.0


def test_operands_take_fewer_bytes_and_results_as_many() -> None:
    """An eighth of a byte more for four scales of 32 numbers each, and so on."""
    for name, width in (("fp8", 1.0), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5625)):
        first = kernels(name)[2].products[0]
        rows, inner, columns = 2 * 16, 64, 3 * 64
        assert first.bytes == (rows + columns) * inner * width + rows * columns * 2


def test_casts_read_operands_and_write_them_in_two_layouts() -> None:
    """Inputs and weights forward, gradients backward; weights once for all micro-steps."""
    shapes = [(32, 64, 192), (32, 64, 64), (32 * 2, 64, 32), (32 * 2, 32, 64)]
    inputs = sum(rows * inner for rows, inner, _ in shapes)
    results = sum(rows * columns for rows, _, columns in shapes)
    weights = 64 * 192 + 64 * 64 + 4 * 2 * 64 * 32
    for name, kind in NARROW.items():
        each = kind.reads * 2 + 2 * kind.bytes
        for steps in (1, 4):
            forward, backward = kernels(name, cast_steps=steps)[2:4]
            assert forward.cast_bytes == pytest.approx((inputs + weights / steps) * each)
            assert backward.cast_bytes == pytest.approx(results * each)
    again = kernels("fp8", recompute="full", checkpointing="reentrant")[3]
    assert again.cast_bytes == pytest.approx((inputs + results) * 6)


def test_a_narrow_product_attains_its_part_of_its_own_peak() -> None:
    """On an H100 0.688 of 1,979 TFLOP/s, of which a hot GPU sustains a part."""
    cluster = load_stack("megatron-core").value.within(load_cluster("dgx-h100").value)
    gpu = cluster.gpu
    one = Gemm(8192, 8192, 8192, 1.0, narrow="fp8", result=2.0)
    found = kernel_parts(Kernels((one,), 0, 0.0), gpu, gpu.kernels, "bf16").products
    speed = gpu.peak["fp8"] * 0.688 * gpu.products.sustained
    moved = one.bytes / (gpu.memory_bandwidth * gpu.kernels.operand_efficiency)
    assert found == pytest.approx(math.hypot(one.flops / speed, moved) + gpu.kernels.product_start)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_only_products_change(precision: str) -> None:
    """An answer names the type; states and communication stay those of bf16."""
    job = JOB | {"cluster": "dgx-b200"}
    plain, narrow = (simulate(**job, precision=name) for name in ("bf16", precision))  # type: ignore[arg-type]
    assert narrow.precision == precision
    assert plain.step_time_s / 2 < narrow.step_time_s < plain.step_time_s
    assert narrow.wire_bytes_per_gpu_per_step == plain.wire_bytes_per_gpu_per_step
    assert narrow.memory_bytes_per_gpu == plain.memory_bytes_per_gpu
    assert narrow.model_tflops_per_gpu > plain.model_tflops_per_gpu
