"""Averages and membership by torchft: a worker that dies is dropped, and comes back.

A worker is a replica group of torchft, of one rank. Who is there, and who catches up from whom, is
decided by torchft alone: its lighthouse, its Manager, its transport of states. After a round each

1. with staleness 1, waits for the average that it launched a round ago, and uses it only if
   `manager.should_commit()` says so;
2. comes to `manager.start_quorum()`, where all wait for each other. Who is new, or has missed an
   average that others have used, is given their anchor, the vectors and numbers of the rule, frozen
   parameters and buffers. No average is under way now, so that none need be given;
3. launches `manager.allreduce` of what its steps moved, and of a 1 behind it. Who was given a state
   launches zeros: the mean is divided by the mean of the ones;
4. with staleness 0, waits for it now, as in 1.

So all in a quorum hold the same anchor, bit for bit: they used the same averages, or got the anchor
from one who did.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from realrun.algorithms import LocalUpdate
from realrun.algorithms.averaging import (
    BUCKET_MIB,
    Average,
    PendingAverage,
    Stopwatch,
    Transport,
)
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.outer_loop import RoundLoop
from realrun.algorithms.process_groups import DEADLINE, Workers
from realrun.errors import MismatchError, RankFailure, first_difference

Algorithm = TypeVar("Algorithm", bound=LocalUpdate)

_LIMITS = "give timeout and quorum_timeout to the Manager"
_LEFT_OUT = {
    "worker": "a worker is a replica group of one rank",
    "dtype": "averages travel in fp32",
    "check_every": "who has missed an average is given the anchor of the others",
    "on_nonfinite": "who is not finite is given the anchor of the others by a new start",
    "offload": "what averages is torchft's",
    "timeout": _LIMITS,
}
"""Options of algorithms that mean nothing here, and why."""


def fault_tolerant(
    manager: Manager,
    algorithm: Callable[..., Algorithm],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    state: dict[str, Any] | None = None,
    bucket_mib: float = BUCKET_MIB,
    **options: Any,
) -> Algorithm:
    """Make an algorithm, such as CO2.published, whose workers may die and come back.

    `options` are its own; one collective has `bucket_mib` MiB.

    `manager` is a Manager with use_async_quorum=False. It is asked for a quorum here: afterwards
    the model, its buffers and `stats().rounds` are those of the others. So let the loop run up to a
    number of rounds: `while co2.stats().rounds < 100`. `finish`, and the end of the `with` block,
    continue with what others need until all have come there. Shut the manager down yourself. What
    else a worker that comes back must know is yours to register there, before.

    When a worker dies, its steps since its last average are lost, and the state of its optimizer:
    it begins with a new one. An average that was under way may be lost for all, which is what they
    learned in one round; they continue from the anchor. Who alone misses an average loses its next
    round, too.

    `state` is what `state_dict` gave on any worker: its anchor is that of who is there first. The
    average under way is not in it. Buffers are not averaged.

    Raises OptionError for what cannot be combined: a delay, fragments, a pull, a staleness above 1,
    options that the manager has, several ranks in a replica group; MismatchError for another model
    or setting than others have; RankFailure, also out of `optimizer.step()`, without a quorum.
    """
    for name, reason in _LEFT_OUT.items():
        if name in options:
            raise OptionError(f"{name} is {options[name]!r}; with torchft leave it out: {reason}")
    if manager._use_async_quorum:  # noqa: SLF001 - as torchft's own DiLoCo asks
        raise OptionError(
            "use_async_quorum of the Manager is True; it must be False: who comes back must not"
            " take a step before it has the anchor"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise OptionError(
            f"a replica group has {dist.get_world_size()} ranks; it must have one: start a torchrun"
            " with --nproc-per-node 1 for each worker"
        )
    made = algorithm(model, optimizer, worker=Workers(None), **options)
    try:
        if state is not None:
            made.load_anchor(state)
        transport = Transport(bucket_mib=bucket_mib)
        loop = _QuorumLoop(_rounds(made), manager, made, transport.bucket)
        manager.register_state_dict_fn("realrun", loop.take, loop.give)
        loop.start()
        made.use_loop(loop)
    except BaseException:
        made.close()
        raise
    return made


def _rounds(algorithm: LocalUpdate) -> RoundLoop:
    """Its loop, if that uses averages at the end of a round only. Raises OptionError."""
    loop = algorithm.loop
    if not isinstance(loop, RoundLoop) or loop.rule.pull is not None or loop.rule.staleness > 1:
        raise OptionError(
            f"{type(algorithm).__name__} has a delay, fragments, a pull, or staleness"
            f" {loop.rule.staleness}; with torchft it must have none of them, and staleness 0 or 1:"
            " all workers start a round at the anchor, and one average is under way at most; take"
            " CO2.published, LocalSGD, SlowMo or DiLoCo"
        )
    return loop


class _ManagedAverage(Average):
    """Means over those that are in the quorum, one rank each."""

    def __init__(self, manager: Manager, bucket: int) -> None:
        super().__init__(None, "fp32", DEADLINE, bucket)
        self._manager = manager

    def launch(self, vector: torch.Tensor, round_: int) -> PendingAverage:
        """Start averaging `vector` in place, for round `round_`."""
        flight, size = PendingAverage(round_, vector), max(1, self._manager.num_participants())
        for bucket in torch.split(vector, self._elements):
            flight.pieces.append((partial(_wait, self._manager.allreduce(bucket)), lambda: True))
            self.sent += 2 * (size - 1) * -(-len(bucket) // size) * bucket.element_size()
        return flight


def _wait(work: dist.Work, seconds: Seconds) -> None:
    """Wait. How long, and what becomes of an error, is the manager's to know."""
    del seconds
    work.wait()


class _QuorumLoop(RoundLoop):
    """Rounds between quorums. `give` and `take` are for who comes, or comes back."""

    def __init__(
        self, plain: RoundLoop, manager: Manager, algorithm: LocalUpdate, bucket: int
    ) -> None:
        """Take over what a plain loop has made: a second anchor might not fit into memory."""
        vars(self).update(vars(plain))
        self.average = _ManagedAverage(manager, bucket)
        self._manager, self._described = manager, algorithm.described
        trained = {id(param) for param in algorithm.model.parameters() if param.requires_grad}
        every = (*algorithm.model.parameters(), *algorithm.model.buffers())
        self._others = [tensor.detach() for tensor in every if id(tensor) not in trained]
        self._flight: PendingAverage | None = None
        self._closing = self._given = self._committed = self._agreed = False
        self._renew()

    def _renew(self) -> None:
        """Another buffer, for a displacement and a 1: a failed average may yet write to the old."""
        self._buffer = torch.zeros(self.flat.elements + 1, device=self.flat.device)
        self.free = [self._buffer[:-1]]

    def start(self) -> None:
        """Come to the others, and to what they average now, without a part in it."""
        self._join(counts=False)
        while self._manager.errored() or not self.rule.staleness:
            self._use_and_move()
            if self._committed:
                break
            self._join(counts=False)
        self.publish(self.state.anchor)

    def restart(self) -> str:
        """Before the first step: refuse weights that were loaded since, on this worker alone."""
        now = self.flat.empty()
        self.flat.read(now)
        self.flat.displace(self.state.anchor, now)
        if now.any():
            raise OptionError(
                "parameters were changed after they became those of all workers: load weights"
                " before fault_tolerant(), or give it `state`"
            )
        return ""

    def after_step(self, *, last: bool) -> None:
        """The end of a round, as above. An average that is not used does not move the anchor."""
        if not last:
            return
        used = self._use()
        vector = self._buffer[:-1]
        self.flat.read(vector)
        self.flat.displace(self.state.anchor, vector)
        if used:
            self.rule.move(self.state)
        self._closing = True
        self._join(counts=True)
        self._closing = False
        if not self.rule.staleness:
            self._use_and_move()
        self.publish(self.state.anchor)

    def use_all(self) -> None:
        """Use averages until one has no part of anybody: all have come here, and agree.

        Whether that one is used changes nothing, so that who knows may leave before others know.
        """
        self._use_and_move()
        agrees = False
        while not self._agreed:
            try:
                self._join(counts=False)
            except RankFailure:
                if not agrees:
                    raise
                break  # others knew, and have left
            agrees = not self._manager.errored()
            self.counters.round += self._use_and_move()
            if agrees and not self._committed and not self._manager.errored():
                break  # too few are left to vote
        self.publish(self.state.anchor)

    def _join(self, *, counts: bool) -> None:
        """Come to a quorum, and launch this worker's part: none, if it was given a state there."""
        self._given = False
        with self._asking("a quorum"):
            self._manager.start_quorum()
        self._buffer[-1] = 1.0
        if self._given or not counts:
            self._buffer.zero_()
        self._flight = self.average.launch(self._buffer, self.counters.round)

    def _use(self) -> bool:
        """Wait for what is under way, and give it to the rule if all is well; whether it was."""
        flight, self._flight = self._flight, None
        self._committed = self._agreed = False
        if flight is None:
            return False
        clock = Stopwatch(self.flat.device)
        flight.wait()
        clock.stop()
        self._clocks.append(clock)
        with self._asking("a vote on an average"):
            self._committed = self._manager.should_commit()
        if not self._committed:
            self._renew()
            return False
        share = float(self._buffer[-1])
        self._agreed = not share
        if share:
            flight.vector = self._buffer[:-1].div_(share)
            self.use_average(flight, self.state)
        return bool(share)

    def _use_and_move(self) -> bool:
        used = self._use()
        if used:
            self.rule.move(self.state)
        return used

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Make one line of what torchft raises."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            words, round_ = " ".join(str(error).split())[:200], self.counters.round
            raise RankFailure(
                f"{what} failed in round {round_}: torchft says {words!r}; is the lighthouse there,"
                " with as many workers as it and the Manager ask for, and quorum_timeout longer"
                " than a round?",
                op=what,
                round=round_,
            ) from error

    def give(self) -> dict[str, Any]:
        """What others need; torchft may read anchor and vectors until the next vote."""
        numbers = asdict(self.counters) | self.state.numbers
        numbers["round"] += self._closing  # the one to begin with
        others = [tensor.clone() for tensor in self._others]
        kept = {"anchor": self.state.anchor, **self.state.vectors}
        return {"described": self._described, "kept": kept, "others": others, "numbers": numbers}

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> None:
        """Stand where the others stand. Raises MismatchError if they train something else."""
        if state["described"] != self._described:
            theirs, ours = first_difference(state["described"], self._described)
            raise MismatchError(
                f"this worker has another model, optimizer or setting than the others: {ours!r}"
                f" instead of {theirs!r}"
            )
        self.state.anchor.copy_(state["kept"]["anchor"])
        for name, vector in self.state.vectors.items():
            vector.copy_(state["kept"][name])
        for tensor, other in zip(self._others, state["others"], strict=True):
            tensor.copy_(other)
        numbers = state["numbers"]
        self.state.numbers = {name: numbers[name] for name in self.state.numbers}
        self.counters.round = numbers["round"] - self._closing
        names = ("used", "penalty", "clipped", "clip_residual", "running_residual", "missing")
        for name in names:
            setattr(self.counters, name, numbers[name])
        self._given = True

    @contextmanager
    def consensus(self, *, alone: bool = False) -> Iterator[None]:
        """Within, the model holds the anchor: a quorum is only asked for at the end of a round."""
        del alone
        live = self.flat.empty()
        self.flat.read(live)
        self.publish(self.state.anchor)
        try:
            yield
        finally:
            self.publish(live)

    def load_state_dict(self, state: Any) -> None:
        """Refuse: the state of one worker is not that of the others."""
        del state
        raise OptionError("with torchft a saved state is given to fault_tolerant() as `state`")

    def under_way(self) -> Iterable[PendingAverage]:
        """The average under way, if any."""
        return [self._flight] if self._flight else []
