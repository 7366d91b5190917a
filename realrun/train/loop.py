"""The training loop: one for all strategies."""

import gc
import io
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from co2sim.common.delayed_averaging import bounded, kept
from co2sim.common.errors import CatalogError, Co2simError, OptionError
from co2sim.common.files import write_atomically
from co2sim.common.units import Seconds, counted
from co2sim.common.version import own_version
from co2sim.schedule.schedule import WORLD
from realrun.algorithms import LocalUpdate
from realrun.algorithms.departures import of_network
from realrun.errors import BAD_INPUT, CheckpointError, DamagedError, RankFailure, TrainingError
from realrun.execute.threads import short_collections
from realrun.execute.world import World, describe
from realrun.launch.monitor import Place
from realrun.train import checkpoint
from realrun.train.checkpoint import run_on_all_ranks
from realrun.train.estimate import Estimator
from realrun.train.folder import ESTIMATE, FIGURE, LOG, MODEL, Resume, check_steps
from realrun.train.log import OF_OUTER_STEP, History, Log, LogRow, draw, read, write_record
from realrun.train.parallelize import WrappedModel, build
from realrun.train.settings import TrainSettings, check, check_estimate
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import Task, loss_of, means, scores


class Validation:
    """Validations of a method on a task. `last` is the last loss, None before the first.

    Those that wait for the end are kept as copies of the parameters, by step.
    """

    def __init__(self, task: Task, method: WrappedModel, world: World) -> None:
        self._task, self._method, self._world = task, method, world
        self._pending: dict[int, list[Tensor]] = {}
        self.last: float | None = None

    def take(self, parts: Sequence[Tensor] | None = None) -> tuple[float, float | None]:
        """Loss and accuracy of the mean of all workers; ranks share the samples.

        `parts` are the parameters to take instead of those of now. All ranks call this.
        """
        batches, size = self._task.validation, self._world.layout.world_size
        total = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        with torch.no_grad(), self._method.mean(parts) as model:
            for turn in range(-(-len(batches) // size)):
                index = turn * size + self._world.rank
                seen = scores(model, batches[min(index, len(batches) - 1)])  # all ranks call it
                if index < len(batches):
                    total += seen
        dist.all_reduce(total)
        loss, accuracy = means(total)
        self.last = loss
        return loss, accuracy

    def keep(self, step: int) -> None:
        """Keep the parameters of a step, to be validated once training is over."""
        self._pending[step] = self._method.copy()

    def take_pending(self, log: Log) -> None:
        """Validate what was kept, and fill it into the log. All ranks call this."""
        for step, parts in self._pending.items():
            log.fill(step, *self.take(parts))
        self._pending.clear()


@contextmanager
def report_rank_errors(world: World, place: Place) -> Iterator[None]:
    """Work that others depend on, at a place that they can see.

    Raises RankFailure, with the ranks that are lost, when a collective fails, or with this one when
    its own work raises. An error for users is sent to the others, unless all have it, and continues
    here.
    """
    world.watch.enter("training", place)
    everybody = range(world.layout.world_size)
    try:
        yield
    except RankFailure as error:
        if reported := world.watch.reported():  # which says where that rank was
            raise reported from error
        if error.ranks:
            raise
        raise world.watch.lost(place, everybody, error) from error
    except Co2simError as error:
        if isinstance(error, CheckpointError) and error.everywhere:
            raise  # all know
        if world.watch.failure:
            raise world.watch.failure from error
        world.watch.raised(place, error, said=isinstance(error, BAD_INPUT))
        raise
    except RuntimeError as error:
        if not of_network(error):
            raise world.watch.raised(place, error) from error
        raise world.watch.lost(place, everybody, error) from error
    except Exception as error:
        raise world.watch.raised(place, error) from error
    finally:
        world.watch.exit("training")


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What a rank trains: share `part` of `parts` equal shares of every step's samples."""

    settings: TrainSettings
    task: Task
    method: WrappedModel
    part: int
    parts: int

    def gradients(self, step: int) -> float:
        """The gradients of a step; gives the loss."""
        self.method.optimizer.zero_grad()
        settings = self.settings
        batch = self.task.batch(settings.seed, step, settings.batch, self.part, self.parts)
        loss = loss_of(self.method.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def take(self, step: int) -> float:
        """A step; gives the loss. One that is no number never reaches the parameters.

        Raises TrainingError then.
        """
        settings, method = self.settings, self.method
        method.set_rate(settings.learning_rate(step))
        loss = self.gradients(step)
        if settings.clip_grad:
            clip_grad_norm_(method.bare.parameters(), settings.clip_grad)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {step} is {loss} on rank {self.part}: training cannot continue;"
                " a lower lr, a longer warmup or a lower clip_grad may help"
            )
        method.optimizer.step()
        return loss

    def warm_up(self) -> None:
        """One pass that changes nothing, off the clock.

        What is made in a first pass is there afterwards: above all, DDP has its final buckets, and
        a resumed run sums in the same order as one that was not interrupted.
        """
        self.gradients(0)
        self.method.optimizer.zero_grad()


class Votes:
    """Votes with some steps between; the result of one, which is that of all, counts at the next.

    Ranks of local updates may be at different steps; a rank that stopped at once would leave the
    others waiting. Each vote is 4 bytes that travel while the steps continue.
    """

    def __init__(self, world: World, first: int, wish: Callable[[], bool]) -> None:
        """The `first` vote is after this step, or a later one."""
        self._next, self._wish = first, wish
        self._group = world.group("votes", WORLD)
        self._given = torch.zeros(1, dtype=torch.int32, device=world.device)
        self._work: dist.Work | None = None

    def take(self, step: int, between: int) -> bool:
        """Vote, if it is time to; whether the vote before was to stop. All ranks call it.

        There are `between` steps to the next one.
        """
        if step < self._next:
            return False
        self._next = step + between
        stop = self.close()
        if not stop:
            self._given.fill_(int(self._wish()))
            self._work = dist.all_reduce(
                self._given, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )
        return stop

    def close(self) -> bool:
        """Wait for the vote that is under way; its result."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._given.item())


_VOTE = 8
"""Steps, at least, from a vote on whether to stop to its result."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a training is: the loss of the last step, and the last validation loss."""

    step: int
    steps: int
    loss: float
    validation_loss: float | None
    tokens_per_s: float


OnStep: TypeAlias = Callable[[Standing], None]
"""Told after every step."""

Build: TypeAlias = Callable[[TrainSettings, nn.Module, World], WrappedModel]
"""Wraps a model, which is equal on all ranks, for training. All ranks call it."""


def train(
    settings: TrainSettings,
    world: World,
    folder: Path | None = None,
    *,
    resume: Resume | bool = False,
    estimate: bool = False,
    progress: OnStep | None = None,
    stop: Callable[[], bool] | None = None,
    build: Build = build,
) -> History:
    """Train; every rank of the world calls this with the same settings.

    With a folder rank 0 writes the log, the record and the parameters there, and all ranks
    checkpoints; `resume` continues from the last of them, if there is one, or as it says. With
    `estimate` the constants of the bound are measured at three points, off the clock. Once `stop`
    gives true on any rank (all give one, or none does) all end together, some steps later, with a
    checkpoint.
    `build` makes the method, for what is no strategy of co2sim.

    Raises OptionError for what cannot be trained here, TrainingError when the loss is no number any
    more, CheckpointError, MismatchError when ranks differ, and RankFailure when one is lost.
    """
    check(settings, world.layout)
    if estimate:
        check_estimate(settings, world.layout, resume=bool(resume))
    task = make_task(settings.task, settings.size, settings.shape, world.device)
    identity = {**settings.identity(), "data": task.facts["sha256"]}
    world.agree("training", json.dumps({**identity, "steps": settings.steps}, indent=1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = task.model().to(world.device)
    with report_rank_errors(world, Place(-1, 0, "start of the training")):
        method = build(settings, model, world)
    with method.outer or nullcontext():
        validation = Validation(task, method, world)
        with report_rank_errors(world, Place(-1, 0, "start of the training")):
            estimator = Estimator(settings, task, method, world) if estimate else None
        local = LocalStep(settings, task, method, world.rank, world.layout.world_size)
        run = _Training(
            settings, task, world, method, local, validation, identity, folder, estimator
        )
        run.begin(Resume() if resume is True else resume or None)
        gc.collect()
        with short_collections():
            return run.go(progress, stop)


@dataclass
class _Training:
    """One training on this rank. `seconds` of training had passed when `since` began."""

    settings: TrainSettings
    task: Task
    world: World
    method: WrappedModel
    local: LocalStep
    validation: Validation
    identity: dict[str, Any]
    folder: Path | None
    estimator: Estimator | None
    step: int = 0
    rounds: int = 0
    ended: int = 0
    """The last step that ended a round."""
    seconds: Seconds = 0.0
    losses: list[float] = field(default_factory=list)
    log: Log = field(default_factory=lambda: Log(None))

    def begin(self, resume: Resume | None) -> None:
        """Make ready: warm up, load the last checkpoint, open the log."""
        rows: tuple[LogRow, ...] = ()
        with report_rank_errors(self.world, Place(-1, 0, "start of the training")):
            self.local.warm_up()
            if self.folder and resume:
                last = resume.checkpoint(self.folder)
                self.world.agree("last checkpoint", str(last))
                if last:
                    check_steps(last, self.settings.steps)
                    self._go_on(last)
                    rows = self._known(self.folder)
        self.log = Log(self.folder if self.world.rank == 0 else None, rows)

    def _known(self, folder: Path) -> tuple[LogRow, ...]:
        """The rows of the log so far, on rank 0. All ranks call it, and hear if that fails."""
        rows: list[LogRow] = []

        def look() -> None:
            if self.world.rank == 0 and (folder / LOG).exists():
                try:
                    rows.extend(row for row in read(folder) if row.step <= self.step)
                except CatalogError as error:
                    raise CheckpointError(str(error)) from error

        run_on_all_ranks("cannot continue", look)
        return tuple(rows)

    def _go_on(self, last: Path) -> None:
        """Take over a checkpoint."""
        state = checkpoint.load(last, self.identity, self.world)

        def take() -> None:
            try:
                self.method.load_state(state["method"])
                self.step, self.seconds = state["step"], state["seconds"]
                self.losses = state["losses"]
                self.ended = state.get("ended", self.step)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise DamagedError("it holds no state of this training") from error
            except OptionError as error:
                raise CheckpointError(str(error)) from error

        checkpoint.reading(last, self.world, take)
        self.method.agree()
        self.rounds = self._rounds_so_far()

    def go(self, progress: OnStep | None, stop: Callable[[], bool] | None) -> History:
        """All steps that are left."""
        settings = self.settings
        with self._place("start of the steps after"):
            votes = Votes(self.world, self.step + self._between_votes(), stop) if stop else None
        while self.step < settings.last:
            self._estimate()
            self.step += 1
            with self._place("local step" if settings.local else "step"):
                began = time.monotonic()
                self.losses.append(self.local.take(self.step))
                stopping = votes is not None and votes.take(self.step, self._between_votes())
                evaluates = settings.evaluates(self.step, self._count_round())
                if settings.evaluate == "after" and evaluates:
                    self.validation.keep(self.step)
                self.seconds += time.monotonic() - began
            with self._place("validation"):
                self._note(evaluates=evaluates, last=stopping or self.step == settings.last)
            if progress:
                progress(self._standing())
            every = settings.checkpoint_every
            ending = stopping or self.step == settings.last
            if self.folder and (ending or (every and self.step % every == 0)):
                with self._place("checkpoint"):
                    self._save()
            if stopping:
                break
        self._estimate()
        with self._place("end of the training"):
            if votes:
                votes.close()
            return self._end()

    def _rounds_so_far(self) -> int:
        """Rounds that have ended: steps, where every step ends with an average."""
        return self.method.outer.stats().rounds if self.method.outer else self.step

    def _count_round(self) -> int | None:
        """After a step: the one before the round that it has ended; None within a round."""
        began, before, self.rounds = self.ended, self.rounds, self._rounds_so_far()
        if self.rounds == before:
            return None
        self.ended = self.step
        return began

    def _between_votes(self) -> int:
        """Steps: at least a round, since ranks within one may be at different steps."""
        outer = self.method.outer
        return max(_VOTE, outer.stats().tau or 0) if outer else _VOTE

    def _note(self, *, evaluates: bool, last: bool) -> None:
        """Add a row to the log, if one is due."""
        settings = self.settings
        if not (evaluates or last or self.step % settings.log_every == 0):
            return
        seen: tuple[float | None, float | None] = (None, None)
        if evaluates and settings.evaluate == "during":
            seen = self.validation.take()
        row = LogRow(
            step=self.step,
            tokens=self.step * settings.batch * self.task.units,
            seconds=self.seconds,
            train_loss=sum(self.losses) / len(self.losses),
            lr=settings.learning_rate(self.step),
            validation_loss=seen[0],
            accuracy=seen[1],
        )
        self.losses = []
        if self.method.outer:
            stats = self.method.outer.stats()
            row = replace(row, **{name: getattr(stats, name) for name in OF_OUTER_STEP})
        self.log.add(row)

    def _estimate(self) -> None:
        """Measure the constants of the bound, if it was asked for and is due."""
        if self.estimator:
            with self._place("estimate after step"):
                self.estimator.at(self.step)

    def _save(self) -> None:
        assert self.folder is not None
        self.validation.take_pending(self.log)
        state = {
            "method": self.method.state(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "ended": self.ended,
        }
        checkpoint.save(self.folder, self.step, state, self.identity, self.world)

    def _end(self) -> History:
        self.validation.take_pending(self.log)
        self.log.close()
        history = History(
            self.settings,
            tuple(self.log.rows),
            facts(self.task, self.method, self.world),
            stopped=self.step < self.settings.steps,
            estimates=self.estimator.result() if self.estimator else None,
        )
        if self.folder:
            write_outcome(self.folder, history, self.task, self.method, self.world)
        return history

    def _standing(self) -> Standing:
        tokens = self.step * self.settings.batch * self.task.units
        rate = tokens / self.seconds if self.seconds else 0.0
        last = self.losses[-1] if self.losses else self.log.rows[-1].train_loss
        return Standing(self.step, self.settings.steps, last, self.validation.last, rate)

    def _place(self, what: str) -> AbstractContextManager[None]:
        place = Place(self.step, self.rounds, f"{what} {self.step}")
        return report_rank_errors(self.world, place)


def facts(task: Task, method: WrappedModel, world: World) -> Mapping[str, Any]:
    """Facts about the data, the model, the outer step with its defaults, and the machine."""
    layout, outer = world.layout, method.outer
    return {
        **task.facts,
        "workers": method.workers,
        **({"outer_step": _outer_step(outer)} if isinstance(outer, LocalUpdate) else {}),
        "parameters": sum(p.numel() for p in method.bare.parameters()),
        "nodes": layout.nodes,
        "ranks_per_node": layout.gpus_per_node,
        "co2sim": own_version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **describe(world.device, world.backend),
    }


def _outer_step(outer: LocalUpdate) -> dict[str, Any]:
    """The options of the outer step; of late averages what was used where nothing was given."""
    rule, delay = outer.loop.rule, outer.stats().delay
    waits = rule.late is None
    options = asdict(rule) | {"tau": outer.loop.tau if waits else outer.stats().tau}
    late, tau = rule.late, outer.loop.tau
    if late is not None:
        keep, predict = kept(tau, late.keep, late.predict)
        used = predict if delay is None else bounded(tau, delay, keep, predict)
        options |= {"keep": keep, "predict": used, "fragments": late.parts(tau)}
    return options


def write_outcome(
    folder: Path, history: History, task: Task, method: WrappedModel, world: World
) -> None:
    """Write parameters, figure and record. All ranks call this; rank 0 writes."""
    with method.mean():
        whole = method.whole()
    if world.rank:
        return
    out = io.BytesIO()
    torch.save(whole, out)
    runs = {history.settings.name: history.rows}
    parameters = f"{history.facts['parameters']:,} parameters"
    title = f"{task.name}, {parameters}, {counted(world.layout.world_size, 'rank')}"
    files = {MODEL: out.getvalue(), FIGURE: draw(runs, title, task.unit, task.loss)}
    if history.estimates:
        estimates = history.estimates.to_dict(history.chosen, history.rows[-1].delay)
        files[ESTIMATE] = f"{json.dumps(estimates, indent=2)}\n".encode()
    write_atomically({folder / name: data for name, data in files.items()})
    write_record(folder, history)
