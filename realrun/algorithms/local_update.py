"""The local-update family: what all algorithms share, while they train and at their end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from inspect import signature
from types import TracebackType
from typing import Self, TypedDict, Unpack

import torch
from torch import nn

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds
from realrun.algorithms.averaging import Transport
from realrun.algorithms.departures import of_network
from realrun.algorithms.optimizers import ATTACHED, MasterWeights
from realrun.algorithms.outer_loop import NobodyLeftError
from realrun.algorithms.process_groups import Wire, Worker
from realrun.algorithms.rounds import OnNonFinite, Rounds
from realrun.errors import RankFailure, warn_user


class Common(TypedDict, total=False):
    """Options of every algorithm; LocalUpdate says what they mean."""

    worker: Worker
    dtype: Wire | torch.dtype | Transport
    check_every: int
    timeout: Seconds | timedelta | None
    on_nonfinite: OnNonFinite
    master_weights: MasterWeights | None
    offload: bool


class LocalUpdate(Rounds):
    """Close a round after every `tau` optimizer steps, by the rule of an algorithm.

    Use CO2, SlowMo, LocalSGD, OverlapLocalSGD or DiLoCo, as an object or as a context manager. The
    training loop does not change. All of them share the following.

    *Parameters.* The algorithm averages the parameters of `model` that require a gradient when it
    is made. The optimizer must hold all of these and no others. A list of several optimizers may
    share them out: a local step is over when each has taken one. Unfreezing or adding a parameter
    later raises OptionError, at the latest when a round or the training ends. Frozen parameters and
    buffers are sent to all workers at the start, and averaged only at an end (see `buffers`).
    Parameters are fp32, bf16 or fp16. Anchor, momentum and displacement are fp32 vectors (see
    `flat_parameters`); the model holds the anchor, rounded to its own type.

    *Options.*
    - `worker`: "gpu": every rank is a worker; pass the bare module, not DDP. "node": the
      LOCAL_WORLD_SIZE ranks of a node are, with DDP or FSDP2 over `Workers.per_node().inner`, and
      each rank averages its share. "site": so are those of REALRUN_SITES sites. Or a Workers, as
      Workers.of_mesh gives for FSDP2, tensor parallelism, both and HSDP on parts of a DeviceMesh.
    - `dtype`: what averages travel as: "fp32", "bf16", "int8", "int4", or torch.bfloat16; or a
      Transport, which also says how large their collectives are, and has options of NCCL.
    - `check_every`: rounds between comparisons of a hash of the anchor over all workers; 0: none.
      Different hardware may round differently.
    - `timeout`: seconds, or a datetime.timedelta, that a worker waits for another before
      RankFailure; by default that of `init_process_group`. Who gives no sign of life then, or is
      late, is named.
    - `on_nonfinite`: "raise" NonFiniteError on all ranks before a NaN or an infinity reaches an
      average; or continue from the "anchor": a worker with such parameters loses its steps since
      its last average, does not count in the mean, and is warned. Its optimizer's state is left,
      and may hold NaN, too. On a GPU the host then waits for the steps before each launch.
    - `master_weights`: where the optimizer keeps the parameters once more in fp32, and each step
      begins from these: the key of its state ("master_param"), the name of its attribute, or a
      function of a parameter (`lambda p: p.main_param`). They are averaged, and the model follows.
    - `offload`: of a model on a GPU, anchor, momentum and averages are in pinned host memory, which
      are 12 to 16 bytes a parameter, and averages go over Gloo.

    *Start.* Ranks compare parameters and buffers (names, shapes, types, memory order), the class of
    the optimizer and all settings; a difference raises MismatchError. Then the first worker's
    parameters and buffers are sent to all. Weights may be loaded after that, the same on all ranks:
    training begins from what the model holds at the first step of the optimizer, where ranks
    compare it; a difference raises MismatchError. Later changes from outside are taken for
    progress of that worker.

    *Steps.* All workers must take the same number of rounds, but within `join`. Otherwise `finish`
    settles it with a warning, and `close` raises RankFailure with the numbers of steps. So a
    GradScaler must skip a step on all workers or on none: reduce its found_inf, or train in bf16.

    *Errors* come out of `optimizer.step()`: RankFailure, MismatchError, and NonFiniteError before a
    NaN or an infinity reaches parameters, anchor or momentum. Every later step raises it again.

    *Several ranks in a worker* average their local shards. Where several hold the same part, each
    averages a share of it and gathers the rest; DDP, FSDP2 or tensor parallelism must keep them
    equal between. Without, the end of the first round and every check raise MismatchError.

    The optimizer's own state, such as the moments of Adam, stays local to a worker: it is neither
    averaged nor sent.

    *End.* `finish`, and leaving the `with` block, ends alike on all ranks: with the same parameters
    and buffers. `close` waits for averages under way without applying them and lets go of the
    optimizer: steps after the last full round stay each worker's own; ranks that took other rounds
    are named. After an exception in the block nothing is waited for, and the others hear of it.
    Nothing can be entered again.

    On a GPU the host waits for an average, to see that it is finite, and not for the steps that it
    has issued since; with `clip` for these, too.
    """

    def __init_subclass__(cls) -> None:
        """Show in help() what `**common: Unpack[Common]` stands for."""
        super().__init_subclass__()
        mine, shared = signature(cls.__init__), signature(LocalUpdate.__init__).parameters
        named = list(mine.parameters.values())
        if "__init__" in vars(cls) and named[-1].annotation == Unpack[Common]:
            named[-1:] = [shared[name] for name in Common.__annotations__]
            cls.__init__.__signature__ = mine.replace(parameters=named)  # type: ignore[attr-defined]

    def cause_of(self, error: BaseException) -> RankFailure | None:
        """The rank to blame, where an error is of a collective of others that failed with it.

        None for other errors, and where no rank has told why it left.
        """
        if isinstance(error, Co2simError) or not of_network(error):
            return None
        return self._links.notices.cause("a collective of others", foreign=True)

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
        alone = self.closed or self._joining
        if not alone:
            self._links.meet("consensus()")
            self._drop_nonfinite()
        self.evaluating = True
        shown = nullcontext() if alone else self._extra.averaged(also, buffers=buffers)
        try:
            with self._outer.consensus(alone=alone), shown:
                yield
        finally:
            self.evaluating = False

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
        if self._failure or self.closed:
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
                self._after_local_step(last=True)
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
        except NobodyLeftError:
            self._fail_without_mean()
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
        steps_here = self._links.steps + begun
        if not self._links.single:  # whose DDP or FSDP2 needs all ranks
            self._links.meet(what, begun=begun, lap=lap)
            return [steps_here]
        patience = self._links.deadline + lap
        return self._links.notices.settle(what, patience, steps_here, self._advance)

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
        if self._failure or self.closed or self._outer.counters.step or self._idle:
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
        if self.closed:
            return
        self.closed = True
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
        if self.closed:
            name = type(self).__name__
            raise OptionError(f"this {name} is closed and averages nothing; make a new one")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish; after an exception only close, without waiting for others.

        Raises RankFailure where the exception is of a collective of others that failed with a rank.
        """
        if error or self._failure or self.closed:
            cause = None if self.closed or error is None else self.cause_of(error)
            self._close(cause or error or self._failure)
            if cause:
                raise cause from error
            return
        try:
            self._finish("the end of the block", (), buffers=True)
        except BaseException as failure:
            self._close(failure)
            raise
