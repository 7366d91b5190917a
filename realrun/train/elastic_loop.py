"""The training loop of workers that come and go: local updates only, every rank a worker."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from co2sim.schedule import Layout
from co2sim.units import Seconds
from realrun.algorithms import LocalUpdate
from realrun.errors import RankFailure
from realrun.execute.world import describe
from realrun.launch.membership import Membership
from realrun.train import elastic_record as record
from realrun.train import outcome
from realrun.train.crew import Crew, Meeting
from realrun.train.folder import LOG
from realrun.train.local_step import LocalStep
from realrun.train.log import History, Log, LogRow, read
from realrun.train.loop import OnStep, Standing
from realrun.train.methods import Method, build_alone
from realrun.train.settings import TrainSettings
from realrun.train.task import Task, means, scores
from realrun.train.tasks import make_task

_PAUSE: Seconds = 0.02
_WRITING: Seconds = 60.0
"""What writing the results may take, beyond the deadline, before others do it again."""


def train_elastic(
    settings: TrainSettings,
    membership: Membership,
    store: Any,
    layout: Layout,
    folder: Path,
    *,
    progress: OnStep | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> History | None:
    """Train as one of the workers of a layout, who may be lost, and come back; all call it.

    The first member, at the time, writes the log and the results. It alone gets a history, all
    others None. Once `stop` gives true on any, all end with the same round.

    Raises TrainingError when the loss is no number any more, MismatchError when members differ, and
    RankFailure when the others go on without this one.
    """
    device = torch.device("cpu")
    task = make_task(settings, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        method = build_alone(settings, task.model().to(device), membership.deadline)
    run = _ElasticTraining(settings, task, method, membership, store, layout, folder)
    return run.go(progress, stop)


@dataclass
class _ElasticTraining:
    """One member's training."""

    settings: TrainSettings
    task: Task
    method: Method
    membership: Membership
    store: Any
    layout: Layout
    folder: Path
    step: int = 0
    seconds: Seconds = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    log: Log | None = None
    last_validation: float | None = None
    round_began: float = 0.0
    outer: LocalUpdate = field(init=False)
    local: LocalStep = field(init=False)
    crew: Crew = field(init=False)

    def __post_init__(self) -> None:
        """Alone so far."""
        outer = self.method.outer
        assert isinstance(outer, LocalUpdate)
        self.outer, ranks = outer, self.layout.world_size
        self.local = LocalStep(
            self.settings, self.task, self.method, self.membership.me.rank, ranks
        )
        identity = {**self.settings.identity(), "data": self.task.facts["sha256"]}
        described = json.dumps(identity, indent=1)
        self.crew = Crew(self.membership, self.store, outer, described, self._give, self._take)

    def go(self, progress: OnStep | None, stop: Callable[[], bool]) -> History | None:
        """All steps that are left."""
        self.local.warm_up()
        if not self.crew.start(stop):
            return None
        self._write_meetings()
        self.round_began = time.monotonic()
        stopping = False
        while self.step < self.settings.last and not stopping:
            self.step += 1
            ends = self.step % self.settings.round == 0
            if ends:
                self._announce(stop=stop())
            began = time.monotonic()
            self.losses.append(self.local.take(self.step))
            self.seconds += time.monotonic() - began
            self.tokens += len(self.membership.generation.members) * self._share
            self._write_meetings()
            if ends:
                stopping = self._end_round()
            self._note(last=stopping or self.step == self.settings.last)
            if progress and self.membership.leads:
                progress(self._standing())
        return self._finish()

    @property
    def _share(self) -> int:
        """Tokens (images) that a member sees in a step."""
        return self.settings.batch // self.layout.world_size * self.task.units

    @property
    def _round(self) -> int:
        """The round of the last step, counted from 0."""
        return max(0, self.step - 1) // self.settings.round

    def _announce(self, *, stop: bool) -> None:
        """Before a round ends: the lead says when those who wait come in, or that all stop."""
        if stop:
            self.membership.roll.raise_flag("stop")
        if self.membership.leads:
            self.membership.announce(self._round + self.outer.lag)

    def _end_round(self) -> bool:
        """Let those in who wait, if it is time to; whether all stop now."""
        now = time.monotonic()
        self.crew.patience = max(self.crew.patience, now - self.round_began)
        change = self.membership.due(self._round)
        if change and not change.stop:
            self.outer.drain()
            self.crew.meet(change)
            self._write_meetings()
        self.round_began = time.monotonic()
        return change is not None and change.stop

    def _give(self) -> dict[str, Any]:
        """All that a member needs that joins after this step."""
        return {
            "model": self.method.bare.state_dict(),
            "optimizer": self.method.stepper.state_dict(),
            "outer": self.outer.shared(),
            "average": self.crew.average.state(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "changes": self.membership.changes,
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        """Join after that step, from the anchor, with the optimizer's state of that member."""
        self.method.bare.load_state_dict(state["model"])
        self.method.stepper.load_state_dict(state["optimizer"])
        self.outer.take_over(state["outer"])
        self.crew.average.load(state["average"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.tokens, self.membership.changes = state["tokens"], state["changes"]

    def _write_meetings(self) -> None:
        """The first member writes what has become of the members."""
        meetings = list(self.crew.meetings)
        self.crew.meetings.clear()
        if self.membership.leads:
            for meeting in meetings:
                record.append(self.folder, self._row(meeting))

    def _row(self, meeting: Meeting) -> record.GenerationRow:
        now = meeting.generation
        return record.GenerationRow(
            generation=now.number,
            step=self.step,
            round=self._round,
            members=record.names(now.members),
            lost=record.names(one for one in meeting.before if one not in now.members),
            joined=record.names(now.joined),
            noticed=meeting.noticed,
            went_on=time.time(),
            same=meeting.same,
            standing=meeting.standing,
            anchor=meeting.anchor,
        )

    def _note(self, *, last: bool) -> None:
        """Add a row to the log, if one is due, and this member is the first."""
        settings = self.settings
        evaluates = settings.evaluates(self.step)
        if not (evaluates or last or self.step % settings.log_every == 0):
            return
        mean = sum(self.losses) / len(self.losses)
        self.losses = []
        if not self.membership.leads:
            self.log = None
            return
        if self.log is None:  # of the one that was the first before
            known = read(self.folder) if (self.folder / LOG).exists() else ()
            self.log = Log(self.folder, [row for row in known if row.step < self.step])
        found = self._validate() if evaluates else (None, None)
        row = LogRow(
            step=self.step,
            tokens=self.tokens,
            seconds=self.seconds,
            train_loss=mean,
            lr=settings.learning_rate(self.step),
            validation_loss=found[0],
            accuracy=found[1],
        )
        self.log.add(row.with_stats(self.outer.stats()))

    def _validate(self) -> tuple[float, float | None]:
        """Loss and accuracy of the point that all agree on, by this member alone."""
        with torch.no_grad(), self.outer.consensus():
            total = sum(scores(self.method.bare, batch) for batch in self.task.validation)
        assert isinstance(total, torch.Tensor)
        self.last_validation, accuracy = means(total)
        return self.last_validation, accuracy

    def _standing(self) -> Standing:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        loss = self.losses[-1] if self.losses or self.log is None else self.log.rows[-1].train_loss
        return Standing(self.step, self.settings.steps, loss, self.last_validation, rate)

    def _finish(self) -> History | None:
        """Wait for what is under way, and for the others; the first one then writes.

        Should that one be lost, the next one writes.
        """
        membership, roll, me = self.membership, self.membership.roll, self.membership.me
        self.outer.drain()
        roll.note("done", me, self.outer.standing()[1])
        limit = time.monotonic() + membership.deadline + self.crew.patience
        while membership.others_left("done") and time.monotonic() < limit:
            if membership.wanted():
                self.crew.meet()
                self._write_meetings()
            time.sleep(_PAUSE)
        writer, killed = None, False
        while not roll.flag("finished"):
            alive = [one for one in membership.generation.members if not roll.ended(one)]
            if alive[0] == me:
                history = self._write()
                roll.raise_flag("finished")
                return history
            if alive[0] != writer:
                writer, killed = alive[0], False
                limit = time.monotonic() + membership.deadline + _WRITING
            if time.monotonic() > limit and not killed:
                killed = True  # by the launcher; then the next one writes
                roll.write("late", writer)
                limit = time.monotonic() + membership.deadline
            elif time.monotonic() > limit:
                raise RankFailure(
                    f"rank {writer.rank} did not write the results in time", ranks=(writer.rank,)
                )
            time.sleep(_PAUSE)
        return None

    def _write(self) -> History:
        """The results, and how the members fared."""
        if self.log is None:
            self.log = Log(self.folder, read(self.folder))
        rounds = self.step // self.settings.round
        members = record.summary(record.read_generations(self.folder), rounds)
        marks = {self.membership.roll.noted("done", one) for one in self._finishing()}
        members["anchors_equal"] &= len(marks) == 1
        layout = self.layout
        facts = outcome.facts_of(self.task, self.method, layout.nodes, layout.gpus_per_node)
        facts |= describe(torch.device("cpu"), "gloo")
        history = History(
            self.settings,
            tuple(self.log.rows),
            {**facts, "elastic": members},
            stopped=self.step < self.settings.steps,
        )
        with self.outer.consensus():
            whole = self.method.whole()
        outcome.write_files(self.folder, history, self.task, whole, layout.world_size)
        self.log.close()
        return history

    def _finishing(self) -> list[Any]:
        """Those who came to the end."""
        members = self.membership.generation.members
        return [one for one in members if self.membership.roll.noted("done", one)]
