"""Jobs that share the uplinks of switches, each with its own nodes, in one SimPy environment.

A job's ranks are folded into one, as where it is alone. Its links are its own, but for the uplinks
of pods: there its flows share with those of the others, max-min fairly. What a job loses depends on
when its collectives meet those of others, so that the others begin at random moments.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
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
from co2sim.simulation.costs import costs_of
from co2sim.simulation.crossings import Crossing, uplinks
from co2sim.simulation.lowering import LoweredSchedule, Transfer, lower
from co2sim.simulation.network import Flow, Network
from co2sim.simulation.noise import QUIET
from co2sim.simulation.reference_engine import Communicators, Simulation

_ROUNDS = 6
"""Rounds of the slowest job that are measured."""
_Span: TypeAlias = tuple[Seconds, Seconds]
"""From when until when; infinity: it has not ended."""

_MOST_LINKS = 512
"""Uplinks, or connections, that are drawn apart; of those only the fullest are simulated."""

_ENOUGH, _CERTAIN = 4, 1e-3
"""Draws that suffice where the mean of a round has at most this standard error, as a part of it: a
figure is shown with a digit behind the percent."""

_MOST = 1_000_000
"""Ops that are simulated at most in all draws, or in one: 30 to 60 s, hashed paths or not."""


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


class SharedNetwork(Network):
    """The network of all jobs. Their rounds repeat: rates of flows that met are remembered.

    Those of transfers in proportion are in proportion as well: a `_Shape` stands for them all.
    """

    def __init__(self, env: simpy.Environment, capacity: Mapping[Hashable, BytesPerSecond]) -> None:
        super().__init__(env, capacity)
        self._resized: dict[Hashable, BytesPerSecond] = {}
        self._shapes: dict[int, _Shape] = {}
        self._remembered: dict[Hashable, dict[_Shape, float]] = {}

    def resize(self, link: Hashable, capacity: BytesPerSecond) -> None:
        """Give a link another capacity from now on."""
        self._resized[link] = capacity
        super().resize(link, capacity)

    def _rates(self, flows: Sequence[Flow]) -> Sequence[float]:
        """Those of flows of the same shape are equal, but for their sizes, in any order."""
        shapes = [self._shape(flow) for flow in flows]
        key = frozenset(Counter(shapes).items()), frozenset(self._resized.items())
        if key not in self._remembered:
            kept = self._fullest([flow.loads for flow in flows])
            few = [
                replace(flow, loads={link: flow.loads[link] for link in kept if link in flow.loads})
                for flow in flows
            ]
            self._remembered[key] = {
                shape: rate / flow.solo_rate
                for shape, flow, rate in zip(shapes, flows, super()._rates(few), strict=True)
            }
        parts = self._remembered[key]
        return [parts[shape] * flow.solo_rate for shape, flow in zip(shapes, flows, strict=True)]

    def _shape(self, flow: Flow) -> "_Shape":
        """Transfers outlive the network, so that their loads keep their identity."""
        if id(flow.loads) not in self._shapes:
            self._shapes[id(flow.loads)] = frozenset(
                (link, flow.copies.get(link, 1), float(f"{size * flow.solo_rate:.9g}"))
                for link, size in flow.loads.items()
            )
        return self._shapes[id(flow.loads)]

    def _fullest(self, loads: Sequence[Mapping[Hashable, float]]) -> list[Hashable]:
        """Links without those that are never fuller than another one: none is slower for them."""
        links = list(dict.fromkeys(link for on in loads for link in on))
        full = np.array([[on.get(link, 0.0) for on in loads] for link in links])
        full /= np.array([[self._now[link]] for link in links])
        return [links[index] for index in _undominated(full)]


_Shape: TypeAlias = frozenset[tuple[Hashable, int, float]]
"""Links of a flow, the flows that it stands for there, and its bytes/s where it is alone."""


class _View(Network):
    """The network as one job sees it: `renamed` are its transfers on the links of all."""

    def __init__(self, network: Network, job: int, renamed: Mapping[int, Transfer]) -> None:
        self._all, self._job, self._renamed = network, job, renamed
        self.uses: list[_Span] = []

    def transfer(self, what: Transfer, on_done: Callable[[], None]) -> None:
        """Start a transfer on the links of all, and note when it used uplinks."""
        env, done = self._all.env, on_done
        if any(map(_is_uplink, what.loads)):
            index, begin = len(self.uses), env.now + what.latency
            self.uses.append((begin, math.inf))

            def done() -> None:
                self.uses[index] = begin, env.now
                on_done()

        self._all.transfer(self._renamed[id(what)], done)

    def resize(self, link: Hashable, capacity: BytesPerSecond) -> None:
        """Give one of the job's links another capacity from now on."""
        self._all.resize((self._job, link), capacity)


class _Links:
    """The links of all jobs: those of each, and the uplinks of pods, which they share.

    Where paths are hashed, each uplink of a pod is a link, on which connections of a group stay; as
    many pods are there as have `_MOST_LINKS`, and a transfer is as slow as the slowest of its
    connections. Else the uplinks of a pod are one link, and one pod stands for all. `renamed` are
    the transfers of each job on these links, by their identity.
    """

    def __init__(
        self, work: Sequence[LoweredSchedule], rngs: Sequence[np.random.Generator | None]
    ) -> None:
        """Of jobs; `rngs` draw the paths of those that hash them."""
        self.capacity: dict[Hashable, BytesPerSecond] = {
            (job, link): size
            for job, lowered in enumerate(work)
            for link, size in lowered.capacity.items()
            if not _is_uplink(link)
        }
        self._paths: dict[tuple[int, Group, Pod], _Paths] = {}
        for job, (lowered, rng) in enumerate(zip(work, rngs, strict=True)):
            for _, group, crossing in _crossings(lowered):
                key = job, group, crossing.pod
                if key not in self._paths:
                    self._paths[key] = self._draw(crossing, lowered.cluster, rng)
        self._keep_fullest()
        self.renamed = [self._rename(job, lowered) for job, lowered in enumerate(work)]

    def _draw(
        self, crossing: Crossing, cluster: Cluster, rng: np.random.Generator | None
    ) -> "_Paths":
        """Where the connections of a group leave pods."""
        pod = crossing.pod
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

    def _keep_fullest(self) -> None:
        """Leave out uplinks that are never fuller than another one: none is slower for them."""
        shared = list(dict.fromkeys(link for on, _ in self._paths.values() for link in on))
        full = np.array(
            [[on[link] / self.capacity[link] for on, _ in self._paths.values()] for link in shared]
        )
        for index in set(range(len(shared))).difference(_undominated(full)):
            del self.capacity[shared[index]]
            for on, _ in self._paths.values():
                del on[shared[index]]

    def _rename(self, job: int, lowered: LoweredSchedule) -> dict[int, Transfer]:
        """The transfers of a job that use uplinks, on the links of all."""
        on = dict[int, dict[Pod, _Paths]]()
        for index, group, crossing in _crossings(lowered):
            on.setdefault(index, {})[crossing.pod] = self._paths[job, group, crossing.pod]
        return {
            id(transfer): self._on_all(job, transfer, on.get(index, {}))
            for index, transfers in enumerate(lowered.transfers)
            for transfer in transfers
        }

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


_Paths: TypeAlias = tuple[Counter[Hashable], int]
"""Uplinks, with how many connections each has, and how many a pod has in all."""


def _crossings(lowered: LoweredSchedule) -> Iterator[tuple[int, Group, Crossing]]:
    """The ops whose groups cross pods, by their place in the body, and how they cross."""
    schedule, costs = lowered.schedule, costs_of(lowered.schedule, lowered.cluster)
    for index, kind in enumerate(schedule.work_numbers):
        work, cost = schedule.works[kind], costs[kind]
        if isinstance(work, Collective) and cost:
            for crossing in cost.tiers:
                yield index, work.group, crossing


def _undominated(rows: NDArray[np.float64]) -> list[int]:
    """The first of equal rows, of those than which no other one is as large everywhere."""
    if not len(rows):
        return []
    different, firsts = np.unique(rows, axis=0, return_index=True)
    kept: list[int] = []
    for index in np.argsort(-different.sum(axis=1), kind="stable").tolist():
        if not (different[kept] >= different[index]).all(axis=1).any():
            kept.append(index)
    return [int(firsts[index]) for index in kept]


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
        self.all_ended = env.event()

    def _make_communicators(self) -> Communicators:
        return _Communicators(self.env, self.lowered, self._view)

    def _stream(self, index: int, instances: Sequence[Instance]) -> Generator[simpy.Event]:
        if self._begin:
            yield self.env.timeout(self._begin)
        yield from super()._stream(index, instances)
        if self.ended == len(self.spans[0].ends):
            self.all_ended.succeed()

    def rounds(self) -> NDArray[np.float64]:
        """When those ended that have."""
        ends = self.times()[1][:, 0].reshape(self.lowered.rounds, -1).max(axis=1)
        done: NDArray[np.float64] = ends[~np.isnan(ends)]
        return done


@dataclass(slots=True)
class Meeting:
    """Jobs beside each other, simulated with other moments at which they begin: `draws` of them.

    Fewer suffice where paths are spread and draws hardly differ, or where there are very many ops.
    """

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
        hashed = any(job.hashed for job in self.jobs)
        alone, drawn = list[list[Seconds]](), list[list[tuple[Seconds, float, float]]]()
        for draw in range(draws):
            if self.progress:
                self.progress(draw, draws)
            rng = np.random.default_rng([self.seed, draw])
            begins = [0.0, *(rng.uniform(0, seconds) for seconds in first[1:])]
            drawn.append(self._simulate(range(len(self.jobs)), begins, draw, counts))
            alone.append(
                [
                    self._alone(index, draw) if draw and job.hashed else first[index]
                    for index, job in enumerate(self.jobs)
                ]
            )
            longer = np.array(drawn)[:, :, 0] / np.array(alone)
            if (
                not hashed
                and draw + 1 >= _ENOUGH
                and (longer.std(0) <= _CERTAIN * math.sqrt(draw)).all()
            ):
                break
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
        return self._simulate([index], [0.0], draw, [_ROUNDS])[0][0]

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
        work = [job.lowered(count) for job, count in zip(jobs, counts, strict=True)]
        links = _Links(
            work,
            [
                np.random.default_rng([self.seed, draw, 1 + index]) if job.hashed else None
                for index, job in zip(indices, jobs, strict=True)
            ],
        )
        network = SharedNetwork(env, links.capacity)
        views = [_View(network, job, renamed) for job, renamed in enumerate(links.renamed)]
        running = [
            _Job(lowered, env, view, begin)
            for lowered, view, begin in zip(work, views, begins, strict=True)
        ]
        for simulation in running:
            simulation.begin()
        env.run(env.any_of([simulation.all_ended for simulation in running]))
        return _figures(
            [simulation.rounds() for simulation in running],
            [view.uses for view in views],
            until=env.now,
        )


def _figures(
    ends: Sequence[NDArray[np.float64]], uses: Sequence[Sequence[_Span]], until: Seconds
) -> list[tuple[Seconds, float, float]]:
    """Of jobs whose rounds end at these times, while all of them run, and after they have begun."""
    since = max(float(end[min(2, len(end) // 3)]) for end in ends)
    figures = []
    for job, end in enumerate(ends):
        inside = end[end >= since]
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
