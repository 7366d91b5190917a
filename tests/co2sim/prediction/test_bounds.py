"""The least time of a step is no more than what the engine gives, and is close to it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from co2sim.common.errors import Co2simError
from co2sim.prediction import driver
from co2sim.prediction.bounds import Shared, StepBound
from co2sim.prediction.power import least_energy, power
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result

FEW = settings(max_examples=settings.default.max_examples // 16)
STRATEGIES = [
    *("ddp", "zero1", "zero1:shard=node", "zero2", "zero3", "zeropp"),
    *("fsdp", "fsdp:reduce=bf16", "fsdp:shard=node", "fsdp:sync=last"),
    *("fsdp:reshard_after_forward=false", "fsdp:version=1,clip=false"),
    *("local_sgd:tau=4,worker=node", "co2:tau=2,delay=1,fragments=2,worker=node"),
    *("local_sgd:tau=12,worker=node,inner=fsdp", "co2:tau=12,delay=1,fragments=12,worker=node"),
    *("diloco:tau=4,worker=node,inner=ddp", "overlap_local_sgd:tau=4,worker=node,inner=zero1"),
]
_ROUNDING = 1 + 1e-9


@st.composite
def cases(draw: st.DrawFn) -> Question:
    """Small ones, of all that bounds know."""
    tp, pp = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 1, 2, 4]))
    schedule = draw(st.sampled_from(["1f1b", "zb_h1", "zbv", "dualpipe"])) if pp > 1 else "1f1b"
    chunks = draw(st.sampled_from([1, 2])) if pp > 1 and schedule in {"1f1b", "zb_h1"} else 1
    steps = draw(st.integers(1, 9)) + pp * (schedule == "dualpipe")
    return Question(
        cluster=draw(st.sampled_from(["dgx-h100", "a100-tcp80", "dgx-b200"])),
        model=draw(st.sampled_from(["gpt2-small", "tinyllama-1.1b"])),
        strategy=draw(st.sampled_from(STRATEGIES)),
        stack=draw(st.sampled_from(["", "megatron-core", "torchtitan-eager", "deepspeed-2023"])),
        gpus=draw(st.sampled_from([8, 16, 24, 32, 56])),
        micro_batch=draw(st.sampled_from([1, 2, 8])),
        accumulation=steps * pp if chunks > 1 else steps,
        recompute=draw(st.sampled_from(["none", "full", "full/2", "activation"])),
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        cp=draw(st.sampled_from([1, 1, 2])),
        pp=pp,
        interleave=chunks,
        schedule=schedule,
        overrides={"inter.bandwidth": f"{draw(st.sampled_from([5, 100, 1600]))} Gbit/s"},
    )


def bound_of(case: Question) -> StepBound:
    """That of all micro-batches of a case, as a plan has it, which looks at other sizes, too."""
    job = replace(case, micro_batch=1, accumulation=1, recompute="none").job()
    return StepBound(job, Shared(case.load()[0].value))


def result_of(case: Question) -> Result:
    """Its figures; what cannot be is no example."""
    try:
        return driver.run(case)
    except Co2simError:
        reject()


@FEW
@given(case=cases())
@example(
    Question(
        cluster="dgx-h100",
        model="tinyllama-1.1b",
        strategy="fsdp:sync=last",
        gpus=16,
        accumulation=7,
    )
)
@example(  # quantization beside computing does not slow it, as collectives do
    Question(
        cluster="a100-tcp80",
        model="gpt2-small",
        strategy="zeropp",
        gpus=16,
        accumulation=8,
        pp=4,
        interleave=2,
        recompute="full/2",
        overrides={"inter.bandwidth": "5 Gbit/s"},
    )
)
@example(  # behind the embedding's backward pass is an exchange only if its forward is repeated
    Question(
        cluster="dgx-h100",
        model="gpt2-small",
        strategy="ddp",
        gpus=32,
        accumulation=1,
        tp=2,
        recompute="full",
        stack="deepspeed-2023",
        overrides={"inter.bandwidth": "1600 Gbit/s"},
    )
)
@example(  # a stage of one node is too small for the tensor-parallel GPUs of one of two
    Question(
        cluster="dgx-h100",
        model="gpt2-small",
        strategy="local_sgd:tau=4,worker=node",
        gpus=16,
        micro_batch=1,
        accumulation=1,
        tp=4,
        pp=4,
        overrides={"inter.bandwidth": "5 Gbit/s"},
    )
)
def test_no_step_is_shorter_and_no_memory_smaller(case: Question) -> None:
    """By passes alone, nor with what the strategy adds; states and activations are a part."""
    found = result_of(case)
    size = int(case.micro_batch), case.accumulation or 1, case.recompute
    bound = bound_of(case)
    quick, close = bound.quick(*size), bound.close(*size)
    assert 0 < quick.seconds <= found.step_time_s * _ROUNDING
    assert quick.seconds <= close.seconds * _ROUNDING
    assert close.seconds <= found.step_time_s * _ROUNDING
    assert bound.memory(*size) <= found.memory_bytes_per_gpu["total"] * _ROUNDING


@FEW
@given(case=cases())
def test_no_step_takes_less_energy(case: Question) -> None:
    """A GPU that waits draws its idle power."""
    case = replace(case, cluster="dgx-h100", pp=1, interleave=1, schedule="1f1b")
    found = result_of(case)
    cluster = case.load()[0].value.resized(found.gpus)
    size = int(case.micro_batch), case.accumulation or 1, case.recompute
    least = least_energy(cluster, *bound_of(case).close(*size))
    watts = power(found, cluster)
    assert least <= watts * found.step_time_s * _ROUNDING


@pytest.mark.parametrize(
    ("job", "share"),
    [
        ({"strategy": "zero1", "accumulation": 4}, 0.99),
        ({"strategy": "fsdp", "accumulation": 4}, 0.95),
        ({"strategy": "zero1", "accumulation": 8, "tp": 4, "pp": 2}, 0.98),
    ],
    ids=str,
)
def test_it_is_close(job: dict[str, Any], share: float) -> None:
    """On a fast network: within a few percent, so that few candidates are simulated."""
    case = Question(cluster="dgx-h100", model="llama3-8b", gpus=32, recompute="full", **job)
    case = replace(case, sequence_parallel=case.tp > 1)
    bound = bound_of(case).close(1, case.accumulation or 1, "full")
    assert bound.seconds >= share * driver.run(case).step_time_s
