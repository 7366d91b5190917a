"""How an algorithm is evaluated on the way, and how it ends."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from co2sim.errors import Co2simError, OptionError
from realrun.algorithms.agreement import RateWatch
from realrun.algorithms.evaluation import average_now, averaged, others_of
from realrun.algorithms.links import Links
from realrun.algorithms.notices import of_network, raised
from realrun.algorithms.optimizers import ATTACHED
from realrun.algorithms.outer_loop import NobodyLeftError, OuterLoop
from realrun.errors import RankFailure


class Ending:
    """The part of an algorithm that looks at what all agree on, for a moment or for good."""

    _model: nn.Module
    _optimizers: tuple[Optimizer, ...]
    _links: Links
    _outer: OuterLoop
    _tau: int
    _rates: RateWatch
    _hooks: list[RemovableHandle]
    _failure: Co2simError | None = None
    _closed = False
    _evaluating = False
    _joining = False
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

    def _idle_step(self) -> None:
        """Count a step that this rank does not take, and do what comes after it."""
        raise NotImplementedError

    def _count_step(self) -> None:
        """Count a step, and do what comes after it."""
        raise NotImplementedError

    def _end_round(self) -> None:
        """Close the round, however many steps it has had."""
        raise NotImplementedError

    @contextmanager
    def consensus(self, *also: nn.Module, buffers: bool = False) -> Iterator[None]:
        """Within, the model holds the point that all workers agree on: to evaluate it.

        That is the anchor; where averages are used late without a restart (CO2 with `delay`), it is
        the anchor as it will be once those under way have been used, which are waited for.
        With `buffers` the model's buffers (of BatchNorm) are the mean over all ranks within, and
        so is all that the modules `also` hold, such as a moving average of the model.
        All ranks enter and leave together; an optimizer step inside raises OptionError, and so do
        another consensus, an end and a state. Within `join` ranks may have left that would have to
        average, so that neither `also` nor `buffers` can be given.
        """
        self._ready("consensus()")
        held = others_of(self._model, also, buffers=buffers)
        if also or buffers:
            if self._joining:
                raise OptionError(
                    "consensus() within join() averages no buffers and modules: other ranks may"
                    " have left; evaluate without them, or after the block"
                )
            if not self._closed:
                self._links.meet("consensus()")
        self._evaluating = True
        try:
            with self._outer.consensus(), averaged(held, self._links):
                yield
        finally:
            self._evaluating = False

    @torch.no_grad()
    def finish(self, *also: nn.Module, buffers: bool = False) -> None:
        """End the training: use all averages, and close. All ranks end with the same parameters.

        Steps since the last full round count: they are averaged, too, as a shorter round; so does
        a step that only some of several optimizers have taken. `also` and `buffers` are averaged
        for good, as within `consensus`. All ranks call this after the same number of steps: else
        all raise RankFailure with the numbers. Raises what a step raises.
        """
        if self._failure or self._closed:
            raise self._failure or OptionError("finish() comes before close(), once")
        if self._joining:
            raise OptionError("finish() within join(): the end of that block does it")
        self._ready("finish()")
        held = others_of(self._model, also, buffers=buffers)
        try:
            self._links.meet("finish()", begun=bool(self._stepped))
            if self._stepped:
                self._stepped.clear()
                self._count_step()
            counters = self._outer.counters
            if counters.step and not self._outer.rule.late:
                counters.missing += self._tau - counters.step
                self._end_round()
            self._outer.settle()
            average_now(held, self._links)
        except Co2simError as error:
            self._failure = error
            raise
        self.close()

    @contextmanager
    def join(self, *also: nn.Module, buffers: bool = False) -> Iterator[None]:
        """For data that are used up at different times: train within, with any number of steps.

        A rank that leaves the block goes on with what the others need, until all have left. An
        average is the mean over the ranks that took a step since the one before. In the end all
        ranks hold the anchor with all averages used, and this is closed. `also` and `buffers` are
        averaged then, as by `finish`, over the ranks that took any step. A worker is one rank.
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
        held = others_of(self._model, also, buffers=buffers)
        self._outer.average.weigh(lambda: self._idle < self._tau, self._links.counting)
        begin, self._joining = self._links.steps, True
        yield
        self._joining = False
        if self._links.counting is None:
            self.finish(*also, buffers=buffers)
            return
        counts = self._links.steps > begin
        with suppress(NobodyLeftError):
            while True:
                self._idle += 1
                self._idle_step()
        self._outer.drain()
        self._outer.start_at_anchor()
        average_now(held, self._links, counts=counts)
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
        for hook in self._hooks:
            hook.remove()
        ATTACHED.difference_update(self._optimizers)
        notices = self._links.notices
        if error:
            notices.leave(raised(error))
            return
        notices.leave()
        self._outer.drain()
        notices.compare(self._tau, self._links.deadline)
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
        """Close; after an exception without waiting for others."""
        self._close(error or self._failure)
