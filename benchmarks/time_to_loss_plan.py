"""The plan of `time_to_loss.py`: who is compared, and which runs are missing, given what is there.

Needs no torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from time_to_loss_contenders import (
    ALONE,
    AVERAGING,
    REFERENCE,
    SENDING,
    SMALL_AVERAGES,
    TAU,
    Contender,
    alone,
    calibrations,
    contenders,
)
from time_to_loss_predict import (
    Calibrated,
    Place,
    network_efficiency,
    shortest_round,
    with_delay,
)

from co2sim.strategies.co2 import CO2
from co2sim.units import Seconds

FREE = "without a lab"
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
        """The lab of a rate, as co2sim is told of it."""
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

Row = dict[str, Any]
Known = dict[tuple[str, ...], Row]
"""Rows of finished runs by their key."""


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
    path = out / "time_to_loss-runs.csv"
    if not path.exists():
        return {}
    frame = pd.read_csv(path, dtype=dict.fromkeys(KEY, str), keep_default_na=False)
    for name in _NUMBERS:
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    rows = frame.to_dict("records")
    return {tuple(row[name] for name in KEY): dict(row) for row in rows}


_NUMBERS = (
    "local_step_s",
    "interference",
    "efficiency",
    "predicted_step_s",
    "step_s",
    "waited",
    "rounds",
    "used_delay",
    "late_steps",
)
_COLUMNS = (*KEY, *_NUMBERS, "curve", "error")


def append(out: Path, row: Mapping[str, Any]) -> None:
    """Add a finished run."""
    path = out / "time_to_loss-runs.csv"
    frame = pd.DataFrame([[row.get(name, "") for name in _COLUMNS]], columns=list(_COLUMNS))
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)
