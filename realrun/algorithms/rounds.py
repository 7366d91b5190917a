"""The engine of the local-update family: counts steps, closes rounds, keeps state."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from itertools import zip_longest
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds, counted
from co2sim.common.validation import whole
from realrun.algorithms import consistency
from realrun.algorithms import optimizers as optim
from realrun.algorithms.averaging import Average, Transport
from realrun.algorithms.buffers import ExtraState, parts_of, warn_of_opaque, write
from realrun.algorithms.delayed_loop import DelayedLoop
from realrun.algorithms.departures import DepartureLog
from realrun.algorithms.flat_parameters import Flat, holders_of
from realrun.algorithms.outer_loop import NobodyLeftError, OuterLoop, RoundLoop, Stats, mark_of
from realrun.algorithms.pacing import AutoTau, Tau, clock_of
from realrun.algorithms.process_groups import (
    Wire,
    Worker,
    WorkerGroups,
    my_rank,
    wait_of,
    workers_of,
)
from realrun.algorithms.rules import Rule
from realrun.algorithms.step_counting import REMEDY, ModelWatch, StepHooks, inner_optimizers
from realrun.errors import MismatchError, NonFiniteError, flag, one_of, warn_user


def tau_of(tau: Tau) -> Tau:
    """The option `tau`. Raises OptionError."""
    if isinstance(tau, str) and tau != "auto":
        raise OptionError(f"tau is {tau!r}; it must be a whole number of local steps, or 'auto'")
    return tau if tau == "auto" else whole("tau", tau, 1)


OnNonFinite: TypeAlias = Literal["raise", "anchor"]
"""What becomes of a worker whose parameters are NaN or infinite where an average begins."""

_START = (
    "start of training (load the same weights on all; a layer that changes its weights does so in"
    " the forward() of the model)"
)

_COUNT_OF_WORKERS = r"(?<=^workers )= \d+ "
"""In a layout: what may be another where only the anchor is loaded."""

_MODEL = "model"
"""Among the numbers of a state: what tells the model that was saved with it."""


def _with_notices(make: Callable[..., None]) -> Callable[..., None]:
    """Of a constructor: others hear of an error in it."""

    @wraps(make)
    def begin(self: "Rounds", *args: Any, **options: Any) -> None:
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


class Rounds:
    """A model and its optimizers, whose steps are counted, and close rounds of an outer loop.

    What is kept between rounds is saved and loaded rank by rank. See LocalUpdate for the options.
    """

    _notices: DepartureLog
    _failure: Co2simError | None = None
    model: nn.Module
    """Whose parameters are averaged."""
    optimizers: tuple[Optimizer, ...]
    """Those whose steps are counted, without wrappers."""
    described: str
    """What all workers must have in common: parameters, optimizers and settings, in lines."""
    closed = False
    """Whether it has ended, and averages nothing any more."""
    evaluating = False
    """Whether the model holds the consensus, for a moment."""
    _joining = False
    _leaving = False
    """Whether this rank has used up its data, and only takes part."""
    _dropped = False
    """Whether what this worker learned in this round is left out, as it is not finite."""
    _idle = 0
    """Steps that were only counted, since this rank's data are used up."""
    _saved_with: float | None = None
    """What tells the model with which a loaded state was saved, until the next step."""

    @_with_notices
    def __init__(  # noqa: PLR0913 - one argument per option
        self,
        model: nn.Module,
        optimizer: optim.Optimizers,
        rule: Rule,
        *,
        tau: Tau,
        worker: Worker = "gpu",
        dtype: Wire | torch.dtype | Transport = "fp32",
        check_every: int = 0,
        timeout: Seconds | timedelta | None = None,
        on_nonfinite: OnNonFinite = "raise",
        master_weights: optim.MasterWeights | None = None,
        offload: bool = False,
    ) -> None:
        """Check the options, compare them with the other ranks, and start from equal parameters."""
        transport = dtype if isinstance(dtype, Transport) else Transport(dtype)
        seconds = wait_of(timeout)
        tau = tau_of(tau)
        self._check_every = whole("check_every", check_every)
        one_of("on_nonfinite", on_nonfinite, get_args(OnNonFinite))
        self._drops = on_nonfinite == "anchor"
        optimizers = optim.optimizers_of(optimizer)
        hooked = [inner for each in optimizers for inner in (each, *inner_optimizers(each))]
        self._masters = optim.masters_of(master_weights, hooked)
        parameters = optim.trainable(model, optimizers, self._masters)
        self._notices.meet("the start of averaging", seconds, needs=_ALL_RANKS)
        workers = workers_of(worker)
        consistency.refuse_wider(model, optimizers, workers)
        flag("offload", offload)
        owns, over = worker in {"node", "site"}, "gloo" if offload else None  # of what is on hosts
        self._links = WorkerGroups(
            workers, seconds, self._notices, transport.pg_options, average_over=over, owns=owns
        )
        self._trained = {id(param) for _, param in parameters}
        if self._masters:
            self._trained |= {id(param) for param in optim.held(optimizers)}
        self._parameters = parameters
        self.model, self.optimizers = model, optimizers
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
            for name, tensor in tensors.items()
            for parts in [parts_of(tensor)]
            for part in (parts.values if parts.copied else parts.all)
        )
        self._outer = self._loop_of(rule, flat, transport, seconds, tau)
        self._choosing = self._new_choice() if tau == "auto" else None
        self._extra = ExtraState(model, self._trained, self._links)
        warn_of_opaque(tensors)
        self._count_steps()

    def _agree_on_all(
        self, flat: Flat, rule: Rule, tau: Tau, settings: Mapping[str, object]
    ) -> None:
        """Compare model, optimizer and settings with the other ranks."""
        workers, parameters = self._links.workers, self._parameters
        layout = consistency.describe(type(self).__name__, parameters, workers, rule, tau)
        parts = "\n".join(flat.describe())
        self._layout = layout if len(workers.inner_ranks) == 1 else f"{layout}\n{parts}"
        lines = consistency.describe_settings(self.optimizers, rule, settings)
        self.described = "\n".join(
            [layout, *consistency.describe_others(self.model, parameters), *lines]
        )
        self._links.agree("model, optimizer or setting", self.described, across=parts)

    def _loop_of(
        self, rule: Rule, flat: Flat, transport: Transport, seconds: Seconds, tau: Tau
    ) -> OuterLoop:
        """The loop that uses averages as the rule says."""
        group, notices = self._links.average, self._notices
        average = Average(group, transport.wire, seconds, transport.bucket, notices)
        if self._drops:
            average.weigh(lambda: not self._dropped, self._links.counting)
        loop, steps = DelayedLoop if rule.late else RoundLoop, None if tau == "auto" else tau
        return loop(self.model, rule, flat, self._links, average, steps)

    def _count_steps(self) -> None:
        """Hook into the optimizers' steps, and watch what else moves the model."""
        self._rates = consistency.RateWatch(self.optimizers, self._links)
        self._started, self._began = False, time.monotonic()
        self._start: tuple[tuple[int, Tensor], str] | None = None
        self._stepped: dict[Optimizer, int] = {}
        self._said_uneven, self._drops_so_far = False, 0
        model, parameters = self.model, self._parameters
        self._watch = ModelWatch(model, parameters, self._outer.tau, self._before_forward)
        self._hooks = StepHooks(self.optimizers, self._before_step, self._after_step, self._watch)
        self._copies = optim.CopyWatch(self._hooks.all, parameters)
        optim.ATTACHED.update(self._hooks.all)

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
        if self.evaluating:
            raise OptionError(
                "a step of the optimizer within consensus() would be discarded: take it outside"
            )
        self._replaced = []
        if self._saved_with is not None:
            self._say_other_model(self._saved_with)
        if self._masters and self._links.steps == 1:
            optim.refuse_unlike(self._masters, self._parameters)
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
        if not (self._started or self.evaluating or self._failure):
            self._start_here()
        return not self.evaluating

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
        if len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self._count_step()
        elif self._stepped[optimizer] > self._outer.tau and not self._said_uneven:
            self._said_uneven = True
            optim.say_idle(self.optimizers, self._stepped, optimizer)

    def _ready(self, what: str) -> None:
        """Raise OptionError where what all ranks do together would be wrong."""
        if self.evaluating:
            raise OptionError(
                f"{what} within consensus(), where the model holds another point: leave it"
            )
        if not self.closed:
            self._refuse_changed()

    def _refuse_changed(self) -> None:
        name = type(self).__name__
        optim.refuse_changed(self.model, self.optimizers, self._parameters, self._trained, name)

    def _refuse_lost(self, what: str, *, together: bool = False) -> None:
        """Raise OptionError where steps were taken that were not counted; `together`: on all."""
        lost = "" if self.closed or self._idle else self._watch.lost(at_the_end=together)
        ranks = self._links.which(here=bool(lost)) if together else []
        if lost or ranks:
            lost = lost or f"on rank {ranks[0]} the model has moved without a counted step"
            raise OptionError(f"{what}: {lost}: {REMEDY}")

    def _idle_step(self) -> None:
        """Count a step that this rank does not take, and do what comes after it."""
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
                optim.refuse_missing(self._masters, self._parameters)
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
        except NobodyLeftError:
            if not self._leaving:
                self._fail_without_mean()
            raise
        except Co2simError as error:
            self._failure = error
            raise

    def _fail_without_mean(self) -> NoReturn:
        """No worker is left that a mean could be of."""
        now = self._outer.counters.round
        self._failure = NonFiniteError(
            f"parameters of all workers were NaN or infinite in round {now}, so that there is no"
            " mean; anchor and momentum are as before",
            round=now,
        )
        raise self._failure

    def _drop_nonfinite(self) -> None:
        """Stand at the anchor, if this worker's parameters are not finite and that is asked for."""
        self._dropped = self._drops and not self._outer.is_finite()
        if not self._dropped:
            return
        self._outer.drop_progress()
        self._drops_so_far += 1
        bad = optim.count_nonfinite(self.optimizers)
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
            self._refuse_changed()
            if checks or not counters.round:
                consistency.refuse_different_inside(self._outer, self._links)
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
            if not self._outer.average.present:
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
        marks = self._links.of_peers(mark_of(self._outer.state.anchor))
        usual, peers = max(marks, key=marks.count), self._links.workers.peer_ranks
        drifted = [rank for rank, mark in zip(peers, marks, strict=True) if mark != usual]
        (count,) = self._links.total([len(drifted)])
        if count:
            who = f"ranks {drifted}" if drifted else "ranks of other shards"
            last = self._outer.counters.round - 1
            raise MismatchError(f"after round {last} the anchor of {who} is not that of the others")

    def any_rank(self, flag: bool) -> bool:  # noqa: FBT001 - it is all that this is about
        """Whether a flag is set on any rank, such as by a signal: all stop after the same step.

        All ranks call this after the same steps, and wait for each other. Raises RankFailure.
        """
        self._ready("any_rank()")
        return bool(self._links.largest([float(flag)])[0])

    def stats(self) -> Stats:
        """What was done so far; `steps` without those of others for which this rank had no data."""
        stats = self._outer.stats()
        return replace(stats, steps=stats.steps - self._idle)

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
        consistency.say_mixed_models([param for _, param in self._parameters], type(self).__name__)
        state = self._outer.state_dict()
        state["numbers"][_MODEL] = self._watch.total()
        return {_key(): {"layout": self._layout, **state}}

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
        rank_state = next(iter(state.values()), None)
        if not isinstance(rank_state, Mapping) or "layout" not in rank_state:
            raise OptionError(
                f"the saved state holds {', '.join(sorted(map(str, state))) or 'nothing'};"
                " load_anchor() takes what state_dict() of the algorithm gave"
            )
        self._refuse_other_layout(rank_state["layout"], _COUNT_OF_WORKERS)
        self._load(rank_state)
        self._outer.counters.step = 0
        self._outer.use_all()
        self._agree_on("anchor", mark_of(self._outer.state.anchor))

    def _load(self, state: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(state)
        if self._outer.counters.tau:
            self._choosing = None

    def _refuse_other_layout(self, saved: str, left_out: str = "$^") -> None:
        """Raise OptionError for another layout, leaving out what matches a pattern."""
        layouts = (re.sub(left_out, "", text, flags=re.MULTILINE) for text in (saved, self._layout))
        pairs = zip_longest(*map(str.splitlines, layouts))
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
        if not isinstance(state, Mapping):
            raise OptionError(f"the saved state is a {type(state).__name__}; it must be a dict")
        if _key() not in state:
            raise OptionError(
                f"the saved state holds {', '.join(sorted(state)) or 'nothing'}, not {_key()}:"
                " load it on as many ranks as saved it, or take load_anchor()"
            )
        rank_state = state[_key()]
        self._refuse_other_layout(rank_state["layout"])
        self._load(rank_state)
        self._saved_with = rank_state["numbers"].get(_MODEL)
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
        self._extra.frozen_marks = {}
        try:
            self._links.agree(what, "", across=text)
        except Co2simError as error:
            self._failure = error
            raise


def _key() -> str:
    return f"rank{my_rank()}"
