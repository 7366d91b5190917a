"""Stale-synchronous parallel training (SSP) beside DDP, LocalSGD and CO2, where workers differ.

    python benchmarks/ssp.py            # half an hour on two cores; go on with the same
    python benchmarks/ssp.py --quick    # a tiny model, too short to mean anything

Four workers, once equal, once with one that is half as fast, once with random stragglers. When who
reads and pushes is simulated (ssp_clock.py: SSP by SimPy, the others by recursion, with the same
times of computing). What is learned is trained: SSP in one process, in the order of its clock
(ssp_training.py), the others by ranks. The learning rate of every method is chosen with a seed of
its own, for the loss at the end, with equal workers.

Finished runs of ranks are rows of ssp-runs.csv, and not run again. Writes ssp.md and ssp.png.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean

import numpy as np
from convergence_launch import complete
from convergence_plan import EXTENSIONS, RATES, TUNING_SEED, Ask, Configuration, StudyBudget
from finished_runs import Known, read
from reports import folder, machine, made_by, parser, table
from ssp_clock import Compute, Servers, rounds, ssp

from co2sim.units import Seconds
from realrun.train.settings import TrainSettings

RUNS = "ssp-runs.csv"
SEED = 0
STEP: Seconds = 0.1
"""A local step of a worker that nothing holds up."""

_LATE = 0.1
"""Of the steps, where stragglers are random."""

BOUNDS = (0, 1, 3, 10)
METHODS = {
    "DDP": ("ddp", 1, 0),
    "LocalSGD, tau 12": ("local_sgd:tau=12", 12, 0),
    "CO2, tau 12, delay 4": ("co2:tau=12,delay=4", 12, 4),
}
"""A strategy, its tau, and after how many steps an average is used."""


def workers(kind: str) -> Compute:
    """Seconds of computing: equal, one worker half as fast, or some steps five times as long."""
    if kind == "one slow":
        return lambda worker, _: STEP * (1 if worker else 2)
    if kind == "stragglers":
        late = np.random.default_rng(7).random((64, 100_000)) < _LATE
        return lambda worker, clock: STEP * (5 if late[worker, clock] else 1)
    return lambda *_: STEP


KINDS = ("equal", "one slow", "stragglers")


@dataclass(frozen=True, slots=True)
class Way:
    """How a method went with workers of a kind: losses over steps and seconds."""

    kind: str
    method: str
    lr: float
    losses: tuple[tuple[int, Seconds, float], ...]
    waited: float
    staleness: tuple[float, int]

    def time_to(self, loss: float) -> Seconds | None:
        """The first validation at which the loss is reached."""
        return next((seconds for _, seconds, found in self.losses if found <= loss), None)


def rates(budget: StudyBudget) -> tuple[float, ...]:
    """Learning rates to choose from."""
    return RATES[1:2] if budget.quick else RATES


def plan(budget: StudyBudget, known: Known) -> Iterator[Ask]:
    """The runs of ranks: all rates, then the best with another seed."""
    for name, (strategy, _, _) in METHODS.items():
        tried = [
            Ask(budget, Configuration(name, strategy), "", lr, TUNING_SEED) for lr in rates(budget)
        ]
        yield from tried
        losses = {ask.lr: known[ask.key]["validation_loss"] for ask in tried if ask.key in known}
        if len(losses) == len(tried):
            yield replace(tried[0], lr=min(losses, key=losses.__getitem__), seed=SEED)


def ways(budget: StudyBudget, known: Known, place: Servers) -> Iterator[Way]:
    """All methods with all kinds of workers."""
    for kind in KINDS:
        for name, (_, tau, delay) in METHODS.items():
            (ask,) = (
                a for a in plan(budget, known) if (a.configuration.name, a.seed) == (name, SEED)
            )
            curve = json.loads(known[ask.key]["curve"])
            ended, waited = rounds(place, workers(kind), budget.steps, tau, delay)
            last = curve[-1][0]
            steps = [round(tokens / last * budget.steps) for tokens, _ in curve]
            losses = tuple(
                (s, ended[s - 1], loss) for s, (_, loss) in zip(steps, curve, strict=True)
            )
            yield Way(kind, name, ask.lr, losses, mean(waited) / ended[-1], (0.0, 0))
        for bound in BOUNDS:
            yield stale(budget, place, kind, bound)


def stale(budget: StudyBudget, place: Servers, kind: str, bound: int) -> Way:
    """SSP with a bound."""
    course = ssp(place, workers(kind), budget.steps, bound)
    lr = best_rate(budget, place, bound)
    behind = course.staleness()
    return Way(
        kind,
        f"SSP, bound {bound}",
        lr,
        replay(budget, place, kind, bound, lr, SEED),
        mean(course.waited) / course.seconds,
        (mean(behind), max(behind)),
    )


@cache
def best_rate(budget: StudyBudget, place: Servers, bound: int) -> float:
    """The learning rate with the lowest last loss, with equal workers; the grid grows downwards."""
    tried = list(rates(budget))
    while True:
        ends = {lr: replay(budget, place, "equal", bound, lr, TUNING_SEED)[-1][2] for lr in tried}
        best = min(ends, key=ends.__getitem__)
        if budget.quick or best != tried[0] or len(tried) == len(RATES) + EXTENSIONS:
            return best
        tried.insert(0, best / 2)


@cache
def replay(
    budget: StudyBudget, place: Servers, kind: str, bound: int, lr: float, seed: int
) -> tuple[tuple[int, Seconds, float], ...]:
    """Train by the clock of SSP."""
    import torch  # noqa: PLC0415 - after the ranks
    from ssp_training import train  # noqa: PLC0415 - torch

    from realrun.train.tasks import make_task  # noqa: PLC0415 - torch

    torch.set_num_threads(1)
    settings = TrainSettings(
        task=budget.task,
        size=budget.size,
        steps=budget.steps,
        batch=budget.batch,
        warmup=budget.warmup,
        eval_every=budget.eval_every,
        lr=lr,
        seed=seed,
    )
    course = ssp(place, workers(kind), budget.steps, bound)
    task = make_task(settings, torch.device("cpu"))
    found = tuple(tuple(one) for one in train(task, settings, course))
    print(f"SSP, bound {bound}, {kind}, lr {lr:g}, seed {seed}: {found[-1][2]:.4f}", flush=True)
    return found


def report(found: list[Way], budget: StudyBudget, place: Servers) -> str:
    """The tables in Markdown."""
    worst = max(way.losses[-1][2] for way in found)
    parts = []
    for kind in KINDS:
        rows = [
            {
                "method": way.method,
                "lr": f"{way.lr:g}",
                "a step": f"{1e3 * way.losses[-1][1] / budget.steps:.0f} ms",
                "waited": f"{way.waited:.0%}",
                "staleness, mean / most": f"{way.staleness[0]:.1f} / {way.staleness[1]}",
                "last loss": f"{way.losses[-1][2]:.3f}",
                f"loss {worst:.3f} after": f"{way.time_to(worst):.1f} s",
            }
            for way in found
            if way.kind == kind
        ]
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


def draw(found: list[Way]) -> bytes:
    """Loss over seconds, a panel for each kind of workers."""
    import matplotlib as mpl  # noqa: PLC0415 - no rank draws
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render  # noqa: PLC0415
    from realrun.train.figure import MARKERS  # noqa: PLC0415 - as above

    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(11.0, 3.9), layout="constrained")
        panels = figure.subplots(1, len(KINDS), sharey=True)
        for axes, kind in zip(panels, KINDS, strict=True):
            for place, way in enumerate(way for way in found if way.kind == kind):
                _, seconds, losses = zip(*way.losses, strict=True)
                axes.plot(
                    seconds,
                    losses,
                    color=COLOURS[place % len(COLOURS)],
                    marker=MARKERS[place % len(MARKERS)],
                    markersize=4,
                    label=way.method,
                )
            axes.set(title=kind, xlabel="simulated seconds", xlim=(0, None))
        panels[0].set_ylabel("validation loss")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        return render(figure, "png")


def main() -> None:
    """Start the ranks, or be one of them; then train SSP, and write what is there."""
    given = parser(__doc__, "a tiny model").parse_args()
    usual = StudyBudget(steps=384, warmup=24, eval_every=24)
    small = StudyBudget("tiny", 24, 8, 4, 12, workers=2, quick=True, task="digits")
    budget = small if given.quick else usual
    bytes_ = 4.0 * (6_274 if given.quick else 158_720)
    place = Servers(
        workers=budget.workers, servers=4, parameter_bytes=bytes_, bandwidth=12.5e6, latency=1e-4
    )
    asked = partial(plan, budget)
    with folder(given) as out:
        path: Path = out / RUNS
        if "RANK" in os.environ:
            from convergence_runs import run_ranks  # noqa: PLC0415 - torch, for the ranks alone

            run_ranks(asked, path)
            return
        if code := complete(asked, path, budget.workers):
            sys.exit(code)
        found = list(ways(budget, read(path), place))
        text = report(found, budget, place)
        (out / "ssp.md").write_text(text, "utf-8")
        (out / "ssp.png").write_bytes(draw(found))
    print(text)


if __name__ == "__main__":
    main()
