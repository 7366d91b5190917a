"""Pipelines: the order of passes, the bubble, what stages hold; steps of many micro-steps."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.pipeline import PartTimes, PassTime, Pipeline, ends
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


SCHEDULES = ["1f1b", "zb_h1", "zbv", "dualpipe"]


class StagePass(NamedTuple):
    """A pass of a micro-batch over a part of the layers, of both replicas of dualpipe.

    forward, backward, inputs, weights; and beside, a forward pass together with the next one.
    """

    kind: str
    part: int
    micro: int


def passes_of(pipeline: Pipeline, stage: int) -> list[StagePass]:
    """The passes of a stage in turn, by what their numbers say."""
    kinds = ["forward", "backward", "inputs", "weights", "beside"]
    found = []
    for number in pipeline.order(stage):
        row, micro = divmod(number, pipeline.micros)
        kind, part = divmod(row, pipeline.parts)
        assert pipeline.stage_of(part) == stage
        found.append(StagePass(kinds[kind], part, micro))
    return found


def equal(pipeline: Pipeline, forward: float, inputs: float, weights: float) -> list[PartTimes]:
    """As long passes over every part of the layers; the times are those of a stage."""
    parts = pipeline.parts // pipeline.replicas
    share = pipeline.stages / parts
    there, back = (PassTime(time * share, time * share) for time in (forward, inputs + weights))
    return [PartTimes(there, back, weights * share)] * parts


def bubble(pipeline: Pipeline, forward: float, inputs: float, weights: float) -> float:
    """How much longer than its work a step of equal stages takes."""
    found = max(ends(pipeline, equal(pipeline, forward, inputs, weights), 0.0))
    return found - pipeline.micros * pipeline.replicas * (forward + inputs + weights)


times = st.floats(0.1, 10)


@given(shapes, times, times)
def test_equal_stages_take_the_closed_form(
    shape: tuple[int, int, int], forward: float, backward: float
) -> None:
    """(m + (p-1)/v) (f + b): the bubble is (p-1)/v passes each way.

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    stages, chunks, micros = shape
    pipeline = Pipeline(*shape)
    found = ends(pipeline, equal(pipeline, forward, backward, 0.0), 0.0)
    expected = (micros + (stages - 1) / chunks) * (forward + backward)
    assert max(found) == pytest.approx(expected)
    assert found[0] == pytest.approx(expected)


@given(st.integers(1, 8), st.integers(0, 20), times, times, st.floats(0, 1))
def test_bubbles_of_zb_h1_are_a_pass_for_weights_smaller_each_way(
    stages: int, more: int, forward: float, inputs: float, share: float
) -> None:
    """(p-1) (F + B - W), where 1F1B has (p-1) (F + B + W), and W is the shortest.

    Source: Qi et al. 2024, arXiv 2401.10241, table 2.
    """
    weights = share * min(forward, inputs)
    passes = forward, inputs, weights
    for schedule, sign in (("zb_h1", -1), ("1f1b", 1)):
        pipeline = Pipeline(stages, 1, stages + more, schedule)
        expected = (stages - 1) * (forward + inputs + sign * weights)
        assert bubble(pipeline, *passes) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 8), st.integers(0, 20), times)
def test_no_stage_of_zbv_waits_between_equal_passes(stages: int, more: int, time: float) -> None:
    """It begins with half a pass for each stage before it, and ends as much later.

    Source: Qi et al. 2024, arXiv 2401.10241: zero bubble with F = B = W.
    """
    pipeline = Pipeline(stages, 2, 2 * stages - 1 + more, "zbv")
    found = ends(pipeline, equal(pipeline, time, time, time), 0.0)
    work = 3 * pipeline.micros * time
    assert found == pytest.approx([work + stage * time / 2 for stage in range(stages)])


@given(st.integers(1, 4), st.integers(0, 20), times, st.floats(0, 1))
def test_bubbles_of_dualpipe_are_those_of_half_the_stages(
    half: int, more: int, time: float, share: float
) -> None:
    """(p/2 - 1) (F&B + B - 3 W) of whole backward passes B, where F is the pass for inputs.

    Source: DeepSeek-V3, arXiv 2412.19437, table 2.
    """
    pipeline = Pipeline(2 * half, 2, 2 * half + more, "dualpipe")
    weights = share * time
    whole = time + weights
    expected = (half - 1) * (time + whole + whole - 3 * weights)
    assert bubble(pipeline, time, time, weights) == pytest.approx(expected, abs=1e-9)


PROFILED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
]
"""Stages, micro-batches, milliseconds of F, B, W and of sending; bubble rates of 1F1B and ZB-H1.

Source: Qi et al. 2024, arXiv 2401.10241v1, tables 6 and 5.
"""


@pytest.mark.parametrize("row", PROFILED)
def test_published_bubble_rates_follow_from_published_times(row: tuple[float, ...]) -> None:
    """To all four digits, with the time that sending takes."""
    stages, micros, forward, inputs, weights, between, *rates = row
    for schedule, rate in zip(("1f1b", "zb_h1"), rates, strict=True):
        pipeline = Pipeline(int(stages), 1, int(micros), schedule)
        step = max(ends(pipeline, equal(pipeline, forward, inputs, weights), between))
        work = micros * (forward + inputs + weights)
        assert 1 - work / step == pytest.approx(rate, abs=5.1e-5)


def test_two_stages_of_zb_h1_by_hand() -> None:
    """F 2, B 3, W 1, half a second between, two micro-batches.

    First stage: F 0-2, F 2-4, waits for B of the second one. Second: F 2.5-4.5, B 4.5-7.5,
    F 7.5-9.5, B 9.5-12.5, W -13.5, W -14.5. First: B 8-11, W -12, B 13-16, W -17.
    """
    pipeline = Pipeline(2, 1, 2, "zb_h1")
    order = [[(one.kind[0], one.micro) for one in passes_of(pipeline, n)] for n in (0, 1)]
    assert order[0] == [("f", 0), ("f", 1), ("i", 0), ("w", 0), ("i", 1), ("w", 1)]
    assert order[1] == [("f", 0), ("i", 0), ("f", 1), ("i", 1), ("w", 0), ("w", 1)]
    assert ends(pipeline, equal(pipeline, 2.0, 3.0, 1.0), 0.5) == [17.0, 14.5]


deep = st.builds(
    lambda stages, chunks, rounds, schedule: (stages, chunks, stages * rounds, schedule),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["1f1b", "zb_h1"]),
) | st.builds(
    lambda stages, more, schedule: (
        2 * stages,
        2 if schedule in {"zbv", "dualpipe"} else 1,
        more + 2 * stages * (schedule == "dualpipe"),
        schedule,
    ),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from(SCHEDULES),
)
"""Stages, chunks, micro-batches and schedules that go together."""


def needed(pipeline: Pipeline, one: StagePass) -> StagePass | None:
    """The pass that a pass waits for, as forward or backward."""
    length = pipeline.parts // pipeline.replicas
    if one.kind == "weights":
        return None
    if one.kind in {"forward", "beside"}:
        first = one.part % length == 0
        return None if first else StagePass("forward", one.part - 1, one.micro)
    if (one.part + 1) % length == 0:
        return one._replace(kind="forward")
    return StagePass("backward", one.part + 1, one.micro)


@dataclass
class Run:
    """Passes one after the other, without numbers: each begins when its stage and another let it.

    `parts` are the times of passes over the parts of the layers.
    """

    pipeline: Pipeline
    parts: list[PartTimes]
    between: float
    slower: float
    ended: dict[StagePass, float] = field(default_factory=dict)

    def come(self, one: StagePass, stage: int) -> float | None:
        """When what a pass waits for has come; None: not yet."""
        before = needed(self.pipeline, one)
        if before is None:
            return 0.0
        way = 0.0 if self.pipeline.stage_of(before.part) == stage else self.between
        return self.ended[before] + way if before in self.ended else None

    def took(self, now: list[StagePass]) -> float:
        """How long a pass takes, or two together."""
        of = [self.parts[one.part % len(self.parts)] for one in now]
        there, back, weights = of[0]
        if now[0].kind == "beside":
            back = of[1].backward
            sent = there.beside + there.blocking + back.beside + back.blocking
            return max(sent, there.computing + back.computing + self.slower * sent)
        whole = {"forward": there.took, "backward": back.took, "weights": weights}
        return {**whole, "inputs": back.took - weights}[now[0].kind]

    def until_all_end(self) -> list[float]:
        """When each stage has ended its passes."""
        stages = range(self.pipeline.stages)
        left = [passes_of(self.pipeline, stage) for stage in stages]
        free = [0.0 for _ in stages]
        ways = {"beside": "forward", "inputs": "backward"}
        while any(left):
            ready = []
            for stage in stages:
                now = left[stage][: 2 if left[stage] and left[stage][0].kind == "beside" else 1]
                begins = [self.come(one, stage) for one in now]
                if now and None not in begins:
                    ready.append((stage, now, max(time for time in begins if time is not None)))
            assert ready, "no stage can go on"
            for stage, now, begin in ready:
                free[stage] = max(free[stage], begin) + self.took(now)
                kinds = [one._replace(kind=ways.get(one.kind, one.kind)) for one in now]
                self.ended |= dict.fromkeys(kinds, free[stage])
                left[stage] = left[stage][len(now) :]
        return free


@given(deep, st.randoms(use_true_random=False))
def test_times_are_those_of_passes_one_after_the_other(shape: Any, random: Random) -> None:
    """By an oracle that knows no numbers of passes."""
    pipeline = Pipeline(*shape)

    def taken() -> PassTime:
        return PassTime.of(*(random.choice([0.0, random.random()]) for _ in range(3)))

    made = [(taken(), taken(), random.random()) for _ in range(pipeline.parts // pipeline.replicas)]
    parts = [PartTimes(there, back, share * back.computing) for there, back, share in made]
    between, slower = random.choice([0.0, random.random()]), random.choice([0.0, 0.2])
    expected = Run(pipeline, parts, between, slower).until_all_end()
    assert ends(pipeline, parts, between, slower) == expected


@given(deep, st.data())
def test_every_stage_runs_every_pass_once_and_holds_what_it_says(
    shape: Any, data: st.DataObject
) -> None:
    """Forward before backward; what is begun and not ended is held, by layers of its chunk."""
    pipeline = Pipeline(*shape)
    stages, chunks, micros = shape[:3]
    layers = data.draw(st.lists(st.integers(1, 9), min_size=chunks, max_size=chunks))
    for stage in range(stages // pipeline.replicas):
        order = passes_of(pipeline, stage)
        under_way, late, most, latest = set[tuple[int, int]](), set[tuple[int, int]](), 0, 0
        count = dict.fromkeys(("forward", "backward", "weights"), 0)
        for one in order:
            chunk = one.part // stages
            if one.kind in {"forward", "beside"}:
                count["forward"] += 1
                assert (chunk, one.micro) not in under_way
                under_way.add((chunk, one.micro))
            elif one.kind == "inputs":
                count["backward"] += 1
                assert (chunk, one.micro) in under_way
                latest = max(latest, sum(layers[chunk] for chunk, _ in late))
                late.add((chunk, one.micro))
            else:
                split = one.kind == "weights"
                count["weights"] += 1
                count["backward"] += not split
                under_way.remove((chunk, one.micro))
                late -= {(chunk, one.micro)} if split else set()
            most = max(most, sum(layers[chunk] for chunk, _ in under_way))
        assert set(count.values()) == {chunks * micros}
        held = pipeline.held(stage, layers)
        assert held == pytest.approx((most / sum(layers), latest / sum(layers)))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_stages_hold_what_papers_say(stages: int) -> None:
    """Of as many micro-batches as there are stages; with dualpipe of stages + 1, each of a half.

    Sources: arXiv 2401.10241, table 2, where every stage has as many under way; arXiv 2412.19437,
    table 2.
    """
    for stage in range(stages):
        held = {
            schedule: Pipeline(stages, len(counts), 4 * stages, schedule).held(stage, counts).begun
            for schedule, counts in (
                *(("1f1b", [1]), ("zb_h1", [1])),
                *(("zbv", [1, 1]), ("dualpipe", [1, 1])),
            )
        }
        assert held["1f1b"] == stages - stage
        assert held["zb_h1"] == held["zbv"] == stages
        assert 2 * held["dualpipe"] == stages + 1


@given(
    st.sampled_from([2, 3, 4, 5]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(SCHEDULES),
)
def test_stages_have_the_model_together(pp: int, chunks: int, tp: int, schedule: Any) -> None:
    """Every layer once, with dualpipe twice; embedding and head may be on different stages.

    Where they share weights, both ends hold them then.
    """
    if Mesh(pp=pp, interleave=chunks, schedule=schedule).problem:
        return
    job = Workload(MODEL, tp=tp, pp=pp, interleave=chunks, schedule=schedule)
    if job.parts == 10:  # embedding and head count as layers
        assert [len(stage_of(job, n).model.blocks) for n in range(pp)] == [2] * pp
    elif job.parts > LAYERS:
        return
    copies = 2 if schedule == "dualpipe" else 1
    stages = [stage_of(job, number) for number in range(pp)]
    share = job.share.model
    names = [block.name for stage in stages for block in stage.model.blocks]
    assert sorted(names) == sorted(copies * [block.name for block in share.blocks])
    together = sum(stage.parameters for stage in stages)
    apart = 0 if schedule in {"zbv", "dualpipe"} else share.blocks[-1].tied
    assert together == copies * job.share.parameters + apart
    flops = sum(work.forward.flops for stage in stages for work in stage.works())
    assert flops == pytest.approx(copies * sum(w.forward.flops for w in job.share.works()))


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


def test_both_chunks_of_a_stage_in_a_v_count_together() -> None:
    """The first and the last layers are on one stage, with embedding and head."""
    assert Mesh(pp=4, schedule="zbv").layer_counts(10) == [1, 2, 2, 2, 1, 1, 1, 0]
    assert Mesh(pp=4, schedule="zbv").layer_counts(14) == [1, *[2] * 6, 1]
    assert Mesh(pp=4, schedule="zbv").layer_counts(9) == [2, *[1] * 7]
    assert Mesh(pp=4, schedule="zbv").layer_counts(6) == [0, *[1] * 6, 0]
    assert Mesh(pp=4, schedule="dualpipe").layer_counts(10) == [2, 3, 3, 2]


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


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp", "co2.published(tau=2)"])
def test_every_schedule_combines_with_strategies(strategy: str, schedule: str) -> None:
    """Where links cost little each makes bubbles smaller; dualpipe trains in both directions."""
    fast = tiny.cluster(4, 4, intra=Link(1e18), inter=Link(1e18))
    deep: dict[str, Any] = {"cluster": fast, "model": MODEL, "strategy": strategy}
    deep |= {"pp": 4, "tp": 2, "accumulation": 8}
    usual, found = simulate(**deep), simulate(**deep, schedule=schedule)
    directions = 2 if schedule == "dualpipe" else 1
    assert found.global_batch == directions * usual.global_batch == directions * 2 * 8
    assert found.hardware_tflops_per_gpu == pytest.approx(found.model_tflops_per_gpu)
    assert found.step_time_s / directions < usual.step_time_s
    assert found.breakdown_s["idle"] < usual.breakdown_s["idle"] * directions


def test_dualpipe_holds_the_states_of_two_stages() -> None:
    """Parameters of twice the layers, of which twice as many GPUs divide optimizer states."""
    deep: dict[str, Any] = {"cluster": tiny.cluster(4, 4), "model": MODEL, "strategy": "zero1"}
    usual, found = (
        Question(**deep, pp=4, accumulation=8, schedule=schedule).job()
        for schedule in ("1f1b", "dualpipe")
    )
    stages = [usual.stage(number).timeline() for number in (1, 2)]
    mine = found.stage(1).timeline()
    for item, copies in (("parameters", 1), ("optimizer", 2)):
        assert copies * mine.most(item) == sum(stage.most(item) for stage in stages)


def test_too_many_passes_are_refused() -> None:
    """Before any is lined up."""
    with pytest.raises(Co2simError, match="2,000,000"):
        Pipeline(1024, 128, 10_000)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_stages_of_zbv_send_twice_as_much(stages: int) -> None:
    """And those of dualpipe as much as with 1F1B.

    Source: sail-sg/zero-bubble-pipeline-parallelism, README.md.
    """
    for stage in range(stages):
        usual, split, in_v, both = (
            Pipeline(stages, chunks, micros, schedule).messages(stage)
            for schedule, chunks, micros in (
                *(("1f1b", 1, 16), ("zb_h1", 1, 16)),
                *(("zbv", 2, 16), ("dualpipe", 2, 8)),
            )
        )
        assert usual == split == both
        assert in_v == 2 * usual


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
