"""A cluster that is one machine: the reference engine with what its cores do to all ranks.

Links have token buckets, collectives in flight share the cores, which sleep in pauses; streams of a
rank share a core, and each collective takes some time from the compute beside it. Only clusters
with a `host` are simulated so: laboratories, and what `realrun probe` measures on CPUs.
"""

import math
from collections.abc import Callable, Generator, Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import simpy
from simpy.events import EventPriority

from co2sim.common.units import BytesPerSecond, Seconds
from co2sim.hardware.cluster import FULLY_IDLE, Cluster, HostEffects
from co2sim.schedule.schedule import Collective, Schedule
from co2sim.simulation.costs import CollectiveCost, Processor, cost_of
from co2sim.simulation.lowering import NOTHING, Communicator, Folding, LoweredSchedule, Transfer
from co2sim.simulation.network import Flow, Network
from co2sim.simulation.reference_engine import Communicators, Simulation
from co2sim.simulation.token_bucket import Buckets, Shaper, shapers

_HOST = "host"
"""The link that stands for a machine that all nodes share; its bytes are seconds."""

_LAST = EventPriority(8)
"""Behind what else comes at the same instant, but for the starts of exclusive collectives."""


TIME_EPSILON_S: Seconds = 1e-9
"""What is no further apart happens at once: what begins or ends is off by so much at most."""


def effects(cluster: Cluster) -> HostEffects:
    """Those of a cluster that has some."""
    assert cluster.host is not None
    return cluster.host


# --- transfers on links with buckets, by cores that are shared ------------------------------------


class _Share(NamedTuple):
    """Fractions of a shared machine that one transfer takes: its latency steps, and its bytes.

    What is known are times of all groups of a kind at once.
    """

    steps: float
    bytes: float


@dataclass(frozen=True, slots=True)
class HostTransfer(Transfer):
    """One that takes `least` at least, and a `share` of the machine if there is only one."""

    least: Seconds = 0.0
    share: _Share | None = None

    def scaled(self, factor: float) -> "HostTransfer":
        """The same with `factor` times the bytes and the latency."""
        return replace(Transfer.scaled(self, factor), least=factor * self.least)  # type: ignore[call-arg, return-value]


def _transfers(lowered: LoweredSchedule, position: int) -> tuple[Transfer, ...]:
    """Those of an op of the body, as the machine moves them."""
    transfers, work = lowered.transfers[position], lowered.schedule.body[position].work
    if not isinstance(work, Collective):
        return transfers
    together = sum(transfer is not NOTHING for transfer in transfers)
    cost = cost_of(work, lowered.cluster)
    share = None
    if effects(lowered.cluster).one_machine and together:
        share = _share(cost, lowered.cluster, lowered.folding, together)
    return tuple(
        transfer
        if transfer is NOTHING
        else HostTransfer(
            transfer.loads, transfer.copies, transfer.latency, transfer.solo, cost.latency, share
        )
        for transfer in transfers
    )


def _share(cost: CollectiveCost, cluster: Cluster, folding: Folding, together: int) -> _Share:
    on_link = cost.groups(cluster)[0] if cost.inter and not folding.folded else 1
    return _Share(1 / together, min(1.0, on_link / together))


class Cores:
    """The cores of the one machine: whether they are awake.

    `wake_up` is what a collective takes longer after a pause of `fully_idle`; after a shorter one,
    in proportion less. What starts while they wake up waits for the same moment.
    """

    def __init__(self, wake_up: Seconds, fully_idle: Seconds = FULLY_IDLE) -> None:
        """Idle for as long as can be."""
        self._wake_up, self._fully_idle = wake_up, fully_idle
        self._in_flight = 0
        self._idle_since, self._awake = -math.inf, -math.inf

    def begin(self, now: Seconds) -> Seconds:
        """A collective starts: how long it waits until cores are awake."""
        if not self._in_flight:
            idle = min(1.0, (now - self._idle_since) / self._fully_idle)
            self._awake = now + idle * self._wake_up
        self._in_flight += 1
        return max(0.0, self._awake - now)

    def end(self, now: Seconds) -> None:
        """A collective has ended."""
        self._in_flight -= 1
        self._idle_since = now


@dataclass(eq=False, slots=True)
class _Flow(Flow):
    """One that ends no earlier than `earliest`.

    `share` is what it takes of the machine, `later` the latency steps that its bytes hide, and
    `lag` the fraction that it sends in vain.
    """

    earliest: Seconds = 0.0
    share: _Share | None = None
    later: Seconds = 0.0
    lag: float = 0.0


def _last_of(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """A call that is passed on when it has come a number of times."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            call()

    return one


class HostNetwork(Network):
    """Links of which some have a token bucket, served by cores that are shared and may sleep."""

    def __init__(
        self,
        env: simpy.Environment,
        capacity: Mapping[Hashable, BytesPerSecond],
        on: Mapping[Hashable, Shaper],
        cores: Cores | None = None,
    ) -> None:
        """Start with no flow in flight, and the credit of all buckets full."""
        super().__init__(env, {**capacity, _HOST: 1.0})
        self._buckets, self._cores = Buckets(on), cores
        self._coming: list[_Flow] = []

    def transfer(self, what: Transfer, on_done: Callable[[], None]) -> None:
        """Start a transfer; `on_done` is called when its last byte has arrived."""
        assert isinstance(what, HostTransfer)
        cores = self._cores if what.share else None
        if cores is None:
            self._go(what, on_done)
            return

        def done() -> None:
            cores.end(self.env.now)
            on_done()

        if wait := cores.begin(self.env.now):
            self._later(wait, partial(self._go, what, done))
        else:
            self._go(what, done)

    def _go(self, what: HostTransfer, on_done: Callable[[], None]) -> None:
        steps = what.share.steps if what.share else 0.0
        if what.solo <= 0:
            self._wait(max(what.latency, what.least), steps, on_done)
            return
        flow = _Flow(what.loads, what.copies, on_done, 1 / what.solo)
        if what.share:
            flow.share, flow.later = what.share, max(0.0, what.least - what.latency)
        else:
            flow.earliest = self.env.now + what.least
        flow.on_done = partial(self._arrive, flow, on_done)
        self._wait(what.latency, steps, partial(self._enter, flow))

    def _arrive(self, flow: _Flow, on_done: Callable[[], None]) -> None:
        if self.env.now < flow.earliest:
            self._later(flow.earliest - self.env.now, on_done)
        else:
            on_done()

    def _wait(self, seconds: Seconds, share: float, call: Callable[[], None]) -> None:
        """Call after a number of seconds, or after an amount of work of a shared machine."""
        if share and seconds > 0:
            self._begin(_Flow({_HOST: seconds * share}, {}, call, 1 / seconds))
        else:
            self._later(seconds, call)

    def _enter(self, flow: _Flow) -> None:
        if not any(link in self._buckets for link in flow.loads):
            self._send(flow)
            return
        if not self._coming:  # all that come at this instant share the credit
            last = simpy.Event(self.env)
            last._ok, last._value = True, None  # noqa: SLF001 - as in `reference_engine`
            assert last.callbacks is not None
            last.callbacks.append(self._admit)
            self.env.schedule(last, priority=_LAST)
        self._coming.append(flow)

    def _admit(self, _: simpy.Event) -> None:
        """Let what there is credit for pass."""
        coming, self._coming = self._coming, []
        passed = self._buckets.spend([flow.loads for flow in coming], self.env.now)
        for flow, each in zip(coming, passed, strict=True):
            took, share = each.together, 0.0
            if flow.share:
                took, share = each.alone, flow.share.bytes
            flow.lag, flow.left = each.lag, 1.0 - each.fraction + each.lag
            flow.earliest += took
            if took:
                self._wait(took, share, partial(self._send, flow))
            else:
                self._send(flow)

    def _send(self, flow: _Flow) -> None:
        """Let the bytes flow; later latency steps are work of a shared machine meanwhile."""
        if flow.share and flow.later > 0:
            flow.on_done = _last_of(2, flow.on_done)
            self._wait(flow.later, flow.share.steps, flow.on_done)
        self._begin(flow)

    def _leave(self, flow: Flow) -> None:
        assert isinstance(flow, _Flow)
        self._buckets.use(flow.loads, -flow.rate, self.env.now)
        self._buckets.give_back(flow.loads, flow.lag, self.env.now)
        super()._leave(flow)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        self._buckets.use(flow.loads, rate - flow.rate, self.env.now)
        super()._set_rate(flow, rate)


# --- computes that share a core -------------------------------------------------------------------


def first_streams(schedule: Schedule, host: HostEffects) -> AbstractSet[str] | None:
    """The streams that go first where several that compute share a core; None elsewhere.

    Those that communicate do, as threads that serve a network.
    """
    if not host.one_core:
        return None
    kinds = list(zip(schedule.works, schedule.work_streams, strict=True))
    communicate = {stream for work, stream in kinds if isinstance(work, Collective)}
    compute = {stream for work, stream in kinds if not isinstance(work, Collective)}
    return communicate if len(compute) > 1 else None


@dataclass(eq=False, slots=True)
class Core(Processor):
    """That of one rank, where `first` are the streams that go first, None where none share it.

    Others stand still meanwhile, and equals get equal parts. Each collective that begins takes
    `call` seconds from the computes beside it.
    """

    call: Seconds = 0.0
    first: AbstractSet[str] | None = None
    begun: int = 0
    _now: int = 0
    _last: Seconds = -1.0
    _first: int = 0
    _others: int = 0

    def begin(self, now: Seconds) -> None:
        """A collective begins. Call it in the order of time."""
        self._now = self._now + 1 if now - self._last <= TIME_EPSILON_S else 1
        self.begun, self._last = self.begun + 1, now

    def begun_before(self, now: Seconds) -> int:
        """How many have begun before this instant, which is not before that of the last one.

        One that begins as a compute begins is beside it, whichever is heard of first.
        """
        return self.begun - (self._now if now - self._last <= TIME_EPSILON_S else 0)

    def goes_first(self, stream: str) -> bool:
        """Whether computes of a stream do."""
        return self.first is not None and stream in self.first

    def occupy(self, change: int, stream: str) -> None:
        """Count a compute that begins (1) or ends (-1)."""
        if self.goes_first(stream):
            self._first += change
        else:
            self._others += change

    def pace_of(self, stream: str) -> float:
        """Seconds of work that a compute gets done in a second; 0 where it stands still."""
        if self.first is None:
            return self.pace
        if not self.goes_first(stream) and self._first:
            return 0.0
        return self.pace / (self._first if self.goes_first(stream) else self._others)


class _HostCommunicators(Communicators):
    def __init__(self, env: simpy.Environment, lowered: LoweredSchedule) -> None:
        host = effects(lowered.cluster)
        self.first = first_streams(lowered.schedule, host)
        self.calls = host.call_interference > 0
        self._known = [_transfers(lowered, index) for index in range(len(lowered.schedule.body))]
        super().__init__(env, lowered)

    def _make_network(self) -> Network:
        lowered, host = self._lowered, effects(self._lowered.cluster)
        intra, inter, wan = shapers(lowered.cluster)
        by_link: dict[Hashable, Shaper | None] = {}
        for index in range(len(lowered.classes)):
            by_link["gpu", index] = intra
            by_link["nic", lowered.folding.node(index)] = inter
        by_link.update({("wan", site): wan for site in range(lowered.cluster.sites)})
        on = {link: shaper for link, shaper in by_link.items() if shaper}
        cores = Cores(host.wake_up, host.fully_idle)
        return HostNetwork(self._env, lowered.capacity, on, cores)

    def _make_processor(self) -> Core:
        cluster = self._lowered.cluster
        call = effects(cluster).call_interference
        return Core(cluster.interference, call=call, first=self.first)

    def _transfer(self, instance: int, nth: int) -> Transfer:
        return self._known[instance % self._size][nth]

    def _start(
        self, communicator: Communicator, nth: int, instance: int, event: simpy.Event
    ) -> None:
        if self.calls and self._transfer(instance, nth).takes_time:
            for index in communicator.members:
                self.core(index).begin(self._env.now)
                self._tell(index)
        super()._start(communicator, nth, instance, event)

    def core(self, index: int) -> Core:
        """That of a class of ranks."""
        core = self.processors[index]
        assert isinstance(core, Core)
        return core

    def occupy_core(self, index: int, change: int, stream: str) -> None:
        """Count computes, which may share the core; NICs may attain less meanwhile."""
        self.core(index).occupy(change, stream)
        if self.first is not None:
            self._tell(index)
        self.occupy(index, change)


class HostSimulation(Simulation):
    """The reference engine on a cluster with a `host`."""

    communicators: _HostCommunicators

    def _make_communicators(self) -> Communicators:
        return _HostCommunicators(self.env, self.lowered)

    @property
    def slows(self) -> bool:
        """Whether a compute may take longer than alone."""
        calls = self.communicators.calls and not self.lowered.free
        return self.lowered.slows or calls or self.communicators.first is not None

    @property
    def beside(self) -> bool:
        """Whether computes and what is beside them may slow each other down."""
        return self.lowered.contend or self.slows

    def _compute(self, index: int, instance: int) -> Generator[simpy.Event]:
        """Compute that slows down beside communication, and beside computes of the same core."""
        work, body = self.seconds(index, instance), self.lowered.schedule.body
        if not work:
            return
        stream = body[instance % len(body)].stream
        communicators, core = self.communicators, self.communicators.core(index)
        communicators.occupy_core(index, 1, stream)
        if not self.slows:
            yield self.env.timeout(work)
            work = 0.0
        begun = core.begun_before(self.env.now)
        while work > 0:
            if work > TIME_EPSILON_S:  # what ends as a collective begins has ended
                work += (core.begun - begun) * core.call
            begun = core.begun
            pace = core.pace_of(stream)
            started, changed = self.env.now, communicators.change(index)
            if not pace and work > TIME_EPSILON_S:
                yield changed
                continue
            done = self.env.timeout(work / (pace or 1.0))
            yield done | changed
            work = 0.0 if done.processed else work - (self.env.now - started) * pace
        communicators.occupy_core(index, -1, stream)
