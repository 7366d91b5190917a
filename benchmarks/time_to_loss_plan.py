"""The plan of `time_to_loss.py`: who is compared, and which runs are missing, given what is there.

Needs no torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from time_to_loss_predict import Place, hidden_delay

FREE = "without a lab"
TAU = 12
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs have in common: the model, where it is trained, and how long."""

    steps: int = 768
    every: int = TAU
    """Steps between validations: the resolution of "the step at which the loss is reached"."""
    size: str = "mini"
    nodes: int = 4
    batch: int = 32
    seeds: tuple[int, ...] = SEEDS
    rates: tuple[str, ...] = ("100 Mbit/s", "1000 Mbit/s")
    only: tuple[str, ...] = ()
    target: float = 0.0
    """The loss to reach; 0: the worst with which one of the runs without a lab ends."""

    @classmethod
    def small(cls) -> "Plan":
        """A trial of seconds, too short to mean anything."""
        names = ("torch post-local SGD", "CO2, delay auto")
        return cls(24, TAU, "tiny", 2, 8, (0,), ("100 Mbit/s",), names)

    @property
    def label(self) -> str:
        """Runs of other plans do not count."""
        return f"{self.size}-{self.steps}x{self.batch}-{self.nodes} nodes"

    def place(self, rate: str) -> Place:
        """The lab of a rate, as co2sim is told of it."""
        return Place(self.nodes, rate, self.size, self.batch // self.nodes)


@dataclass(frozen=True, slots=True)
class Contender:
    """A method with what was tuned for it.

    `strategy` is the one of co2sim whose schedule it has. `lines` are the names, or how they begin,
    of its lines in convergence.csv; the best of them gives lr and outer step in the place of these.
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
        "CO2 as published", f"co2:tau={TAU}", "CO2 12, ", 1e-2, "momentum=0,lr=0.5,gap=gap_aware"
    ),
    Contender("CO2, delay auto", f"co2:tau={TAU},delay=auto", "CO2 delay ", 1e-2),
)
"""With the learning rates and outer steps to take where convergence.csv has none.

Those of Streaming DiLoCo are DiLoCo's, those of CO2 with a delay the other CO2's learning rate, a
gain of 1, and what `_kept` says.
"""


def _kept(delay: int) -> str:
    """What CO2 keeps and predicts where no study says it: all in short delays, then half."""
    return "keep=1" if delay <= TAU // 6 else "keep=0.5,predict=0.5"


def contenders(plan: Plan, results: Path, delay: int) -> list[Contender]:
    """What is compared, with the best line of convergence.csv for each; `delay` is CO2's."""
    path = results / "convergence.csv"
    frame = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()
    chosen = [one for one in CONTENDERS if not plan.only or one.name in plan.only]
    return [_tuned(entry, frame, delay) for entry in chosen if installed(entry)]


def installed(entry: Contender) -> bool:
    """Whether it can be run here."""
    return not entry.peer.startswith("torchft") or find_spec("torchft") is not None


def _tuned(entry: Contender, frame: pd.DataFrame, delay: int) -> Contender:
    outer = _kept(delay) if entry.measures_delay else entry.outer
    lr = entry.lr
    if len(frame):
        lines = frame[frame["configuration"].str.startswith(entry.lines)].sort_values("loss")
        if entry.measures_delay:
            found = lines["configuration"].str.extract(rf"^CO2 delay (\d+), tau {TAU}$")[0]
            lines = lines[found.notna()]
            away = (found.dropna().astype(int) - delay).abs()
            lines = lines.loc[away.sort_values(kind="stable").index]
        if len(lines):
            lr, outer = float(lines.iloc[0]["lr"]), str(lines.iloc[0]["outer"])
    if entry.measures_delay:  # what is kept is part of the strategy
        return replace(entry, strategy=f"{entry.strategy},{outer}", lr=lr)
    return replace(entry, lr=lr, outer=outer)


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

NEVER = 10_000
"""Steps of a round that does not end."""

_STEPS_ALONE = f"local_sgd:tau={NEVER}"
ALONE = Contender("calibration: nothing is sent", _STEPS_ALONE, "", 5e-3)
IN_DDP = Contender("calibration: DDP that sends nothing", _STEPS_ALONE, "", 5e-3, peer="DDP alone")
SENDING = Contender("calibration: always sending", _STEPS_ALONE, "", 5e-3, peer="sending")
CALIBRATIONS = (ALONE, IN_DDP, SENDING)
"""How long local steps take where the ranks share the cores: the bare model's, torch's, and while
the network is busy all the time."""


def step_of(plan: Plan, known: Known, calibration: Contender, where: str, seed: int) -> float:
    """Seconds of a step as calibrated there."""
    return float(known[Ask(calibration, where, seed).key(plan)]["step_s"])


def calibrated(plan: Plan, known: Known, ask: Ask) -> tuple[float, float]:
    """For a run: seconds of a local step, and the share by which sending slows it down."""
    kind = IN_DDP if ask.entry.in_ddp else ALONE
    alone, sending = (step_of(plan, known, c, ask.where, ask.seed) for c in (ALONE, SENDING))
    return step_of(plan, known, kind, ask.where, ask.seed), max(0.0, sending / alone - 1)


def delay_at(plan: Plan, known: Known, rate: str) -> int:
    """The delay that co2sim finds hidden, in local steps as they were without a lab."""
    return hidden_delay(plan.place(rate), step_of(plan, known, ALONE, FREE, plan.seeds[0]), TAU)


def free_asks(plan: Plan, known: Known, results: Path) -> Iterator[Ask]:
    """Runs without a lab, seed by seed; where rates ask for the same, one serves both."""
    calibrating = Ask(ALONE, FREE, plan.seeds[0])
    yield calibrating
    if calibrating.key(plan) not in known:
        return
    delays = [delay_at(plan, known, rate) for rate in plan.rates]
    asks = [
        free_ask(entry, seed, delay)
        for seed in plan.seeds
        for delay in delays
        for entry in contenders(plan, results, delay)
    ]
    yield from dict.fromkeys(asks)


def free_ask(entry: Contender, seed: int, delay: int) -> Ask:
    """The run without a lab that tells how many steps a contender needs."""
    return Ask(entry, FREE, seed, delay if entry.measures_delay else 0)


def lab_asks(plan: Plan, known: Known, results: Path, rate: str) -> Iterator[Ask]:
    """Runs at a rate, interleaved: all contenders with a seed, then with the next one."""
    delay = delay_at(plan, known, rate)
    chosen = contenders(plan, results, delay)
    for seed in plan.seeds:
        for entry in CALIBRATIONS:
            yield Ask(entry, rate, seed)
        for entry in chosen:
            if not known[free_ask(entry, seed, delay).key(plan)]["error"]:
                yield Ask(entry, rate, seed)


def next_run(plan: Plan, known: Known, results: Path, where: str) -> Ask | None:
    """The next run that is missing there; None when all are there."""
    asks = free_asks(plan, known, results) if where == FREE else None
    if asks is None:
        asks = lab_asks(plan, known, results, where)
    return next((ask for ask in asks if ask.key(plan) not in known), None)


Point = tuple[int, float, float]
"""Step, seconds, validation loss."""


def curve(row: Mapping[str, Any]) -> list[Point]:
    """The validations of a run."""
    return [(int(step), float(s), float(loss)) for step, s, loss in json.loads(row["curve"])]


def reached(points: Sequence[Point], target: float) -> Point | None:
    """The first validation at which the loss is as low."""
    return next((point for point in points if point[2] <= target), None)


def target_of(plan: Plan, known: Known, results: Path) -> float:
    """The loss to reach: the given one, else the worst with which a run without a lab ends."""
    asks = [ask for ask in free_asks(plan, known, results) if not ask.entry.calibrates]
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
    "predicted_step_s",
    "step_s",
    "waited",
    "rounds",
    "used_delay",
)
_COLUMNS = (*KEY, *_NUMBERS, "curve", "error")


def append(out: Path, row: Mapping[str, Any]) -> None:
    """Add a finished run."""
    path = out / "time_to_loss-runs.csv"
    frame = pd.DataFrame([[row.get(name, "") for name in _COLUMNS]], columns=list(_COLUMNS))
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)
