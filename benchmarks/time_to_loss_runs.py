"""The runs of `time_to_loss.py`: ranks that train one contender after the other, and keep time."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from peers_methods import Attach, torch_post_local, torchft_diloco, torchft_local
from time_to_loss_plan import (
    FREE,
    KEY,
    NOTHING_SENT,
    Ask,
    Contender,
    Known,
    Plan,
    append,
    curve,
    delay_at,
    free_ask,
    local_step,
    next_run,
    reached,
    read,
    target_of,
)
from time_to_loss_predict import predicted_step
from torch import nn

from co2sim.schedule import WORLD
from realrun.algorithms import late_loop
from realrun.algorithms.auto_delay import AutoDelay
from realrun.algorithms.counters import Stats
from realrun.execute.world import World, join
from realrun.train import History, TrainSettings
from realrun.train.loop import Build, train
from realrun.train.methods import Method, build
from realrun.train.outer import pairs

_SPARE = 1.1
"""So many times the steps of the run without a lab may be needed in the lab."""


@dataclass
class Attachment:
    """A method of torch or torchft in the place of an outer step: it tells nothing of itself."""

    stack: ExitStack

    def state_dict(self) -> dict[str, Any]:
        """Nothing: these runs are not resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def stats(self) -> Stats:
        """Nothing."""
        return Stats(rounds=0, steps=0, penalty=1.0, clipped=0.0, waited=0.0, bytes_sent=0)

    def __enter__(self) -> None:
        """It is attached already."""

    def __exit__(self, *error: object) -> None:
        """Detach."""
        self.stack.__exit__(*error)


def attach_of(entry: Contender) -> Attach | None:
    """How the peers attach theirs; None for our own."""
    if entry.peer == "torchft DiLoCo":
        options = {name: float(value) for name, value in pairs(entry.outer).items()}
        return partial(torchft_diloco, outer_lr=options["lr"], outer_momentum=options["momentum"])
    return {
        "": None,
        "torch post-local SGD": torch_post_local,
        "torchft LocalSGD": torchft_local,
    }[entry.peer]


def build_with(attach: Attach, settings: TrainSettings, model: nn.Module, world: World) -> Method:
    """The model and the optimizer of the settings with a method of others."""
    ours = build(settings, model, world)
    assert ours.outer
    with ours.outer:
        pass  # it lets go of the optimizer
    stack = ExitStack()
    theirs = stack.enter_context(attach(ours.bare, ours.optimizer, world))
    return Method(
        theirs.model,
        ours.bare,
        theirs.optimizer,
        ours.stepper,
        Attachment(stack),
        world.group("training", WORLD),
        world.layout.world_size,
    )


class SaidDelay(AutoDelay):
    """Measures nothing: averages take as many local steps as it is told."""

    def __init__(self, said: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._said = said

    def look(self, *arguments: object) -> None:
        """The average was seen to arrive when it was said to."""
        del arguments
        self._took = self._said


@contextmanager
def said(delay: int) -> Iterator[None]:
    """Within, CO2 with delay="auto" takes this for what it measures; 0: it measures."""
    if not delay:
        yield
        return
    with mock.patch.object(late_loop, "AutoDelay", partial(SaidDelay, delay)):
        yield


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
            row |= one_run(plan, ask, world, int(row.get("stop", 0)))
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
            last = curve(row)[-1]
            print(
                f"{where}, seed {ask.seed}: {ask.entry.name}: {last[2]:.4f} after {last[0]} steps,"
                f" {row['step_s'] * 1e3:.1f} ms each",
                flush=True,
            )
    world.leave()


def _said_before(plan: Plan, known: Known, results: Path, ask: Ask) -> dict[str, Any]:
    """What is predicted of a run in the lab: it is there before the run begins."""
    if ask.where == FREE or ask.entry == NOTHING_SENT:
        return {}
    delay, alone = delay_at(plan, known, ask.where), local_step(plan, known, ask.where, ask.seed)
    strategy = ask.entry.strategy.replace("delay=auto", f"delay={delay}")
    step = predicted_step(plan.place(ask.where), strategy, alone)
    told: dict[str, Any] = {"local_step_s": alone, "predicted_step_s": step, "stop": 0}
    before = known[free_ask(ask.entry, ask.seed, delay).key(plan)]
    point = reached(curve(before), target_of(plan, known, results))
    if point is None:
        return told
    stop = min((int(point[0] * _SPARE) // plan.every + 2) * plan.every, plan.steps)
    words = f"predicted: {ask.entry.name} in {point[0]} steps, {point[0] * step:.2f} s"
    return {**told, "stop": stop, "words": words}


def settings_of(plan: Plan, ask: Ask, stop: int) -> TrainSettings:
    """What a run trains."""
    calibrates = ask.entry == NOTHING_SENT
    return TrainSettings(
        strategy=ask.entry.strategy,
        size=plan.size,
        steps=plan.steps,
        stop=min(10 * plan.every, plan.steps) if calibrates else stop,
        batch=plan.batch,
        warmup=plan.steps // 20,
        lr=ask.entry.lr,
        outer=pairs(ask.entry.outer) if not ask.entry.peer else {},
        seed=ask.seed,
        log_every=plan.every,
        eval_every=plan.every,
        evaluate="after",
    )


def one_run(plan: Plan, ask: Ask, world: World, stop: int) -> dict[str, Any]:
    """Train once; what the row of the run says."""
    attach = attach_of(ask.entry)
    how: Build = partial(build_with, attach) if attach else build
    with said(ask.delay):
        history = train(settings_of(plan, ask, stop), world, build=how)
    return figures(history)


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
