"""Pipelines: the order of passes, the bubble, what stages hold; steps of many micro-steps."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from one_sample import simulate

from co2sim import Co2simError, Question
from co2sim.hardware.cluster import Link
from co2sim.models.transformer import Transformer, language_model
from co2sim.prediction import predict as module
from co2sim.prediction.job import stage_of
from co2sim.prediction.predict import one_turn, stage_figures
from co2sim.prediction.result import Result
from co2sim.schedule.mesh import Mesh, Pipeline, ends
from co2sim.simulation import metrics
from co2sim.simulation.costs import traffic
from co2sim.simulation.noise import RunOptions
from co2sim.simulation.run import Simulator
from co2sim.strategies import DDP
from co2sim.training.workload import Workload

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


class StagePass(NamedTuple):
    """A forward or a backward pass of a micro-batch over a chunk of a stage's layers."""

    backward: bool
    chunk: int
    micro: int


def passes_of(pipeline: Pipeline, stage: int) -> list[StagePass]:
    """The passes of a stage in turn, by what their numbers say."""
    found = []
    for number in pipeline.order(stage):
        part, micro = divmod(number, pipeline.micros)
        backward, part = divmod(part, pipeline.stages * pipeline.chunks)
        assert part % pipeline.stages == stage
        found.append(StagePass(bool(backward), part // pipeline.stages, micro))
    return found


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


def needed(pipeline: Pipeline, stage: int, one: StagePass) -> tuple[int, StagePass] | None:
    """The pass, and its stage, that a pass waits for."""
    last, chunk = pipeline.stages - 1, one.chunk
    if one.backward and (stage, chunk) == (last, pipeline.chunks - 1):
        return stage, one._replace(backward=False)
    if one.backward:
        return (stage + 1, one) if stage < last else (0, one._replace(chunk=chunk + 1))
    if stage:
        return stage - 1, one
    return (last, one._replace(chunk=chunk - 1)) if chunk else None


deep = st.builds(
    lambda stages, chunks, rounds, single: (
        stages,
        1 if single else chunks,
        rounds if single else stages * rounds,
    ),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 8),
    st.booleans(),
) | st.tuples(st.integers(1, 8), st.just(1), st.integers(1, 64))


@given(deep, st.randoms(use_true_random=False))
def test_times_are_those_of_passes_one_after_the_other(
    shape: tuple[int, int, int], random: Random
) -> None:
    """An oracle that knows no numbers of passes: each begins when its stage and another let it."""
    pipeline = Pipeline(*shape)
    forward, backward = (
        [[random.choice([0.0, random.random()]) for _ in range(shape[1])] for _ in range(shape[0])]
        for _ in ("forward", "backward")
    )
    between = random.choice([0.0, random.random()])
    left = {stage: passes_of(pipeline, stage) for stage in range(pipeline.stages)}
    free = [0.0] * pipeline.stages
    end: dict[tuple[int, StagePass], float] = {}

    def may(stage: int, one: StagePass) -> bool:
        before = needed(pipeline, stage, one)
        return before is None or before in end

    while any(left.values()):
        can = [s for s, one in left.items() if one and may(s, one[0])]
        assert can, "no stage can go on"
        for stage in can:
            one = left[stage].pop(0)
            before = needed(pipeline, stage, one)
            come = end[before] + between * (before[0] != stage) if before else 0.0
            took = (backward if one.backward else forward)[stage][one.chunk]
            free[stage] = end[stage, one] = max(free[stage], come) + took
    assert ends(pipeline, forward, backward, between) == free


@given(shapes, st.data())
def test_every_stage_runs_every_pass_once_and_holds_what_it_says(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    """Forward before backward; what is begun and not ended is held, by layers of its chunk."""
    stages, chunks, micros = shape
    pipeline = Pipeline(*shape)
    layers = data.draw(st.lists(st.integers(1, 9), min_size=chunks, max_size=chunks))
    for stage in range(stages):
        order = passes_of(pipeline, stage)
        assert len(set(order)) == len(order) == 2 * chunks * micros
        under_way, most = set(), 0
        for one in order:
            if one.backward:
                under_way.remove((one.chunk, one.micro))
            else:
                under_way.add((one.chunk, one.micro))
            most = max(most, sum(layers[chunk] for chunk, _ in under_way))
        held = pipeline.microbatches_in_flight(stage, layers)
        assert held == pytest.approx(most / sum(layers))


@given(st.sampled_from([2, 3, 4, 5]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_stages_have_the_model_together(pp: int, chunks: int, tp: int) -> None:
    """Every layer once; where head and embedding share weights, both ends hold them."""
    job = Workload(MODEL, tp=tp, pp=pp, interleave=chunks)
    if pp * chunks == 10:  # embedding and head count as layers
        assert [len(stage_of(job, n).model.blocks) for n in range(pp)] == [2] * pp
    elif pp * chunks > LAYERS:
        return
    stages = [stage_of(job, number) for number in range(pp)]
    share = job.share.model
    names = [block.name for stage in stages for block in stage.model.blocks]
    assert sorted(names) == sorted(block.name for block in share.blocks)
    together = sum(stage.parameters for stage in stages)
    assert together == job.share.parameters + share.blocks[-1].tied
    flops = sum(work.forward.flops for stage in stages for work in stage.works())
    assert flops == pytest.approx(sum(work.forward.flops for work in job.share.works()))


@given(st.integers(1, 200), st.integers(2, 16), st.integers(1, 4))
def test_chunks_differ_by_a_layer_at_most(layers: int, pp: int, chunks: int) -> None:
    """Together they have all layers; where there are fewer layers than chunks they are refused."""
    if layers < pp * chunks and layers + 2 != pp * chunks:
        with pytest.raises(Co2simError, match=f"{layers} layers"):
            Mesh(pp=pp, interleave=chunks).layer_counts(layers)
        return
    counts = Mesh(pp=pp, interleave=chunks).layer_counts(layers)
    assert (sum(counts), len(counts)) == (layers, pp * chunks)
    assert max(counts) - min(counts) <= 1


def test_embedding_and_head_count_as_layers_where_that_divides() -> None:
    """As Llama 3.1 405B was trained: 126 layers on 16 stages. Else the first have one more."""
    assert Mesh(pp=16, interleave=1).layer_counts(126) == [7, *[8] * 14, 7]
    assert Mesh(pp=8, interleave=2).layer_counts(126) == [7, *[8] * 14, 7]
    assert Mesh(pp=4, interleave=1).layer_counts(11) == [3, 3, 3, 2]
    assert Mesh(pp=2, interleave=2).layer_counts(9) == [3, 2, 2, 2]


def test_a_step_is_the_longest_path_of_passes_and_what_the_strategy_adds() -> None:
    """With links that cost nothing: equal layers, an embedding of no FLOP, a head at the end."""
    fast = tiny.cluster(4, 4, intra=Link(1e18), inter=Link(1e18))
    found = simulate(fast, MODEL, "ddp", pp=4, accumulation=8)
    alone = [
        simulate(fast, stage_of(Workload(MODEL, pp=4), number).model, "ddp", gpus=1)
        for number in range(4)
    ]
    two = [
        simulate(fast, stage_of(Workload(MODEL, pp=4), number).model, "ddp", gpus=1, accumulation=2)
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
        *("co2.published(tau=2,worker=node,inner=fsdp)", "diloco(tau=2)"),
    ],
)
def test_every_family_of_strategies_combines_with_it(strategy: str) -> None:
    """And with tensor parallelism: batch, memory and figures are those of the whole."""
    found = simulate(tiny.cluster(4, 4), MODEL, strategy, pp=2, tp=2, interleave=2, accumulation=4)
    assert found.samples_per_s * found.step_time_s == pytest.approx(4 * 4)
    assert (found.pp, found.interleave, found.tp, found.gpus, found.nodes) == (2, 2, 2, 16, 4)
    assert found.tokens_per_gpu_per_step == 4 * 32 / 4
    assert 0 <= found.exposed_comm_s < found.round_time_s


def test_too_many_passes_are_refused() -> None:
    """Before any is lined up."""
    with pytest.raises(Co2simError, match="2,000,000"):
        Pipeline(1024, 128, 10_000)


@pytest.mark.parametrize(("pp", "chunks", "tp"), [(2, 1, 1), (2, 2, 2), (8, 1, 1), (8, 1, 2)])
def test_the_first_stage_sends_outputs_of_all_chunks_and_gradients_of_all_but_one(
    pp: int, tp: int, chunks: int
) -> None:
    """Beside what its strategy sends; what comes is gathered by GPUs that share layers.

    On 4 nodes of 4 GPUs a stage of 2 has two nodes, and a stage of 8 half of a node.
    """
    deep: dict[str, Any] = {"pp": pp, "interleave": chunks, "accumulation": 8, "tp": tp}
    deep |= {"cluster": tiny.cluster(4, 4), "model": MODEL, "strategy": "ddp"}
    found = simulate(**deep)
    stage = Question(**deep).job().stage(0)
    alone = traffic(stage.schedule, stage.cluster)
    edge = MODEL.blocks[1].boundary * stage.workload.precision.bytes
    messages = (2 * chunks - 1) * 8
    gathered = (tp - 1) / tp * edge
    assert found.wire_bytes_per_gpu_per_step - alone.gpu == pytest.approx(
        messages * (edge / tp + gathered)
    )
    gpus = min(4, 16 // pp)
    assert found.nic_bytes_per_node_per_step - alone.nic == pytest.approx(
        messages * edge / tp * gpus
    )


# --- steps of many micro-steps by a few -------------------------------------------------------


LONG = [
    "co2.published(tau=12)",
    "co2.published(tau=13,staleness=2)",
    "local_sgd(tau=12,worker=node)",
    "diloco(tau=14)",
    "overlap_local_sgd(tau=12)",
    "slowmo(tau=12,worker=node,inner=ddp)",
    "co2.published(tau=12,dtype=int8)",
    "co2.published(tau=12,worker=node,inner=fsdp)",
    "diloco(tau=12,fragments=2,delay=1)",
    "co2(tau=18,delay=2,worker=node)",
    "diloco(tau=16,delay=1)",
    "co2(tau=12,delay=1,fragments=12,worker=node)",
    "co2(tau=12,delay=5,fragments=6)",
    "diloco(tau=12,delay=7,fragments=12)",
]
"""Strategies whose local steps are many, too."""

jobs = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(
            [*(one for one in tiny.VARIANTS if "hpz_group" not in one), *LONG]
        ),
        "shape": st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]),
        "tp": st.sampled_from([1, 2]),
        "sequence_parallel": st.booleans(),
        "accumulation": st.sampled_from([4, 16, 20]),
        "interference": st.sampled_from([0.0, 0.1]),
        "busy_efficiency": st.sampled_from([1.0, 0.8]),
        "bandwidth": st.sampled_from([1e9, 1e10, 1e11]),
        "latency": st.sampled_from([0.0, 1e-6]),
    }
)


def figures_of(job: dict[str, Any], *, whole: bool = False) -> Result:
    """The figures of a case; `whole` says that all micro-steps and local steps are simulated."""
    options = dict(job)
    options["pp"], options["interleave"] = options.pop("shape")
    options["sequence_parallel"] = options["sequence_parallel"] and options["tp"] > 1
    inter = Link(*(options.pop(name) for name in ("bandwidth", "latency")))
    inter = replace(inter, busy_efficiency=options.pop("busy_efficiency"))
    cluster = tiny.cluster(4, 4, inter=inter, interference=options.pop("interference"))
    fewest = {"_FEWEST": 10**9, "_LOCAL_STEPS": 10**9, "one_turn": lambda _: None}
    with patch.multiple(module, **fewest) if whole else nullcontext():
        return simulate(cluster, MODEL, **options)


@settings(max_examples=settings().max_examples // 2)  # each is two cases, one of them slow
@given(jobs)
def test_a_few_micro_steps_give_the_figures_of_all(job: dict[str, Any]) -> None:
    """To 1e-9, by every strategy, where communication is hidden and where it is not."""
    few, whole = figures_of(job), figures_of(job, whole=True)
    slack = 1e-9 * whole.round_time_s
    assert few.exposed_comm_s == pytest.approx(whole.exposed_comm_s, abs=slack)
    for name in ("round_time_s", "step_time_s", "tokens_per_s", "mfu", "comm_busy_s"):
        assert getattr(few, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=slack)
    for name in ("wire_bytes_per_gpu_per_step", "nic_bytes_per_node_per_step"):
        assert getattr(few, name) == pytest.approx(getattr(whole, name), rel=1e-9)
    sent = [one.sent_bytes_per_gpu_per_step for one in (few, whole)]
    assert sent[0] == pytest.approx(sent[1], rel=1e-9)
    assert sum(sent[0].values()) == pytest.approx(few.wire_bytes_per_gpu_per_step)
    assert few.breakdown_s == pytest.approx(whole.breakdown_s, rel=1e-9, abs=slack)
    assert few.memory_bytes_per_gpu == whole.memory_bytes_per_gpu
    assert few.warnings == whole.warnings


@pytest.mark.parametrize(("fragments", "delay"), [(16, 1), (8, 5), (4, 16), (16, 16)])
def test_a_round_of_alike_local_steps_is_a_turn_of_them(fragments: int, delay: int) -> None:
    """Times as long: pieces of equal size, each averaged behind as many local steps."""
    strategy = f"co2(tau=16,delay={delay},fragments={fragments},worker=node)"
    case = Question(cluster=tiny.cluster(4, 2), model=tiny.model(), strategy=strategy)
    stage = case.job().stage()
    turn = one_turn(stage.schedule)
    assert turn is not None
    assert turn.steps == 16 // fragments
    whole, short = (
        Simulator(RunOptions(), replace(stage, schedule=schedule), None).until_steady()
        for schedule in (stage.schedule, turn)
    )
    assert whole[2]
    assert short[2]
    rounds = [
        metrics.window(found[0], schedule, 1).round_time
        for found, schedule in ((whole, stage.schedule), (short, turn))
    ]
    assert rounds[0] == pytest.approx(fragments * rounds[1], rel=1e-9)


def test_a_round_of_unlike_local_steps_has_no_turn() -> None:
    """One average behind the last of them, or as many pieces as do not divide them."""
    for options in ("tau=8,fragments=1,delay=1", "tau=8,fragments=3,delay=1"):
        case = Question(cluster=tiny.cluster(4, 1), model=MODEL, strategy=f"co2({options})")
        assert one_turn(case.job().stage().schedule) is None


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "co2.published(tau=2)"])
def test_a_step_of_more_micro_steps_takes_no_more_ops(strategy: str) -> None:
    """So that time and memory do not grow with them."""
    few, many = (
        Question(
            cluster=tiny.cluster(4, 4), model=MODEL, strategy=strategy, pp=4, accumulation=count
        )
        for count in (64, 4096)
    )
    ops = [len(stage_figures(one.job(), 1).stage.schedule.body) for one in (few, many)]
    assert ops[0] == ops[1]


@pytest.mark.parametrize("strategy", ["zero1(bucket=2000)", "co2.published(tau=2)"])
def test_micro_steps_repeat_where_the_last_round_ends_faster_than_others(strategy: str) -> None:
    """Where no exchanges of a next round share links with its collectives: the midst repeats."""
    job: dict[str, Any] = {"strategy": strategy, "pp": 4, "tp": 2, "sequence_parallel": True}
    case = Question(cluster=tiny.cluster(4, 4), model=MODEL, accumulation=64, **job)
    few = stage_figures(case.job(), 1)
    prepared = case.job().stage(1)
    many = Simulator(RunOptions(), prepared, None).rounds(12)
    assert not metrics.is_steady(many, prepared.schedule)
    midst = metrics.window(many.first(10), prepared.schedule, 1)
    assert few.round_time == pytest.approx(midst.round_time, rel=1e-9)
    assert len(few.stage.schedule.body) < len(prepared.schedule.body) / 2


def test_beside_an_average_that_is_under_way_nothing_repeats() -> None:
    """Though micro-steps beside it are alike: it ends in one of those that would be left out."""
    slow, fast = (
        Question(
            cluster=tiny.cluster(8, 4, inter=Link(bandwidth)),
            model=MODEL,
            strategy="co2.published(tau=4)",
            pp=4,
            accumulation=8,
        )
        .job()
        .stage(1)
        for bandwidth in (2e8, 1e11)
    )
    for prepared, repeats in ((slow, False), (fast, True)):
        trace = Simulator(RunOptions(), prepared, None).until_steady()[0]
        assert (metrics.repeated(prepared.schedule, trace, "micro_step") is not None) is repeats


def test_micro_steps_of_a_strategy_of_ones_own_are_all_simulated() -> None:
    """What it does in each of them is not known."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Own(DDP):
        name: ClassVar[str] = "own"

    one = Question(cluster=tiny.cluster(4, 4), model=MODEL, strategy=Own(), pp=4, accumulation=64)
    names = [op.name for op in stage_figures(one.job(), 1).stage.schedule.body]
    assert any(name.startswith("m63.") for name in names)
    assert any(name.startswith("m31.") for name in names)
