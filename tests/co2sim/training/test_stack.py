"""Software stacks: what they make of a GPU and of a job."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

from co2sim.catalog import DEFAULT_STACK, load_cluster, load_stack, names
from co2sim.catalog.specs import ClusterSpec, as_file
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import AttentionSpeed, KernelTimes, ProductSpeed, one_efficiency
from co2sim.prediction.notes import IDLE_STACK
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import (
    WORLD,
    Collective,
    Compute,
    DType,
    FusedAttention,
    Gemm,
    Kernels,
    Kind,
)
from co2sim.simulation.costs import compute_time, cost_of, kernel_parts
from co2sim.training.memory import Timeline
from co2sim.training.stack import Stack

PEAK, MEMORY = 1e15, 1e12
GPU = replace(
    tiny.cluster().gpu,
    peak={"bf16": PEAK},
    memory_bandwidth=MEMORY,
    memory_efficiency=1.0,
    products=ProductSpeed(efficiency=0.8, operand_efficiency=0.5, start=1e-6, sustained=0.9),
    attention={"own": AttentionSpeed(forward=0.5, backward=0.25, half_length=1000)},
    generation="new",
)
STACK = Stack(name="mine", flash="own", elementwise=2.0, call_overhead=1e-5)


def seconds(kernels: Kernels, stack: Stack = STACK) -> float:
    """Of a pass on the GPU with the stack."""
    return compute_time(Compute("forward", 1.0, 0.0, kernels), stack.on(GPU), "bf16")


@given(
    st.lists(st.tuples(*[st.integers(1, 5000)] * 3, st.integers(1, 3)), max_size=2),
    st.integers(0, 500),
    st.floats(0, 1e11),
    st.integers(1, 10**6),
)
def test_a_pass_takes_the_longer_of_its_kernels_and_its_host(
    sides: list[tuple[int, int, int, int]], calls: int, elementwise: float, length: int
) -> None:
    """Kernels one after the other: their arithmetic, operands and starts, slowed by what lasts.

    Attention attains half of its speed at its half length, forward and backward alike; elementwise
    kernels move more than the least by the factor of the stack.
    """
    products = tuple(Gemm(a, b, c, width=2.0, batch=many, count=2.0) for a, b, c, many in sides)
    device = 2 * elementwise / MEMORY
    for a, b, c, many in sides:
        flops, moved = 4 * many * a * b * c, 4 * many * (a * b + b * c + a * c)
        device += math.hypot(flops / (PEAK * 0.8 * 0.9), moved / (MEMORY * 0.5)) + 2e-6
    share = length / (length + 1000)
    device += 1e12 / (PEAK * 0.5 * share) + 2e12 / (PEAK * 0.25 * share)
    attention = FusedAttention(1e12, 0.0, length, backward=2e12)
    took = seconds(Kernels(products, calls, elementwise, attention=attention))
    assert took == pytest.approx(max(device, calls * 1e-5))


def test_what_cuda_graphs_repeat_the_host_does_not_issue() -> None:
    """A quarter of a pass that the host limits takes a quarter of its time."""
    work = Kernels((), 1000, 0.0)
    assert seconds(work) == pytest.approx(1000 * 1e-5)
    assert seconds(work, replace(STACK, graphs=0.75)) == pytest.approx(250 * 1e-5)


@given(st.floats(0.3, 1.0))
def test_a_power_cap_slows_arithmetic_and_no_memory(share: float) -> None:
    """Products and attention by one power of the limit, in 16 bits and in fewer."""
    peak = {"bf16": PEAK, "fp8": 2 * PEAK}
    full = replace(GPU, peak=peak, tdp=700.0)
    capped = replace(full, power_cap=700.0 * share)
    products = tuple(Gemm(4096, 4096, 4096, width=w, narrow=n) for w, n in ((2, ""), (1, "fp8")))
    attention = FusedAttention(1e12, 0.0, 4096)
    free, slow = (STACK.on(gpu) for gpu in (full, capped))
    assert free.kernels
    for work in (Kernels(products[:1], 0, 0.0), Kernels(products[1:], 0, 0.0)):
        quick, late = (
            kernel_parts(work, replace(gpu, memory_bandwidth=1e20), free.kernels, "bf16").products
            - 1e-6
            for gpu in (free, slow)
        )
        assert quick / late == pytest.approx(share**0.61, rel=1e-6)
    quick, late = (
        kernel_parts(Kernels((), 0, 1e9, attention=attention), gpu, free.kernels, "bf16")
        for gpu in (free, slow)
    )
    assert quick.attention / late.attention == pytest.approx(share**0.61)
    assert quick.elementwise == late.elementwise


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"tdp": 700.0, "power_cap": 800.0}, "power_cap is 800 W, above tdp, which is 700 W"),
        ({"tdp": None, "power_cap": 500.0}, "needs its tdp"),
    ],
)
def test_a_power_cap_lies_below_a_known_limit(limits: dict[str, float], words: str) -> None:
    """Else one line says what is wrong."""
    with pytest.raises(OptionError, match=words):
        replace(GPU, **limits)


def test_an_unknown_implementation_of_attention_runs_as_products_do() -> None:
    """A GPU of which nothing is published for the stack's kernels."""
    other = replace(STACK, flash="other")
    work = Kernels((), 0, 0.0, attention=FusedAttention(1e12, 0.0, 4096))
    assert seconds(work, other) == pytest.approx(1e12 / (PEAK * 0.8 * 0.9))


def test_fitted_kernels_stand_for_all_others() -> None:
    """By the name of a GPU before its generation; a GPU that has kernels keeps them."""
    own, by_generation = KernelTimes(0.3), KernelTimes(0.4)
    stack = replace(STACK, kernels={GPU.name: own, "new": by_generation})
    assert stack.on(GPU).kernels == own
    other = stack.on(replace(GPU, name="another"))
    assert (other.kernels, other.stack) == (by_generation, "mine")
    kept = replace(GPU, kernels=by_generation)
    assert stack.on(kept) is kept


def test_a_cluster_that_names_a_stack_runs_it_unless_another_is_asked_for() -> None:
    """As published clusters do, whose runs one framework made; its kernels count once."""
    case = Question(cluster="a100-tcp80-calibrated", model="gpt2-small", strategy="ddp", gpus=8)
    stack = load_stack("transnormer-2023").value
    own, asked = case.stage(), replace(case, stack="torchtitan").stage()
    assert own.job.stack.name == stack.name
    assert own.cluster.gpu.known_efficiency == one_efficiency(stack.efficiency)
    assert asked.job.stack.name == load_stack("torchtitan").value.name
    assert asked.cluster.gpu.kernels is not None


@pytest.mark.parametrize("stack", names("stacks"))
def test_every_stack_of_the_catalog_says_where_its_numbers_are_from(stack: str) -> None:
    """And trains on a current cluster."""
    assert all(fact.source for fact in load_stack(stack).facts)
    found = simulate("dgx-h100", "gpt2-small", "ddp", gpus=8, stack=stack)
    assert found.stack == load_stack(stack).value.name


def test_a_file_of_a_stack_is_one_of_a_user(tmp_path: Path) -> None:
    """It holds what those of the catalog hold."""
    path = tmp_path / "mine.toml"
    path.write_text('name = "ours"\nflash = "flash2"\nelementwise = 2\ncall_overhead = "9 us"\n')
    found = simulate("dgx-h100", "gpt2-small", "ddp", gpus=8, stack=str(path))
    assert found.stack == "ours"


def test_a_stack_says_what_attention_loss_and_recomputation_do() -> None:
    """Unless the case says it."""
    old = Question(
        cluster="dgx-a100", model="gpt2-small", strategy="ddp", stack="megatron-deepspeed"
    )
    job = old.stage().workload
    assert (job.attention, job.checkpointing) == ("eager", "reentrant")
    assert replace(old, attention="flash").stage().workload.attention == "flash"


def test_a_mesh_gives_few_gpus_few_of_its_links() -> None:
    """Two of four GPUs have a third of the bandwidth; all four have all of it."""
    switch = load_cluster("jean-zay-v100", {"intra.topology": "switch"}).value
    mesh = load_cluster("jean-zay-v100").value
    assert mesh.intra.topology == "mesh"
    assert mesh.resized(4).intra.bandwidth == switch.intra.bandwidth
    assert mesh.resized(2).intra.bandwidth == pytest.approx(switch.intra.bandwidth / 3)

    def exchanged(topology: str, tp: int) -> float:
        found = simulate(
            "jean-zay-v100",
            "gpt2-medium",
            "ddp",
            gpus=4,
            tp=tp,
            attention="eager",
            overrides={"intra.topology": topology, "intra.latency": "0 s"},
        )
        return found.breakdown_s[f"all_reduce tensor({tp})"]

    assert exchanged("mesh", 4) == pytest.approx(exchanged("switch", 4))
    assert exchanged("mesh", 2) == pytest.approx(3 * exchanged("switch", 2), rel=0.01)


def test_a_ring_over_more_nodes_loses_of_the_network() -> None:
    """A doubling of nodes costs `ring_loss` of the time of the bytes; a tree loses nothing."""

    def took(kind: Kind, nodes: int, loss: float, algorithm: str = "ring") -> float:
        changes = {"inter.ring_loss": str(loss), "inter.latency": "0 s", "intra.latency": "0 s"}
        loaded = load_cluster("dgx-a100", changes | {"all_reduce": algorithm}).value
        cluster = replace(loaded, network_overhead=0.0, protocols="simple").resized(8 * nodes)
        work = Collective(kind, "x", 10**9, DType.BF16, WORLD)
        return cost_of(work, cluster).duration_alone(cluster)

    for nodes in (2, 8, 64):
        grown = 1 + 0.2 * math.log2(nodes)
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
            assert took(kind, nodes, 0.2) == pytest.approx(took(kind, nodes, 0.0) * grown)
        tree = [took(Kind.ALL_REDUCE, nodes, loss, "tree") for loss in (0.0, 0.2)]
        assert tree[0] == tree[1]


def test_a_stack_that_does_not_overlap_reduces_behind_the_backward_pass() -> None:
    """Every bucket waits for the whole backward pass."""
    case = Question(cluster="dgx-a100", model="gpt2-small", strategy="ddp", gpus=16)
    late = replace(case, stack="megatron-2021").stage().schedule
    waits = {one.op for op in late.body if op.name.startswith("reduce") for one in op.after}
    assert waits == {"backward.embedding"}
    early = case.stage().schedule
    waits = {one.op for op in early.body if op.name.startswith("reduce") for one in op.after}
    assert len(waits) > 1


def test_exchanges_beside_products_are_hidden_as_far_as_these_are_longer() -> None:
    """So a stack that overlaps them is never slower, and a fast link hides all but the loss.

    Without sequence parallelism there is no overlap (Megatron-LM, tp_comm_overlap).
    """
    job = {"model": "llama3-8b", "strategy": "ddp", "gpus": 8, "tp": 8, "micro_batch": 1}
    changes = {"interference": "0", "stack.call_overhead": "0 s"}
    plain, found = (
        {
            overlap: simulate(
                "dgx-h100",
                stack="megatron-core",
                overrides={**changes, "stack.overlap_tensor": overlap},
                sequence_parallel=divided,
                **job,  # type: ignore[arg-type]
            )
            for overlap in ("true", "false")
        }
        for divided in (False, True)
    )
    assert plain["true"].exposed_comm_s == plain["false"].exposed_comm_s
    assert found["true"].exposed_comm_s < 0.6 * found["false"].exposed_comm_s
    assert found["true"].wire_bytes_per_gpu_per_step == found["false"].wire_bytes_per_gpu_per_step


def test_what_is_kept_gathered_takes_memory_and_no_second_gather() -> None:
    """Both inputs of a layer and that of the head: a rank has all of them, not its part."""
    job = {"model": "llama3-8b", "strategy": "ddp", "gpus": 8, "tp": 8, "sequence_parallel": True}
    again, kept = (
        simulate("dgx-h100", overrides={"stack.keep_gathered": way}, **job)  # type: ignore[arg-type]
        for way in ("false", "true")
    )
    gathers, width = 2 * 32 + 1, 8192 * 4096 * 2
    more = kept.memory_bytes_per_gpu["activations"] - again.memory_bytes_per_gpu["activations"]
    assert more == pytest.approx(gathers * width * 7 / 8)
    sent = again.wire_bytes_per_gpu_per_step - kept.wire_bytes_per_gpu_per_step
    assert sent == pytest.approx(gathers * width * 7 / 8)


@pytest.mark.parametrize("cluster", names("clusters"))
def test_a_cluster_comes_back_from_what_a_file_would_say_of_it(cluster: str) -> None:
    """With every number and unit, and with what its stack made of the GPU."""
    loaded = load_cluster(cluster).value
    for one in (loaded, replace(loaded, gpu=load_stack(DEFAULT_STACK).value.on(loaded.gpu))):
        tree = as_file(one)
        tree.pop("currency")
        for price in ("price_per_gpu", "price_low", "price_high"):
            if price in tree:
                tree[price] = tree[price].replace("USD", one.currency)
        assert ClusterSpec.model_validate(tree).build() == one


def test_fp32_gradients_take_four_bytes_and_unfused_layers_more() -> None:
    """Of replicas in bf16; and what a layer keeps is a multiple of what its backward pass needs."""

    def memory(stack: str, **changes: str) -> Timeline:
        overrides = {f"stack.{name}": value for name, value in changes.items()}
        case = Question(
            cluster="dgx-h100",
            model="llama3.2-1b",
            strategy="ddp",
            gpus=8,
            stack=stack,
            overrides=overrides,
        )
        return case.stage().timeline()

    summed, plain = (memory("megatron-core", main_gradients=way) for way in ("true", "false"))
    assert summed.most("gradients") == pytest.approx(2 * plain.most("gradients"))
    once, twice = (memory("torchtitan", kept=kept) for kept in ("1", "2"))
    layers = simulate("dgx-h100", "llama3.2-1b", "ddp", gpus=8).memory_bytes_per_gpu["activations"]
    more = twice.most("activations") - once.most("activations")
    assert more == pytest.approx(layers, rel=0.05)


def test_a_gpu_whose_file_states_its_kernels_takes_nothing_of_a_stack() -> None:
    """Neither its speed nor what it does; an answer names none, and says that --stack is idle."""
    cluster = load_cluster("dgx-a100", {"gpu.kernels.gemm_efficiency": "0.6"}).value
    job = {"model": "mpt-7b", "strategy": "fsdp", "gpus": 8}
    plain, asked = (
        simulate(cluster, **job, stack=stack)  # type: ignore[arg-type]
        for stack in ("", "nanotron")
    )
    assert plain.stack == asked.stack == ""
    assert plain.step_time_s == asked.step_time_s
    assert plain.memory_bytes_per_gpu == asked.memory_bytes_per_gpu
    assert IDLE_STACK in asked.notes
    assert IDLE_STACK not in plain.notes
