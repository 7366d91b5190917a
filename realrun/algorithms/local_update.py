"""The engine of the local-update family: counts steps, closes rounds, keeps state."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds, counted
from co2sim.common.validation import whole
from realrun.algorithms.averaging import Average, Transport
from realrun.algorithms.buffers import ExtraState, parts_of, warn_of_opaque
from realrun.algorithms.consistency import (
    RateWatch,
    describe,
    describe_others,
    describe_settings,
    refuse_different_inside,
    refuse_drift,
    refuse_wider,
)
from realrun.algorithms.delayed import Rule, Stats
from realrun.algorithms.delayed_loop import DelayedLoop
from realrun.algorithms.departures import DepartureLog
from realrun.algorithms.ending import Ending, no_mean
from realrun.algorithms.flat_parameters import Flat, holders_of
from realrun.algorithms.optimizers import (
    ATTACHED,
    CopyWatch,
    MasterWeights,
    Optimizers,
    count_nonfinite,
    held,
    masters_of,
    optimizers_of,
    refuse_missing,
    refuse_others,
    refuse_replaced,
    refuse_unlike,
    say_idle,
    trainable,
)
from realrun.algorithms.outer_loop import NobodyLeftError, OuterLoop, RoundLoop, mark_of
from realrun.algorithms.pacing import AutoTau, Tau, clock_of
from realrun.algorithms.process_groups import (
    Wire,
    Worker,
    WorkerGroups,
    Workers,
    refuse_options,
    wait_of,
    workers_of,
)
from realrun.algorithms.resuming import Resumable
from realrun.algorithms.step_counting import REMEDY, ModelWatch, StepHooks, inner_optimizers
from realrun.errors import flag, one_of, warn_user


def connected(
    workers: Workers,
    seconds: Seconds,
    notices: DepartureLog,
    pg_options: Any,
    *,
    owns: bool,
    offload: bool,
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


_START = (
    "start of training (load the same weights on all; a layer that changes its weights does so in"
    " the forward() of the model)"
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
        one_of("on_nonfinite", on_nonfinite, get_args(OnNonFinite))
        self._drops = on_nonfinite == "anchor"
        optimizers = optimizers_of(optimizer)
        hooked = [one for each in optimizers for one in (each, *inner_optimizers(each))]
        self._masters = masters_of(master_weights, hooked)
        parameters = trainable(model, optimizers, self._masters)
        self._notices.meet("the start of averaging", seconds, needs=_ALL_RANKS)
        workers = workers_of(worker)
        refuse_wider(model, optimizers, workers)
        notices, kind = self._notices, {"owns": worker in {"node", "site"}, "offload": offload}
        self._links = connected(workers, seconds, notices, transport.pg_options, **kind)
        self._trained = {id(one) for _, one in parameters}
        if self._masters:
            self._trained |= {id(one) for one in held(optimizers)}
        self._parameters = parameters
        self._model, self._optimizers = model, optimizers
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        holders = holders_of(tensors, self._links)
        flat = Flat.of(parameters, holders, self._masters, offload=offload)
        settings = {
            "dtype": transport.wire,
            "bucket_mib": transport.bucket_mib,
            "check_every": self._check_every,
            "on_nonfinite": on_nonfinite,
        }
        self._agree_on_all(flat, rule, tau, settings)
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
        self._extra = ExtraState(model, self._trained, self._links)
        warn_of_opaque(tensors)
        self._count_steps()

    def _agree_on_all(
        self, flat: Flat, rule: Rule, tau: Tau, settings: Mapping[str, object]
    ) -> None:
        """Compare model, optimizer and settings with the other ranks."""
        workers, parameters = self._links.workers, self._parameters
        layout, parts = describe(parameters, workers, rule, tau), "\n".join(flat.describe())
        self._layout = layout if len(workers.inner_ranks) == 1 else f"{layout}\n{parts}"
        own = describe_settings(self._optimizers, rule, settings)
        self._described = "\n".join([layout, *describe_others(self._model, parameters), *own])
        self._links.agree("model, optimizer or setting", self._described, across=parts)

    def _count_steps(self) -> None:
        """Hook into the optimizers' steps, and watch what else moves the model."""
        self._rates = RateWatch(self._optimizers, self._links)
        self._started, self._began = False, time.monotonic()
        self._start: tuple[tuple[int, Tensor], str] | None = None
        self._stepped: dict[Optimizer, int] = {}
        self._said_uneven, self._drops_so_far = False, 0
        model, parameters = self._model, self._parameters
        self._watch = ModelWatch(model, parameters, self._outer.tau, self._before_forward)
        self._hooks = StepHooks(self._optimizers, self._before_step, self._after_step, self._watch)
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
            self._failure = no_mean(counters.round)
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
            counters.seconds += self._outer.lap
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
        return AutoTau(self._links, self._outer.least, clock_of(self._outer.flat.device))

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
