"""The engine of the local-update family: counts steps, closes rounds, keeps state."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from co2sim.errors import Co2simError, OptionError
from co2sim.ranges import above, whole
from co2sim.units import Seconds
from realrun.algorithms.agreement import (
    refuse_different_inside,
    refuse_drift,
    say_different_rates,
)
from realrun.algorithms.average import BUCKET_MIB, Average
from realrun.algorithms.counters import Stats
from realrun.algorithms.ending import ATTACHED, Ending
from realrun.algorithms.flat import Flat
from realrun.algorithms.late_loop import LateLoop
from realrun.algorithms.links import Links
from realrun.algorithms.options import Wire, wait_of, wire_of
from realrun.algorithms.outer_loop import OuterLoop, RoundLoop
from realrun.algorithms.regroup import Regrouping
from realrun.algorithms.rule import Rule
from realrun.algorithms.start import (
    describe,
    describe_others,
    describe_settings,
    first_tensors,
    refuse_others,
    refuse_wider_ddp,
    trainable,
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


class LocalUpdate(Regrouping, Ending):
    """Close a round after every `tau` optimizer steps, by the rule of an algorithm.

    Use CO2, SlowMo, LocalSGD, OverlapLocalSGD or DiLoCo, as an object or as a context manager. The
    training loop does not change. All of them share the following.

    *Parameters.* The algorithm averages the parameters of `model` that require a gradient when it
    is made. The optimizer must hold all of these and no others. Unfreezing or adding a parameter
    later raises OptionError. Frozen parameters and buffers are sent to all workers at the start and
    are never averaged. Parameters are fp32, bf16 or fp16. Anchor, momentum and displacement are
    fp32 vectors (see `flat`); the model holds the anchor, rounded to its own type.

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

    def __init__(  # noqa: PLR0913 - one argument per option
        self,
        model: nn.Module,
        optimizer: Optimizer,
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
        parameters = trainable(model, optimizer)
        if optimizer in ATTACHED:
            raise OptionError(
                "the optimizer already closes rounds for another algorithm; close that one first"
            )
        workers = workers_of(worker)
        refuse_wider_ddp(model, workers)
        self._links = Links(workers, seconds, owns=worker in {"node", "site"})
        self._trained = {id(one) for _, one in parameters}
        self._model, self._optimizer = model, optimizer
        flat = Flat.of(parameters, self._links.gather)
        self._layout = describe(parameters, workers, rule, self._tau)
        settings = {"dtype": wire, "bucket_mib": bucket_mib, "check_every": self._check_every}
        others = describe_others(model, parameters)
        own = describe_settings(optimizer, rule, settings)
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
        self._started = False
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        ATTACHED.add(optimizer)

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
            say_different_rates(self._optimizer, self._links)
            loaded = self._outer.restart()
            self._links.agree("start of training", "", across=loaded)
        except Co2simError as error:
            self._failure = error
            raise

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """The hook: one more local step."""
        del optimizer, args, kwargs
        self._count_step()

    def _idle_step(self) -> None:
        self._before_step(self._optimizer, (), {})
        self._count_step()

    def _count_step(self) -> None:
        if self._failure:
            raise self._failure
        counters = self._outer.counters
        counters.step += 1
        self._links.steps += 1
        last = counters.step >= self._tau
        try:
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
            refuse_others(self._optimizer, self._trained, type(self).__name__)
            if checks or not counters.round:
                refuse_different_inside(self._outer, self._links)
        self._outer.after_step(last=last)
        if last:
            counters.step = 0
            counters.round += 1
            if checks:
                self.check_drift()

    def check_drift(self) -> None:
        """Compare a hash of the anchor across workers. All ranks call this.

        Raises MismatchError that names the ranks whose anchor differs from that of most.
        """
        refuse_drift(self._outer, self._links)

    def stats(self) -> Stats:
        """What was done so far."""
        return self._outer.stats(self._tau)

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, this rank's part under the key `rankR`. All ranks call this.

        Averages under way are waited for and saved as they arrived, so a resumed run does what the
        uninterrupted one does, bit for bit. Within a round workers hold different models: every
        rank must save its own model and optimizer, too (torch.distributed.checkpoint keeps one copy
        of what is not sharded: give those a key per rank). Every key is one rank's own, so that
        torch.distributed.checkpoint keeps all of them: `dcp.save({"co2": co2, ...})`. Tensors are
        the live ones, as in optimizers: copy what is not written at once.
        """
        return {_key(): {"layout": self._layout, **self._outer.state_dict()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank. All ranks call this.

        The model and the optimizer are yours to load. Algorithm, tau, staleness, parameters and
        workers must be those that were saved (OptionError); other settings may change.
        """
        if _key() not in state:
            raise OptionError(
                f"the saved state holds {', '.join(sorted(state)) or 'nothing'}, not {_key()}:"
                " load it on as many ranks as saved it"
            )
        own = state[_key()]
        if own["layout"] != self._layout:
            pairs = zip(own["layout"].splitlines(), self._layout.splitlines(), strict=False)
            saved, here = next((one for one in pairs if one[0] != one[1]), ("more", "less"))
            raise OptionError(f"the saved state is of another run: {saved!r}, here {here!r}")
        self._outer.load_state_dict(own)
        self._links.steps, self._started = self.stats().steps, True


def _key() -> str:
    return f"rank{dist.get_rank() if dist.is_initialized() else 0}"
