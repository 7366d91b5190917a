"""Shared parts of the local-update family: workers, their local steps, and their averages.

Local updates make replicas diverge, so only ranks that hold the same parameters can share
optimizer states. A worker is therefore one GPU, one node, or one site: inside of it DDP or ZeRO
works over the fast links in every step, and each rank averages its share with its peers in other
nodes or at other sites; or the first rank of each node averages everything, and broadcasts it
inside.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from co2sim.common.delayed_averaging import LONGEST
from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import (
    LEADERS,
    NODE,
    PEERS,
    SITE,
    SITE_PEERS,
    WORLD,
    After,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.strategies.chaining import chain
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.step import (
    COMM,
    COMPUTE,
    QUANTIZED,
    SCALE_BLOCK,
    Step,
    cut,
    recode,
    sum_received,
    title,
    whole_options,
)
from co2sim.strategies.zero import DDP, Zero1, Zero2, Zero3
from co2sim.strategies.zeropp import ZeroPP
from co2sim.training.memory import Items, model_states
from co2sim.training.workload import Workload

Worker: TypeAlias = Literal["gpu", "node", "site"]
Inner: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3", "zeropp", "fsdp"]
Averaged: TypeAlias = Literal["shares", "leader"]
Unquantized: TypeAlias = Literal[DType.FP32, DType.FP16, DType.BF16]
Auto: TypeAlias = Literal["auto"]
"""A number that is chosen for the cluster at hand."""

OUTER = "outer"
"""The stream of the averages: their own communicator, so that local steps do not wait for them."""

InnerStrategy: TypeAlias = DDP | Zero1 | Zero2 | Zero3 | ZeroPP | FSDP

_INNER: dict[str, InnerStrategy] = {
    "ddp": DDP(),
    "zero1": Zero1(),
    "zero2": Zero2(),
    "zero3": Zero3(),
    "zeropp": ZeroPP(hpz=False),  # a secondary shard in a node would be the first
    "fsdp": FSDP(),
}


@runtime_checkable
class LocalSteps(Protocol):
    """A strategy whose workers take `tau` local steps between averages."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def tau(self) -> int | Auto: ...  # noqa: D102
    @property
    def worker(self) -> Worker: ...  # noqa: D102
    @property
    def inner(self) -> Inner | None: ...  # noqa: D102
    @property
    def dtype(self) -> DType: ...  # noqa: D102


def check(strategy: LocalSteps, quantized: frozenset[DType] = frozenset()) -> None:
    """Refuse options out of range, in contradiction, or of a quantized type not among these."""
    if strategy.tau != "auto":
        whole_options(strategy, "tau", most=LONGEST)
    if strategy.worker == "gpu" and strategy.inner is not None:
        raise OptionError(
            f"inner={strategy.inner} does not apply to worker=gpu; use worker=node or worker=site"
        )
    if strategy.worker == "site" and strategy.inner == "zeropp":
        raise OptionError("inner=zeropp needs worker=node: it exchanges gradients inside nodes")
    if strategy.dtype in QUANTIZED - quantized:
        allowed = ", ".join([DType.FP32, DType.BF16, DType.FP16, *sorted(quantized)])
        raise OptionError(f"{strategy.name}: dtype is {strategy.dtype}; it is one of {allowed}")


def round_steps(strategy: LocalSteps) -> int:
    """The local steps of a round. Raises OptionError where they are still to be chosen."""
    return require_chosen(strategy.name, "tau", strategy.tau)


def require_chosen(name: str, option: str, value: int | Auto) -> int:
    """The value of an option. Raises OptionError where it is still to be chosen."""
    if value == "auto":
        raise OptionError(
            f"{name}: {option}=auto is chosen by simulation (`co2sim run` names it); give a number"
        )
    return value


@dataclass(frozen=True, slots=True)
class Replica:
    """The ranks that hold one copy of the model, and how they step."""

    worker: Worker
    inner: InnerStrategy | None

    @classmethod
    def of(cls, strategy: LocalSteps) -> "Replica":
        """The worker of a strategy; inside a node or a site zero2 runs by default."""
        inside = strategy.worker != "gpu"
        return cls(strategy.worker, _INNER[strategy.inner or "zero2"] if inside else None)

    @property
    def inside(self) -> Group:
        """The ranks of one worker that has several."""
        return SITE if self.worker == "site" else NODE

    @property
    def peers(self) -> Group:
        """The ranks that average the same share."""
        return {"gpu": WORLD, "node": PEERS, "site": SITE_PEERS}[self.worker]

    def workers(self, layout: Layout) -> int:
        """Number of workers."""
        return layout.world_size // self.ranks(layout)

    def ranks(self, layout: Layout) -> int:
        """Ranks that share one copy of the outer state."""
        sizes = {"gpu": 1, "node": layout.gpus_per_node, "site": layout.ranks_per_site}
        return sizes[self.worker]

    def step(self, job: Workload, layout: Layout) -> Step:
        """One local step."""
        if self.inner is None:
            return DDP().step(job, Layout(1, 1), NODE)
        return self.inner.step(job, layout, self.inside)

    def check(self, job: Workload, layout: Layout) -> None:
        """Refuse workers that have not all experts. Raises OptionError."""
        gpus = self.ranks(layout) * job.tp
        if gpus % job.expert_gpus:
            raise OptionError(
                f"{job.expert_words} needs workers with all experts, of a multiple of"
                f" {job.expert_gpus} GPUs; worker={self.worker} has {gpus}"
            )

    def publish(
        self, job: Workload, layout: Layout, part: "Part", after: str, name: str
    ) -> list[Op]:
        """Gather updated shares inside the worker, where the parameters are whole on every rank.

        It brings what the gathers of the local step before would have brought: `chain` drops them.
        """
        if self.ranks(layout) == 1 or isinstance(self.inner, Zero3 | ZeroPP | FSDP):
            return []
        gathered = [(name, part.dense, self.inside)]
        if same := job.same_experts(self.inside, layout):
            gathered.append((f"{name}.experts", part.experts, same))
        return [
            Op(
                called,
                Collective(Kind.ALL_GATHER, "parameters", elements, job.precision, group),
                COMM,
                (After(after),),
            )
            for called, elements, group in gathered
        ]

    def memory(self, job: Workload, layout: Layout, copies: float) -> Items:
        """What the local step keeps, and `copies` fp32 copies of this rank's share."""
        if self.inner is None:
            states: Items = model_states(job)
        else:
            states = self.inner.memory(job, Layout(1, self.ranks(layout)))
        return dict(states) | {
            "outer": copies * math.ceil(job.owned_trained(self.ranks(layout))) * DType.FP32.bytes
        }


def workers_of(strategy: object, layout: Layout) -> int:
    """The replicas that step on their own: 1 for what is no local-update method."""
    return Replica.of(strategy).workers(layout) if isinstance(strategy, LocalSteps) else 1


def outer_work(job: Workload, elements: int, tensors: int, kernel: str = "outer") -> Compute:
    """An elementwise kernel that reads or writes `tensors` fp32 values and one live parameter."""
    return Compute(
        kernel, 2.0 * tensors * elements, elements * (4.0 * tensors + job.precision.bytes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """What is averaged once a round, and when it is used: `delay` local steps after its launch.

    Its own kernel fills `buffer` before the launch: it reads or writes `fill` fp32 values per
    parameter. With `fill` 0 there is none: the parameters themselves are averaged, or, if the delay
    is a round or more, the outer step fills the buffer that it has just read. The outer step reads
    or writes `outer` fp32 values per parameter. With `fragments` > 1 parts of the model are
    averaged one after the other, at evenly spread steps of the round.
    """

    buffer: str
    outer: int
    fill: int = 0
    delay: int = 0
    fragments: int = 1
    by: Averaged = "shares"
    scale_block: int = SCALE_BLOCK


@dataclass(frozen=True, slots=True)
class Part:
    """Trained elements that are averaged together: those of all ranks, and of a rank's experts."""

    dense: int
    experts: int

    @property
    def elements(self) -> int:
        """All of them."""
        return self.dense + self.experts

    def share(self, job: Workload, ranks: int) -> int:
        """What one of the `ranks` of a worker averages: all, if it is alone."""
        if ranks == 1:
            return self.elements
        return -(-self.dense // ranks) + -(-self.experts // job.expert_replicas(ranks))


def parts(job: Workload, count: int) -> list[Part]:
    """What is trained, in nearly equal parts. Raises OptionError for more parts than elements."""
    if count > job.trained:
        raise OptionError(f"fragments={count} of {job.trained} parameters")
    sizes = job.trained - job.trained_experts, job.trained_experts
    return [Part(*pair) for pair in zip(*(cut(size, count) for size in sizes), strict=True)]


def launches(tau: int, fragments: int = 1) -> list[int]:
    """The local step, counted from 0, after which the average of each fragment starts."""
    return [tau * (fragment + 1) // fragments - 1 for fragment in range(fragments)]


def averaged_rounds(
    strategy: LocalSteps, job: Workload, layout: Layout, plan: Averages
) -> Schedule:
    """Local steps, and the averages between them. An outer step waits for the average it uses."""
    replica, tau = Replica.of(strategy), round_steps(strategy)
    replica.check(job, layout)
    launched: dict[int, list[Op]] = {}
    used: dict[int, list[Op]] = {}
    averaged = parts(job, plan.fragments)
    starts = zip(launches(tau, plan.fragments), averaged, strict=True)
    for fragment, (local_step, part) in enumerate(starts):
        suffix = str(fragment) if plan.fragments > 1 else ""
        share = part.share(job, replica.ranks(layout))
        launched[local_step] = _launch(strategy, job, layout, plan, part, suffix)
        rounds, step = divmod(local_step + plan.delay, tau)
        waits = (After(launched[local_step][-1].name, rounds),)
        outer = Op(f"outer{suffix}", outer_work(job, share, plan.outer), COMPUTE, waits)
        publish = replica.publish(job, layout, part, outer.name, f"publish{suffix}")
        used[step] = [outer, *publish]
    extras = {}
    for step in launched.keys() | used.keys():
        start, end = launched.get(step, []), used.get(step, [])
        late = plan.delay >= tau
        ops = [*end[:1], *start, *end[1:]] if late else [*start, *end]
        # a filling kernel reads only what its own rank has just written
        needs = [*end[:1], *([] if late or plan.fill else start[:1])]
        extras[step] = Step(
            ops,
            tuple(op.name for op in needs),
            tuple(op.name for op in end[-1:]),
            regathers=plan.fragments == 1 and len(end) > 1,
        )
    return Schedule(title(strategy), chain(replica.step(job, layout), tau, extras), steps=tau)


def _launch(
    strategy: LocalSteps,
    job: Workload,
    layout: Layout,
    plan: Averages,
    part: Part,
    suffix: str,
) -> list[Op]:
    """Fill the buffer and average it: by all-reduce, or quantize, exchange, sum, gather."""
    replica, dtype, blocks = Replica.of(strategy), strategy.dtype, plan.scale_block
    buffer, group = f"{plan.buffer}{suffix}", replica.peers
    share = part.share(job, replica.ranks(layout))
    works: dict[str, Compute | Collective]
    if dtype in QUANTIZED:
        workers = replica.workers(layout)
        works = {
            "quantize": recode("quantize", share, DType.FP32, dtype, blocks),
            "exchange": Collective(Kind.ALL_TO_ALL, buffer, share, dtype, group, blocks),
            "sum": sum_received(share, workers, dtype, dtype, blocks),
            "average": Collective(Kind.ALL_GATHER, buffer, share, dtype, group, blocks),
            "dequantize": recode("dequantize", share, dtype, DType.FP32, blocks),
        }
    elif plan.by == "leader" and replica.ranks(layout) > 1 and layout.nodes > 1:
        if job.experts_apart:
            raise OptionError(
                f"average=leader does not combine with {job.expert_words}: the first rank of a node"
                " has not all experts"
            )
        works = {
            "average": Collective(Kind.ALL_REDUCE, buffer, part.elements, dtype, LEADERS),
            "spread": Collective(Kind.BROADCAST, buffer, part.elements, dtype, NODE),
        }
    else:
        works = {"average": Collective(Kind.ALL_REDUCE, buffer, share, dtype, group)}
    ops = [Op(f"{name}{suffix}", work, OUTER) for name, work in works.items()]
    if plan.fill:
        kernel = outer_work(job, share, plan.fill, kernel=plan.buffer)
        fill = Op(buffer, kernel, COMPUTE)
        return [fill, replace(ops[0], after=(After(fill.name),)), *ops[1:]]
    if plan.delay:
        return [replace(ops[0], after=(After(f"outer{suffix}"),)), *ops[1:]]
    return ops
