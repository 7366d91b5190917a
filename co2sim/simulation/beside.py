"""Jobs that share the uplinks of switches, each with its own nodes, in one SimPy environment.

A job's ranks are folded into one, as where it is alone. Its links are its own, but for the uplinks
of pods: there its flows share with those of the others, max-min fairly. What a job loses depends on
when its collectives meet those of others, so that the others begin at random moments.
"""

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray

from co2sim.common.errors import OptionError
from co2sim.common.units import BytesPerSecond, Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.fabric import Pod
from co2sim.schedule.schedule import Collective, Group, Instance, Schedule
from co2sim.simulation.costs import Crossing, costs_of, uplinks
from co2sim.simulation.lowering import LoweredSchedule, Transfer, lower
from co2sim.simulation.network import Network
from co2sim.simulation.noise import QUIET
from co2sim.simulation.reference_engine import Communicators, Simulation

_ROUNDS = 6
"""Rounds of the slowest job that are measured."""
_Span: TypeAlias = tuple[Seconds, Seconds]
"""From when until when."""

_MOST_LINKS = 512
"""Uplinks, or connections, that are simulated apart."""

_MOST = 1_000_000
"""Ops that are simulated at most in all draws, or in one: about a minute."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A job on its nodes; `slowdown` is that of all its compute."""

    schedule: Schedule
    cluster: Cluster
    precision: str
    slowdown: float = 1.0

    def lowered(self, rounds: int) -> LoweredSchedule:
        """Of this number of rounds, as if all paths were spread: `_Links` hashes them.

        Raises OptionError where ranks do not fold into one.
        """
        fabric = self.cluster.fabric
        lowered = lower(
            self.schedule,
            replace(self.cluster, fabric=fabric and replace(fabric, paths="spread")),
            precision=self.precision,
            rounds=rounds,
            noise=QUIET,
            fold=True,
            slowdown=self.slowdown,
        )
        if len(lowered.classes) > 1:
            raise OptionError(
                f"{self.schedule.name}: of a job beside others one rank must stand for all, as it"
                " does where ranks are alike"
            )
        return lowered

    @property
    def hashed(self) -> bool:
        """Whether a connection stays on one path."""
        return self.cluster.fabric is not None and self.cluster.fabric.paths == "hashed"


@dataclass(frozen=True, slots=True)
class Shared:
    """What becomes of one job: times of a round, and the part of the time that it meets others.

    `rounds` are those of each draw of the moments at which the others begin, and of paths where
    they are hashed; `alone` those on the same paths without the others. `meets` is the part of the
    time in which both it and another one use the uplinks; `uses` that in which it does.
    """

    alone: tuple[Seconds, ...]
    rounds: tuple[Seconds, ...]
    meets: float
    uses: float

    @property
    def slowdown(self) -> float:
        """Of a round, in the mean over the moments; 1: none."""
        return float(np.mean(self.rounds) / np.mean(self.alone))

    @property
    def worst(self) -> float:
        """That of the worst moments."""
        return max(round_ / alone for round_, alone in zip(self.rounds, self.alone, strict=True))


class _View(Network):
    """The network as one job sees it: `renamed` are its transfers on the links of all."""

    def __init__(self, network: Network, job: int, renamed: Mapping[int, Transfer]) -> None:
        self._all, self._job, self._renamed = network, job, renamed
        self.uses: list[_Span] = []

    def transfer(self, what: Transfer, on_done: Callable[[], None]) -> None:
        """Start a transfer on the links of all, and note when it used uplinks."""
        env, done = self._all.env, on_done
        if any(map(_is_uplink, what.loads)):
            begin = env.now + what.latency

            def done() -> None:
                self.uses.append((begin, env.now))
                on_done()

        self._all.transfer(self._renamed.get(id(what), what), done)

    def resize(self, link: Hashable, capacity: BytesPerSecond) -> None:
        """Give one of the job's links another capacity from now on."""
        self._all.resize((self._job, link), capacity)


class _Links:
    """The links of all jobs: those of each, and the uplinks of pods, which they share.

    Where paths are hashed, each uplink of a pod is a link, on which connections of a group stay; as
    many pods are there as have `_MOST_LINKS`, and a transfer is as slow as the slowest of its
    connections. Else the uplinks of a pod are one link, and one pod stands for all.
    """

    def __init__(self, rngs: Sequence[np.random.Generator]) -> None:
        self.capacity: dict[Hashable, BytesPerSecond] = {}
        self._rngs = rngs

    def rename(self, job: int, lowered: LoweredSchedule, *, hashed: bool) -> dict[int, Transfer]:
        """The transfers of a job on the links of all, by their identity."""
        for link, size in lowered.capacity.items():
            if not _is_uplink(link):
                self.capacity[job, link] = size
        schedule, paths = lowered.schedule, dict[tuple[Group, Pod], _Paths]()
        costs, renamed = costs_of(schedule, lowered.cluster), dict[int, Transfer]()
        for index, transfers in zip(schedule.work_numbers, lowered.transfers, strict=True):
            work, cost = schedule.works[index], costs[index]
            if not (isinstance(work, Collective) and cost):
                continue
            on: dict[Pod, _Paths] = {}
            for crossing in cost.tiers:
                key = work.group, crossing.pod
                if key not in paths:
                    paths[key] = self._paths(crossing, lowered, self._rngs[job] if hashed else None)
                on[crossing.pod] = paths[key]
            for transfer in transfers:
                if id(transfer) not in renamed:
                    renamed[id(transfer)] = self._on_all(job, transfer, on)
        return renamed

    def _on_all(self, job: int, transfer: Transfer, paths: Mapping[Pod, "_Paths"]) -> Transfer:
        """A transfer on the links of all; `paths` are those of its group, by pod."""
        loads, copies = dict[Hashable, float](), dict[Hashable, int]()
        for link, size in transfer.loads.items():
            count = transfer.copies.get(link, 1)
            if not (isinstance(link, tuple) and isinstance(link[0], Pod)):
                loads[job, link], copies[job, link] = size, count
                continue
            on, of_pod = paths[link[0]]
            for uplink, connections in on.items():
                loads[uplink] = size * connections / of_pod
                copies[uplink] = connections if of_pod > 1 else count
        solo = max((size / self.capacity[link] for link, size in loads.items()), default=0.0)
        return replace(transfer, loads=loads, copies=copies, solo=solo)

    def _paths(
        self, crossing: Crossing, lowered: LoweredSchedule, rng: np.random.Generator | None
    ) -> "_Paths":
        """Where the connections of a group leave pods; drawn if they are hashed."""
        pod, cluster = crossing.pod, lowered.cluster
        name = "leaf" if pod.tier is pod.fabric.leaf else "spine"
        if rng is None:
            self.capacity[name] = uplinks(pod, cluster)
            return Counter([name]), 1
        switches = pod.switches * -(-cluster.nodes_per_site // pod.ours)
        few = min(switches, max(1, _MOST_LINKS // max(pod.uplinks, crossing.flows)))
        chosen = rng.integers(0, pod.uplinks, (few, crossing.flows)).tolist()
        links: Counter[Hashable] = Counter(
            (name, switch, uplink)
            for switch, of_switch in enumerate(chosen)
            for uplink in of_switch
        )
        each = uplinks(pod, cluster) / (pod.switches * pod.uplinks)
        self.capacity.update(dict.fromkeys(links, each))
        return links, crossing.flows * pod.switches


_Paths: TypeAlias = tuple[Counter[Hashable], int]
"""Uplinks, with how many connections each has, and how many a pod has in all."""


def _is_uplink(link: Hashable) -> bool:
    return isinstance(link, tuple) and isinstance(link[0], Pod)


class _Communicators(Communicators):
    def __init__(self, env: simpy.Environment, lowered: LoweredSchedule, view: _View) -> None:
        self._view = view
        super().__init__(env, lowered)

    def _make_network(self) -> Network:
        return self._view


class _Job(Simulation):
    """One of the jobs, which begins at a moment."""

    def __init__(
        self, lowered: LoweredSchedule, env: simpy.Environment, view: _View, begin: Seconds
    ) -> None:
        self._view, self._begin = view, begin
        super().__init__(lowered, env)

    def _make_communicators(self) -> Communicators:
        return _Communicators(self.env, self.lowered, self._view)

    def _stream(self, index: int, instances: Sequence[Instance]) -> Generator[simpy.Event]:
        if self._begin:
            yield self.env.timeout(self._begin)
        yield from super()._stream(index, instances)


@dataclass(slots=True)
class Meeting:
    """Jobs beside each other, simulated `draws` times with other moments at which they begin."""

    jobs: Sequence[Sharer]
    draws: int = 8
    seed: int = 0
    progress: Callable[[int, int], None] | None = None

    def run(self) -> list[Shared]:
        """What becomes of each. Raises OptionError for more ops than can be simulated."""
        self._check([2 * _ROUNDS] * len(self.jobs))
        first = [self._alone(index, 0) for index in range(len(self.jobs))]
        counts = [round((2 * _ROUNDS + 1) * max(first) / alone) + 2 for alone in first]
        draws = min(self.draws, max(1, _MOST // self._check(counts)))
        alone, drawn = [first], list[list[tuple[Seconds, float, float]]]()
        for draw in range(draws):
            rng = np.random.default_rng([self.seed, draw])
            begins = [0.0, *(rng.uniform(0, seconds) for seconds in first[1:])]
            drawn.append(self._simulate(range(len(self.jobs)), begins, draw, counts))
            if draw:
                hashed = [
                    self._alone(index, draw) if job.hashed else first[index]
                    for index, job in enumerate(self.jobs)
                ]
                alone.append(hashed)
            if self.progress:
                self.progress(draw + 1, draws)
        return [
            Shared(
                tuple(each[n] for each in alone),
                tuple(draw[n][0] for draw in drawn),
                float(np.mean([draw[n][1] for draw in drawn])),
                float(np.mean([draw[n][2] for draw in drawn])),
            )
            for n in range(len(self.jobs))
        ]

    def _check(self, counts: Sequence[int]) -> int:
        """The ops of this number of rounds of each job. Raises OptionError for too many."""
        ops = sum(
            count * len(job.schedule.body) for count, job in zip(counts, self.jobs, strict=True)
        )
        if ops > _MOST:
            raise OptionError(
                f"{len(self.jobs)} jobs beside each other are {ops:,} ops in {2 * _ROUNDS} rounds"
                f" of the slowest; at most {_MOST:,} are simulated: give fewer jobs, fewer"
                " micro-steps, or jobs with rounds that are more alike"
            )
        return ops

    def _alone(self, index: int, draw: int) -> Seconds:
        """A round of a job alone, on the paths of a draw."""
        return self._simulate([index], [0.0], draw, [2 * _ROUNDS])[0][0]

    def _simulate(
        self,
        indices: Sequence[int],
        begins: Sequence[Seconds],
        draw: int,
        counts: Sequence[int],
    ) -> list[tuple[Seconds, float, float]]:
        """Of each job: a round in the mean, and parts of the time that it meets others and uses."""
        jobs = [self.jobs[index] for index in indices]
        env = simpy.Environment()
        links = _Links([np.random.default_rng([self.seed, draw, 1 + index]) for index in indices])
        work = [job.lowered(count) for job, count in zip(jobs, counts, strict=True)]
        renamed = [
            links.rename(index, lowered, hashed=job.hashed)
            for index, (job, lowered) in enumerate(zip(jobs, work, strict=True))
        ]
        network = Network(env, links.capacity)
        views = [_View(network, job, transfers) for job, transfers in enumerate(renamed)]
        running = [
            _Job(lowered, env, view, begin)
            for lowered, view, begin in zip(work, views, begins, strict=True)
        ]
        for simulation in running:
            simulation.begin()
        env.run()
        ends = [
            simulation.times()[1][:, 0].reshape(count, -1).max(axis=1)
            for simulation, count in zip(running, counts, strict=True)
        ]
        return _figures(ends, [view.uses for view in views])


def _figures(
    ends: Sequence[NDArray[np.float64]], uses: Sequence[Sequence[_Span]]
) -> list[tuple[Seconds, float, float]]:
    """Of jobs whose rounds end at these times, while all of them run, and after they have begun."""
    until = min(float(end[-1]) for end in ends)
    since = max(float(end[min(2, len(end) // 3)]) for end in ends)
    figures = []
    for job, end in enumerate(ends):
        inside = end[(end >= since) & (end <= until)]
        others = [span for other, spans in enumerate(uses) if other != job for span in spans]
        figures.append(
            (
                float(inside[-1] - inside[0]) / (len(inside) - 1),
                _overlap(uses[job], others, since, until),
                _overlap(uses[job], uses[job], since, until),
            )
        )
    return figures


def _overlap(
    first: Sequence[_Span], second: Sequence[_Span], since: Seconds, until: Seconds
) -> float:
    """The part of a time in which both are under way."""
    times = {since, until, *(time for use in (*first, *second) for time in use)}
    points = np.array(sorted(time for time in times if since <= time <= until))
    middles, lengths = (points[1:] + points[:-1]) / 2, np.diff(points)
    both = _covers(first, middles) & _covers(second, middles)
    return float(lengths[both].sum() / lengths.sum())


def _covers(uses: Sequence[_Span], moments: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether one of the times contains each moment."""
    if not uses:
        return np.zeros(len(moments), bool)
    begins, ends = (np.sort([use[n] for use in uses]) for n in (0, 1))
    return np.searchsorted(begins, moments, "right") > np.searchsorted(ends, moments, "right")
