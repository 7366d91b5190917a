"""Carry out a collective of a schedule, with the bytes that the schedule states.

In an all-to-all that is routed all ranks count alike, from the schedule alone, how many tokens each
sends to every other one: a framework would exchange these numbers first.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.schedule.schedule import Collective, DType, Kind
from co2sim.schedule.token_routing import TokenRouting
from realrun.execute.world import RankCommunicator
from realrun.torch_compat import all_gather_single, reduce_scatter_single

Counts: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlan:
    """Rows of tokens between members, which stand on nodes of `per_node` in order.

    `rows[i][j]` are for experts of member j: a token of member i for each of its experts there.
    `copies[i][d]` are the tokens of member i that have experts on node d, whatever their number.
    They take turns as rows, so that a member gets none of them more often than it has experts.
    """

    rows: Counts
    copies: Counts
    per_node: int

    def peers(self, me: int) -> range:
        """The members with one place in their nodes, by node."""
        return range(me % self.per_node, len(self.rows), self.per_node)

    def mates(self, me: int) -> range:
        """The members of one node."""
        first = me // self.per_node * self.per_node
        return range(first, first + self.per_node)


@dataclass(frozen=True, slots=True)
class Phase:
    """Rows that a member gives to each member, and takes from it."""

    gives: list[int]
    takes: list[int]


def node_phases(plan: TokenPlan, me: int) -> tuple[Phase, ...]:
    """Copies to the peers of each node, then rows to its members."""
    node, peers, mates = me // plan.per_node, [*plan.peers(me)], [*plan.mates(me)]
    gives, takes = np.zeros((2, 2, len(plan.rows)), np.int64)
    gives[0, peers], takes[0, peers] = plan.copies[me], plan.copies[peers, node]
    gives[1, mates] = plan.rows[np.ix_(peers, mates)].sum(0)
    takes[1, mates] = [plan.rows[[*plan.peers(mate)], me].sum() for mate in mates]
    return tuple(map(Phase, gives.tolist(), takes.tolist()))


def rows_passed_on(plan: TokenPlan, me: int) -> Tensor:
    """Which of the copies that came from peers each row inside the node is, in order."""
    node, indices = me // plan.per_node, []
    peers = plan.peers(me)
    first = [0, *accumulate(plan.copies[[*peers], node].tolist())]
    begun = dict.fromkeys(peers, 0)
    for mate in plan.mates(me):
        for index, peer in enumerate(peers):
            rows, copies = int(plan.rows[peer, mate]), int(plan.copies[peer, node])
            turns = torch.arange(begun[peer], begun[peer] + rows)
            indices.append(first[index] + turns % max(1, copies))
            begun[peer] += rows
    return torch.cat(indices)


@lru_cache(maxsize=64)
def plan_of(work: Collective, members: int, nodes: int) -> TokenPlan:
    """The plan of a collective that is routed. Its busiest member is drawn, and so are the others.

    A member gets as many rows as its weight says, but for one; each sends as many as any other.
    """
    routed = work.routed
    assert routed is not None
    tokens = max(1, round(work.elements / routed.width / routed.load / routed.active))
    draw = random.Random(f"{work.group} {work.elements} {routed.load}")  # noqa: S311 - no secret
    weights = _weights(members, routed.load, draw)
    sent = tokens * routed.active
    rows = _divided([sent * weight for weight in weights], members)
    each, met = members // nodes, routed.nodes(nodes) / nodes
    whole = [sum(weights[node * each : (node + 1) * each]) / each for node in range(nodes)]
    wanted = _divided([members * tokens * met * weight for weight in whole], members)
    each_has = max(1, routed.count // members)
    parts = rows.reshape(members, nodes, each)
    needed = np.maximum(wanted, -(-parts.max(2) // each_has))
    copies = np.minimum(np.minimum(tokens, parts.sum(2)), needed)
    return TokenPlan(rows, copies, each)


def _weights(members: int, load: float, draw: random.Random) -> list[float]:
    """What each member gets, as a multiple of the mean: one `load`, the others less, unevenly."""
    busiest = draw.randrange(members)
    if members == 1:
        return [1.0]
    rest = (members - load) / (members - 1)
    noise = [draw.uniform(-1, 1) for _ in range(members - 1)]
    noise = [value - sum(noise) / len(noise) for value in noise]
    most = max(map(abs, noise)) or 1.0
    weights = [rest + value / most * min(rest, load - rest) / 2 for value in noise]
    return [*weights[:busiest], load, *weights[busiest:]]


def _divided(totals: Sequence[float], members: int) -> Counts:
    """Whole parts of totals, for each of `members` as equal as can be: sums are off by one at most.

    Of a sum c member i has (c + i) // members: together c (Hermite's identity).
    """
    ends = np.array([0, *(round(total) for total in accumulate(totals))])
    members_in_turn = np.arange(members)[:, None]
    parts: Counts = np.diff((ends + members_in_turn) // members)
    return parts


_SUMMED = {DType.FP32: torch.float32, DType.FP16: torch.float16, DType.BF16: torch.bfloat16}
"""Types that can be added up on the way. int8 and int4 travel as bytes, with their scales."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a member gives, and what it takes: flat tensors; the same one if it works in place.

    Sums are of the schedule's type. What is only moved is bytes (uint8): int4 two to a byte, then
    the fp32 scales of its blocks. Sizes are rounded up so that all parts are equal:

    all_reduce: (elements) in place. reduce_scatter: (members x part) -> (part).
    all_gather: (part) -> (members x part). all_to_all: (members x part) both. broadcast and
    reduce: in place, from and to the root. An all_to_all that is routed has rows of tokens of the
    schedule's type, as many as its `route` says.
    """

    given: Tensor
    taken: Tensor
    route: "Route | None" = None


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """How the tokens of a member travel: in one phase, or by node in two, between and inside nodes.

    `phases` say how many rows of `width` elements it exchanges with each member. What the first
    brings, `arrived`, becomes what the second gives, `passed`: its rows by `index`, or, `back`,
    their sums.
    """

    phases: tuple[Phase, ...]
    width: int
    arrived: Tensor
    passed: Tensor
    index: Tensor
    back: bool

    def turn(self) -> None:
        """From one phase to the other."""
        arrived, passed = (rows.view(-1, self.width) for rows in (self.arrived, self.passed))
        if self.back:
            passed.zero_()
            passed.index_add_(0, self.index, arrived)
        else:
            torch.index_select(arrived, 0, self.index, out=passed)


def allocate(
    work: Collective, members: int, device: torch.device, me: int = 0, nodes: int = 1
) -> Buffers:
    """Buffers of a collective among `members` ranks on some nodes, for the one at place `me`.

    Raises OptionError for sums of quantized values: they would overflow, so they travel by
    all_to_all and are summed after dequantization. Tokens are never quantized.
    """
    if work.routed:
        return _allocate_tokens(work, work.routed, plan_of(work, members, nodes), me, device)
    if work.kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE}:
        if work.dtype not in _SUMMED:
            raise OptionError(
                f"{work.kind}({work.buffer}) of {work.dtype}: sums are of"
                f" {', '.join(_SUMMED)}; quantized values travel by all_to_all"
            )
        size, dtype = work.elements, _SUMMED[work.dtype]
    else:
        size, dtype = math.ceil(work.bytes), torch.uint8
    part = -(-size // members)
    match work.kind:
        case Kind.ALL_REDUCE | Kind.BROADCAST | Kind.REDUCE:
            sent = torch.zeros(size, dtype=dtype, device=device)
            return Buffers(sent, sent)
        case Kind.REDUCE_SCATTER:
            sizes = (members * part, part)
        case Kind.ALL_GATHER:
            sizes = (part, members * part)
        case Kind.ALL_TO_ALL:
            sizes = (members * part, members * part)
    sent, taken = (torch.zeros(count, dtype=dtype, device=device) for count in sizes)
    return Buffers(sent, taken)


def _allocate_tokens(
    work: Collective,
    routed: TokenRouting,
    plan: TokenPlan,
    me: int,
    device: torch.device,
) -> Buffers:
    if work.dtype not in _SUMMED:
        raise OptionError(
            f"{work.kind}({work.buffer}) of {work.dtype}: tokens are of {', '.join(_SUMMED)}"
        )

    def rows(count: int) -> Tensor:
        return torch.zeros(count * routed.width, dtype=_SUMMED[work.dtype], device=device)

    relayed = routed.by_node and plan.per_node < len(plan.rows)
    flat = Phase(plan.rows[me].tolist(), plan.rows[:, me].tolist())
    phases = node_phases(plan, me) if relayed else (flat,)
    if routed.back:
        phases = tuple(Phase(phase.takes, phase.gives) for phase in reversed(phases))
    first, last = phases[0], phases[-1]
    arrived, passed = (rows(sum(count) if relayed else 0) for count in (first.takes, last.gives))
    index = rows_passed_on(plan, me) if relayed else torch.zeros(0, dtype=torch.int64)
    route = Route(phases, routed.width, arrived, passed, index.to(device), routed.back)
    return Buffers(rows(sum(first.gives)), rows(sum(last.takes)), route)


def carry_out(
    work: Collective, buffers: Buffers, comm: RankCommunicator, deadline: Seconds
) -> None:
    """Run a collective over Gloo and wait for its end, at most `deadline` seconds."""
    sent, taken, root = buffers.given, buffers.taken, work.root % len(comm.members)
    match work.kind:
        case Kind.ALL_REDUCE:
            work_ = dist.all_reduce(sent, group=comm.group, async_op=True)
            work_.wait(timedelta(seconds=deadline))
        case Kind.REDUCE_SCATTER:
            reduce_scatter(sent, taken, comm, deadline)
        case Kind.ALL_GATHER:
            all_gather(sent, taken, comm, deadline)
        case Kind.ALL_TO_ALL:
            if buffers.route:
                send_tokens(buffers.route, sent, taken, comm, deadline)
            else:
                all_to_all(sent, taken, comm, deadline)
        case Kind.BROADCAST:
            broadcast(sent, root, comm, deadline)
        case Kind.REDUCE:
            reduce(sent, root, comm, deadline)


def launch(work: Collective, buffers: Buffers, comm: RankCommunicator) -> dist.Work:
    """Launch a collective over NCCL on the current stream."""
    sent, taken, group = buffers.given, buffers.taken, comm.group
    root = work.root % len(comm.members)
    match work.kind:
        case Kind.ALL_REDUCE:
            launched = dist.all_reduce(sent, group=group, async_op=True)
        case Kind.REDUCE_SCATTER:
            launched = reduce_scatter_single(taken, sent, group=group, async_op=True)
        case Kind.ALL_GATHER:
            launched = all_gather_single(taken, sent, group=group, async_op=True)
        case Kind.ALL_TO_ALL:
            if buffers.route:
                launched = _launch_tokens(buffers.route, sent, taken, group)
            else:
                launched = dist.all_to_all_single(taken, sent, group=group, async_op=True)
        case Kind.BROADCAST:
            launched = dist.broadcast(sent, group_src=root, group=group, async_op=True)
        case Kind.REDUCE:
            launched = dist.reduce(sent, group_dst=root, group=group, async_op=True)
    assert isinstance(launched, dist.Work)
    return launched


def _launch_tokens(
    route: Route, sent: Tensor, taken: Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    def exchange(phase: Phase, source: Tensor, result: Tensor) -> dist.Work | None:
        takes, gives = ([n * route.width for n in counts] for counts in (phase.takes, phase.gives))
        launched: dist.Work | None = dist.all_to_all_single(
            result, source, takes, gives, group=group, async_op=True
        )
        return launched

    if len(route.phases) == 1:
        return exchange(route.phases[0], sent, taken)
    between = exchange(route.phases[0], sent, route.arrived)
    assert between is not None
    between.wait()  # the stream waits, not the host
    route.turn()
    return exchange(route.phases[1], route.passed, taken)


def alone(buffers: Buffers) -> None:
    """What a collective does for a rank that is its only member."""
    if buffers.taken is not buffers.given:
        buffers.taken.copy_(buffers.given)


SEGMENT_BYTES = 2**19
"""Small enough that both directions of a pair share its link fairly."""


class Exchange:
    """Messages of one collective. Every wait ends with an error at the deadline."""

    def __init__(self, comm: RankCommunicator, deadline: Seconds) -> None:
        """Start counting the deadline."""
        self._at, self._limit = comm, time.monotonic() + deadline
        self._sends: list[dist.Work] = []

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send to the member at place `to`, without waiting."""
        self._sends.append(self._at.group.send([tensor], to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        """Receive from the member at place `source`, without waiting."""
        return self._at.group.recv([tensor], source, tag)

    def wait(self, work: dist.Work) -> None:
        """Wait for one message."""
        left = max(0.001, self._limit - time.monotonic())
        work.wait(timedelta(seconds=left))

    def finish(self) -> None:
        """Wait for everything that was sent."""
        for work in self._sends:
            self.wait(work)
        self._sends.clear()


def segments(part: Tensor) -> list[slice]:
    """Elements of a part, at most SEGMENT_BYTES each."""
    size = max(1, SEGMENT_BYTES // part.element_size())
    return [slice(start, start + size) for start in range(0, len(part), size)]


def all_gather(source: Tensor, result: Tensor, comm: RankCommunicator, deadline: Seconds) -> None:
    """Fill `result` with every member's `source`, in order of the members."""
    n, me = len(comm.members), comm.me
    parts = result.view(n, -1)
    takes = [parts[(me - step) % n] for step in range(1, n)]
    _around([source, *takes[:-1]], takes, comm, deadline, lambda *_: None)
    parts[me].copy_(source)


def reduce_scatter(
    source: Tensor, result: Tensor, comm: RankCommunicator, deadline: Seconds
) -> None:
    """Fill `result` with this member's part of the sum; `source` is left with partial sums."""
    n, me = len(comm.members), comm.me
    parts = source.view(n, -1)
    takes = comm.room((n - 1) * parts.shape[1], source.dtype).view(n - 1, -1)
    own_parts = [parts[(me - 1 - step) % n] for step in range(n)]
    totals = [*own_parts[:-1], result]

    def add(step: int, span: slice) -> None:
        torch.add(own_parts[step + 1][span], takes[step][span], out=totals[step + 1][span])

    _around(own_parts[:-1], list(takes), comm, deadline, add)


def _around(
    gives: Sequence[Tensor],
    takes: Sequence[Tensor],
    comm: RankCommunicator,
    deadline: Seconds,
    arrived: Callable[[int, slice], object],
) -> None:
    """Around the ring: in each step `gives[step]` to the next member, and into `takes[step]`.

    `arrived` is called with a step and the elements that have come in it, before the same elements
    of the next step are sent.
    """
    exchange, steps = Exchange(comm, deadline), len(takes)
    spans = segments(takes[0])
    receives: dict[tuple[int, int], dist.Work] = {}
    for step, segment in _along(steps + 1, len(spans)):
        tag, span = _tag(step, segment), spans[segment]
        if step < steps:
            receives[step, segment] = exchange.receive(takes[step][span], comm.previous, tag)
        if step:
            exchange.wait(receives[step - 1, segment])
            arrived(step - 1, span)
        if step < steps:
            exchange.send(gives[step][span], comm.next, tag)
    exchange.finish()


def all_to_all(source: Tensor, result: Tensor, comm: RankCommunicator, deadline: Seconds) -> None:
    """Send part i of `source` to member i; `result` gets the parts from all members, in order."""
    n = len(comm.members)
    send_parts(
        source.view(n, -1).unbind(), result.view(n, -1).unbind(), comm, Exchange(comm, deadline)
    )


def send_parts(
    gives: Sequence[Tensor],
    takes: Sequence[Tensor],
    comm: RankCommunicator,
    exchange: Exchange,
    step: int = 0,
) -> None:
    """Send `gives[i]` to member i, and fill `takes[i]` from it; parts may differ in size."""
    n, me = len(comm.members), comm.me
    others = [(me + distance) % n for distance in range(1, n)]
    spans = max(map(segments, (*gives, *takes)), key=len)
    receives = []
    for segment, span in enumerate(spans):
        tag = _tag(step, segment)
        # All receives come first: to announce one to a member waits behind what is sent to it.
        receives += [
            exchange.receive(takes[member][span], member, tag)
            for member in reversed(others)
            if span.start < len(takes[member])
        ]
        for member in others:
            if span.start < len(gives[member]):
                exchange.send(gives[member][span], member, tag)
    takes[me].copy_(gives[me])  # while the messages are on their way
    for work in receives:
        exchange.wait(work)
    exchange.finish()


def send_tokens(
    route: Route, source: Tensor, result: Tensor, comm: RankCommunicator, deadline: Seconds
) -> None:
    """Send rows of `source` as their route says; `result` gets what comes, by member or node."""
    exchange = Exchange(comm, deadline)

    def send(step: int, sent: Tensor, taken: Tensor) -> None:
        phase, width = route.phases[step], route.width
        gives = torch.split(sent, [count * width for count in phase.gives])
        takes = torch.split(taken, [count * width for count in phase.takes])
        send_parts(gives, takes, comm, exchange, step)

    if len(route.phases) == 1:
        send(0, source, result)
        return
    send(0, source, route.arrived)
    route.turn()
    send(1, route.passed, result)


def broadcast(buffer: Tensor, root: int, comm: RankCommunicator, deadline: Seconds) -> None:
    """Pass the `buffer` of the member at place `root` around the ring."""
    _chain(buffer, None if comm.me == root else buffer, comm, deadline, last=comm.next == root)


def reduce(buffer: Tensor, root: int, comm: RankCommunicator, deadline: Seconds) -> None:
    """Sum every member's `buffer` on the way around the ring, into that of the member at `root`.

    The member after it starts. The buffers of the others are left with partial sums.
    """
    taken = None if comm.previous == root else comm.room(len(buffer), buffer.dtype)
    _chain(buffer, taken, comm, deadline, last=comm.me == root)


def _chain(
    buffer: Tensor, taken: Tensor | None, comm: RankCommunicator, deadline: Seconds, *, last: bool
) -> None:
    """Send `buffer` on unless `last`, with what comes into `taken`: added, if that is another."""
    exchange, spans = Exchange(comm, deadline), segments(buffer)
    receives = [
        exchange.receive(taken[span], comm.previous, tag)
        for tag, span in enumerate(spans)
        if taken is not None
    ]
    for tag, span in enumerate(spans):
        if taken is not None:
            exchange.wait(receives[tag])
            if taken is not buffer:
                buffer[span].add_(taken[span])
        if not last:
            exchange.send(buffer[span], comm.next, tag)
    exchange.finish()


def _along(steps: int, count: int) -> Iterator[tuple[int, int]]:
    """Steps around a ring and numbers of segments, so that all segments are on their way at once.

    A segment makes a step while the next one makes that before, as in NCCL. With one step after the
    other for all segments, members behind a slow link would end when two thirds have crossed it.
    """
    for turn in range(steps + count - 1):
        for step in range(max(0, turn - count + 1), min(steps, turn + 1)):
            yield step, turn - step


def _tag(step: int, segment: int) -> int:
    """Step and segment distinguish the messages of a pair."""
    return step * 2**20 + segment
