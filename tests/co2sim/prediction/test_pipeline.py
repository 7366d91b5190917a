"""Pipelines: the order of passes, the bubble, what stages hold, and figures of the whole."""

from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from co2sim import Case, Co2simError, simulate
from co2sim.hardware.cluster import Cluster, Link
from co2sim.models.architecture import Transformer, language_model
from co2sim.models.workload import Workload
from co2sim.prediction.pipeline import Pipeline, StagePass, ends
from co2sim.prediction.pipeline_order import chunks_of, sizes, stage_of
from co2sim.simulation.collective_cost import traffic

LAYERS = 8
MODEL = language_model(
    "gpt", Transformer(layers=LAYERS, hidden=64, heads=8, ffn=256), vocab=1000, tokens=32, tied=True
)

shapes = st.builds(
    lambda stages, chunks, rounds: (stages, chunks, stages * rounds),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
)
"""Stages, chunks, and micro-batches that interleaved stages can take in turn."""


def cluster(nodes: int = 4, gpus: int = 4, **changes: object) -> Cluster:
    """A tiny cluster without latency."""
    return tiny.cluster(nodes, gpus, **changes)


def case(**changes: object) -> Case:
    """The model on all GPUs of a cluster."""
    given = {"cluster": cluster(), "model": MODEL, "strategy": "ddp", "pp": 4, "accumulation": 8}
    return Case(**given | changes)  # type: ignore[arg-type]


def equal(pipeline: Pipeline, time: float) -> list[list[float]]:
    """As long a pass for every chunk."""
    return [[time / pipeline.chunks] * pipeline.chunks for _ in range(pipeline.stages)]


@given(shapes, st.floats(0.1, 10), st.floats(0.1, 10))
def test_equal_stages_take_the_closed_form(
    shape: tuple[int, int, int], forward: float, backward: float
) -> None:
    """(m + (p-1)/v) (f + b): the bubble is (p-1)/v passes each way.

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    stages, chunks, micros = shape
    pipeline = Pipeline(*shape)
    found = ends(pipeline, equal(pipeline, forward), equal(pipeline, backward), 0.0)
    expected = (micros + (stages - 1) / chunks) * (forward + backward)
    assert max(found) == pytest.approx(expected)
    assert found[0] == pytest.approx(expected)


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_times_are_those_of_repeated_relaxation(
    stages: int, micros: int, data: st.DataObject
) -> None:
    """An oracle that knows no order of events: starts are moved until none is too early."""
    pipeline, times = Pipeline(stages, 1, micros), st.floats(0.0, 3.0)
    forward, backward = (
        [[data.draw(times)] for _ in range(stages)] for _ in ("forward", "backward")
    )
    between = data.draw(times)
    end: dict[tuple[int, StagePass], float] = {}
    for _ in range(2 * stages * micros + 1):
        for stage in range(stages):
            before = 0.0
            for one in pipeline.order(stage):
                start, micro = before, one.micro
                if not one.backward and stage:
                    other = (stage - 1, StagePass(backward=False, chunk=0, micro=micro))
                    start = max(start, end.get(other, 0.0) + between)
                elif one.backward and stage < stages - 1:
                    other = (stage + 1, StagePass(backward=True, chunk=0, micro=micro))
                    start = max(start, end.get(other, 0.0) + between)
                took = (backward if one.backward else forward)[stage][0]
                before = end[stage, one] = start + took
    expected = [end[stage, pipeline.order(stage)[-1]] for stage in range(stages)]
    assert ends(pipeline, forward, backward, between) == pytest.approx(expected)


@given(shapes)
def test_every_stage_runs_every_pass_once_and_holds_what_it_says(
    shape: tuple[int, int, int],
) -> None:
    """Forward before backward; the most passes that are begun and not ended are those held."""
    stages, chunks, micros = shape
    pipeline = Pipeline(*shape)
    for stage in range(stages):
        order = pipeline.order(stage)
        assert len(set(order)) == len(order) == 2 * chunks * micros
        under_way, most = set(), 0
        for one in order:
            if one.backward:
                under_way.remove((one.chunk, one.micro))
            else:
                under_way.add((one.chunk, one.micro))
            most = max(most, len(under_way))
        assert most == pipeline.microbatches_in_flight(stage)


@given(st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_stages_have_the_model_together(chunks: int, tp: int) -> None:
    """Every layer once; where head and embedding share weights, both ends hold them."""
    job = Workload(MODEL, tp=tp)
    stages = [stage_of(job, number, 4, chunks) for number in range(4)]
    share = job.share.model
    names = [block.name for stage in stages for block in stage.model.blocks]
    assert sorted(names) == sorted(block.name for block in share.blocks)
    together = sum(stage.parameters for stage in stages)
    assert together == job.share.parameters + share.blocks[-1].tied
    flops = sum(work.forward.flops for stage in stages for work in stage.works())
    assert flops == pytest.approx(sum(work.forward.flops for work in job.share.works()))
    for number, stage in enumerate(stages):
        counts = sizes(stage, number, 4, chunks)
        assert counts == [len(part) for part in chunks_of(job.share, number, 4, chunks)]


def test_a_step_is_the_longest_path_of_passes_and_what_the_strategy_adds() -> None:
    """With links that cost nothing: equal layers, an embedding of no FLOP, a head at the end."""
    fast = cluster(intra=Link(1e18), inter=Link(1e18))
    found = simulate(fast, MODEL, "ddp", pp=4, accumulation=8)
    alone = [
        simulate(fast, stage_of(Workload(MODEL), number, 4, 1).model, "ddp", gpus=1)
        for number in range(4)
    ]
    two = [
        simulate(fast, stage_of(Workload(MODEL), number, 4, 1).model, "ddp", gpus=1, accumulation=2)
        for number in range(4)
    ]
    passes = [b.step_time_s - a.step_time_s for a, b in zip(alone, two, strict=True)]
    # the last stage is the slowest: it never waits, and three passes each way come around it
    slowest = max(passes)
    assert passes[-1] == slowest
    optimizer = alone[0].step_time_s - passes[0]
    expected = 8 * slowest + sum(passes[:-1]) + optimizer
    assert found.step_time_s == pytest.approx(expected, rel=1e-6)
    assert found.exposed_comm_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zero1", "zero2", "zero3", "fsdp", "zeropp(hpz=false)", "local_sgd(tau=2)"),
        *("co2(tau=2,worker=node,inner=fsdp)", "diloco(tau=2)"),
    ],
)
def test_every_family_of_strategies_combines_with_it(strategy: str) -> None:
    """And with tensor parallelism: batch, memory and figures are those of the whole."""
    found = simulate(cluster(), MODEL, strategy, pp=2, tp=2, interleave=2, accumulation=4)
    assert found.samples_per_s * found.step_time_s == pytest.approx(4 * 4)
    assert (found.pp, found.interleave, found.tp, found.gpus, found.nodes) == (2, 2, 2, 16, 4)
    assert found.tokens_per_gpu_per_step == 4 * 32 / 4
    assert 0 <= found.exposed_comm_s < found.round_time_s


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pp": 3}, "16 GPUs"),
        ({"pp": 16}, "8 layers"),
        ({"pp": 4, "interleave": 4}, "interleave=4"),
        ({"pp": 0}, "1 to 1024"),
        ({"pp": 1, "interleave": 2}, "pp of 2"),
        ({"interleave": 2, "accumulation": 6}, "6"),
        ({"jitter": 0.1}, "jitter"),
        ({"interval": "full"}, "interval=full"),
        ({"strategy": "co2(delay=auto)"}, "delay"),
        ({"model": "resnet-50"}, "ResNet-50"),
        ({"tp": 8}, "tp=8"),
    ],
)
def test_what_has_no_pipeline_is_refused_in_one_line(changes: dict[str, object], key: str) -> None:
    """It says what was given, and what is allowed."""
    given = {"model": MODEL, "strategy": "ddp", "pp": 4, "accumulation": 8} | changes
    with pytest.raises(Co2simError, match=key) as caught:
        simulate(cluster(), **given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_too_many_passes_are_refused() -> None:
    """Before any is lined up."""
    with pytest.raises(Co2simError, match="2,000,000"):
        Pipeline(1024, 128, 10_000)


def test_it_has_no_schedule_to_show_or_execute() -> None:
    """Its stages do different things."""
    with pytest.raises(Co2simError, match="no schedule") as caught:
        case().prepare()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("pp", "chunks", "tp"), [(2, 1, 1), (2, 2, 2), (8, 1, 1), (8, 1, 2)])
def test_the_first_stage_sends_outputs_of_all_chunks_and_gradients_of_all_but_one(
    pp: int, tp: int, chunks: int
) -> None:
    """Beside what its strategy sends; what comes is gathered by GPUs that share layers.

    On 4 nodes of 4 GPUs a stage of 2 has two nodes, and a stage of 8 half of a node.
    """
    deep: dict[str, Any] = {"pp": pp, "interleave": chunks, "accumulation": 8, "tp": tp}
    found = simulate(cluster(), MODEL, "ddp", **deep)
    stage = case(**deep).stage(0)
    alone = traffic(stage.schedule, stage.cluster)
    edge = MODEL.blocks[1].boundary_bytes * stage.job.precision.bytes / 2
    messages = (2 * chunks - 1) * 8
    gathered = (tp - 1) / tp * edge
    assert found.wire_bytes_per_gpu_per_step - alone.gpu == pytest.approx(
        messages * (edge / tp + gathered)
    )
    gpus = min(4, 16 // pp)
    assert found.nic_bytes_per_node_per_step - alone.nic == pytest.approx(
        messages * edge / tp * gpus
    )
