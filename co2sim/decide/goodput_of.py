"""What part of the time a simulated training gets on with its work where parts fail."""

from dataclasses import dataclass, replace

from co2sim.cluster import Cluster
from co2sim.decide.goodput import Rates, Restart, Saving, apart, best_interval
from co2sim.decide.goodput_parts import Goodput, WholeJob, FailingWorkers, missing, shares_of
from co2sim.errors import OptionError
from co2sim.failures import READ_PER_NODE, WRITE_PER_NODE, Failures
from co2sim.ranges import above
from co2sim.result import Result
from co2sim.schedule import Layout
from co2sim.strategies import Strategy, parse
from co2sim.strategies.local import LocalSteps, Replica
from co2sim.units import Bytes, Seconds
from co2sim.workload import OPTIMIZER_BYTES, Model, Optimizer

_NEVER = 1 / (1000 * 365.25 * 86400.0)
"""Failures per second: what stops all once in a thousand years needs no checkpoints."""

_MASTER: Bytes = 4.0
"""Of the fp32 parameters, which `OPTIMIZER_BYTES` counts with the moments."""


def goodput_of(
    result: Result,
    cluster: Cluster,
    model: Model,
    *,
    optimizer: Optimizer = "adamw",
    strategy: Strategy | None = None,
    every: Seconds | None = None,
) -> Goodput | None:
    """The goodput of a training that was simulated; None where the cluster has no failures.

    `result.tokens_per_s` times `.useful` is what training makes on average. About 0.1 ms: nothing
    is simulated. `cluster` and `model` are those of the case (`Case.load`), of any size: that of
    the result counts. `strategy` saves reading `result.strategy`. `every` is the work between two
    checkpoints in seconds; default: what leaves most useful time. Raises OptionError where nothing
    gets done, and where a checkpoint takes longer to write than `every`.

    DDP, ZeRO and FSDP: every failure stops all, and all go back to the last checkpoint. Local
    updates: a worker that fails stops alone; the others go on, and it comes back at the next round
    with the state of a peer. What stops all of them are failures of the job, and of the last worker
    that has the state.
    """
    failures = cluster.failures
    if failures is None:
        return None
    if every is not None:
        above("the work between two checkpoints in s", every, 0)
    strategy = parse(result.strategy) if strategy is None else strategy
    workers = 1
    if isinstance(strategy, LocalSteps):
        layout = Layout(result.nodes, result.gpus // result.nodes)
        workers = Replica.of(strategy).workers(layout)
    setting = _Setting(
        result=result,
        cluster=cluster,
        failures=failures,
        workers=workers,
        parameters=model.parameters,
        outer=result.memory_bytes_per_gpu.get("outer", 0.0) * result.gpus / workers,
        optimizer=optimizer,
    )
    whole, parts = setting.parts(1.0, failures.restart, every)
    shares = shares_of(whole, parts)
    low, high = (
        _end(setting, whole.every, shares.useful, factor, restart)
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
    """What the shares follow from; `workers` is 1 where every failure stops all.

    `parameters` are those of the model, `outer` the bytes of outer state of local updates in all:
    anchor, momentum, and an average under way.
    """

    result: Result
    cluster: Cluster
    failures: Failures
    workers: int
    parameters: int
    outer: Bytes
    optimizer: Optimizer

    @property
    def checkpoint_bytes(self) -> Bytes:
        """Parameters and moments in fp32; of local updates the moments of one worker."""
        return self.parameters * OPTIMIZER_BYTES[self.optimizer] + self.outer

    def saving(self) -> Saving:
        """All GPUs write in parallel; moments of local updates are those of one worker's GPUs."""
        failures, gpus = self.failures, self.result.gpus
        bandwidth = failures.checkpoint_bandwidth or WRITE_PER_NODE * self.result.nodes
        moments = self.parameters * (OPTIMIZER_BYTES[self.optimizer] - _MASTER)
        shared = self.checkpoint_bytes - moments
        copy = (shared / gpus + moments / (gpus / self.workers)) / failures.host_bandwidth
        write = self.checkpoint_bytes / bandwidth
        if failures.checkpoint == "blocking":
            return Saving(blocking=max(copy, write))
        return Saving(blocking=max(failures.pause, copy), writing=write)

    def after(self, restart: Seconds, reload: Seconds, broken: float) -> Restart:
        """What follows a failure, of which a share of `broken` needs another node."""
        given = self.failures
        return Restart(
            detection=given.detection,
            restart=restart,
            reload=reload,
            spares=given.spares,
            repair=given.repair * broken,
        )

    def parts(
        self, factor: float, restart: Seconds, every: Seconds | None
    ) -> tuple[WholeJob, FailingWorkers | None]:
        """What stops all, and what stops one worker, where rates are `factor` times those given."""
        failures, result = self.failures, self.result
        rates = _rates(failures, factor)
        switches = _of(result.gpus, failures.gpus_per_switch)
        total = rates.of(result.gpus, result.nodes, switches)
        if self.workers == 1:
            workers, rate, broken = None, total, 1 - rates.job / total
        else:
            # a part that all workers depend on stops all of them
            alone = replace(
                rates,
                node=rates.node if result.nodes > 1 else 0.0,
                switch=rates.switch if switches > 1 else 0.0,
                job=0.0,
            )
            apart_ = alone.of(result.gpus, result.nodes, switches)
            workers = self._workers(alone, apart_, restart)
            rate, broken = total - apart_ + _last(workers), 0.0
            rate = rate if rate > _NEVER else 0.0
        saving = self.saving()
        if every is None:
            least = max(saving.writing - saving.blocking, result.round_time_s)
            every = max(best_interval(rate, saving), least)
        bandwidth = failures.reload_bandwidth or READ_PER_NODE * result.nodes
        after = self.after(restart, self.checkpoint_bytes / bandwidth, broken)
        return WholeJob(rate=rate, every=every, saving=saving, after=after), workers

    def _workers(self, rates: Rates, all_of_them: float, restart: Seconds) -> FailingWorkers:
        """Of local updates: a worker stops with any of its GPUs, nodes and switches."""
        failures, result, cluster = self.failures, self.result, self.cluster
        gpus = result.gpus // self.workers
        nodes = -(-gpus * result.nodes // result.gpus)
        rate = rates.of(gpus, nodes, _of(gpus, failures.gpus_per_switch))
        link = cluster.inter if result.nodes > 1 else cluster.intra
        state = self.parameters * _MASTER + self.outer
        wait, round_time = failures.detection, result.round_time_s
        # a worker fails anywhere in a round; the others reach its end and wait until it is noticed
        early = min(wait, round_time)
        stall = failures.regroup + early**2 / (2 * round_time) + (wait - early)
        together_ = all_of_them / (rate * self.workers) if rate else 1.0
        return FailingWorkers(
            rate=rate,
            count=self.workers,
            round_time=round_time,
            after=self.after(restart, state / link.payload_bandwidth, 1.0),
            stall=stall * min(1.0, together_),  # those that fail at once stop the others once
            absent=min(1.0, missing(all_of_them * failures.repair, failures.spares) / result.nodes),
        )


def _rates(failures: Failures, factor: float) -> Rates:
    """Failures per second of each part."""

    def of(time: Seconds | None) -> float:
        return factor / time if time else 0.0

    return Rates(
        gpu=of(failures.gpu),
        node=of(failures.node),
        switch=of(failures.switch),
        job=of(failures.job),
    )


def _of(gpus: int, per_switch: int | None) -> int:
    """Switches of so many GPUs."""
    return -(-gpus // per_switch) if per_switch else 0


def _last(workers: FailingWorkers) -> float:
    """How often a failure hits the last worker that has the state, per second."""
    alone = apart(workers.rate, workers.count, workers.round_time, workers.after)
    away = 1 - (1 - workers.absent) * (alone.useful + alone.lost)
    return float(workers.count * workers.rate * away ** (workers.count - 1))
