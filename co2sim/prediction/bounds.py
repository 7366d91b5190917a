"""The least time of a step, without the engine: what the search of a plan leaves candidates out by.

The engine gives every op its time alone at least, and an op waits for those before it on its stream
and for those that it names. So no step ends before any of these has:

- all micro-steps: passes, and the exchanges between them that a pass waits for;
- what else is on the stream of the passes, such as the optimizer, and collectives that nothing on
  that stream lies beside, such as the reduction of the last gradients;
- where computing slows beside collectives, what these cost it that are not waited for;
- the collectives of a stream, one after the other;
- all passes but the last backward one, and from its begin on what the strategy adds, in a chain;
- in a pipeline the passes in their order (`pipeline.ends`), with the above behind the last one.

What a strategy adds is taken from its schedule of one micro-step and of two, of one sample each,
which candidates of all micro-batches and recomputations share. It is 0 for a strategy of a user's
own, and for a cluster that is one machine. Local steps add what those of one worker alone do, but
for one in each round, which may differ; of averages counts what they send, and that they are waited
for where the same round uses them.
`tests/co2sim/prediction/test_bounds.py` compares with the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar, cast

from co2sim.common.errors import OptionError
from co2sim.common.resources import LruCache
from co2sim.common.units import Bytes, Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.prediction.job import Job, Stage, call_strategy, stage_of, with_short_rounds
from co2sim.prediction.measure import between_stages, block_times, sent_on, slowdown
from co2sim.schedule.exchanges import TENSOR
from co2sim.schedule.mesh import OF_STAGES
from co2sim.schedule.pipeline import Held, PartTimes, PassTime, Pipeline, ends
from co2sim.schedule.schedule import Collective, Compute, Op
from co2sim.simulation.costs import cost_of, traffic, work_time
from co2sim.simulation.noise import QUIET
from co2sim.simulation.run import expected_slowest
from co2sim.strategies import LocalSteps, Strategy, is_built_in
from co2sim.strategies.local import OUTER, Replica, round_steps
from co2sim.strategies.step import COMPUTE, title
from co2sim.training.framework import recomputation
from co2sim.training.memory import timeline
from co2sim.training.workload import Workload

T = TypeVar("T")

_PASSES = {"forward", "backward", "recompute"}


class Least(NamedTuple):
    """Of a step: its time, and that in which a GPU computes, without waiting for exchanges."""

    seconds: Seconds
    computing: Seconds


class Passes:
    """Those over the blocks of one GPU's share of a job, as running sums.

    Of exchanges on one machine nothing is known.
    """

    def __init__(self, job: Workload, cluster: Cluster) -> None:
        """Time every kind of block once."""
        taken: dict[int, Sequence[Seconds]] = {}
        alone = cache(lambda work: cost_of(work, cluster).duration_alone(cluster))
        rows: list[Sequence[Seconds]] = []
        free = cluster.host is not None
        for work in job.share.works():
            if id(work.forward) not in taken:
                times = block_times(work, cluster, job.precision, free=free, alone=alone)
                taken[id(work.forward)] = *times.forward, *times.backward, times.weights
            rows.append(taken[id(work.forward)])
        self._sums = [tuple(accumulate(column, initial=0.0)) for column in zip(*rows, strict=True)]

    def over(self, start: int, end: int) -> PartTimes:
        """Those of the blocks from one to another."""
        sums = [column[end] - column[start] for column in self._sums]
        return PartTimes(PassTime(*sums[:4]), PassTime(*sums[4:8]), sums[8])


@dataclass(frozen=True, slots=True)
class _Added:
    """What a strategy adds to the passes of a round, in seconds.

    `fixed` is on their stream, `waits` is when that waits for others, `again` the same where passes
    are computed again, `busy` is the longest other stream of collectives, and `sends` are its
    collectives alone, beside which computing is slower. `chain` is from the begin of the last
    backward pass until the next round computes, if passes took no time.
    """

    fixed: Seconds
    waits: Seconds
    again: Seconds
    busy: Seconds
    sends: Seconds
    chain: Seconds = 0.0

    def more(self, other: "_Added", times: int) -> "_Added":
        """With what `other`, of one micro-step more, has more, several times."""
        names = "fixed", "waits", "again", "busy", "sends"
        pairs = ((name, (getattr(self, name), getattr(other, name))) for name in names)
        grown = {name: first + times * max(0.0, second - first) for name, (first, second) in pairs}
        return replace(self, **grown)


_NOTHING = _Added(0.0, 0.0, 0.0, 0.0, 0.0)


def added(stage: Stage) -> _Added:
    """Of a schedule, whatever its micro-steps have: see the module."""
    schedule, cluster = stage.schedule, stage.cluster
    if not is_built_in(stage.strategy) or cluster.host is not None:
        return _NOTHING
    alone = [
        0.0 if isinstance(work, Compute) and work.kernel in _PASSES else _alone(work, stage)
        for work in schedule.works
    ]
    seconds = [alone[index] for index in schedule.work_numbers]
    streams: dict[str, Seconds] = {}
    sends: dict[str, Seconds] = {}
    for op, time in zip(schedule.body, seconds, strict=True):
        streams[op.stream] = streams.get(op.stream, 0.0) + time
        if isinstance(op.work, Collective):
            sends[op.stream] = sends.get(op.stream, 0.0) + time
    busy, beside = (
        max((t for name, t in totals.items() if name not in {COMPUTE, TENSOR}), default=0.0)
        for totals in (streams, sends)
    )
    waits, again = _waits(schedule.body, seconds)
    return _Added(streams[COMPUTE], waits, again, busy, beside, _chain(schedule.body, seconds))


def averages_of(stage: Stage) -> tuple[Seconds, Seconds]:
    """The least that links of a node or a site are busy in a round, and what is waited for.

    Those averages are waited for that are used in the round that launched them.
    """
    cluster, schedule = stage.cluster, stage.schedule
    sent = traffic(schedule, cluster)
    far = sent.wan / cluster.wan.payload_bandwidth if cluster.wan else 0.0
    averages = {op.name: op.work for op in schedule.body if op.stream == OUTER}
    at_once = any(
        wait.op in averages and not wait.rounds_ago
        for op in schedule.body
        if op.stream == COMPUTE
        for wait in op.after
    )
    waited = sum(_alone(work, stage) for work in averages.values()) if at_once else 0.0
    return max(sent.nic / cluster.inter.payload_bandwidth, far), waited


def _alone(work: Compute | Collective, stage: Stage) -> Seconds:
    """Of an op that no other slows down."""
    cluster = stage.cluster
    if isinstance(work, Collective):
        return cost_of(work, cluster).duration_alone(cluster)
    return work_time(work, cluster, stage.precision)


def _waits(body: Sequence[Op], seconds: Sequence[Seconds]) -> tuple[Seconds, Seconds]:
    """How long the stream of the passes waits in a round, between two of its ops in a row.

    That is a chain of ops of other streams that begins behind the first and that the second waits
    for. Where exchanges of a pass lie between, which take longer with more samples, it is not
    counted. The second of two rounds counts. The second figure is that of passes that are computed
    again, with their exchanges: behind a backward pass may be one where there was none.
    """
    behind: dict[tuple[int, str], tuple[int, Seconds]] = {}  # the last main op, and how far behind
    before: dict[str, tuple[int, Seconds]] = {}  # the same of the last op of each stream
    nothing, waits, again = (-1, 0.0), 0.0, 0.0
    main, exchanged, repeats = -1, False, False
    exchanges = any(op.stream == TENSOR for op in body)
    for turn in (0, 1):
        waits = again = 0.0
        for index, op in enumerate(body):
            last, distance = before.get(op.stream, nothing)
            for wait in op.after:
                anchor, far = behind.get((turn - wait.rounds_ago, wait.op), nothing)
                if anchor > last or (anchor == last and far > distance):
                    last, distance = anchor, far
            if op.stream == COMPUTE:
                if last == main and not exchanged:
                    waits += distance
                    again += 0.0 if repeats else distance
                main, exchanged = turn * len(body) + index, False
                repeats = exchanges and _kernel(op) == "backward"
                now = main, 0.0
            else:
                exchanged = exchanged or op.stream == TENSOR
                now = last, distance + seconds[index]
            behind[turn, op.name] = before[op.stream] = now
    return waits, again


def _chain(body: Sequence[Op], seconds: Sequence[Seconds]) -> Seconds:
    """From the begin of the last backward pass of a round until the next one computes.

    The longest chain of ops that begins with one of its passes, which take no time here.
    """
    behind: dict[tuple[int, str], Seconds] = {}
    before: dict[str, tuple[int, str]] = {}
    forward = max(n for n, op in enumerate(body) if _kernel(op) == "forward")
    for turn in (0, 1):
        for index, op in enumerate(body):
            waits = [(turn - wait.rounds_ago, wait.op) for wait in op.after]
            waits += [before[op.stream]] if op.stream in before else []
            before[op.stream] = turn, op.name
            chains = [behind[wait] for wait in waits if wait in behind]
            if turn and op.stream == COMPUTE:
                return max(chains, default=0.0)
            if index > forward and not turn and _kernel(op) in _PASSES:
                chains.append(0.0)
            if chains:
                took = 0.0 if op.stream == TENSOR else seconds[index]
                behind[turn, op.name] = max(chains) + took
    return 0.0


def _kernel(op: Op) -> str:
    return op.work.kernel if isinstance(op.work, Compute) else ""


_DIGITS = 3
"""Binary ones of a round number of nodes: 1 to 8, 10, 12, 14, 16, 20 and so on."""
_KEPT = 64
"""Schedules, of some hundred ops each."""


class Shared:
    """What steps of many layouts have in common. All have one model and one stack."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        """Nothing is known yet; layouts are of nodes of the `cluster`, if there is one."""
        self._all = cluster
        self._passes: dict[object, Passes] = {}
        self._jobs: dict[object, Workload] = {}
        self._figures: dict[object, object] = {}
        self._stages: LruCache[object, Stage] = LruCache(_KEPT)

    def stage(self, job: Job, number: int = 0, steps: int = 1) -> Stage:
        """A stage of a job, with the schedule of the whole cluster where its nodes can be shared.

        The ops of fewer nodes are the same, and those of a divided optimizer take no less.
        """
        work, nodes = job.workload, job.stage_cluster.nodes
        size = number, *_stages_of(work), steps, nodes if self._all is None else nodes == 1
        key = title(job.strategy), *size, *_inside(job)
        stage = self._stages.get(key)
        if stage is None:
            stage = self._stages.put(key, self._of_most(job, nodes).stage(number, steps))
        return replace(stage, job=job)

    def _of_most(self, job: Job, nodes: int) -> Job:
        """The job on all nodes, if they can be divided so."""
        if self._all is None or nodes == 1:
            return job
        most = replace(job, cluster=self._all)
        try:
            return most if most.stage_cluster.nodes > 1 else job
        except OptionError:
            return job

    def added_of(self, job: Job, steps: int) -> _Added:
        """What the strategy of a job adds, with micro-steps; see `_fewer`."""
        return self._kept(job, steps, added)

    def averages_of(self, job: Job) -> tuple[Seconds, Seconds]:
        """Those of local updates; see `_fewer`."""
        return self._kept(job, 1, averages_of)

    def inside_of(self, job: Job, inner: Strategy, steps: int) -> _Added:
        """What a strategy adds on one node of the cluster of a job: the same on any number."""
        node = job.cluster.resized(job.cluster.gpus_per_node)
        return self._kept(replace(job, cluster=node, strategy=inner), steps, added)

    def _kept(self, job: Job, steps: int, figure: Callable[[Stage], T]) -> T:
        job = self._fewer(job)
        work, layout = job.workload, job.stage_cluster.layout
        key = figure, title(job.strategy), *_stages_of(work), steps, layout, *_inside(job)
        if key not in self._figures:
            self._figures[key] = figure(self.stage(job, 0, steps))
        return cast("T", self._figures[key])

    def _fewer(self, job: Job) -> Job:
        """The job on a rounder number of nodes, at most as many: collectives take no less on more.

        Numbers of nodes that are near each other share a bound, which is hardly lower.
        """
        nodes, cluster = job.stage_cluster.nodes, job.cluster
        fewer = nodes >> (shift := max(0, nodes.bit_length() - _DIGITS)) << shift
        if self._all is None or fewer == nodes:
            return job
        try:
            smaller = cluster.resized(fewer * job.workload.apart * cluster.gpus_per_node)
        except OptionError:
            return job
        like = replace(job, cluster=smaller)
        return like if like.stage_cluster.nodes == fewer else job

    def share(self, job: Job) -> Workload:
        """What a GPU does in a micro-step of one sample, in all stages of a pipeline together."""
        work = job.workload
        key = job.cluster.name, *_inside(job)
        if key not in self._jobs:
            self._jobs[key] = work.share
        share = self._jobs[key]
        stages = {name: getattr(work, name) for name in OF_STAGES}
        return share if _stages_of(share) == _stages_of(work) else replace(share, **stages)

    def passes(self, job: Job, share: Workload, micro_batch: int, recompute: str) -> Passes:
        """Of all blocks; exchanges inside a node are the same on any number of nodes."""
        cluster = job.stage_cluster
        key = cluster.name, *_inside(job), micro_batch, recompute
        if key not in self._passes:
            sized = replace(share, micro_batch=micro_batch, recompute=recompute)
            self._passes[key] = Passes(sized, cluster)
        return self._passes[key]


def _stages_of(work: Workload) -> tuple[object, ...]:
    """Which layers are where."""
    return tuple(getattr(work, name) for name in OF_STAGES)


def _inside(job: Job) -> tuple[object, ...]:
    """What a pass depends on besides the kind of cluster and the batch."""
    work, layout = job.workload, job.stage_cluster.layout
    g = layout.gpus_per_node
    return work.inside, g if work.reach <= g else layout


class StepBound:
    """The least time of steps of one layout: cluster, GPUs, strategy and what these divide.

    The job has one micro-step of one sample, without recomputation. Raises Co2simError for a job
    that cannot be.
    """

    def __init__(self, job: Job, shared: Shared) -> None:
        self.job, self._shared = job, shared
        self._work = shared.share(job)
        built_in = is_built_in(job.strategy) and job.cluster.host is None
        stage = job.stage_cluster
        spreads = built_in and stage.nodes > 1
        self._slowdown = expected_slowest(stage.node_spread, stage.nodes) if spreads else 1.0
        self._quiet = job.options.noise == QUIET
        self._slower = slowdown(job.cluster) if built_in else 0.0
        self._counts = [len(self._work.model.blocks) - 2]
        self._between = 0.0
        if self._work.pp > 1:
            self._counts = self._work.layer_counts(self._counts[0])
            self._between = between_stages(job, sent_on(self._work))
        self._stages_of: dict[tuple[int, str], _Stages] = {}
        self._adds: dict[int, _Added] = {}

    def quick(self, micro_batch: int, steps: int, recompute: str) -> Least:
        """Of the passes alone, those of a pipeline one after the other."""
        if not self._quiet:
            return Least(0.0, 0.0)
        stages = self._stages(micro_batch, recompute)
        first = self._step(stages, steps, _NOTHING, 0.0)
        longest = ahead = 0.0
        if self._work.schedule == "1f1b":
            for stage, part in zip(stages.each, stages.parts, strict=False):
                longest = max(longest, ahead + steps * stage.took)
                ahead += part.took + 2 * self._between
        elif self._work.schedule == "dualpipe":  # exchanges are hidden behind computing
            there, back, _ = stages.each[0]
            first -= steps * (stages.each[0].took - there.together(back))
        return Least(max(longest, first), steps * stages.computing)

    def close(self, micro_batch: int, steps: int, recompute: str) -> Least:
        """With what the strategy adds. Raises Co2simError where it cannot be used."""
        if not self._quiet:
            return Least(0.0, 0.0)
        stages = self._stages(micro_batch, recompute)
        more = self._more(steps)
        step = self._step(stages, steps, more, more.waits if recompute == "none" else more.again)
        if self._work.pp > 1:
            ended = ends(self._pipeline(steps), stages.parts, self._between, self._slower)[0]
            step = ended + max(0.0, step - steps * stages.each[0].took)
        return Least(step, steps * stages.computing)

    def _step(self, stages: "_Stages", steps: int, more: _Added, waits: Seconds) -> Seconds:
        """Of the first stage alone."""
        there, back, _ = stages.each[0]
        passes = steps * stages.each[0].took
        computing, beside, blocking = (
            steps * (mine + other) for mine, other in zip(there[1:], back[1:], strict=True)
        )
        share = self._slower
        main = max(passes, self._slowdown * computing + share * beside + blocking)
        main += self._slowdown * more.fixed + waits
        main += share * max(0.0, more.sends - more.waits - blocking - beside)
        chained = passes - back.took + more.chain
        return max(main, more.busy, chained)

    def _stages(self, micro_batch: int, recompute: str) -> "_Stages":
        """The passes of a micro-step over each part of the layers."""
        key = micro_batch, recompute
        if key not in self._stages_of:
            self._stages_of[key] = self._made(micro_batch, recompute)
        return self._stages_of[key]

    def _made(self, micro_batch: int, recompute: str) -> "_Stages":
        work, every = self._work, recomputation(recompute).every
        cuts = [0, len(work.model.blocks)]
        if work.pp > 1:  # the embedding comes first, the head last
            cuts = [0, *(1 + count for count in accumulate(self._counts[:-1])), cuts[-1]]
            if every > 1:
                return self._one_by_one(micro_batch, every, cuts)
        all_ = self._shared.passes(self.job, work, micro_batch, recompute)
        return self._staged([all_.over(start, end) for start, end in pairwise(cuts)])

    def _staged(self, parts: Sequence[PartTimes]) -> "_Stages":
        work = self._work
        stages = (work.parts_of(stage) for stage in range(work.pp))
        return _Stages(parts, [PartTimes.over([parts[n] for n in of]) for of in stages])

    def _one_by_one(self, micro_batch: int, every: int, cuts: Sequence[int]) -> "_Stages":
        """Where every second layer, say, of a stage is made again, as if it were a model."""
        again, plain = (
            self._shared.passes(self.job, self._work, micro_batch, recompute)
            for recompute in ("full", "none")
        )
        blocks, parts = self._work.model.blocks, dict[int, PartTimes]()
        for stage in range(self._work.pp):
            layer = 0
            for part in self._work.parts_of(stage):
                times = list[PartTimes]()
                for block in range(cuts[part], cuts[part + 1]):
                    inside = blocks[block].is_layer
                    layer += inside
                    taken = again if inside and layer % every == 0 else plain
                    times.append(taken.over(block, block + 1))
                parts[part] = PartTimes.over(times)
        return self._staged([parts[part] for part in sorted(parts)])

    def _pipeline(self, steps: int) -> Pipeline:
        work = self._work
        return Pipeline(work.pp, work.chunks, steps, work.schedule)

    def _more(self, steps: int) -> _Added:
        """Of a number of micro-steps: all in the midst add as much."""
        if steps < _ALL_KINDS:
            return self._added_of(steps)
        return self._added_of(2).more(self._added_of(_ALL_KINDS), steps - 2)

    def _added_of(self, steps: int) -> _Added:
        if steps not in self._adds:
            strategy = self.job.strategy
            local = is_built_in(strategy) and isinstance(strategy, LocalSteps)
            shared = self._shared
            self._adds[steps] = self._of_local(steps) if local else shared.added_of(self.job, steps)
        return self._adds[steps]

    def _of_local(self, steps: int) -> _Added:
        """Of a local step, with its share of the averages."""
        job = self.job
        assert isinstance(job.strategy, LocalSteps)
        if job.cluster.host is not None:
            return _NOTHING
        tau, inside = round_steps(job.strategy), _NOTHING
        inner = Replica.of(job.strategy).inner
        whole = job.workload.apart == 1  # a stage of a node may be too small for what is in it
        if job.strategy.worker == "node" and inner is not None and whole:
            inside = self._shared.inside_of(job, inner, steps)
        short = replace(job, strategy=with_short_rounds(job.strategy))
        sends, waited = (seconds / tau for seconds in self._shared.averages_of(short))
        alike = (tau - 1) / tau
        return _Added(
            fixed=alike * inside.fixed,
            waits=alike * inside.waits + waited,
            again=alike * inside.again + waited,
            busy=max(alike * inside.busy, sends),
            sends=max(alike * inside.sends, sends),
        )

    def memory(self, micro_batch: int, steps: int, recompute: str) -> Bytes:
        """The least that a GPU of the first stage takes: states and activations.

        Raises Co2simError for what the strategy, or the order of passes, does not allow.
        """
        work, held, strategy = self._first, Held(1.0, 0.0), self.job.strategy
        sized = replace(work, micro_batch=micro_batch, accumulation=steps, recompute=recompute)
        if work.pp > 1:
            held = self._pipeline(steps).held(0, [self._counts[n] for n in work.parts_of(0)])
        items = call_strategy(strategy, strategy.memory, sized, self.job.layout)
        return float(timeline(sized, items, *held).total.max())

    @cached_property
    def _first(self) -> Workload:
        return stage_of(self._work, 0)


_ALL_KINDS = 3
"""Micro-steps: the first, one in the midst, and the last."""


class _Stages(NamedTuple):
    """The passes of a micro-step over each part of the layers, and over all that a stage has."""

    parts: Sequence[PartTimes]
    each: Sequence[PartTimes]

    @property
    def computing(self) -> Seconds:
        """Of the first stage."""
        return self.each[0].forward.computing + self.each[0].backward.computing
