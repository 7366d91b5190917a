"""The order of passes in a pipeline, when they end, and what a stage holds meanwhile.

A schedule is an order of passes over the chunks of each stage: forward, backward, and backward in
two, for the gradients of inputs first and those of weights later. `order_of` says it as kinds of
passes over chunks, each of which takes the next micro-batch; all else follows from that.

Parts of the layers are numbered as a sample passes them. A stage has every `stages`-th of them
(Narayanan et al. 2021, arXiv 2104.04473, section 2.2), or, in a V, those that are equally far from
both ends. DualPipe trains two replicas in opposite directions: the parts of the second one are
numbered behind those of the first, so that a stage has parts in a V, too.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, pairwise
from typing import Literal, NamedTuple, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds

PipelineSchedule = Literal["1f1b", "zb_h1", "zbv", "dualpipe"]
"""1f1b: Narayanan et al. 2021, arXiv 2104.04473, section 2.2. zb_h1 and zbv: Qi et al. 2024, Zero
Bubble Pipeline Parallelism, arXiv 2401.10241. dualpipe: DeepSeek-V3, arXiv 2412.19437, section
3.2.1."""

MAX_PASSES = 2_000_000
"""Of all stages in a step: seconds of computing."""

_NOT_YET: Seconds = -1.0

_KINDS = range(5)
_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS, _BESIDE = _KINDS
"""Kinds of passes. Backward is both of inputs and weights. Beside is a forward pass together with
the backward pass that comes next in the order."""

_Pass: TypeAlias = tuple[int, int]
"""Its kind and its chunk."""


class PassTime(NamedTuple):
    """How long a pass takes: computing, exchanges beside it, and those that it waits for."""

    took: Seconds
    computing: Seconds
    beside: Seconds = 0.0
    blocking: Seconds = 0.0

    @classmethod
    def of(cls, computing: Seconds, beside: Seconds, blocking: Seconds) -> "PassTime":
        """What is beside is hidden as far as computing is long enough."""
        return cls(blocking + max(computing, beside), computing, beside, blocking)

    def together(self, other: "PassTime", slower: float = 0.0) -> Seconds:
        """How long two passes take that compute while the other exchanges something.

        Computing takes longer by a share `slower` of what exchanges take. Source: DeepSeek-V3,
        arXiv 2412.19437, section 3.2.1.
        """
        exchanging = self.beside + self.blocking + other.beside + other.blocking
        return max(self.computing + other.computing + slower * exchanging, exchanging)


class PartTimes(NamedTuple):
    """Of passes over a part of the layers; `weights` is the part of `backward` for weights."""

    forward: PassTime
    backward: PassTime
    weights: Seconds

    @classmethod
    def over(cls, blocks: Sequence["PartTimes"]) -> "PartTimes":
        """Those of passes over several blocks, one after the other."""
        forward, backward, weights = zip(*blocks, strict=True)
        there, back = (PassTime(*map(sum, zip(*of, strict=True))) for of in (forward, backward))
        return cls(there, back, sum(weights))

    @property
    def took(self) -> Seconds:
        """Both passes, one after the other."""
        return self.forward.took + self.backward.took


class Held(NamedTuple):
    """Of how many micro-batches a stage holds activations, in passes over all of its layers.

    `begun` is the most, from the forward pass to the end of the backward pass, for weights, too.
    `late` is the most whose pass for weights is still to come while another goes back.
    """

    begun: float
    late: float


def parts_of(stages: int, chunks: int, stage: int, *, in_v: bool) -> list[int]:
    """The parts of a stage with `chunks` of them: every `stages`-th, or there and back in a V."""
    back = stages - 1 - stage if in_v else stage
    return [turn * stages + (back if turn % 2 else stage) for turn in range(chunks)]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` with `chunks` of layers each, and the micro-batches of a step.

    Of dualpipe these are those of each direction. Raises OptionError for what the order does not
    allow, and for too many passes.
    """

    stages: int
    chunks: int
    micros: int
    schedule: PipelineSchedule = "1f1b"

    def __post_init__(self) -> None:
        """Refuse micro-batches that stages cannot take in this order."""
        passes = 2 * self.parts * self.micros
        if passes > MAX_PASSES:
            chunks = f", interleave={self.chunks}" if not self.in_v else ""
            raise OptionError(
                f"pp={self.stages}{chunks} and {self.micros:,} micro-steps are"
                f" {passes:,} passes in a step; at most {MAX_PASSES:,} are simulated"
            )
        if self.chunks > 1 and not self.in_v and self.micros % self.stages:
            raise OptionError(
                f"interleave={self.chunks} needs micro-steps in multiples of pp={self.stages}, and"
                f" a step has {self.micros}; give accumulation or global_batch"
            )
        if self.schedule == "dualpipe" and self.micros < self.stages:
            raise OptionError(
                f"schedule=dualpipe needs pp={self.stages} micro-steps or more in each direction,"
                f" and a step has {self.micros}; give accumulation or global_batch"
            )

    @property
    def in_v(self) -> bool:
        """Whether a stage has a part and the one as far from the other end."""
        return self.schedule in {"zbv", "dualpipe"}

    @property
    def parts(self) -> int:
        """Of the layers, of both replicas of dualpipe."""
        return self.stages * self.chunks

    @property
    def replicas(self) -> int:
        """Of the model on the stages."""
        return 2 if self.schedule == "dualpipe" else 1

    def stage_of(self, part: int) -> int:
        """The stage that has a part."""
        turn, place = divmod(part, self.stages)
        return self.stages - 1 - place if self.in_v and turn % 2 else place

    def messages(self, stage: int) -> int:
        """What a stage sends to others in a step: outputs forward, and gradients backward."""
        on = [self.stage_of(part) for part in range(self.parts)]
        length = self.parts // self.replicas
        joints = [(a, b) for n, (a, b) in enumerate(pairwise(on), 1) if n % length and a != b]
        return self.micros * sum(stage in joint for joint in joints)

    def held(self, stage: int, counts: Sequence[int]) -> Held:
        """What a stage holds at most; its chunks have `counts` layers, as a sample passes them.

        Where it has none, both embedding and head, these count as one each.
        """
        few = replace(self, micros=min(self.micros, _ROUNDS * self.stages))
        return _held(few, stage, tuple(counts) if any(counts) else (1,) * len(counts))

    def order(self, stage: int) -> list[int]:
        """The numbers of the passes of a stage in turn: (kind x parts + part) x micros + micro."""
        mine = parts_of(self.stages, self.chunks, stage, in_v=self.in_v)
        late: list[deque[int]] = [deque() for _ in mine]
        ahead, back = ([count() for _ in mine] for _ in range(2))
        behind = [iter(waiting.popleft, None) for waiting in late]
        turns = ahead, back, back, behind, ahead  # by kind
        starts = [[(kind * self.parts + part) * self.micros for part in mine] for kind in _KINDS]
        numbers: list[int] = []
        for kind, chunk in order_of(self, stage):
            micro = next(turns[kind][chunk])
            if kind == _INPUTS:
                late[chunk].append(micro)
            if micro < self.micros:
                numbers.append(starts[kind][chunk] + micro)
        return numbers


def order_of(pipeline: Pipeline, stage: int) -> Iterator[_Pass]:
    """The passes of a stage in turn, each over the next micro-batch of its kind and chunk."""
    if pipeline.schedule == "zbv":
        return _zbv(pipeline, stage)
    if pipeline.schedule == "dualpipe":
        return _dualpipe(pipeline, stage)
    return _one_by_one(pipeline, stage)


def _one_by_one(pipeline: Pipeline, stage: int) -> Iterator[_Pass]:
    """1F1B, also interleaved: as many micro-batches as stages on each chunk in turn.

    With zb_h1 passes for weights begin as many micro-batches later as there are stages before, so
    that all stages hold as much (arXiv 2401.10241, section 2.1; interleaved as
    ScheduleInterleavedZeroBubble of PyTorch, torch/distributed/pipelining/schedules.py).
    """
    stages, chunks, micros = pipeline.stages, pipeline.chunks, pipeline.micros
    splits = pipeline.schedule == "zb_h1"
    group = min(stages, micros) if chunks > 1 else micros
    turns = [chunk for _ in range(micros // group) for chunk in range(chunks)]
    forward = [chunk for chunk in turns for _ in range(group)]
    backward = [chunks - 1 - chunk for chunk in forward]
    ahead = stages - 1 - stage
    if chunks > 1:
        ahead = (1 if splits else 2) * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(forward))
    yield from ((_FORWARD, chunk) for chunk in forward[:ahead])
    for turn, chunk in enumerate(backward):
        if turn + ahead < len(forward):
            yield _FORWARD, forward[turn + ahead]
        yield _INPUTS if splits else _BACKWARD, chunk
        if splits and turn >= stage:
            yield _WEIGHTS, backward[turn - stage]
    if splits and stage:
        yield from ((_WEIGHTS, chunk) for chunk in backward[-stage:])


def _zbv(pipeline: Pipeline, stage: int) -> Iterator[_Pass]:
    """ZB-V as PyTorch has it (ScheduleZBVZeroBubble); of few micro-batches the rest is left out.

    Source: arXiv 2401.10241; torch/distributed/pipelining/schedules.py.
    """
    stages = pipeline.stages
    behind, micros = stages - stage, max(pipeline.micros, 2 * stages - 1)
    up, down = ((_INPUTS, 1), (_WEIGHTS, 1)), ((_INPUTS, 0), (_WEIGHTS, 0))
    begun = 2 * behind - 1 + stage
    yield from [(_FORWARD, 0)] * (2 * behind - 1)
    yield from [(_FORWARD, 1), (_FORWARD, 0)] * stage
    yield from [(_FORWARD, 1), *up] * behind
    for turn in range(micros - stages):
        if turn < micros - begun:
            yield _FORWARD, 0
        yield from (*down, (_FORWARD, 1), *up)
    yield from [(_INPUTS, 0), (_INPUTS, 1)] * stage
    yield from [*down] * behind
    yield from [(_WEIGHTS, 1)] * stage
    yield from [(_WEIGHTS, 0)] * stage


def _dualpipe(pipeline: Pipeline, stage: int) -> Iterator[_Pass]:
    """DualPipe: in the midst each forward pass goes beside a backward one of the other direction.

    Source: deepseek-ai/DualPipe at commit 3da1bbe, dualpipe/dualpipe.py, DualPipe.step.
    """
    last = pipeline.stages - 1
    near, far = (0, 1) if 2 * stage < last else (1, 0)
    place = min(stage, last - stage)
    inner = pipeline.stages // 2 - 1 - place
    both = [(_BESIDE, near), (_BACKWARD, far), (_BESIDE, far), (_BACKWARD, near)]
    yield from [(_FORWARD, near)] * (2 * inner)
    yield from [(_FORWARD, near), (_FORWARD, far)] * (place + 1)
    yield from [(_INPUTS, far), (_WEIGHTS, far), (_FORWARD, far)] * inner
    for turn in range(pipeline.micros - last + place):
        alone = not turn and not inner
        yield from [(_FORWARD, near), *both[1:]] if alone else both
    yield from [(_BACKWARD, far), *both[2:]] * inner
    whole, late = place + 1, deque[int]()  # backward passes with weights, then without
    for turn in range(2 * (place + 1)):
        chunk = near if turn % 2 else far
        if turn < whole:
            yield _BACKWARD, chunk
        else:
            late.append(chunk)
            yield _INPUTS, chunk
    for _ in range(inner):
        yield _WEIGHTS, late.popleft()
        late.append(near)
        yield _INPUTS, near
    yield from ((_WEIGHTS, chunk) for chunk in late)


_ROUNDS = 3
"""Times as many micro-batches as stages: with more of them no stage holds more."""


@lru_cache(maxsize=4096)
def _held(pipeline: Pipeline, stage: int, counts: tuple[int, ...]) -> Held:
    if pipeline.schedule == "dualpipe":  # both stages of the same layers hold as much
        stage = min(stage, pipeline.stages - 1 - stage)
    begun = late = most = most_late = 0
    for number in pipeline.order(stage):
        kind, part = divmod(number // pipeline.micros, pipeline.parts)
        layers = counts[part // pipeline.stages]
        if kind in {_FORWARD, _BESIDE}:
            begun += layers
            most = max(most, begun)
        elif kind == _INPUTS:
            most_late = max(most_late, late)
            late += layers
        else:
            begun -= layers
            late -= layers if kind == _WEIGHTS else 0
    return Held(most / sum(counts), most_late / sum(counts))


def ends(
    pipeline: Pipeline, times: Sequence[PartTimes], between: Seconds, slower: float = 0.0
) -> list[Seconds]:
    """When each stage ends its last pass; `times` are of the parts of the layers in turn.

    `between` passes from the end of a pass until another stage has what it made. For `slower` see
    `PassTime.together`.
    """
    stages, micros, parts = pipeline.stages, pipeline.micros, pipeline.parts
    rows = _rows(pipeline, times, between, slower)
    took, away, sent, mark = ([row[n] for row in rows] for n in range(4))
    ended = [_NOT_YET] * (parts * micros * (2 if pipeline.schedule == "1f1b" else _BESIDE))
    orders = [pipeline.order(stage) for stage in range(stages)]
    done, free = [0] * stages, [0.0] * stages
    there_and_back = [*range(stages), *range(stages - 2, 0, -1)]
    beside = _BESIDE * parts
    while any(turn < len(order) for turn, order in zip(done, orders, strict=True)):
        for stage in there_and_back:
            order, turn, now = orders[stage], done[stage], free[stage]
            while turn < len(order):
                pass_index = order[turn]
                row = pass_index // micros
                if away[row]:
                    come = ended[pass_index + away[row]]
                    if come < 0:
                        break
                    now = max(now, come + sent[row])
                if row >= beside:  # both wait for each other, and end together
                    other = order[turn + 1]
                    come = ended[other + away[other // micros]]
                    if come < 0:
                        break
                    now = max(now, come + sent[other // micros])
                    ended[other] = now + took[row]
                    turn += 1
                now = ended[pass_index + mark[row]] = now + took[row]
                turn += 1
            done[stage], free[stage] = turn, now
    return free


def busy(
    pipeline: Pipeline, times: Sequence[PartTimes], stage: int, slower: float = 0.0
) -> Seconds:
    """How long a stage is at work in a step; see `ends`."""
    rows, took, beside = _rows(pipeline, times, 0.0, slower), 0.0, False
    for number in pipeline.order(stage):
        row = number // pipeline.micros
        took += 0.0 if beside else rows[row].took
        beside = row >= _BESIDE * pipeline.parts
    return took


class _Row(NamedTuple):
    """Of all passes of a kind over a part.

    How long they take, how far away the pass is that they wait for (0: for none), how long what it
    sends is under way, and how far away their end is kept.
    """

    took: Seconds
    away: int
    sent: Seconds
    mark: int


def _rows(
    pipeline: Pipeline, times: Sequence[PartTimes], between: Seconds, slower: float
) -> list[_Row]:
    """By kind and part. A forward pass waits for that of the part before.

    A backward pass waits for that of the part behind, or, of the last one, for the forward pass.
    """
    parts, micros = pipeline.parts, pipeline.micros
    every, length = parts * micros, parts // pipeline.replicas
    on = [pipeline.stage_of(part) for part in range(parts)]
    rows: list[list[_Row]] = [[] for _ in range(_BESIDE + 1)]
    for part in range(parts):
        first, last = part % length == 0, (part + 1) % length == 0
        there, back, weights = times[part % length]
        before = 0.0 if first or on[part - 1] == on[part] else between
        behind = 0.0 if last or on[part + 1] == on[part] else between
        away = -every if last else micros
        both = there.together(times[-1 - part % length].backward, slower)
        rows[_FORWARD].append(_Row(there.took, 0 if first else -micros, before, 0))
        rows[_BACKWARD].append(_Row(back.took, away, behind, 0))
        rows[_INPUTS].append(_Row(back.took - weights, away - every, behind, -every))
        rows[_WEIGHTS].append(_Row(weights, 0, 0.0, 0))
        out = _BESIDE * every
        rows[_BESIDE].append(_Row(both, 0 if first else -micros - out, before, -out))
    return [row for kind in rows for row in kind]
