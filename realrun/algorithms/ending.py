"""How an algorithm ends: what all ranks agree on, for a moment or for good."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from co2sim.common.errors import Co2simError, OptionError
from realrun.algorithms.buffers import ExtraState
from realrun.algorithms.consistency import (
    RateWatch,
)
from realrun.algorithms.departures import DepartureLog, of_network
from realrun.algorithms.optimizers import (
    ATTACHED,
)
from realrun.algorithms.outer_loop import NobodyLeftError, OuterLoop
from realrun.algorithms.process_groups import (
    WorkerGroups,
)
from realrun.algorithms.step_counting import ModelWatch, StepHooks
from realrun.errors import NonFiniteError, RankFailure, warn_user


def no_mean(now: int) -> NonFiniteError:
    """Where no worker is left that a mean could be of."""
    return NonFiniteError(
        f"parameters of all workers were NaN or infinite in round {now}, so that there is no mean;"
        " anchor and momentum are as before",
        round=now,
    )


class Ending:
    """The part of an algorithm that looks at what all agree on, for a moment or for good."""

    _model: nn.Module
    _optimizers: tuple[Optimizer, ...]
    _links: WorkerGroups
    _notices: DepartureLog
    _outer: OuterLoop
    _rates: RateWatch
    _hooks: StepHooks
    _watch: ModelWatch
    _extra: ExtraState
    _failure: Co2simError | None = None
    _closed = False
    _evaluating = False
    _joining = False
    _leaving = False
    """Whether this rank has used up its data, and only takes part."""
    _dropped = False
    """Whether what this worker learned in this round is left out, as it is not finite."""
    _idle = 0
    """Steps that were only counted, since this rank's data are used up."""
    _stepped: dict[Optimizer, int]
    """Steps of each optimizer since the last local step."""

    @property
    def closed(self) -> bool:
        """Whether it has ended, and averages nothing any more."""
        return self._closed

    @property
    def evaluating(self) -> bool:
        """Whether the model holds the consensus, for a moment."""
        return self._evaluating

    def cause_of(self, error: BaseException) -> RankFailure | None:
        """The rank to blame, where an error is of a collective of others that failed with it.

        None for other errors, and where no rank has told why it left.
        """
        if isinstance(error, Co2simError) or not of_network(error):
            return None
        return self._links.notices.cause("a collective of others", foreign=True)

    def _ready(self, what: str) -> None:
        """Raise OptionError where what all ranks do together would be wrong."""
        raise NotImplementedError

    def _refuse_lost(self, what: str, *, together: bool = False) -> None:
        """Raise OptionError where steps were taken that were not counted; `together`: on all."""
        raise NotImplementedError

    def _idle_step(self) -> None:
        """Count a step that this rank does not take, and do what comes after it."""
        raise NotImplementedError

    def _count_step(self) -> None:
        """Count a step, and do what comes after it."""
        raise NotImplementedError

    def _end_round(self) -> None:
        """Close the round, however many steps it has had."""
        raise NotImplementedError

    def _drop_nonfinite(self) -> None:
        """Stand at the anchor, if this worker's parameters are not finite and that is asked for."""
        raise NotImplementedError

    @contextmanager
    def consensus(self, *also: nn.Module, buffers: bool = False) -> Iterator[None]:
        """Within, the model holds what `finish` would end with now: to evaluate it, or to save it.

        Averages under way are waited for, and so is one of the progress that is in none of them.
        With `buffers` the model's buffers (of BatchNorm) are the mean over all ranks within, and
        so is all that the modules `also` hold, such as a moving average of the model. Afterwards
        all is as before. All ranks enter and leave together, after the same number of steps; an
        optimizer step inside raises OptionError, and so do another consensus, an end and a state.
        Within `join` ranks may have left that would have to average: only averages under way count
        there, and neither `also` nor `buffers` can be given.
        """
        self._ready("consensus()")
        self._refuse_lost("consensus()")
        self._extra.check(also)
        if (also or buffers) and self._joining:
            raise OptionError(
                "consensus() within join() averages no buffers and modules: other ranks may"
                " have left; evaluate without them, or after the block"
            )
        alone = self._closed or self._joining
        if not alone:
            self._links.meet("consensus()")
            self._drop_nonfinite()
        self._evaluating = True
        shown = nullcontext() if alone else self._extra.averaged(also, buffers=buffers)
        try:
            with self._outer.consensus(alone=alone), shown:
                yield
        finally:
            self._evaluating = False

    @torch.no_grad()
    def finish(self, *also: nn.Module, buffers: bool = True) -> None:
        """End the training: use all averages, and close. All ranks end with the same parameters.

        Steps since the last full round count: they are averaged, too, as a shorter round; so does
        a step that only some of several optimizers have taken. `buffers`, as of BatchNorm, and all
        that the modules `also` hold are averaged for good, see `realrun.algorithms.buffers`. All
        ranks call this. They should have taken as many steps. Where a worker is one rank, those
        with fewer take part in the averages that others still launch, as if they took steps that
        move nothing, and all are warned; where it is several, all raise RankFailure.
        Raises what a step raises, and OptionError, before anything changes, if the model has been
        trained by steps that were not counted.
        """
        if self._failure or self._closed:
            raise self._failure or OptionError("finish() comes before close(), once")
        if self._joining:
            raise OptionError("finish() within join(): the end of that block does it")
        self._finish("finish()", also, buffers=buffers)

    @torch.no_grad()
    def _finish(self, what: str, also: Sequence[nn.Module], *, buffers: bool) -> None:
        self._ready(what)
        self._extra.check(also)
        try:
            steps = self._settle(what)
            self._refuse_lost(what, together=True)
            self._advance(max(steps))
            if self._outer.counters.step and not self._outer.rule.late:
                self._end_round()
            self._drop_nonfinite()
            self._outer.settle()
            self._extra.average(also, buffers=buffers)
        except RankFailure as error:
            self._failure = RankFailure(
                f"{error}; the model of this rank can be used and saved: it holds what its own last"
                " step, or the last average, has left",
                ranks=error.ranks,
                op=error.op,
                round=error.round,
                cause=error.cause,
            )
            raise self._failure from error
        except NobodyLeftError as error:
            self._failure = no_mean(self._outer.counters.round)
            raise self._failure from error
        except Co2simError as error:
            self._failure = error
            raise
        self.close()
        if min(steps) < max(steps):
            warn_user(
                f"ranks took {min(steps)} to {max(steps)} steps: at {what} those with fewer took"
                " part in the last averages without further steps, so that all hold one model;"
                " where numbers of steps differ, train within join()"
            )

    def _settle(self, what: str) -> list[int]:
        """Wait for all to end; the steps of each. Where workers are single ranks they may differ.

        A step that only some of several optimizers have taken counts.
        """
        lap, begun = self._outer.lap, bool(self._stepped)
        own = self._links.steps + begun
        if not self._links.single:  # whose DDP or FSDP2 needs all ranks
            self._links.meet(what, begun=begun, lap=lap)
            return [own]
        patience = self._links.deadline + lap
        return self._links.notices.settle(what, patience, own, self._advance)

    def _advance(self, steps: int) -> None:
        """Continue to the `steps` that others took, without moving the model by own ones."""
        if self._stepped:
            self._stepped.clear()
            self._count_step()
        while self._links.steps < steps:
            self._idle += 1
            self._idle_step()

    @contextmanager
    def join(self, *also: nn.Module, buffers: bool = True) -> Iterator[None]:
        """For data that are used up at different times: train within, with any number of steps.

        A rank that leaves the block continues with what the others need, until all have left. An
        average is the mean over the ranks that took a step since the one before. In the end all
        ranks hold the anchor with all averages used, and this is closed. `also` and `buffers` are
        averaged then, as by `finish`, over the ranks that took any step, and integers are those of
        the first of these. A worker is one rank.
        Raises OptionError, and what a step raises.
        """
        if len(self._links.workers.inner_ranks) > 1:
            raise OptionError(
                f"a worker is ranks {self._links.workers.inner_ranks}, whose DDP or FSDP2 needs"
                " equal numbers of steps; join() is for worker='gpu'"
            )
        if self._failure or self._closed or self._outer.counters.step or self._idle:
            raise self._failure or OptionError("join() is entered once, between two rounds")
        self._ready("join()")
        self._extra.check(also)
        self._outer.average.weigh(
            lambda: self._idle < self._outer.tau and not self._dropped, self._links.counting
        )
        begin, self._joining = self._links.steps, True
        yield
        self._joining = False
        if self._links.counting is None:
            self.finish(*also, buffers=buffers)
            return
        counts, self._leaving = self._links.steps > begin, True
        with suppress(NobodyLeftError):
            while True:
                self._idle += 1
                self._idle_step()
        self._outer.drain()
        self._outer.start_at_anchor()
        self._extra.average(also, buffers=buffers, counts=counts)
        self.close()

    def close(self) -> None:
        """Wait for averages under way, without applying them, and let go of the optimizer.

        Waits until all ranks have closed or ended, a deadline at most. Raises RankFailure, with the
        numbers of steps, for one that took more or fewer rounds, and for one that raised an error.
        """
        self._close(self._failure)

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._hooks.remove()
        self._watch.remove()
        ATTACHED.difference_update(self._hooks.all)
        notices = self._links.notices
        notices.leave(error)
        try:
            if error:
                return
            self._outer.drain()
            patience = self._links.deadline + self._outer.lap
            if missing := notices.compare(self._outer.tau, patience):
                warn_user(
                    f"ranks {missing} have not closed within {patience:g} s; this rank needs"
                    " nothing more from them"
                )
        finally:
            notices.end()
        self._outer.average.close()
        self._rates.close()
        self._links.close()

    def __enter__(self) -> Self:
        """The hook is there from the start. Raises OptionError once this is closed."""
        if self._closed:
            name = type(self).__name__
            raise OptionError(f"this {name} is closed and averages nothing; make a new one")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish; after an exception only close, without waiting for others."""
        if error or self._failure or self._closed:
            cause = None if self._closed or error is None else self.cause_of(error)
            self._close(cause or error or self._failure)
            if cause:
                raise cause from error
            return
        try:
            self._finish("the end of the block", (), buffers=True)
        except BaseException as failure:
            self._close(failure)
            raise
