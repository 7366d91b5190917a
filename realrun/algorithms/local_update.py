"""The engine of the local-update family: counts steps, closes rounds, keeps state."""

from dataclasses import replace
from datetime import timedelta
from inspect import signature
from typing import TypedDict, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from co2sim.errors import Co2simError, OptionError
from co2sim.ranges import above, whole
from co2sim.units import Seconds
from realrun.algorithms.agreement import RateWatch, refuse_different_inside, refuse_drift
from realrun.algorithms.average import BUCKET_MIB, Average
from realrun.algorithms.counters import Stats
from realrun.algorithms.ending import Ending
from realrun.algorithms.flat import Flat
from realrun.algorithms.late_loop import LateLoop
from realrun.algorithms.links import Links
from realrun.algorithms.optimizers import (
    ATTACHED,
    Optimizers,
    optimizers_of,
    refuse_others,
    say_idle,
    trainable,
)
from realrun.algorithms.options import Wire, wait_of, wire_of
from realrun.algorithms.outer_loop import OuterLoop, RoundLoop
from realrun.algorithms.rule import Rule
from realrun.algorithms.saving import Resumable
from realrun.algorithms.start import (
    describe,
    describe_others,
    describe_settings,
    first_tensors,
    refuse_wider,
)
from realrun.algorithms.workers import Worker, workers_of


class Common(TypedDict, total=False):
    """Options of every algorithm; LocalUpdate says what they mean."""

    worker: Worker
    dtype: Wire | torch.dtype
    bucket_mib: float
    check_every: int
    deadline: Seconds | None
    timeout: Seconds | timedelta | None


class LocalUpdate(Resumable, Ending):
    """Close a round after every `tau` optimizer steps, by the rule of an algorithm.

    Use CO2, SlowMo, LocalSGD, OverlapLocalSGD or DiLoCo, as an object or as a context manager. The
    training loop does not change. All of them share the following.

    *Parameters.* The algorithm averages the parameters of `model` that require a gradient when it
    is made. The optimizer must hold all of these and no others. A list of several optimizers may
    share them out: a local step is over when each has taken one. Unfreezing or adding a parameter
    later raises OptionError, at the latest when a round or the training ends. Frozen parameters and
    buffers are sent to all workers at the start and are never averaged. Parameters are fp32, bf16
    or fp16. Anchor, momentum and displacement are fp32 vectors (see `flat`); the model holds the
    anchor, rounded to its own type.

    *Options.*
    - `worker`: "gpu": every rank is a worker; pass the bare module, not DDP. "node": the
      LOCAL_WORLD_SIZE ranks of a node are, with DDP or FSDP2 over `Workers.per_node().inner`, and
      each rank averages its share. "site": so are those of REALRUN_SITES sites. Or a Workers.
    - `dtype`: what averages travel as: "fp32", "bf16", "int8", "int4", or torch.bfloat16.
    - `bucket_mib`: MiB of fp32 in one collective, above 0.
    - `check_every`: rounds between comparisons of a hash of the anchor over all workers; 0: none.
      Different hardware may round differently.
    - `deadline`: seconds that a worker waits for another before RankFailure; 60 by default.
      `timeout` is the same under torch's name, in seconds or as a datetime.timedelta. Give one.

    *Start.* Ranks compare parameters and buffers (names, shapes, types, memory order), the class of
    the optimizer and all settings; a difference raises MismatchError. Then the first worker's
    parameters and buffers are sent to all. Weights may be loaded after that, the same on all ranks:
    training begins from what the model holds at the first step of the optimizer, where ranks
    compare it; a difference raises MismatchError. Later changes from outside are taken for
    progress of that worker.

    *Steps.* All workers must take the same number of rounds, but within `join`. Otherwise all raise
    RankFailure with the numbers of steps, at the latest in `close`. A GradScaler must therefore
    skip a step on all workers or on none: reduce its found_inf, or train in bf16.

    *Errors* come out of `optimizer.step()`: RankFailure, MismatchError, and NonFiniteError before a
    NaN or an infinity reaches parameters, anchor or momentum. Every later step raises it again.

    *Several ranks in a worker* need DDP or FSDP2 to stay equal. Without, the end of the first round
    and every check raise MismatchError.

    *End.* `close`, or leaving the `with` block, waits for averages under way without applying them
    and removes the hook; ranks that took other rounds are named. `finish` ends alike on all ranks
    instead. After an exception in the block nothing is waited for, and the others are told.
    Nothing can be entered again. Steps after the last full round stay each worker's own: take a
    multiple of `tau` steps, or evaluate `consensus`.

    On a GPU the host waits for the device once a round, to check that the average is finite.
    """

    def __init_subclass__(cls) -> None:
        """Show in help() what `**common: Unpack[Common]` stands for."""
        super().__init_subclass__()
        own, shared = signature(cls.__init__), signature(LocalUpdate.__init__).parameters
        named = list(own.parameters.values())
        if "__init__" in vars(cls) and named[-1].annotation == Unpack[Common]:
            named[-1:] = [shared[name] for name in Common.__annotations__]
            cls.__init__.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]

    def __init__(  # noqa: PLR0913 - one argument per option
        self,
        model: nn.Module,
        optimizer: Optimizers,
        rule: Rule,
        *,
        tau: int,
        worker: Worker = "gpu",
        dtype: Wire | torch.dtype = "fp32",
        bucket_mib: float = BUCKET_MIB,
        check_every: int = 0,
        deadline: Seconds | None = None,
        timeout: Seconds | timedelta | None = None,
    ) -> None:
        """Check the options, compare them with the other ranks, and start from equal parameters."""
        wire, seconds = wire_of(dtype), wait_of(deadline, timeout)
        above("bucket_mib", bucket_mib, 0)
        self._tau, self._check_every = whole("tau", tau, 1), whole("check_every", check_every)
        optimizers = optimizers_of(optimizer)
        parameters = trainable(model, optimizers)
        workers = workers_of(worker)
        refuse_wider(model, optimizers, workers)
        self._links = Links(workers, seconds, owns=worker in {"node", "site"})
        self._trained = {id(one) for _, one in parameters}
        self._model, self._optimizers = model, optimizers
        flat = Flat.of(parameters, self._links.gather)
        self._layout = describe(parameters, workers, rule, self._tau)
        settings = {"dtype": wire, "bucket_mib": bucket_mib, "check_every": self._check_every}
        others = describe_others(model, parameters)
        own = describe_settings(optimizers, rule, settings)
        self._described = text = "\n".join([self._layout, *others, *own])
        self._links.agree("model, optimizer or setting", text, across="\n".join(flat.describe()))
        self._links.share(*first_tensors(model))
        size, notices = int(bucket_mib * 2**20), self._links.notices
        average = Average(self._links.average, wire, seconds, size, notices)
        self._outer: OuterLoop = (
            LateLoop(model, rule, rule.late, flat, self._links, average, self._tau)
            if rule.late
            else RoundLoop(model, rule, flat, self._links, average)
        )
        self._rates = RateWatch(optimizers, self._links)
        self._started = False
        self._stepped: dict[Optimizer, int] = {}
        self._said_uneven = False
        self._hooks = [
            hook
            for one in optimizers
            for hook in (
                one.register_step_pre_hook(self._before_step),
                one.register_step_post_hook(self._after_step),
            )
        ]
        ATTACHED.update(optimizers)

    @property
    def model(self) -> nn.Module:
        """Whose parameters are averaged."""
        return self._model

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those whose steps are counted, without wrappers."""
        return self._optimizers

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """The hook before step 0: weights may have been loaded since this was made.

        It stays: torch goes over the hooks of others meanwhile.
        """
        del optimizer, args, kwargs
        if self._evaluating:
            raise OptionError(
                "a step of the optimizer within consensus() would be discarded: take it outside"
            )
        if self._started:
            return
        self._started = True
        try:
            self._rates.begin()
            loaded = self._outer.restart()
            self._links.agree("start of training", "", across=loaded)
        except Co2simError as error:
            self._failure = error
            raise

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """The hook: a local step is over once every optimizer has taken one."""
        del args, kwargs
        self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._count_step()
        elif self._stepped[optimizer] > self._tau and not self._said_uneven:
            self._said_uneven = True
            say_idle(self._optimizers, self._stepped, optimizer)

    def _ready(self, what: str) -> None:
        if self._evaluating:
            raise OptionError(
                f"{what} within consensus(), where the model holds another point: leave it"
            )
        if not self._closed:
            refuse_others(self._optimizers, self._trained, type(self).__name__)

    def _idle_step(self) -> None:
        self._before_step(self._optimizers[0], (), {})
        self._count_step()

    def _count_step(self) -> None:
        if self._failure:
            raise self._failure
        counters = self._outer.counters
        counters.step += 1
        self._links.steps += 1
        last = counters.step >= self._tau
        try:
            self._links.notices.glance()
            self._after_local_step(last=last)
        except Co2simError as error:
            self._failure = error
            raise

    def _end_round(self) -> None:
        self._after_local_step(last=True)

    @torch.no_grad()
    def _after_local_step(self, *, last: bool) -> None:
        counters = self._outer.counters
        checks = self._check_every and (counters.round + 1) % self._check_every == 0
        if last:
            refuse_others(self._optimizers, self._trained, type(self).__name__)
            if checks or not counters.round:
                refuse_different_inside(self._outer, self._links)
        self._outer.after_step(last=last)
        if last:
            counters.step = 0
            counters.round += 1
            if not self._outer.average.weighs:
                self._rates.end_round()
            if checks:
                self.check_drift()

    def check_drift(self) -> None:
        """Compare a hash of the anchor across workers. All ranks call this.

        Raises MismatchError that names the ranks whose anchor differs from that of most.
        """
        refuse_drift(self._outer, self._links)

    def stats(self) -> Stats:
        """What was done so far; `steps` without those of others for which this rank had no data."""
        found = self._outer.stats(self._tau)
        return replace(found, steps=found.steps - self._idle)
