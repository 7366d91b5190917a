"""The plan of `time_to_loss.py`: who is compared, what is predicted, and which runs are missing."""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import reports
from convergence import split
from reports import Known

from co2sim import Case, run
from co2sim.catalog import load_cluster
from co2sim.common.units import Seconds, parse
from co2sim.hardware.cluster import GPU
from co2sim.models.workload import Workload
from co2sim.prediction.driver import resolve_auto
from co2sim.schedule.schedule import DType
from co2sim.strategies import Strategy
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import round_steps
from realrun.lab.lab import Lab, stated_cluster
from realrun.train.tasks.presets import GPTS

TAU = 12


@dataclass(frozen=True, slots=True)
class Contender:
    """A method with what was tuned for it.

    `strategy` is the one of co2sim whose schedule it has. `lines` are the names, or how they begin,
    of its lines in convergence.csv; the best of them gives lr and outer step in the place of these.
    Where co2sim chooses a number it is a pattern that finds tau or the delay; the nearest counts.
    `peer` is the method of torch or torchft, if it is one of those that `realrun train` has not.
    """

    name: str
    strategy: str
    lines: str
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
        return not self.lines


_LOCAL, _DILOCO = f"local_sgd:tau={TAU}", f"diloco:tau={TAU}"
_NESTEROV = "momentum=0.5,lr=1"
CONTENDERS = (
    Contender("torch DDP", "ddp", "AdamW-DDP", 1e-2),
    Contender("torch post-local SGD", _LOCAL, "LocalSGD 12", 1e-2, peer="torch post-local SGD"),
    Contender("LocalSGD", _LOCAL, "LocalSGD 12", 1e-2),
    Contender("SlowMo", f"slowmo:tau={TAU}", "SlowMo 12", 5e-3, "momentum=0.2,lr=1"),
    Contender("DiLoCo", _DILOCO, "DiLoCo 12", 5e-3, _NESTEROV),
    Contender(
        "Streaming DiLoCo",
        f"{_DILOCO},fragments=3,delay=4",
        "Streaming DiLoCo delay 4, tau 12",
        5e-3,
        _NESTEROV,
    ),
    Contender("torchft LocalSGD", _LOCAL, "LocalSGD 12", 1e-2, peer="torchft LocalSGD"),
    Contender("torchft DiLoCo", _DILOCO, "DiLoCo 12", 5e-3, _NESTEROV, peer="torchft DiLoCo"),
    Contender(
        "CO2 as published",
        f"co2.published:tau={TAU}",
        "CO2 12, ",
        1e-2,
        "momentum=0,lr=0.5,gap=gap_aware",
    ),
    Contender(
        "CO2, delay auto",
        f"co2:tau={TAU},delay=auto",
        rf"CO2 delay (\d+), tau {TAU}(?:, \d+ fragments)?",
        1e-2,
        "keep=0.5,predict=0.5",
    ),
    Contender(
        "CO2, tau and delay auto",
        "co2:tau=auto,delay=auto",
        r"CO2 delay \d+, tau (\d+)(?:, \d+ fragments)?",
        1e-2,
        "keep=1",
    ),
)
"""With the learning rates and outer steps to take where convergence.csv has none.

Those of Streaming DiLoCo are DiLoCo's, CO2 with a delay has the other CO2's learning rate and a
gain of 1; in short rounds all progress is kept.
"""


REFERENCE = "CO2 as published"
"""The one that is expected to end with the highest loss."""


def contenders(
    only: Collection[str], results: Path, choose: Callable[[Contender], tuple[Contender, int]]
) -> list[Contender]:
    """What is compared, with the best line of convergence.csv for each.

    `only`: of these names, if there are any. `choose` gives a contender with a number for tau, and
    the number that its lines are compared by.
    """
    path = results / "convergence.csv"
    frame = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()
    chosen = [one for one in CONTENDERS if not only or one.name in only]
    return [_tuned(*choose(entry), frame) for entry in chosen if installed(entry)]


def installed(entry: Contender) -> bool:
    """Whether it can be run here."""
    return not entry.peer.startswith("torchft") or find_spec("torchft") is not None


def _tuned(entry: Contender, number: int, frame: pd.DataFrame) -> Contender:
    lr, outer = entry.lr, entry.outer
    if len(frame):
        if entry.measures_delay:
            found = frame["configuration"].str.extract(f"^{entry.lines}$")[0].dropna()
            lines = frame.loc[(found.astype(int) - number).abs().sort_values(kind="stable").index]
        else:
            lines = frame[frame["configuration"].str.startswith(entry.lines)].sort_values("loss")
        if len(lines):
            lr, outer = float(lines.iloc[0]["lr"]), str(lines.iloc[0]["outer"])
    if entry.measures_delay:  # what is kept is part of the strategy
        kept, outer = split(outer)
        return replace(entry, strategy=f"{entry.strategy},{kept}", lr=lr, outer=outer)
    return replace(entry, lr=lr, outer=outer)


NEVER = 10_000
"""Steps of a round that does not end."""

_STEPS_ALONE = f"local_sgd:tau={NEVER}"
ALONE = Contender("calibration: nothing is sent", _STEPS_ALONE, "", 5e-3)
IN_DDP = Contender("calibration: DDP that sends nothing", _STEPS_ALONE, "", 5e-3, peer="DDP alone")
SENDING = Contender("calibration: always sending", _STEPS_ALONE, "", 5e-3, peer="sending")
AVERAGING = Contender("calibration: an average after each step", "local_sgd:tau=1", "", 5e-3)
SMALL_AVERAGES = Contender(
    "calibration: messages of torchft", _LOCAL, "", 5e-3, peer="torchft small"
)
CALIBRATIONS = (ALONE, IN_DDP, SENDING, AVERAGING)
"""How long a local step takes where the ranks share the cores: the bare model's, torch's, and while
the network is busy; and a blocking average. `SMALL_AVERAGES` is for torchft's LocalSGD: as many
tensors as the model has, so small that their bytes take no time (Gloo sends no empty segment)."""


def calibrations(chosen: Collection[Contender]) -> list[Contender]:
    """What is measured before these run, in this order."""
    small = [SMALL_AVERAGES] if any(entry.tensor_by_tensor for entry in chosen) else []
    return list(dict.fromkeys([*CALIBRATIONS, *small, *map(alone, chosen)]))


def alone(entry: Contender) -> Contender:
    """The calibration whose step is the local step of a contender.

    CO2 with a delay, whose rounds may be short, runs itself, with workers that do not average.
    """
    if entry.in_ddp:
        return IN_DDP
    if entry.measures_delay:
        return replace(entry, name=f"calibration: {entry.name}, alone", lines="", peer="alone")
    return ALONE


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


def case(place: Place, strategy: str | Strategy, found: Calibrated) -> Case:
    """The case on a GPU, and on a network, as they were found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stated.toml"
        path.write_text(stated_cluster(Lab(place.nodes, 1, place.rate)))
        cluster = load_cluster(str(path)).value
    model = GPTS[place.size].model()
    job = Workload(model, place.samples, precision=DType.FP32, recompute="none")
    speed = job.hardware_flops_per_sample * place.samples / found.local_step
    gpu = GPU("calibrated", 1e12, _ENOUGH, {"fp32": speed}, ((1.0, 1.0),))
    inter = replace(cluster.inter, efficiency=cluster.inter.efficiency * found.efficiency)
    cluster = replace(cluster, gpu=gpu, inter=inter, communicators="stream")
    return Case(
        cluster=replace(cluster, interference=found.interference),
        model=model,
        strategy=strategy,
        micro_batch=place.samples,
        precision="fp32",
        recompute="none",
    )


@cache
def predicted_step(place: Place, strategy: str | Strategy, found: Calibrated) -> Seconds:
    """Seconds of a step, communication included.

    The cores prepare a message while the network carries the one before: the slower one counts.
    """
    return max(run(case(place, strategy, found)).step_time_s, found.messages)


def network_efficiency(place: Place, local_step: Seconds, averaging: Seconds) -> float:
    """What the network attains of its stated rate, where a step with an average takes `averaging`.

    At most 1. The model's average, one after each step, takes what is beyond the local step.
    """
    stated = predicted_step(place, "local_sgd:tau=1", Calibrated(local_step)) - local_step
    return min(1.0, stated / max(stated, averaging - local_step))


def shortest_round(place: Place, strategy: str, local_step: Seconds) -> int:
    """For tau=auto: the steps of the shortest round that hides its average."""
    return round_steps(with_delay(place, strategy, local_step))


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


FREE = "without a lab"
RUNS = "time_to_loss-runs.csv"
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs have in common: the model, where it is trained, and how long."""

    steps: int = 768
    every: int = 2 * TAU
    """Steps between validations; between two of them the loss is taken to fall evenly."""
    size: str = "mini"
    nodes: int = 4
    batch: int = 32
    seeds: tuple[int, ...] = SEEDS
    rates: tuple[str, ...] = ("100 Mbit/s", "1000 Mbit/s")
    only: tuple[str, ...] = ()
    target: float = 0.0
    """The loss to reach; 0: see `target_of`."""
    pace: Seconds = 0.1
    """What a local step takes at least."""

    @classmethod
    def small(cls) -> "Plan":
        """A trial of seconds, too short to mean anything."""
        names = ("torch post-local SGD", "CO2, delay auto")
        return cls(2 * TAU, TAU, "tiny", 2, 8, (0,), ("100 Mbit/s",), names, pace=0.01)

    @property
    def label(self) -> str:
        """Runs of other plans do not count."""
        target = f" to {self.target}" if self.target else ""
        pace = f" {self.pace * 1e3:g} ms a step"
        return f"{self.size}-{self.steps}x{self.batch}-{self.nodes} nodes{pace}{target}"

    def place(self, rate: str) -> Place:
        """The lab of a rate, as co2sim has it."""
        return Place(self.nodes, rate, self.size, self.batch // self.nodes)


class Ask(NamedTuple):
    """One run. `where` is a rate, or FREE; `delay` is what co2sim says instead of measuring it."""

    entry: Contender
    where: str
    seed: int
    delay: int = 0

    def key(self, plan: Plan) -> tuple[str, ...]:
        """What tells it from other runs."""
        entry = self.entry
        texts = (entry.name, entry.strategy, f"{entry.lr:g}", entry.outer)
        return (plan.label, self.where, *texts, str(self.delay), str(self.seed))


KEY = ("plan", "where", "name", "strategy", "lr", "outer", "delay", "seed")
_NUMBERS = (
    *("local_step_s", "interference", "efficiency", "predicted_step_s", "step_s"),
    *("waited", "rounds", "used_delay", "late_steps"),
)


def step_of(plan: Plan, known: Known, calibration: Contender, where: str, seed: int) -> float:
    """Seconds of a step as calibrated there."""
    return float(known[Ask(calibration, where, seed).key(plan)]["step_s"])


def calibrated(plan: Plan, known: Known, ask: Ask) -> Calibrated:
    """For a run: what was measured there just before."""
    own, bare, sending, averaging = (
        step_of(plan, known, one, ask.where, ask.seed)
        for one in (alone(ask.entry), ALONE, SENDING, AVERAGING)
    )
    place = plan.place(ask.where)
    efficiency, messages = network_efficiency(place, bare, averaging), 0.0
    if ask.entry.tensor_by_tensor:
        messages = step_of(plan, known, SMALL_AVERAGES, ask.where, ask.seed)
    return Calibrated(own, max(0.0, sending / bare - 1), efficiency, messages)


def delay_at(plan: Plan, rate: str, entry: Contender) -> int:
    """The delay that co2sim finds hidden; 0 where training does not choose one."""
    chosen = settled(plan, rate, entry)
    return int(chosen.delay or 0) if isinstance(chosen, CO2) else 0


def settled(plan: Plan, rate: str, entry: Contender) -> str | CO2:
    """The strategy to simulate, with a delay for local steps at the pace."""
    if not entry.measures_delay:
        return entry.strategy
    return with_delay(plan.place(rate), entry.strategy, plan.pace)


def tuned(plan: Plan, results: Path, rate: str) -> list[Contender]:
    """What is compared at a rate, with co2sim's tau where it chooses it."""

    def choose(entry: Contender) -> tuple[Contender, int]:
        if "tau=auto" not in entry.strategy:
            return entry, delay_at(plan, rate, entry)
        tau = shortest_round(plan.place(rate), entry.strategy, plan.pace)
        return replace(entry, strategy=entry.strategy.replace("tau=auto", f"tau={tau}")), tau

    return contenders(plan.only, results, choose)


def free_asks(plan: Plan, results: Path) -> Iterator[Ask]:
    """Runs without a lab, the reference first; where rates ask for the same, one serves both."""
    asks = [
        free_ask(plan, Ask(entry, rate, seed))
        for seed in plan.seeds
        for rate in plan.rates
        for entry in tuned(plan, results, rate)
    ]
    yield from sorted(dict.fromkeys(asks), key=lambda ask: ask.entry.name != REFERENCE)


def free_ask(plan: Plan, ask: Ask) -> Ask:
    """The run without a lab that tells how many steps a run in one needs."""
    return Ask(ask.entry, FREE, ask.seed, delay_at(plan, ask.where, ask.entry))


def lab_asks(plan: Plan, known: Known, results: Path, rate: str) -> Iterator[Ask]:
    """Runs at a rate, interleaved: all contenders with a seed, then with the next one."""
    chosen = tuned(plan, results, rate)
    for seed in plan.seeds:
        for entry in calibrations(chosen):
            yield Ask(entry, rate, seed)
        for ask in (Ask(entry, rate, seed) for entry in chosen):
            if not known[free_ask(plan, ask).key(plan)]["error"]:
                yield ask


def next_run(plan: Plan, known: Known, results: Path, where: str) -> Ask | None:
    """The next run that is missing there; None when all are there."""
    asks = free_asks(plan, results) if where == FREE else None
    if asks is None:
        asks = lab_asks(plan, known, results, where)
    return next((ask for ask in asks if ask.key(plan) not in known), None)


Point = tuple[float, float, float]
"""Step, seconds, validation loss."""


def curve(row: Mapping[str, Any]) -> list[Point]:
    """The validations of a run."""
    return [(float(step), float(s), float(loss)) for step, s, loss in json.loads(row["curve"])]


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


def enough(plan: Plan, known: Known, results: Path) -> float | None:
    """The loss at which a run without a lab may end: that of the reference, once this is known."""
    if plan.target:
        return plan.target
    asks = [ask for ask in free_asks(plan, results) if ask.entry.name == REFERENCE]
    rows = [row for ask in asks if (row := known.get(ask.key(plan))) and not row["error"]]
    return max(curve(row)[-1][2] for row in rows) if rows and len(rows) == len(asks) else None


def target_of(plan: Plan, known: Known, results: Path) -> float:
    """The loss to reach: the given one, else the worst with which a run without a lab ends.

    That is what `enough` says, or more, if a run to the last step does not come as low.
    """
    asks = [ask for ask in free_asks(plan, results) if not ask.entry.calibrates]
    curves = [curve(row) for ask in asks if not (row := known[ask.key(plan)])["error"]]
    return plan.target or max(points[-1][2] for points in curves)


def read(out: Path) -> Known:
    """Finished runs."""
    return reports.read(out / RUNS, KEY, _NUMBERS)


def append(out: Path, row: Mapping[str, Any]) -> None:
    """Add a finished run."""
    reports.append(out / RUNS, row, (*KEY, *_NUMBERS, "curve", "error"))
