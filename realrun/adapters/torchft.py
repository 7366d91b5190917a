"""Averages and membership by torchft: a worker that dies is dropped, and comes back.

A worker is a replica group of torchft, of one rank. Who is there, and who catches up from whom, is
decided by torchft alone: its lighthouse, its Manager, and its transport of states.

At the end of a round a worker

1. with staleness 1, waits for the average that it launched a round ago, and asks
   `manager.should_commit()`: only if that says so is the average used;
2. comes to `manager.start_quorum()`, where all wait for each other. Who is new, or has missed an
   average that others have used, is given their anchor, vectors of the rule and numbers here.
   Nothing is under way now, so that nothing else need be given;
3. launches `manager.allreduce` of what its steps moved, and of a 1 behind it. Who was given a state
   has no steps that count, and launches zeros: the mean is divided by the mean of the ones;
4. with staleness 0, waits for it now.

So all that are in a quorum hold the same anchor, bit for bit: they used the same averages, or got
the anchor from one who did.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import Manager

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds
from realrun.algorithms import LocalUpdate
from realrun.algorithms.averaging import BUCKET_MIB, Average, PendingAverage
from realrun.algorithms.optimizers import Optimizers
from realrun.algorithms.outer_loop import RoundLoop
from realrun.algorithms.process_groups import DEADLINE, Workers, first_difference
from realrun.errors import MismatchError, RankFailure

Algorithm = TypeVar("Algorithm", bound=LocalUpdate)

_OF_THE_MANAGER = {
    "worker": "a worker is a replica group of one rank",
    "dtype": "averages travel in fp32",
    "check_every": "who has missed an average is given the anchor of the others",
    "deadline": "give timeout and quorum_timeout to the Manager",
    "timeout": "give timeout and quorum_timeout to the Manager",
}
"""Options of algorithms that mean nothing here, and why."""


def fault_tolerant(
    manager: Manager,
    algorithm: type[Algorithm],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> Algorithm:
    """Make an algorithm whose workers may die and come back, such as CO2; `options` are its own.

    It is used as always, best as a context manager. It waits for a quorum when it is made: then the
    model is that of the others, and `stats().rounds` are theirs. So let the loop run until a number
    of rounds: `while co2.stats().rounds < 100`. All must leave after the same number. `manager` is
    a Manager with use_async_quorum=False, whose state functions are registered here; shut it down
    in the end. Whatever else a worker that comes back must know, such as the state of a schedule,
    is yours to register there, before. Its optimizer begins anew.

    When a worker dies, its steps since its last average are lost. An average that was under way may
    be lost for all: what every worker learned in that one round. Training goes on from the anchor.

    `state` is what `state_dict` gave before, on any worker: training goes on from its anchor. The
    average under way is not saved. Buffers are sent to who comes, but never averaged.

    Raises OptionError for options that torchft has, for a delay, fragments or a pull, a staleness
    above 1, and for several ranks in a replica group; MismatchError for another model or other
    settings than the others have; RankFailure, out of `optimizer.step()`, where there is no quorum.
    """
    _refuse(manager, options)
    made = algorithm(model, optimizer, worker=Workers(None), **options)
    try:
        if state is not None:
            made.load_anchor(state)
        _refuse_rule(made.loop)
        loop = _Loop(manager, made, options.get("bucket_mib", BUCKET_MIB))
        manager.register_state_dict_fn("realrun", loop.take, loop.give)
        loop.start()
        made.use_loop(loop)
    except BaseException:
        made.close()
        raise
    return made


def _refuse(manager: Manager, options: dict[str, Any]) -> None:
    """Raise OptionError for what the manager does, or cannot do."""
    for name, reason in _OF_THE_MANAGER.items():
        if name in options:
            raise OptionError(f"{name} is {options[name]!r}; with torchft leave it out: {reason}")
    if manager._use_async_quorum:  # noqa: SLF001 - as torchft's own DiLoCo asks
        raise OptionError(
            "use_async_quorum of the Manager is True; it must be False, as for torchft's DiLoCo:"
            " who comes back must not take a step before it has the anchor"
        )
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        raise OptionError(
            f"torch.distributed has {size} ranks; a replica group must be one rank: start one"
            " torchrun with --nproc-per-node 1 for each"
        )


def _refuse_rule(loop: object) -> None:
    """Raise OptionError for averages that are used otherwise than at the end of a round."""
    if not isinstance(loop, RoundLoop) or loop.rule.pull is not None:
        raise OptionError(
            "delay, fragments and pull cannot be combined with torchft: averages must be used at"
            " the end of a round, from which all start at the anchor"
        )
    if loop.rule.staleness > 1:
        raise OptionError(
            f"staleness is {loop.rule.staleness}; with torchft it must be 0 or 1: one average is"
            " under way between two quorums"
        )


class _ManagedAverage(Average):
    """Means over those that are in the quorum. An error is the manager's to know."""

    def __init__(self, manager: Manager, bucket: int) -> None:
        super().__init__(None, "fp32", DEADLINE, bucket)
        self._manager = manager

    def weigh(self, present: Callable[[], bool], group: dist.ProcessGroup | None) -> None:
        """Refuse `join`."""
        del present, group
        raise OptionError("join() is not for torchft: who has no more data ends, and is dropped")

    def launch(self, vector: Tensor, number: int) -> PendingAverage:
        """Start averaging `vector` in place, for round `number`."""
        flight, size = PendingAverage(number, vector), self._manager.num_participants()
        for bucket in torch.split(vector, self._elements):
            work = self._manager.allreduce(bucket)
            flight.waits.append(partial(_wait, work))
            self.sent += 2 * (size - 1) * -(-len(bucket) // max(1, size)) * 4
        return flight


def _wait(work: dist.Work, seconds: Seconds) -> None:
    """Wait; how long, and what becomes of an error, is the manager's."""
    del seconds
    work.wait()


class _Loop(RoundLoop):
    """Rounds between quorums. `take` and `give` are what a worker that comes back is given."""

    def __init__(self, manager: Manager, algorithm: LocalUpdate, bucket_mib: float) -> None:
        """Take over the state of the algorithm's own loop: a second one would not fit, perhaps."""
        vars(self).update(vars(algorithm.loop))
        self.average = _ManagedAverage(manager, int(bucket_mib * 2**20))
        self._manager, self._described = manager, algorithm.described
        trained = {id(one) for one in algorithm.model.parameters() if one.requires_grad}
        tensors = (*algorithm.model.parameters(), *algorithm.model.buffers())
        self._others = [one.detach() for one in tensors if id(one) not in trained]
        self._flight: PendingAverage | None = None
        self._ends_round = self._given = self._agreed = False
        self._renew()

    def _renew(self) -> None:
        """Make another buffer, for a displacement and a 1: a failed average may yet write to it."""
        self._buffer = torch.zeros(self.flat.elements + 1, device=self.flat.device)
        self.free = [self._buffer[:-1]]

    def start(self) -> None:
        """Come to the others: take their anchor, and what they average now, without a part.

        With staleness 1 that is used at the end of a round, as by the others.
        """
        self._join(counts=False)
        while self._manager.errored() or not self.rule.staleness:
            if self._use():
                self.rule.move(self.state)
            if self._committed:
                break
            self._join(counts=False)
        self.publish(self.state.anchor)

    def restart(self) -> str:
        """Refuse weights that were loaded since; those of all others would not be the same."""
        now = self.flat.empty()
        self.flat.read(now)
        self.flat.displace(self.state.anchor, now)
        if now.any():
            raise OptionError(
                "parameters were changed since this was made, where they became those of all"
                " workers: load weights before, or give `state`"
            )
        return ""

    def after_step(self, *, last: bool) -> None:
        """The end of a round; see above. An average that is not used does not move the anchor."""
        if not last:
            return
        used = self._use()
        vector = self._buffer[:-1]
        self.flat.read(vector)
        self.flat.displace(self.state.anchor, vector)
        if used:
            self.rule.move(self.state)
        self._ends_round = True
        self._join(counts=True)
        self._ends_round = False
        if not self.rule.staleness and self._use():
            self.rule.move(self.state)
        self.publish(self.state.anchor)

    def use_all(self) -> None:
        """Use what is under way, and then wait until all are known to hold the same anchor.

        They are once they all came to a quorum, whose average has no part of anybody: whether it is
        used changes nothing, so that who knows may leave before others do.
        """
        if self._use():
            self.rule.move(self.state)
        stands = False
        while not self._agreed:
            try:
                self._join(counts=False)
            except RankFailure:
                if not stands:
                    raise
                break  # others know, and have left
            stands = not self._manager.errored()
            if self._use():
                self.rule.move(self.state)
        self.publish(self.state.anchor)

    def _join(self, *, counts: bool) -> None:
        """Come to a quorum, and launch this worker's part; zeros, if it was given a state there."""
        self._given = False
        with self._asking("a quorum"):
            self._manager.start_quorum()
        self._buffer[-1] = 1.0
        if self._given or not counts:
            self._buffer.zero_()
        self._flight = self.average.launch(self._buffer, self.counters.round)

    def _use(self) -> bool:
        """Wait for what is under way, and give it to the rule if torchft says so; whether so."""
        flight, self._flight = self._flight, None
        self._committed = self._agreed = False
        if flight is None:
            return False
        self.counters.waited += flight.wait()
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

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn errors of torchft into one line."""
        try:
            yield
        except Co2simError:
            raise
        except (RuntimeError, TimeoutError) as error:
            words = " ".join(str(error).split())[:200]
            raise RankFailure(
                f"{what} failed in round {self.counters.round}: torchft says {words!r}; is the"
                " lighthouse there, with as many workers as it and the Manager ask for, and"
                " quorum_timeout longer than a round?",
                op=what,
                round=self.counters.round,
            ) from error

    def give(self) -> dict[str, Any]:
        """What others need. torchft may read anchor and vectors until the next vote."""
        numbers = asdict(self.counters) | self.state.numbers
        numbers["round"] += self._ends_round  # the one that comes next
        return {
            "described": self._described,
            "anchor": self.state.anchor,
            "vectors": self.state.vectors,
            "others": [one.clone() for one in self._others],
            "numbers": numbers,
        }

    @torch.no_grad()
    def take(self, given: dict[str, Any]) -> None:
        """Stand where others stand. Raises MismatchError if they train something else."""
        if given["described"] != self._described:
            theirs, here = first_difference(given["described"], self._described)
            raise MismatchError(
                f"this worker has another model, optimizer or setting than the others: {here!r}"
                f" instead of {theirs!r}"
            )
        self.state.anchor.copy_(given["anchor"])
        for name, vector in self.state.vectors.items():
            vector.copy_(given["vectors"][name])
        for one, other in zip(self._others, given["others"], strict=True):
            one.copy_(other)
        numbers = given["numbers"]
        self.state.numbers = {name: numbers[name] for name in self.state.numbers}
        self.counters.round = numbers["round"] - self._ends_round
        for name in ("used", "penalty", "clipped", "missing"):
            setattr(self.counters, name, numbers[name])
        self._given = True

    def load_state_dict(self, own: Any) -> None:
        """Refuse: a state is loaded before the others come."""
        del own
        raise OptionError("with torchft a saved state is given as `state` when this is made")

    def under_way(self) -> Iterable[PendingAverage]:
        """The average under way, if any."""
        return [self._flight] if self._flight else []
