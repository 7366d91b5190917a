"""Goodput: what part of the time training gets on with its work where things fail, in closed form.

Failures come at random, independently of each other, at a constant rate (exponential times between
them), as counted in published logs of clusters (Kokolis et al., HPCA 2025, arXiv 2410.21680). The
formulas here are exact for that; a test simulates the same, event by event.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, BytesPerSecond, Seconds
from co2sim.common.validation import above, at_least, whole
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.failures import PARTS, READ_PER_NODE, WRITE_PER_NODE, Failures
from co2sim.models.adapters import with_adapters
from co2sim.models.operators import Model
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Layout
from co2sim.strategies import Strategy, parse
from co2sim.strategies.local import LocalSteps, Replica
from co2sim.training.optimizer import ADAMW, FP32, Optimizer, states_per_parameter

_MAX = 600.0
"""Of an exponent: beyond it nothing is ever finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Failures per second of each part while it works, and of the job whatever its size.

    That of the job does not fall with size: a bug, a file system, an operator. Nodes that a
    provider takes away are `preemption`.
    """

    gpu: float = 0.0
    node: float = 0.0
    switch: float = 0.0
    job: float = 0.0
    preemption: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        for name in PARTS:
            at_least(f"failures of a {name} per second", getattr(self, name), 0)

    def of(self, gpus: int, nodes: int, switches: int = 0) -> float:
        """Failures per second of a number of parts, with those of one job; no preemptions."""
        return self.gpu * gpus + self.node * nodes + self.switch * switches + self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What follows a failure.

    `detection` until it is noticed; `restart` until processes run again on healthy nodes; `reload`
    until they have their state. `spares` nodes wait to replace others; a broken one is back after
    `repair`. Where no spare is left the job waits.
    """

    detection: Seconds = 0.0
    restart: Seconds = 0.0
    reload: Seconds = 0.0
    spares: int = 0
    repair: Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse what takes less than no time."""
        for name in ("detection", "restart", "reload", "repair"):
            at_least(f"{name} in s", getattr(self, name), 0)
        whole("spares", self.spares)

    @property
    def down(self) -> Seconds:
        """From the failure until work continues, where there is a spare."""
        return self.detection + self.restart + self.reload


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Nodes that a provider takes away, with a notice: `rate` per second of all of them.

    Work continues until a copy on notice must begin; that stops it for `saving`. With None the
    notice is too short, and the work since the last copy is lost. Another node comes after
    `replacement`.
    """

    rate: float = 0.0
    saving: Seconds | None = None
    replacement: Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        at_least("preemptions per second", self.rate, 0)
        at_least("replacement in s", self.replacement, 0)
        at_least("a checkpoint on notice, in s", self.saving or 0.0, 0)

    def phases(self, after: Restart) -> tuple[Seconds, Seconds, Seconds]:
        """The copy, the wait for a node, and restart with reload."""
        return self.saving or 0.0, self.replacement, after.restart + after.reload


_NONE = Preemption()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How state is saved: work stops for `blocking`, and the copy is safe `writing` after that.

    Written in the background, `writing` is more than 0: a failure meanwhile goes back to the copy
    before. It is no longer than the time between two copies.
    """

    blocking: Seconds
    writing: Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse what takes less than no time."""
        at_least("the time that a checkpoint stops work, in s", self.blocking, 0)
        at_least("the time that a checkpoint is written behind work, in s", self.writing, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Fractions of the time, which sum to 1.

    `useful` work that lasts; `checkpoint` stops for copies that last; `lost` work and copies that
    are done again; `restart` from a failure until work continues, but for `waiting` for a node.
    """

    useful: float
    checkpoint: float
    lost: float
    restart: float
    waiting: float


def whole_job_shares(
    rate: float,
    every: Seconds,
    saving: Saving,
    after: Restart,
    preempted: Preemption = _NONE,
) -> Shares:
    """Where one failure stops all, and all go back to the last copy: DDP, ZeRO, FSDP.

    `rate` is that of failures per second of the whole job, `every` the work between two copies;
    infinite: no copies but those on notice. Where something fails during a restart, that begins
    again as after the new failure. Waiting for repairs is Erlang's loss formula, whatever their
    distribution. Raises OptionError where nothing gets done.

    A run of work begins where the last copy became safe (`writing` after the copy began), or after
    a restart; by renewal theory the shares are those of an average run.
    """
    at_least("failures per second", rate, 0)
    at_least("the work between two checkpoints in s", min(every, 1e300), 1e-9)
    period, all_rates = every + saving.blocking, rate + preempted.rate
    if saving.writing > period * (1 + 1e-12):  # `every` may be what is left of it
        raise OptionError(
            f"a checkpoint takes {saving.writing:g} s to write, longer than the {period:g} s from"
            " one to the next; write less often"
        )
    if all_rates == 0:
        work, stop = (1.0, 0.0) if math.isinf(every) else (every, saving.blocking)
        return _shares(work, stop, work + stop)
    phases = preempted.phases(after)
    downs = ((rate / all_rates, after.down), (preempted.rate / all_rates, math.fsum(phases)))
    saved = preempted.rate if preempted.saving is not None else 0.0
    again = all_rates * (period + saving.writing)
    worst = max(all_rates * down for share, down in downs if share)
    if (again > _MAX and not saved) or worst > _MAX:
        raise OptionError(
            f"with a failure every {1 / all_rates:g} s nothing gets done in the {period:g} s from"
            " one checkpoint to the next"
        )
    fails, safe = -math.expm1(-all_rates * period), math.exp(-again)
    restarted = math.fsum(share * math.exp(-all_rates * down) for share, down in downs)
    down = math.fsum(-share * math.expm1(-all_rates * time) for share, time in downs)
    down /= all_rates * restarted  # a restart may fail, too
    useful, stops = (every * safe, saving.blocking * safe) if safe else (0.0, 0.0)
    if saved:
        until = _since_copy(all_rates, every, saving.blocking, period + saving.writing)
        before = _since_copy(all_rates, every, saving.blocking, saving.writing)
        useful += saved * (until[0] - (1 - fails) * before[0])
        stops += saved * (until[1] - (1 - fails) * before[1])
    spent = [preempted.rate / all_rates / restarted * part for part in _phases(all_rates, phases)]
    stops += fails * spent[0]
    waits = erlang_loss(after.spares + 1, rate * after.repair)
    return _shares(
        useful,
        stops,
        fails * (1 / all_rates + down),
        restart=fails * (down - spent[0] - spent[1]),
        waiting=fails * spent[1],
        waits=waits,
    )


def _phases(rate: float, phases: Sequence[Seconds]) -> Iterator[Seconds]:
    """The mean time in each of what follows one on the other, until something fails."""
    began = 0.0
    for phase in phases:
        yield math.exp(-rate * began) * -math.expm1(-rate * phase) / rate
        began += phase


def _since_copy(rate: float, every: Seconds, stop: Seconds, until: Seconds) -> tuple[float, float]:
    """Work since a copy, and stops for the next ones, as integrals of exp(-rate t) to `until`.

    Work and stops take turns: `every` and `stop`. `until` is at most two of both.
    """
    from scipy.special import gammainc  # noqa: PLC0415 - 0.2 s that most answers do not need

    sums, levels, began = [0.0, 0.0], [0.0, 0.0], 0.0
    for turn, phase in enumerate((every, stop) * 2):
        length = min(phase, until - began)
        if length <= 0:
            continue
        decay = math.exp(-rate * began)
        flat = decay * -math.expm1(-rate * length) / rate
        sums = [total + level * flat for total, level in zip(sums, levels, strict=True)]
        sums[turn % 2] += decay * float(gammainc(2, rate * length)) / rate**2
        levels[turn % 2] += length
        began += length
        if math.isinf(began):
            break
    return sums[0], sums[1]


def _shares(
    useful: Seconds,
    checkpoint: Seconds,
    time: Seconds,
    *,
    restart: Seconds = 0.0,
    waiting: Seconds = 0.0,
    waits: float = 0.0,
) -> Shares:
    """What is not of the other kinds is lost; of all a share of `waits` waits for repairs."""
    part = (1 - waits) / time
    lost = max(0.0, time - useful - checkpoint - restart - waiting)
    return Shares(
        useful=useful * part,
        checkpoint=checkpoint * part,
        lost=lost * part,
        restart=restart * part,
        waiting=waits + waiting * part,
    )


def best_interval(rate: float, saving: Saving) -> Seconds:
    """The work between two copies that leaves most useful time, where `writing` is 0: exact.

    T = (1 + W(-exp(-rate C - 1))) / rate with Lambert's W, for copies that stop work for C
    seconds; x = rate T solves -ln(1 - x) - x = rate C. `young` is its first order. Infinite without
    failures.
    """
    if rate == 0:
        return math.inf
    cost = rate * saving.blocking
    if cost < 1e-8:  # noqa: PLR2004 - the difference has lost its digits; Young's is as exact
        return young(rate, saving.blocking)
    root = min(math.sqrt(2 * cost), -math.expm1(-cost - 1))  # both are above it
    while root < 1:  # Newton's steps fall to the root, as the left side is convex
        nearer = root - (-math.log1p(-root) - root - cost) * (1 - root) / root
        if not root - nearer > root * 1e-15:
            break
        root = nearer
    return root / rate


def young(rate: float, blocking: Seconds) -> Seconds:
    """sqrt(2 C / rate): Young, CACM 17(9), 1974."""
    return math.sqrt(2 * blocking / rate)


def erlang_loss(servers: int, load: float) -> float:
    """Erlang's B: how often all of a number of nodes are away, with `load` away on average."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked if load else 0.0


def independent_worker_shares(
    rate: float,
    workers: int,
    round_time: Seconds,
    after: Restart,
    stall: Seconds = 0.0,
    preempted: Preemption = _NONE,
) -> Shares:
    """Where workers continue without one that has failed: local-update methods.

    `rate` is that of failures per second of one worker, and `preempted` what is taken from one. It
    loses its part of the round, is down for detection, restart and reload (from a peer), and joins
    at the next round. All stand still for `stall` at every failure and preemption, on average,
    until they have formed a group without it. With a notice nothing is detected, and another node
    is waited for. Nothing goes back to a checkpoint: where all workers fail at once, which this
    does not count, it would.
    """
    at_least("failures per second", rate, 0)
    at_least("a round in s", round_time, 1e-9)
    whole("workers", workers, 1)
    all_rates = rate + preempted.rate
    if all_rates == 0:
        return Shares(useful=1.0, checkpoint=0.0, lost=0.0, restart=0.0, waiting=0.0)
    within = all_rates * round_time
    lost = 1 / all_rates - round_time / math.expm1(within) if within < _MAX else 1 / all_rates
    restart = waiting = 0.0
    for often, first, node in (
        (rate, after.detection, 0.0),
        (preempted.rate, 0.0, preempted.replacement),
    ):
        down = first + node + after.restart + after.reload
        rounds = math.ceil(down / round_time)
        spare = rounds * round_time - down  # who fails later in the round joins a round later
        later = (math.exp(-all_rates * spare) - math.exp(-within)) / -math.expm1(-within)
        waiting += often / all_rates * (round_time * (rounds + later) - lost - down + node)
        restart += often / all_rates * (down - node)
    cycle = 1 / all_rates + restart + waiting
    part = 1 / (cycle * (1 + stall * workers / cycle))
    return Shares(
        useful=(1 / all_rates - lost) * part,
        checkpoint=0.0,
        lost=lost * part,
        restart=(restart + stall * workers) * part,
        waiting=waiting * part,
    )


def nested_shares(outer: Shares, inner: Shares) -> Shares:
    """Where the work that `outer` calls useful is divided as `inner` says.

    Of local updates: `outer` is what stops all of them, `inner` what stops one worker. What all
    lose is lost whatever it was. Exact where the workers are as often away after a restart of all
    as ever; they all begin again there, so it is pessimistic by about a failure of one for each.
    """
    part = outer.useful
    return Shares(
        useful=part * inner.useful,
        checkpoint=outer.checkpoint + part * inner.checkpoint,
        lost=outer.lost + part * inner.lost,
        restart=outer.restart + part * inner.restart,
        waiting=outer.waiting + part * inner.waiting,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is trained, in numbers.

    `workers` continue without one of them; with 1 every failure stops all. `round_time` is that of
    a round of local updates, or of a step. `outer_bytes` is the outer state of local updates:
    anchor, momentum, and an average under way. A worker reads the state of a peer at
    `peer_bandwidth`. Of `parameters` all are trained and saved; besides, a restart reads
    `frozen_bytes` of weights. A parameter takes `master` bytes in a checkpoint, and what the
    optimizer keeps of it `moments`.
    """

    gpus: int
    nodes: int
    parameters: int
    round_time: Seconds
    workers: int = 1
    outer_bytes: Bytes = 0.0
    peer_bandwidth: BytesPerSecond = math.inf
    master: Bytes = FP32
    moments: Bytes = 8.0
    frozen_bytes: Bytes = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeJob:
    """What stops all: `rate` in failures per second, `every` the work between two checkpoints.

    `preempted` are the nodes that are taken away while all need them.
    """

    rate: float
    every: Seconds
    saving: Saving
    after: Restart
    preempted: Preemption = _NONE

    def shares(self) -> Shares:
        """Of the time. Without copies at all (`every` infinite, no notice) all is useful.

        Raises OptionError where nothing gets done.
        """
        if math.isinf(self.every) and not self.preempted.rate:
            return Shares(useful=1.0, checkpoint=0.0, lost=0.0, restart=0.0, waiting=0.0)
        return whole_job_shares(self.rate, self.every, self.saving, self.after, self.preempted)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingWorkers:
    """What stops one of `count` workers: failures per second of one, and what follows.

    All stand still for `stall` at each, on average. `absent` is the share of workers for which
    there is no node. `preempted` is what is taken from one worker.
    """

    rate: float
    count: int
    round_time: Seconds
    after: Restart
    stall: Seconds
    absent: float
    preempted: Preemption = _NONE

    @property
    def all_rates(self) -> float:
        """Failures and preemptions per second of one worker."""
        return self.rate + self.preempted.rate

    def shares(self) -> Shares:
        """Of the time of all workers while no failure stops all."""
        there = independent_worker_shares(
            self.rate, self.count, self.round_time, self.after, self.stall, self.preempted
        )
        return nested_shares(_absent(self.absent), there)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Shares of the time, and what they follow from.

    `low` and `high` are the useful share where rates and restarts are at the ends of their range,
    with the same interval between checkpoints. `workers` is None where every failure stops all.
    `failures` are those of a job of this size, and `basis` says where its rate stands among counts
    by size; "" without these.
    """

    shares: Shares
    low: float
    high: float
    whole: WholeJob
    workers: FailingWorkers | None
    checkpoint_bytes: Bytes
    failures: Failures
    basis: str

    @property
    def useful(self) -> float:
        """The share of the time that is work which lasts."""
        return self.shares.useful

    @property
    def failures_per_second(self) -> float:
        """Of anything: what stops all, and what stops one worker; preemptions, too."""
        workers, whole = self.workers, self.whole
        alone = workers.all_rates * workers.count if workers else 0.0
        return whole.rate + whole.preempted.rate + alone


def shares_of(whole: WholeJob, workers: FailingWorkers | None) -> Shares:
    """Shares of all the time."""
    outer = whole.shares()
    return outer if workers is None else nested_shares(outer, workers.shares())


def missing(load: float, spares: int) -> float:
    """Nodes that are missing on average, with `load` under repair and a number of spares.

    The excess of a Poisson count over `spares` (M/G/infinity): E[(X - s)+] = load P(X >= s) -
    s P(X >= s + 1). As long as few are away: those away are taken to fail on.
    """
    if not spares:
        return load
    from scipy.special import gammainc  # noqa: PLC0415 - 0.2 s that most answers do not need

    return load * float(gammainc(spares, load)) - spares * float(gammainc(spares + 1, load))


def _absent(share: float) -> Shares:
    """A share of the time that waits."""
    waiting = min(share, 1.0)
    return Shares(useful=1 - waiting, checkpoint=0.0, lost=0.0, restart=0.0, waiting=waiting)


_NEVER = 1 / (1000 * 365.25 * 86400.0)
"""Failures per second: what stops all once in a thousand years needs no checkpoints."""

_WEIGHT: Bytes = 2.0
"""Of one in 16 bits: frozen, or trained without a master copy."""


def goodput_of(
    result: Result,
    cluster: Cluster,
    model: Model,
    *,
    optimizer: Optimizer = ADAMW,
    strategy: Strategy | None = None,
    every: Seconds | None = None,
    ends: bool = True,
) -> Goodput | None:
    """The goodput of a training that was simulated; None where the cluster has no failures.

    `result.tokens_per_s` times `.useful` is what training makes on average. Nothing is simulated:
    it takes about half a millisecond, and a third of that with `ends=False`, which leaves `low` and
    `high` at `useful`, and with `strategy`, which saves reading `result.strategy`. `cluster` and
    `model` are those of the question (`load`), of any size: that of the result counts. `every` is
    the work between two checkpoints in seconds; default: what leaves most useful time. Raises
    OptionError where nothing gets done, and where a checkpoint takes longer to write than `every`.

    DDP, ZeRO and FSDP: every failure stops all, and all go back to the last checkpoint. Local
    updates: a worker that fails stops alone; the others continue, and it comes back at the next
    round with the state of a peer. What stops all of them are failures of the job, and of the last
    worker that has the state.
    """
    if cluster.failures is None:
        return None
    trained = trained_of(result, cluster, model, optimizer=optimizer, strategy=strategy)
    return goodput_where(cluster.failures, trained, every, ends=ends)


def trained_of(
    result: Result,
    cluster: Cluster,
    model: Model,
    *,
    optimizer: Optimizer = ADAMW,
    strategy: Strategy | None = None,
) -> Trained:
    """What a result trains; for the arguments see `goodput_of`."""
    strategy = parse(result.strategy) if strategy is None else strategy
    workers = 1
    if isinstance(strategy, LocalSteps):
        nodes, each = max(1, result.nodes // result.apart), result.gpus // result.apart
        sites = cluster.resized(result.gpus).sites if cluster.sites > 1 and nodes > 1 else 1
        layout = result.ranks(Layout(nodes, each // nodes, sites))
        workers = Replica.of(strategy).workers(layout)
    link = cluster.inter if result.nodes > 1 else cluster.intra
    if cluster.wan is not None and workers == cluster.sites > 1:
        link = cluster.wan  # the nearest peer is at another site
    return Trained(
        gpus=result.gpus,
        nodes=result.nodes,
        parameters=result.trained_parameters or model.parameters,
        frozen_bytes=_WEIGHT * model.parameters if result.trained_parameters else 0.0,
        round_time=result.round_time_s,
        workers=workers,
        outer_bytes=result.memory_bytes_per_gpu.get("outer", 0.0) * result.gpus / workers,
        peer_bandwidth=link.payload_bandwidth,
        master=_WEIGHT if optimizer.master == "none" and result.precision != "fp32" else FP32,
        moments=states_per_parameter(
            optimizer, with_adapters(model, result.lora) if result.lora else model
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Spot nodes beside nodes that stay, of which `on_demand` of the time is useful.

    `cost` is that of a useful token on spot, relative to one on nodes that stay. Spot costs less
    where a node is taken away less often than once in `pays_from` on average: 0 where it always
    does, infinite where it never does. Both are None where `spot_price` is not known.
    """

    on_demand: float
    cost: float | None
    pays_from: Seconds | None


_LONGEST: Seconds = 1e4 * 365.25 * 86400.0
"""Between preemptions: they are as good as none."""


def spot_of(failures: Failures, trained: Trained, every: Seconds | None = None) -> Spot | None:
    """What spot nodes are worth; None where none is taken away. `every` as in `goodput_of`.

    Raises OptionError where nothing gets done.
    """
    if failures.preemption is None:
        return None

    def useful(between: Seconds | None) -> float:
        changed = replace(failures, preemption=between)
        try:
            return goodput_where(changed, trained, every, ends=False).useful
        except OptionError:  # nothing gets done
            return 0.0

    stays = 1.0
    if any((failures.by_size, *(getattr(failures, part) for part in PARTS[:-1]))):
        stays = useful(None)
    price, now = failures.spot_price, useful(failures.preemption)
    if price is None or not now:
        return Spot(on_demand=stays, cost=None, pays_from=None)

    from scipy.optimize import brentq  # noqa: PLC0415 - 0.2 s that most answers do not need

    def gain(logarithm: float) -> float:
        return useful(math.exp(logarithm)) - price * stays

    least, most = 0.0, math.log(_LONGEST)
    pays_from = 0.0 if gain(least) >= 0 else math.inf
    if gain(least) < 0 < gain(most):
        pays_from = math.exp(float(brentq(gain, least, most, xtol=1e-6)))
    return Spot(on_demand=stays, cost=price * stays / now, pays_from=pays_from)


def goodput_where(
    failures: Failures, trained: Trained, every: Seconds | None = None, *, ends: bool = True
) -> Goodput:
    """As `goodput_of`, of a training that is given in numbers."""
    if every is not None:
        above("the work between two checkpoints in s", every, 0)
    basis = failures.basis_of(trained.gpus)
    failures = failures.of_job(trained.gpus, trained.nodes)
    setting = _Setting(failures=failures, trained=trained)
    whole, parts = setting.parts(1.0, failures.restart, every)
    shares = shares_of(whole, parts)
    low, high = (
        shares.useful if not ends else _end(setting, whole.every, shares.useful, factor, restart)
        for factor, restart in (
            (failures.rate_high, failures.restart_high),
            (failures.rate_low, failures.restart_low),
        )
    )
    return Goodput(
        shares=shares,
        low=low,
        high=high,
        whole=whole,
        workers=parts,
        checkpoint_bytes=setting.checkpoint_bytes,
        failures=failures,
        basis=basis,
    )


def _end(
    setting: "_Setting", every: Seconds, usual: float, factor: float, restart: Seconds | None
) -> float:
    """The useful share at an end of what is known of rates and restarts."""
    restart = setting.failures.restart if restart is None else restart
    if (factor, restart) == (1.0, setting.failures.restart):
        return usual
    try:
        return shares_of(*setting.parts(factor, restart, every)).useful
    except OptionError:  # nothing gets done
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What the shares follow from."""

    failures: Failures
    trained: Trained

    @property
    def checkpoint_bytes(self) -> Bytes:
        """Parameters and moments; of local updates the moments of one worker."""
        trained = self.trained
        return trained.parameters * (trained.master + trained.moments) + trained.outer_bytes

    def saving(self) -> Saving:
        """All GPUs write in parallel; moments of local updates are those of one worker's GPUs."""
        failures, trained, gpus = self.failures, self.trained, self.trained.gpus
        bandwidth = failures.checkpoint_bandwidth or WRITE_PER_NODE * trained.nodes
        moments = trained.parameters * trained.moments
        shared = self.checkpoint_bytes - moments
        copy = (shared / gpus + moments / (gpus / trained.workers)) / failures.host_bandwidth
        write = self.checkpoint_bytes / bandwidth
        if failures.checkpoint == "blocking":
            return Saving(blocking=max(copy, write))
        return Saving(blocking=max(failures.pause, copy), writing=write)

    def after(self, restart: Seconds, reload: Seconds, broken: float) -> Restart:
        """What follows a failure, of which a share of `broken` needs another node."""
        failures = self.failures
        return Restart(
            detection=failures.detection,
            restart=restart,
            reload=reload,
            spares=failures.spares,
            repair=failures.repair * broken,
        )

    def parts(
        self, factor: float, restart: Seconds, every: Seconds | None
    ) -> tuple[WholeJob, FailingWorkers | None]:
        """What stops all, and what stops one worker, where rates are `factor` times those given."""
        failures, trained = self.failures, self.trained
        times = {part: getattr(failures, part) for part in PARTS}
        rates = Rates(**{part: factor / time if time else 0.0 for part, time in times.items()})
        switches = _of(trained.gpus, failures.gpus_per_switch)
        total, taken = rates.of(trained.gpus, trained.nodes, switches), rates.preemption
        taken *= trained.nodes
        if trained.workers == 1:
            workers, rate, broken = None, total, 1 - rates.job / total if total else 0.0
        else:
            # a part that all workers depend on stops all of them
            alone = replace(
                rates,
                node=rates.node if trained.nodes > 1 else 0.0,
                preemption=rates.preemption if trained.nodes > 1 else 0.0,
                switch=rates.switch if switches > 1 else 0.0,
                job=0.0,
            )
            apart_ = alone.of(trained.gpus, trained.nodes, switches)
            workers = self._workers(alone, apart_, restart)
            rate, broken = total - apart_ + _last(workers), 0.0
            rate = rate if rate > _NEVER else 0.0
            taken -= alone.preemption * trained.nodes
        saving, preempted = self.saving(), self.preemption(taken)
        bandwidth = failures.reload_bandwidth or READ_PER_NODE * trained.nodes
        read = self.checkpoint_bytes + trained.frozen_bytes
        after = self.after(restart, read / bandwidth, broken)
        if every is None:
            least = max(saving.writing - saving.blocking, trained.round_time)
            every = _best(rate, saving, after, preempted, least)
        whole = WholeJob(rate=rate, every=every, saving=saving, after=after, preempted=preempted)
        return whole, workers

    def preemption(self, rate: float) -> Preemption:
        """Of nodes that all need: a copy on notice is saved if there is time for it."""
        saving, failures = self.saving(), self.failures
        copy = saving.blocking + saving.writing
        return Preemption(
            rate=rate,
            saving=copy if copy <= failures.notice else None,
            replacement=failures.replacement,
        )

    def _workers(self, rates: Rates, all_of_them: float, restart: Seconds) -> FailingWorkers:
        """Of local updates: a worker stops with any of its GPUs, nodes and switches."""
        failures, trained = self.failures, self.trained
        gpus = trained.gpus // trained.workers
        nodes = -(-gpus * trained.nodes // trained.gpus)
        rate = rates.of(gpus, nodes, _of(gpus, failures.gpus_per_switch))
        taken = rates.preemption * nodes
        state = trained.parameters * trained.master + trained.outer_bytes
        wait, round_time = failures.detection, trained.round_time
        # a worker fails anywhere in a round; the others reach its end and wait until it is noticed
        early = min(wait, round_time)
        unnoticed = early**2 / (2 * round_time) + (wait - early)
        every_one = (rate + taken) * trained.workers
        stall = failures.regroup + (unnoticed * rate / (rate + taken) if every_one else 0.0)
        together = all_of_them + rates.preemption * trained.nodes
        return FailingWorkers(
            rate=rate,
            count=trained.workers,
            round_time=round_time,
            after=self.after(restart, state / trained.peer_bandwidth, 1.0),
            # those that fail at once stop the others once
            stall=stall * (min(1.0, together / every_one) if every_one else 1.0),
            absent=min(
                1.0, missing(all_of_them * failures.repair, failures.spares) / trained.nodes
            ),
            preempted=Preemption(rate=taken, replacement=failures.replacement),
        )


def _best(
    rate: float, saving: Saving, after: Restart, preempted: Preemption, least: Seconds
) -> Seconds:
    """The work between two copies that leaves most useful time, at least `least`."""
    if preempted.saving is None or not preempted.rate or not rate:
        lossy = rate + (preempted.rate if preempted.saving is None else 0.0)
        return max(best_interval(lossy, saving), least)

    from scipy.optimize import minimize_scalar  # noqa: PLC0415 - 0.2 s, as above

    def lost(logarithm: float) -> float:
        try:
            shares = whole_job_shares(rate, math.exp(logarithm), saving, after, preempted)
        except OptionError:  # nothing gets done
            return 1.0
        return 1 - shares.useful

    # copies on notice make others rarer: never rarer than ten mean times between failures
    bounds = (math.log(least), max(math.log(10 / rate), math.log(2 * least)))
    return math.exp(float(minimize_scalar(lost, bounds=bounds, method="bounded").x))


def _of(gpus: int, per_switch: int | None) -> int:
    """Switches of a number of GPUs."""
    return -(-gpus // per_switch) if per_switch else 0


def _last(workers: FailingWorkers) -> float:
    """How often a failure or a preemption hits the last worker that has the state, per second."""
    alone = independent_worker_shares(
        workers.rate,
        workers.count,
        workers.round_time,
        workers.after,
        preempted=workers.preempted,
    )
    away = 1 - (1 - workers.absent) * (alone.useful + alone.lost)
    return float(workers.count * workers.all_rates * away ** (workers.count - 1))
