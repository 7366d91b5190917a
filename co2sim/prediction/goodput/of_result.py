"""What part of the time a simulated training gets on with its work where parts fail."""

from dataclasses import dataclass, replace

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Seconds
from co2sim.common.validation import above
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.failures import READ_PER_NODE, WRITE_PER_NODE, Failures
from co2sim.models.workload import OPTIMIZER_BYTES, Model, Optimizer
from co2sim.prediction.goodput.closed_forms import (
    FailingWorkers,
    Goodput,
    Rates,
    Restart,
    Saving,
    Trained,
    WholeJob,
    apart,
    best_interval,
    missing,
    shares_of,
)
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Layout
from co2sim.schedule.tensor_parallel import data_layout
from co2sim.strategies import Strategy, parse
from co2sim.strategies.local import LocalSteps, Replica

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
    ends: bool = True,
) -> Goodput | None:
    """The goodput of a training that was simulated; None where the cluster has no failures.

    `result.tokens_per_s` times `.useful` is what training makes on average. Nothing is simulated:
    it takes about half a millisecond, and a third of that with `ends=False`, which leaves `low` and
    `high` at `useful`, and with `strategy`, which saves reading `result.strategy`. `cluster` and
    `model` are those of the case (`Case.load`), of any size: that of the result counts. `every` is
    the work between two checkpoints in seconds; default: what leaves most useful time. Raises
    OptionError where nothing gets done, and where a checkpoint takes longer to write than `every`.

    DDP, ZeRO and FSDP: every failure stops all, and all go back to the last checkpoint. Local
    updates: a worker that fails stops alone; the others go on, and it comes back at the next round
    with the state of a peer. What stops all of them are failures of the job, and of the last worker
    that has the state.
    """
    failures = cluster.failures
    if failures is None:
        return None
    strategy = parse(result.strategy) if strategy is None else strategy
    workers = 1
    if isinstance(strategy, LocalSteps):
        nodes, each = max(1, result.nodes // result.pp), result.gpus // result.pp
        layout = data_layout(Layout(nodes, each // nodes), result.tp)
        workers = Replica.of(strategy).workers(layout)
    link = cluster.inter if result.nodes > 1 else cluster.intra
    if cluster.wan is not None and workers == cluster.sites > 1:
        link = cluster.wan  # the nearest peer is at another site
    trained = Trained(
        gpus=result.gpus,
        nodes=result.nodes,
        parameters=model.parameters,
        round_time=result.round_time_s,
        workers=workers,
        outer_bytes=result.memory_bytes_per_gpu.get("outer", 0.0) * result.gpus / workers,
        peer_bandwidth=link.payload_bandwidth,
        optimizer=optimizer,
    )
    return goodput_where(failures, trained, every, ends=ends)


def goodput_where(
    failures: Failures, trained: Trained, every: Seconds | None = None, *, ends: bool = True
) -> Goodput:
    """As `goodput_of`, of a training that is given in numbers."""
    if every is not None:
        above("the work between two checkpoints in s", every, 0)
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
        """Parameters and moments in fp32; of local updates the moments of one worker."""
        trained = self.trained
        return trained.parameters * OPTIMIZER_BYTES[trained.optimizer] + trained.outer_bytes

    def saving(self) -> Saving:
        """All GPUs write in parallel; moments of local updates are those of one worker's GPUs."""
        failures, trained, gpus = self.failures, self.trained, self.trained.gpus
        bandwidth = failures.checkpoint_bandwidth or WRITE_PER_NODE * trained.nodes
        moments = trained.parameters * (OPTIMIZER_BYTES[trained.optimizer] - _MASTER)
        shared = self.checkpoint_bytes - moments
        copy = (shared / gpus + moments / (gpus / trained.workers)) / failures.host_bandwidth
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
        failures, trained = self.failures, self.trained
        rates = _rates(failures, factor)
        switches = _of(trained.gpus, failures.gpus_per_switch)
        total = rates.of(trained.gpus, trained.nodes, switches)
        if trained.workers == 1:
            workers, rate, broken = None, total, 1 - rates.job / total
        else:
            # a part that all workers depend on stops all of them
            alone = replace(
                rates,
                node=rates.node if trained.nodes > 1 else 0.0,
                switch=rates.switch if switches > 1 else 0.0,
                job=0.0,
            )
            apart_ = alone.of(trained.gpus, trained.nodes, switches)
            workers = self._workers(alone, apart_, restart)
            rate, broken = total - apart_ + _last(workers), 0.0
            rate = rate if rate > _NEVER else 0.0
        saving = self.saving()
        if every is None:
            least = max(saving.writing - saving.blocking, trained.round_time)
            every = max(best_interval(rate, saving), least)
        bandwidth = failures.reload_bandwidth or READ_PER_NODE * trained.nodes
        after = self.after(restart, self.checkpoint_bytes / bandwidth, broken)
        return WholeJob(rate=rate, every=every, saving=saving, after=after), workers

    def _workers(self, rates: Rates, all_of_them: float, restart: Seconds) -> FailingWorkers:
        """Of local updates: a worker stops with any of its GPUs, nodes and switches."""
        failures, trained = self.failures, self.trained
        gpus = trained.gpus // trained.workers
        nodes = -(-gpus * trained.nodes // trained.gpus)
        rate = rates.of(gpus, nodes, _of(gpus, failures.gpus_per_switch))
        state = trained.parameters * _MASTER + trained.outer_bytes
        wait, round_time = failures.detection, trained.round_time
        # a worker fails anywhere in a round; the others reach its end and wait until it is noticed
        early = min(wait, round_time)
        stall = failures.regroup + early**2 / (2 * round_time) + (wait - early)
        together_ = all_of_them / (rate * trained.workers) if rate else 1.0
        return FailingWorkers(
            rate=rate,
            count=trained.workers,
            round_time=round_time,
            after=self.after(restart, state / trained.peer_bandwidth, 1.0),
            stall=stall * min(1.0, together_),  # those that fail at once stop the others once
            absent=min(
                1.0, missing(all_of_them * failures.repair, failures.spares) / trained.nodes
            ),
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
