"""Stale-synchronous parallel training (SSP) beside DDP, LocalSGD and CO2, where workers differ.

    python benchmarks/ssp.py            # half an hour on two cores; go on with the same
    python benchmarks/ssp.py --quick    # a tiny model, too short to mean anything

Four workers, once equal, once one is half as fast, once with random stragglers. When who reads and
pushes is simulated: SSP by SimPy, the others by recursion. What is learned is trained: SSP in one
process, in the order of its clock, the others by ranks, each at its best rate with equal workers.
SSP is that of Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server, NIPS 2013, section 2: shards lie on servers, and a worker may begin its clock c (from 0)
once every worker's clocks before c - s are in.

Finished runs of ranks are rows of ssp-runs.csv, and not run again. Writes ssp.md.
"""

import copy
import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import mean
from typing import Any, Literal, NamedTuple

import numpy as np
import simpy
import torch
from reports import machine, made_by, publish, table
from studies import (
    RATES,
    TUNING_SEED,
    Budget,
    Configuration,
    Rows,
    Study,
    Training,
    command,
    finished,
    trainings,
)
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim import AdamW

from co2sim.common.units import Seconds
from realrun.train.settings import TrainSettings
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import Task, loss_of, means, scores

RUNS, SEED = "ssp-runs.csv", 0
STEP: Seconds = 0.1
"""A local step of a worker that nothing holds up."""
BOUNDS = (0, 1, 3, 10)
KINDS = ("equal", "one slow", "stragglers")
METHODS = {
    "DDP": ("ddp", 1, 0),
    "LocalSGD, tau 12": ("local_sgd:tau=12", 12, 0),
    "CO2, tau 12, delay 4": ("co2:tau=12,delay=4", 12, 4),
}
"""A strategy, its tau, and after how many steps an average is used."""

Compute = Callable[[int, int], Seconds]
"""Seconds that a worker computes in a clock."""
Point = tuple[int, Seconds, float]
"""Steps, seconds and validation loss."""


class Servers(NamedTuple):
    """A network of workers and servers: one card each, bytes per second and seconds of latency."""

    workers: int
    servers: int
    parameter_bytes: float
    bandwidth: float = math.inf
    latency: Seconds = 0.0


class Moment(NamedTuple):
    """What happens to a worker in a clock: it has `read` all shards, or its push has `arrived`."""

    time: Seconds
    what: Literal["read", "arrived"]
    worker: int
    clock: int


@dataclass(slots=True)
class Course:
    """How a training went: all moments in their order, and the seconds that each worker waited."""

    moments: list[Moment] = field(default_factory=list)
    waited: list[Seconds] = field(default_factory=list)

    @property
    def seconds(self) -> Seconds:
        """Until the last push has arrived."""
        return self.moments[-1].time

    def staleness(self) -> list[int]:
        """For each read, how many clocks the slowest worker's pushes lie behind it."""
        arrived, found = [0] * len(self.waited), []
        for one in self.moments:
            if one.what == "arrived":
                arrived[one.worker] += 1
            else:
                found.append(one.clock - min(arrived))
        return found


def ssp(place: Servers, compute: Compute, clocks: int, bound: int) -> Course:
    """Every worker's `clocks`, at most `bound` ahead of the slowest."""
    world = simpy.Environment()
    message = place.parameter_bytes / place.servers / place.bandwidth
    own, theirs = (
        {way: [simpy.Resource(world) for _ in range(count)] for way in ("in", "out")}
        for count in (place.workers, place.servers)
    )
    arrived, course = [0] * place.workers, Course(waited=[0.0] * place.workers)
    turn = [world.event()]

    def send(first: simpy.Resource, second: simpy.Resource) -> Generator[Any, Any, None]:
        with first.request() as one:
            yield one
            with second.request() as other:
                yield other
                yield world.timeout(message)
        yield world.timeout(place.latency)

    def exchange(worker: int, way: Literal["in", "out"]) -> simpy.AllOf:
        cards = theirs["out" if way == "in" else "in"]
        start = worker * place.servers // place.workers  # else all would begin at one server
        order = [*cards[start:], *cards[:start]]
        return world.all_of([world.process(send(own[way][worker], one)) for one in order])

    def work(worker: int) -> Generator[Any, Any, None]:
        for clock in range(clocks):
            began = world.now
            while min(arrived) < clock - bound:
                yield turn[0]
            course.waited[worker] += world.now - began
            yield exchange(worker, "in")
            course.moments.append(Moment(world.now, "read", worker, clock))
            yield world.timeout(compute(worker, clock))
            world.process(push(worker, clock))

    def push(worker: int, clock: int) -> Generator[Any, Any, None]:
        yield exchange(worker, "out")
        arrived[worker] = clock + 1
        course.moments.append(Moment(world.now, "arrived", worker, clock))
        done, turn[0] = turn[0], world.event()
        done.succeed()

    for worker in range(place.workers):
        world.process(work(worker))
    world.run()
    return course


def rounds(
    place: Servers, compute: Compute, clocks: int, tau: int, delay: int = 0
) -> tuple[list[Seconds], list[Seconds]]:
    """Workers that average after every `tau` steps by a ring: when all have taken each step.

    The average of a round travels once the last worker is there, and is used `delay` steps later
    (0: all wait for it at once). Also gives the seconds that each worker waited.
    """
    count = place.workers
    travels = 2 * (count - 1) * (place.parameter_bytes / count / place.bandwidth + place.latency)
    now, waited = [0.0] * count, [0.0] * count
    done: list[Seconds] = []
    arrival: dict[int, Seconds] = {}
    for clock in range(clocks):
        now = [time + compute(worker, clock) for worker, time in enumerate(now)]
        if (clock + 1) % tau == 0:
            arrival[clock + 1 + delay] = max(now) + travels
        ready = arrival.get(clock + 1, 0.0)
        waited = [sofar + max(0.0, ready - time) for sofar, time in zip(waited, now, strict=True)]
        now = [max(time, ready) for time in now]
        done.append(max(now))
    return done, waited


def workers(kind: str) -> Compute:
    """Seconds of computing: all equal, one half as fast, or one step in ten five times as long."""
    late = np.random.default_rng(7).random((64, 100_000)) < 0.1  # noqa: PLR2004 - one in ten
    return {
        "equal": lambda *_: STEP,
        "one slow": lambda worker, _: STEP * (1 if worker else 2),
        "stragglers": lambda worker, clock: STEP * (5 if late[worker, clock] else 1),
    }[kind]


def train(task: Task, settings: TrainSettings, course: Course) -> Iterator[Point]:
    """Replay a course: clocks of all that are in, seconds, and the loss of the servers' parameters.

    Worker w of G takes an AdamW step of its own on its share of the samples, from what the servers
    hold and what it has pushed itself; the servers add 1 / G of that step. With a bound of 0 that
    is the mean of the workers' steps, and with one worker AdamW.
    """
    count = len(course.waited)
    torch.manual_seed(settings.seed)
    first = task.model()
    whole = parameters_to_vector(first.parameters()).detach()
    models = [copy.deepcopy(first) for _ in range(count)]
    steps = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    optimizers = [AdamW(model.parameters(), **steps) for model in models]
    travels: list[list[Tensor]] = [[] for _ in range(count)]
    arrived = [0] * count
    for moment in course.moments:
        worker, step = moment.worker, moment.clock + 1
        if moment.what == "arrived":
            whole = whole + travels[worker].pop(0)
            before, arrived[worker] = min(arrived), arrived[worker] + 1
            least = min(arrived)
            if least > before and least % settings.eval_every == 0:
                vector_to_parameters(whole, first.parameters())
                with torch.no_grad():
                    sums = torch.stack([scores(first, batch) for batch in task.validation])
                yield least, moment.time, means(sums.sum(0))[0]
            continue
        model, optimizer = models[worker], optimizers[worker]
        began = whole + sum(travels[worker], torch.zeros(()))
        vector_to_parameters(began.clone(), model.parameters())  # which become views of it
        optimizer.param_groups[0]["lr"] = settings.learning_rate(step)
        optimizer.zero_grad()
        batch = task.batch(settings.seed, step, settings.batch, worker, count)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        if settings.clip_grad:
            clip_grad_norm_(model.parameters(), settings.clip_grad)
        optimizer.step()
        moved = parameters_to_vector(model.parameters()).detach() - began
        travels[worker].append(moved / count)


def wanted(budget: Budget, rows: Rows) -> Iterator[Training]:
    """The runs of ranks: all rates, then the best with another seed."""
    for name, (strategy, _, _) in METHODS.items():
        usual = Training(budget, Configuration(name, strategy), "", 0.0, TUNING_SEED)
        trials = [replace(usual, lr=lr) for lr in (RATES[1:2] if budget.quick else RATES)]
        yield from trials
        if all(run.key in rows for run in trials):
            yield replace(min(trials, key=lambda run: run.loss(rows)), seed=SEED)


@cache
def replay(
    budget: Budget, place: Servers, kind: str, bound: int, lr: float, seed: int
) -> tuple[Point, ...]:
    """Train by the clock of SSP."""
    torch.set_num_threads(1)
    same = {name: getattr(budget, name) for name in ("task", "size", "steps", "batch", "warmup")}
    settings = TrainSettings(**same, eval_every=budget.eval_every, lr=lr, seed=seed)
    course = ssp(place, workers(kind), budget.steps, bound)
    task = make_task(settings.task, settings.size, settings.shape, torch.device("cpu"))
    found = tuple(train(task, settings, course))
    print(f"SSP, bound {bound}, {kind}, lr {lr:g}, seed {seed}: {found[-1][2]:.4f}", flush=True)
    return found


def lines(budget: Budget, rows: Rows, place: Servers, kind: str) -> Iterator[dict[str, Any]]:
    """All methods with workers of a kind."""
    final = {run.configuration.name: run for run in wanted(budget, rows) if run.seed == SEED}
    for name, (_, tau, delay) in METHODS.items():
        ended, waited = rounds(place, workers(kind), budget.steps, tau, delay)
        curve = json.loads(rows[final[name].key]["curve"])
        steps = [round(tokens / curve[-1][0] * budget.steps) for tokens, _ in curve]
        losses = [(s, ended[s - 1], loss) for s, (_, loss) in zip(steps, curve, strict=True)]
        one = {"method": name, "lr": final[name].lr, "losses": losses, "behind": [0]}
        yield one | {"waited": mean(waited) / ended[-1]}
    for bound in BOUNDS:
        course = ssp(place, workers(kind), budget.steps, bound)
        rates = RATES[1:2] if budget.quick else (RATES[0] / 4, RATES[0] / 2, *RATES)
        ends = {lr: replay(budget, place, "equal", bound, lr, TUNING_SEED)[-1][2] for lr in rates}
        lr = min(ends, key=ends.__getitem__)  # with equal workers; SSP may need a lower one
        losses = list(replay(budget, place, kind, bound, lr, SEED))
        one = {"method": f"SSP, bound {bound}", "lr": lr, "losses": losses}
        yield one | {"waited": mean(course.waited) / course.seconds, "behind": course.staleness()}


def report(found: dict[str, list[dict[str, Any]]], budget: Budget, place: Servers) -> str:
    """The tables in Markdown."""
    worst = max(way["losses"][-1][2] for ways in found.values() for way in ways)
    parts = []
    for kind, ways in found.items():
        rows = []
        for way in ways:
            reached = next(seconds for _, seconds, loss in way["losses"] if loss <= worst)
            row = {"method": way["method"], "lr": f"{way['lr']:g}"}
            row["a step"] = f"{1e3 * way['losses'][-1][1] / budget.steps:.0f} ms"
            row["waited"] = f"{way['waited']:.0%}"
            row["staleness, mean / most"] = f"{mean(way['behind']):.1f} / {max(way['behind'])}"
            row["last loss"] = f"{way['losses'][-1][2]:.3f}"
            rows.append({**row, f"loss {worst:.3f} after": f"{reached:.1f} s"})
        parts.append(f"## {kind.capitalize()}\n\n{table(rows)}\n")
    return f"""\
# Stale-synchronous parallel training beside collectives

{budget.workers} workers, task {budget.task}, size {budget.size}, {budget.steps} steps of
{budget.batch} samples, one seed. A step takes {1e3 * STEP:.0f} ms where nothing holds it up.
{place.servers} servers; network cards of {8e-6 * place.bandwidth:.0f} Mbit/s. A time to a loss is
that of the first validation that reaches it; there is one every {budget.eval_every} steps.
Staleness: how many clocks the slowest worker lies behind one that reads.

{chr(10).join(parts)}
{machine()}

{made_by()}
"""


def budget_of(options: Namespace) -> Budget:
    """Of all runs."""
    usual = Budget(steps=384, warmup=24, eval_every=24)
    return Budget.small("digits", batch=8) if options.quick else usual


def studies(options: Namespace) -> list[Study]:
    """The runs of ranks."""
    budget = budget_of(options)
    return [trainings(options.out / RUNS, partial(wanted, budget), budget.workers)]


def write(options: Namespace) -> None:
    """Train SSP, and write ssp.md."""
    budget, rows = budget_of(options), finished(options.out / RUNS)
    parameters = 6_274 if options.quick else 158_720
    place = Servers(budget.workers, 4, 4.0 * parameters, 12.5e6, 1e-4)
    ways = {kind: list(lines(budget, rows, place, kind)) for kind in KINDS}
    publish(options, "ssp", report(ways, budget, place))


def main() -> int:
    """Run, train SSP, and write what is there."""
    return command(__doc__, "a tiny model", studies, write)


if __name__ == "__main__":
    sys.exit(main())
