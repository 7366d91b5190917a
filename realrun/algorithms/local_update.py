"""The engine of the local-update family: counts steps, closes rounds, keeps state."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from inspect import signature
from itertools import zip_longest
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypedDict, Unpack, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds, counted
from co2sim.common.validation import whole
from realrun.algorithms.averaging import Average, Transport
from realrun.algorithms.buffers import ExtraState, parts_of, warn_of_opaque, write
from realrun.algorithms.consistency import (
    RateWatch,
    describe,
    describe_others,
    describe_settings,
    refuse_different_inside,
    refuse_drift,
    refuse_wider,
    say_mixed_models,
)
from realrun.algorithms.delayed import Rule, Stats
from realrun.algorithms.delayed_loop import DelayedLoop
from realrun.algorithms.departures import DepartureLog, of_network
from realrun.algorithms.flat_parameters import Flat
from realrun.algorithms.master_weights import (
    CopyWatch,
    MasterWeights,
    masters_of,
    refuse_missing,
    refuse_unlike,
)
from realrun.algorithms.optimizers import (
    ATTACHED,
    Optimizers,
    count_nonfinite,
    held,
    optimizers_of,
    refuse_others,
    refuse_replaced,
    say_idle,
    trainable,
)
from realrun.algorithms.outer_loop import NobodyLeftError, OuterLoop, RoundLoop, mark_of
from realrun.algorithms.pacing import AutoTau, Tau
from realrun.algorithms.process_groups import (
    Wire,
    Worker,
    WorkerGroups,
    Workers,
    refuse_options,
    wait_of,
    workers_of,
)
from realrun.algorithms.replicas import holders_of
from realrun.algorithms.step_counting import REMEDY, ModelWatch, StepHooks, inner_optimizers
from realrun.errors import NonFiniteError, RankFailure, flag, one_of, warn_user


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
            self._failure = _no_mean(self._outer.counters.round)
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


_START = (
    "start of training (load the same weights on all; a layer that changes its weights does so in"
    " the forward() of the model)"
)
_MODEL = "model"
"""Among the numbers of a state: what tells the model that was saved with it."""


class Resumable:
    """The part of an algorithm that is saved and loaded, rank by rank."""

    _links: WorkerGroups
    _outer: OuterLoop
    _layout: str
    _started: bool
    _choosing: AutoTau | None
    """While tau is still to be chosen."""
    _failure: Co2simError | None
    _watch: ModelWatch
    _extra: ExtraState
    _parameters: list[tuple[str, Tensor]]
    _saved_with: float | None = None
    """What tells the model with which a loaded state was saved, until the next step."""
    _replaced: list[tuple[Tensor, Tensor]]
    """What other ranks' first parameters and buffers took the place of, until the first step."""

    def stats(self) -> Stats:
        """What was done so far."""
        raise NotImplementedError

    def _ready(self, what: str) -> None:
        """Raise OptionError where what all ranks do together would be wrong."""
        raise NotImplementedError

    def _refuse_lost(self, what: str, *, together: bool = False) -> None:
        """Raise OptionError where steps were taken that were not counted."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, this rank's part under the key `rankR`. All ranks call this.

        Averages under way are waited for and saved as they arrived, so a resumed run does what the
        uninterrupted one does, bit for bit. Within a round workers hold different models: every
        rank must save its own model and optimizer, too (torch.distributed.checkpoint keeps one copy
        of what is not sharded: give those a key per rank). Every key is one rank's own, so that
        torch.distributed.checkpoint keeps all of them: `dcp.save({"co2": co2, ...})`. Tensors are
        the live ones, as in optimizers: copy what is not written at once.
        """
        self._ready("state_dict()")
        self._refuse_lost("state_dict()")
        say_mixed_models([one for _, one in self._parameters], type(self).__name__)
        own = self._outer.state_dict()
        own["numbers"][_MODEL] = self._watch.total()
        return {_key(): {"layout": self._layout, **own}}

    @torch.no_grad()
    def load_anchor(self, state: Mapping[str, Any]) -> None:
        """Continue with another number of workers than saved `state`. All ranks call this.

        `state` is what `state_dict` gave on any rank that held the same part of the parameters: any
        at all where a worker is one rank. Averages that were under way are used. What workers had
        learned since they launched their last ones is lost; so are the states of their optimizers,
        unless you load one of them everywhere. A mean of more or fewer workers is less or more
        noisy: think of the learning rate. Raises OptionError, and MismatchError where ranks load
        different anchors.
        """
        self._ready("load_anchor()")
        own = next(iter(state.values()), None)
        if not isinstance(own, Mapping) or "layout" not in own:
            raise OptionError(
                f"the saved state holds {', '.join(sorted(map(str, state))) or 'nothing'};"
                " load_anchor() takes what state_dict() of the algorithm gave"
            )
        self._refuse_other_layout(own["layout"], _one_worker)
        self._load(own)
        self._outer.counters.step = 0
        self._outer.use_all()
        self._agree_on("anchor", mark_of(self._outer.state.anchor))

    def _load(self, own: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(own)
        if self._outer.counters.tau:
            self._choosing = None

    def _refuse_other_layout(self, saved: str, form: Callable[[str], str] = str) -> None:
        pairs = zip_longest(form(saved).splitlines(), form(self._layout).splitlines())
        for line, here in pairs:
            if line != here:
                other = str(line).startswith("workers = ")
                raise OptionError(
                    f"the saved state is of another run: {line!r}, here {here!r}"
                    + (": load it on as many ranks, or take load_anchor()" if other else "")
                )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave on this rank. All ranks call this.

        The model and the optimizer are yours to load, before this is made or after. Algorithm, tau,
        staleness, parameters and workers must be those that were saved (OptionError), and all ranks
        must load what was saved after the same step (MismatchError); other settings may change.
        """
        self.take_state(state)
        self.agree_on_state()

    @torch.no_grad()
    def take_state(self, state: Mapping[str, Any]) -> None:
        """The first part of `load_state_dict`, on this rank alone.

        For loops that tell all ranks when one of them cannot load; `agree_on_state` comes after.
        """
        self._ready("load_state_dict()")
        if _key() not in state:
            raise OptionError(
                f"the saved state holds {', '.join(sorted(state)) or 'nothing'}, not {_key()}:"
                " load it on as many ranks as saved it, or take load_anchor()"
            )
        own = state[_key()]
        self._refuse_other_layout(own["layout"])
        self._load(own)
        self._saved_with = own["numbers"].get(_MODEL)
        if not self._watch.loaded():  # the model was, before this algorithm was made
            for tensor, before in self._replaced:
                write(tensor, before)
        self._replaced = []

    def agree_on_state(self) -> None:
        """The second part: all ranks have loaded what was saved after the same step."""
        self._agree_on("saved state", f"of step {self.stats().steps}")

    def _agree_on(self, what: str, text: str) -> None:
        """All ranks have loaded what belongs together; if not, no step will be taken."""
        self._links.steps, self._started = self.stats().steps, True
        self._watch.forget()
        self._extra.forget_frozen()
        try:
            self._links.agree(what, "", across=text)
        except Co2simError as error:
            self._failure = error
            raise


def _one_worker(layout: str) -> str:
    """What is saved in common by any number of workers."""
    return re.sub(r"^workers = \d+ of ", "workers of ", layout, flags=re.MULTILINE)


def _key() -> str:
    return f"rank{dist.get_rank() if dist.is_initialized() else 0}"


def connected(
    workers: Workers,
    seconds: Seconds,
    notices: DepartureLog,
    *,
    owns: bool,
    offload: bool,
    pg_options: Any,
) -> WorkerGroups:
    """The communicators; averages of what is on the host go over Gloo. Raises OptionError."""
    flag("offload", offload)
    over = "gloo" if offload else None
    refuse_options(pg_options, over)
    options = {"owns": owns, "average_over": over, "pg_options": pg_options}
    return WorkerGroups(workers, seconds, notices=notices, **options)


def loop_of(
    model: nn.Module, rule: Rule, flat: Flat, links: WorkerGroups, average: Average, tau: Tau
) -> OuterLoop:
    """The loop that uses averages as the rule says."""
    steps = None if tau == "auto" else tau
    if rule.late:
        return DelayedLoop(model, rule, rule.late, flat, links, average, steps)
    return RoundLoop(model, rule, flat, links, average, steps or 1)


def tau_of(tau: Tau) -> Tau:
    """The option `tau`. Raises OptionError."""
    if isinstance(tau, str) and tau != "auto":
        raise OptionError(f"tau is {tau!r}; it must be a whole number of local steps, or 'auto'")
    return tau if tau == "auto" else whole("tau", tau, 1)


OnNonFinite: TypeAlias = Literal["raise", "anchor"]
"""What becomes of a worker whose parameters are NaN or infinite where an average begins."""


class Common(TypedDict, total=False):
    """Options of every algorithm; LocalUpdate says what they mean."""

    worker: Worker
    dtype: Wire | torch.dtype | Transport
    check_every: int
    timeout: Seconds | timedelta | None
    on_nonfinite: OnNonFinite
    master_weights: MasterWeights | None
    offload: bool


def _no_mean(now: int) -> NonFiniteError:
    return NonFiniteError(
        f"parameters of all workers were NaN or infinite in round {now}, so that there is no mean;"
        " anchor and momentum are as before",
        round=now,
    )


def _with_notices(make: Callable[..., None]) -> Callable[..., None]:
    """Of a constructor: others hear of an error in it."""

    @wraps(make)
    def begin(self: "LocalUpdate", *args: Any, **options: Any) -> None:
        self._notices = DepartureLog.of_all_ranks()
        try:
            make(self, *args, **options)
        except BaseException as error:
            self._notices.leave(error)
            self._notices.end()
            raise

    return begin


_ALL_RANKS = (
    ": all ranks of torch.distributed must make the algorithm, in the same order; a rank with other"
    " work needs a torch.distributed without it"
)


class LocalUpdate(Resumable, Ending):
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
        own, shared = signature(cls.__init__), signature(LocalUpdate.__init__).parameters
        named = list(own.parameters.values())
        if "__init__" in vars(cls) and named[-1].annotation == Unpack[Common]:
            named[-1:] = [shared[name] for name in Common.__annotations__]
            cls.__init__.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]

    @_with_notices
    def __init__(  # noqa: PLR0913 - one argument per option
        self,
        model: nn.Module,
        optimizer: Optimizers,
        rule: Rule,
        *,
        tau: Tau,
        worker: Worker = "gpu",
        dtype: Wire | torch.dtype | Transport = "fp32",
        check_every: int = 0,
        timeout: Seconds | timedelta | None = None,
        on_nonfinite: OnNonFinite = "raise",
        master_weights: MasterWeights | None = None,
        offload: bool = False,
    ) -> None:
        """Check the options, compare them with the other ranks, and start from equal parameters."""
        transport = dtype if isinstance(dtype, Transport) else Transport(dtype)
        seconds = wait_of(timeout)
        tau = tau_of(tau)
        self._check_every = whole("check_every", check_every)
        optimizers = optimizers_of(optimizer)
        hooked = [one for each in optimizers for one in (each, *inner_optimizers(each))]
        self._masters = masters_of(master_weights, hooked)
        parameters = trainable(model, optimizers, self._masters)
        self._notices.meet("the start of averaging", seconds, needs=_ALL_RANKS)
        workers = workers_of(worker)
        refuse_wider(model, optimizers, workers)
        owns, notices = worker in {"node", "site"}, self._notices
        self._links = connected(
            workers,
            seconds,
            notices,
            owns=owns,
            offload=offload,
            pg_options=transport.pg_options,
        )
        self._trained = {id(one) for _, one in parameters}
        if self._masters:
            self._trained |= {id(one) for one in held(optimizers)}
        self._parameters = parameters
        self._model, self._optimizers = model, optimizers
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        holders = holders_of(tensors, self._links)
        flat = Flat.of(parameters, holders, self._masters, offload=offload)
        layout, parts = describe(parameters, workers, rule, tau), "\n".join(flat.describe())
        self._layout = layout if len(workers.inner_ranks) == 1 else f"{layout}\n{parts}"
        one_of("on_nonfinite", on_nonfinite, get_args(OnNonFinite))
        self._drops = on_nonfinite == "anchor"
        settings: dict[str, object] = {
            "dtype": transport.wire,
            "bucket_mib": transport.bucket_mib,
            "check_every": self._check_every,
        }
        settings["on_nonfinite"] = on_nonfinite
        own = describe_settings(optimizers, rule, settings)
        self._described = "\n".join([layout, *describe_others(model, parameters), *own])
        self._links.agree("model, optimizer or setting", self._described, across=parts)
        self._replaced = self._links.share(
            (part, holders[name].ranks)
            for name, one in tensors.items()
            for part in parts_of(one).writable
        )
        average = Average(self._links.average, transport.wire, seconds, transport.bucket, notices)
        if self._drops:
            average.weigh(lambda: not self._dropped, self._links.counting)
        self._outer = loop_of(model, rule, flat, self._links, average, tau)
        self._choosing = self._new_choice() if tau == "auto" else None
        self._rates = RateWatch(optimizers, self._links)
        self._extra = ExtraState(model, self._trained, self._links)
        warn_of_opaque(tensors)
        self._started, self._began = False, time.monotonic()
        self._start: tuple[tuple[int, Tensor], str] | None = None
        self._stepped: dict[Optimizer, int] = {}
        self._said_uneven, self._drops_so_far = False, 0
        self._watch = ModelWatch(model, parameters, self._outer.tau, self._before_forward)
        self._hooks = StepHooks(optimizers, self._before_step, self._after_step, self._watch)
        self._copies = CopyWatch(self._hooks.all, parameters)
        ATTACHED.update(self._hooks.all)

    @property
    def model(self) -> nn.Module:
        """Whose parameters are averaged."""
        return self._model

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those whose steps are counted, without wrappers."""
        return self._optimizers

    @property
    def described(self) -> str:
        """What all workers must have in common: parameters, optimizers and settings, in lines."""
        return self._described

    @property
    def loop(self) -> OuterLoop:
        """What it does at the end of a round, and keeps between rounds."""
        return self._outer

    def use_loop(self, loop: OuterLoop) -> None:
        """Take another loop, of an adapter, before the first step; the model is as it left it."""
        self._outer, self._start = loop, None
        self._watch.mark(counted=False)

    def _before_step(self) -> None:
        """Before step 0: weights may have been loaded since this was made."""
        if self._evaluating:
            raise OptionError(
                "a step of the optimizer within consensus() would be discarded: take it outside"
            )
        self._replaced = []
        if self._saved_with is not None:
            self._say_other_model(self._saved_with)
        if self._masters and self._links.steps == 1:
            refuse_unlike(self._masters, self._parameters)
        if self._started:
            return
        self._started = True
        self._extra.note_frozen()
        self._links.notices.need(self._links.steps + 1)  # of ranks that end without a step
        try:
            self._rates.begin()
            loaded = self._start_here()
            if self._masters:  # which every rank has made by itself
                loaded += f", masters with hash {mark_of(self._outer.state.anchor)[:16]}"
            self._links.agree(_START, "", across=loaded)
        except Co2simError as error:
            self._failure = error
            raise

    def _before_forward(self) -> bool:
        """Before a forward pass, which may change weights; gives whether it is of the training."""
        if not (self._started or self._evaluating or self._failure):
            self._start_here()
        return not self._evaluating

    def _start_here(self) -> str:
        """Begin from what the model holds, outside of forward passes; a text of what that is."""
        now = self._watch.place()
        if self._start:
            (version, values), text = self._start
            if version == now[0] and torch.allclose(values, now[1], equal_nan=True):
                return text
        text = self._outer.restart()
        self._start = now, text
        return text

    def _say_other_model(self, saved_with: float) -> None:
        """Say where training continues from another model than the state was saved with."""
        self._saved_with = None
        if not math.isclose(self._watch.total(), saved_with, rel_tol=1e-9, abs_tol=1e-12):
            warn_user(
                f"the model is not the one with which the state of {type(self).__name__} was saved:"
                " load this rank's own model and optimizer, too, or take load_anchor(), which needs"
                " neither"
            )

    def _after_step(self, optimizer: Optimizer) -> None:
        """A local step is over once every optimizer has taken one."""
        self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._count_step()
        elif self._stepped[optimizer] > self._outer.tau and not self._said_uneven:
            self._said_uneven = True
            say_idle(self._optimizers, self._stepped, optimizer)

    def _ready(self, what: str) -> None:
        if self._evaluating:
            raise OptionError(
                f"{what} within consensus(), where the model holds another point: leave it"
            )
        if not self._closed:
            refuse_others(self._optimizers, self._trained, type(self).__name__)
            refuse_replaced(self._model, self._parameters)

    def _refuse_lost(self, what: str, *, together: bool = False) -> None:
        lost = "" if self._closed or self._idle else self._watch.lost(at_the_end=together)
        ranks = self._links.which(here=bool(lost)) if together else []
        if lost or ranks:
            lost = lost or f"on rank {ranks[0]} the model has moved without a counted step"
            raise OptionError(f"{what}: {lost}: {REMEDY}")

    def _idle_step(self) -> None:
        self._before_step()
        self._count_step()

    def _count_step(self) -> None:
        if self._failure:
            raise self._failure
        counters = self._outer.counters
        counters.step += 1
        self._links.steps += 1
        choosing = self._choosing
        last = choosing.ends(self._outer.steps) if choosing else counters.step >= self._outer.tau
        try:
            self._links.notices.poll()
            first = self._links.steps == 1 or (last and not counters.round)
            if self._masters and first and not self._idle:
                refuse_missing(self._masters, self._parameters)
            look, pull = first and not self._masters, self._watch.pull
            if look or self._copies.found:
                self._copies.stepped(look=look)
            if pull.looks:
                pull.stepped()
            self._after_local_step(last=last)
            if pull.looks:
                pull.averaged(last=last)
            if self._copies.found:
                self._copies.averaged()
            self._watch.mark()
        except NobodyLeftError as error:
            if self._leaving:
                raise
            self._failure = _no_mean(counters.round)
            raise self._failure from error
        except Co2simError as error:
            self._failure = error
            raise

    def _end_round(self) -> None:
        self._after_local_step(last=True)

    def _drop_nonfinite(self) -> None:
        self._dropped = self._drops and not self._outer.is_finite()
        if not self._dropped:
            return
        self._outer.drop_progress()
        self._drops_so_far += 1
        bad = count_nonfinite(self._optimizers)
        warn_user(
            f"rank {self._links.rank}: parameters were NaN or infinite in round"
            f" {self._outer.counters.round}; this worker continues from the anchor, without its"
            f" steps since the last average, {counted(self._drops_so_far, 'time')} so far"
            + (
                f"; {counted(bad, 'tensor')} of the optimizer's state hold them still: clear it"
                " (optimizer.state.clear()), or it spoils every step"
                if bad
                else ""
            )
        )

    @torch.no_grad()
    def _after_local_step(self, *, last: bool) -> None:
        counters = self._outer.counters
        checks = self._check_every and (counters.round + 1) % self._check_every == 0
        if last:
            refuse_others(self._optimizers, self._trained, type(self).__name__)
            refuse_replaced(self._model, self._parameters)
            if checks or not counters.round:
                refuse_different_inside(self._outer, self._links)
        if last or self._outer.launches(last=last):
            self._drop_nonfinite()
        if not self._choosing:
            self._outer.after_step(last=last)
        elif last:
            self._outer.settle()
        if last:
            now = time.monotonic()
            self._outer.lap, self._began = now - self._began, now
            self._outer.close_round()
            self._choose_tau()
            if not self._outer.average.weighs:
                self._rates.end_round()
            if checks:
                self.check_drift()

    def _new_choice(self) -> AutoTau:
        """Raises OptionError where averages are waited for: no tau hides these."""
        if not isinstance(self._outer, DelayedLoop):
            raise OptionError(
                f"tau is 'auto', but {type(self).__name__} waits for its averages, which no tau"
                " hides: give a number"
            )
        return AutoTau(self._links, self._outer.least)

    def _choose_tau(self) -> None:
        if self._choosing is None:
            return
        assert isinstance(self._outer, DelayedLoop)
        tau = self._choosing.averaged()
        if tau:
            self._choosing = None
            self._outer.choose(tau)

    def check_drift(self) -> None:
        """Compare a hash of the anchor across workers. All ranks call this.

        Raises MismatchError that names the ranks whose anchor differs from that of most.
        """
        refuse_drift(self._outer, self._links)

    def any_rank(self, flag: bool) -> bool:  # noqa: FBT001 - it is all that this is about
        """Whether a flag is set on any rank, such as by a signal: all stop after the same step.

        All ranks call this after the same steps, and wait for each other. Raises RankFailure.
        """
        self._ready("any_rank()")
        return bool(self._links.largest([float(flag)])[0])

    def stats(self) -> Stats:
        """What was done so far; `steps` without those of others for which this rank had no data."""
        found = self._outer.stats()
        return replace(found, steps=found.steps - self._idle)
