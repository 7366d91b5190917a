"""Wall-clock to a given loss in the lab: predicted by co2sim before, measured after.

    sudo python benchmarks/time_to_loss.py                # an hour on two quiet cores
    sudo python benchmarks/time_to_loss.py --quick        # a trial of seconds

torch's DDP and post-local SGD, torchft's LocalSGD and DiLoCo, and our LocalSGD, SlowMo, DiLoCo,
Streaming DiLoCo and CO2, as published and with a delay that it measures, train the same GPT from
the same weights on the same samples, on four nodes at 100 and at 1000 Mbit/s, in rounds of 12 steps
(CO2 with a delay also in the shortest that co2sim finds hidden). A local step takes 100 ms, as on a
device of a known speed: what its arithmetic leaves of that is waited for before anything is sent.

What goes into a prediction is known before the run begins:

- how many steps the loss takes: from a run of the same training and seed without a lab;
- the time of a local step: from calibrations in the lab before each seed. In one nothing is sent
  (also in DDP, and by CO2 whose workers do not average); one in which something is sent all
  the time tells how much that slows the steps down; one with an average after each step what the
  network attains of its stated rate; one with tensors of hardly any bytes what the cores need for
  the messages of torchft's LocalSGD. Cores and network work at the same time: the slower counts;
- all communication: by co2sim, from the rate of the lab and what is attained of it. Methods of
  torch and torchft have the schedule of the strategy that does the same.

The loss to reach is the worst with which a run without a lab ends: CO2 as published is run first,
and the others end soon after they have come as low. Between two validations the loss is taken to
fall evenly. Learning rates and outer steps are the best of convergence.csv.
Seconds are rank 0's, without validation; waits are those of the rank that waited least.

Each finished run is a row of time_to_loss-runs.csv; what is there is not run again: remove the file
to measure again. Writes time_to_loss.csv, time_to_loss.md and time_to_loss.png.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd
import torch.distributed as dist
from contenders import (
    Pace,
    Point,
    attach_of,
    build_alone,
    build_with,
    curve,
    figures,
    installed,
    paced,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reports import installed as version
from reports import legend_below, machine, made_by, needed, png, publish, table
from studies import Rows, Study, command

from co2sim import Question
from co2sim import run as simulate
from co2sim.catalog import load_cluster
from co2sim.common.plots import COLOURS
from co2sim.common.units import Seconds, parse
from co2sim.hardware.cluster import GPU
from co2sim.prediction.driver import resolve_auto
from co2sim.schedule.schedule import DType
from co2sim.strategies import Strategy
from co2sim.strategies import parse as parse_strategy
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import round_steps
from co2sim.training.workload import Workload
from realrun.execute.world import World
from realrun.lab.lab import Lab, stated_cluster
from realrun.train import TrainSettings
from realrun.train.algorithm_registry import pairs
from realrun.train.loop import Build, Standing, train
from realrun.train.parallelize import build
from realrun.train.tasks.presets import GPTS

TAU = 12


@dataclass(frozen=True, slots=True)
class Contender:
    """A method with what was tuned for it in convergence.csv.

    `strategy` is the one of co2sim whose schedule it has. `peer` is the method of torch or torchft,
    if it is one of those that `realrun train` has not, or how it is calibrated.
    """

    name: str
    strategy: str
    lr: float
    outer: str = ""
    peer: str = ""

    @property
    def measures_delay(self) -> bool:
        """Whether training chooses a delay."""
        return "delay=auto" in self.strategy

    @property
    def in_ddp(self) -> bool:
        """Whether the model is wrapped in DistributedDataParallel."""
        return self.strategy == "ddp" or self.peer == "torch post-local SGD"

    @property
    def tensor_by_tensor(self) -> bool:
        """Whether every tensor is averaged by itself."""
        return self.peer == "torchft LocalSGD"

    @property
    def calibrates(self) -> bool:
        """Whether it is none of those that are compared."""
        return self.name.startswith("calibration: ")


_LOCAL, _DILOCO, _NESTEROV = f"local_sgd:tau={TAU}", f"diloco:tau={TAU}", "momentum=0.5,lr=1"
REFERENCE = "CO2 as published"
"""The one that is expected to end with the highest loss."""
CONTENDERS = (
    Contender("torch DDP", "ddp", 1e-2),
    Contender("torch post-local SGD", _LOCAL, 1e-2, peer="torch post-local SGD"),
    Contender("LocalSGD", _LOCAL, 1e-2),
    Contender("SlowMo", f"slowmo:tau={TAU}", 1e-2, "momentum=0.2,lr=0.9"),
    Contender("DiLoCo", _DILOCO, 5e-3, _NESTEROV),
    Contender("Streaming DiLoCo", f"{_DILOCO},fragments=3,delay=4", 5e-3, "momentum=0.9,lr=0.7"),
    Contender("torchft LocalSGD", _LOCAL, 1e-2, peer="torchft LocalSGD"),
    Contender("torchft DiLoCo", _DILOCO, 5e-3, _NESTEROV, peer="torchft DiLoCo"),
    Contender(
        REFERENCE,
        f"co2.published:tau={TAU}",
        1e-2,
        "momentum=0,lr=0.5,gap=gap_aware,clip=0.03",
    ),
    Contender(
        "CO2, delay auto",
        f"co2:tau={TAU},delay=auto,keep=0.25,predict=1",
        1e-2,
        "momentum=0.2,lr=0.9",
    ),
    Contender("CO2, tau and delay auto", "co2:tau=auto,delay=auto,keep=1", 1e-2),
)

_STEPS_ALONE = "local_sgd:tau=10000"  # a round that does not end
ALONE = Contender("calibration: nothing is sent", _STEPS_ALONE, 5e-3)
IN_DDP = Contender("calibration: DDP that sends nothing", _STEPS_ALONE, 5e-3, peer="torch alone")
SENDING = Contender("calibration: always sending", _STEPS_ALONE, 5e-3, peer="sending")
AVERAGING = Contender("calibration: an average after each step", "local_sgd:tau=1", 5e-3)
SMALL_AVERAGES = Contender("calibration: messages of torchft", _LOCAL, 5e-3, peer="torchft small")
CALIBRATIONS = (ALONE, IN_DDP, SENDING, AVERAGING)
"""How long a local step takes where the ranks share the cores: the bare model's, torch's, and while
the network is busy; and a blocking average. `SMALL_AVERAGES` is for torchft's LocalSGD: as many
tensors as the model has, so small that their bytes take no time (Gloo sends no empty segment)."""


def alone(entry: Contender) -> Contender:
    """The calibration whose step is the local step of a contender.

    CO2 with a delay, whose rounds may be short, runs itself, with workers that do not average.
    """
    if entry.in_ddp:
        return IN_DDP
    if entry.measures_delay:
        return replace(entry, name=f"calibration: {entry.name}, alone", peer="alone")
    return ALONE


# --- what is predicted ----------------------------------------------------------------------------

_ENOUGH = 1e15
"""A speed, in bytes per second, that adds nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """A lab of nodes of one rank, the model trained there, and the samples of a rank in a step."""

    nodes: int
    rate: str
    size: str
    samples: int


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a lab is found to be, just before a run: seconds of a local step alone.

    `interference`: the share by which sending slows it down. `efficiency`: the fraction of its
    stated rate that the network attains. `messages`: seconds of a step with averages of hardly any
    bytes, where every tensor is averaged by itself: so long do the cores need for the messages.
    """

    local_step: Seconds
    interference: float = 0.0
    efficiency: float = 1.0
    messages: Seconds = 0.0


def case(place: Place, strategy: str | Strategy, measured: Calibrated) -> Question:
    """The case on a GPU, and on a network, as they were measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stated.toml"
        path.write_text(stated_cluster(Lab(place.nodes, 1, place.rate)))
        cluster = load_cluster(str(path)).value
    model = GPTS[place.size].model()
    job = Workload(model, place.samples, precision=DType.FP32, recompute="none")
    speed = job.hardware_flops_per_sample * place.samples / measured.local_step
    gpu = GPU("calibrated", 1e12, _ENOUGH, {"fp32": speed}, ((1.0, 1.0),))
    inter = replace(cluster.inter, efficiency=cluster.inter.efficiency * measured.efficiency)
    cluster = replace(cluster, gpu=gpu, inter=inter, communicators="stream")
    return Question(
        cluster=replace(cluster, interference=measured.interference),
        model=model,
        strategy=strategy,
        micro_batch=place.samples,
        precision="fp32",
        recompute="none",
    )


@cache
def predicted_step(place: Place, strategy: str | Strategy, measured: Calibrated) -> Seconds:
    """Seconds of a step, communication included.

    The cores prepare a message while the network carries the one before: the slower one counts.
    """
    return max(simulate(case(place, strategy, measured)).step_time_s, measured.messages)


def network_efficiency(place: Place, local_step: Seconds, averaging: Seconds) -> float:
    """What the network attains of its stated rate, where a step with an average takes `averaging`.

    At most 1. The model's average, one after each step, takes what is beyond the local step.
    """
    stated = predicted_step(place, "local_sgd:tau=1", Calibrated(local_step)) - local_step
    return min(1.0, stated / max(stated, averaging - local_step))


@cache
def with_delay(place: Place, strategy: str, local_step: Seconds) -> CO2:
    """The strategy with co2sim's numbers for tau=auto and delay=auto."""
    chosen = resolve_auto(case(place, strategy, Calibrated(local_step))).strategy
    assert isinstance(chosen, CO2)
    return chosen


def elements_of_a_step(place: Place, local_step: Seconds) -> int:
    """The fp32 elements whose all-reduce takes four fifths of a local step, at least one."""
    bandwidth = parse(place.rate, "B/s")
    ring = 2 * (place.nodes - 1) / place.nodes * DType.FP32.bytes
    return int(0.8 * local_step * bandwidth / ring) + 1


# --- the grid -------------------------------------------------------------------------------------

FREE = "without a lab"
RUNS = "time_to_loss-runs.csv"


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs have in common: the model, where it is trained, and how long.

    `every` steps the loss is taken; between two of them it is taken to fall evenly. A local step
    takes `pace` at least.
    """

    steps: int = 768
    every: int = 2 * TAU
    size: str = "mini"
    nodes: int = 4
    batch: int = 32
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[str, ...] = ("100 Mbit/s", "1000 Mbit/s")
    only: tuple[str, ...] = ()
    pace: Seconds = 0.1

    @classmethod
    def of(cls, options: Namespace) -> "Plan":
        """The usual, or a trial of seconds that is too short to mean anything."""
        names = ("torch post-local SGD", "CO2, delay auto")
        few = cls(2 * TAU, TAU, "tiny", 2, 8, (0,), ("100 Mbit/s",), names, pace=0.01)
        return few if options.quick else cls()

    @property
    def label(self) -> str:
        """Runs of other plans do not count."""
        pace = f"{self.pace * 1e3:g} ms a step"
        return f"{self.size}-{self.steps}x{self.batch}-{self.nodes} nodes {pace}"

    def place(self, rate: str) -> Place:
        """The lab of a rate, as co2sim has it."""
        return Place(self.nodes, rate, self.size, self.batch // self.nodes)

    def resolved(self, rate: str, entry: Contender) -> str | CO2:
        """The strategy to simulate, with co2sim's tau and delay for local steps at the pace."""
        if not entry.measures_delay:
            return entry.strategy
        return with_delay(self.place(rate), entry.strategy, self.pace)

    def contenders(self, rate: str) -> list[Contender]:
        """What is compared at a rate, with co2sim's tau where it chooses it."""
        entries = []
        for entry in CONTENDERS:
            if (self.only and entry.name not in self.only) or not installed(entry.peer):
                continue
            strategy = entry.strategy
            if "tau=auto" in strategy:
                steps = round_steps(with_delay(self.place(rate), strategy, self.pace))
                strategy = strategy.replace("tau=auto", f"tau={steps}")
            entries.append(replace(entry, strategy=strategy))
        return entries


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `where` is a rate, or FREE; `delay` is what co2sim says instead of measuring it."""

    plan: Plan
    entry: Contender
    where: str
    seed: int
    delay: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from other runs."""
        entry = self.entry
        texts = (entry.name, entry.strategy, f"{entry.lr:g}", entry.outer)
        return (self.plan.label, self.where, *texts, str(self.delay), str(self.seed))

    @property
    def steps(self) -> int:
        """At most."""
        return 3 * self.plan.every if self.entry.calibrates else self.plan.steps

    @property
    def lab(self) -> Lab | None:
        """Where it runs."""
        return None if self.where == FREE else Lab(self.plan.nodes, 1, self.where)

    @property
    def free(self) -> "Run":
        """The run without a lab that tells how many steps this one needs."""
        chosen = self.plan.resolved(self.where, self.entry)
        delay = int(chosen.delay or 0) if isinstance(chosen, CO2) else 0
        return replace(self, where=FREE, delay=delay)


KEYS = ("plan", "where", "name", "strategy", "lr", "outer", "delay", "seed")
NUMBERS = (
    *("local_step_s", "interference", "efficiency", "predicted_step_s", "step_s"),
    *("waited", "rounds", "used_delay", "late_steps"),
)


def free_runs(plan: Plan) -> list[Run]:
    """Runs without a lab, the reference first; where rates ask for the same, one serves both."""
    runs = [
        Run(plan, entry, rate, seed).free
        for seed in plan.seeds
        for rate in plan.rates
        for entry in plan.contenders(rate)
    ]
    return sorted(dict.fromkeys(runs), key=lambda run: run.entry.name != REFERENCE)


def lab_runs(plan: Plan, rows: Rows) -> Iterator[Run]:
    """Runs in labs, interleaved: all contenders with a seed, then with the next one.

    Before these run their calibrations.
    """
    for rate in plan.rates:
        entries = plan.contenders(rate)
        small = [SMALL_AVERAGES] if any(entry.tensor_by_tensor for entry in entries) else []
        calibrations = dict.fromkeys([*CALIBRATIONS, *small, *map(alone, entries)])
        for seed in plan.seeds:
            for entry in (*calibrations, *entries):
                run = Run(plan, entry, rate, seed)
                if entry.calibrates or not rows.get(run.free.key, {"error": ""})["error"]:
                    yield run


def calibrated(run: Run, rows: Rows) -> Calibrated:
    """For a run: what was measured there just before."""

    def step(calibration: Contender) -> float:
        return float(rows[replace(run, entry=calibration).key]["step_s"])

    bare = step(ALONE)
    efficiency = network_efficiency(run.plan.place(run.where), bare, step(AVERAGING))
    messages = step(SMALL_AVERAGES) if run.entry.tensor_by_tensor else 0.0
    slower = max(0.0, step(SENDING) / bare - 1)
    return Calibrated(step(alone(run.entry)), slower, efficiency, messages)


def reached(points: Sequence[Point], target: float) -> Point | None:
    """Where the loss falls to the target, on a straight line between two validations."""
    for before, after in zip([None, *points], points, strict=False):
        if after[2] > target:
            continue
        if before is None:
            return after
        part = (before[2] - target) / (before[2] - after[2])
        step, seconds = (a + part * (b - a) for a, b in zip(before[:2], after[:2], strict=True))
        return step, seconds, target
    return None


def reference_loss(plan: Plan, rows: Rows) -> float | None:
    """The loss at which a run without a lab may end: that of the reference, once this is there."""
    runs = [run for run in free_runs(plan) if run.entry.name == REFERENCE]
    done = [row for run in runs if (row := rows.get(run.key)) and not row["error"]]
    return max(curve(row)[-1][2] for row in done) if done and len(done) == len(runs) else None


def target_of(plan: Plan, rows: Rows) -> float:
    """The loss to reach: the worst with which a run without a lab ends."""
    done = [rows[run.key] for run in free_runs(plan)]
    return max(curve(row)[-1][2] for row in done if not row["error"])


# --- a run ----------------------------------------------------------------------------------------

_SPARE = 1.1
"""Where training chooses a delay in the lab, this times the steps of the run without may do."""


def trained(run: Run, rows: Rows, world: World) -> dict[str, Any]:
    """Train once; what the row of the run says. In a lab, what is predicted comes first."""
    plan, entry = run.plan, run.entry
    sent = 0
    if entry == SENDING:
        bare = float(rows[replace(run, entry=ALONE).key]["step_s"])
        sent = elements_of_a_step(plan.place(run.where), bare)
    how: Build = build_alone if entry.peer == "alone" else build
    if attach := attach_of(entry.peer, TAU, pairs("outer", entry.outer), sent):
        how = partial(build_with, attach)
    if run.where == FREE:
        watched = entry.name != REFERENCE
        until = Until(reference_loss(plan, rows) if watched else None)
        settings = settings_of(run, 0)
        return figures(train(settings, world, build=how, progress=until.note, stop=until.low))
    row = {} if entry.calibrates else predicted(run, rows)
    if world.rank == 0 and row:
        print(f"predicted: {entry.name}: {row['predicted_step_s']:.4f} s a step", flush=True)
    pace = Pace(plan.pace)
    settings = settings_of(run, row.pop("stop", 0))
    row |= figures(train(settings, world, build=partial(paced, pace, how)))
    row["waited"] = _least(row["waited"] or 0.0, world)
    return {**row, "late_steps": pace.late / max(1, pace.steps)}


def predicted(run: Run, rows: Rows) -> dict[str, Any]:
    """What is predicted of a run in the lab, and the step after which it may `stop`."""
    plan, measured = run.plan, calibrated(run, rows)
    step = predicted_step(plan.place(run.where), plan.resolved(run.where, run.entry), measured)
    point = reached(curve(rows[run.free.key]), target_of(plan, rows))
    most = point[0] * (_SPARE if run.entry.measures_delay else 1) if point else plan.steps
    return {
        "local_step_s": measured.local_step,
        "interference": measured.interference,
        "efficiency": measured.efficiency,
        "predicted_step_s": step,
        "stop": min((int(most) // plan.every + 2) * plan.every, plan.steps),
    }


def settings_of(run: Run, stop: int) -> TrainSettings:
    """What a run trains."""
    plan, strategy = run.plan, run.entry.strategy
    if run.delay:  # co2sim's stands for what would be measured, in as many fragments
        chosen = parse_strategy(strategy)
        assert isinstance(chosen, CO2)
        strategy = strategy.replace("delay=auto", f"delay={run.delay},fragments={chosen.parts()}")
    return TrainSettings(
        strategy=strategy,
        size=plan.size,
        steps=plan.steps,
        stop=min(run.steps, plan.steps) if run.entry.calibrates else stop,
        batch=plan.batch,
        warmup=plan.steps // 20,
        lr=run.entry.lr,
        outer=pairs("outer", run.entry.outer) if not run.entry.peer else {},
        seed=run.seed,
        log_every=plan.every,
        eval_every=plan.every,
        evaluate="during" if run.where == FREE else "after",
    )


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


# --- the results ----------------------------------------------------------------------------------


def lines(plan: Plan, rows: Rows) -> Iterator[dict[str, Any]]:
    """A line for each run in a lab: what was predicted, and what was measured."""
    target = target_of(plan, rows)
    for run in lab_runs(plan, rows):
        row, entry = rows.get(run.key), run.entry
        if row is None or entry.calibrates:
            continue
        points = [] if row["error"] else curve(row)
        before, after = reached(curve(rows[run.free.key]), target), reached(points, target)
        predicted = before[0] * row["predicted_step_s"] if before else None
        yield {
            "rate": run.where,
            "method": entry.name,
            "seed": run.seed,
            "strategy": entry.strategy,
            "lr": entry.lr,
            "outer": entry.outer,
            "target": target,
            "local_step_s": row["local_step_s"],
            "interference": row["interference"],
            "efficiency": row["efficiency"],
            "steps": before[0] if before else None,
            "measured_steps": after[0] if after else None,
            "predicted_step_s": row["predicted_step_s"],
            "measured_step_s": row["step_s"],
            "predicted_s": predicted,
            "measured_s": after[1] if after else None,
            "error": predicted / after[1] - 1 if predicted and after else None,
            "waited_s": row["waited"],
            "rounds": row["rounds"],
            "predicted_delay": run.free.delay or None,
            "delay": row["used_delay"],
            "late_steps": row["late_steps"],
            "curve": points,
        }


def report(plan: Plan, rows: Rows, frame: pd.DataFrame, target: float) -> str:
    """The tables in Markdown, and what they are about."""
    shape = GPTS[plan.size]
    absent = [entry.name for entry in CONTENDERS if not installed(entry.peer)]
    notes = [f"{', '.join(absent)}: torchft is not installed."] if absent else []
    failed = [row for row in rows.values() if row["plan"] == plan.label and row["error"]]
    notes += [f"{r['name']}, {r['where']}, seed {r['seed']}: {r['error']}." for r in failed]
    return f"""\
# Time to a loss in the lab

A GPT of {shape.parameters:,} parameters, {plan.nodes} nodes of one rank, {plan.batch} x\
 {shape.context} characters a step, learning rates for {plan.steps} steps, seeds\
 {", ".join(map(str, plan.seeds))}. The loss to reach is {target:.4f} nats per character, the worst\
 that one of the runs without a lab ended with;\
 validated every {plan.every} steps, with a straight line between. A local step takes\
 {plan.pace * 1e3:g} ms, as on a device of a known speed: what its arithmetic leaves of that is\
 waited for ({frame["late_steps"].mean():.1%} of the steps took longer by themselves; at most\
 {frame["late_steps"].max():.1%} in a run). Predicted before: steps from a\
 run without a lab; a local step, how much sending slows it down, and what the network attains of\
 its stated rate, from calibrations in the lab, as are the averages of torchft's LocalSGD beside\
 their bytes; communication by co2sim.\
 Means over seeds, ± the standard deviation. torchft-nightly: {version("torchft-nightly")}.\
 {machine()}

{table([cells for rate in plan.rates for cells in _times(frame[frame["rate"] == rate])])}

{_hidden(frame)}

{" ".join(notes)}

{made_by()}
"""


def _by_method(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(name, frame[frame["method"] == name]) for name in dict.fromkeys(frame["method"])]


def _times(frame: pd.DataFrame) -> Iterator[dict[str, str]]:
    """The lines of a rate, as they are ranked."""
    groups = _by_method(frame)
    for name, group in sorted(groups, key=lambda pair: pair[1]["measured_s"].mean()):
        whole = group.dropna(subset=["predicted_s", "measured_s"])
        steps = f"{whole['steps'].mean():.0f}"
        if ((whole["steps"] - whole["measured_steps"]).abs() > 1).any():
            steps += f" (in the lab {whole['measured_steps'].mean():.0f})"
        errors = whole["predicted_s"].mean() / whole["measured_s"].mean() - 1
        missing = len(group) - len(whole)
        yield {
            "rate": group["rate"].iloc[0],
            "method": name + (f" ({missing} of {len(group)} did not reach it)" if missing else ""),
            "schedule": f"`{group['strategy'].iloc[0]}`",
            "steps": steps if len(whole) else "-",
            "local step ms": _ms(group["local_step_s"]),
            "rate attained": f"{group['efficiency'].mean():.0%}",
            "step ms: predicted": _ms(group["predicted_step_s"]),
            "step ms: measured": _ms(group["measured_step_s"]),
            "time to loss: predicted s": _spread(whole["predicted_s"]),
            "time to loss: measured s": _spread(whole["measured_s"]),
            "error": f"{errors:+.1%}" if len(whole) else "-",
            "error by seed": ", ".join(f"{error:+.1%}" for error in whole["error"]) or "-",
        }


def _ms(seconds: "pd.Series[float]") -> str:
    return f"{seconds.mean() * 1e3:.1f}"


def _spread(values: "pd.Series[float]") -> str:
    if not len(values):
        return "-"
    return f"{values.mean():.1f}" + (f" ± {values.std():.1f}" if len(values) > 1 else "")


def _hidden(frame: pd.DataFrame) -> str:
    """What was hidden of the averages of CO2 that chose its delay, beside what LocalSGD waited."""
    chosen = frame[frame["predicted_delay"].notna()]
    rows = [
        _hidden_cells(rate, name, group, frame[frame["rate"] == rate])
        for (rate, name), group in chosen.groupby(["rate", "method"], sort=False)
    ]
    if not rows:
        return ""
    return f"""\
What was hidden of the averages of a round where training chose the delay. All rounds count, the\
 first ones, too, in which it is measured. *Waited* is the least that one of the ranks waited: the\
 others waited for slower ranks, too:

{table(rows)}"""


def _hidden_cells(rate: str, name: str, ours: pd.DataFrame, runs: pd.DataFrame) -> dict[str, str]:
    waited = ours["waited_s"].sum() / ours["rounds"].sum()
    cells = {
        "rate": rate,
        "method": name,
        "delay: co2sim": f"{ours['predicted_delay'].iloc[0]:.0f}",
        "delay: training, by seed": ", ".join(f"{value:.0f}" for value in ours["delay"]),
        "waited in a round ms": f"{waited * 1e3:.1f}",
    }
    blocking = runs[runs["method"] == "LocalSGD"]
    if blocking.empty:
        return cells
    took = blocking["waited_s"].sum() / blocking["rounds"].sum()
    alone = (blocking["predicted_step_s"] - blocking["local_step_s"]).mean() * TAU
    return {
        **cells,
        "LocalSGD waited ms": f"{took * 1e3:.1f}",
        "hidden of that": f"{1 - waited / took:.1%}",
        "an average by co2sim ms": f"{alone * 1e3:.1f}",
        "hidden of this": f"{1 - waited / alone:.1%}",
    }


def draw(figure: Figure, frame: pd.DataFrame, target: float) -> None:
    """The loss of the first seed over wall-clock, a panel for each rate."""
    rates = list(dict.fromkeys(frame["rate"]))
    (axes,) = figure.subplots(1, len(rates), squeeze=False)
    for axis, rate in zip(axes, rates, strict=True):
        axis.set_title(rate, fontsize=9)
        _draw_losses(axis, frame[frame["rate"] == rate], target)
    axes[0].set_ylabel("validation loss, nats per character")
    legend_below(figure, axes[0], 4)


def _draw_losses(axis: Axes, frame: pd.DataFrame, target: float) -> None:
    names = [entry.name for entry in CONTENDERS]
    for name, group in _by_method(frame):
        points = group["curve"].iloc[0]
        axis.plot(
            [seconds for _, seconds, _ in points],
            [loss for _, _, loss in points],
            label=name,
            color=COLOURS[names.index(name) % len(COLOURS)],
            linestyle="--" if name.startswith("torch") else "-." if name.startswith("CO2") else "-",
            linewidth=1.2,
        )
    axis.axhline(target, color="grey", linestyle=":", linewidth=1)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds")


def studies(options: Namespace) -> list[Study]:
    """The study: runs without a lab, then those in labs, which take from them what is predicted."""
    plan = Plan.of(options)

    def wanted(rows: Rows) -> list[Run]:
        return [*free_runs(plan), *lab_runs(plan, rows)]

    return [Study(options.out / RUNS, KEYS, NUMBERS, wanted, trained, plan.nodes, ("curve",))]


def write(options: Namespace) -> None:
    """Write time_to_loss.csv, .md and .png of the runs that are there."""
    needed(options.out / RUNS)
    plan, rows = Plan.of(options), studies(options)[0].rows()
    if any(run.key not in rows for run in free_runs(plan)):
        sys.exit(f"{options.out / RUNS} does not hold all runs without a lab")
    frame, target = pd.DataFrame(lines(plan, rows)), target_of(plan, rows)
    frame.drop(columns="curve").to_csv(options.out / "time_to_loss.csv", index=False)
    size = (5.2 * max(2, frame["rate"].nunique()), 4.8)
    picture = png(size, lambda figure: draw(figure, frame, target))
    publish(options, "time_to_loss", report(plan, rows, frame, target), picture)


def main() -> int:
    """Run, and write what is there."""
    words = "two methods, the smallest model on two nodes, 24 steps, one rate"
    return command(__doc__, words, studies, write)


if __name__ == "__main__":
    sys.exit(main())
