"""The engine of the local-update family: counts steps, closes rounds, keeps state."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from types import TracebackType
from typing import Any, Self, TypedDict
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from co2sim.errors import Co2simError, OptionError
from co2sim.units import Seconds
from realrun.algorithms.average import BUCKET_MIB, WIRES, Average, Flight, Wire
from realrun.algorithms.finite import finite_norm
from realrun.algorithms.flat import Flat
from realrun.algorithms.options import at_least, one_of, positive
from realrun.algorithms.progress import Progress, Stats
from realrun.algorithms.rule import Rule, State
from realrun.algorithms.start import (
    describe,
    describe_others,
    first_tensors,
    refuse_wider_ddp,
    trainable,
)
from realrun.algorithms.workers import Links, Worker, workers_of
from realrun.errors import MismatchError

_ATTACHED: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose steps an algorithm counts."""


class Common(TypedDict, total=False):
    """Options of every algorithm; LocalUpdate says what they mean."""

    worker: Worker
    dtype: Wire
    bucket_mib: float
    check_every: int
    deadline: Seconds


class LocalUpdate:
    """Close a round after every `tau` steps of an optimizer, by the rule of an algorithm.

    Use CO2, SlowMo, LocalSGD, OverlapLocalSGD or DiLoCo, as an object or a context manager; the
    training loop does not change. What they share:

    *Parameters* are those of `model` that require a gradient when this is made; the optimizer, one,
    must hold all of them, and no others; one that is unfrozen or added later is an OptionError.
    Frozen ones and buffers start alike everywhere and are never averaged. They are fp32, bf16 or
    fp16; anchor, momentum and displacement are fp32 vectors (see `flat`), and the model holds the
    anchor's rounding.

    *Options.* `worker`: "gpu" (every rank; pass the bare module, not DDP), "node" (the
    LOCAL_WORLD_SIZE ranks of a node, with DDP or FSDP2 among `Workers.per_node().inner`; each rank
    averages its share), or a Workers. `dtype` on the wire: "fp32", "bf16" or "int8" (see
    `average`). `bucket_mib`: MiB of fp32 in one collective. `check_every` rounds, ranks compare a
    hash of their anchors (0: never); where hardware differs, so may rounding. `deadline`: how many
    seconds one worker may be behind another before RankFailure.

    *Start.* Ranks compare names, shapes, types and memory order of parameters and buffers, the
    optimizer's class and all settings (MismatchError), then the first worker's parameters and
    buffers are sent to all. Load checkpoints after that.

    *Steps* of all workers must be equally many: one that has taken fewer makes the others wait
    until `deadline` and raise RankFailure, at the latest when they close. A GradScaler must
    therefore skip a step on all workers or on none: reduce its found_inf, or train in bf16.

    *Errors* leave `optimizer.step()`: NonFiniteError, before a NaN or infinity reaches parameters,
    anchor or momentum; RankFailure; MismatchError. After one, every further step raises it again.

    *Within a worker* of several ranks DDP or FSDP2 keeps replicas equal; without, the end of the
    first round, and every check, finds them different (MismatchError).

    *End.* Leaving the `with` block, or `close`, waits for averages under way, does not apply them,
    and removes the hook; there is no second entry. An exception that leaves the block waits for
    nobody. Steps after the last full round stay each worker's own: let all steps be a multiple of
    `tau`, or take `consensus`.

    On a GPU the host waits for the device once a round, to see that the average is finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        rule: Rule,
        *,
        tau: int,
        worker: Worker = "gpu",
        dtype: Wire = "fp32",
        bucket_mib: float = BUCKET_MIB,
        check_every: int = 0,
        deadline: Seconds = 60.0,
    ) -> None:
        at_least("tau", tau, 1)
        one_of("dtype", dtype, WIRES)
        positive("bucket_mib", bucket_mib)
        at_least("check_every", check_every, 0)
        positive("deadline", deadline)
        parameters = trainable(model, optimizer)
        if optimizer in _ATTACHED:
            raise OptionError(
                "the optimizer already closes rounds for another algorithm; close that one first"
            )
        workers = workers_of(worker)
        refuse_wider_ddp(model, workers)
        self._links = Links(workers, deadline, owns=worker == "node")
        self._trained = {id(one) for _, one in parameters}
        self._optimizer = optimizer
        self._rule, self._tau, self._check_every = rule, tau, check_every
        # FSDP2 may keep parameters gathered, after a forward without backward.
        self._gathered = [one for one in model.modules() if isinstance(one, FSDPModule)]
        self._flat = Flat.of(parameters, self._links.gather)
        self._layout = describe(parameters, workers, rule, tau)
        settings = {
            "optimizer": type(optimizer).__name__,
            **{one.name: getattr(rule, one.name) for one in fields(rule)},
            "dtype": dtype,
            "bucket_mib": bucket_mib,
            "check_every": check_every,
        }
        self._links.agree(
            "model, optimizer or setting",
            "\n".join(
                [
                    self._layout,
                    *describe_others(model, parameters),
                    *(f"{key} = {value}" for key, value in settings.items()),
                ]
            ),
            across="\n".join(self._flat.describe()),
        )
        self._links.share(*first_tensors(model))
        self._average = Average(self._links.average, dtype, deadline, int(bucket_mib * 2**20))
        self._begin()
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._closed = False
        _ATTACHED.add(optimizer)

    def _begin(self) -> None:
        """The state before round 0."""
        flat = self._flat
        rows = self._rule.vectors()
        self._state = State(
            flat.empty(),
            {
                name: torch.zeros(
                    (count, flat.elements) if count else flat.elements, device=flat.device
                )
                for name, count in rows.items()
            },
            self._rule.numbers(),
            flat.chunk,
        )
        flat.read(self._state.anchor)
        self._free = [flat.empty() for _ in range(max(1, self._rule.staleness))]
        self._flights: deque[Flight] = deque()
        (self._elements,) = self._links.total([flat.elements])
        self._progress = Progress()
        self._failure: Co2simError | None = None

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """The hook: one more local step."""
        del optimizer, args, kwargs
        self._progress.step += 1
        if self._progress.step >= self._tau:
            self._close_round()

    @torch.no_grad()
    def _close_round(self) -> None:
        if self._failure:
            raise self._failure
        try:
            self._check_trained()
            checks = self._check_every and (self._progress.round + 1) % self._check_every == 0
            if checks or not self._progress.round:
                self._check_inside()
            self._outer_step()
            self._progress.step = 0
            self._progress.round += 1
            if checks:
                self.check_drift()
        except Co2simError as error:
            self._failure = error
            raise

    def _check_trained(self) -> None:
        """Refuse parameters that are trained, but were not at the start: nobody averages them."""
        for group in self._optimizer.param_groups:
            for one in group["params"]:
                if one.requires_grad and id(one) not in self._trained:
                    raise OptionError(
                        f"the optimizer trains a parameter of shape {tuple(one.shape)} that was"
                        " frozen, or not there, when averaging began: close this, and make a new"
                        f" {type(self).__name__}"
                    )

    def _check_inside(self) -> None:
        """Refuse ranks of a worker that hold different replicas: each averages only its share."""
        parts = list(self._flat.replicas())
        if not parts:
            return
        mark = hashlib.blake2b()
        for part in parts:
            mark.update(part.cpu().view(torch.uint8).numpy().tobytes())
        if not self._links.same_inside(mark.hexdigest()):
            raise MismatchError(
                f"after round {self._progress.round} the ranks of a worker,"
                f" {self._links.workers.inner_ranks}, hold different parameters: wrap the model in"
                " DDP or FSDP2 over Workers.per_node().inner, or take worker='gpu'"
            )

    def _outer_step(self) -> None:
        """The order matters; with staleness 1, one buffer serves every average."""
        rule, state, flat = self._rule, self._state, self._flat
        if rule.staleness and len(self._flights) == rule.staleness:
            self._use_average()
        buffer = self._free.pop()
        flat.read(buffer)
        if rule.pull is not None:
            buffer.lerp_(state.anchor, rule.pull)
            flat.round(buffer)
            self._publish(buffer)
        flat.displace(state.anchor, buffer)
        self._flights.append(self._average.launch(buffer, self._progress.round))
        if not rule.staleness:
            self._use_average()
        if rule.pull is None:
            rule.move(state)
            self._publish(state.anchor)

    def _use_average(self) -> None:
        """Wait for the oldest average, see that it is finite, and give it to the rule."""
        flight = self._flights[0]
        self._progress.waited += flight.wait()
        total = self._links.total
        norm = finite_norm(flight, self._progress.round, self._flat, self._state, total)
        absorbed = self._rule.absorb(self._state, flight.vector, norm, total)
        self._progress.used += 1
        self._progress.penalty = absorbed.penalty
        if self._rule.clips:
            self._progress.clipped += total([absorbed.clipped])[0]
        self._free.append(self._flights.popleft().vector)

    def _publish(self, vector: Tensor) -> None:
        with self._links.together(
            "gathering of parameters inside the worker", round=self._progress.round
        ):
            self._flat.write(vector)
        for module in self._gathered:
            module.reshard()

    def check_drift(self) -> None:
        """Compare a hash of the anchor across workers. All ranks call this.

        Raises MismatchError that names the ranks whose anchor differs from that of most.
        """
        mark = hashlib.blake2b(self._state.anchor.cpu().numpy().tobytes()).hexdigest()
        drifted = self._links.drifted(mark)
        (count,) = self._links.total([len(drifted)])
        if count:
            who = f"ranks {drifted}" if drifted else "ranks of other shards"
            last = self._progress.round - 1
            raise MismatchError(f"after round {last} the anchor of {who} is not that of the others")

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Within, the model holds the anchor, which is the same on all workers: to evaluate it.

        The ranks of a worker enter and leave together; no optimizer step may be taken inside.
        """
        live = self._flat.empty()
        self._flat.read(live)
        self._publish(self._state.anchor)
        try:
            yield
        finally:
            self._publish(live)

    def stats(self) -> Stats:
        """What was done so far."""
        return self._progress.stats(self._tau, self._elements, self._average.sent)

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, this rank's part under the key `rankR`. All ranks call this.

        Averages under way are waited for and saved as they arrived, so a resumed run does what the
        uninterrupted one does, bit for bit. Within a round workers hold different models: every
        rank must save its own model and optimizer, too (torch.distributed.checkpoint keeps one copy
        of what is not sharded: give those a key per rank). Every key is one rank's own, so that
        torch.distributed.checkpoint keeps all of them: `dcp.save({"co2": co2, ...})`. Tensors are
        the live ones, as in optimizers: copy what is not written at once.
        """
        self._drain()
        averages = [*(flight.vector for flight in self._flights), *self._free]
        numbers = {
            **asdict(self._progress),
            **self._state.numbers,
            "in_flight": len(self._flights),
            "bytes_sent": self._average.sent,
        }
        own = {
            "layout": self._layout,
            "anchor": self._state.anchor,
            **self._state.vectors,
            **{f"average{i}": averages[i] for i in range(self._rule.staleness)},
            "numbers": numbers,
        }
        return {_key(): own}

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
        self._drain()
        self._state.anchor.copy_(own["anchor"])
        for name, vector in self._state.vectors.items():
            vector.copy_(own[name])
        numbers = own["numbers"]
        self._state.numbers = {name: numbers[name] for name in self._state.numbers}
        self._progress = Progress(**{one.name: numbers[one.name] for one in fields(Progress)})
        self._average.sent = numbers["bytes_sent"]
        buffers = [*(flight.vector for flight in self._flights), *self._free]
        for index in range(self._rule.staleness):
            buffers[index].copy_(own[f"average{index}"])
        flying = numbers["in_flight"]
        first = self._progress.round - flying
        self._flights = deque(Flight(first + i, buffers[i]) for i in range(flying))
        self._free = buffers[flying:]

    def _drain(self) -> None:
        for flight in self._flights:
            self._progress.waited += flight.wait()

    def close(self) -> None:
        """Wait for averages under way, without applying them, and let go of the optimizer."""
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        _ATTACHED.discard(self._optimizer)
        if wait and not self._failure:
            self._drain()
            self._average.close()
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
        self._close(wait=kind is None)


def _key() -> str:
    return f"rank{dist.get_rank() if dist.is_initialized() else 0}"
