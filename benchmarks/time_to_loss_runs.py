"""The runs of `time_to_loss.py`: ranks that train one contender after the other, and keep time."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import Attach, Attached, torch_post_local, torchft_diloco, torchft_local
from time_to_loss_plan import (
    ALONE,
    FREE,
    KEY,
    NEVER,
    REFERENCE,
    SENDING,
    TAU,
    Ask,
    Contender,
    Known,
    Plan,
    append,
    calibrated,
    curve,
    elements_of_a_step,
    enough,
    free_ask,
    next_run,
    predicted_step,
    reached,
    read,
    settled,
    step_of,
    target_of,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from co2sim.common.units import Seconds
from co2sim.schedule.schedule import WORLD
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2
from realrun.algorithms.outer_loop import Stats
from realrun.execute.world import World, join
from realrun.train import History, TrainSettings
from realrun.train.algorithm_registry import pairs
from realrun.train.loop import Build, Standing, train
from realrun.train.parallelize import WrappedModel, build


class Attachment(ExitStack):
    """A method of others in the place of an outer step: it tells nothing of itself."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: these runs are not resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def stats(self) -> Stats:
        """Nothing."""
        return Stats(
            rounds=0,
            steps=0,
            penalty=1.0,
            clipped=0.0,
            clip_residual=0.0,
            rounding_residual=0.0,
            waited=0.0,
            bytes_sent=0,
        )


@contextmanager
def always_sending(
    model: nn.Module, optimizer: Optimizer, world: World, *, elements: int
) -> Iterator[Attached]:
    """Local steps, and beside each an all-reduce of these elements, which ends before it."""
    group = world.group("calibration", WORLD)
    under_way: list[dist.Work] = []

    def send(*_: object) -> None:
        for before in under_way:
            before.wait()
        work = dist.all_reduce(torch.ones(elements), group=group, async_op=True)
        assert work is not None
        under_way[:] = [work]

    hook = optimizer.register_step_post_hook(send)
    yield Attached(model, optimizer)
    hook.remove()
    for work in under_way:
        work.wait()


@contextmanager
def torchft_small(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """Local steps of the model, and torchft's averages of a small tensor for each of its tensors.

    Gloo's ring cuts a tensor into two segments a rank, of one element at least.
    """
    elements = 2 * world.layout.world_size
    small = nn.ParameterList(torch.zeros(elements) for _ in model.parameters())
    with torchft_local(small, optimizer, world, tau=TAU):
        yield Attached(model, optimizer)


def attach_of(entry: Contender, sent: int) -> Attach | None:
    """How others than ours are attached; None for those. `sent`: elements that SENDING sends."""
    if entry.peer == "torchft DiLoCo":
        options = {name: float(value) for name, value in pairs(entry.outer).items()}
        return partial(
            torchft_diloco,
            tau=TAU,
            outer_lr=options["lr"],
            outer_momentum=options["momentum"],
            bucketed=True,
        )
    return {
        "": None,
        "alone": None,
        "torch post-local SGD": partial(torch_post_local, tau=TAU),
        "torchft LocalSGD": partial(torchft_local, tau=TAU),
        "torchft small": torchft_small,
        "DDP alone": partial(torch_post_local, tau=NEVER),
        "sending": partial(always_sending, elements=sent),
    }[entry.peer]


def build_with(
    attach: Attach, settings: TrainSettings, model: nn.Module, world: World
) -> WrappedModel:
    """The model and the optimizer of the settings with a method of others."""
    ours = build(settings, model, world)
    assert ours.outer
    with ours.outer:
        pass  # it lets go of the optimizer
    stack = Attachment()
    theirs = stack.enter_context(attach(ours.bare, ours.optimizer, world))
    return WrappedModel(
        theirs.model,
        ours.bare,
        theirs.optimizer,
        ours.stepper,
        stack,
        world.group("training", WORLD),
        world.layout.world_size,
    )


def build_alone(settings: TrainSettings, model: nn.Module, world: World) -> WrappedModel:
    """Our own method with workers that do not average: all arithmetic, and nothing is sent."""
    own, _ = dist.new_subgroups(1)
    return build(settings, model, replace(world, _groups={("training", WORLD): own}))


@dataclass
class Pace:
    """Makes a local step take `target` at least: a device whose speed is known.

    The forward and backward pass are real, and the rest of the time is waited for, before anything
    is sent: in DDP before the last bucket, else before the optimizer's step. `late` of `steps` took
    longer than the target by themselves.
    """

    target: Seconds
    steps: int = 0
    late: int = 0
    _began: Seconds = 0.0

    def attach(self, method: WrappedModel) -> WrappedModel:
        """Pace the steps of a method from now on."""
        method.bare.register_forward_pre_hook(self._begin)
        model, optimizer = method.model, method.optimizer
        if isinstance(optimizer, PostLocalSGDOptimizer):
            optimizer.optim.register_step_pre_hook(self._wait)
        elif isinstance(model, DistributedDataParallel):
            model.register_comm_hook(model.process_group, self._reduce)
        else:
            optimizer.register_step_pre_hook(self._wait)
        return method

    def _begin(self, *_: object) -> None:
        self._began = time.monotonic()

    def _wait(self, *_: object) -> None:
        left = self._began + self.target - time.monotonic()
        self.steps += 1
        self.late += left < 0
        time.sleep(max(0.0, left))

    def _reduce(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._wait()
        return allreduce_hook(group, bucket)


def paced(
    pace: Pace, how: Build, settings: TrainSettings, model: nn.Module, world: World
) -> WrappedModel:
    """The method that `how` builds, at a pace."""
    return pace.attach(how(settings, model, world))


_SPARE = 1.1
"""Where training chooses a delay in the lab, this times the steps of the run without may do."""


def run_ranks(plan: Plan, out: Path, results: Path, where: str) -> None:
    """Be one of the ranks: run what is missing there, one after the other."""
    world = join("gloo", 120.0)
    shared: list[Any] = [read(out)]
    dist.broadcast_object_list(shared)
    known: Known = shared[0]
    while (ask := next_run(plan, known, results, where)) is not None:
        row: dict[str, Any] = dict(zip(KEY, ask.key(plan), strict=True))
        row |= _said_before(plan, known, results, ask)
        if world.rank == 0 and "words" in row:
            print(row["words"], flush=True)
        try:
            row |= one_run(plan, known, results, ask, world, int(row.get("stop", 0)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the table says so
            if world.rank == 0:
                words = " ".join(str(error).split())[:150]
                append(out, {**row, "error": f"{type(error).__name__}: {words}"})
            print(f"rank {world.rank}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)  # ranks may not agree on where they are: the launcher starts them again
        shared = [row]
        dist.broadcast_object_list(shared)
        known[ask.key(plan)] = shared[0]
        if world.rank == 0:
            append(out, shared[0])
            print(f"{where}, seed {ask.seed}: {ask.entry.name}: {_words(row)}", flush=True)
    world.leave()


def _said_before(plan: Plan, known: Known, results: Path, ask: Ask) -> dict[str, Any]:
    """What is predicted of a run in the lab: it is there before the run begins."""
    if ask.where == FREE or ask.entry.calibrates:
        return {}
    free, found = free_ask(plan, ask), calibrated(plan, known, ask)
    step = predicted_step(plan.place(ask.where), settled(plan, ask.where, ask.entry), found)
    told: dict[str, Any] = {"local_step_s": found.local_step, "interference": found.interference}
    told |= {"efficiency": found.efficiency, "predicted_step_s": step, "stop": 0}
    point = reached(curve(known[free.key(plan)]), target_of(plan, known, results))
    if point is None:
        return told
    most = point[0] * (_SPARE if ask.entry.measures_delay else 1)
    stop = min((int(most) // plan.every + 2) * plan.every, plan.steps)
    words = f"predicted: {ask.entry.name} in {point[0]:.0f} steps, {point[0] * step:.2f} s"
    return {**told, "stop": stop, "words": words}


def _words(row: dict[str, Any]) -> str:
    """How a run went."""
    speed = f"{row['step_s'] * 1e3:.1f} ms a step"
    return f"{speed}, loss {seen[-1][2]:.4f}" if (seen := curve(row)) else speed


def settings_of(plan: Plan, ask: Ask, stop: int) -> TrainSettings:
    """What a run trains."""
    strategy = ask.entry.strategy
    if ask.delay:  # co2sim's stands for what would be measured, in as many fragments
        chosen = parse(strategy)
        assert isinstance(chosen, CO2)
        strategy = strategy.replace("delay=auto", f"delay={ask.delay},fragments={chosen.parts()}")
    return TrainSettings(
        strategy=strategy,
        size=plan.size,
        steps=plan.steps,
        stop=min(3 * plan.every, plan.steps) if ask.entry.calibrates else stop,
        batch=plan.batch,
        warmup=plan.steps // 20,
        lr=ask.entry.lr,
        outer=pairs(ask.entry.outer) if not ask.entry.peer else {},
        seed=ask.seed,
        log_every=plan.every,
        eval_every=plan.every,
        evaluate="during" if ask.where == FREE else "after",
    )


def one_run(
    plan: Plan, known: Known, results: Path, ask: Ask, world: World, stop: int
) -> dict[str, Any]:
    """Train once; what the row of the run says."""
    sent = 0
    if ask.entry == SENDING:
        alone = step_of(plan, known, ALONE, ask.where, ask.seed)
        sent = elements_of_a_step(plan.place(ask.where), alone)
    how: Build = build_alone if ask.entry.peer == "alone" else build
    if attach := attach_of(ask.entry, sent):
        how = partial(build_with, attach)
    settings = settings_of(plan, ask, stop)
    pace = Pace(plan.pace)
    if ask.where != FREE:
        found = figures(train(settings, world, build=partial(paced, pace, how)))
        found["waited"] = _least(found["waited"] or 0.0, world)
        return {**found, "late_steps": pace.late / max(1, pace.steps)}
    watched = ask.entry.name != REFERENCE and not ask.entry.calibrates
    until = Until(enough(plan, known, results) if watched else None)
    return figures(train(settings, world, build=how, progress=until.note, stop=until.low))


def _least(waited: Seconds, world: World) -> Seconds:
    """Of what the ranks waited for averages, the least: others waited for slower ranks, too."""
    all_waited: list[Any] = [None] * world.layout.world_size
    dist.all_gather_object(all_waited, waited)
    return float(min(all_waited))


class Until:
    """Ends a training soon after its validation loss has come as low; None: never."""

    def __init__(self, aim: float | None) -> None:
        self._aim, self._seen = -inf if aim is None else aim, inf

    def note(self, at: Standing) -> None:
        """After a step."""
        self._seen = inf if at.validation_loss is None else at.validation_loss

    def low(self) -> bool:
        """Whether to end."""
        return self._seen <= self._aim


def figures(history: History) -> dict[str, Any]:
    """Of a run: seconds of a step after the first rows, waits, and the losses."""
    rows = history.rows
    first, last = rows[0], rows[-1]
    seen = [r for r in rows if r.validation_loss is not None]
    return {
        "step_s": (last.seconds - first.seconds) / (last.step - first.step),
        "waited": last.waited,
        "rounds": last.rounds,
        "used_delay": last.delay,
        "curve": json.dumps([[r.step, r.seconds, r.validation_loss] for r in seen]),
        "error": "",
    }
